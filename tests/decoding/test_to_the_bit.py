"""On a CPU with native code a token's logits are a function of the tokens before it, to the bit."""

import dataclasses
import functools
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from pallas_kernels import dispatch, native
from pallas_kernels.numerics import PartialSums, total
from stree_jax.models.bits import sums_in_other_orders
from stree_jax.models.cache import empty_path
from stree_jax.models.layer import Path
from stree_jax.models.layers import Projection
from stree_jax.models.moe import MoeConfig
from stree_jax.testing import CONFIGS, assert_lossless, bits_obstacle, perturbed, random_model
from tests.decoding.five_ways import model_of, skip_gelu
from tests.decoding.rules import GRAMMAR
from tests.decoding.texts import Row, in_native_sizes, planned, resized, started
from tests.extensions import dflash_files, eagle3_files
from tests.helpers import some

pytestmark = pytest.mark.skipif(native.obstacle() is not None, reason="native code does not run")

LONG = 600  # more than a chunk of a prompt; with 8 experts XLA's sums had another order
TREES = {
    "chain": st.TreeTopology.chain(4),
    "tree": st.TreeTopology.from_branching((3, 2, 1)),
    "single tokens": st.TreeTopology.chain(0),
}


# On a GPU XLA multiplies by the matrices of the heads.
LATENT = ["kimi_linear hybrid", "bailing_hybrid hybrid"]
# Those whose attention has windows run by XLA on a GPU.
_WITH_WINDOWS = ("lara hybrid", "lfm3 hybrid", "mixed hybrid")
INTERPRETED = [name for name in CONFIGS if name not in (*_WITH_WINDOWS, *LATENT)]
WIDTHS = (
    "d_model",
    "mlp_dim",
    "hidden_size",
    "latent_size",
    "shared_size",
    "num_channels",
    "adapter_rank",
)


@jax.jit
def read(model, tokens, lengths, cache):
    hidden, cache = model.prefill_hidden(tokens, lengths, cache)
    return model.logits(hidden), cache


@jax.jit
def run(model, tokens, tree, cache, pending, path):
    return model.tree_forward(tokens, tree, cache, replay=(pending, path))


