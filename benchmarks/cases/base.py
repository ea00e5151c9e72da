"""Problems, cases, random trees and arrays, and errors against float64."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import stree_jax as st
from benchmarks.shapes import AttentionShape, ExpertShape

# Limits of the relative error against float64, the same as in the tests. In bfloat16 an output is
# rounded once; a mean square doubles the relative error; experts also round between their two
# matrices; a state is float32, and its products split bfloat16 operands into two parts.
LIMITS = {
    "float32": {"output": 2e-6, "square": 4e-6, "state": 2e-6, "experts": 4e-6},
    "bfloat16": {"output": 4e-3, "square": 8e-3, "state": 1e-5, "experts": 8e-3},
}
_DISTINCT = 8  # different trees in a batch


class Problem(NamedTuple):
    """The size of one call. In a batch, row 1 has an empty path and a third of the cache."""

    shape: Any  # of `benchmarks.shapes`
    nodes: int
    dtype: str
    batch: int = 1
    capacity: int = 0  # positions of the KV cache
    seed: int = 0


class Case(NamedTuple):
    """One op with operands of real shapes."""

    function: Callable[..., Any]  # the op; takes the operands and an `implementation`
    with_blocks: Callable[..., Any]  # the kernel; takes the operands, `blocks` and `interpret`
    operands: Callable[[Problem], tuple[jax.Array, ...]]  # on the device
    # Takes the operands in float64 and the parents of the trees `[B, N]`.
    reference: Callable[..., tuple[np.ndarray, ...]]
    outputs: tuple[str, ...]  # their kinds, for `LIMITS`
    shapes: Mapping[str, Any]  # of real models
    feedback: Mapping[int, int] = {}  # operands updated in place, and the outputs they become
    unread: Callable[[tuple], int] = lambda operands: 0  # bytes that a call does not touch

    @property
    def kind(self) -> type:
        """The type of its shapes: `MixerShape`, `AttentionShape` or `ExpertShape`."""
        (kind,) = {type(shape) for shape in self.shapes.values()}
        return kind


def random_tree(nodes: int, seed: int) -> st.TreeTopology:
    """A random tree; the parent of each node is one of the nodes before it."""
    rng = np.random.default_rng(seed)
    return st.TreeTopology((-1, *(int(rng.integers(0, i)) for i in range(1, nodes))))


def trees(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Parents `[B, N]` and ancestor masks `[B, N, N]`; rows have different trees."""
    few = [
        random_tree(problem.nodes, problem.seed + 100 * problem.nodes + row)
        for row in range(min(problem.batch, _DISTINCT))
    ]
    rows = [few[row % len(few)] for row in range(problem.batch)]
    return (
        np.array([tree.parents for tree in rows], np.int32),
        np.stack([tree.ancestor_mask for tree in rows]),
    )


def accepted(problem: Problem) -> np.ndarray:
    """Masks `[B, N]` of the path to the last node of each tree; empty in row 1."""
    path = trees(problem)[1][:, -1].copy()
    path[1:2] = False
    return path


def draw(problem: Problem) -> Callable[..., jax.Array]:
    """A function that draws normal arrays, of the problem's dtype unless told another."""
    keys = iter(jax.random.split(jax.random.key(problem.seed), 64))

    def normal(*sizes: int, dtype: str | None = None) -> jax.Array:
        return jax.random.normal(next(keys), sizes).astype(dtype or problem.dtype)

    return normal


def ssm_operands(problem: Problem) -> dict[str, jax.Array]:
    """Inputs of a Mamba-2 scan by name, `N` nodes or positions, and its state."""
    heads, channels, state, groups = problem.shape
    normal, batch, nodes = draw(problem), problem.batch, problem.nodes
    return {
        "x": normal(batch, nodes, heads, channels),
        "dt": jax.nn.softplus(normal(batch, nodes, heads, dtype="float32")),
        "A": -jnp.exp(normal(heads, dtype="float32")),
        "B": normal(batch, nodes, groups, state),
        "C": normal(batch, nodes, groups, state),
        "D": normal(heads, channels, dtype="float32"),
        "state": normal(batch, heads, channels, state, dtype="float32"),
    }


def tree_operands(problem: Problem) -> dict[str, jax.Array]:
    """`ssm_operands`, with the ancestor mask of the trees and an accepted path."""
    _, masks = trees(problem)
    both = {"mask": jnp.asarray(masks), "path": jnp.asarray(accepted(problem))}
    return ssm_operands(problem) | both


def small(shape: Any) -> Any:
    """A shape cut to two heads (or groups of heads), few experts: float64 is slow."""
    if isinstance(shape, ExpertShape):
        return shape._replace(num_experts=8)
    if isinstance(shape, AttentionShape):
        return shape._replace(num_heads=2 * shape.num_heads // shape.num_kv_heads, num_kv_heads=2)
    return shape._replace(num_heads=2, num_groups=min(shape.num_groups, 2))


def as_tuple(value: Any) -> tuple:
    """The outputs of an op that may return a single array."""
    return value if isinstance(value, tuple) else (value,)


def relative_error(value: jax.Array, truth: np.ndarray | jax.Array) -> float:
    """Frobenius norm of the difference over `truth`'s; infinite if anything is not finite."""
    got, wanted = float64(value), float64(truth)
    error = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
    return error if math.isfinite(error) else math.inf


def float64(value: np.ndarray | jax.Array) -> np.ndarray:
    """The same numbers in float64; NumPy alone cannot convert bfloat16."""
    if isinstance(value, jax.Array):
        value = np.asarray(value.astype("float32"))
    return value.astype(np.float64)
