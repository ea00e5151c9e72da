"""Which columns of a weight belong to which shard; no mesh is needed to know that."""

import dataclasses
import itertools
import re

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import assume, given
from hypothesis import strategies as st

import stree_jax
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.plan import plan
from stree_jax.mesh.partition import ONE_DEVICE, Cut, Partition, partition_of
from stree_jax.models import GatedDeltaConfig
from stree_jax.models.presets import PRESETS
from stree_jax.names import flatten
from stree_jax.testing import random_model
from tests.helpers import by_message, refusal
from tests.sharding.configs import CONFIGS

# Sizes whose shards are whole, or that whole shards share.
UNITS = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])
SHARDS = st.sampled_from([1, 2, 3, 4, 6, 8, 12])


@st.composite
def segments(draw):
    shards = draw(SHARDS)
    fitting = UNITS.filter(lambda units: units % shards == 0 or shards % units == 0)
    sizes = st.tuples(fitting, st.integers(1, 3))
    return shards, tuple(draw(st.lists(sizes, min_size=1, max_size=4)))


@given(segments())
def test_the_inverse_of_the_order_is_the_identity(case):
    shards, parts = case
    cut = Cut(0, parts)
    canonical = np.arange(sum(units * size for units, size in parts))
    stored = canonical[cut.columns(shards).ravel()]
    np.testing.assert_array_equal(stored[cut.canonical(shards)], canonical)


@given(segments())
def test_a_shard_has_the_columns_of_its_heads(case):
    """Head h of `units` belongs to the shard that has the h-th part of everything."""
    shards, parts = case
    columns = Cut(0, parts).columns(shards)
    for shard in range(shards):
        start, expected = 0, []
        for units, size in parts:
            for unit in range(units):
                mine = unit / units < (shard + 1) / shards - 1e-9
                mine &= (unit + 1) / units > shard / shards + 1e-9
                expected += range(start + unit * size, start + (unit + 1) * size) if mine else []
            start += units * size
        assert columns[shard].tolist() == expected


def test_the_worked_example():
    assert Cut(1, ((4, 1), (4, 1))).columns(2).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


def shapes(config, partition=ONE_DEVICE):
    weights = stree_jax.HybridLM.abstract(config, partition=partition)[1]
    return {name: leaf.shape for name, leaf in flatten(weights).items()}


@pytest.fixture(scope="module")
def mesh():
    return stree_jax.make_mesh()  # shapes do not depend on it


@pytest.mark.parametrize("name", CONFIGS)
def test_every_weight_of_a_shard_has_the_local_shape(name, mesh):
    config = CONFIGS[name]
    whole = shapes(config)
    for shards in (2, 4) if name in ("mamba_in_llama", "qwen3_next") else (4,):
        table = config.cuts(shards)
        local = shapes(config, Partition(mesh, shards))
        assert local.keys() == whole.keys()
        for weight, shape in whole.items():
            expected = list(shape)
            if weight in table:
                axis, parts = table[weight]
                assert sum(units * size for units, size in parts) == shape[axis]
                expected[axis] = table[weight].columns(shards).shape[1]
            assert list(local[weight]) == expected, weight


@pytest.mark.parametrize("name", CONFIGS)
def test_all_large_weights_are_cut(name):
    """Weights without a rule are on every device: only norms, routers and narrow sides may be."""
    config = CONFIGS[name]
    allowed = ("norm_scale", "router", "correction", "latent", "adapter", "out_proj.bias")
    allowed = (*allowed, "shared_gate")
    uncut = [w for w in shapes(config) if w not in config.cuts(4)]
    others = [w for w in uncut if not any(part in w for part in allowed)]
    # The last projection of a shared layer follows a sum.
    others = [w for w in others if not (name == "zamba2" and w.endswith("mixer.out_proj.kernel"))]
    assert not others


@given(heads=UNITS, groups=UNITS, x_heads=UNITS, b_groups=UNITS, norm=st.booleans(), shards=SHARDS)
def test_a_local_config_has_a_share_of_everything(heads, groups, x_heads, b_groups, norm, shards):
    assume(heads % groups == 0 and heads % x_heads == 0 and groups % b_groups == 0)
    config = CONFIGS["mamba2"]
    mixer = dataclasses.replace(
        config.mamba2,
        num_heads=heads,
        num_groups=groups,
        num_x_heads=x_heads,
        num_b_groups=b_groups,
        norm="gate_then_norm" if norm else "none",
    )
    config = dataclasses.replace(config, mamba2=mixer, vocab_size=48)
    try:
        local = config.local(shards).mamba2
    except ValueError as error:
        # It names a size that fits, and those that it names do.
        named = [
            int(word)
            for word in str(error).partition("can be ")[2].replace(",", " ").split()
            if word.isdigit()
        ]
        assert named
        assert shards not in named
        for size in named:
            config.local(size)
        return
    assert local.num_heads * shards == heads
    assert_heads_have_their_groups(shards, local, groups, local.num_groups)
    assert_heads_have_their_groups(shards, local, x_heads, local.x_heads)
    assert_heads_have_their_groups(shards, local, b_groups, local.b_groups)


