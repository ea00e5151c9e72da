"""User-defined verifiers and drafters, and the independence of rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.decoding.options import plan
from stree_jax.testing import perturbed, random_model, tiny_model
from tests.helpers import with_weight

PROMPTS = [[5, 9, 2, 30], [3], [1, 2, 3, 4, 1, 2, 3, 4]]
TREE = st.TreeTopology.from_branching((2, 2))
KEY = jax.random.key(3)


def drafter(**options):
    return st.ModelDrafter(perturbed(tiny_model(), 0.3), **options)


@dataclasses.dataclass(frozen=True)
class Delegating:
    """Wraps a built-in, as a user would to log or to change something."""

    inner: st.Verifier
    name: str = "delegating"

    def check(self, drawn, topology, *, temperature_is_zero):
        self.inner.check(drawn, topology, temperature_is_zero=temperature_is_zero)

    def verify(self, draft, logits, step, topology):
        return self.inner.verify(draft, logits, step, topology)


@dataclasses.dataclass(frozen=True)
class AtMostOne(Delegating):
    """Accepts at most one draft: shorter paths of an exact verifier are not exact in general, but
    cut at its first node they are when the target is followed greedily."""

    name: str = "at_most_one"

    def verify(self, draft, logits, step, topology):
        verdict = super().verify(draft, logits, step, topology)
        on_path = draft.tree.ancestor_mask[jnp.arange(len(verdict.last)), verdict.last]
        first = jnp.argmax(on_path & (draft.tree.depth == 1), axis=1).astype(jnp.int32)
        last = jnp.where(verdict.num_accepted > 0, first, 0)
        best = jnp.take_along_axis(logits, last[:, None, None], axis=1)[:, 0].argmax(-1)
        return st.Verdict(last, jnp.minimum(verdict.num_accepted, 1), best.astype(jnp.int32))


def assert_same(got, want):
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.stats.accepted_per_depth, want.stats.accepted_per_depth)


@pytest.mark.parametrize("name", ["greedy", "target_only"])
def test_a_wrapped_verifier_is_the_verifier_at_temperature_0(name):
    common = dict(max_new_tokens=9, drafter=drafter(), topology=TREE)
    want = st.generate(tiny_model(), PROMPTS, **common)
    assert_same(st.generate(tiny_model(), PROMPTS, verifier=name, **common), want)
    wrapped = Delegating(st.VERIFIERS[name])
    assert_same(st.generate(tiny_model(), PROMPTS, verifier=wrapped, **common), want)
    assert want.stats.num_accepted > 0


@pytest.mark.parametrize(
    "name", [pytest.param("target_only", marks=pytest.mark.slow), "without_replacement"]
)
def test_a_wrapped_verifier_is_the_verifier_above_temperature_0(name):
    children = "shared" if name == "target_only" else name
    common = dict(max_new_tokens=9, topology=TREE, temperature=0.9, key=KEY)
    common["drafter"] = drafter(child_sampling=children)
    want = st.generate(tiny_model(), PROMPTS, verifier=name, **common)
    wrapped = Delegating(st.VERIFIERS[name])
    assert_same(st.generate(tiny_model(), PROMPTS, verifier=wrapped, **common), want)
    plain = st.generate(tiny_model(), PROMPTS, max_new_tokens=9, temperature=0.9, key=KEY)
    alone = st.generate(
        tiny_model(), PROMPTS, max_new_tokens=9, temperature=0.9, key=KEY, verifier=Delegating(
            st.VERIFIERS["target_only"]
        )
    )  # fmt: skip
    np.testing.assert_array_equal(alone.tokens, plain.tokens)


def test_a_verifier_of_ones_own_changes_the_steps_and_not_the_text():
    common = dict(max_new_tokens=9, drafter=drafter(), topology=TREE)
    want = st.generate(tiny_model(), PROMPTS, **common)
    out = st.generate(tiny_model(), PROMPTS, verifier=AtMostOne(st.VERIFIERS["greedy"]), **common)
    np.testing.assert_array_equal(out.tokens, want.tokens)
    assert 0 < out.stats.tau <= 2
    assert out.stats.accepted_per_depth[0] > 0 == out.stats.accepted_per_depth[1]
    assert want.stats.accepted_per_depth[1] > 0


def test_a_registered_verifier_has_a_name(monkeypatch):
    monkeypatch.setitem(st.VERIFIERS, "mine", Delegating(st.VERIFIERS["greedy"], "mine"))
    common = dict(max_new_tokens=5, drafter=drafter(), topology=TREE)
    want = st.generate(tiny_model(), PROMPTS, **common)
    assert_same(st.generate(tiny_model(), PROMPTS, verifier="mine", **common), want)


class Recording(nnx.Module):
    """Repeats the last token; keeps what `commit` gets."""

    def default_topology(self):
        return st.TreeTopology.chain(2)

    def init(self, batch, topology, max_length):
        return {
            "hidden": jnp.zeros((batch, topology.num_nodes, 16)),
            "last": jnp.zeros(batch, jnp.int32),
        }

    def read(self, state, tokens, hidden, lengths):
        return state

    def propose(self, state, step, topology):
        root = st.root_only(step.context).tokens
        tokens = jnp.broadcast_to(root, (len(root), topology.num_nodes))
        tree = topology.tree(jnp.ones_like(tokens, bool))
        none = jnp.full(topology.num_nodes, -1, jnp.int32)
        return st.DraftTree(tokens, tree, None, none, jnp.ones(len(root), bool)), state

    def commit(self, state, draft, verdict, hidden, topology):
        return {"hidden": hidden, "last": verdict.last}


@pytest.mark.parametrize("limit", [1, 2, 30])
def test_commit_gets_the_hidden_states_of_all_nodes_and_the_accepted_one_after_any_cut(limit):
    """The logits of the accepted node's state are those that gave the last emitted token."""
    # A model that repeats tokens, so that drafts are accepted and the limit cuts paths.
    model = random_model(st.ModelConfig.tiny(d_model=16), seed=3)
    model = with_weight(model, "embedding", lambda rows: 40 * rows)
    request = plan(model, PROMPTS, drafter=Recording(), max_new_tokens=limit)
    state = request.decoder.start(model, Recording(), request.context, request.keys)
    accepted = set()
    prefill = jax.jit(st.HybridLM.prefill)
    for _ in range(6):
        done = np.asarray(state.done)
        state, _, verdict = request.decoder.step(
            model, Recording(), state, request.limits, request.sampling
        )
        for row in np.flatnonzero(~done):
            length = int(state.context.length[row])
            text = np.asarray(state.context.tokens)[row, : length - 1]  # all but the last emitted
            lengths = jnp.array([length - 1], jnp.int32)
            padded = np.pad(text, (0, 48 - len(text)))[None]  # one program for all lengths
            want, _ = prefill(model, jnp.asarray(padded), lengths)
            last = state.drafter["last"][row]
            got = model.logits(state.drafter["hidden"][row, last][None, None])
            np.testing.assert_allclose(got[0, 0], want[0], atol=2e-3, rtol=1e-4)
            accepted.add(int(verdict.num_accepted[row]))
        if np.asarray(state.done).all():
            break
    assert max(accepted) == min(limit - 1, 2)


