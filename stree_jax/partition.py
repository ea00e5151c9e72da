"""How a model is sharded: the local config of a shard, and the columns of each weight it has.

A mesh has two axes. "data" splits the batch, "model" splits heads, channels and vocabulary. Each
shard along "model" is an ordinary model of a *local* config, with `1 / shards` of the heads. A
weight's equal slices are the shards' weights, because its columns are stored *shard-major*: those
of the first shard, then those of the second. `Cut.columns` is that order, and `Cut.canonical` its
inverse.

Worked example, 2 shards of the columns `[gate | up]` of an MLP with 4 channels:

    canonical     g0 g1 g2 g3 u0 u1 u2 u3
    shard-major   g0 g1 u0 u1 | g2 g3 u2 u3

Groups of B and C, and heads of keys and values, may be fewer than shards: then neighbours hold the
same ones, and shard-major weights have more columns than canonical ones.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from stree_jax.array_types import Array
from stree_jax.checks import check_int
from stree_jax.config import ModelConfig
from stree_jax.layer_config import AttentionConfig, Mamba2Config, MoeConfig, MoeShardConfig
from stree_jax.messages import shown

DATA, MODEL = "data", "model"
ROWS = PartitionSpec(DATA)  # spec of arrays with the batch axis first
_MOST_SHARDS = 256  # suggested by error messages
_NARROWEST = 16  # fewest channels of an expert that a kernel multiplies


@dataclasses.dataclass(frozen=True)
class Partition:
    """The mesh and the number of shards of a model.

    Attributes:
        mesh: a mesh with the axes "data" and "model".
        shards: shards of the weights along "model"; 1: every device has the whole model.
    """

    mesh: Mesh
    shards: int

    @property
    def axis(self) -> str | None:
        """The mesh axis that splits heads and channels of the states; None: they are replicated."""
        return MODEL if self.shards > 1 else None

    @property
    def rows(self) -> int:
        """Shards of the batch; they must divide the number of rows."""
        return self.mesh.shape[DATA]

    def put(self, tree: Any, spec: PartitionSpec = ROWS) -> Any:
        """Puts arrays that every process has on the mesh; arrays already there are kept."""

        def put(leaf: Any) -> Any:
            place = getattr(leaf, "sharding", None)
            if isinstance(place, NamedSharding) and place.mesh == self.mesh:
                return leaf
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                data = put(jax.random.key_data(leaf))
                return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
            values = np.asarray(leaf)
            sharding = NamedSharding(self.mesh, spec)
            return jax.make_array_from_callback(values.shape, sharding, values.__getitem__)

        return jax.tree.map(put, tree)


@dataclasses.dataclass(frozen=True)
class Shard:
    """Collectives over "model", for the modules of one shard; only inside `jax.shard_map`.

    Attributes:
        shards: number of shards.
    """

    shards: int

    def total(self, x: Array) -> Array:
        """All-reduces in float32; the result has the dtype of `x`."""
        return lax.psum(x.astype(jnp.float32), MODEL).astype(x.dtype)

    def all_gather(self, x: Array) -> Array:
        """All-gathers along the last axis."""
        return lax.all_gather(x, MODEL, axis=x.ndim - 1, tiled=True)

    def rows_of(self, table: Array, index: Array) -> Array:
        """`table[index]` for a table whose rows are sharded."""
        own, is_own = self._among_own(index, table.shape[0])
        return lax.psum(jnp.where(is_own[..., None], table[own], 0), MODEL)

    def own_choices(self, weights: Array, chosen: Array, held: int) -> tuple[Array, Array]:
        """Chosen experts as indices among this shard's `held` ones; other experts get weight 0."""
        own, is_own = self._among_own(chosen, held)
        return jnp.where(is_own, weights, 0), own

    def _among_own(self, index: Array, count: int) -> tuple[Array, Array]:
        """Indices among this shard's `count` units, 0 if it lacks one; and whether it has each."""
        own = index - lax.axis_index(MODEL) * count
        is_own = (own >= 0) & (own < count)
        return jnp.where(is_own, own, 0), is_own

    def broadcast_from_first(self, tree: Any) -> Any:
        """Broadcasts shard 0's integers and booleans `[B, ...]`.

        All shards compute these values, but two GPUs, or two programs tuned apart, may round
        differently. Values that a program branches on must be equal to the last bit.
        """
        leaves, structure = jax.tree.flatten(tree)
        assert all(leaf.dtype in (jnp.int32, jnp.bool_) for leaf in leaves)
        packed = jnp.concatenate(
            [leaf.astype(jnp.int32).reshape(len(leaf), -1) for leaf in leaves], axis=1
        )
        packed = lax.psum(jnp.where(lax.axis_index(MODEL) == 0, packed, 0), MODEL)
        ends = np.cumsum([leaf.size // len(leaf) for leaf in leaves])[:-1].tolist()
        parts = zip(leaves, jnp.split(packed, ends, axis=1), strict=True)
        new = [part.reshape(leaf.shape).astype(leaf.dtype) for leaf, part in parts]
        return jax.tree.unflatten(structure, new)


class Cut(NamedTuple):
    """How a weight is sharded.

    Attributes:
        axis: index of the sharded axis.
        segments: `(units, size)` of each segment along it, such as heads and their channels.
    """

    axis: int
    segments: tuple[tuple[int, int], ...]

    def columns(self, shards: int) -> np.ndarray:
        """The canonical columns of each shard: `[shards, columns]`."""
        rows = []
        for shard in range(shards):
            start = 0
            row: list[np.ndarray] = []
            for units, size in self.segments:
                own = _units_of(shard, units, shards)
                row.append(np.arange(start + own.start * size, start + own.stop * size))
                start += units * size
            rows.append(np.concatenate(row))
        return np.stack(rows)

    def canonical(self, shards: int) -> np.ndarray:
        """The (first) index of each canonical column in shard-major order."""
        return np.unique(self.columns(shards), return_index=True)[1]


def make_mesh(*, data: int = 1, model: int = 1) -> Mesh:
    """A mesh of `data * model` devices, over all processes.

    Args:
        data: number of shards of the batch; they run independently.
        model: number of shards of a model's heads and channels, with collectives in every layer.
            They are neighbours in `jax.devices()`.

    Raises:
        ValueError: not positive integers, or there are not as many devices; several processes
            must use all of their devices.
    """
    for name, size in (("data", data), ("model", model)):
        check_int(name, size, 1)
    count = jax.device_count()
    if data * model > count or (data * model < count and jax.process_count() > 1):
        there = "there is 1" if count == 1 else f"there are {count}"
        raise ValueError(
            f"data = {data} times model = {model} is {data * model} devices, and {there}"
            + (f" in {jax.process_count()} processes" if jax.process_count() > 1 else "")
        )
    devices = jax.devices()[: data * model]
    return jax.make_mesh((data, model), (DATA, MODEL), (AxisType.Auto,) * 2, devices=devices)


def check_mesh(mesh: object) -> Mesh:
    """Refuses anything but a mesh from `make_mesh`.

    Raises:
        ValueError: no mesh, or other axes.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must come from make_mesh(data=, model=), got {shown(mesh)}")
    if {*mesh.axis_names} != {DATA, MODEL}:
        raise ValueError(
            f"the mesh has the axes {mesh.axis_names}; it needs {(DATA, MODEL)}, of which one may"
            " have size 1"
        )
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(f"the mesh has axes of types {mesh.axis_types}; make them all Auto")
    return mesh


def _units_of(shard: int, units: int, shards: int) -> range:
    """The units of a shard: an equal slice, or one unit that several shards hold."""
    if units % shards == 0:
        count = units // shards
        return range(shard * count, (shard + 1) * count)
    assert shards % units == 0  # `local_config` refuses the rest
    return range(shard * units // shards, shard * units // shards + 1)


def local_config(config: ModelConfig, shards: int) -> ModelConfig:
    """The config of one of the equal shards of a model.

    Its vocabulary is the shard's slice of the vocabulary.

    Raises:
        ValueError: the sizes cannot be cut that way; names what can.
    """
    if obstacle := _obstacle(config, shards):
        fitting = [n for n in range(1, _MOST_SHARDS + 1) if _obstacle(config, n) is None]
        last = f" or {fitting[-1]}" if fitting[1:] else "1 only"
        ways = ", ".join(map(str, fitting[:-1])) + last
        raise ValueError(f"{obstacle}; model = ... can be {ways}")
    if shards == 1:
        return config

    def own(units: int) -> int:
        return 0 if units == 0 else max(1, units // shards)

    m, a, mlp, moe = config.mamba2, config.attention, config.mlp, config.moe
    if m is not None:
        m = dataclasses.replace(
            m,
            num_heads=own(m.num_heads),
            num_groups=own(m.num_groups),
            num_x_heads=own(m.x_heads),
            num_b_groups=own(m.b_groups),
            mlp_dim=own(m.mlp_dim),
            norm_groups=1 if m.norm == "none" else own(m.gate_groups),
        )
    if a is not None:
        a = dataclasses.replace(
            a,
            num_heads=own(a.num_heads),
            num_kv_heads=own(a.num_kv_heads),
            mlp_dim=own(a.mlp_dim),
        )
    if mlp is not None:
        mlp = dataclasses.replace(mlp, hidden_size=own(mlp.hidden_size))
    if moe is not None:
        moe = dataclasses.replace(moe, shared_size=own(moe.shared_size))
        if _by_expert(moe, shards):
            moe = MoeShardConfig(**vars(moe), experts_held=own(moe.num_experts))
        else:
            moe = dataclasses.replace(moe, hidden_size=own(moe.hidden_size))
    return dataclasses.replace(
        config,
        mamba2=m,
        attention=a,
        mlp=mlp,
        moe=moe,
        vocab_size=own(config.num_embeddings),
        padded_vocab_size=None,
        eos_token=None,
    )


def _obstacle(config: ModelConfig, shards: int) -> str | None:
    """Why a model cannot be split into this many shards, or None."""
    m, a, mlp, moe = config.mamba2, config.attention, config.mlp, config.moe
    equal: dict[str, int] = {}
    shared: dict[str, int] = {}  # neighbours may hold the same unit
    if m is not None:
        equal |= {"mamba2.num_heads": m.num_heads, "mamba2.mlp_dim": m.mlp_dim}
        if m.norm != "none" and m.gate_groups > 1:  # one group spans the shards; several must not
            equal["norm groups of mamba2"] = m.gate_groups
        shared |= {"mamba2.num_groups": m.num_groups, "mamba2.num_x_heads": m.x_heads}
        shared |= {"mamba2.num_b_groups": m.b_groups}
    if a is not None:
        equal |= {"attention.num_heads": a.num_heads, "attention.mlp_dim": a.mlp_dim}
        shared |= {"attention.num_kv_heads": a.num_kv_heads}
    if mlp is not None:
        equal["mlp.hidden_size"] = mlp.hidden_size
    if moe is not None:
        equal["moe.shared_size"] = moe.shared_size
        if not _by_expert(moe, shards):
            equal["moe.hidden_size"] = moe.hidden_size
    equal["padded_vocab_size"] = config.num_embeddings
    for name, size in equal.items():
        if size % shards:
            return f"{name} = {size} does not fit model = {shards}: it is no multiple"
    for name, size in shared.items():
        if size % shards and shards % size:
            return f"{name} = {size} does not fit model = {shards}: neither divides the other"
    return None


def _by_expert(config: MoeConfig, shards: int) -> bool:
    """Whether a shard has whole experts instead of a slice of each, because slices are too narrow.

    Slices are better: whatever a token chooses, all shards work.
    """
    too_narrow = config.hidden_size % (_NARROWEST * shards) != 0
    return too_narrow and config.num_experts % shards == 0


def spans_shards(config: Mamba2Config) -> bool:
    """Whether the gated norm spans the heads of all shards."""
    return config.norm != "none" and config.gate_groups == 1


def cuts(config: ModelConfig, shards: int) -> dict[str, Cut]:
    """The cut of each weight of the whole model, by name; weights without one are replicated."""
    if shards == 1:
        return {}
    words = Cut(0, ((config.num_embeddings, 1),))
    table = {"embedding": words, "head": words}
    mlp = {} if config.mlp is None else _mlp_cuts(config.mlp.hidden_size, config.mlp.gated)
    mlp_columns = mlp["in_proj.kernel"].segments if mlp else ()
    attention = {} if config.attention is None else _attention_cuts(config.attention)
    for i, kind in enumerate(config.layers):
        mixer: dict[str, Cut] = {}
        match kind:
            case "mamba2":
                assert config.mamba2 is not None
                mixer = _mamba2_cuts(config.mamba2)
            case "attention":
                mixer = attention
            case "parallel":
                assert config.mamba2 is not None
                mixer = _within("mamba2", _mamba2_cuts(config.mamba2))
                mixer |= _within("attention", attention)
            case "mlp":
                mixer = mlp
            case "moe":
                assert config.moe is not None
                hidden = (config.moe.hidden_size, 1)
                mixer = _within("shared", _mlp_cuts(config.moe.shared_size, config.moe.gated))
                experts = Cut(0, ((config.moe.num_experts, 1),))
                whole = _by_expert(config.moe, shards)
                columns = Cut(2, (hidden,) * (1 + config.moe.gated))
                mixer["experts_in"] = experts if whole else columns
                mixer["experts_out"] = experts if whole else Cut(1, (hidden,))
            case "shared":
                qkv = attention["qkv"].segments
                for j, segment in enumerate(qkv):
                    mixer[f"qkv_adapters.{j}.up.kernel"] = Cut(1, (segment,))
                mixer["mlp_adapter.up.kernel"] = Cut(1, mlp_columns)
        table |= _within(f"blocks.{i}.mixer", mixer)
    for j in range(0 if config.shared is None else config.shared.num_blocks):
        table |= _within(f"shared.{j}.attention", attention) | _within(f"shared.{j}.mlp", mlp)
    return table


def _within(prefix: str, table: dict[str, Cut]) -> dict[str, Cut]:
    return {f"{prefix}.{name}": cut for name, cut in table.items()}


def _mamba2_cuts(c: Mamba2Config) -> dict[str, Cut]:
    # As `Mamba2Layout` orders them.
    z = (c.num_heads, c.head_dim)
    x, B = (c.x_heads, c.head_dim), (c.b_groups, c.state_size)
    C, dt = (c.num_groups, c.state_size), (c.num_heads, 1)
    branch = (c.mlp_dim, 1)
    columns = (branch, branch, z, x, B, C, dt)
    channels = (z, C, C) if c.repeat_before_conv else (x, B, C)
    heads = Cut(0, (dt,))
    return {
        "in_proj.kernel": Cut(1, columns),
        "in_proj.bias": Cut(0, columns),
        "out_proj.kernel": Cut(0, (branch, z)),
        "conv_weight": Cut(1, channels),
        "conv_bias": Cut(0, channels),
        "A_log": heads,
        "dt_bias": heads,
        "D": Cut(0, (z,)) if c.d_per_channel else heads,
        "norm_scale": Cut(0, (z,)),
    }


def _attention_cuts(c: AttentionConfig) -> dict[str, Cut]:
    """Includes an entry "qkv", which is not a weight."""
    q, k = (c.num_heads, c.head_dim), (c.num_kv_heads, c.head_dim)
    branch = (c.mlp_dim, 1)
    return {
        "qkv": Cut(0, (q, k, k)),
        "in_proj.kernel": Cut(1, (q, k, k, branch, branch)),
        "in_proj.bias": Cut(0, (q, k, k, branch, branch)),
        "out_proj.kernel": Cut(0, (q, branch)),
        "conv_weight": Cut(1, (q, k, k)),
        "conv_bias": Cut(0, (q, k, k)),
    }


def _mlp_cuts(hidden_size: int, gated: bool) -> dict[str, Cut]:
    hidden = (hidden_size, 1)
    return {
        "in_proj.kernel": Cut(1, (hidden,) * (1 + gated)),
        "in_proj.bias": Cut(0, (hidden,) * (1 + gated)),
        "out_proj.kernel": Cut(0, (hidden,)),
    }
