import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.decoding.drafters.levels import MAX_UNROLLED
from stree_jax.decoding.loop import TARGET_FAILED, SpeculativeDecoder
from stree_jax.decoding.on_mesh import on_host
from stree_jax.decoding.options import plan
from stree_jax.layer_config import AttentionConfig
from stree_jax.testing import HYBRIDS, perturbed, randomised, tiny_model
from tests.helpers import with_weight

PROMPTS = [[5, 9, 2, 30], [3], [1, 2, 3, 4, 1, 2, 3, 4]]
KEY = jax.random.key(11)
TREE = st.TreeTopology.from_branching((2, 2))


def drafter(**options):
    return st.ModelDrafter(perturbed(tiny_model(), 0.3), **options)


def test_the_shape_of_the_result():
    out = st.generate(tiny_model(), PROMPTS, max_new_tokens=5)
    assert out.tokens.shape == (3, 5)
    assert out.tokens.dtype == out.lengths.dtype == np.int32
    assert out.lengths.tolist() == [5, 5, 5]
    assert st.PAD == -1


def test_streaming_yields_what_generate_returns():
    options = dict(max_new_tokens=13, drafter=drafter(), topology=TREE)
    want = st.generate(tiny_model(), PROMPTS, **options)
    pieces = list(st.stream(tiny_model(), PROMPTS, **options))
    for row in range(3):
        assert [token for piece in pieces for token in piece[row]] == want.tokens[row].tolist()
    assert all(len(new) <= 3 for piece in pieces for new in piece)
    assert len(pieces) == want.stats.target_calls_per_row.max()


def test_streaming_copies_new_tokens_only_to_the_host(monkeypatch):
    copied = []

    def recorded(tree, *rows):
        arrays = on_host(tree, *rows)
        copied.append(sum(np.size(leaf) for leaf in jax.tree.leaves(arrays)))
        return arrays

    monkeypatch.setattr("stree_jax.decoding.generate.on_host", recorded)
    steps = st.stream(tiny_model(), PROMPTS, max_new_tokens=13, drafter=drafter(), topology=TREE)
    next(steps)
    next(steps)
    assert max(copied) == 3 * (TREE.depth + 1) + 3  # tokens and lengths, not the buffers of 64


@pytest.mark.parametrize("drafting", [False, True])
def test_same_key_same_output_whatever_the_other_rows_are(drafting):
    options = dict(max_new_tokens=12, temperature=1.0)
    if drafting:
        options |= dict(drafter=drafter(), topology=TREE)
    first = st.generate(tiny_model(), PROMPTS, key=KEY, **options)
    again = st.generate(tiny_model(), PROMPTS, key=KEY, **options)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    # Other rows beside it; one ends at once.
    eos = int(first.tokens[0, 0])
    others = st.generate(tiny_model(), [PROMPTS[0], [8, 8], PROMPTS[2]], key=KEY, **options)
    np.testing.assert_array_equal(first.tokens[[0, 2]], others.tokens[[0, 2]])
    if eos not in first.tokens[2]:
        ended = st.generate(tiny_model(), PROMPTS, key=KEY, eos_token=eos, **options)
        assert ended.lengths[0] == 1
        np.testing.assert_array_equal(first.tokens[2], ended.tokens[2])
    assert not np.array_equal(
        first.tokens, st.generate(tiny_model(), PROMPTS, key=jax.random.key(12), **options).tokens
    )


def test_raw_keys_are_accepted():
    options = dict(max_new_tokens=4, temperature=1.0)
    typed = st.generate(tiny_model(), PROMPTS, key=jax.random.key(3), **options)
    raw = st.generate(tiny_model(), PROMPTS, key=jax.random.PRNGKey(3), **options)
    np.testing.assert_array_equal(typed.tokens, raw.tokens)


def test_statistics_add_up():
    out = st.generate(tiny_model(), PROMPTS, max_new_tokens=17, drafter=drafter(), topology=TREE)
    stats = out.stats
    assert stats.num_tokens == out.lengths.sum()
    assert stats.tau == stats.num_tokens / stats.num_target_calls
    assert stats.num_target_calls == stats.target_calls_per_row.sum()
    assert stats.num_drafted == stats.num_target_calls * (TREE.num_nodes - 1)
    assert stats.accepted_per_depth.sum() == stats.num_accepted
    assert stats.accepted_per_depth[0] >= stats.accepted_per_depth[1]
    # A call emits its accepted drafts and one more token, unless the limit cuts that one.
    missing = stats.num_accepted + stats.num_target_calls - stats.num_tokens
    assert 0 <= missing <= len(PROMPTS)
    np.testing.assert_allclose(stats.tau_per_row, out.lengths / stats.target_calls_per_row)


