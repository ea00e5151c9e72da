import dataclasses

import jax
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.options import plan
from stree_jax.decoding.step import TARGET_FAILED
from stree_jax.layer_config import AttentionConfig
from stree_jax.mesh.hosts import on_host
from stree_jax.testing import HYBRIDS, perturbed, random_model, randomised, tiny_model
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streaming_yields_what_generate_returns(temperature):
    options = dict(max_new_tokens=13, temperature=temperature, key=KEY)
    options |= dict(drafter=drafter(), topology=TREE)
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


@pytest.mark.parametrize(
    ("steps", "hybrid"), [(2, False), (5, False), pytest.param(5, True, marks=pytest.mark.slow)]
)
def test_more_steps_per_sync_change_nothing(steps, hybrid):
    """Rows end between two termination checks, one of them at an end of sequence."""
    model = tiny_model()
    if hybrid:
        layers = ("parallel", "mlp", "mamba2")
        config = HYBRIDS["falcon_h1"].with_layers(layers)
        model = random_model(config)
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


@pytest.mark.slow  # test_lm compares prefill, steps and replay of kernels and of XLA
def test_the_kernels_decode_the_same():
    """Target and draft by the interpreted kernels: whole trees, and trees that grow."""
    config = st.ModelConfig.tiny(head_dim=16, state_size=16, tie_embeddings=False)
    attention = AttentionConfig(4, 2, 16, rotary_dim=16)
    config = config.with_layers(("mamba2", attention))
    outputs = []
    for implementation in ("xla", "pallas_interpret"):
        target = random_model(config, implementation=implementation)
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
    drafts = dict(drafter=st.ModelDrafter(model), topology=TREE)
    for options in ({}, dict(temperature=5.0, key=KEY, **drafts)):
        out = st.generate(model, PROMPTS, max_new_tokens=30, **options)
        assert out.tokens.max() < 37


def test_bfloat16_decodes():
    model = tiny_model("plain", dtype="bfloat16")
    out = st.generate(
        model, PROMPTS, max_new_tokens=9, drafter=st.ModelDrafter(model), topology=TREE
    )
    assert out.stats.tau > 2
    assert (out.tokens >= 0).all()


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
    model = random_model(config)
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
