"""Shapes and dtypes of what the loop is given, and of what drafters and verifiers return.

They are checked while the loop is traced, for a program has no errors: what is wrong fails with the
name of who gave it, and not inside XLA or in the carry of a loop.
"""

import dataclasses
import functools
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.decoding.types import Context, DraftTree, Limits, Sampling, Verdict
from stree_jax.messages import shown
from stree_jax.tree import Tree, TreeTopology


@dataclasses.dataclass(frozen=True)
class Like:
    """An array of a shape, in which None is any size, and of a type of numbers."""

    shape: tuple[int | None, ...]
    dtype: Any

    def __str__(self) -> str:
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape)
        return f"{self.dtype.__name__}[{sizes}]"


def check_like(what: str, value: Any, example: Any) -> None:
    """Refuses a value of another structure, or with arrays of other shapes or dtypes.

    Args:
        what: the beginning of the message: who gave the value.
        value: any pytree.
        example: a pytree of arrays and of `Like`s.

    Raises:
        ValueError: names the first array that differs.
    """
    want: Any = jax.tree.structure(example)
    have: Any = jax.tree.structure(value)
    arrays = jax.tree_util.tree_leaves_with_path(example)
    if have == want and all(  # formats nothing: this runs before every text
        _is_like(own, wanted)
        for own, (_, wanted) in zip(jax.tree.leaves(value), arrays, strict=True)
    ):
        return
    if isinstance(example, tuple) and not isinstance(value, type(example)):
        fields = ", ".join(getattr(example, "_fields", ()))
        name = f"{type(example).__name__}({fields})"
        raise ValueError(f"{what}: wanted a {name}, got {kind_of(value)}")
    for path, wanted in arrays:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        try:
            own = functools.reduce(_step, path, value)
        except (AttributeError, KeyError, IndexError, TypeError):
            raise ValueError(f"{what}: wanted {name}, got {kind_of(value)} without it") from None
        if not _is_like(own, wanted):
            kind = str(wanted) if isinstance(wanted, Like) else kind_of(wanted)
            as_kind = f"{name} as {kind}" if name else kind
            raise ValueError(f"{what}: wanted {as_kind}, got {kind_of(own)}")
    raise ValueError(f"{what}: wanted the structure {shown(want)}, got {shown(have)}")


def check_prompts(prompts: Any) -> None:
    """Refuses what is no `Context` of right-padded texts."""
    batch = np.shape(prompts.length)[:1] if isinstance(prompts, Context) else ()
    length, tokens = (Like(shape, jnp.integer) for shape in ((None,), (*(batch or (None,)), None)))
    check_like("prompts", prompts, Context(tokens, length))


def check_keys(keys: Any, batch: int) -> None:
    """Refuses what is not a random key for each row, typed or raw."""
    is_array = isinstance(keys, jax.Array)
    is_raw = is_array and keys.dtype == jnp.uint32
    is_typed = is_array and jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    if not (is_raw or is_typed) or keys.ndim != 1 + is_raw or len(keys) != batch:
        raise ValueError(
            f"keys must be a random key for each of {batch} rows, jax.random.split(key, {batch}),"
            f" got {kind_of(keys)}"
        )


def check_settings(limits: Any, sampling: Any, batch: int) -> None:
    """Refuses limits and sampling settings that are not those of the rows, or of one for all."""

    def like(values: Any, kind: Any, *more: None) -> Like:
        rows = 1 if np.shape(values)[:1] == (1,) else batch
        return Like((rows, *more), kind)

    most, ends = (getattr(limits, name, None) for name in ("max_new_tokens", "eos_tokens"))
    stops = limits.stops if isinstance(limits, Limits) else None
    own = Limits(like(most, jnp.integer), like(ends, jnp.integer, None), stops)
    check_like("limits", limits, own)
    if not isinstance(sampling, Sampling):
        raise ValueError(f"sampling: wanted a Sampling(temperature), got {kind_of(sampling)}")
    check_like(
        "sampling.temperature", sampling.temperature, like(sampling.temperature, jnp.floating)
    )


