"""Rules about tokens are those of transformers: its greedy texts, and its distributions."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.plan import filters_of
from stree_jax.decoding.sampling import token_log_probs
from stree_jax.decoding.types import Sampling
from tests.convert import checkpoints

PROMPTS = [[5, 9, 2, 30, 11, 7, 7], [38, 36, 12, 63, 38, 36, 12, 63]]
SIZE, NEW_TOKENS = 64, 16


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("rules") / "hf"
    return checkpoints.hf_checkpoint(path), st.from_pretrained(path)


@dataclasses.dataclass(frozen=True)
class Case:
    """Settings of one text. Token 0 is always banned, so that all texts share a program."""

    penalty: float = 1.0
    bias: tuple = ((1, -0.5),)
    banned: tuple = (0,)
    ends: tuple = (61, 62)
    least: int = 1


CASES = {
    "repetition": Case(penalty=1.4),
    "repetition wanted": Case(penalty=0.7),
    "bias": Case(bias=((1, -1.0), (38, -2.0), (7, 1.5))),
    "banned": Case(banned=(0, 10, 36, 38, 60)),
    "least": Case(ends=(36, 12, 49, 2), least=7),
    "all": Case(1.2, ((5, 0.7), (9, -2.0)), (0, 12, 63), (36, 18), 4),
}


@pytest.mark.parametrize("name", CASES)
def test_greedy_texts(name, models):
    hf, model = models
    case = CASES[name]
    for prompt in PROMPTS:
        want = hf.generate(
            checkpoints.torch().tensor([prompt]),
            do_sample=False,
            pad_token_id=0,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=case.least,
            repetition_penalty=case.penalty,
            sequence_bias={(token,): bias for token, bias in case.bias},
            bad_words_ids=[[token] for token in case.banned],
            eos_token_id=list(case.ends),
        )
        got = st.generate(
            model,
            [prompt],
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=case.least,
            processors=[
                st.RepetitionPenalty(case.penalty),
                st.LogitBias(dict(case.bias)),
                st.BannedTokens(case.banned),
            ],
            eos_token=case.ends,
        )
        text = want[0, len(prompt) :].tolist()
        assert got.tokens[0, : got.lengths[0]].tolist() == text


@pytest.mark.parametrize(
    "row",
    [
        st.Options(min_p=0.1),
        st.Options(min_p=1.0),
        st.Options(top_k=20, min_p=0.02),
        st.Options(top_k=30, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)
def test_distributions(row):
    checkpoints.transformers()
    from transformers.generation import logits_process

    logits = np.random.default_rng(1).normal(size=(5, SIZE)).astype(np.float32) * 2
    warpers = [logits_process.TemperatureLogitsWarper(0.8)]
    if row.top_k:
        warpers.append(logits_process.TopKLogitsWarper(row.top_k))
    if row.top_p < 1:
        warpers.append(logits_process.TopPLogitsWarper(row.top_p))
    warpers.append(logits_process.MinPLogitsWarper(row.min_p))
    warped = checkpoints.torch().tensor(logits)
    for warper in warpers:
        warped = warper(None, warped)
    want = warped.softmax(dim=-1).numpy()
    sampling = Sampling(jnp.full(5, 0.8), filters_of([row] * 5))
    got = np.exp(np.asarray(token_log_probs(jnp.asarray(logits)[:, None], sampling)))[:, 0]
    np.testing.assert_array_equal(got > 0, want > 0)
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert ((want > 0).sum(axis=-1) < SIZE).all()
