"""`HybridLM`: embedding, a stack of pre-norm blocks, output head; over sequences and over trees."""

import copy
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels import conv_gather_index, dispatch, replay_gather_index
from pallas_kernels.numerics import scaled, total
from stree_jax.array_types import Array, Float, Float32, Int, Lengths, Tokens
from stree_jax.checks import check_ids, require
from stree_jax.mesh.partition import ONE_DEVICE, Partition, Partitioned, Shard
from stree_jax.messages import shown
from stree_jax.models import matrices
from stree_jax.models.block import Block, ResidualStream
from stree_jax.models.cache import Cache, Pending, conv_widths, init_cache, init_pending
from stree_jax.models.config import ModelConfig
from stree_jax.models.layer import ConvGatherIndex, Nodes, Path, Replay
from stree_jax.models.layers import LayerInput, output_logits
from stree_jax.models.matrices import Matrix
from stree_jax.models.shared import AdaptedTransformer, SharedLayer, SharedTransformer
from stree_jax.tree import Tree

# An op may know further names, which a model cannot pass on to the others.
IMPLEMENTATIONS = (None, *dispatch.IMPLEMENTATIONS)
_MOST_PADDED = 64  # vocabularies of one tokenizer may differ by one part in as many


def same_tokenizer(vocab_size: int, other_size: int) -> bool:
    """True if numbers of tokens may be those of one tokenizer, padded to different sizes."""
    fewer, more = sorted((vocab_size, other_size))
    unit = more & -more  # the largest power of two that divides it
    return more - fewer < unit or (more - fewer) * _MOST_PADDED <= more


def check_model(model: object) -> None:
    """Refuses anything but a `HybridLM`, such as the path of one."""
    if not isinstance(model, HybridLM):
        raise ValueError(
            f"model must be a HybridLM, got {type(model).__name__}; load one with from_pretrained"
        )


def check_on_one_device(model: object, what: str) -> None:
    """Refuses a model on a mesh, for functions that do not support meshes."""
    check_model(model)
    assert isinstance(model, HybridLM)
    if model.partition != ONE_DEVICE:
        raise ValueError(
            f"{what} is for models on one device, and this one is on a mesh; st.shard(model, None)"
            " takes it off"
        )


def check_options(dtype: DTypeLike, implementation: str | None) -> None:
    """Refuses dtypes and implementations that `HybridLM` does not have."""
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = shown(dtype)
    require(name in ("float32", "bfloat16"), f"dtype must be float32 or bfloat16, got {name}")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation of a model must be one of {IMPLEMENTATIONS}, got"
            f" {shown(implementation)}; names that only some ops know are for these ops alone"
        )


def _check_config(config: object) -> None:
    if not isinstance(config, ModelConfig):
        raise ValueError(
            f"config must be a ModelConfig, such as ModelConfig.preset(...), got {shown(config)}"
        )


