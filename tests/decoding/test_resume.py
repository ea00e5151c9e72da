"""Drafters whose texts go on read what is new, and know then what they would from the start."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding import WholeModel, slots
from stree_jax.decoding.plan import plan
from stree_jax.testing import perturbed, tiny_model

PROMPTS = [[5, 9, 2, 30, 11, 7, 7], [3, 1], [8]]
MORE = [8, 1, 30]


def drafters(draft, other):
    return {
        "model": (st.ModelDrafter(draft), st.TreeTopology.from_branching((2, 1))),
        "beam": (st.BeamDrafter(draft), st.TreeTopology.beam(2, 2)),
        "dynamic": (st.DynamicDrafter(draft, expand=2), st.TreeTopology.budget(6, 3)),
        "cascade": (st.CascadeDrafter(draft, st.ModelDrafter(other), rounds=1), None),
        "cascade of prompt lookup": (st.CascadeDrafter(draft, st.NgramDrafter(), rounds=1), None),
        "interleaved": (st.InterleavedDrafter(draft, other, "ssq"), None),
    }


def rows_that_ended(decoder, model, drafter, request):
    """Two rows that ended long ago, in and at the end of a path, and one that has just ended."""
    state = slots.empty(decoder, model, drafter, rows=3)
    for row, prompt in enumerate(PROMPTS):
        prefix = decoder.read(model, drafter, plan(model, [prompt]).context)
        state = slots.insert(decoder, model, state, [row], prefix, jax.random.key(row)[None])
    limits = request.limits._replace(max_new_tokens=jnp.array([5, 6, 19]))
    return decoder.run(model, drafter, state, limits, request.sampling)


@pytest.mark.parametrize(
    "name",
    [
        "model",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("beam", "dynamic", "cascade", "cascade of prompt lookup", "interleaved")
        ),
    ],
)
def test_nothing_is_read_twice(name, monkeypatch):
    model = tiny_model("mamba2attn hybrid")
    drafter, topology = drafters(perturbed(model, 0.02), perturbed(model, 0.04))[name]
    options = dict(drafter=drafter, topology=topology, max_new_tokens=40)
    request = plan(model, PROMPTS, **options)
    decoder = request.decoder
    state = rows_that_ended(decoder, model, drafter, request)
    assert state.statistics.accepted.all()
    if name == "model":
        assert state.drafter.reader.has_catch_up[1]

    for row in range(3):
        prefix = slots.take(state, row)
        text = [*prefix.context.tokens[0, : int(prefix.context.length[0])].tolist(), *MORE]
        context = plan(model, [text], max_new_tokens=1).context
        with monkeypatch.context() as patched:
            lengths = counted(patched)
            longer = decoder.read(model, drafter, context, prefix)
        assert {*lengths} == {len(MORE)}
        want = decoder.read(model, drafter, context)
        for got, expected in zip(*map(jax.tree.leaves, (longer.cache, want.cache)), strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-4)
        step = st.Step(
            context,
            jax.random.key(0)[None],
            None,
            st.Sampling(jnp.zeros(1), temperature_is_zero=True),
        )
        drafts = [
            jax.jit(drafter.propose, static_argnums=2)(each.drafter, step, decoder.topology)[0]
            for each in (longer, want)
        ]
        np.testing.assert_array_equal(*(draft.tokens for draft in drafts))


def counted(patched):
    """The numbers of tokens that draft models read from now on."""
    lengths, read = [], WholeModel.read

    def counting(self, state, tokens, hidden, count):
        if count.any():
            lengths.append(int(count.max()))
        return read(self, state, tokens, hidden, count)

    patched.setattr(WholeModel, "read", counting)
    return lengths


def test_generations_go_on(monkeypatch):
    """The state of the drafter that wrote the prefix serves; another drafter's does not."""
    model = tiny_model()
    drafter = st.ModelDrafter(perturbed(model, 0.1))
    tree = st.TreeTopology.from_branching((2, 1))
    options = dict(max_new_tokens=9, topology=tree)
    first = st.generate(model, PROMPTS, drafter=drafter, return_prefix=True, **options)
    texts = [[*p, *t, 4] for p, t in zip(PROMPTS, first.tokens.tolist(), strict=True)]
    want = st.generate(model, texts, max_new_tokens=9).tokens
    after = dict(after=first.prefix, **options)
    with monkeypatch.context() as patched:
        lengths = counted(patched)
        got = st.generate(model, [[4]] * 3, drafter=drafter, **after)
        assert lengths == [1]
    np.testing.assert_array_equal(got.tokens, want)
    assert got.stats.num_accepted > 0
    for other in (st.ModelDrafter(perturbed(model, 0.1, seed=5)), st.NgramDrafter()):
        got = st.generate(model, [[4]] * 3, drafter=other, **after)
        np.testing.assert_array_equal(got.tokens, want)
