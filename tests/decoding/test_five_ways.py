"""One state, five ways: random requests; and mistakes that they find, in ops and in caches.

A mutation exchanges nodes in an op's results, lets a node see one that is not its ancestor, or
leaves the last node of a path out; all only in calls whose arrays have as many nodes as the tree,
so that prompts and plain texts are right. Others are of a prefix cache, and of native code.
"""

import os
import shutil
import subprocess
import sys

import hypothesis
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch, native
from pallas_kernels.native import build_backend
from stree_jax.serving import prefill
from stree_jax.serving.prefix_cache import PrefixCache
from stree_jax.testing import CONFIGS
from tests.decoding.five_ways import MUCH, ROWS, TREE, holds, skip_gelu

pytestmark = pytest.mark.skipif(native.obstacle() is not None, reason="native code does not run")

NODES = TREE.num_nodes
KINDS = ("float32", "bfloat16", "int8", "int4")
# Of each of 22 families in one type; 334 in all types are 22,000.
EXAMPLES = int(os.environ.get("STREE_JAX_EXAMPLES", 11))


def cells():
    """Each family in one type, and in the others where more examples run."""
    for number, family in enumerate(CONFIGS):
        for kind in KINDS:
            marks = [] if family == "nemotron_h hybrid" else [pytest.mark.thorough]
            is_usual = kind == KINDS[number % len(KINDS)]
            yield pytest.param(family, kind, marks=marks if is_usual else [pytest.mark.slow])


@pytest.mark.parametrize(("family", "kind"), [*cells()])
def test_five_ways(family, kind):
    skip_gelu(family)
    assert holds(family, kind, EXAMPLES) > EXAMPLES


def has_nodes(array, *shape):
    """Whether the last axes of a shape, None for any size, are these."""
    last = getattr(array, "shape", ())[-len(shape) :]
    return len(last) == len(shape) and all(b in (None, a) for a, b in zip(last, shape, strict=True))


def exchanged(array):
    """Each node gets what the node before it should have."""
    for axis, size in enumerate(getattr(array, "shape", ())):
        if size in (NODES, NODES * ROWS):
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
    if has_nodes(array, ROWS, NODES) and array.ndim == 2 and array.dtype == bool:
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


# Families, a mutation, and the ops that it makes wrong.
CASES = [
    ("plain", exchanged, "matmul rms_norm largest_threshold tree_conv1d_layer replay_tree_scan"),
    ("plain", seen_by_the_next, "tree_conv1d_layer replay_tree_scan"),
    ("plain", one_short, "replay replay_tree_scan"),
    ("mamba2attn hybrid", exchanged, "add_rms_norm tree_attention tree_attention_layer"),
    ("mamba2attn hybrid", seen_by_the_next, "tree_conv1d tree_attention tree_attention_layer"),
    ("lfm2 hybrid", exchanged, "tree_conv1d"),
    ("granite_moe hybrid", exchanged, "expert_mlps"),
    ("qwen3_5 hybrid", exchanged, "gated_rms_norm replay_tree_delta"),
    ("qwen3_5 hybrid", seen_by_the_next, "replay_tree_delta"),
    ("qwen3_5 hybrid", one_short, "replay_delta replay_tree_delta"),
    ("kimi_linear hybrid", exchanged, "tree_attention"),
    ("kimi_linear hybrid", seen_by_the_next, "tree_attention"),
    ("bailing_hybrid hybrid", seen_by_the_next, "replay_tree_delta"),
    ("bailing_hybrid hybrid", one_short, "replay_tree_delta"),
]


def is_found(family):
    with pytest.raises(AssertionError):
        holds(family, "float32", 40, [hypothesis.Phase.generate])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mutation", "op"),
    [(family, mutation, op) for family, mutation, ops in CASES for op in ops.split()],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_wrong_op_is_found(family, mutation, op, mutated):
    changed = mutated(op, mutation)
    is_found(family)
    assert changed


@pytest.mark.thorough
@pytest.mark.parametrize("mistake", ["a token too long", "of other weights"])
def test_a_wrong_cache_is_found(mistake, monkeypatch):
    if mistake == "a token too long":
        find = PrefixCache.find

        def wrong(cache, text, **options):
            match = find(cache, text, **options)
            return match and (min(match[0] + 1, len(text)), match[1])

        monkeypatch.setattr(PrefixCache, "find", wrong)
    else:  # all schedulers have the entries of one
        entries = PrefixCache(MUCH)
        monkeypatch.setattr(prefill, "PrefixCache", lambda _: entries)
    is_found("nemotron_h hybrid")


# In a file of native code: what it says, what another order says, and a family that shows it.
MUTATIONS = {
    "a sum": (
        "native/state.h",
        "rows[r] = fused(rows[r], kept, splat(token.in[r]) * into)",
        "rows[r] = fused(splat(token.in[r]), into, rows[r] * kept)",
        "mixed hybrid",
    ),
    "a decay": (
        "tree_delta/native.cc",
        "old[j].decays = &old_decays[j * width];",
        "float& kept = old_decays[j * width]; kept = 1 / (1 / kept); old[j].decays = &kept;",
        "qwen3_next hybrid",
    ),
    "a key with decays": (
        "tree_delta/native.cc",
        "load(key + s) * load(token.decays + s)",
        "load(key + s) * load(token.decays + s) * splat(above ? 1.0000002f : 1.0f)",
        "kimi_linear hybrid",
    ),
    "a block": (
        "tree_attention/native.cc",
        "int64_t position = used;",
        "int64_t position = used; row.add(block, size, scale); block.count = 0;",
        "qwen3_next hybrid",
    ),
}
CHECK = """
from pallas_kernels.native import build_backend
build_backend.build(chosen=build_backend.own_levels()[-1:])
from hypothesis import Phase
from tests.decoding.five_ways import holds
holds({!r}, 'float32', 40, [Phase.generate])
"""


@pytest.mark.skipif(not build_backend.sources(), reason="there are no sources")
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_another_order_is_found(name, tmp_path):
    file, right, wrong, family = MUTATIONS[name]
    package = shutil.copytree(build_backend.HERE.parent, tmp_path / "pallas_kernels")
    text = (package / file).read_text()
    assert text.count(right) == 1
    (package / file).write_text(text.replace(right, wrong))
    paths = os.environ | {"PYTHONPATH": f"{tmp_path}:{build_backend.HERE.parents[1]}"}
    command = [sys.executable, "-c", CHECK.format(family)]
    found = subprocess.run(command, cwd=tmp_path, env=paths, stderr=subprocess.PIPE, text=True)
    assert "Arrays are not equal" in found.stderr
