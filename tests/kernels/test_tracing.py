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
    layers=("mamba2",),
    mamba2=Mamba2Config(num_heads=4, head_dim=16, state_size=16),
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16, rotary_dim=16),
    mlp=MlpConfig(32),
    moe=MoeConfig(num_experts=4, num_active=2, hidden_size=16),
)
STACKS = {"mamba2": ("mamba2",), "hybrid": ("mamba2", "mlp", "attention", "moe")}
# How often kernels are traced, whatever the number of layers: `add_rms_norm` once for outputs whose
# norm is deferred and once for others, `expert_product` once for each matrix of an expert.
EXPECTED = {
    ("mamba2", "step"): {"tree_conv1d": 1, "replay_tree_scan": 1, "add_rms_norm": 1},
    ("hybrid", "step"): {
        "tree_conv1d": 1,
        "replay_tree_scan": 1,
        "add_rms_norm": 2,
        "tree_attention_layer": 1,
        "tree_attention_combine": 1,
        "expert_product": 2,
    },
    ("hybrid", "prefill"): {
        "ssd": 1,
        "tree_attention": 1,
        "tree_attention_combine": 1,
        "expert_product": 2,
    },
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


def program(layers, method):
    """A method of a model without weights, and what `jax.eval_shape` needs to call it."""
    config = dataclasses.replace(CONFIG, layers=layers)
    structure, weights = HybridLM.abstract(config, implementation="pallas")
    nodes = TOPOLOGY.num_nodes
    cache = jax.eval_shape(lambda: init_cache(config, BATCH, PLACES, jnp.float32))
    pending = jax.eval_shape(lambda: init_pending(config, BATCH, nodes, jnp.float32))
    tokens = jax.ShapeDtypeStruct((BATCH, nodes), jnp.int32)
    lengths = jax.ShapeDtypeStruct((BATCH,), jnp.int32)

    def step(weights, tokens, pending, cache):
        tree = TOPOLOGY.tree(jnp.ones((BATCH, nodes), bool))
        path = path_to(tree, jnp.zeros(BATCH, jnp.int32))
        model = nnx.merge(structure, weights)
        return model.tree_forward(tokens, tree, cache, replay=(pending, path))

    def prefill(weights, tokens, lengths, cache):
        return nnx.merge(structure, weights).prefill(tokens, lengths, cache)

    if method == "prefill":
        return prefill, (weights, tokens, lengths, cache)
    return step, (weights, tokens, pending, cache)


@pytest.mark.parametrize("num_layers", [8, 64])
@pytest.mark.parametrize(("stack", "method"), EXPECTED)
def test_each_kernel_is_traced_and_lowered_once(stack, method, num_layers, names):
    layers = STACKS[stack]
    function, arguments = program(layers * (num_layers // len(layers)), method)
    code = lowered(function, arguments, CAPABILITIES[-1])
    expected = EXPECTED[stack, method]
    assert Counter(names) == expected
    assert code.count("__gpu$xla.gpu.triton") == sum(expected.values())