@pytest.mark.parametrize("steps", [2, 5])
def test_more_steps_per_sync_change_nothing(steps):
    """Rows end between two termination checks, one of them at an end of sequence."""
    model = tiny_model()
    if steps == 5:
        layers = ("parallel", "mlp", "mamba2")
        config = dataclasses.replace(HYBRIDS["falcon_h1"], layers=layers)
        model = randomised(st.HybridLM(config, rngs=nnx.Rngs(0)), 0)
    free = st.generate(model, PROMPTS, max_new_tokens=17, drafter=drafter(), topology=TREE)
    options = dict(max_new_tokens=17, drafter=drafter(), topology=TREE)
    options["eos_token"] = int(free.tokens[0, 4])
    want = st.generate(model, PROMPTS, return_cache=True, **options)
    request = plan(model, PROMPTS, **options)
    decoder = dataclasses.replace(request.decoder, steps_per_sync=steps)
    state = decoder.start(model, request.drafter, request.context, request.keys)
    state = decoder.run(model, request.drafter, state, request.limits, request.sampling)
    np.testing.assert_array_equal(state.emitted, want.lengths)
    for row, prompt, tokens in zip(state.context.tokens, PROMPTS, want.tokens, strict=True):
        kept = tokens[tokens >= 0]
        np.testing.assert_array_equal(row[len(prompt) : len(prompt) + len(kept)], kept)
    np.testing.assert_array_equal(state.statistics.target_calls, want.stats.target_calls_per_row)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state.cache, want.cache
    )


def test_the_kernels_decode_the_same():
    """Target and draft by the interpreted kernels: whole trees, and trees that grow."""
    config = dataclasses.replace(
        st.ModelConfig.tiny(head_dim=16, state_size=16, num_layers=1, tie_embeddings=False),
        layers=("mamba2", "attention"),
        attention=AttentionConfig(4, 2, 16, rotary_dim=16),
    )
    outputs = []
    for implementation in ("xla", "pallas_interpret"):
        model = st.HybridLM(config, rngs=nnx.Rngs(0), implementation=implementation)
        target = randomised(model, 0)
        drafter = st.ModelDrafter(perturbed(target, 0.3))
        outputs.append(
            st.generate(
                *(target, PROMPTS),
                max_new_tokens=9,
                drafter=drafter,
                topology=TREE,
                return_cache=True,
            )
        )
    plain, kernels = outputs
    np.testing.assert_array_equal(kernels.tokens, plain.tokens)
    assert kernels.stats.num_accepted == plain.stats.num_accepted > 0
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        kernels.cache,
        plain.cache,
    )


def test_a_failure_in_the_first_of_two_steps_is_reported():
    prompts = [[1, 2], [3, 35], [4]]
    model = broken(np.nan, 35)
    request = plan(model, prompts, max_new_tokens=4)
    decoder = dataclasses.replace(request.decoder, steps_per_sync=2)
    state = decoder.start(model, None, request.context, request.keys)
    state = decoder.run(model, None, state, request.limits, request.sampling)
    assert state.failed.tolist() == [0, TARGET_FAILED, 0]
    assert state.emitted[1] == 0


def test_padded_vocabulary_is_never_emitted():
    model = tiny_model("groups")  # 37 tokens, 40 rows
    model = with_weight(model, "head", lambda head: head.at[37:].set(100.0 * head[0]))
    for options in ({}, dict(temperature=5.0, key=KEY, drafter=st.ModelDrafter(model))):
        out = st.generate(model, PROMPTS, max_new_tokens=30, **options)
        assert out.tokens.max() < 37


