"""Logits processors; that trees change no text is in the table of test_lossless.py."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.processors import Processing, first_states
from stree_jax.decoding.rules import of_batch
from stree_jax.decoding.verifiers.reject import try_children
from stree_jax.decoding.verifiers.traverse import traverse
from stree_jax.testing import tiny_model
from tests.decoding import enumeration as en
from tests.decoding.rules import SIZE, WALK, Walk, autoregressive, random_walk, rules_of
from tests.decoding.texts import NEW_TOKENS, ROWS, decoded, planned
from tests.decoding.texts import autoregressive as without_rules
from tests.helpers import refusal, rows, some
from tests.methods import PROMPTS, Topology, drafts


def test_rows_without_rules_are_left_alone():
    """Beside rows with rules, which change the texts."""
    free = np.array([i for i in range(len(ROWS)) if not rules_of(i)["processors"]])
    ends = [dict(eos_token=rules_of(i)["eos_token"]) for i in free]
    plain = decoded(tiny_model(), planned(tiny_model(), [ROWS[i] for i in free], ends))
    np.testing.assert_array_equal(autoregressive().tokens[free], plain.tokens)
    others = np.delete(np.arange(len(ROWS)), free)
    same = (autoregressive().tokens == without_rules().tokens).all(axis=1)
    assert same[others].mean() < 0.1


@pytest.mark.thorough
def test_requests_of_a_scheduler_have_rules_of_their_own():
    """Rules begin with the text of their request, whatever its row decoded before."""
    scheduler = st.Scheduler(
        tiny_model(), rows=3, max_length=64, quantum=5, **drafts(tiny_model(), "ragged")
    )
    chosen = [39, 12, 13, 24, 25, 14, 37, 50]  # the first has no processors
    for i in chosen:
        own = dataclasses.asdict(ROWS[i]) | rules_of(i)
        scheduler.submit(st.Request(max_new_tokens=NEW_TOKENS, **own))
    other = st.Request([1], max_new_tokens=2, processors=[st.PresencePenalty(1.0)])
    copied = st.Automaton(np.asarray(WALK.table))
    rules = [*rules_of(12)["processors"][:-1], copied]
    for refused in (other, dataclasses.replace(other, processors=rules)):
        refusal(r"wait or run have .* shared arrays \(the same objec", scheduler.submit, refused)
    want = autoregressive().tokens
    for done in scheduler.completions():
        text = want[chosen[done.request_id]]
        assert done.tokens == text[text >= 0].tolist()
    scheduler.submit(other)


class Ruled(en.Models):
    """A target whose tokens are those of a walk, by whole prefixes."""

    def __init__(self, seed, walk):
        super().__init__(seed)
        self.free, table = self.target.copy(), np.asarray(walk.table)
        for prefix in itertools.product(range(en.VOCAB + 1), repeat=2):
            state = walk.start
            for token in prefix[: prefix.index(en.VOCAB) if en.VOCAB in prefix else 2]:
                state = table[state, token] if state >= 0 else -1
            allowed = (table[state] >= 0) & (state >= 0)
            if allowed.any():  # otherwise the row has ended
                probs = np.where(allowed, self.target[prefix], 0)
                self.target[prefix] = probs / probs.sum()

    def processed(self, grammar, topology, tokens, *, by_path=True):
        """The free target's log-probabilities at all nodes, through the processor."""
        table = np.stack(
            [[self.at(self.free, en.prefix_of(topology, row, n)) for n in range(topology.num_nodes)]
             for row in tokens]
        )  # fmt: skip
        batch = len(tokens)
        grammar = of_batch([grammar] * batch)
        context = st.Context(jnp.zeros((batch, 1), jnp.int32), jnp.ones(batch, jnp.int32))
        rule = Processing((grammar,), first_states((grammar,), context, en.VOCAB))
        tree = topology.tree(jnp.asarray(tokens >= 0).at[:, 0].set(True))
        states = rule.of_tree(jnp.asarray(tokens), tree, topology)
        if not by_path:
            states = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:, :1], leaf.shape), states)
        logits, _ = rule.applied(jnp.log(jnp.asarray(table, jnp.float32)), states)
        return np.asarray(jax.nn.log_softmax(logits))


_FREE = random_walk(states=3, size=en.VOCAB, share=0.5, seed=3).table
FEW = Walk(jnp.concatenate([_FREE.at[0, 1].set(3), -jnp.ones((1, en.VOCAB), jnp.int32)]))


