"""What a decode program is given, and what drafters and verifiers return, against an example.

All is checked while the program is traced: it has nothing of it. Who returns another structure or
dtype fails here, with the name of the method, and not inside XLA or in the carry of a loop.
"""

import dataclasses
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stree_jax.array_types import Array
from stree_jax.decoding.types import Context, DraftTree, Drawn, Limits, Sampling
from stree_jax.messages import shown
from stree_jax.tree import Tree, TreeTopology

# What `jax_enable_x64` makes of numbers that are not said to have 32 bits.
_NARROW = {np.dtype(f"{kind}64"): np.dtype(f"{kind}32") for kind in ("int", "uint", "float")}


@dataclasses.dataclass(frozen=True)
class _Some:
    """An example of an array; jax.ShapeDtypeStruct allows no size of None."""

    shape: tuple[int | None, ...]
    dtype: Any


def some(dtype: Any, *sizes: int | None) -> Any:
    """An example of an array; a size of None is any."""
    return _Some(sizes, jax.ShapeDtypeStruct((), dtype).dtype)


def check_like(what: str, value: Any, example: Any) -> Any:
    """The value, refused unless it is like an example, with numbers in its 32 bits.

    The example has arrays, or what `some` gives. `what` is the value's name in messages.
    """
    wanted = jax.tree_util.tree_leaves_with_path(example)
    example_structure: Any = jax.tree.structure(example)
    leaves, structure = jax.tree.flatten(value)
    if structure != example_structure:
        raise ValueError(f"{what} must be {_named(example)}, got {_named(value)}")
    new = []
    for (path, want), leaf in zip(wanted, leaves, strict=True):
        where = f"{what}{jax.tree_util.keystr(path)}"
        if not _is_array(leaf):
            raise ValueError(f"{where} must be an array, got {shown(leaf)}")
        have, dtype, sizes = jnp.result_type(leaf), jnp.result_type(want), np.shape(want)
        fits = len(jnp.shape(leaf)) == len(sizes) and all(
            wanted_size in (None, size)
            for size, wanted_size in zip(jnp.shape(leaf), sizes, strict=True)
        )
        if not fits or dtype not in (have, _NARROW.get(have)):
            raise ValueError(f"{where} must be {kind_of(want)}, got {kind_of(leaf)}")
        new.append(leaf if dtype == have else leaf.astype(dtype))
    return jax.tree.unflatten(structure, new)


def checked_prompts(prompts: Any) -> Context:
    """Right-padded texts."""
    lengths = getattr(prompts, "length", None)
    batch = next(iter(getattr(lengths, "shape", ())), None)
    example = Context(some(jnp.int32, batch, None), some(jnp.int32, batch))
    return check_like("prompts", prompts, example)


def check_keys(keys: Any, batch: int) -> None:
    """Refuses what is not a random key for each row, typed or raw."""
    is_typed = _is_array(keys) and jnp.issubdtype(jnp.result_type(keys), jax.dtypes.prng_key)
    example = some(keys.dtype, batch) if is_typed else some(np.uint32, batch, None)
    check_like(f"keys, such as jax.random.split(key, {batch}),", keys, example)


def checked_settings(limits: Any, sampling: Any, batch: int) -> tuple[Limits, Sampling]:
    """Limits and sampling settings of the rows, or of one for all."""
    for name, value, kind in (("limits", limits, Limits), ("sampling", sampling, Sampling)):
        if not isinstance(value, kind):
            raise ValueError(f"{name} must be a {kind.__name__}, got {kind_of(value)}")

    def rows(values: Any) -> int:
        return 1 if getattr(values, "shape", ())[:1] == (1,) else batch

    most, ends = rows(limits.max_new_tokens), rows(limits.eos_tokens)
    example = limits._replace(
        max_new_tokens=some(jnp.int32, most), eos_tokens=some(jnp.int32, ends, None)
    )
    heat = some(jnp.float32, rows(sampling.temperature))
    sampling = jax.tree.map(_narrowed, sampling)
    heat = check_like("sampling.temperature", sampling.temperature, heat)
    return check_like("limits", limits, example), dataclasses.replace(sampling, temperature=heat)


def checked_proposal(
    drafter: Any,
    returned: Any,
    before: Any,
    batch: int,
    topology: TreeTopology,
    vocab_size: int,
    *,
    has_room: bool,
) -> tuple[DraftTree, Any]:
    """What `propose` returned: a draft of the topology's size, and a state as before."""
    name = f"{type(drafter).__name__}.propose"
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], tuple)):
        raise ValueError(f"{name} must return a DraftTree and the state, got {_named(returned)}")
    draft, state = returned
    nodes = batch, topology.num_nodes
    ints, flags = some(jnp.int32, *nodes), some(jnp.bool_, *nodes)
    has_log_probs = getattr(draft, "log_probs", None) is not None
    example = DraftTree(
        ints,
        Tree(ints, ints, some(jnp.bool_, *nodes, nodes[1]), flags),
        some(jnp.float32, batch, None, vocab_size) if has_log_probs else None,
        some(jnp.int32, nodes[1]),
        some(jnp.bool_, batch),
        getattr(draft, "drawn", Drawn()),
    )
    draft = check_like(f"{name}: draft", draft, example)
    return draft, checked_state(f"{name}: state", state, before, has_room=has_room)


def checked_state(what: str, state: Any, before: Any, *, has_room: bool) -> Any:
    """A drafter's state, like that before; `has_room`: for larger trees, so it may be smaller."""
    structures: list[Any] = [*map(jax.tree.structure, (state, before))]
    if has_room and structures[0] == structures[1]:
        state = jax.tree.map(_into, before, state)
    return check_like(what, state, before)


def _into(room: Array, new: Array) -> Array:
    """An array with its beginning replaced, in place where nothing else reads it."""
    sizes = zip(new.shape, room.shape, strict=False)
    if new.shape == room.shape or new.ndim != room.ndim or any(n > most for n, most in sizes):
        return new
    if room.dtype == bool:  # a mask: what a smaller tree lacks is on no path
        room = jnp.zeros_like(room)
    return lax.dynamic_update_slice(room, new.astype(room.dtype), (0,) * room.ndim)


def kind_of(value: Any) -> str:
    """The dtype and shape of an array, else the type."""
    if not _is_array(value):
        return type(value).__name__
    sizes = ("any" if size is None else str(size) for size in np.shape(value))
    return f"{jnp.result_type(value)}[{', '.join(sizes)}]"


def _named(value: Any) -> str:
    """The fields of a NamedTuple, a structure, or the kind of anything else."""
    if fields := getattr(value, "_fields", None):
        parts = ", ".join(f"{field}: {_named(getattr(value, field))}" for field in fields)
        return f"{type(value).__name__}({parts})"[:300]
    return shown(value) if isinstance(value, dict | list | tuple) else kind_of(value)


def _narrowed(leaf: Any) -> Any:
    dtype = _NARROW.get(getattr(leaf, "dtype", np.dtype(bool)))
    return leaf if dtype is None else leaf.astype(dtype)


def _is_array(value: Any) -> bool:
    kinds = jax.Array | np.ndarray | np.generic | numbers.Number | _Some
    return isinstance(value, kinds)