def in_chunks(model, text, size):
    """Logits of a text, the first of three rows that are read in chunks."""
    cache, found = model.init_cache(3, len(text)), []
    for start in range(0, len(text), size):
        some = text[start : start + size]
        tokens = np.zeros((3, size), np.int32)
        tokens[0, : len(some)] = some
        tokens[1] = (tokens[0] + 1) % model.config.vocab_size
        logits, cache = read(model, tokens, np.array([len(some), size // 3, 0], np.int32), cache)
        found.append(logits[0, : len(some)])
    return np.concatenate(found)


def in_trees(model, text, topology, start, cache):
    """Logits of the text from `start` on, whose tokens are drafted somewhere in trees."""
    random, nodes = np.random.default_rng(0), topology.num_nodes
    tree = topology.tree(jnp.ones((1, nodes), bool))
    pending, path, found = model.init_pending(1, nodes), empty_path(1, nodes), []
    while start + topology.depth < len(text):
        tokens = random.integers(model.config.vocab_size, size=(1, nodes))
        at, on_path = 0, [0]
        while topology.children[at]:
            at = random.choice(topology.children[at])
            on_path.append(at)
        on_path = on_path[: random.integers(1, len(on_path) + 1)]
        tokens[0, on_path] = text[start : start + len(on_path)]
        logits, pending, cache = run(model, jnp.array(tokens), tree, cache, pending, path)
        last = jnp.array(on_path[-1:], jnp.int32)
        path = Path(tree.on_path(last), tree.parents, last)
        found += [logits[0, on_path]]
        start += len(on_path)
    return np.concatenate(found)


def in_kernel_sizes(config):
    """A config whose matrices the kernel multiplies."""
    return resized(
        in_native_sizes(config),
        lambda name, value: -(-value // 32) * 32 if value and name in WIDTHS else value,
    )


FEW = [("qwen3_5 hybrid", "bfloat16"), ("granite_moe hybrid", "int8")]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(*case, marks=pytest.mark.thorough if case in FEW else pytest.mark.slow)
        for case in itertools.product(INTERPRETED, ("bfloat16", "int8"))
        if case != ("mamba2attn hybrid", "int8")  # its rows have 80 numbers, and groups have 32
    ],
)
def test_kernels_of_gpus(family, kind):
    """In the interpreter: a text in trees, and its tokens alone."""
    config = in_kernel_sizes(CONFIGS[family])
    model = random_model(config, dtype="bfloat16", implementation="pallas_interpret")
    model = model.quantized() if kind == "int8" else model
    assert bits_obstacle(model, TREES["tree"].num_nodes, to_the_bit=True) is None
    with dispatch.to_the_bit(True):
        text = np.random.default_rng(1).integers(model.config.vocab_size, size=16)
        length, cache = jnp.array([4], jnp.int32), model.init_cache(1, 64)
        _, cache = read(model, text[None, :4], length, cache)
        logits = {name: in_trees(model, text, TREES[name], 4, cache) for name in TREES}
    for name, of_tree in logits.items():
        np.testing.assert_array_equal(of_tree, logits["single tokens"][: len(of_tree)], name)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["granite_moe hybrid", "qwen3_5 hybrid"])
def test_kernels_add_up_parts_of_products(family, monkeypatch):
    """They give the bits of products that are added up before."""
    config = dataclasses.replace(in_kernel_sizes(CONFIGS[family]), d_model=256)
    model = random_model(config, dtype="bfloat16", implementation="pallas_interpret")
    chain = TREES["chain"].tree(jnp.ones((1, 5), bool))
    arguments = jnp.arange(5)[None], chain, model.init_cache(1, 8)
    products, in_parts = [], Projection.in_parts

    def added_up(projection, inputs):
        products.append(in_parts(projection, inputs))
        return total(products[-1])

    got = model.tree_forward(*arguments)
    monkeypatch.setattr(Projection, "in_parts", added_up)
    wanted = model.tree_forward(*arguments)
    assert any(isinstance(product, PartialSums) for product in products)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.parametrize("family", some(CONFIGS, "mixed hybrid"))
def test_log_probs_op_by_op(family):
    """They are those in a program; tests compile with less effort, unless "as released"."""
    skip_gelu(family)
    model, text = model_of(family), np.random.default_rng(1).integers(24, size=(1, 310))
    got = st.text_log_probs(model, text)
    np.testing.assert_array_equal(got, jax.jit(st.text_log_probs)(model, text))
    np.testing.assert_array_equal(got, st.score(model, text))


def with_many_experts(family, **sizes):
    """A model in which each token has 8 experts of 24, if it has experts."""
    config, many = in_native_sizes(CONFIGS[family]), dict(num_experts=24, num_active=8)
    layers = tuple(
        dataclasses.replace(layer, **many) if isinstance(layer, MoeConfig) else layer
        for layer in config.layers
    )
    return random_model(dataclasses.replace(config, layers=layers, **sizes)).packed()


ROUTED = ["granite_moe hybrid", "nemotron_h hybrid", "lfm2_moe hybrid", "qwen3_next hybrid"]
ROUTED += ["bailing_hybrid hybrid"]


@pytest.mark.thorough
@pytest.mark.parametrize("family", [*ROUTED, "mamba_in_llama hybrid", "falcon_h1 hybrid"])
def test_long_prompts(family):
    """Chunks of 512 and of 64 tokens, and eight texts at once, in a wide model."""
    model = with_many_experts(family, d_model=1024, vocab_size=3001)
    text = np.random.default_rng(1).integers(model.config.vocab_size, size=(8, LONG))
    want = in_chunks(model, text[0], 512)
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(in_chunks(model, text[0], 64), want)
    alone, together = st.score(model, text[:1].tolist()), st.score(model, text.tolist())
    np.testing.assert_array_equal(together[0], alone[0])


@pytest.mark.parametrize("family", ROUTED[:2])
def test_routers(family):
    """Of a layer, and of 600 tokens and of 64."""
    model = with_many_experts(family)
    (*_, layer) = (each.mixer for each in model.blocks if each.kind == "moe")
    tokens = np.random.default_rng(0).normal(size=(LONG, model.config.d_model)).astype(np.float32)
    route = jax.jit(lambda layer, tokens: layer._route(tokens)[0])
    parts = [route(layer, tokens[at : at + 64]) for at in range(0, LONG, 64)]
    np.testing.assert_array_equal(np.concatenate(parts), route(layer, tokens))


def test_obstacles_are_those_of_what_runs():
    """Groups of a gated norm have 24 channels, which native code does not take."""
    groups = dict(norm_groups=2, num_heads=3)
    config = in_native_sizes(CONFIGS["plain"])
    mamba2 = dataclasses.replace(config.mamba2, **groups)
    model = random_model(dataclasses.replace(config, mamba2=mamba2)).packed()
    assert "gated_rms_norm (xla, since channels = 24 is not a" in bits_obstacle(model)


@pytest.mark.parametrize("family", some(CONFIGS, "nemotron_h hybrid"))
def test_no_order_of_sums_is_left_to_xla(family):
    """In a step with drafts and filters, and in what scores texts."""
    model = model_of(family)
    assert bits_obstacle(model) is None
    rows = [Row((1, 2, 3), 0, 1.0, 8, 0.9), Row((1,), 0, 0.7, 0, 0.9)]
    drafts = dict(drafter=st.ModelDrafter(perturbed(model, 0.05)))
    request = planned(model, rows, [dict(min_p=0.01, log_probs=True)] * 2, **drafts)
    state = started(model, request)
    arguments = request.drafter, state, request.limits, request.sampling
    step = jax.make_jaxpr(lambda *arguments: request.decoder.step(*arguments))(model, *arguments)
    assert not [*sums_in_other_orders(step.jaxpr)]
    texts = jax.make_jaxpr(st.text_log_probs)(model, jnp.zeros((2, 40), jnp.int32))
    assert not [*sums_in_other_orders(texts.jaxpr)]


@jax.jit
@functools.partial(jax.grad, has_aux=True)
def slope(model, texts):
    scores = st.text_log_probs(model, texts)
    return scores.sum(), scores


@pytest.mark.parametrize("family", some([*ROUTED[::3], "falcon_h1 hybrid"], ROUTED[0]))
def test_importance_ratios_are_1(family):
    """Scores inside a gradient are those of sampling, with a grammar and a penalty too.

    10^5 tokens of each family: STREE_JAX_BATCHES=417.
    """
    model = model_of(family)
    rules = 2 * [(), (st.RepetitionPenalty(1.3), GRAMMAR)]
    way = st.Way(st.ModelDrafter(perturbed(model, 0.05)), TREES["tree"])
    sampled = dict(max_new_tokens=60, temperature=1.0, eos_token=(), log_probs=True)
    for batch in range(int(os.environ.get("STREE_JAX_BATCHES", 1))):
        prompts = np.random.default_rng(batch).integers(37, size=(4, 5))
        row_options = [
            st.Options(**sampled, processors=rule, key=4 * batch + row)
            for row, rule in enumerate(rules)
        ]
        out = st.generate(model, prompts.tolist(), options=row_options, **way)
        _, scores = slope(model, np.hstack([prompts, out.tokens]))
        np.testing.assert_array_equal(scores[:, -60:], out.log_probs)
        assert out.stats.tau > 2


def eagle3(model, folder):
    return st.Eagle3Drafter(model, st.load_eagle3(eagle3_files.saved(folder), model))


def dflash2(model, folder):
    head = dflash_files.saved(folder, **dflash_files.SECOND)
    return st.DFlashDrafter(model, st.load_dflash(head, model))


DRAFTERS = {
    "eagle3": eagle3,
    "dflash2": dflash2,
    "dflash2, dynamic": lambda model, folder: st.DynamicDrafter(
        dflash2(model, folder).model, expand=4
    ),
}


@pytest.mark.parametrize("name", some(DRAFTERS, "eagle3"))
def test_heads_on_inner_states(name, tmp_path):
    """Log-probabilities and caches are those of decoding in single tokens."""
    model = model_of("nemotron_h hybrid", d_model=16)
    drafter = DRAFTERS[name](model, tmp_path / "head")
    (out,) = assert_lossless(model, drafter, temperatures=(1.0,), to_the_bit=True)
    assert out.stats.num_drafted > 0
