"""Breadth-first search over thoughts, whose texts are requests to a `Scheduler`.

A generator proposes thoughts below each kept state, an evaluator scores them, and the best ones are
kept (tree of thoughts: Yao et al., 2023, arXiv:2305.10601; the search that "SEED: Accelerating
Reasoning Tree Construction via Scheduled Speculative Decoding" speeds up, algorithm 1 of Wang et
al., 2024, arXiv:2406.18200). SEED drafts for all branches at once and verifies one branch at a
time. Here branches are rows of one batch, which are drafted and verified together. When a row ends,
the next request takes its slot, whatever problem it belongs to.

A prompt that several thoughts share is prefilled once. Each thought is a fork of it, which starts
from a copy of the cache.
"""

import collections
import dataclasses
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from tokenizers import Tokenizer

from stree_jax import Completion, Request, Scheduler
from stree_jax.checks import check_int

GENERATOR, EVALUATOR = "generator", "evaluator"
# A thought is the generator's text, in one or more parts; a state is a path of thoughts.
Parts = tuple[str, ...]
State = tuple[Parts, ...]


class Stage(NamedTuple):
    """One text to be generated.

    Attributes:
        prompt: the prompt of the text.
        max_new_tokens: maximum number of tokens.
        stop: the text ends before this string; None: only at the model's end of sequence.
    """

    prompt: str
    max_new_tokens: int
    stop: str | None = "\n"


@runtime_checkable
class Task(Protocol):
    """Prompts of both roles, and how their texts are read.

    Problems may be of any type.

    Attributes:
        depth: number of levels. The last one holds the answer, a single thought.
        thoughts: number of thoughts proposed below each kept state.
        keep: number of states that are kept of each level.
    """

    depth: int
    thoughts: int
    keep: int

    def generator(self, problem: Any, state: State, parts: Parts) -> Stage | None:
        """Returns a thought's next part below `state`; None: it is complete."""

    def evaluator(self, problem: Any, state: State, thought: Parts) -> Stage:
        """The request for the value of a thought below `state`."""

    def value(self, text: str) -> float | None:
        """Returns the value in the evaluator's text; None counts as 0."""

    def answer(self, problem: Any, state: State) -> Stage:
        """The request for the answer below the best state."""

    def solved(self, problem: Any, state: State, answer: str) -> bool | None:
        """True if the answer is correct; None if no answer is."""


@dataclasses.dataclass(frozen=True)
class Written:
    """A generated text with its role, prompt and completion."""

    role: str  # "generator" or "evaluator"
    prompt: str
    text: str
    completion: Completion


@dataclasses.dataclass(frozen=True)
class Thought:
    """A node of the tree of thoughts.

    Attributes:
        problem: index of the problem.
        level: from 1 to the task's depth; the last level has one thought, the answer.
        index: position within the level.
        parent: index of the parent in the level above; None at level 1.
        parts: the generator's texts.
        value: the evaluator's score; None if its text had none, and for the answer.
        kept: whether the search continued from this thought.
        solved: whether the answer is correct; None for other thoughts, and if the task cannot tell.
        written: all texts of the thought, in order.
    """

    problem: int
    level: int
    index: int
    parent: int | None
    parts: Parts
    value: float | None
    kept: bool
    solved: bool | None
    written: tuple[Written, ...]


def breadth_first(
    scheduler: Scheduler,
    tokenizer: Tokenizer,
    task: Task,
    problem: Any,
    *,
    key: jax.Array,
    temperature: float = 1.0,
) -> Iterator[Thought]:
    """Searches one problem; yields thoughts level by level, the answer last.

    Every text has its own random key, derived from level, thought, role and part. So the tree of
    thoughts depends on `key` alone, not on the scheduler's rows, drafts or order: in float32, near
    ties of logits excepted, and unless the verifier tests drafts by their probabilities.

    Raises:
        ValueError: a task without thoughts, or one that keeps more thoughts than it proposes;
            temperature 0 with several thoughts, which would be identical; a scheduler with other
            requests; or a prompt that is too long for it.
        FloatingPointError: the logits of a text were not finite.
    """
    _check(scheduler, task, temperature)
    return _run(scheduler, tokenizer, task, [problem], [key], 1, temperature)


