"""Drafting with a multi-token-prediction head: a draft model, and the drafter of static trees."""

from stree_jax import HybridLM
from stree_jax.array_types import Array, Float, Float32
from stree_jax.decoding import HeadModel
from stree_jax.decoding.drafters import HeadDrafter
from stree_jax.extensions.mtp.head import MtpHead
from stree_jax.heads import check_fits
from stree_jax.models import check_on_one_device, output_logits


class MtpModel(HeadModel):
    """A draft model: a head with its target's embedding and output head, on one device.

    `MtpDrafter` fills static trees. `BeamDrafter(MtpModel(target, head))` and
    `DynamicDrafter(MtpModel(target, head))` choose the shape of theirs.

    Raises:
        ValueError: a head of another width or dtype.
    """

    def __init__(self, target: HybridLM, head: MtpHead):
        check_on_one_device(target, "MtpModel")
        width, dtype = (head.config.d_model, target.config.d_model), (head.dtype, target.dtype)
        check_fits("the head", "load it with load_mtp(path, target)", width=width, dtype=dtype)
        self.head = head
        self.embedding = target.embedding
        self.output_head = target.head  # None: tied to the embedding
        self.config = target.config

    def check_target(self, target: HybridLM) -> None:
        check_on_one_device(target, "a multi-token-prediction head")
        check_fits(
            "the model of the head",
            "make the drafter with the target that generate gets",
            embedding=(self.embedding.shape, target.embedding.shape),
            tied=(self.output_head is None, target.head is None),
        )

    def logits(self, outputs: Float[Array, "B Q M"]) -> Float32[Array, "B Q V"]:
        """See `HeadModel`: by the target's output head."""
        weights = self.embedding if self.output_head is None else self.output_head
        kernels = self.head.implementation
        logits = output_logits(outputs, weights, self.config.logits_multiplier, kernels)
        return logits[..., : self.config.vocab_size]


class MtpDrafter(HeadDrafter):
    """A multi-token-prediction head that fills a static tree level by level.

    The head reads the prompt's states through `read`, so that the first step drafts; only a prompt
    of a single token has none yet. Leaves are never run, and drafts leave nothing behind.

    `child_sampling` is that of `ModelDrafter`, and all else that of `MtpModel`.
    """

    draft_model_of = MtpModel
