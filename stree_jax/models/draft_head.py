"""The bases of heads that draft from a model's hidden states.

Of a head with an attention layer first, keys and values of an entry, a token and the state before
it, depend on these two alone: reading a text takes two small products a token.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels import KVCache, NodeKV, rms_norm
from pallas_kernels.numerics import total
from stree_jax.array_types import Array, Float, Int
from stree_jax.checks import require
from stree_jax.models.attention import AttentionCache, AttentionPending
from stree_jax.models.layer import LayerConfig, Nodes
from stree_jax.models.layers import Projection, linear
from stree_jax.models.lm import HybridLM
from stree_jax.models.matrices import Matrix
from stree_jax.tree import Tree


class TargetHead(nnx.Module):
    """The base of heads, whose config has `d_model` and `norm_eps`.

    Weights and activations have the target's dtype; activations of a packed head are float32.
    """

    hidden_norm_scale: nnx.Param
    final_norm_scale: nnx.Param
    scales: tuple[str, ...] = ("hidden_norm_scale", "final_norm_scale")  # of its norms

    def __init__(
        self,
        config: Any,
        *,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        implementation: str | None = None,
    ):
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.implementation = implementation
        for name in self.scales:
            setattr(self, name, self.scale())
        self.make(rngs, implementation)

    def make(self, rngs: nnx.Rngs, implementation: str | None) -> None:
        """Makes the layers and all other weights."""
        raise NotImplementedError

    def written(self) -> dict[str, Any]:
        """Returns the head's part of a native checkpoint's config.json; JSON values."""
        values = dataclasses.asdict(self.config)
        for field in dataclasses.fields(self.config):
            part = getattr(self.config, field.name)
            if isinstance(part, LayerConfig) and field.type is not type(part):  # of several kinds
                values[field.name]["kind"] = part.kind
        return {"head": values}

    @classmethod
    def for_target(cls, config: Any, target: HybridLM | None) -> Any:
        """An untrained head in the dtype of its target and with its kernels."""
        rngs = nnx.Rngs(0)
        if target is None:
            return cls(config, rngs=rngs)
        return cls(config, dtype=target.dtype, rngs=rngs, implementation=target.implementation)

    def layer(
        self, config: LayerConfig, rngs: nnx.Rngs, implementation: str | None, scale: float = 1.0
    ) -> Any:
        """A layer with the head's width, epsilon and dtype; `scale` is that of its last weights."""
        return config.build(
            self.config.d_model,
            norm_eps=self.config.norm_eps,
            dtype=self.dtype,
            rngs=rngs,
            implementation=implementation,
            out_scale=scale,
        )

    def linear(self, in_size: int, out_size: int, rngs: nnx.Rngs, bias: bool = False) -> Projection:
        """A linear layer."""
        return linear(
            in_size,
            out_size,
            bias=bias,
            dtype=self.dtype,
            rngs=rngs,
            implementation=self.implementation,
        )

    def scale(self) -> nnx.Param:
        """The weight of a norm."""
        return nnx.Param(jnp.ones(self.config.d_model, self.dtype))

    def table(self, rows: int, width: int, rngs: nnx.Rngs) -> Matrix:
        """Random rows for tokens."""
        values = 0.02 * jax.random.normal(rngs.params(), (rows, width), self.dtype)
        return Matrix(values, axis=-1)

    def norm(self, x: Array, scale: nnx.Param) -> Array:
        """RMS norm."""
        epsilon, implementation = self.config.norm_eps, self.implementation
        return rms_norm(x, scale[...], epsilon=epsilon, implementation=implementation)


class DraftHead(TargetHead):
    """A head that is an attention layer and a layer without memory after it.

    It computes `x = residual + attention(joined)`, then `finished(x + feed_forward(norm(x)))`;
    `attended` and `fed` may do more around the two.

    Its config has `attention` too.
    """

    attention: Any
    feed_forward: Any
    embedding_norm_scale: nnx.Param
    feed_forward_norm_scale: nnx.Param
    scales = ("embedding_norm_scale", "feed_forward_norm_scale", *TargetHead.scales)
    is_block: bool = False  # whether the nodes are places in a row, and see later ones too

    def joined(self, embedded: Array, states: Array) -> tuple[Array, Array]:
        """The input of the attention and the residual stream, of entries."""
        raise NotImplementedError

    def attended(self, y: Array, residual: Array) -> Array:
        """What the attention's outputs add to the residual stream."""
        return y

    def fed(self, x: Array) -> Array:
        """What the layer without memory adds to the residual stream."""
        return self.feed(self.norm(x, self.feed_forward_norm_scale))

    def feed(self, u: Array) -> Array:
        """The outputs of the layer without memory."""
        return total(self.feed_forward.tree(u)[0])

    def finished(self, outputs: Array) -> Array:
        """The outputs as `tree` returns them."""
        return outputs

    @property
    def activation_dtype(self) -> Any:
        """Dtype of activations and caches: float32 if the head is packed."""
        return self.attention.in_proj.kernel.storage.dtype

    def init_cache(self, batch: int, max_length: int) -> KVCache:
        """The cache before the first entry."""
        return self.config.attention.init_cache(batch, max_length, self.activation_dtype).kv

    def entries(
        self,
        embedded: Float[Array, "B T M"],
        states: Float[Array, "B T M"],
        positions: Int[Array, "B T"],
    ) -> NodeKV:
        """Keys and values of entries: tokens, the states before them, and how many are before."""
        with jax.named_scope("head_entries"):
            return self.attention.entries(self.joined(embedded, states)[0], positions)

    def tree(
        self,
        embedded: Float[Array, "B Q M"],
        states: Float[Array, "B Q M"],
        tree: Tree,
        cache: KVCache,
        prefix: NodeKV | None = None,
    ) -> tuple[Float[Array, "B Q M"], NodeKV]:
        """Runs the last Q nodes of a tree, each an entry after the cache.

        Args:
            embedded: embeddings of the nodes' tokens.
            states: for the root the target's state before it; for others the head's output at the
                parent.
            tree: the tree of all N nodes so far.
            cache: the entries before the root.
            prefix: keys and values of the first `N - Q` nodes; None if `Q == N`.

        Returns:
            Outputs of the head, and keys and values of all nodes.
        """
        with jax.named_scope("draft_head"):
            joined, residual = self.joined(embedded, states)
            behind = None if prefix is None else AttentionPending(prefix, None)
            before = AttentionCache(cache, None)
            nodes = Nodes(tree, {}, before, behind)
            y, pending, _ = self.attention.tree(joined, nodes, is_block=self.is_block)
            x = residual + self.attended(total(y), residual)
            return self.finished(x + self.fed(x)), pending.kv


def require_inner_layers(layers: tuple[int, ...]) -> None:
    """Refuses numbers of layers of a target that are none, or not ascending from 1."""
    require(
        len(layers) > 0 and list(layers) == sorted({*layers}) and layers[0] >= 1,
        f"inner_layers must be ascending numbers of layers from 1, got {layers}",
    )
