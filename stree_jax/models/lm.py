"""`HybridLM`: embedding, a stack of pre-norm blocks, output head; over sequences and over trees."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import (
    Best,
    RecordQueue,
    Unscaled,
    add_rms_norm,
    best_token,
    conv_window,
    oldest_record,
    replay_window,
)
from pallas_kernels.dispatch import besides_jax_triton
from pallas_kernels.numerics import contract, rms_norm, scaled
from stree_jax.array_types import Array, Bool, Float, Int, Lengths, Tokens
from stree_jax.config import ModelConfig
from stree_jax.models.attention import AttentionMixer
from stree_jax.models.cache import (
    Cache,
    InQueue,
    LayerCache,
    Path,
    Pending,
    QueuedPending,
    Replay,
    Windows,
    conv_widths,
    init_cache,
    init_pending,
    mamba2_part,
    with_mamba2_part,
)
from stree_jax.models.mamba2 import Mamba2Mixer
from stree_jax.models.mlp import Mlp
from stree_jax.models.moe import MixtureOfExperts
from stree_jax.models.parallel import ParallelMixer
from stree_jax.models.shared import SharedLayer, SharedTransformer
from stree_jax.tree import Tree


@runtime_checkable
class Mixer(Protocol):
    """What a layer of any kind does; its cache and its pending record are its own business."""

    def __call__(
        self, u: Array, cache: Any, mask: Bool[Array, "B T"], lengths: Lengths
    ) -> tuple[Array, Any]:
        """Runs a right-padded sequence from `cache`; returns outputs and the cache after it."""
        ...

    def tree(
        self,
        u: Array,
        tree: Tree,
        windows: Windows,
        cache: Any,
        grown: Any = None,
        replay: Replay | None = None,
    ) -> tuple[Array | Unscaled, Any, Any]:
        """Runs the last nodes of a tree, after replaying a path of the previous one, if any.

        Returns outputs, whose rows `add_rms_norm` may have to scale, the pending record of all
        nodes, and the cache before the root.
        """
        ...

    def replay(self, cache: Any, pending: Any, path: Path, windows: Windows) -> Any:
        """The cache after a path."""
        ...


class Block(nnx.Module):
    """A layer: pre-norm and mixer. The model adds what it gives to the residual stream."""

    def __init__(
        self,
        kind: str,
        config: ModelConfig,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        implementation: str | None,
    ):
        self.kind = kind
        out_scale = len(config.layers) ** -0.5
        # A "shared" layer has its norm with the weights that it shares.
        self.norm_scale = None if kind == "shared" else nnx.Param(jnp.ones(config.d_model, dtype))
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs, out_scale=out_scale)

        def mamba2() -> Mamba2Mixer:
            assert config.mamba2 is not None
            return Mamba2Mixer(
                config.mamba2, config.d_model, implementation=implementation, **options
            )

        def attention() -> AttentionMixer:
            assert config.attention is not None
            return AttentionMixer(
                config.attention, config.d_model, implementation=implementation, **options
            )

        self.mixer: Mixer | SharedLayer
        match kind:
            case "mamba2":
                self.mixer = mamba2()
            case "attention":
                self.mixer = attention()
            case "parallel":
                self.mixer = ParallelMixer(mamba2(), attention())
            case "mlp":
                assert config.mlp is not None
                self.mixer = Mlp(config.mlp, config.d_model, **options)
            case "moe":
                assert config.moe is not None
                self.mixer = MixtureOfExperts(
                    config.moe, config.d_model, implementation=implementation, **options
                )
            case "shared":
                self.mixer = SharedLayer(config, **options)
            case _:
                raise AssertionError(kind)  # ModelConfig knows the kinds


class HybridLM(nnx.Module):
    """A language model that runs over sequences and over token trees.

    No method changes the module: caches and pending records go in and come out. Pass the model to a
    jitted function as an argument; closing over it would bake its weights into the program.

    Args:
        config: its shape.
        dtype: of the weights and activations, float32 or bfloat16. The SSM state, the decays and
            the logits are float32 whatever it is.
        rngs: for initialisation.
        implementation: of the kernels, see `pallas_kernels.dispatch`; None: the best that
            works.

    Raises:
        ValueError: a model without memory, or another dtype.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        implementation: str | None = None,
    ):
        if not set(config.layers) - {"mlp", "moe"}:
            raise ValueError(f"layers = {config.layers} have nothing that remembers other tokens")
        if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
            raise ValueError(f"dtype must be float32 or bfloat16, got {jnp.dtype(dtype).name}")
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self._implementation = besides_jax_triton(implementation)  # of what is not a layer's
        shape = (config.num_embeddings, config.d_model)

        def new_embedding() -> nnx.Param:
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype))

        self.embedding = new_embedding()
        self.blocks = nnx.List(
            Block(kind, config, dtype=dtype, rngs=rngs, implementation=implementation)
            for kind in config.layers
        )
        num_shared = 0 if config.shared is None else config.shared.num_blocks
        self.shared = nnx.List(
            SharedTransformer(config, dtype=dtype, rngs=rngs, implementation=implementation)
            for _ in range(num_shared)
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
        hidden, _ = self._sequence(tokens, lengths, self.init_cache(tokens.shape[0], 0))
        return self._logits(hidden)

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """The cache before the first token, with places for `max_length` tokens.

        Only attention layers have places. A row that gets more tokens than places gives NaN from
        then on, never a wrong number.
        """
        return init_cache(self.config, batch, max_length, self.dtype)

    def init_pending(self, batch: int, num_nodes: int) -> Pending:
        """The pending record of a tree of that size, for replay along the empty path.

        For loops in which each tree has that many nodes, and is run at once. Where the kernels run,
        the records of Mamba-2 layers are in a queue: a step then needs no second record of all
        layers beside the first. Donate it, or XLA copies it. For trees that grow level by level
        there is `stree_jax.models.cache.init_pending`.
        """
        mixers = [
            mixer.mamba2 if isinstance(mixer, ParallelMixer) else mixer for mixer in self._mixers()
        ]
        kernels = any(isinstance(m, Mamba2Mixer) and m.is_one_kernel(self.dtype) for m in mixers)
        return init_pending(self.config, batch, num_nodes, self.dtype, queued=kernels)

    def prefill(
        self, tokens: Tokens, lengths: Lengths, cache: Cache | None = None
    ) -> tuple[Float[Array, "B V"], Cache]:
        """Reads right-padded prompts, or the next piece of them.

        Args:
            tokens: any valid ids on the padding.
            lengths: real tokens of each row, 0 to T; a row of length 0 keeps its cache.
            cache: what came before, with places for these tokens too; None: nothing, and places for
                these T tokens only.

        Returns:
            Logits after the last real token of each row (meaningless for length 0), and the cache.
        """
        with jax.named_scope("prefill"):
            cache = self.init_cache(*tokens.shape) if cache is None else cache
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
            Logits, the pending record of all N nodes (in a queue if the previous tree's was), and
            the (replayed) cache before the root.

        Raises:
            ValueError: a queue of records of trees of another size, or of a tree that grows.
        """
        hidden, pending, cache = self._tree(tokens, tree, cache, replay, grown)
        if num_logits is not None:
            hidden = hidden[:, tokens.shape[1] - num_logits :]
        return self._logits(hidden), pending, cache

    def tree_best(
        self,
        tokens: Int[Array, "B N"],
        tree: Tree,
        cache: Cache,
        *,
        replay: tuple[Pending, Path] | None = None,
    ) -> tuple[Best, Pending, Cache]:
        """`tree_forward` of a whole tree for who needs the best tokens only, as greedy decoding.

        Logits of all nodes over a large vocabulary are more than all else that a step holds beside
        weights and caches; as a kernel, `best_token` does not write them.

        Args:
            tokens: tokens of all nodes.
            tree, cache, replay: as in `tree_forward`.

        Returns:
            The best token after each node and its logit, each `[B, N]`; the pending record of all
            nodes (in a queue if the previous tree's was), and the (replayed) cache before the root.

        Raises:
            ValueError: a queue of records of trees of another size.
        """
        hidden, pending, cache = self._tree(tokens, tree, cache, replay, None)
        with jax.named_scope("head"):
            best = best_token(
                *self._normed_and_head(hidden),
                vocab_size=self.config.vocab_size,
                multiplier=self.config.logits_multiplier,
                implementation=self._implementation,
            )
        return best, pending, cache

    def _tree(
        self,
        tokens: Array,
        tree: Tree,
        cache: Cache,
        replay: tuple[Pending, Path] | None,
        grown: Pending | None,
    ) -> tuple[Array, Pending, Cache]:
        """The residual stream at the query nodes, and what `tree_forward` returns beside logits."""
        with jax.named_scope("tree_forward"):
            replays: list[Replay | None] = [None] * len(self.blocks)
            queue = None
            if replay is not None:
                old, path = replay
                back = self._replay_windows(path)
                if isinstance(old, QueuedPending):
                    old, queue = old
                replays = [Replay(record, path, back) for record in old]
            num_queries = tokens.shape[1]
            windows = {
                width: conv_window(tree.parents, width)[:, -num_queries:]
                for width in conv_widths(self.config)
            }
            if isinstance(grown, QueuedPending):
                raise ValueError("records of a tree that grows level by level cannot be in a queue")
            above = (None,) * len(self.blocks) if grown is None else grown

            def run(index: int, mixer: Mixer, u: Array) -> tuple[Array | Unscaled, tuple]:
                nonlocal queue  # the layers take turns
                before = replays[index]
                if before is not None and queue is not None:
                    before = before._replace(pending=with_mamba2_part(before.pending, queue))
                out, record, layer_cache = mixer.tree(
                    u, tree, windows, cache[index], above[index], before
                )
                if isinstance(part := mamba2_part(record), RecordQueue):
                    record, queue = with_mamba2_part(record, InQueue()), part
                return out, (record, layer_cache)

            hidden, both = self._stack(tokens, run, self._implementation)
            pending, cache = zip(*both, strict=True)
            if queue is not None:
                pending = QueuedPending(pending, queue)
            return hidden, pending, cache

    def replay(self, cache: Cache, pending: Pending, path: Path) -> Cache:
        """The cache after the nodes of `path`."""
        with jax.named_scope("replay"):
            windows = self._replay_windows(path)
            records, queue = pending if isinstance(pending, QueuedPending) else (pending, None)
            after: list[LayerCache] = []
            turns = 0
            for mixer, layer_cache, record in zip(self._mixers(), cache, records, strict=True):
                if queue is not None and mamba2_part(record) is not None:
                    record = with_mamba2_part(record, oldest_record(queue, turns))
                    turns += 1
                new = mixer.replay(layer_cache, record, path, windows)
                if queue is not None:
                    # Else XLA takes all records out of the queue at once.
                    oldest, new = lax.optimization_barrier((queue.oldest, new))
                    queue = queue._replace(oldest=oldest)
                after.append(new)
            return tuple(after)

    def _replay_windows(self, path: Path) -> Windows:
        return {
            width: replay_window(path.parents, path.last, width)
            for width in conv_widths(self.config)
        }

    def _sequence(self, tokens: Array, lengths: Array, cache: Cache) -> tuple[Array, Cache]:
        mask = jnp.arange(tokens.shape[1]) < lengths[:, None]

        def run(index: int, mixer: Mixer, u: Array) -> tuple[Array, LayerCache]:
            return mixer(u, cache[index], mask, lengths)

        # Of 512 rows XLA's is one launch, too, and by its cost model moves 3 % less in a layer.
        return self._stack(tokens, run, "xla")

    def _stack(
        self,
        tokens: Array,
        run: Callable[[int, Mixer, Array], tuple[Array | Unscaled, Any]],
        norm_kernel: str | None,
    ) -> tuple[Array, tuple]:
        """The residual stream after all layers, and what `run` gives beside each one's output.

        Args:
            tokens: `[B, T]`.
            run: applies a layer's mixer to its input.
            norm_kernel: the implementation of `add_rms_norm`.
        """
        config = self.config
        hidden = embedded = self._embed(tokens)
        out: Array | Unscaled | None = None  # of the last layer, not yet added
        extra: Array | None = None  # of a shared layer, for the input of the next
        beside = []
        for i, (block, mixer) in enumerate(zip(self.blocks, self._mixers(), strict=True)):
            with jax.named_scope(f"layer_{i}"):
                if block.norm_scale is None:
                    hidden, out = self._add(hidden, out), None
                    u = jnp.concatenate([hidden, embedded], axis=-1).astype(self.dtype)
                elif out is None:
                    u = self._normed(hidden if extra is None else hidden + extra, block.norm_scale)
                else:
                    hidden, u = add_rms_norm(
                        hidden,
                        out,
                        block.norm_scale[...],
                        epsilon=config.norm_eps,
                        multiplier=config.residual_multiplier,
                        implementation=norm_kernel,
                    )
                result, record = run(i, mixer, u)
                if block.kind == "shared":
                    assert not isinstance(result, Unscaled)
                    out, extra = None, result.astype(hidden.dtype)
                else:
                    out, extra = result, None
                beside.append(record)
        return self._add(hidden, out), tuple(beside)

    def _mixers(self) -> list[Mixer]:
        """The mixer of each layer; the j-th shared layer uses shared block j modulo their count."""
        mixers: list[Mixer] = []
        num_uses = 0
        for block in self.blocks:
            if isinstance(block.mixer, SharedLayer):
                transformer = self.shared[num_uses % len(self.shared)]
                mixers.append(block.mixer.using(transformer))
                num_uses += 1
            else:
                mixers.append(block.mixer)
        return mixers

    def _embed(self, tokens: Array) -> Array:
        hidden = scaled(self.embedding[...][tokens], self.config.embedding_multiplier)
        return hidden.astype(jnp.float32 if self.config.residual_float32 else self.dtype)

    def _normed(self, hidden: Array, scale: nnx.Param) -> Array:
        return rms_norm(hidden, scale[...], self.config.norm_eps).astype(self.dtype)

    def _add(self, hidden: Array, out: Array | Unscaled | None) -> Array:
        if out is None:
            return hidden
        if isinstance(out, Unscaled):
            out = out.scaled()
        return hidden + scaled(out, self.config.residual_multiplier).astype(hidden.dtype)

    def _logits(self, hidden: Array) -> Array:
        with jax.named_scope("head"):
            logits = contract("btm,vm->btv", *self._normed_and_head(hidden))
            return logits * self.config.logits_multiplier

    def _normed_and_head(self, hidden: Array) -> tuple[Array, Array]:
        head = self.embedding if self.head is None else self.head
        return self._normed(hidden, self.final_norm_scale), head[...]
