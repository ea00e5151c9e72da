"""Models on meshes of 8 CPU devices, against themselves on one."""

import gc
import weakref
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import stree_jax as st
from pallas_kernels import dispatch
from stree_jax import convert
from stree_jax.checkpoint import arrays
from stree_jax.decoding.text.prefill import PREFILL_CHUNK
from stree_jax.mesh import partition as partition_module
from stree_jax.mesh.partition import ROWS
from stree_jax.mesh.programs import over_mesh
from stree_jax.models.cache import cache_specs, path_to
from stree_jax.models.identity import identity
from stree_jax.testing import HYBRIDS, perturbed, random_model
from stree_jax.training.objective import next_token_loss
from stree_jax.training.recipe import Training
from stree_jax.training.trainer import fit
from tests.decoding.rules import random_walk
from tests.helpers import (
    DOCS,
    assert_same_model,
    crcs,
    heads_of,
    mtp_head_of,
    python_blocks,
    rows,
    saved_pair,
    with_weight,
)
from tests.sharding.configs import CONFIGS
from tests.sharding.meshes import (
    PROMPTS,
    TREE,
    assert_same,
    decode,
    draft_of,
    drafts,
    drafts_on,
    mesh_of,
    model_of,
    replicated_draft,
    sharded,
)

FAST = ("mamba_in_llama",)  # of logits; all others are slow
slow = pytest.mark.slow


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    if not DOCS.is_dir():
        pytest.skip("the tests run without a checkout")
    monkeypatch.setattr(st, "demo_path", saved_pair(tmp_path).joinpath)
    names: dict = {}
    ((_, code),) = python_blocks(DOCS / "sharding.md")
    exec(compile(code, "sharding.md", "exec"), names)
    assert names["out"].tokens.shape == (3, 16)


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


# Logits.


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


def differences(name, data, shards, model=None):
    """Of all logits to those of one device, relative to the largest."""
    words, rng = CONFIGS[name].vocab_size - 1, np.random.default_rng(0)
    tokens = rng.integers(0, words, (2, 8 + TREE.num_nodes)).astype(np.int32)
    model = sharded(name, data, shards) if model is None else model

    @jax.jit
    def on_mesh(model, *arrays):
        return over_mesh(model.partition, everything, (model,), arrays, (ROWS, ROWS), ROWS)

    arrays = (tokens, np.array([5, 8], np.int32))
    want, got = jax.jit(everything)(model_of(name), *arrays), on_mesh(model, *arrays)
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


# Kernels.

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


# Tokens.


def sampled(seed, temperature=0.7, **options):
    return dict(temperature=temperature, key=jax.random.key(seed), **options)


class Run(NamedTuple):
    """A call of `generate` on a mesh, which gives what it gives on one device without drafts."""

    name: str
    mesh: tuple[int, int] = (2, 4)
    drafter: str = "tree"
    options: Any = MappingProxyType({})
    prompts: list[list[int]] = PROMPTS
    fast: bool = False
    shows: Callable = lambda out: True  # what the case is for


def grammar(name):
    return st.Automaton(np.asarray(random_walk(size=CONFIGS[name].vocab_size).table))


def ruled(temperature):
    """Processors: their numbers are cut by rows, and the tables of a grammar are everywhere."""
    rules = [grammar("one layer"), st.RepetitionPenalty(1.4)]
    ends = dict(min_new_tokens=3, eos_token=[0, 1, 2, 3])
    return sampled(2, temperature, processors=rules, **ends)


def ragged(count):
    return [[(7 * i + j) % 37 for j in range(2 + i)] for i in range(count)]


