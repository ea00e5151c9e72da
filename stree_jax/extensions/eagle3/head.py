"""An EAGLE-3 head: one Llama layer on states of three inner layers of a model.

EAGLE-3 (Li et al., 2025, arXiv:2503.01840), in the layout of the heads for Nemotron-3-Nano:

    f_p = fc [s1_p ; s2_p ; s3_p]               s: the target's residual stream after three layers
    x = attention([norm(embedding of t_{p+1}) ; norm(f_p)]) + f_p
    g_p = x + mlp(norm(x));   logits = head(norm(g_p)), of t_{p+2}

The head has its own output head, over some of the target's tokens; the others have
probability 0. The next draft's input is (draft token, g_p): before the last norm, unlike the state
of a multi-token-prediction head. Attention comes first, so an entry's keys and values depend on
(t_{p+1}, f_p) and its position alone.
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from stree_jax import AttentionConfig, MlpConfig
from stree_jax.array_types import Array, Float, Float32
from stree_jax.checks import require, require_integer
from stree_jax.models import DraftHead, require_inner_layers


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """The config of a head.

    Attributes:
        d_model: width of the target and of the head.
        vocab_size: tokens of the target.
        draft_vocab_size: tokens that the head can draft.
        inner_layers: the numbers of layers of the target after which its states are taken,
            ascending.
        attention: the attention layer, whose input is twice as wide (`input_multiple=2`).
        mlp: the MLP after it.
        norm_eps: epsilon of all norms.
        norm_before_residual: whether the states are normed before they are added, too.
        has_embedding: whether the head has its own embedding.
    """

    d_model: int
    vocab_size: int
    draft_vocab_size: int
    inner_layers: tuple[int, ...]
    attention: AttentionConfig
    mlp: MlpConfig
    norm_eps: float = 1e-5
    norm_before_residual: bool = False
    has_embedding: bool = False

    def __post_init__(self) -> None:
        for name in ("d_model", "vocab_size", "draft_vocab_size"):
            require_integer(self, name, 1)
        require_inner_layers(self.inner_layers)
        require(
            self.draft_vocab_size <= self.vocab_size,
            f"draft_vocab_size = {self.draft_vocab_size} is above vocab_size = {self.vocab_size}",
        )
        attention = self.attention
        require(
            attention.input_multiple == 2
            and attention.window is None
            and not (attention.conv_width or attention.mlp_dim),
            "attention of an EAGLE-3 head has input_multiple=2 and no window, convolution or"
            f" branch, got {attention!r:.200}",
        )


class Eagle3Head(DraftHead):
    """A head with its own output head, and perhaps an embedding.

    Its arguments are those of `DraftHead`, with an `Eagle3Config`.
    """

    def make(self, rngs: nnx.Rngs, implementation: str | None) -> None:
        config = self.config
        width, layers = config.d_model, len(config.inner_layers)
        self.fc = self.linear(layers * width, width, rngs)
        self.embedding = (
            self.table(config.vocab_size, width, rngs) if config.has_embedding else None
        )
        self.attention = self.layer(config.attention, rngs, implementation)
        self.feed_forward = self.layer(config.mlp, rngs, implementation)
        self.output_head = self.table(config.draft_vocab_size, width, rngs)
        # The target's token for each of the head's; float32 holds such integers exactly.
        self.tokens = nnx.Param(jnp.arange(config.draft_vocab_size, dtype=jnp.float32))

    def joined(self, embedded: Array, states: Array) -> tuple[Array, Array]:
        """See `DraftHead`; the states are inner ones of the target after `fc`, or outputs."""
        normed = self.norm(states, self.hidden_norm_scale)
        both = [self.norm(embedded, self.embedding_norm_scale), normed]
        residual = normed if self.config.norm_before_residual else states
        return jnp.concatenate(both, axis=-1).astype(self.activation_dtype), residual

    def logits(self, outputs: Float[Array, "B Q M"]) -> Float32[Array, "B Q V"]:
        """Returns logits over the target's tokens; minus infinity for absent ones."""
        normed = self.norm(outputs, self.final_norm_scale)
        head_logits = self.output_head.product(
            normed, wide=True, implementation=self.implementation
        )
        shape = (*head_logits.shape[:2], self.config.vocab_size)
        places = self.tokens[...].astype(jnp.int32)
        return jnp.full(shape, -jnp.inf, jnp.float32).at[..., places].set(head_logits)
