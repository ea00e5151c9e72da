"""Trees of thoughts: the search itself, with scripted texts, and through a real scheduler."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import pre_tokenizers

import stree_jax as st
from stree_jax.decoding.prefix.prefix import Prefix
from stree_jax.decoding.types import Context
from stree_jax.extensions import reasoning
from stree_jax.extensions.reasoning import Stage
from stree_jax.testing import perturbed, random_model, tiny_model
from tests.helpers import refusal, word_tokenizer


@dataclasses.dataclass(frozen=True)
class Letters:
    """Thoughts are words; a problem is a dict from prompts to texts."""

    depth: int = 3
    thoughts: int = 2
    keep: int = 2

    def generator(self, problem, state, parts):
        return None if parts else Stage(f"after {state}", 6)

    def evaluator(self, problem, state, thought):
        return Stage(f"value of {thought[0]}", 3)

    def value(self, text):
        found = re.search(r"\d+", text)
        return float(found[0]) if found else None

    def answer(self, problem, state):
        return Stage(f"answer {state}", 6)

    def solved(self, problem, state, answer):
        return answer == problem


NO_COUNTS = st.DecodeStatistics(1.0, 1, 1, 0, 0, np.zeros(0), np.ones(1), np.ones(1))


def letters():
    """A tokenizer whose tokens are characters."""
    tokenizer = word_tokenizer(map(chr, range(128)), "?")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(.|\\n)"), "isolated")
    return tokenizer


TOKENS = letters()


class Script(st.Scheduler):
    """In place of a scheduler: answers the newest request, or the oldest, by its prompt."""

    def __init__(self, text_of, error=None, newest=True):
        super().__init__(tiny_model(), rows=1, max_length=10)
        self.text_of, self.error, self.newest = text_of, error, newest
        self.waiting, self.asked, self.num_read = [], [], 0

    def read(self, prompt):
        self.num_read += 1
        text = jnp.asarray([prompt], jnp.int32)
        return Prefix(Context(text, jnp.asarray([len(prompt)], jnp.int32)), (), None)

    def submit(self, request):
        tokens = request.prompt or request.after.context.tokens[0].tolist()
        prompt = TOKENS.decode(tokens)
        self.asked.append((prompt, request))
        self.waiting.append((len(self.asked) - 1, prompt))
        return len(self.asked) - 1

    def completions(self):
        while self.waiting:
            number, prompt = self.waiting.pop(-self.newest)
            text = self.text_of(prompt, number)
            (stop,) = self.asked[number][1].stop
            yield st.Completion(
                number, [], NO_COUNTS, 0.0, 0.0, self.error, text=text.split(stop)[0]
            )


def searched(script, task, problem="z", **options):
    key = options.pop("key", jax.random.key(0))
    return list(reasoning.breadth_first(script, TOKENS, task, problem, key=key, **options))


def test_the_best_thoughts_are_kept_and_the_best_of_all_is_answered():
    names = iter("abcdefgh")
    values = dict(a="3", b="9", c="1", d="none", e="8", f="5")

    def text_of(prompt, number):
        if prompt.startswith("value of"):
            return f" {values[prompt[-1]]}\nand more"
        return "z\n" if prompt.startswith("answer") else next(names)

    script = Script(text_of)
    thoughts = searched(script, Letters())
    levels = {level: [t for t in thoughts if t.level == level] for level in (1, 2, 3)}
    # The script answers the last request first: thought 1 is named a.
    assert [(t.parts, t.value, t.kept) for t in levels[1]] == [(("b",), 9, True), (("a",), 3, True)]
    assert [t.parent for t in levels[1]] == [None, None]
    assert sorted(t.parent for t in levels[2]) == [0, 0, 1, 1]
    by_name = {t.parts[0]: t for t in levels[2]}
    assert [by_name[name].value for name in "cdef"] == [1, None, 8, 5]
    assert {name for name, t in by_name.items() if t.kept} == {"e", "f"}
    (answer,) = levels[3]
    assert (answer.parent, answer.solved) == (by_name["e"].index, True)
    above = "b" if by_name["e"].parent == 0 else "a"
    assert script.asked[-1][0] == f"answer {((above,), ('e',))}"
    # One reading for the two thoughts of a state.
    assert script.num_read == 3
    drawn = reasoning.render(thoughts)
    assert drawn.splitlines()[0].split() == ["*", "9", "b"]
    assert len(drawn.splitlines()) == 7


def test_ties_and_values_that_cannot_be_read_keep_the_first():
    for text in ("5", "what?"):
        thoughts = searched(Script(lambda prompt, number, text=text: text), Letters(keep=1))
        assert [t.index for t in thoughts if t.kept and t.level < 3] == [0, 0]
    thoughts = searched(Script(lambda *_: "5"), Letters(thoughts=1, keep=1), temperature=0.0)
    assert [t.level for t in thoughts] == [1, 2, 3]


def test_keys_depend_on_the_place_in_the_tree_only():
    def keys(script):
        searched(script, Letters())
        return {bytes(jax.random.key_data(request.key)) for _, request in script.asked}

    first, second = (Script(lambda *_: "5", newest=newest) for newest in (True, False))
    found = keys(first)
    assert found == keys(second)
    assert len(found) == len(first.asked) == 2 * 2 + 2 * 4 + 1


@pytest.mark.parametrize(
    ("task", "options", "match"),
    [
        (Letters(thoughts=0), {}, "thoughts must be an integer"),
        (Letters(keep=3), {}, "keep = 3 states of a level, and the first level has 2 thoughts"),
        (Letters(depth=0), {}, "depth must be"),
        (Letters(), {"temperature": 0.0}, "2 identical thoughts"),
    ],
)
def test_refusals(task, options, match):
    with pytest.raises(ValueError, match=match):
        searched(Script(lambda prompt, number: "5"), task, **options)


def test_other_refusals():
    with pytest.raises(FloatingPointError, match="problem 0, level 1, generator: not finite"):
        searched(Script(lambda *_: "5", error="not finite"), Letters())
    scheduler = st.Scheduler(tiny_model(), rows=1, max_length=10)
    for _ in range(2):
        scheduler.submit(st.Request([1], max_new_tokens=1))
    refusal("2 requests of others", searched, scheduler, Letters())


@pytest.fixture(scope="module")
def model():
    return random_model(st.ModelConfig.tiny(vocab_size=128, num_layers=1, tie_embeddings=False))


@pytest.mark.thorough
def test_every_schedule_gives_the_same_tree_of_thoughts(model):
    """Rows, quanta, drafts, and other problems beside it change nothing."""
    task, problems, key = Letters(thoughts=3), ["z", "y"], jax.random.key(5)

    def tree(thoughts):
        return {
            (t.problem, t.level, t.index): (t.parts, t.value, t.kept, t.parent) for t in thoughts
        }

    alone = {}
    for i, problem in enumerate(problems):
        scheduler = st.Scheduler(model, rows=1, max_length=80)
        found = tree(searched(scheduler, task, problem, key=jax.random.fold_in(key, i)))
        alone |= {(i, *place[1:]): what for place, what in found.items()}
    assert len({parts for parts, *_ in alone.values()}) > 15  # thoughts differ
    drafts = dict(drafter=st.ModelDrafter(perturbed(model, 0.05)))
    topology = st.TreeTopology.from_branching((2, 1))
    scheduler = st.Scheduler(model, rows=3, max_length=80, quantum=2, topology=topology, **drafts)
    thoughts = reasoning.interleaved(scheduler, TOKENS, task, problems, key=key, at_once=2)
    assert tree(thoughts) == alone


def test_a_prompt_that_is_too_long_names_its_place(model):
    scheduler = st.Scheduler(model, rows=1, max_length=7)
    refusal(
        "problem 0, level 1, generator: the text has",
        searched,
        scheduler,
        Letters(),
        "a long problem",
    )
