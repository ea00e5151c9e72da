"""The table of exactness finds an op that is wrong for a tree, and right for a chain of one node.

A mutation exchanges nodes in an op's results, lets a node see one that is not its ancestor, or
leaves the last node of a path out; all only in calls whose arrays have as many nodes as the tree,
so that prompts and autoregressive texts are right.
"""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch
from stree_jax.testing import assert_same_text
from tests.decoding.texts import ROWS, autoregressive, decoded, model_of, planned
from tests.drafters import KnownText
from tests.methods import RAGGED

NODES = RAGGED.num_nodes


def has_nodes(array, *shape):
    """Whether the last axes of a shape, None for any size, are these."""
    last = getattr(array, "shape", ())[-len(shape) :]
    return len(last) == len(shape) and all(b in (None, a) for a, b in zip(last, shape, strict=True))


def exchanged(array):
    """Each node gets what the node before it should have."""
    for axis, size in enumerate(getattr(array, "shape", ())):
        if size in (NODES, NODES * len(ROWS)):
            return jnp.roll(array, 1, axis)
    return array


def seen_by_the_next(array):
    """Each node is an ancestor of the next; in a convolution nodes have each other's inputs."""
    if has_nodes(array, NODES, NODES) and array.dtype == bool:
        return array | jnp.eye(NODES, k=-1, dtype=bool)
    if has_nodes(array, NODES, None) and jnp.issubdtype(array.dtype, jnp.integer):
        return jnp.roll(array, 1, axis=-2)
    return array


def one_short(array):
    """A path ends one node too early."""
    if has_nodes(array, len(ROWS), NODES) and array.ndim == 2 and array.dtype == bool:
        return array & (jnp.cumsum(array[:, ::-1], axis=1)[:, ::-1] > 1)
    return array


@pytest.fixture
def mutated(monkeypatch):
    """`mutated(op, mutation)`: from now on this op is wrong. Returns the list of changed arrays."""
    run, changed = dispatch.run, []

    def mutate(op, mutation):
        def changes(tree):
            leaves, structure = jax.tree.flatten(tree)
            mutants = [mutation(leaf) for leaf in leaves]
            changed.extend(a for a, b in zip(leaves, mutants, strict=True) if a is not b)
            return jax.tree.unflatten(structure, mutants)

        def wrong(name, versions, arguments, **settings):
            if name != op:
                return run(name, versions, arguments, **settings)
            if mutation is exchanged:
                return changes(run(name, versions, arguments, **settings))
            return run(name, versions, changes(arguments), **settings)

        monkeypatch.setattr(dispatch, "run", wrong)
        return changed

    jax.clear_caches()
    yield mutate
    jax.clear_caches()


CASES = [
    ("plain, int8", "matmul", exchanged),
    ("plain, int8", "rms_norm", exchanged),
    ("plain, int8", "largest_threshold", exchanged),
    ("plain, int8", "tree_conv1d_layer", exchanged),
    ("plain, int8", "tree_conv1d_layer", seen_by_the_next),
    ("plain, int8", "replay", one_short),
    ("plain, int8", "replay_tree_scan", exchanged),
    ("plain, int8", "replay_tree_scan", seen_by_the_next),
    ("plain, int8", "replay_tree_scan", one_short),
    ("mamba2attn hybrid", "add_rms_norm", exchanged),
    ("mamba2attn hybrid", "tree_conv1d", exchanged),
    ("mamba2attn hybrid", "tree_conv1d", seen_by_the_next),
    ("mamba2attn hybrid", "tree_attention", exchanged),
    ("mamba2attn hybrid", "tree_attention", seen_by_the_next),
    ("mamba2attn hybrid", "tree_attention_layer", exchanged),
    ("mamba2attn hybrid", "tree_attention_layer", seen_by_the_next),
    ("kimi_linear hybrid", "tree_attention", exchanged),
    ("kimi_linear hybrid", "tree_attention", seen_by_the_next),
    ("lfm2 hybrid", "tree_conv1d", exchanged),
    ("lfm2 hybrid", "tree_conv1d", seen_by_the_next),
    ("granite_moe hybrid", "expert_mlps", exchanged),
    ("qwen3_5 hybrid", "gated_rms_norm", exchanged),
    ("qwen3_5 hybrid", "replay_delta", one_short),
    ("qwen3_5 hybrid", "replay_tree_delta", exchanged),
    ("qwen3_5 hybrid", "replay_tree_delta", seen_by_the_next),
    ("qwen3_5 hybrid", "replay_tree_delta", one_short),
    ("bailing_hybrid hybrid", "replay_tree_delta", seen_by_the_next),
    ("bailing_hybrid hybrid", "replay_tree_delta", one_short),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "op", "mutation"),
    CASES,
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_a_wrong_op_is_found(family, op, mutation, mutated):
    target, want = model_of(family), autoregressive(family)
    drafter = KnownText([row.prompt for row in ROWS], want.tokens, target.config.vocab_size)
    changed = mutated(op, mutation)
    request = planned(target, ROWS, drafter=drafter, topology=RAGGED)
    got = decoded(target, request)
    assert changed
    with pytest.raises(AssertionError):
        assert_same_text(target, request, got, want)
