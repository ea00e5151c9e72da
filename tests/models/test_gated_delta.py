"""The gated delta mixer, beyond the tables that all families are in."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from pallas_kernels import conv_gather_index
from stree_jax.models.cache import init_cache, init_pending, path_to
from stree_jax.testing import tiny_model

FAMILIES = ("qwen3_5 hybrid", "qwen3_next hybrid")
TREE = st.TreeTopology.from_parents([-1, 0, 0, 1, 1, 2, 3, 6, 7])
WHOLE = TREE.tree(jnp.ones((2, TREE.num_nodes), bool))
LAST = jnp.array([8, 4])


def random_tokens(*shape, seed=0):
    return np.random.default_rng(seed).integers(37, size=shape).astype(np.int32)


prefill = jax.jit(lambda model, *given: model.prefill(*given, model.init_cache(2, 32)))
run_tree = jax.jit(lambda model, *given: model.tree_forward(*given))
replay = jax.jit(lambda model, *given: model.replay(*given))


def relative(got, want):
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    return np.abs(got - want).max() / np.abs(want).max()


@pytest.mark.thorough
def test_the_corrections_of_a_bfloat16_models_record_are_float32():
    """And the state after their replay is that of the sequence."""
    model = tiny_model("qwen3_5 hybrid", dtype="bfloat16")
    prompts, drafts = random_tokens(2, 7), random_tokens(2, TREE.num_nodes, seed=1)
    _, cache = prefill(model, prompts, jnp.array([7, 7]))
    _, pending, _ = run_tree(model, drafts, WHOLE, cache)
    assert [x.dtype.name for x in pending[0]] == ["float32", "float32", "bfloat16", "bfloat16"]
    after = replay(model, cache, pending, path_to(WHOLE, LAST))[0]
    assert after.ssm.dtype == jnp.float32
    texts = np.zeros((2, 7 + TREE.num_nodes), np.int32)
    paths = [drafts[row, TREE.ancestor_mask[last]] for row, last in enumerate(LAST)]
    for row, path in enumerate(paths):
        texts[row, : 7 + len(path)] = [*prompts[row], *path]
    _, want = prefill(model, texts, jnp.array([7 + len(path) for path in paths]))
    assert relative(after.ssm, want[0].ssm) < 0.02


@pytest.mark.thorough
def test_memory_of_a_tree_in_the_shape_of_qwen():
    """A record of v and beta too, or of float32 keys, is larger. docs/algorithms.md says the same.

    Nothing is allocated.
    """
    config = st.ModelConfig.preset("Qwen3.5-9B")
    make = (functools.partial(make, config, 1) for make in (init_cache, init_pending))
    cache, pending = jax.eval_shape(lambda: [each(64, jnp.bfloat16) for each in make])
    delta = [layer for layer, kind in enumerate(config.kinds) if kind == "gated_delta"]
    sizes = {
        name: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(parts))
        for name, parts in {
            "states": [cache[layer].ssm for layer in delta],
            "windows": [cache[layer].conv for layer in delta],
            "records": [pending[layer] for layer in delta],
        }.items()
    }
    assert sizes == {"states": 50_331_648, "windows": 1_179_648, "records": 64 * 24 * 36_992}


@functools.cache
def read(name):
    model = tiny_model(name)
    return model, prefill(model, random_tokens(2, 7), jnp.array([7, 4]))[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_nodes_that_do_not_exist_reach_nothing(name):
    """Whatever a mixer gets there, to the bit; native code and XLA."""
    model, (cache, *_) = read(name)
    mixer = model.blocks[0].mixer
    u = jnp.asarray(np.random.default_rng(0).normal(size=(2, TREE.num_nodes, 16)), jnp.float32)
    tree = TREE.tree(jnp.arange(TREE.num_nodes)[None] < jnp.array([[5], [7]]))
    exists = jnp.diagonal(tree.ancestor_mask, axis1=1, axis2=2)[..., None]

    @jax.jit
    def outputs(u):
        width = mixer.config.conv_width
        windows = {width: conv_gather_index(tree.parents, width)}
        y, pending, _ = mixer.tree(u, tree, windows, cache)
        return jnp.where(exists, y, 0), pending.x

    for fill in (jnp.nan, jnp.inf, 1.0):
        got, want = (outputs(jnp.where(exists, u, value)) for value in (fill, 0.0))
        jax.tree.map(np.testing.assert_array_equal, got, want)
    assert not np.asarray(got[1])[~np.asarray(exists[..., 0])].any()


def test_a_record_is_valid_with_its_own_cache_alone():
    """Unlike Mamba-2's: the corrections depend on the state that the tree was run from."""
    drafts = random_tokens(2, TREE.num_nodes, seed=1)
    for name, is_bound in (("qwen3_5 hybrid", True), ("plain", False)):
        model, cache = read(name)
        forked = (cache[0]._replace(ssm=-cache[0].ssm), *cache[1:])
        own, foreign = (run_tree(model, drafts, WHOLE, each)[1][0].x for each in (cache, forked))
        assert (relative(foreign, own) > 0.1) == is_bound