def interleaved(
    scheduler: Scheduler,
    tokenizer: Tokenizer,
    task: Task,
    problems: Sequence[Any],
    *,
    key: jax.Array,
    at_once: int = 8,
    temperature: float = 1.0,
) -> Iterator[Thought]:
    """Searches many problems through one scheduler, `at_once` at a time.

    Yields thoughts as their levels complete: while a level of one problem waits for its last
    thought, rows work on others. Problem i has the tree that `breadth_first` gives with
    `key=jax.random.fold_in(key, i)`, and errors are its own.
    """
    check_int("at_once", at_once, 1)
    _check(scheduler, task, temperature)
    keys = [jax.random.fold_in(key, i) for i in range(len(problems))]
    return _run(scheduler, tokenizer, task, problems, keys, at_once, temperature)


def render(thoughts: Sequence[Thought], width: int = 100) -> str:
    """Draws the thoughts of one problem, in any order, with a star at kept ones."""
    if len({thought.problem for thought in thoughts}) > 1:
        raise ValueError("thoughts of several problems; render draws the tree of one")
    below: dict[tuple[int, int | None], list[Thought]] = collections.defaultdict(list)
    for thought in sorted(thoughts, key=lambda thought: (thought.level, thought.index)):
        below[thought.level, thought.parent].append(thought)

    def lines(level: int, parent: int | None) -> Iterator[str]:
        for thought in below[level, parent]:
            value = "-" if thought.value is None else f"{thought.value:g}"
            text = " | ".join(" ".join(part.split()) for part in thought.parts)
            line = f"{'  ' * (level - 1)}{'*' if thought.kept else ' '} {value:>3}  {text}"
            yield line if len(line) <= width else line[: width - 1] + "…"
            yield from lines(level + 1, thought.index)

    return "\n".join(lines(1, None))


class _Ask(NamedTuple):
    """A text to be generated, for a thought of the current level."""

    thought: int  # index in the level
    where: str  # what messages say
    key: jax.Array  # depends on its place alone
    stage: Stage


_Texts = Generator[_Ask, tuple[str, Completion], Thought]
_Levels = Generator[tuple[list[_Ask], list[Thought]], tuple[int, str, Completion], None]


def _levels(task: Task, number: int, problem: Any, key: jax.Array) -> _Levels:
    """The search of one problem: gets the text of a thought, and yields what follows from it.

    These are the next requests, and the thoughts of a level that is complete.
    """
    above: list[tuple[int | None, State]] = [(None, ())]
    level_thoughts: list[Thought] = []
    for level in range(1, task.depth + 1):
        times = 1 if level == task.depth else task.thoughts
        places = [place for place in above for _ in range(times)]
        level_key = jax.random.fold_in(key, level)
        growing = [
            _texts(task, problem, jax.random.fold_in(level_key, i), (number, level, i), *place)
            for i, place in enumerate(places)
        ]
        asks = [next(texts) for texts in growing]
        complete: dict[int, Thought] = {}
        while len(complete) < len(growing):
            index, text, completion = yield asks, level_thoughts
            asks, level_thoughts = [], []
            try:
                asks = [growing[index].send((text, completion))]
            except StopIteration as done:
                complete[index] = done.value
        ranked = sorted(complete, key=lambda i: (-(complete[i].value or 0.0), i))
        kept = sorted(ranked[: task.keep])
        level_thoughts = [
            dataclasses.replace(complete[i], kept=i in kept) for i in range(len(complete))
        ]
        if level + 1 == task.depth:
            kept = ranked[:1]
        above = [(i, (*places[i][1], complete[i].parts)) for i in kept]
    yield [], level_thoughts


