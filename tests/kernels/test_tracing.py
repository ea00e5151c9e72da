"""A model of many layers traces and lowers each kernel once."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from pallas_kernels import triton
from stree_jax import HybridLM, ModelConfig
from stree_jax.layer_config import AttentionConfig, Mamba2Config, MlpConfig, MoeConfig
from stree_jax.models.cache import init_cache, init_pending, path_to
from stree_jax.tree import TreeTopology
from tests.kernels.test_lowering import CAPABILITIES, lowered

pytestmark = pytest.mark.skipif(triton.UNAVAILABLE is not None, reason=str(triton.UNAVAILABLE))

TOPOLOGY = TreeTopology.from_branching((2, 1, 1))
BATCH, PLACES = 2, 64
CONFIG = ModelConfig(
    vocab_size=32,
    d_model=32,
    layers=(),
    mamba2=Mamba2Config(num_heads=4, head_dim=16, state_size=16),
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16, rotary_dim=16),
    mlp=MlpConfig(32),
    moe=MoeConfig(num_experts=4, num_active=2, hidden_size=16),
)
# Layers that are repeated, and how often a kernel is traced: `add_rms_norm` once for outputs whose
# norm is deferred and once for others, `expert_product` once for each matrix.
STACKS = {
    "mamba2": (("mamba2",), {"tree_conv1d_layer": 1, "replay_tree_scan": 1, "add_rms_norm": 1}),
    "hybrid": (
        ("mamba2", "mlp", "attention", "moe"),
        {
            "tree_conv1d_layer": 1,
            "replay_tree_scan": 1,
            "add_rms_norm": 2,
            "tree_attention_layer": 1,
            "tree_attention_combine": 1,
            "expert_product": 2,
        },
    ),
}


@pytest.fixture
def names(monkeypatch):
    """The name of each kernel that is traced from now on."""
    found = []
    call = triton.call

    def recorded(kernel, *, name, **options):
        found.append(name)
        return call(kernel, name=name, **options)

    monkeypatch.setattr(triton, "call", recorded)
    jax.clear_caches()
    return found


def program(layers, implementation="pallas"):
    """A step on a tree, and its abstract arguments."""
    config = dataclasses.replace(CONFIG, layers=layers)
    structure, weights = HybridLM.abstract(config, implementation=implementation)

    def step(weights, tokens, pending, cache):
        model = nnx.merge(structure, weights)
        tree = TOPOLOGY.tree(jnp.ones((BATCH, TOPOLOGY.num_nodes), bool))
        path = path_to(tree, jnp.zeros(BATCH, jnp.int32))
        return model.tree_forward(tokens, tree, cache, replay=(pending, path))

    tokens = jax.ShapeDtypeStruct((BATCH, TOPOLOGY.num_nodes), jnp.int32)
    pending = jax.eval_shape(lambda: init_pending(config, BATCH, TOPOLOGY.num_nodes, jnp.float32))
    cache = jax.eval_shape(lambda: init_cache(config, BATCH, PLACES, jnp.float32))
    return step, (weights, tokens, pending, cache)


@pytest.mark.parametrize("num_layers", [8, 64])
@pytest.mark.parametrize("stack", STACKS)
def test_a_step_traces_and_lowers_each_kernel_once(stack, num_layers, names):
    layers, expected = STACKS[stack]
    step, arguments = program(layers * (num_layers // len(layers)))
    code = lowered(step, arguments, CAPABILITIES[-1])
    assert Counter(names) == expected
    assert code.count("__gpu$xla.gpu.triton") == sum(expected.values())