@pytest.mark.parametrize("grammar", [FEW, st.Automaton(np.asarray(FEW.table))], ids=["", "tables"])
@pytest.mark.parametrize(
    "rule", some([try_children, traverse], traverse), ids=["reject", "traverse"]
)
@pytest.mark.parametrize("children", some(["iid", "without_replacement"], "iid"))
def test_rules_that_test_drafts_are_exact_under_a_grammar(children, rule, grammar):
    """By enumeration. After token 1 the walk ends, and drafts continue below it."""
    models, topology = Ruled(4, FEW), Topology.from_parents([-1, 0, 0, 1])
    tokens, weights = en.draft_outcomes(models, topology, children)
    options = dict(replace=children == "iid", rule=rule)
    want = en.target_joint(models)
    log_p = models.processed(grammar, topology, tokens)
    joint, accepted = en.enumerated(models, topology, tokens, weights, log_p=log_p, **options)
    assert en.total_variation(joint, want) < en.EXACT
    assert accepted > 0
    assert en.total_variation(want, en.target_joint(en.Models(4))) > 0.1
    log_p = models.processed(grammar, topology, tokens, by_path=False)
    joint, _ = en.enumerated(models, topology, tokens, weights, log_p=log_p, **options)
    assert en.total_variation(joint, want) > 0.01


@pytest.mark.parametrize(
    "make", [st.ModelDrafter, pytest.param(st.BeamDrafter, marks=pytest.mark.slow)]
)
def test_drafts_are_masked(make):
    """With the target as its own draft every first child is right, whatever the rules are."""
    target = tiny_model()
    out = st.generate(
        target,
        PROMPTS,
        max_new_tokens=24,
        drafter=make(target),
        topology=Topology.from_branching((2, 1, 1)),
        processors=[random_walk(share=0.08), st.RepetitionPenalty(1.4)],
    )
    assert out.stats.tau == 4.0


@pytest.mark.thorough
def test_rows_whose_tokens_are_all_ruled_out_end_alone():
    """The walk ends after two tokens, of the second row after its first; drafts continue below."""
    table = -jnp.ones((3, SIZE), jnp.int32)
    table = table.at[0, 4:30].set(1).at[1, 4:30].set(2)
    walk = Walk(table)
    rules = rows(processors=[[walk], [dataclasses.replace(walk, start=1)], [walk]])
    options = dict(drafter=st.ModelDrafter(tiny_model()), topology=Topology.chain(3))
    with pytest.raises(st.NonFiniteLogitsError, match="leave no token in row 0") as got:
        st.generate(tiny_model(), PROMPTS, options=rules, **options)
    assert got.value.rows == [0, 1, 2]
    assert got.value.generation.lengths.tolist() == [2, 1, 2]
    with pytest.raises(st.NonFiniteLogitsError) as want:
        st.generate(tiny_model(), PROMPTS, options=rules)
    np.testing.assert_array_equal(got.value.generation.tokens, want.value.generation.tokens)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unchecked(st.MinP):
    """Above 1 it rules all tokens out, as no filter should."""

    def __post_init__(self):
        pass


def test_rows_whose_filters_leave_nothing_end_alone():
    same = dict(temperature=1.0, max_new_tokens=3, key=0)
    options = [st.Options(filters=[Unchecked(p)], **same) for p in (0.5, 2)]
    with pytest.raises(st.NonFiniteLogitsError, match="filters, leave no token in row 1") as got:
        st.generate(tiny_model(), PROMPTS[:2], options=options)
    assert got.value.generation.lengths.tolist() == [3, 0]


@pytest.mark.thorough
def test_end_tokens_of_any_processor_end_its_rows():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Ending(Walk):
        end_tokens: tuple[int, ...] = dataclasses.field(default=(7,), metadata={"static": True})

    only_the_end = Ending(jnp.full((1, SIZE), -1, jnp.int32).at[0, 7].set(0))
    options = dict(processors=[only_the_end], max_new_tokens=5)
    out = st.generate(tiny_model(), PROMPTS, **options)
    assert out.tokens.tolist() == [[7, *[st.PAD] * 4]] * len(PROMPTS)
    refusal(
        "does not end the texts of a logits processor",
        st.generate,
        tiny_model(),
        PROMPTS,
        eos_token=8,
        **options,
    )