def _texts(
    task: Task,
    problem: Any,
    key: jax.Array,
    place: tuple[int, int, int],
    parent: int | None,
    state: State,
) -> _Texts:
    """Asks for the texts of a thought, one after the other; `place` is as a `Thought` has it."""
    number, level, index = place
    parts: Parts = ()
    written: list[Written] = []
    value = solved = None

    def text_of(role: str, stage: Stage) -> Generator[_Ask, tuple[str, Completion], str]:
        part = len(parts) if role == GENERATOR else 0
        text_key = jax.random.fold_in(jax.random.fold_in(key, int(role == EVALUATOR)), part)
        where = f"problem {number}, level {level}, {role}"
        text, completion = yield _Ask(index, where, text_key, stage)
        written.append(Written(role, stage.prompt, text, completion))
        return text

    if level == task.depth:
        parts = ((yield from text_of(GENERATOR, task.answer(problem, state))),)
        solved = task.solved(problem, state, parts[0])
    else:
        while (stage := task.generator(problem, state, parts)) is not None:
            parts += ((yield from text_of(GENERATOR, stage)),)
        stage = task.evaluator(problem, state, parts)
        value = task.value((yield from text_of(EVALUATOR, stage)))
    return Thought(*place, parent, parts, value, False, solved, tuple(written))


def _check(scheduler: Scheduler, task: Task, temperature: float) -> None:
    """Checks the arguments of a search before anything is generated."""
    for name in ("depth", "thoughts", "keep"):
        check_int(name, getattr(task, name), 1)
    if task.keep > task.thoughts:
        raise ValueError(
            f"keep = {task.keep} states of a level, and the first level has"
            f" {task.thoughts} thoughts; keep at most as many"
        )
    if temperature == 0 and task.thoughts > 1 and task.depth > 1:
        raise ValueError(
            f"temperature 0 gives {task.thoughts} identical thoughts; use a temperature above 0, or"
            " a task with thoughts = 1"
        )
    if scheduler.num_waiting or scheduler.num_running:
        raise ValueError(
            f"the scheduler has {scheduler.num_waiting + scheduler.num_running} requests of others;"
            " finish them, or make a scheduler for the search"
        )


def _run(
    scheduler: Scheduler,
    tokenizer: Tokenizer,
    task: Task,
    problems: Sequence[Any],
    keys: Sequence[jax.Array],
    at_once: int,
    temperature: float,
) -> Iterator[Thought]:
    pairs = enumerate(zip(problems, keys, strict=True))
    waiting = collections.deque(_levels(task, number, *pair) for number, pair in pairs)
    in_flight: dict[int, tuple[_Levels, _Ask]] = {}

    def submit(search: _Levels, asks: list[_Ask]) -> None:
        times = collections.Counter(ask.stage.prompt for ask in asks)
        prefixes: dict[str, Any] = {}
        for ask in asks:
            prompt = tokenizer.encode(ask.stage.prompt).ids
            try:
                if times[ask.stage.prompt] > 1 and ask.stage.prompt not in prefixes:
                    prefixes[ask.stage.prompt] = scheduler.read(prompt)
                prefix = prefixes.get(ask.stage.prompt)
                request = Request(
                    prompt if prefix is None else [],
                    after=prefix,
                    max_new_tokens=ask.stage.max_new_tokens,
                    temperature=temperature,
                    stop=[] if ask.stage.stop is None else [ask.stage.stop],
                    tokenizer=tokenizer,
                    key=ask.key,
                )
                number = scheduler.submit(request)
            except ValueError as error:
                raise ValueError(f"{ask.where}: {error}") from error
            in_flight[number] = search, ask

    def begin() -> None:
        search = waiting.popleft()
        submit(search, next(search)[0])

    for _ in range(min(at_once, len(waiting))):
        begin()
    for completion in scheduler.completions():
        if completion.request_id not in in_flight:
            raise ValueError(
                f"request {completion.request_id} was submitted by others during the search; make a"
                " scheduler for the search"
            )
        search, ask = in_flight.pop(completion.request_id)
        if completion.error is not None:
            raise FloatingPointError(f"{ask.where}: {completion.error}")
        assert completion.text is not None  # there is a tokenizer
        asks, level = search.send((ask.thought, completion.text.strip(), completion))
        submit(search, asks)
        if level and level[0].level == task.depth and waiting:
            begin()
        yield from level
