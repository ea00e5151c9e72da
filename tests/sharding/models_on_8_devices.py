"""Models on meshes of 8 CPU devices: logits and weights. Run by `test_on_8_devices.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import stree_jax as st
from pallas_kernels import dispatch
from stree_jax.mesh.partition import ONE_DEVICE, ROWS
from stree_jax.mesh.programs import over_mesh
from stree_jax.models.cache import path_to
from stree_jax.models.identity import identity
from stree_jax.testing import random_model
from tests.helpers import assert_same_model
from tests.sharding.configs import CONFIGS
from tests.sharding.meshes import (
    TREE,
    mesh_of,
    model_of,
    sharded,
)

FAST = ("mamba_in_llama",)
slow = pytest.mark.slow


def test_a_device_is_that_of_the_arrays_or_the_default_one():
    first, second, *_ = jax.devices()
    on_second, both = (
        jax.device_put(jnp.ones(2), where)
        for where in (second, NamedSharding(Mesh([first, second], "x"), PartitionSpec("x")))
    )
    assert dispatch.device_of(on_second) == second
    assert dispatch.device_of(both) == first
    with jax.default_device(second):
        assert dispatch.device_of(both) == second
    with dispatch.on(on_second):
        assert dispatch.default_device() == first  # of the same kind


def test_an_array_is_the_same_on_any_devices():
    numbers = jnp.arange(8 * 12.0).reshape(8, 12)
    for spec in ((), ("data",), ("model", "data"), (None, "model"), (("data", "model"),)):
        array = jax.device_put(numbers, NamedSharding(mesh_of(2, 4), PartitionSpec(*spec)))
        assert identity(array) == identity(numbers)


def everything(model, tokens, lengths):
    """Logits of ragged prompts, of a tree after them, and of a tree after the replay of that."""
    batch = len(tokens)
    prompt, cache = model.prefill(tokens[:, :8], lengths, model.init_cache(batch, 32))
    tree = TREE.tree(jnp.ones((batch, TREE.num_nodes), bool))
    nodes = tokens[:, 8 : 8 + TREE.num_nodes]
    first, pending, cache = model.tree_forward(nodes, tree, cache)
    path = path_to(tree, jnp.full(batch, TREE.num_nodes - 1, jnp.int32))
    second, _, _ = model.tree_forward(nodes + 1, tree, cache, replay=(pending, path))
    return prompt, first, second


def differences(name, data, shards):
    """Of all logits to those of one device, relative to the largest."""
    words, rng = CONFIGS[name].vocab_size - 1, np.random.default_rng(0)
    tokens = rng.integers(0, words, (2, 8 + TREE.num_nodes)).astype(np.int32)

    @jax.jit
    def on_mesh(model, *arrays):
        return over_mesh(model.partition, everything, (model,), arrays, (ROWS, ROWS), ROWS)

    arrays = (tokens, np.array([5, 8], np.int32))
    want = jax.jit(everything)(model_of(name), *arrays)
    got = on_mesh(sharded(name, data, shards), *arrays)
    return [
        float(np.abs(a - b).max() / np.abs(b).max())
        for a, b in zip(map(np.asarray, got), map(np.asarray, want), strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "data", "shards"),
    [
        pytest.param(name, *mesh, marks=() if name in FAST and mesh == (2, 4) else slow)
        for name in CONFIGS
        for mesh in ((2, 4), (1, 2), (1, 8))
        if (name, mesh) != ("groups", (1, 8))  # which is refused
    ],
)
def test_logits_are_those_of_one_device(name, data, shards):
    assert max(differences(name, data, shards)) <= 2e-5


KERNEL_LAYERS = (
    st.Mamba2Config(num_heads=4, head_dim=16, state_size=16, chunk_size=16),
    st.AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16, rotary_dim=16),
    st.MlpConfig(32),
    st.MoeConfig(num_experts=4, num_active=2, hidden_size=32),
)


@slow
@pytest.mark.parametrize("layers", [KERNEL_LAYERS[:1], KERNEL_LAYERS[1:3], KERNEL_LAYERS[::3]])
def test_kernels_on_a_mesh(layers):
    config = st.ModelConfig(vocab_size=40, d_model=32, layers=layers)
    tokens = np.random.default_rng(0).integers(0, 39, (1, 4)).astype(np.int32)
    tree = st.TreeTopology.chain(3)

    def forward(model, tokens):
        cache = model.init_cache(1, 32)
        nodes = tree.tree(jnp.ones((1, 4), bool))
        first, pending, cache = model.tree_forward(tokens, nodes, cache)
        path = path_to(nodes, jnp.full(1, 2, jnp.int32))
        return first, model.tree_forward(tokens, nodes, cache, replay=(pending, path))[0]

    @jax.jit
    def on_mesh(model, tokens):
        return over_mesh(model.partition, forward, (model,), (tokens,), (ROWS,), ROWS)

    results = []
    for implementation in ("xla", "pallas_interpret"):
        model = random_model(config, implementation=implementation)
        results.append(on_mesh(st.shard(model, mesh_of(1, 2)), tokens))
    for want, got in zip(*results, strict=True):
        assert float(np.abs(want - got).max() / np.abs(want).max()) <= 2e-5


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else slow) for n in CONFIGS]
)
def test_back_to_one_device(name):
    model = sharded(name, 2, 4)
    back = st.shard(st.shard(model, mesh_of(4, 2)), None)
    assert back.partition == ONE_DEVICE
    assert_same_model(back, model_of(name))


def test_each_device_has_its_part():
    model = sharded("bamba", 2, 4)
    kernel = model.blocks[1].mixer.in_proj.kernel[...]
    assert kernel.shape == (16, 48)
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(16, 12)}
