"""A multi-token-prediction head: one attention layer and one MLP or mixture on a model's states.

The head of Nemotron-3 (Super, Ultra, 3.5 Lightning), which its checkpoints store under `mtp.`:

    x = in_proj [norm(embedding of t_{p+1}) ; norm(h_p)]
    x = x + attention(norm(x));   x = x + experts(norm(x))
    g_p = norm(x)

h_p is the target's state after token t_p *after* its final norm, and the target's output head maps
g_p to the logits of t_{p+2}. Further tokens come from the same head: the next one's input is
(draft token, g_p). Nothing in it depends on positions.

Attention comes first, so keys and values of an entry depend on (t_{p+1}, h_p) alone: reading a text
takes two small products a token, neither attention nor experts.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels import KVCache, NodeKV
from stree_jax.array_types import Array, Float
from stree_jax.checks import require, require_integer, require_types
from stree_jax.models.attention import AttentionConfig
from stree_jax.models.config import build_config
from stree_jax.models.draft_head import DraftHead
from stree_jax.models.layer import LayerConfig, NoCache, layer_kinds
from stree_jax.models.layers import linear
from stree_jax.tree import Tree


@dataclasses.dataclass(frozen=True)
class MtpConfig:
    """The config of a head.

    Attributes:
        d_model: width of the target.
        attention: the attention layer, without rotation, biases, convolution or window.
        feed_forward: the layer after it, an MLP or a mixture of experts.
        norm_eps: epsilon of all norms.
    """

    d_model: int
    attention: AttentionConfig
    feed_forward: LayerConfig
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        require_integer(self, "d_model", 1)
        attention = self.attention
        require(
            isinstance(attention, AttentionConfig)
            and attention
            == AttentionConfig(
                attention.num_heads,
                attention.num_kv_heads,
                attention.head_dim,
                scale=attention.scale,
            ),
            "attention of a head is AttentionConfig(num_heads, num_kv_heads, head_dim), without"
            f" rotation and other options, got {attention!r:.200}",
        )
        require(
            isinstance(self.feed_forward, LayerConfig)
            and not self.feed_forward.has_memory
            and not self.feed_forward.is_shared,
            f"feed_forward of a head is an MlpConfig or a MoeConfig, got {self.feed_forward!r:.80}",
        )
        require_types(type(self), vars(self))
        require(self.norm_eps > 0, f"norm_eps must be above 0, got {self.norm_eps}")

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON values, for `from_dict`."""
        values = dataclasses.asdict(self)
        return values | {"feed_forward": {"kind": self.feed_forward.kind, **values["feed_forward"]}}

    @classmethod
    def from_dict(cls, values: Any) -> "MtpConfig":
        """The inverse of `to_dict`.

        Raises:
            ValueError: a field is unknown or missing, or a value is invalid.
        """
        require(isinstance(values, Mapping), f"a head is a table of fields, got {values!r:.80}")
        feed_forward: Any = values.get("feed_forward")
        require(isinstance(feed_forward, Mapping), f"feed_forward is {feed_forward!r:.80}")
        kind, known = str(feed_forward.get("kind")), layer_kinds()
        require(kind in known, f"unknown feed_forward {kind!r:.80}")
        own = {name: value for name, value in feed_forward.items() if name != "kind"}
        made: dict[str, Any] = {
            "attention": build_config(AttentionConfig, values.get("attention")),
            "feed_forward": build_config(known[kind], own),
        }
        return build_config(cls, {**values, **made})


class MtpHead(DraftHead):
    """A head; it holds neither embedding nor output head, which are the target's.

    Args:
        config: sizes of the head.
        dtype: dtype of weights and activations, the target's.
        rngs: random streams for initialisation.
        implementation: kernel implementation, see `pallas_kernels.dispatch`.
    """

    def __init__(
        self,
        config: MtpConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        implementation: str | None = None,
    ):
        super().__init__(config, dtype)
        width = config.d_model
        options: dict[str, Any] = dict(rngs=rngs, implementation=implementation)
        self.embedding_norm_scale = self._scale()
        self.hidden_norm_scale = self._scale()
        self.in_proj = linear(2 * width, width, bias=False, dtype=dtype, rngs=rngs)
        self.attention_norm_scale = self._scale()
        self.attention = self._built(config.attention, 2**-0.5, **options)
        self.feed_forward_norm_scale = self._scale()
        self.feed_forward = self._built(config.feed_forward, 2**-0.5, **options)
        self.final_norm_scale = self._scale()

    def entries(self, embedded: Float[Array, "B T M"], hidden: Float[Array, "B T M"]) -> NodeKV:
        """Keys and values of the entries (token, state before it).

        Args:
            embedded: the target's embeddings of the tokens.
            hidden: the target's states before them, after its final norm.
        """
        with jax.named_scope("mtp_entries"):
            config = self.config.attention
            normed = self._norm(self._joined(embedded, hidden), self.attention_norm_scale)
            own = self.attention.in_proj.kernel.cut(config.projected_sizes[0])
            projected = own.wide_matmul(normed).astype(self.activation_dtype)
            shape = (*projected.shape[:2], 2, config.num_kv_heads, config.head_dim)
            both = projected.reshape(shape)
            return NodeKV(both[:, :, 0], both[:, :, 1])

    def tree(
        self,
        embedded: Float[Array, "B Q M"],
        hidden: Float[Array, "B Q M"],
        tree: Tree,
        cache: KVCache,
        prefix: NodeKV | None = None,
    ) -> tuple[Float[Array, "B Q M"], NodeKV]:
        """Runs the last Q nodes of a tree, each an entry after the cache.

        Args:
            embedded: the target's embeddings of the nodes' tokens.
            hidden: for the root the target's state before it; for others the head's output at the
                parent.
            tree: the tree of all N nodes so far.
            cache: the entries before the root.
            prefix: keys and values of the first `N - Q` nodes; None if `Q == N`.

        Returns:
            Outputs of the head after its final norm, and keys and values of all nodes.
        """
        with jax.named_scope("mtp_head"):
            x = self._joined(embedded, hidden)
            y, kv = self._attend(self._norm(x, self.attention_norm_scale), tree, cache, prefix)
            return self._output(x + y), kv

    def _joined(self, embedded: Array, hidden: Array) -> Array:
        parts = (
            self._norm(embedded, self.embedding_norm_scale),
            self._norm(hidden, self.hidden_norm_scale),
        )
        return self.in_proj(jnp.concatenate(parts, axis=-1).astype(self.activation_dtype))

    def _output(self, x: Array) -> Array:
        normed = self._norm(x, self.feed_forward_norm_scale)
        y, _, _ = self.feed_forward.tree(normed, None, {}, NoCache())
        return self._norm(x + y, self.final_norm_scale)