FAMILIES = ("bamba", "mamba_in_llama")
OF_ROWS = dict(
    options=rows(
        temperature=[0.0, 1.0, 0.7],
        filters=[[], [st.MinP(0.01)], []],
        max_new_tokens=[5, 12, 9],
        stop=[[], [[9, 30]], [[1]]],
        key=[1, 2, 3],
        log_probs=["sampled"] * 3,
    )
)
RUNS = {
    # Of these texts no two best logits are as close as another order of summation moves them. The
    # fast ones have 3 rows on 2 shards of the batch, 4 of the model.
    **{
        f"{kind or 'no drafts'} of {name} on {mesh}": Run(
            *(name, mesh, kind),
            fast=(name, mesh) == ("one layer", (2, 4)),
            shows=lambda out, kind=kind: (out.stats.num_accepted > 0) == bool(kind),
        )
        for name in CONFIGS
        for mesh in ((2, 4), (8, 1), (1, 2), (1, 8))
        for kind in ("", "tree", "chain")
        # More shards than groups.
        if mesh != (1, 8) or name in ("mamba_in_llama", "mamba2attn", "mamba2", "qwen3_next")
    },
    **{
        f"{kind} of {name}": Run(name, drafter=kind)
        for name in FAMILIES
        for kind in ("ngram", "beam", "dynamic", "deep", "turns")
    },
    **{
        f"{kind} of {name}, sampled": Run(name, drafter=kind, options=options)
        for name in FAMILIES
        for kind, options in {
            "without replacement": sampled(3, 0.8),
            "tree": sampled(3, 0.8, top_k=9),
            "beam": sampled(4, top_p=0.9),
            "turns": sampled(5),
        }.items()
    },
    **{
        f"{count} rows on {data} shards": Run(
            "mamba2", (data, 2), "chain", sampled(5, 0.9), ragged(count)
        )
        for count in (1, 3, 5)
        for data in (2, 4)
    },
    # Shards of the batch leave the loop on their own.
    "rows end": Run(
        *("mamba2", (4, 2), "chain", dict(eos_token=[*range(9)]), [*PROMPTS, [8, 8]]),
        shows=lambda out: len({*out.lengths.tolist()}) > 1,
    ),
    # Read in pieces, of which shards of the batch need different numbers.
    "long prompts": Run("mamba2", drafter="", prompts=[[3, 4, 5] * (PREFILL_CHUNK // 3 + 13), [9]]),
    **{
        f"log-probabilities of {name}, {how}": Run(
            name, options=sampled(4, 0.8, top_k=7, log_probs=how, top_log_probs=2)
        )
        for name in ("tied", "bamba")
        for how in (True, "sampled")
    },
    **{
        f"processors at temperature {t}": Run(
            "one layer", options=ruled(t), fast=not t, shows=lambda out: out.lengths.min() > 3
        )
        for t in (0.0, 0.9)
    },
    # With a row that pads the batch.
    "options of rows": Run(
        "mamba2", (2, 2), options=OF_ROWS, shows=lambda out: "stop" in out.finish_reasons
    ),
    **{
        f"several texts on {mesh}": Run("mamba2", mesh, "chain", sampled(2, 1.0, n=3))
        for mesh in ((2, 2), (1, 2))
    },
}


@pytest.mark.parametrize(
    "run", [pytest.param(k, marks=() if r.fast else slow) for k, r in RUNS.items()]
)
def test_a_run_is_that_of_one_device(run):
    name, mesh, kind, options, prompts, _, shows = RUNS[run]
    got = decode(sharded(name, *mesh), prompts, **drafts_on(name, mesh, kind), **options)
    # These drafts change the texts, though not their distribution.
    own = drafts(kind, draft_of(name)) if kind == "without replacement" else {}
    want = decode(model_of(name), prompts, **own, **options)
    assert_same(got, want)
    assert got.stats.num_tokens == want.stats.num_tokens
    assert len(got.stats.tau_per_row) == len(got.tokens)
    assert shows(got)


def uneven(draft):
    """A replicated model whose copies differ from shard to shard, and much more than they might."""

    def spoil(leaf):
        copies = [
            jax.device_put(np.asarray(leaf) * np.float32(1 + 0.1 * (shard.device.id % 4)), device)
            for shard in leaf.addressable_shards
            for device in [shard.device]
        ]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, copies)

    return jax.tree.map(spoil, draft)


@slow
@pytest.mark.parametrize(
    ("kind", "options"), [("tree", {}), ("without replacement", sampled(3, 0.8))]
)
def test_what_shards_branch_on_is_decided_once(kind, options):
    """With different drafts or verdicts they would diverge, and wait for each other for ever."""
    model, even = sharded("one layer", 2, 4), replicated_draft("one layer", 2, 4)
    got, want = (decode(model, **drafts(kind, draft), **options) for draft in (uneven(even), even))
    assert_same(got, want)
    np.testing.assert_array_equal(got.stats.target_calls_per_row, want.stats.target_calls_per_row)


@slow
def test_bfloat16():
    name = "bamba"
    model = random_model(CONFIGS[name], dtype="bfloat16")
    on_mesh = st.shard(model, mesh_of(2, 4))
    draft = st.shard(perturbed(model, 0.1), mesh_of(2, 4), replicate=True)
    alone, tree = decode(on_mesh), decode(on_mesh, **drafts("tree", draft))
    # bfloat16 does not promise equality; what it gives are tokens of the vocabulary.
    assert tree.tokens.shape == alone.tokens.shape
    assert (tree.tokens[:, 0] == alone.tokens[:, 0]).all()


# Rows.


@slow
def test_scores():
    found = (st.score(model, PROMPTS) for model in (sharded("mamba2", 2, 2), model_of("mamba2")))
    for mine, reference in zip(*found, strict=True):
        np.testing.assert_allclose(mine, reference, atol=1e-4)


@slow
def test_nan_in_one_shard():
    """It reaches all of them through the sums, and ends the rows with an error."""

    def broken(weight):
        return weight.at[-1, 0].set(jnp.nan)  # a word of the last shard

    model = st.shard(with_weight(model_of("mamba2"), "embedding", broken), mesh_of(2, 4))
    bad = CONFIGS["mamba2"].vocab_size - 1
    with pytest.raises(st.NonFiniteLogitsError) as caught:
        decode(model, [[1, 2, 3], [4, bad, 5], [6, 7]])
    assert 1 in caught.value.rows
    assert caught.value.generation.lengths[1] == 0


@slow
def test_the_cache_that_is_returned():
    out = decode(sharded("bamba", 2, 4), return_cache=True)
    want = decode(model_of("bamba"), return_cache=True)
    got, one = jax.tree.leaves(out.cache), jax.tree.leaves(want.cache)
    specs = jax.tree.leaves(cache_specs(CONFIGS["bamba"], "model"))
    for leaf, whole, spec in zip(got, one, specs, strict=True):
        assert len(leaf) == 4  # a row was added
        if spec == PartitionSpec("data", "model") and leaf.shape[1:] == whole.shape[1:]:
            np.testing.assert_allclose(leaf[:3], whole, atol=1e-4)


# Weights.


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else slow) for n in CONFIGS]
)
def test_back_to_one_device(name):
    model = sharded(name, 2, 4)
    back = st.shard(st.shard(model, mesh_of(4, 2)), None)
    assert back.partition == partition_module.ONE_DEVICE
    assert_same_model(back, model_of(name))