def test_bfloat16_decodes():
    model = tiny_model("plain", dtype="bfloat16")
    out = st.generate(model, PROMPTS, max_new_tokens=9, drafter=st.ModelDrafter(model))
    assert out.stats.tau > 2
    assert (out.tokens >= 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(prompts=[]), "prompts is empty"),
        (dict(prompts=[[1], []]), r"prompts\[1\] is empty"),
        (dict(prompts=[[1], [2, 37]]), r"prompts\[1\] has token id 37, outside .* of 37"),
        (dict(prompts=[[-1]]), "token id -1, outside the vocabulary"),
        (dict(max_new_tokens=0), "max_new_tokens must be an integer, at least 1; got 0"),
        (dict(max_new_tokens=True), "max_new_tokens must be an integer"),
        (dict(temperature=-0.1), "temperature must be a number from 0 on, got -0.1"),
        (dict(temperature=float("nan")), "temperature .* got nan"),
        (dict(temperature=1e39), "temperature .* got 1e\\+39"),
        (dict(temperature=1.0), "needs a random key"),
        (dict(top_k=-1), "top_k must be an integer, at least 0; got -1"),
        (dict(top_p=0.0), r"top_p must be in \(0, 1\], got 0.0"),
        (dict(top_p=1.5), r"top_p must be in \(0, 1\], got 1.5"),
        (dict(eos_token=37), "eos_token must be an integer, from 0 to 36; got 37"),
        (dict(topology=TREE), "a tree of 7 nodes needs a drafter"),
        (dict(drafter="model", topology=st.TreeTopology.from_branching((38,))), "38 children"),
        (dict(verifier="medusa"), "unknown verifier 'medusa'; known: .*'multi_step'"),
        (dict(verifier="multi_step", drafter="model"), "needs temperature > 0; use 'greedy'"),
        (dict(verifier="greedy", temperature=1.0, key=KEY), "use 'target_only'"),
        (
            dict(verifier="multi_step", drafter="model", temperature=1.0, key=KEY),
            "not exact for child_sampling = 'shared'.*; use 'target_only'.*child_sampling='iid'",
        ),
        (
            dict(verifier="multi_step", drafter="ngram", temperature=1.0, key=KEY),
            "not exact for child_sampling = 'top_k'",
        ),
        (
            dict(verifier="traversal", drafter="model", temperature=1.0, key=KEY, topology=TREE),
            "'traversal' is not exact for child_sampling = 'shared'",
        ),
        (dict(drafter="iid"), "child_sampling = 'iid' needs temperature > 0"),
        (dict(drafter="vocabulary"), "different vocabularies: 11 and 37 tokens"),
        (
            dict(temperature=1.0, key=jax.random.split(KEY)),
            "a single random key or one for each of",
        ),
        (dict(temperature=1e-40, key=KEY), "temperature = 1e-40 is 0 in float32; use 0"),
        (dict(drafter="ngram", topology=st.TreeTopology.from_branching((38,))), "only 37 tokens"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_compiled(change, message, monkeypatch):
    def never(*_, **__):
        raise AssertionError("compiled")

    monkeypatch.setattr(SpeculativeDecoder, "start", never)
    makers = {
        "model": drafter,
        "iid": lambda: drafter(child_sampling="iid"),
        "ngram": st.NgramDrafter,
        "vocabulary": lambda: st.ModelDrafter(
            st.HybridLM(st.ModelConfig.tiny(vocab_size=11), rngs=nnx.Rngs(0))
        ),
    }
    if "drafter" in change:
        change = change | {"drafter": makers[change["drafter"]]()}
    arguments = {"prompts": PROMPTS} | change
    for run in (st.generate, st.stream):
        with pytest.raises(ValueError, match=message):
            run(tiny_model(), **arguments)


WRONG_TYPES = r"""
import pytest
from flax import nnx
import stree_jax as st
from stree_jax.training.recipe import Training

model = st.HybridLM(st.ModelConfig.tiny(), rngs=nnx.Rngs(0))
for change, message in [
    (dict(prompts=None), "prompts must be a list with a list .*, got None"),
    (dict(prompts=5), "prompts must be a list with a list .*, got 5"),
    (dict(temperature=10**400), r"temperature must be a number from 0 on, got 10{76}\.\.\.$"),
    (dict(temperature=10**5000), "temperature must be a number from 0 on, got <int>"),
    (dict(top_p=10**400), r"top_p must be in .*\.\.\.$"),
    (dict(max_new_tokens=10**12), "max_new_tokens = 10{12}: in all .* the limit is 16777216$"),
    (dict(eos_token=[[1], [2, 3]]), r"eos_token must be an integer, .* got \[\[1\], \[2, 3\]\]"),
    (dict(temperature=1.0, key=10**30), "key must be a random key such as .*, got 10{30}$"),
    (dict(temperature=1.0, key=[10**30, 1]), "key must be a random key such as .*, got"),
    (dict(verifier="z" * 999), r"unknown verifier 'z{76}\.\.\.; known"),
    (dict(topology="z" * 999), r"topology must be a TreeTopology, got 'z{76}\.\.\.$"),
    (dict(prompts=[1, 2]), r"prompts\[0\] is not a list of token ids"),
    (dict(prompts=["text"]), r"prompts\[0\] is not a list of token ids"),
    (dict(prompts=[[0.5]]), r"prompts\[0\] has float64 values"),
    (dict(max_new_tokens=2.5), "max_new_tokens must be an integer"),
    (dict(temperature="hot"), "temperature must be a number"),
    (dict(topology=(2, 2)), "topology must be a TreeTopology"),
    (dict(drafter=model), r"drafter must be a ModelDrafter\(\.\.\.\), .*, got HybridLM"),
    (dict(drafter=st.NgramDrafter), "drafter must be .*, got <class"),
    (dict(prompts=[[[1], [2, 3]]]), r"prompts\[0\] is not a list of token ids"),
    (dict(key="seed"), "key must be a random key such as"),
    (dict(key=0), "key must be a random key such as"),
    (dict(verifier=["greedy"]), r"verifier must be one of .*, got \['greedy'\]"),
    (dict(verifier=object()), "verifier must be one of .*, or an object with the name and the"),
    (dict(verifier=type(st.VERIFIERS["greedy"])), "verifier must be one of .*, got <class"),
]:
    with pytest.raises(ValueError, match=message):
        st.generate(model, **({"prompts": [[1]]} | change))
for call in (lambda: st.generate("path", [[1]]), lambda: st.ModelDrafter("path")):
    with pytest.raises(ValueError, match="must be a HybridLM, got str; load one with"):
        call()
with pytest.raises(ValueError, match="state_size must be an integer, at least 1; got 8.0"):
    st.ModelConfig.tiny(state_size=8.0)
with pytest.raises(ValueError, match="dt_limit must be"):
    st.ModelConfig.tiny(dt_limit=(0.0,))
with pytest.raises(ValueError, match="steps must be an integer, at least 1; got 6.5"):
    Training(steps=6.5)
for make, message in [
    (lambda: st.TreeTopology.paper(["A"]), "the paper's trees are"),
    (lambda: st.TreeTopology.from_parents([-1, 0.7]), "a parent must be an integer; got 0.7"),
    (lambda: st.TreeTopology.chain(2.5), "num_drafts must be an integer, at least 0; got 2.5"),
    (lambda: st.TreeTopology.from_branching(3), r"a sequence such as \(3, 2, 1\), got 3"),
    (lambda: st.TreeTopology.from_parents(5), r"parents is a sequence such as .*, got 5"),
    (lambda: st.TreeTopology(None), r"parents is a sequence such as .*, got None"),
    (lambda: st.TreeTopology.chain(10**5000), "a tree of <int> nodes or more; at most 4096"),
    (lambda: st.ModelConfig.preset([]), r"unknown preset \[\]; known: Falcon-H1-0.5B, "),
    (lambda: st.from_pretrained(None), "path must be a directory or .*, got None"),
    (lambda: st.load_tokenizer(None), "path must be a directory or .*, got None"),
    (lambda: st.from_pretrained("x", dtype="zz"), "dtype must be float32 or .*, got 'zz'"),
    (lambda: st.from_pretrained("x", implementation="zz"), "implementation .*, got 'zz'"),
    (lambda: st.HybridLM(model.config, dtype="zz", rngs=nnx.Rngs(0)), "dtype must .*, got 'zz'"),
    (lambda: st.HybridLM.abstract(model.config, implementation="zz"), "implementation .* got 'zz'"),
    (lambda: st.from_pretrained("a" * 5000), r"no checkpoint at a{297}\.{3}: File name too"),
    (lambda: st.load_tokenizer("a" * 5000), r"no tokenizer at a{297}\.\.\.$"),
    (lambda: st.HybridLM(None, rngs=nnx.Rngs(0)), "config must be a ModelConfig, .* got None"),
    (lambda: st.HybridLM.abstract("x"), "config must be a ModelConfig, .* got 'x'"),
    (lambda: st.save_pretrained(model, 5), "path must be the directory to create, got 5"),
    (lambda: st.save_pretrained("model", "x"), "model must be a HybridLM, got str; load one with"),
    (lambda: st.TreeTopology.chain(2).draw(5), "path is a sequence of nodes, got 5 and "),
    (lambda: st.NgramDrafter(max_match=10**12), "max_match must be .* from 1 to 64; got 10{12}$"),
]:
    with pytest.raises(ValueError, match=message):
        make()
with pytest.raises(ValueError, match="max_match must be an integer"):
    st.NgramDrafter(max_match=2.5)
"""


def test_wrong_types_are_refused():
    """In a process without the shape checker, which would raise first."""
    subprocess.run([sys.executable, "-c", WRONG_TYPES], check=True)


@pytest.mark.parametrize("children", ["best", "sorted"])
def test_unknown_children_are_refused(children):
    with pytest.raises(ValueError, match=f"child_sampling must be 'auto' or one of .*{children}"):
        st.ModelDrafter(tiny_model(), child_sampling=children)


def test_bad_match_lengths_are_refused():
    with pytest.raises(ValueError, match="min_match, with max_match = 2, must be .*; got 3"):
        st.NgramDrafter(min_match=3, max_match=2)


def broken(value, token):
    """A model whose embedding of one token is not finite: only rows that read it fail."""
    model = randomised(tiny_model("groups"), 4)
    return with_weight(model, "embedding", lambda rows: rows.at[token].set(value))


def test_a_cold_temperature_takes_the_best_token():
    want = st.generate(tiny_model(), PROMPTS, max_new_tokens=6)
    for options in ({}, {"drafter": drafter(), "topology": st.TreeTopology.from_branching((2, 1))}):
        cold = st.generate(
            tiny_model(), PROMPTS, max_new_tokens=6, temperature=1e-37, key=KEY, **options
        )
        np.testing.assert_array_equal(cold.tokens, want.tokens)


def test_a_large_top_k_keeps_all_tokens():
    common = dict(max_new_tokens=6, temperature=1.0, key=KEY)
    want = st.generate(tiny_model(), PROMPTS, top_k=37, **common)
    np.testing.assert_array_equal(
        st.generate(tiny_model(), PROMPTS, top_k=2**40, **common).tokens, want.tokens
    )


def test_a_drafter_with_a_tree_of_the_root_only():
    """Above temperature 0 too, where the drafter would have chosen another verifier."""
    common = dict(max_new_tokens=6, temperature=1.0, key=KEY)
    want = st.generate(tiny_model(), PROMPTS, **common)
    alone = st.generate(tiny_model(), PROMPTS, verifier="multi_step", **common)
    np.testing.assert_array_equal(alone.tokens, want.tokens)
    common |= dict(drafter=drafter(), topology=st.TreeTopology.chain(0))
    for verifier in (None, "multi_step", "traversal", "target_only"):
        out = st.generate(tiny_model(), PROMPTS, verifier=verifier, **common)
        np.testing.assert_array_equal(out.tokens, want.tokens)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_name_the_row(value):
    prompts = [[1, 2], [3, 35], [4]]
    with pytest.raises(FloatingPointError, match="the target model's logits .* in row 1"):
        st.generate(broken(value, 35), prompts, max_new_tokens=4)
    with pytest.raises(FloatingPointError, match="the target model's logits .* in row 1"):
        list(st.stream(broken(value, 35), prompts, max_new_tokens=4))


@pytest.mark.parametrize(
    ("drafting", "temperature"), [(None, 0.0), ("model", 1.0), ("beam", 0.0), ("dynamic", 1.0)]
)
def test_one_logit_that_is_nan_ends_the_row(drafting, temperature):
    """One damaged row of the head: every other logit, and so the best one, is a number."""
    # So many tokens that XLA vectorizes the maximum, which then ignores NaN.
    config = st.ModelConfig.tiny(num_layers=1, vocab_size=4096, tie_embeddings=False)
    model = st.HybridLM(config, rngs=nnx.Rngs(0))
    damaged = with_weight(model, "head", lambda head: head.at[1700, 3].set(np.nan))
    options = dict(max_new_tokens=4, temperature=temperature, key=KEY)
    good = bad = {}
    if drafting is not None:
        kind = dict(model=st.ModelDrafter, beam=st.BeamDrafter, dynamic=st.DynamicDrafter)[drafting]
        good, bad = (dict(drafter=kind(draft), topology=TREE) for draft in (model, damaged))
        with pytest.raises(FloatingPointError, match="the draft model's logits .* in row 0"):
            st.generate(model, PROMPTS, **options, **bad)
    with pytest.raises(st.NonFiniteLogitsError, match="the target model's logits") as error:
        st.generate(damaged, PROMPTS, **options, **good)
    assert error.value.rows == [0, 1, 2]
    assert error.value.generation.lengths.tolist() == [0, 0, 0]


def test_what_is_not_a_token_may_be_anything():
    """NaN in the vocabulary's padding means nothing, and -inf rules a token out."""
    model = tiny_model("groups")
    padded = with_weight(model, "head", lambda head: head.at[37:].set(np.nan))
    want = st.generate(model, PROMPTS, max_new_tokens=6)
    for options in ({}, dict(drafter=st.ModelDrafter(padded), topology=TREE)):
        out = st.generate(padded, PROMPTS, max_new_tokens=6, **options)
        np.testing.assert_array_equal(out.tokens, want.tokens)


def test_a_draft_model_that_is_not_finite_names_the_row():
    draft = st.ModelDrafter(broken(np.nan, 4))
    with pytest.raises(FloatingPointError, match="the draft model's logits .* in row 2"):
        st.generate(tiny_model("groups"), [[1, 2], [3], [4]], max_new_tokens=1, drafter=draft)


def counts(tokens, vocab_size):
    pairs = tokens[:, 0] * vocab_size + tokens[:, 1]
    return np.bincount(pairs, minlength=vocab_size**2)


@pytest.mark.parametrize(
    ("make", "topology", "verifier"),
    [
        (None, None, None),
        (lambda m: st.ModelDrafter(m), TREE, None),
        (
            lambda m: st.ModelDrafter(m, child_sampling="without_replacement"),
            TREE,
            "without_replacement",
        ),
        (lambda m: st.ModelDrafter(m, child_sampling="iid"), TREE, "multi_step"),
        (lambda m: st.ModelDrafter(m, child_sampling="iid"), st.TreeTopology.chain(2), None),
        (lambda m: st.ModelDrafter(m, child_sampling="iid"), TREE, "traversal"),
        (
            lambda m: st.ModelDrafter(m, child_sampling="iid"),
            st.TreeTopology.chain(MAX_UNROLLED + 1),
            "traversal",
        ),
        (lambda m: st.ModelDrafter(m, child_sampling="top_k"), TREE, "target_only"),
        (lambda m: st.NgramDrafter(), TREE, None),
    ],
)
def test_samples_have_the_targets_distribution(make, topology, verifier):
    """Chi-squared on the first two tokens of 4000 rows, against the model's own probabilities."""
    vocab_size, rows, temperature, top_k = 6, 4000, 0.8, 5
    shape = st.ModelConfig.tiny(vocab_size=vocab_size, num_layers=1)
    target, draft = (randomised(st.HybridLM(shape, rngs=nnx.Rngs(0)), seed) for seed in (0, 1))
    prompt = [1, 4, 2, 1, 4]
    out = st.generate(
        target,
        [prompt] * rows,
        max_new_tokens=2,
        drafter=None if make is None else make(draft),
        topology=topology,
        verifier=verifier,
        temperature=temperature,
        top_k=top_k,
        key=jax.random.key(5),
    )

    def probabilities(tokens):
        logits = np.asarray(target(jnp.array([tokens], jnp.int32))[0, -1], np.float64) / temperature
        logits[np.argsort(logits)[: vocab_size - top_k]] = -np.inf
        return np.exp(logits) / np.exp(logits).sum()

    first = probabilities(prompt)
    expected = rows * np.concatenate([first[t] * probabilities([*prompt, t]) for t in range(6)])
    observed = counts(out.tokens, vocab_size)
    possible = expected > 0
    assert observed[~possible].sum() == 0
    statistic = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)
