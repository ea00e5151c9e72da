"""Sampled output of every tree and drafter is autoregressive output with the same key."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.decoding.options import plan
from stree_jax.decoding.sampling import filtered_logits, position_noise
from stree_jax.decoding.types import Sampling
from stree_jax.testing import HYBRIDS, perturbed, randomised, tiny_model
from tests.decoding.test_lossless import PROMPTS
from tests.helpers import apply

NEW_TOKENS = 16
TEMPERATURES = (0.3, 0.7, 1.0, 1.3)
FILTERS = (dict(), dict(top_p=0.9), dict(top_k=8), dict(top_k=8, top_p=0.9))
TREES = {f"paper {name}": st.TreeTopology.paper(name) for name in "ABCDE"} | {
    "chain of 3": st.TreeTopology.chain(3),
    "chain of 6": st.TreeTopology.chain(6),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A prompt with a key and a way of sampling of its own."""

    prompt: tuple
    seed: int
    temperature: float
    top_k: int = 0
    top_p: float = 1.0


# A batch of all ways of sampling, each with every prompt: one program decodes all of it.
ROWS = [
    Row(tuple(prompt), 10 * i + j, temperature, **filters)
    for i, (temperature, filters) in enumerate(itertools.product(TEMPERATURES, FILTERS))
    for j, prompt in enumerate(PROMPTS)
]


def sample(rows=ROWS, model=None, drafter=None, topology=None, **options):
    """New tokens `[B, NEW_TOKENS]` and tau; rows have samplings of their own."""
    model = model or tiny_model()
    request = plan(
        model,
        [row.prompt for row in rows],
        max_new_tokens=NEW_TOKENS,
        drafter=drafter,
        topology=topology,
        temperature=1.0,
        top_p=0.5,
        key=jax.vmap(jax.random.key)(jnp.array([row.seed for row in rows])),
        **options,
    )
    sampling = dataclasses.replace(
        request.sampling,
        temperature=jnp.array([row.temperature for row in rows], jnp.float32),
        top_k=jnp.array([row.top_k for row in rows], jnp.int32),
        top_p=jnp.array([row.top_p for row in rows], jnp.float32),
    )
    state = request.decoder.start(model, request.drafter, request.context, request.keys)
    state = request.decoder.run(model, request.drafter, state, request.limits, sampling)
    tokens = np.asarray(state.context.tokens)
    new = [tokens[i, len(r.prompt) : len(r.prompt) + NEW_TOKENS] for i, r in enumerate(rows)]
    return np.stack(new), state.statistics.emitted.sum() / state.statistics.target_calls.sum()


@pytest.fixture(scope="module")
def autoregressive():
    return sample()[0]


def assert_same_tokens(got, want, model=None, rows=ROWS):
    """Equality; explains a difference as a near tie of the two best sums, or as a bug."""
    for row, a, b in zip(rows, got, want, strict=True):
        if np.array_equal(a, b):
            continue
        at = int(np.flatnonzero(a != b)[0])
        logits = apply(model or tiny_model(), np.array([[*row.prompt, *b[:at]]], np.int32))
        sampling = Sampling(
            jnp.array([row.temperature]), jnp.array([row.top_k]), jnp.array([row.top_p])
        )
        noise = position_noise(jax.random.key(row.seed)[None], jnp.array([at]), 0, 37)
        best = np.sort(filtered_logits(logits[:, -1:, :37], sampling) + noise)[0, 0, -2:]
        kind = "a near tie" if best[1] - best[0] < 1e-4 / row.temperature else "a real difference"
        pytest.fail(f"{row}, new token {at}: {a[at]} for {b[at]}; {kind} ({best})")


def drafters():
    target = tiny_model()
    return [target, perturbed(target, 0.1), tiny_model(seed=1)]


