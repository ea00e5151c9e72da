"""Drafting with an EAGLE-3 head: a draft model, and the drafter of static trees."""

from stree_jax import HybridLM
from stree_jax.array_types import Array, Float, Float32, Int
from stree_jax.decoding import HeadModel
from stree_jax.decoding.drafters import HeadDrafter
from stree_jax.extensions.eagle3.head import Eagle3Head
from stree_jax.heads import check_head


class Eagle3Model(HeadModel):
    """A draft model: a head with the embedding of its target, on one device.

    Raises:
        ValueError: a head of another width, vocabulary or dtype, or on layers that the target does
            not have.
    """

    def __init__(self, target: HybridLM, head: Eagle3Head):
        self.head = head
        self.embedding = target.embedding if head.embedding is None else None
        self.config = target.config
        self.inner_layers: tuple[int, ...] = head.config.inner_layers
        self.check_target(target)

    def check_target(self, target: HybridLM) -> None:
        check_head("an EAGLE-3 head", self.head, target)

    def states(self, hidden: Float[Array, "B T _"]) -> Float[Array, "B T M"]:
        """See `HeadModel`: inner layers' states follow the target's last ones."""
        return self.head.fc(hidden[..., self.config.d_model :])

    def embedded(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
        """Embeddings: the target's, or the head's own."""
        embedding = self.head.embedding
        return super().embedded(tokens) if embedding is None else embedding.rows(tokens)

    def logits(self, outputs: Float[Array, "B Q M"]) -> Float32[Array, "B Q V"]:
        return self.head.logits(outputs)


class Eagle3Drafter(HeadDrafter):
    """Fills a static tree level by level by an EAGLE-3 head.

    `child_sampling` is that of `ModelDrafter`, and all else that of `Eagle3Model`.
    """

    draft_model_of = Eagle3Model
