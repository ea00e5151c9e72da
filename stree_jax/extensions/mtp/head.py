"""A multi-token-prediction head: one attention layer and one MLP or mixture on a model's states.

The head of Nemotron-3 (Super, Ultra, 3.5 Lightning), which its checkpoints store under `mtp.`:

    x = in_proj [norm(embedding of t_{p+1}) ; norm(h_p)]
    x = x + attention(norm(x));   x = x + experts(norm(x))
    g_p = norm(x)

h_p is the target's state after token t_p *after* its final norm, and the target's output head maps
g_p to the logits of t_{p+2}. Further tokens come from the same head: the next one's input is
(draft token, g_p). Nemotron's does not depend on positions. The heads of Qwen3-Next, Qwen3.5 and
Ling 3 are one more layer of their targets: Qwen's attention with rotation, norms of heads and a
gate, and an MLP or experts; Ling's latent attention and experts.
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from stree_jax import AttentionConfig, LatentAttentionConfig, LayerConfig
from stree_jax.array_types import Array
from stree_jax.checks import require, require_integer
from stree_jax.models import DraftHead

# Fields of `AttentionConfig` that heads have.
_OPTIONS = (
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "scale",
    "rotary_dim",
    "rope_theta",
    "rope_scaling",
    "qk_norm_eps",
    "output_gate",
)


@dataclasses.dataclass(frozen=True)
class MtpConfig:
    """The config of a head.

    Attributes:
        d_model: width of the target.
        attention: the attention layer, without biases, convolution, window or multipliers; or a
            latent attention.
        feed_forward: the layer after it, an MLP or a mixture of experts.
        norm_eps: epsilon of all norms.
        norm_float32: keep the scales of its norms in float32, see `ModelConfig`.
    """

    d_model: int
    attention: AttentionConfig | LatentAttentionConfig
    feed_forward: LayerConfig
    norm_eps: float = 1e-5
    norm_float32: bool = False

    def __post_init__(self) -> None:
        require_integer(self, "d_model", 1)
        attention = self.attention
        require(
            isinstance(attention, LatentAttentionConfig)
            or (
                isinstance(attention, AttentionConfig)
                and attention
                == AttentionConfig(**{name: getattr(attention, name) for name in _OPTIONS})
            ),
            "attention of a head is a LatentAttentionConfig, or an AttentionConfig with no options"
            f" but {', '.join(_OPTIONS)}, got {attention!r:.200}",
        )
        require(
            isinstance(self.feed_forward, LayerConfig)
            and not self.feed_forward.has_memory
            and not self.feed_forward.is_shared,
            f"feed_forward of a head is an MlpConfig or a MoeConfig, got {self.feed_forward!r:.80}",
        )
        require(self.norm_eps > 0, f"norm_eps must be above 0, got {self.norm_eps}")


class MtpHead(DraftHead):
    """A head, whose embedding and output head are the target's.

    Its arguments are those of `DraftHead`, with an `MtpConfig`.
    """

    def make(self, rngs: nnx.Rngs, implementation: str | None) -> None:
        width, options = self.config.d_model, (rngs, implementation, 2**-0.5)
        self.in_proj = self.linear(2 * width, width, rngs)
        self.attention_norm_scale = self.scale()
        self.attention = self.layer(self.config.attention, *options)
        self.feed_forward = self.layer(self.config.feed_forward, *options)

    def scale(self) -> nnx.Param:
        dtype = jnp.float32 if self.config.norm_float32 else self.dtype
        return nnx.Param(jnp.ones(self.config.d_model, dtype))

    def joined(self, embedded: Array, states: Array) -> tuple[Array, Array]:
        """See `DraftHead`; the states are normed ones of the target, or outputs."""
        parts = (
            self.norm(embedded, self.embedding_norm_scale),
            self.norm(states, self.hidden_norm_scale),
        )
        x = self.in_proj(jnp.concatenate(parts, axis=-1).astype(self.activation_dtype))
        return self.norm(x, self.attention_norm_scale), x

    def finished(self, outputs: Array) -> Array:
        """See `DraftHead`: after the final norm, for the target's output head."""
        return self.norm(outputs, self.final_norm_scale)
