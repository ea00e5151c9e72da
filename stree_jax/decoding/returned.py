"""Checks of what drafters and verifiers return, while the loop is traced: a program has none.

An extension that returns another structure, shape or dtype fails here, with the name of its method,
and not inside XLA or in the carry of a loop.
"""

import numbers
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.decoding.types import DraftTree, Verdict
from stree_jax.messages import shown
from stree_jax.tree import Tree, TreeTopology

_Wanted = dict[str, tuple[tuple[int | None, ...], Any]]


def check_new_state(drafter: Any, state: Any) -> Any:
    """A new state, if it is a pytree of arrays."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not _is_array(leaf):
            raise ValueError(
                f"{type(drafter).__name__}.init returned a state with"
                f" state{jax.tree_util.keystr(path)} = {shown(leaf)}; a state is a pytree of arrays"
            )
    return state


def check_proposed(
    drafter: Any, returned: Any, before: Any, batch: int, topology: TreeTopology, vocab_size: int
) -> tuple[DraftTree, Any]:
    """Checks that `propose` returned a `DraftTree` of the topology, and a state as before."""
    name = f"{type(drafter).__name__}.propose"
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise ValueError(f"{name} must return a DraftTree and the state, got {kind_of(returned)}")
    draft, state = returned
    _require(f"{name} must return a DraftTree", draft, DraftTree)
    _require(f"{name} must return a DraftTree with a Tree as tree", draft.tree, Tree)
    nodes = batch, topology.num_nodes
    wanted: _Wanted = {
        "tokens": (nodes, jnp.int32),
        "finite": (nodes[:1], jnp.bool_),
        "log_prob_row": (nodes[1:], jnp.int32),
        "tree.parents": (nodes, jnp.int32),
        "tree.depth": (nodes, jnp.int32),
        "tree.ancestor_mask": ((*nodes, nodes[1]), jnp.bool_),
        "tree.valid": (nodes, jnp.bool_),
    }
    if draft.log_probs is not None:
        wanted["log_probs"] = (batch, None, vocab_size), jnp.float32
    check_arrays(f"{name} must return", draft, wanted)
    return draft, check_state(drafter, "propose", state, before)


def check_verdict(verifier: Any, verdict: Any, batch: int) -> Verdict:
    """Checks that `verify` returned a `Verdict` of the rows."""
    name = f"{type(verifier).__name__}.verify"
    _require(f"{name} must return a Verdict", verdict, Verdict)
    check_arrays(
        f"{name} must return", verdict, dict.fromkeys(Verdict._fields, ((batch,), jnp.int32))
    )
    return verdict


def check_state(drafter: Any, method: str, state: Any, before: Any) -> Any:
    """The state that a method returned, if it has the structure, shapes and dtypes it took."""
    name = f"{type(drafter).__name__}.{method}"
    have: Any = jax.tree.structure(state)
    want: Any = jax.tree.structure(before)
    if have != want:
        raise ValueError(
            f"{name} must return a state of the structure that it took, {shown(want)}, got"
            f" {shown(have)}"
        )
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    for path, leaf, old in zip(paths, jax.tree.leaves(state), jax.tree.leaves(before), strict=True):
        if not _is_like(leaf, old):
            raise ValueError(
                f"{name} must keep state{jax.tree_util.keystr(path)} = {kind_of(old)}, got"
                f" {kind_of(leaf)}"
            )
    return state


def _require(what: str, value: Any, cls: type) -> None:
    if not isinstance(value, cls):
        raise ValueError(f"{what}, got {kind_of(value)}")


def check_arrays(what: str, arrays: Any, wanted: _Wanted) -> None:
    """Refuses fields that are not arrays of the wanted shapes and of a wanted type of numbers."""
    for field, (shape, dtype) in wanted.items():
        value = operator.attrgetter(field)(arrays)
        fits = _is_array(value) and jnp.issubdtype(jnp.result_type(value), dtype)
        have = jnp.shape(value) if fits else ()
        sizes_fit = all(size in (None, own) for own, size in zip(have, shape, strict=False))
        if not (fits and len(have) == len(shape) and sizes_fit):
            sizes = ", ".join("any" if size is None else str(size) for size in shape)
            want = f"{dtype.__name__}[{sizes}]"
            raise ValueError(f"{what} {field} as {want}, got {kind_of(value)}")


def _is_like(leaf: Any, old: Any) -> bool:
    """True if shapes and dtypes are equal; formats nothing, for it runs before every text."""
    if isinstance(leaf, jax.Array) and isinstance(old, jax.Array):
        return leaf.shape == old.shape and leaf.dtype == old.dtype
    return _is_array(leaf) and kind_of(leaf) == kind_of(old)


def _is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic, numbers.Number))


def kind_of(value: Any) -> str:
    """The dtype and shape of an array, else the type."""
    if not _is_array(value):
        return type(value).__name__
    return f"{jnp.result_type(value)}[{', '.join(map(str, jnp.shape(value)))}]"