def broken_at(token):
    """A model that gives NaN once a row has read this token."""
    model = random_model(tiny_model("groups").config, seed=4)
    return with_weight(model, "embedding", lambda rows: rows.at[token].set(np.nan))


@pytest.mark.parametrize("drafting", [False, True])
def test_a_row_that_fails_ends_alone(drafting):
    prompts = [[1, 2], [3, 35], [4]]
    options = dict(max_new_tokens=7)
    model = broken_at(35)
    if drafting:
        options |= dict(drafter=st.NgramDrafter())
    fine = st.generate(model, [prompts[0], prompts[2]], **options)
    with pytest.raises(st.NonFiniteLogitsError, match="in row 1, after 0 new tokens") as caught:
        st.generate(model, prompts, **options)
    error = caught.value
    assert error.rows == [1]
    np.testing.assert_array_equal(error.generation.tokens[[0, 2]], fine.tokens)
    assert (error.generation.tokens[1] == st.PAD).all()
    # A stream yields the other rows to their end, then raises.
    pieces = []
    with pytest.raises(st.NonFiniteLogitsError, match="row 1"):
        pieces.extend(st.stream(model, prompts, **options))
    for row, want in ((0, fine.tokens[0]), (2, fine.tokens[1])):
        assert [token for piece in pieces for token in piece[row]] == want.tolist()
    assert not any(piece[1] for piece in pieces)


def test_limits_and_sampling_are_the_rows_own():
    """Rows with different limits decode as each would alone."""
    model = tiny_model()
    request = plan(model, PROMPTS, max_new_tokens=9, drafter=drafter(), topology=TREE)
    limits = request.limits._replace(max_new_tokens=jnp.array([2, 9, 5]))
    free = st.generate(model, PROMPTS, max_new_tokens=9)
    eos = np.full(request.limits.eos_tokens.shape, -1, np.int32)
    eos[1, 0] = free.tokens[1, 3]
    limits = limits._replace(eos_tokens=jnp.asarray(eos))
    state = request.decoder.start(model, request.drafter, request.context, request.keys)
    state = request.decoder.run(model, request.drafter, state, limits, request.sampling)
    at = int(np.flatnonzero(free.tokens[1] == eos[1, 0])[0]) + 1
    assert state.emitted.tolist() == [2, at, 5]
    for row, prompt in enumerate(PROMPTS):
        emitted = int(state.emitted[row])
        got = np.asarray(state.context.tokens)[row, len(prompt) : len(prompt) + emitted]
        np.testing.assert_array_equal(got, free.tokens[row, :emitted])


def test_the_end_of_sequence_is_the_configs_unless_told_otherwise():
    free = st.generate(tiny_model(), PROMPTS, max_new_tokens=9)
    eos = int(free.tokens[0, 4])
    model = tiny_model()
    graph, weights = nnx.split(model)
    model = nnx.merge(graph, weights)
    model.config = dataclasses.replace(model.config, eos_token=eos)
    first = free.tokens[0].tolist().index(eos) + 1
    assert st.generate(model, PROMPTS, max_new_tokens=9).lengths[0] == first
    assert st.generate(model, PROMPTS, max_new_tokens=9, eos_token=()).lengths[0] == 9
    pieces = list(st.stream(model, PROMPTS, max_new_tokens=9))
    assert sum(len(piece[0]) for piece in pieces) == first


class Sharing(Recording):
    """Its state is arrays that are not its own, and one array twice."""

    def __init__(self, table):
        self.table = nnx.Param(table)

    def init(self, batch, topology, max_length):
        zeros = jnp.zeros(batch)
        return (zeros, zeros, self.table[...], 0)

    def commit(self, state, draft, verdict, hidden, topology):
        return state


def test_a_drafters_first_state_may_share_arrays():
    """The loop donates it, and yet model, drafter and request serve again."""
    drafter = Sharing(jnp.arange(9.0))
    want = st.generate(tiny_model(), PROMPTS, max_new_tokens=5)
    for _ in range(2):
        out = st.generate(tiny_model(), PROMPTS, max_new_tokens=5, drafter=drafter)
        np.testing.assert_array_equal(out.tokens, want.tokens)
    np.testing.assert_array_equal(drafter.table[...], np.arange(9.0))
