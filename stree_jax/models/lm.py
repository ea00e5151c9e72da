"""`HybridLM`: embedding, a stack of pre-norm blocks, output head; over sequences and over trees."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels import conv_window, replay_window
from pallas_kernels.numerics import contract
from stree_jax.array_types import Array, Bool, Float, Int, Lengths, Tokens
from stree_jax.config import ModelConfig
from stree_jax.models.cache import Cache, LayerCache, Path, Pending, init_cache
from stree_jax.models.layers import rms_norm
from stree_jax.models.mamba2 import Mamba2Mixer
from stree_jax.models.mlp import GatedMlp
from stree_jax.tree import Tree


class Mixer(Protocol):
    """What a layer of any kind does; its cache and its pending record are its own business."""

    def __call__(
        self, u: Array, cache: Any, mask: Bool[Array, "B T"], lengths: Lengths
    ) -> tuple[Array, Any]:
        """Runs a right-padded sequence from `cache`; returns outputs and the cache after it."""
        ...

    def tree(
        self, u: Array, tree: Tree, window: Array, cache: Any, grown: Any = None
    ) -> tuple[Array, Any]:
        """Runs the last nodes of a tree; returns outputs and the pending record of all nodes."""
        ...

    def replay(self, cache: Any, pending: Any, path: Path, window: Array) -> Any:
        """The cache after a path."""
        ...


class Block(nnx.Module):
    """Pre-norm mixer of one kind; the residual is added by the model."""

    def __init__(
        self,
        kind: str,
        config: ModelConfig,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        implementation: str | None,
    ):
        self.norm_scale = nnx.Param(jnp.ones(config.d_model, dtype))
        out_scale = len(config.layers) ** -0.5
        self.mixer: Mixer
        if kind == "mlp":
            assert config.mlp is not None
            self.mixer = GatedMlp(
                config.mlp, config.d_model, dtype=dtype, rngs=rngs, out_scale=out_scale
            )
        else:
            assert config.mamba2 is not None
            self.mixer = Mamba2Mixer(
                config.mamba2,
                config.d_model,
                dtype=dtype,
                rngs=rngs,
                out_scale=out_scale,
                implementation=implementation,
            )


class HybridLM(nnx.Module):
    """A language model that runs over sequences and over token trees.

    No method changes the module: caches and pending records go in and come out. Pass the model to a
    jitted function as an argument; closing over it would bake its weights into the program.

    Args:
        config: its shape.
        dtype: of the weights and activations, float32 or bfloat16. The SSM state, the decays and
            the logits are float32 whatever it is.
        rngs: for initialisation.
        implementation: of the tree kernels, see `pallas_kernels.dispatch`; None: the best that
            works.

    Raises:
        ValueError: the config needs a kind of layer that this version cannot run.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        implementation: str | None = None,
    ):
        unsupported = sorted(set(config.layers) - {"mamba2", "mlp"})
        if unsupported:
            raise ValueError(
                f"layers of kind {unsupported} cannot be run by this version of stree_jax,"
                " only 'mamba2' and 'mlp'"
            )
        if "mamba2" not in config.layers:
            raise ValueError(f"layers = {config.layers} has no 'mamba2', so nothing to remember")
        if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
            raise ValueError(f"dtype must be float32 or bfloat16, got {jnp.dtype(dtype).name}")
        self.config = config
        self.dtype = jnp.dtype(dtype)
        shape = (config.num_embeddings, config.d_model)

        def new_embedding() -> nnx.Param:
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype))

        self.embedding = new_embedding()
        self.blocks = nnx.List(
            Block(kind, config, dtype=dtype, rngs=rngs, implementation=implementation)
            for kind in config.layers
        )
        self.final_norm_scale = nnx.Param(jnp.ones(config.d_model, dtype))
        self.head = None if config.tie_embeddings else new_embedding()

    @classmethod
    def abstract(
        cls,
        config: ModelConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
    ) -> tuple[nnx.GraphDef, dict]:
        """A model without weights: its structure, and the shape and type of each weight by name.

        `nnx.merge(structure, weights)` makes it a model.
        """
        model = nnx.eval_shape(
            lambda: cls(config, dtype=dtype, rngs=nnx.Rngs(0), implementation=implementation)
        )
        structure, weights = nnx.split(model)
        return structure, nnx.to_pure_dict(weights)

    def __call__(self, tokens: Tokens) -> Float[Array, "B T V"]:
        """Next-token logits of whole sequences, in float32; V counts padded vocabulary rows too."""
        lengths = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
        hidden, _ = self._sequence(tokens, lengths, self.init_cache(tokens.shape[0]))
        return self._logits(hidden)

    def init_cache(self, batch: int) -> Cache:
        """The cache before the first token."""
        return init_cache(self.config, batch, self.dtype)

    def prefill(
        self, tokens: Tokens, lengths: Lengths, cache: Cache | None = None
    ) -> tuple[Float[Array, "B V"], Cache]:
        """Reads right-padded prompts, or the next piece of them.

        Args:
            tokens: any valid ids on the padding.
            lengths: real tokens of each row, 0 to T; a row of length 0 keeps its cache.
            cache: what came before; None: nothing.

        Returns:
            Logits after the last real token of each row (meaningless for length 0), and the cache.
        """
        with jax.named_scope("prefill"):
            cache = self.init_cache(tokens.shape[0]) if cache is None else cache
            hidden, cache = self._sequence(tokens, lengths, cache)
            rows = jnp.maximum(lengths - 1, 0)[:, None, None]
            return self._logits(jnp.take_along_axis(hidden, rows, axis=1))[:, 0], cache

    def tree_forward(
        self,
        tokens: Int[Array, "B Q"],
        tree: Tree,
        cache: Cache,
        *,
        replay: tuple[Pending, Path] | None = None,
        grown: Pending | None = None,
        num_logits: int | None = None,
    ) -> tuple[Float[Array, "B R V"], Pending, Cache]:
        """Runs the last Q nodes of a tree in one pass (STree, algorithm 1).

        Args:
            tokens: tokens of the query nodes.
            tree: all N nodes so far; with `Q == N` the whole tree.
            cache: what came before the root.
            replay: the previous tree's pending record and accepted path, which advance `cache`
                first.
            grown: pending record of the first `N - Q` nodes, when a tree is grown level by level.
            num_logits: logits are wanted at the last `R` queries only; None: at all of them.

        Returns:
            Logits, the pending record of all N nodes, and the (replayed) cache before the root.
        """
        with jax.named_scope("tree_forward"):
            if replay is not None:
                cache = self.replay(cache, *replay)
            num_queries = tokens.shape[1]
            window = conv_window(tree.parents, self._conv_width())[:, -num_queries:]
            hidden = self._embed(tokens)
            pending = []
            for i, block in enumerate(self.blocks):
                with jax.named_scope(f"layer_{i}"):
                    out, record = block.mixer.tree(
                        self._normed(hidden, block.norm_scale),
                        tree,
                        window,
                        cache[i],
                        None if grown is None else grown[i],
                    )
                    hidden = self._add(hidden, out)
                    pending.append(record)
            if num_logits is not None:
                hidden = hidden[:, num_queries - num_logits :]
            return self._logits(hidden), tuple(pending), cache

    def replay(self, cache: Cache, pending: Pending, path: Path) -> Cache:
        """The cache after the nodes of `path`."""
        with jax.named_scope("replay"):
            window = replay_window(path.parents, path.last, self._conv_width())
            return tuple(
                block.mixer.replay(layer_cache, record, path, window)
                for block, layer_cache, record in zip(self.blocks, cache, pending, strict=True)
            )

    def _sequence(self, tokens: Array, lengths: Array, cache: Cache) -> tuple[Array, Cache]:
        mask = jnp.arange(tokens.shape[1]) < lengths[:, None]
        hidden = self._embed(tokens)
        new_cache: list[LayerCache] = []
        for i, block in enumerate(self.blocks):
            with jax.named_scope(f"layer_{i}"):
                out, layer_cache = block.mixer(
                    self._normed(hidden, block.norm_scale), cache[i], mask, lengths
                )
                hidden = self._add(hidden, out)
                new_cache.append(layer_cache)
        return hidden, tuple(new_cache)

    def _embed(self, tokens: Array) -> Array:
        hidden = self.embedding[...][tokens] * self.config.embedding_multiplier
        return hidden.astype(jnp.float32 if self.config.residual_float32 else self.dtype)

    def _normed(self, hidden: Array, scale: nnx.Param) -> Array:
        return rms_norm(hidden, scale[...], self.config.norm_eps).astype(self.dtype)

    def _add(self, hidden: Array, out: Array) -> Array:
        return hidden + (out * self.config.residual_multiplier).astype(hidden.dtype)

    def _logits(self, hidden: Array) -> Array:
        with jax.named_scope("head"):
            head = (self.embedding if self.head is None else self.head)[...]
            normed = self._normed(hidden, self.final_norm_scale)
            return contract("btm,vm->btv", normed, head) * self.config.logits_multiplier

    def _conv_width(self) -> int:
        assert self.config.mamba2 is not None
        return self.config.mamba2.conv_width