def test_each_device_has_its_part():
    model = sharded("bamba", 2, 4)
    kernel = model.blocks[1].mixer.in_proj.kernel[...]
    assert kernel.shape == (16, 48)
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(16, 12)}


def test_weights_may_be_sharded_by_hand():
    """Without `shard`: XLA inserts the collectives."""
    model = random_model(HYBRIDS["bamba"].with_layers(("mamba2", "attention")))
    mesh = Mesh(np.array(jax.devices()[:2]), ("m",))

    def placed(leaf):
        axes = [None] * (leaf.ndim - 1) + ["m" if leaf.shape[-1] % 2 == 0 else None]
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*axes)))

    graph, weights = nnx.split(model)
    by_hand = nnx.merge(graph, jax.tree.map(placed, weights))
    want = decode(model, PROMPTS[:2])
    assert_same(decode(by_hand, PROMPTS[:2], **drafts("chain", by_hand)), want)


def test_devices_share_the_rows_of_a_training_step(tmp_path):
    """4 of the 8 divide the batch. The losses are those of the whole batch on one device."""
    training = Training(steps=3, batch_size=4, sequence_length=8, warmup_steps=1, save_every=2)

    def batch(step):
        return np.random.default_rng(step).integers(37, size=(4, 9)).astype(np.int32)

    def loss(model, tokens, _):
        seen.append(tokens.shape)
        return next_token_loss(model, tokens)

    seen, model = [], st.HybridLM(st.ModelConfig.tiny(num_layers=1), rngs=nnx.Rngs(0))
    first = float(jax.jit(next_token_loss)(model, batch(1)))
    reports = [*fit(model, loss, batch, training, tmp_path)]
    assert seen == [(1, 9)]
    np.testing.assert_allclose(reports[0].loss, first, rtol=1e-5)
    assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(model))
    assert reports[2].loss < first
    assert [*fit(model, loss, batch, training, tmp_path)] == []