def assert_heads_have_their_groups(shards, local, count, held_count):
    """Which group a head uses is the same on its shard as in the whole model."""
    held = Cut(0, ((count, 1),)).columns(shards)
    for shard, head in itertools.product(range(shards), range(local.num_heads)):
        whole = (shard * local.num_heads + head) * count // (shards * local.num_heads)
        assert held[shard][head * held_count // local.num_heads] == whole


@given(heads=UNITS, groups=UNITS, shards=SHARDS)
def test_a_shard_has_the_keys_of_its_value_heads(heads, groups, shards):
    assume(heads % groups == heads % shards == 0 and 0 in (groups % shards, shards % groups))
    mixer = GatedDeltaConfig(num_heads=heads, head_dim=2, num_groups=groups, state_size=3)
    local = mixer.local(shards)
    assert_heads_have_their_groups(shards, local, groups, local.num_groups)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_can_be_cut(preset):
    config = stree_jax.ModelConfig.preset(preset)
    for shards in (2, 4):
        config.local(shards)


def test_narrow_experts_are_shared_out_whole():
    """1,856 channels are 29 times 64: an eighth of them is no multiple of 16."""
    config = stree_jax.ModelConfig.preset("Nemotron-3-Nano-30B")
    moe = [config.local(shards).moe for shards in (1, 4, 8)]
    assert [(m.experts_held, m.hidden_size) for m in moe] == [(128, 1856), (128, 464), (16, 1856)]
    assert moe[2].num_experts == 128  # among which it routes
    experts = config.cuts(8)[f"blocks.{config.kinds.index('moe')}.mixer.experts_in"]
    assert experts.columns(8)[3].tolist() == [*range(48, 64)]


@by_message(
    ("name", "shards", "message"),
    [
        ("mamba2", 3, r"mamba2.num_heads = 8 does not fit model = 3.*can be 1, 2, 4 or 8"),
        ("groups", 8, r"norm groups of mamba2 = 4 does not fit model = 8.*can be 1, 2 or 4"),
        ("zamba2", 16, r"attention.num_heads = 8 does not fit model = 16"),
        ("qwen3_next", 3, r"gated_delta.num_heads = 8 does not fit model = 3"),
        ("words", 2, "padded_vocab_size = 37 does not fit model = 2"),
    ],
)
def test_sizes_that_do_not_fit(name, shards, message):
    of = CONFIGS | {"words": dataclasses.replace(CONFIGS["mamba2"], vocab_size=37)}
    refusal(message, of[name].local, shards)


def test_meshes_that_cannot_be():
    refusal("data must be an integer, at least 1; got 0", stree_jax.make_mesh, data=0)
    count = jax.device_count()
    refusal(
        f"data = {count} times model = 2 is {2 * count} devices",
        stree_jax.make_mesh,
        data=count,
        model=2,
    )
    model = stree_jax.HybridLM(CONFIGS["tied"], rngs=nnx.Rngs(0))
    refusal("mesh must come from make_mesh", partition_of, "data=2", False)
    foreign = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Auto,))
    refusal(r"has the axes \('x',\)", stree_jax.shard, model, foreign)
    explicit = jax.make_mesh((1, 1), ("data", "model"), (jax.sharding.AxisType.Explicit,) * 2)
    refusal("make them all Auto", stree_jax.shard, model, explicit)


OF_MESHES = re.compile(
    r"all_reduce|all_gather|collective_permute|all_to_all|shard_map|manual_computation"
    r"|sdy\.mesh @(?!empty)"
)


def lowered(model):
    drafter = stree_jax.ModelDrafter(model) if model.partition == ONE_DEVICE else None
    tree = stree_jax.TreeTopology.chain(1) if drafter else None
    request = plan(model, [[1, 2]], max_new_tokens=4, drafter=drafter, topology=tree)
    decoder = request.decoder
    state = decoder.start(model, drafter, request.context, request.keys)
    arguments = (decoder, model, drafter, state, request.limits, request.sampling)
    return SpeculativeDecoder.run.lower(*arguments).as_text()


@pytest.mark.thorough
def test_a_program_without_a_mesh_has_no_collective():
    model = random_model(CONFIGS["one layer"])
    assert not OF_MESHES.findall(lowered(model))
    # And the words that are looked for are those of a mesh, even of one device.
    assert OF_MESHES.findall(lowered(stree_jax.shard(model, stree_jax.make_mesh())))