def check_new_state(drafter: Any, state: Any) -> Any:
    """Returns a new state, if it is a pytree of arrays."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not _is_array(leaf):
            raise ValueError(
                f"{type(drafter).__name__}.init returned a state with"
                f" state{jax.tree_util.keystr(path)} = {shown(leaf)}; a state is a pytree of arrays"
            )
    return state


def check_state(drafter: Any, method: str, state: Any, before: Any) -> Any:
    """Returns a drafter's new state, if it is like the one that the method took."""
    check_like(f"the state that {type(drafter).__name__}.{method} returned", state, before)
    return state


def check_proposed(
    drafter: Any, returned: Any, before: Any, batch: int, topology: TreeTopology, vocab_size: int
) -> tuple[DraftTree, Any]:
    """Checks that `propose` returned a `DraftTree` of the topology, and a state as before."""
    name = f"{type(drafter).__name__}.propose"
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise ValueError(f"{name} must return a DraftTree and the state, got {kind_of(returned)}")
    draft, state = returned
    nodes = batch, topology.num_nodes
    ids = Like(nodes, jnp.int32)
    wanted = DraftTree(
        tokens=ids,
        tree=Tree(ids, ids, Like((*nodes, nodes[1]), jnp.bool_), Like(nodes, jnp.bool_)),
        log_probs=None,
        log_prob_row=Like(nodes[1:], jnp.int32),
        finite=Like(nodes[:1], jnp.bool_),
    )
    if isinstance(draft, DraftTree):
        rows = None if draft.log_probs is None else Like((batch, None, vocab_size), jnp.float32)
        wanted = wanted._replace(drawn=draft.drawn, log_probs=rows)
    check_like(f"{name} returned a DraftTree", draft, wanted)
    return draft, check_state(drafter, "propose", state, before)


def check_verdict(verifier: Any, verdict: Any, batch: int) -> Verdict:
    """Checks that `verify` returned a `Verdict` of the rows."""
    wanted = Verdict(*[Like((batch,), jnp.int32)] * 3)
    check_like(f"{type(verifier).__name__}.verify returned a Verdict", verdict, wanted)
    return verdict


def check_not_donated(state: Any) -> None:
    """Refuses a state whose arrays another program took."""
    done = state.done
    if not isinstance(done, jax.core.Tracer) and done.is_deleted():
        raise ValueError("the state was donated: use the state that run returned")


def donating(program: Any) -> Any:
    """Decorates a compiled method that donates its state: a state given twice is refused."""

    @functools.wraps(program)
    def call(decoder: Any, model: Any, drafter: Any, state: Any, *more: Any, **named: Any) -> Any:
        check_not_donated(state)
        with jax.transfer_guard("allow"):  # of `max_steps`
            return program(decoder, model, drafter, state, *more, **named)

    compiled: Any = call
    compiled.lower, compiled.trace = program.lower, program.trace
    return compiled


def kind_of(value: Any) -> str:
    """Returns the dtype and shape of an array, else the type."""
    if not _is_array(value):
        return type(value).__name__
    return f"{jnp.result_type(value)}[{', '.join(map(str, jnp.shape(value)))}]"


def _step(value: Any, key: Any) -> Any:
    """The part of a pytree at a key of a path."""
    if isinstance(key, jax.tree_util.GetAttrKey):
        return getattr(value, key.name)
    return value[key.key if isinstance(key, jax.tree_util.DictKey) else key.idx]


def _is_like(value: Any, wanted: Any) -> bool:
    if isinstance(value, jax.Array) and isinstance(wanted, jax.Array):
        return value.shape == wanted.shape and value.dtype == wanted.dtype
    if not isinstance(wanted, Like):
        return _is_array(value) and kind_of(value) == kind_of(wanted)
    if not _is_array(value) or not jnp.issubdtype(jnp.result_type(value), wanted.dtype):
        return False
    have = jnp.shape(value)
    return len(have) == len(wanted.shape) and all(
        size in (None, own) for own, size in zip(have, wanted.shape, strict=True)
    )


def _is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic, numbers.Number))