class HybridLM(Partitioned):
    """A language model that runs over sequences and over token trees.

    No method changes the module: caches and pending records go in and come out. Pass the model to a
    jitted function as an argument; closing over it would bake its weights into the program.

    Methods refuse token ids outside the vocabulary. Inside of a program ids are not known: there
    one outside makes the rest of its row unspecified.

    Args:
        config: layers and sizes of the model.
        dtype: dtype of the weights and activations, float32 or bfloat16. The SSM state, the decays
            and the logits are float32 in both cases, and all activations of a packed model.
        implementation: kernel implementation: "xla", "native", "pallas" or "pallas_interpret" (see
            `pallas_kernels.dispatch`); None: the fastest that runs on the device.

    Attributes:
        embedding: the table of the tokens, `[V, M]`.
        partition: how it lies on its devices, see `stree_jax.mesh`; `ONE_DEVICE` without a mesh.
            On a mesh `generate` and `stream` run it; its own methods can be called only if every
            device has the whole model.

    Raises:
        ValueError: a model without memory, another dtype, or another implementation.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        implementation: str | None = None,
    ):
        _check_config(config)
        if not any(layer.has_memory for layer in config.layers):
            raise ValueError(
                f"layers = {sorted(set(config.kinds))} have no memory of other tokens;"
                " a model needs a Mamba-2, attention, parallel or shared layer"
            )
        check_options(dtype, implementation)
        self.config = config
        self.partition = ONE_DEVICE
        self.vocab_size = config.vocab_size  # of the model that it drafts for, see `for_tokens`
        self.dtype = jnp.dtype(dtype)
        self.implementation = implementation
        shape = (config.num_embeddings, config.d_model)

        def new_embedding() -> Matrix:
            return Matrix(0.02 * jax.random.normal(rngs.params(), shape, dtype), axis=-1)

        self.embedding = new_embedding()
        self.blocks = nnx.List(
            Block(layer, config, dtype=dtype, rngs=rngs, implementation=implementation)
            for layer in config.layers
        )
        self.shared = nnx.List(
            SharedTransformer(
                shared, config.d_model, dtype=dtype, rngs=rngs, implementation=implementation
            )
            for shared in filter(None, [config.shared])
            for _ in range(shared.num_blocks)
        )
        of_norm = jnp.float32 if config.norm_float32 else dtype
        self.final_norm_scale = nnx.Param(jnp.ones(config.d_model, of_norm))
        self.head = None if config.tie_embeddings else new_embedding()

    @classmethod
    def abstract(
        cls,
        config: ModelConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        partition: Partition = ONE_DEVICE,
        quantized: Mapping[str, str] | Collection[str] = (),
    ) -> tuple[nnx.GraphDef, dict]:
        """A model without weights: its structure, and the shape and dtype of each weight by name.

        `nnx.merge(structure, weights)` makes it a model. One layer of each config is traced and
        then copied: tracing all of them takes a time quadratic in their number.

        The shapes are those of one shard of the `partition`; the whole weights are the shards'
        weights concatenated. The matrices in `quantized` have these kinds, "int8" or "int4"; "int8"
        if it has names alone.

        Raises:
            ValueError: the sizes of the model do not fit the partition, or no matrix has a name.
        """
        _check_config(config)
        # A shared layer must stand before Mamba-2.
        few = sorted(
            config.distinct_layers, key=lambda layer: (layer.kind == "mamba2", layer.is_shared)
        )
        local = config.local(partition.shards)
        local_of = dict(zip(config.layers, local.layers, strict=True))
        short = dataclasses.replace(local, layers=tuple(local_of[layer] for layer in few))
        model = nnx.eval_shape(
            lambda: cls(short, dtype=dtype, rngs=nnx.Rngs(0), implementation=implementation)
        )
        model.partition = partition
        if partition.shards > 1:
            model.shard = Shard(partition.shards)
            sums = {path: part for path, part in nnx.iter_modules(model) if hasattr(part, "shard")}
            for path, part in sums.items():
                # A mixture sums for the expert inside of it.
                if not any(path[:end] in sums for end in range(1, len(path))):
                    part.shard = model.shard
        block_of = dict(zip(few, model.blocks, strict=True))
        model.config = config
        model.blocks = nnx.List(nnx.clone(block_of[layer]) for layer in config.layers)
        if quantized:
            if not isinstance(quantized, Mapping):
                quantized = dict.fromkeys(quantized, "int8")
            matrices.quantize_named(model, quantized)
        structure, weights = nnx.split(model)
        return structure, nnx.to_pure_dict(weights)

    def on(self, partition: Partition) -> tuple[nnx.GraphDef, dict]:
        return self.abstract(
            self.config,
            dtype=self.dtype,
            implementation=self.implementation,
            partition=partition,
            quantized=matrices.quantized_kinds(self),
        )

    @jax.transfer_guard("allow")
    def in_first(self) -> "HybridLM":
        """This model with its matrices `[in, out]`, the embedding and the output head `[V, M]`.

        A model that `from_pretrained` loads on a CPU has them packed.
        """
        return matrices.in_first(self)

    @jax.transfer_guard("allow")
    def packed(self) -> "HybridLM":
        """This model with its matrices packed for a CPU, as `from_pretrained` has them there.

        For a model that was made or trained in memory. It decodes faster, with float32 activations
        whatever the dtype of the weights; see `stree_jax.models.matrices`.

        Raises:
            ValueError: it is on a mesh.
        """
        check_on_one_device(self, "packed()")
        model = nnx.clone(self)
        matrices.pack(model)
        return model

    @jax.transfer_guard("allow")
    def quantized(self, quantize: str = "int8", *, keep: Collection[str] = ()) -> "HybridLM":
        """This model with its matrices in 8 or 4 bits and a scale for 32 inputs of a column.

        Norms, convolutions and routers stay. It is packed if this one is: `model.packed()` and
        `model.quantized()` in either order are a model for a CPU. Speculative decoding of a packed
        one gives its own text token for token, which is not that of the float32 model.

        Args:
            quantize: "int8" or "int4", see `from_pretrained`.
            keep: names of matrices that stay too, or patterns of names with stars.

        Raises:
            ValueError: it is on a mesh, there is no such matrix or kind, or a matrix is in another
                kind already.
        """
        check_on_one_device(self, "quantized()")
        matrices.check_quantize(quantize, keep)
        model = nnx.clone(self)
        matrices.quantize_named(model, matrices.to_quantize(model, quantize, keep))
        return model.packed() if self.output_head.storage.is_packed else model

    @property
    def activation_dtype(self) -> Any:
        """Dtype of activations, caches and pending records: float32 if it is packed."""
        return self.output_head.storage.dtype

    def __call__(self, tokens: Tokens) -> Float32[Array, "B T V"]:
        """Next-token logits of whole sequences; V counts padded vocabulary rows too."""
        return self.logits(self.hidden(tokens))

    def hidden(self, tokens: Tokens, inner: tuple[int, ...] = ()) -> Float[Array, "B T _"]:
        """Hidden states of whole sequences after the final norm, which `logits` takes.

        `inner` adds states after inner layers, see `tree`.
        """
        lengths = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
        cache = self.init_cache(tokens.shape[0], 0)
        return self._sequence(tokens, lengths, cache, inner)[0]

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """The cache before the first token, with capacity `max_length` in attention layers.

        A row with more tokens than that gives NaN from then on, never a wrong number.
        """
        return init_cache(self._own_config(), batch, max_length, self.activation_dtype)

    def init_pending(self, batch: int, num_nodes: int) -> Pending:
        """The pending record of a tree that was never run, for replay along the empty path."""
        return init_pending(self._own_config(), batch, num_nodes, self.activation_dtype)

    def prefill(
        self, tokens: Tokens, lengths: Lengths, cache: Cache | None = None
    ) -> tuple[Float32[Array, "B V"], Cache]:
        """Prefills right-padded prompts, or the next chunk of them.

        Args:
            tokens: token ids; any valid ids on the padding.
            lengths: number of real tokens of each row, 0 to T; a row of length 0 keeps its cache.
            cache: the cache of the tokens before, with room for these; None: there are none, and
                the new cache has capacity T.

        Returns:
            Logits after the last real token of each row (unspecified for length 0), and the cache.
        """
        with jax.named_scope("prefill"):
            cache = self.init_cache(*tokens.shape) if cache is None else cache
            hidden, cache = self._sequence(tokens, lengths, cache)
            rows = jnp.maximum(lengths - 1, 0)[:, None, None]
            last = jnp.take_along_axis(hidden, rows, axis=1)
            return self.logits(last)[:, 0], cache

    def prefill_hidden(
        self, tokens: Tokens, lengths: Lengths, cache: Cache, inner: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "B T _"], Cache]:
        """As `prefill`, with hidden states of all positions instead of logits of the last.

        `inner` adds states after inner layers, see `tree`. States on the padding are unspecified.
        """
        with jax.named_scope("prefill"):
            return self._sequence(tokens, lengths, cache, inner)

    def tree_forward(
        self,
        tokens: Int[Array, "B Q"],
        tree: Tree,
        cache: Cache,
        *,
        replay: tuple[Pending, Path] | None = None,
        prefix_pending: Pending | None = None,
        num_logits: int | None = None,
    ) -> tuple[Float32[Array, "B Z V"], Pending, Cache]:
        """`tree`, then `logits` at its last `num_logits` queries; None: at all of them."""
        hidden, pending, cache = self.tree(
            tokens, tree, cache, replay=replay, prefix_pending=prefix_pending
        )
        first = 0 if num_logits is None else tokens.shape[1] - num_logits
        return self.logits(hidden[:, first:]), pending, cache

    def tree(
        self,
        tokens: Int[Array, "B Q"],
        tree: Tree,
        cache: Cache,
        *,
        replay: tuple[Pending, Path] | None = None,
        prefix_pending: Pending | None = None,
        inner: tuple[int, ...] = (),
    ) -> tuple[Float[Array, "B Q _"], Pending, Cache]:
        """Runs the last Q nodes of a tree in one pass.

        STree, algorithm 1 (Wu, Qin, Wong and Soatto, 2025, arXiv:2505.14969).

        Args:
            tokens: tokens of the query nodes.
            tree: the tree of all N nodes so far; with `Q == N` the whole tree.
            cache: the cache before the root; with `replay`, before the previous tree's root.
            replay: the previous tree's pending record and accepted path, which advance `cache`
                first.
            prefix_pending: pending record of the first `N - Q` nodes, when a tree grows level by
                level.
            inner: numbers of layers, ascending. The residual stream after each of them follows the
                hidden states in the last axis: `[B, Q, (1 + inner) M]` in all.

        Returns:
            Hidden states of the query nodes after the final norm, in the dtype of activations,
            which `logits` takes; the pending record of all N nodes; and the cache before the root.
        """
        with jax.named_scope("tree_forward"):
            num_layers = len(self.blocks)
            replays: list[Replay | None] = [None] * num_layers
            if replay is not None:
                previous, path = replay
                index = self._replay_gather_index(path)
                replays = [Replay(pending, path, index) for pending in previous]
            gather_index = {
                width: conv_gather_index(tree.parents, width)[:, -tokens.shape[1] :]
                for width in conv_widths(self.config)
            }
            prefixes = (None,) * num_layers if prefix_pending is None else prefix_pending
            stream = self._stream(tokens, self.implementation)

            def run(i: int, mixer: Any, u: Array | LayerInput) -> Any:
                return mixer.tree(u, Nodes(tree, gather_index, cache[i], prefixes[i], replays[i]))

            hidden, pendings, caches = self._layers(stream, run, inner)
            return hidden, pendings, caches

    def logits(self, hidden: Float[Array, "B T M"]) -> Float32[Array, "B T V"]:
        """Next-token logits of hidden states after the final norm, as `tree` returns them.

        V counts padded vocabulary rows too.
        """
        self._check_here()
        logits = output_logits(
            hidden, self.output_head, self.config.logits_multiplier, self.implementation
        )
        return self.shard.all_gather(logits)

    def for_tokens(self, vocab_size: int) -> "HybridLM":
        """The same weights, as a draft for a model with another number of tokens.

        Vocabularies of one tokenizer are padded to several sizes, such as 151,936 and 152,064. What
        is beyond the smaller one is no text: its own further tokens are not drafted, and others are
        read as its last one.

        Raises:
            ValueError: padding does not explain the difference.
        """
        if vocab_size == self.vocab_size:
            return self
        if not same_tokenizer(self.config.vocab_size, vocab_size):
            raise ValueError(
                f"draft and target have different vocabularies: {self.config.vocab_size} and"
                f" {vocab_size} tokens; they must share one tokenizer"
            )
        view = copy.copy(self)
        view.vocab_size = vocab_size
        return view

    def without_padding(self, logits: Float[Array, "B T _"]) -> Float[Array, "B T V"]:
        """The logits of tokens; minus infinity for those that it does not have."""
        known = logits[..., : min(self.vocab_size, self.config.vocab_size)]
        missing = self.vocab_size - known.shape[-1]
        if not missing:
            return known
        return jnp.pad(known, ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf)

    @property
    def output_head(self) -> Matrix:
        """The output head `[V, M]`; the embedding if they are tied."""
        return self.embedding if self.head is None else self.head

    def replay(self, cache: Cache, pending: Pending, path: Path) -> Cache:
        """The cache after the nodes of `path`."""
        self._check_here()
        with jax.named_scope("replay"):
            index = self._replay_gather_index(path)
            return tuple(
                mixer.replay(of_layer, Replay(record, path, index))
                for mixer, of_layer, record in zip(self._mixers(), cache, pending, strict=True)
            )

    @jax.named_scope("replay")
    def _replay_gather_index(self, path: Path) -> ConvGatherIndex:
        return {
            width: replay_gather_index(path.parents, path.last, width)
            for width in conv_widths(self.config)
        }

    def _sequence(
        self, tokens: Array, lengths: Array, cache: Cache, inner: tuple[int, ...] = ()
    ) -> tuple[Array, Cache]:
        """Hidden states of a right-padded sequence, see `_layers`, and the cache after it."""
        valid = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
        norms = self.output_head.storage.norms_of_sequences(self.implementation)
        stream = self._stream(tokens, norms, valid)

        def run(i: int, mixer: Any, u: Array | LayerInput) -> Any:
            return mixer(total(u), cache[i], valid, lengths)

        hidden, caches = self._layers(stream, run, inner)
        return hidden, caches

    def _layers(
        self, stream: ResidualStream, run: Callable[[int, Any, Any], Any], inner: tuple[int, ...]
    ) -> tuple[Any, ...]:
        """Runs the layers.

        Returns states after the final norm with those after `inner` layers, then for each further
        result of `run` those of all layers.
        """
        states, records = [], []
        for i, (block, mixer) in enumerate(zip(self.blocks, self._mixers(), strict=True)):
            with jax.named_scope(f"layer_{i}"):
                output, *record = run(i, mixer, stream.read(block))
                stream.write(block, output)
                records.append(record)
            if i + 1 in inner:
                states.append(stream.hidden())
        parts = stream.normed(self.final_norm_scale[...]), *states
        hidden = [part.astype(self.activation_dtype) for part in parts]
        hidden_states = jnp.concatenate(hidden, axis=-1) if states else hidden[0]
        return hidden_states, *zip(*records, strict=True)

    def _stream(
        self, tokens: Array, implementation: str | None, valid: Array | None = None
    ) -> ResidualStream:
        """The stream of the embedded tokens."""
        self._check_here()
        check_ids("tokens", tokens, self.vocab_size)
        if self.vocab_size > self.config.vocab_size:
            tokens = jnp.minimum(tokens, self.config.vocab_size - 1)
        rows = self.embedding.rows(tokens, self.shard)
        if valid is not None:
            rows = self.output_head.storage.cleared(rows, valid[..., None])
        embedded = scaled(rows, self.config.embedding_multiplier)
        dtype = self.activation_dtype
        stream = embedded.astype(jnp.float32 if self.config.residual_float32 else dtype)
        return ResidualStream(stream, self.config, dtype, implementation)

    def _own_config(self) -> ModelConfig:
        """The local config on a shard, else the model's config."""
        self._check_here()
        return self.config.local(self.shard.shards)

    def _check_here(self) -> None:
        """Refuses a sharded model outside of its program."""
        if self.partition.shards > 1:
            raise ValueError(
                "this model is sharded over the devices of a mesh, and its own methods cannot be"
                " called; use generate or stream, or take it off the mesh with"
                " st.shard(model, None)"
            )

    def _mixers(self) -> list[Any]:
        """The mixer of each layer; the j-th shared layer uses shared block j modulo their count."""
        mixers: list[Any] = []
        num_uses = 0
        for block in self.blocks:
            if isinstance(block.mixer, SharedLayer):
                transformer = self.shared[num_uses % len(self.shared)]
                mixers.append(AdaptedTransformer(block.mixer, transformer))
                num_uses += 1
            else:
                mixers.append(block.mixer)
        return mixers


def embedded_tokens(
    tokens: Int[Array, "B T"], embedding: Matrix, multiplier: float
) -> Float[Array, "B T M"]:
    """Embeddings of tokens, the input of the first layer."""
    return scaled(embedding.rows(tokens), multiplier)