# What is refused.


def eagle3_head(model):
    sizes = model.config.d_model, model.config.vocab_size, 8, (1,)
    parts = st.AttentionConfig(2, 1, 8, input_multiple=2), st.MlpConfig(8)
    return st.Eagle3Head(st.Eagle3Config(*sizes, *parts), rngs=nnx.Rngs(0))


def drafting(model, *parts, drafter=st.ModelDrafter):
    return decode(model, drafter=drafter(*parts))


# Of a target on a mesh, the same on one device, and drafts on that mesh and on one device.
REFUSED = [
    (lambda on, one, draft, far: drafting(on, far), "not on the target's mesh"),
    (
        lambda on, one, draft, far: drafting(on, replicated_draft("mamba2", 4, 2)),
        "not on the target's mesh",
    ),
    (lambda on, one, draft, far: drafting(on, on), "cut into parts"),
    (lambda on, one, draft, far: drafting(one, draft), "the target is not"),
    (
        lambda on, one, draft, far: drafting(on, draft, far, "qs", drafter=st.InterleavedDrafter),
        "not on the target's mesh",
    ),
    (lambda on, *_: on(jnp.ones((2, 3), jnp.int32)), "its own methods cannot be called"),
    (lambda on, *_: decode(on, return_prefix=True), "return_prefix is for models on one device"),
    (lambda on, *_: st.tune(on, st.NgramDrafter(), PROMPTS), "tune is for models on one device"),
    (
        lambda on, one, *_: st.MtpDrafter(on, mtp_head_of(one)),
        "MtpModel is for models on one device",
    ),
    (
        lambda on, one, *_: drafting(on, one, mtp_head_of(one), drafter=st.MtpDrafter),
        "a multi-token-prediction head is for models on one",
    ),
    (lambda on, *_: st.load_mtp("there", on), "load_mtp is for models on one device"),
    (lambda on, *_: st.load_eagle3("there", on), "load_eagle3 is for models on one device"),
    (lambda on, *_: st.load_dflash("there", on), "load_dflash is for models on one device"),
    (lambda on, *_: st.Eagle3Drafter(on, eagle3_head(on)), "an EAGLE-3 head is for models on one"),
    (
        lambda on, one, *_: drafting(on, one, eagle3_head(on), drafter=st.Eagle3Drafter),
        "an EAGLE-3 head is for models on one device",
    ),
    (lambda on, one, *_: st.MedusaDrafter(on, heads_of(one)), "MedusaDrafter is for models on one"),
    (lambda *_: st.from_pretrained("there", replicate=True), "pass mesh="),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(call, message):
    name = "mamba2"
    models = sharded(name, 2, 4), model_of(name), replicated_draft(name, 2, 4), draft_of(name)
    with pytest.raises(ValueError, match=message):
        call(*models)


# Checkpoints.


def test_a_checkpoint_does_not_know_its_mesh(tmp_path):
    """Saved from 2 x 4 devices and from one; loaded on one, and on other meshes."""
    name = "one layer"
    one = model_of(name)
    st.save_pretrained(one, tmp_path / "one")
    st.save_pretrained(sharded(name, 2, 4), tmp_path / "mesh")
    # (Orbax compresses arrays of a device and of a host to different sizes.)
    assert crcs(tmp_path / "one") == crcs(tmp_path / "mesh")
    assert_same_model(st.from_pretrained(tmp_path / "mesh").in_first(), one)
    for data, model in ((8, 1), (1, 4), (2, 4)):
        mesh = mesh_of(data, model)
        loaded = st.from_pretrained(tmp_path / "mesh", mesh=mesh)
        assert loaded.partition == partition_module.Partition(mesh, model)
        assert_same_model(loaded, sharded(name, data, model))
    draft = st.from_pretrained(tmp_path / "mesh", mesh=mesh, replicate=True)
    assert_same_model(draft, one)
    with pytest.raises(ValueError, match="does not fit model = 3"):
        st.from_pretrained(tmp_path / "mesh", mesh=st.make_mesh(model=3))


def test_matrices_in_8_bits_are_cut_between_groups_of_inputs(tmp_path):
    """Both arrays, as the matrix is; the text, the checkpoint and loading do not know the mesh."""
    one = model_of("one layer").quantized()
    other = st.shard(one, mesh_of(2, 2))
    options = dict(max_new_tokens=6, eos_token=())
    texts = [st.generate(each, [[1, 2, 3], [4]], **options).tokens for each in (one, other)]
    np.testing.assert_array_equal(*texts)
    for name, model in {"one": one, "mesh": other}.items():
        st.save_pretrained(model, tmp_path / name)
    assert crcs(tmp_path / "one") == crcs(tmp_path / "mesh")
    assert_same_model(st.from_pretrained(tmp_path / "one", mesh=mesh_of(2, 2)), other)
    with pytest.raises(
        ValueError, match=r"out_proj.kernel: 8 times 8 inputs on 8 shards are no mul"
    ):
        st.shard(one, mesh_of(1, 8))


@slow
def test_a_load_holds_one_weight_at_a_time(tmp_path, monkeypatch):
    """Of those that are cut; on a CPU a whole one is its own device memory."""
    name = "bamba"
    st.save_pretrained(model_of(name), tmp_path / "saved")
    alive, most = [], []
    read = arrays._read

    def counted(*store):
        gc.collect()
        most.append(sum(reference() is not None for reference in alive))
        values = read(*store)
        if values.ndim > 1:
            alive.append(weakref.ref(values))
        return values

    monkeypatch.setattr(arrays, "_read", counted)
    st.from_pretrained(tmp_path / "saved", mesh=mesh_of(2, 4))
    assert len(alive) > 8
    assert max(most) <= 1


@slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "target", "mesh"),
    [("mamba2", "mamba_ssm", (2, 4)), ("groups", "nemotron_h", (2, 4)), ("embedded", "hf", (4, 2))],
)
def test_checkpoints_of_other_programs(name, target, mesh, dtype, tmp_path):
    """The embedded target becomes one of Bamba, with attention and an MLP."""
    model = st.from_pretrained(st.demo_path("target")) if name == "embedded" else model_of(name)
    convert.writing.write_as(model, tmp_path, target)
    loaded = st.from_pretrained(tmp_path, mesh=mesh_of(*mesh), dtype=dtype)
    want = st.from_pretrained(tmp_path, dtype=dtype).in_first()
    assert_same_model(st.shard(loaded, None), want)


@slow
def test_numbers_that_are_not_finite_are_found_in_any_shard(tmp_path):
    broken = with_weight(model_of("tied"), "embedding", lambda w: w.at[-1, -1].set(jnp.inf))
    st.save_pretrained(broken, tmp_path / "saved")
    with pytest.raises(ValueError, match="embedding holds NaN, infinity"):
        st.from_pretrained(tmp_path / "saved", mesh=mesh_of(2, 4))