def fast(names, *some):
    """Some of the names; the others are slow tests."""
    return [name if name in some else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", fast(TREES, "paper A", "chain of 3"))
def test_every_tree_and_draft_model(name, autoregressive):
    taus = []
    for draft in drafters():
        new, tau = sample(drafter=st.ModelDrafter(draft), topology=TREES[name])
        assert_same_tokens(new, autoregressive)
        taus.append(tau)
    itself, alike, unrelated = taus
    # With the target as draft the first child of each node is always right.
    assert itself == NEW_TOKENS / -(-NEW_TOKENS // (TREES[name].depth + 1))
    assert itself > alike > unrelated > 1


BLIND = {
    "n-gram": (st.NgramDrafter, st.TreeTopology.from_branching((2, 1, 1))),
    "beam": (lambda: st.BeamDrafter(perturbed(tiny_model(), 0.1)), st.TreeTopology.beam(2, 2)),
    "top-k": (
        lambda: st.ModelDrafter(perturbed(tiny_model(), 0.1), child_sampling="top_k"),
        st.TreeTopology.from_branching((2, 2)),
    ),
}


@pytest.mark.parametrize("name", fast(BLIND, "n-gram", "beam"))
def test_drafts_that_do_not_know_the_noise(name, autoregressive):
    make, topology = BLIND[name]
    new, tau = sample(drafter=make(), topology=topology)
    assert_same_tokens(new, autoregressive)
    assert tau > 1


@pytest.mark.parametrize("name", fast(HYBRIDS, "mamba2attn"))
def test_hybrids(name):
    model = tiny_model(f"{name} hybrid")
    rows = ROWS[::2]
    want, _ = sample(rows, model)
    drafter = st.ModelDrafter(perturbed(model, 0.1))
    new, tau = sample(rows, model, drafter, st.TreeTopology.from_parents([-1, 0, 1, 0, 3, 1]))
    assert_same_tokens(new, want, model, rows)
    assert tau > 1.2


def test_a_row_does_not_depend_on_its_place_or_its_batch(autoregressive):
    """Nor on the tree, the buffer, or whether its sampling is one value for all rows."""
    options = dict(drafter=st.ModelDrafter(perturbed(tiny_model(), 0.1)))
    options["topology"] = TREES["paper A"]
    order = np.random.default_rng(0).permutation(len(ROWS))
    new, _ = sample([ROWS[i] for i in order], **options)
    np.testing.assert_array_equal(new, autoregressive[order])
    for i in (4, 13, 35):
        row = ROWS[i]
        out = st.generate(
            tiny_model(),
            [row.prompt],
            max_new_tokens=60,  # another size of buffer
            temperature=row.temperature,
            top_k=row.top_k,
            top_p=row.top_p,
            key=jax.random.key(row.seed)[None],
            **(options if i == 35 else {}),
        )
        np.testing.assert_array_equal(out.tokens[0, :NEW_TOKENS], autoregressive[i])


def test_a_single_key_is_folded_with_the_index_of_the_row():
    key = jax.random.key(3)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(PROMPTS)))
    common = dict(max_new_tokens=6, temperature=1.0)
    want = st.generate(tiny_model(), PROMPTS, key=key, **common)
    for own in (keys, jax.random.key_data(keys)):
        out = st.generate(tiny_model(), PROMPTS, key=own, **common)
        np.testing.assert_array_equal(out.tokens, want.tokens)
    backwards = st.generate(tiny_model(), PROMPTS[::-1], key=keys[::-1], **common)
    np.testing.assert_array_equal(backwards.tokens[::-1], want.tokens)


def test_a_stream_is_the_same_text():
    common = dict(max_new_tokens=12, temperature=0.9, key=jax.random.key(3))
    want = st.generate(tiny_model(), PROMPTS, **common)
    drafter = st.ModelDrafter(perturbed(tiny_model(), 0.1))
    pieces = list(st.stream(tiny_model(), PROMPTS, drafter=drafter, **common))
    for row, tokens in enumerate(want.tokens):
        assert [token for piece in pieces for token in piece[row]] == tokens.tolist()
    assert len(pieces) < 12


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_that_depend_on_the_batch_are_refused(impl):
    """`vmap` over such keys draws all rows from the first one."""
    key = jax.random.key(0, impl=impl)
    with pytest.raises(ValueError, match="'rbg' draw other numbers in another batch; use"):
        plan(tiny_model(), PROMPTS, temperature=1.0, key=key)
    plan(tiny_model(), PROMPTS, key=key)  # temperature 0 draws nothing


@pytest.mark.parametrize(
    ("drafting", "temperature", "top_p"), [(False, 1.0, 1.0), (True, 1.0, 1.0), (True, 4.0, 0.9)]
)
def test_the_first_two_tokens_over_4096_keys(drafting, temperature, top_p):
    """Chi-squared against the model's own probabilities, at odds of one in a million."""
    config = st.ModelConfig.tiny(vocab_size=6, num_layers=1)
    target, draft = (randomised(st.HybridLM(config, rngs=nnx.Rngs(0)), seed) for seed in (0, 1))
    prompt, rows = [1, 4, 2, 1, 4], 4096
    drafter = st.ModelDrafter(draft) if drafting else None
    out = st.generate(
        target,
        [prompt] * rows,
        max_new_tokens=2,
        drafter=drafter,
        topology=st.TreeTopology.from_branching((2, 1)) if drafting else None,
        temperature=temperature,
        top_p=top_p,
        key=jax.vmap(jax.random.key)(jnp.arange(rows)),
    )

    def probabilities(tokens):
        padded = np.array([[*tokens, 0]], np.int32)[:, :6]
        logits = np.asarray(apply(target, padded)[0, len(tokens) - 1], np.float64)
        probs = np.exp((logits - logits.max()) / temperature)
        probs /= probs.sum()
        order = np.argsort(-probs)
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= top_p]] = 0
        return probs / probs.sum()

    first = probabilities(prompt)
    both = rows * np.concatenate([first[t] * probabilities([*prompt, t]) for t in range(6)])
    counts = np.bincount(out.tokens @ [6, 1], minlength=36)
    for observed, expected in ((counts.reshape(6, 6).sum(1), rows * first), (counts, both)):
        possible = expected > 0
        assert observed[~possible].sum() == 0
        statistic = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
        freedom = possible.sum() - 1
        assert jax.scipy.special.gammaincc(freedom / 2, statistic / 2) > 1e-6
