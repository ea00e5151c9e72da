"""One model, four ways to run it that must agree: whole, prefill, tree, replay."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from pallas_kernels import dispatch
from stree_jax import ModelConfig, TreeTopology
from stree_jax.models import Matrix, MoeConfig
from stree_jax.models.cache import path_to
from stree_jax.models.matrices import Storage
from stree_jax.testing import CONFIGS, HYBRIDS, random_model, tiny_model
from tests import oracle
from tests.cases.base import relative_error
from tests.helpers import apply, some

# The families of `make test`: with attention, multipliers, experts, the gated delta rule.
QUICK = ("plain", "falcon_h1 hybrid", "nemotron_h hybrid", "qwen3_5 hybrid")
BATCH, LENGTH, PADDED, MAX_LENGTH = 2, 11, 17, 24


def prefill(model, tokens, lengths):
    """From an empty cache. Prompts are padded, so that each model has one program."""
    padded = np.zeros((len(tokens), PADDED), np.int32)
    for row, buffer in zip(tokens, padded, strict=True):
        buffer[: len(row)] = row
    return prefill_padded(model, padded, np.asarray(lengths, np.int32))


@jax.jit
def prefill_padded(model, tokens, lengths):
    return model.prefill(tokens, lengths, model.init_cache(len(tokens), MAX_LENGTH))


@jax.jit
def tree_forward(model, tokens, tree, cache, **options):
    return model.tree_forward(tokens, tree, cache, **options)


@jax.jit
def replay(model, cache, pending, path):
    return model.replay(cache, pending, path)


def random_tokens(model, *shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(model.config.vocab_size, size=shape).astype(np.int32)


def assert_close(got, want):
    """Equal up to float32 rounding at the scale of the array, since XLA fuses differently."""
    scale = np.abs(want).max(initial=1.0)
    assert_allclose(got, want, rtol=1e-5, atol=3e-5 * scale)


def whole_tree(topology, batch=BATCH):
    return topology.tree(jnp.ones((batch, topology.num_nodes), bool))


TREE = TreeTopology.from_parents([-1, 0, 0, 1, 1, 2, 3, 6, 7])  # depth 5, more than K
_PARALLEL = HYBRIDS["falcon_h1"]
# Over a tree some norms are deferred past the output projection.
NORMS = {
    "and a multiplier": dataclasses.replace(CONFIGS["plain"], residual_multiplier=0.6),
    "and an output bias": ModelConfig.tiny(out_proj_bias=True),
    "beside a branch": ModelConfig.tiny(mlp_dim=6),
    "of groups": ModelConfig.tiny(num_groups=2),
    "and attention": dataclasses.replace(
        _PARALLEL, mamba2=dataclasses.replace(_PARALLEL.mamba2, norm="gate_then_norm")
    ),
}


def begun(model, lengths):
    """Prompts, whose last tokens may be padding, drafts for a tree, and the cache after prompts."""
    prompts = random_tokens(model, BATCH, max(lengths))
    drafts = random_tokens(model, BATCH, TREE.num_nodes, seed=1)
    return prompts, drafts, prefill(model, prompts, lengths)[1]


@pytest.mark.parametrize("name", some(CONFIGS, *QUICK))
def test_logits_are_the_oracles(name):
    model = tiny_model(name)
    tokens = random_tokens(model, BATCH, LENGTH)
    got = apply(model, tokens)
    assert got.dtype == jnp.float32
    assert got.shape == (BATCH, LENGTH, model.config.num_embeddings)
    for row, want in zip(got, (oracle.logits(model, row) for row in tokens), strict=True):
        assert_allclose(row, want, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("name", some([*CONFIGS, *NORMS], *QUICK))
def test_a_tree_is_every_path_run_by_itself(name):
    """So it sees no other node, no other row and no padding."""
    model = random_model(NORMS[name]) if name in NORMS else tiny_model(name)
    lengths = [LENGTH, 4]
    prompts, drafts, cache = begun(model, lengths)
    got, _, after = tree_forward(model, drafts, whole_tree(TREE), cache)
    for b in range(BATCH):
        for node in range(TREE.num_nodes):
            path = np.flatnonzero(TREE.ancestor_mask[node])
            alone = oracle.logits(model, [*prompts[b, : lengths[b]], *drafts[b, path]])[-1]
            assert_allclose(got[b, node], alone, atol=3e-5 * np.abs(alone).max())
    jax.tree.map(assert_array_equal, after, cache)  # a forward writes no cache


@pytest.mark.parametrize("name", some(CONFIGS, *QUICK))
def test_replay_is_prefill_of_the_accepted_tokens(name):
    model, lengths, tree = tiny_model(name), [LENGTH, 0], whole_tree(TREE)
    prompts, drafts, cache = begun(model, lengths)
    _, pending, _ = tree_forward(model, drafts, tree, cache)
    # Row 0 accepts 0, 1, 2, 3, 5 drafts; row 1 another number, or nothing at all.
    for last in ([0, 2], [1, 0], [3, 8], [6, -1], [8, 4]):
        replayed = replay(model, cache, pending, path_to(tree, jnp.array(last)))
        rows = [
            [
                *prompts[b, : lengths[b]],
                *drafts[b, TREE.ancestor_mask[last[b]]][: 99 * (last[b] >= 0)],
            ]
            for b in range(BATCH)
        ]
        _, want = prefill(model, rows, [len(row) for row in rows])
        jax.tree.map(assert_close, replayed, want)


# Sizes that the kernels take, and all kinds of layers that have one.
SIXTEENS = dataclasses.replace(
    _PARALLEL,
    layers=("parallel", "moe"),
    mamba2=dataclasses.replace(_PARALLEL.mamba2, head_dim=16, state_size=16, norm="gate_then_norm"),
    attention=dataclasses.replace(_PARALLEL.attention, head_dim=16, rotary_dim=16),
    moe=MoeConfig(num_experts=3, num_active=2, hidden_size=16),
    padded_vocab_size=40,
)


@pytest.mark.thorough
def test_kernels_compute_what_xla_does():
    """A prefill, then steps that each replay a path of the one before, then a replay."""
    model, reference = (
        random_model(SIXTEENS, implementation=implementation)
        for implementation in ("pallas_interpret", "xla")
    )
    tree = whole_tree(TreeTopology.from_branching((2, 1)))
    num_nodes = tree.parents.shape[1]
    prompts = random_tokens(model, BATCH, LENGTH)
    results = [prefill(each, prompts, [LENGTH, 4]) for each in (model, reference)]
    jax.tree.map(assert_close, *results)
    kernels = plain = (model.init_pending(BATCH, num_nodes), results[1][1])

    @jax.jit
    def step(model, tokens, pending, cache, path):
        return model.tree_forward(tokens, tree, cache, replay=(pending, path))

    path = path_to(tree, jnp.full(BATCH, -1))
    for seed, last in enumerate([(4, 2), (-1, 3), (1, 0)]):
        tokens = random_tokens(model, BATCH, num_nodes, seed=seed)
        want, *plain = step(reference, tokens, *plain, path)
        got, *kernels = step(model, tokens, *kernels, path)
        assert_close(got, want)
        jax.tree.map(assert_close, kernels[1], plain[1])
        path = path_to(tree, jnp.array(last))
    after = replay(model, kernels[1], kernels[0], path)
    jax.tree.map(assert_close, after, replay(reference, plain[1], plain[0], path))


@pytest.mark.thorough
@pytest.mark.parametrize("eight_bits", [False, True])
def test_kernels_multiply_the_root_of_a_tree_as_a_single_node(eight_bits):
    """To the bit, in bfloat16 and in 8 bits; so do the other ops, on so few nodes."""
    config = dataclasses.replace(SIXTEENS, d_model=32)
    model = random_model(config, dtype="bfloat16", implementation="pallas_interpret")
    model = model.quantized() if eight_bits else model
    tokens = random_tokens(model, 1, 5)
    roots = []
    for branching in ((), (2, 1)):
        tree = whole_tree(TreeTopology.from_branching(branching), batch=1)
        nodes = tokens[:, : tree.parents.shape[1]]
        with dispatch.recorded() as ran:
            logits, *_ = tree_forward(model, nodes, tree, model.init_cache(1, 8))
        assert ran["matmul"] == "pallas_interpret"
        roots.append(logits[:, 0])
    np.testing.assert_array_equal(*roots)


@pytest.mark.parametrize(
    ("weight", "wide"),
    [
        (Matrix(jnp.ones((5, 3))), False),
        (Matrix(jnp.ones((5, 3))), True),
        (Matrix(jnp.ones((2, 5, 3))), True),
        (Matrix(jnp.ones((3, 5)), axis=-1), True),
    ],
)
def test_no_single_row_is_multiplied_on_a_tpu(weight, wide, monkeypatch):
    """XLA does that on the vector unit, in up to twenty times the cycles by its own estimate."""

    multiply = functools.partial(weight.product, wide=wide)

    def text(x):  # of a new function each time: jax keeps what it traced
        return str(jax.make_jaxpr(lambda x: multiply(x))(x))

    row, two = jnp.arange(5.0)[None, None], jnp.ones((1, 2, 5))
    wanted, of_two = multiply(row), text(two)
    monkeypatch.setattr(dispatch, "on_tpu", lambda: True)
    assert_array_equal(multiply(row), wanted)
    assert " pad[" in text(row)
    assert text(two) == of_two


@pytest.mark.parametrize(("dtype", "text"), [("bfloat16", "pallas_call"), ("float32", "HIGHEST")])
def test_how_a_gpu_multiplies_a_row(dtype, text, monkeypatch):
    """Never in TF32."""
    x, weight = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((1, 1, 64), (64, 32)))
    device = SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(dispatch, "default_device", lambda: device)
    run = jax.make_jaxpr(lambda x, weight: Storage(weight, -2).product(x, False, None))
    assert text in str(run(x, weight))


@pytest.mark.thorough
def test_the_corrections_of_a_bfloat16_models_record_are_float32():
    """And the state after their replay is that of the sequence."""
    model, tree = tiny_model("qwen3_5 hybrid", dtype="bfloat16"), whole_tree(TREE)
    prompts, drafts, cache = begun(model, [7, 7])
    _, pending, _ = tree_forward(model, drafts, tree, cache)
    assert [x.dtype.name for x in pending[0]] == ["float32", "float32", "bfloat16", "bfloat16"]
    after = replay(model, cache, pending, path_to(tree, jnp.array([8, 4])))[0]
    assert after.ssm.dtype == jnp.float32
    texts = [[*prompts[b], *drafts[b, TREE.ancestor_mask[last]]] for b, last in enumerate([8, 4])]
    _, want = prefill(model, texts, [*map(len, texts)])
    assert relative_error(after.ssm, want[0].ssm) < 0.02
