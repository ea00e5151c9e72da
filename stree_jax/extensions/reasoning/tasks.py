"""The tasks of the SEED paper (arXiv:2406.18200, section 5.1, appendix C), with our own prompts."""

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stree_jax.extensions.reasoning.blocks import World
from stree_jax.extensions.reasoning.search import Parts, Stage, State
from stree_jax.messages import shown, shown_path


class Question(NamedTuple):
    """A problem of GSM8K."""

    text: str
    answer: str  # a number


@dataclasses.dataclass(frozen=True)
class Gsm8k:
    """Grade-school maths as sub-questions and answers (Cobbe et al., 2021, arXiv:2110.14168).

    Attributes:
        depth, thoughts, keep: see `Task`; three steps and the answer.
        most: maximum number of tokens of a sub-question and of an answer.
    """

    depth: int = 4
    thoughts: int = 3
    keep: int = 1
    most: int = 48

    @staticmethod
    def problems(path: str | os.PathLike[str]) -> list[Question]:
        """The problems of a `test.jsonl` with "question" and "answer".

        Raises:
            ValueError: no such file, or other contents.
        """
        return [
            Question(row["question"], row["answer"].rpartition("####")[2].strip().replace(",", ""))
            for row in _rows(path, "question", "answer")
        ]

    def generator(self, problem: Question, state: State, parts: Parts) -> Stage | None:
        text = self._so_far(problem, state) + f"Step {len(state) + 1}: what should be asked next?"
        if not parts:
            return Stage(text, self.most)
        return Stage(f"{text} {parts[0]}\nAnswer:", self.most) if len(parts) == 1 else None

    def evaluator(self, problem: Question, state: State, thought: Parts) -> Stage:
        text = self._so_far(problem, (*state, thought))
        return Stage(
            f"{text}How much does step {len(state) + 1} help to answer the question? From 1, not at"
            " all, to 10, very much, as one number:",
            8,
        )

    def value(self, text: str) -> float | None:
        return _from_1_to_10(text)

    def answer(self, problem: Question, state: State) -> Stage:
        return Stage(self._so_far(problem, state) + "So the answer to the question is", self.most)

    def solved(self, problem: Question, state: State, answer: str) -> bool | None:
        """Whether the last number of the answer is the correct one."""
        numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", answer)
        return bool(numbers) and float(numbers[-1].replace(",", "")) == float(problem.answer)

    def _so_far(self, problem: Question, state: State) -> str:
        steps = [
            f"Step {i}: what should be asked next? {question}\nAnswer: {answer}\n"
            for i, (question, answer) in enumerate(state, 1)
        ]
        return f"Question: {problem.text}\n" + "".join(steps)


@dataclasses.dataclass(frozen=True)
class CreativeWriting:
    """Four paragraphs with given last sentences: a plan, then the passage.

    Creative Writing of tree of thoughts (Yao et al., 2023, arXiv:2305.10601).

    Attributes:
        depth, thoughts, keep: see `Task`; one step and the answer.
        plan, passage: maximum number of tokens of each.
    """

    depth: int = 2
    thoughts: int = 3
    keep: int = 1
    plan: int = 48
    passage: int = 160

    @staticmethod
    def problems(path: str | os.PathLike[str]) -> list[str]:
        """The problems of a text file: one on each line, of four sentences.

        Raises:
            ValueError: no such file, or an empty one.
        """
        lines = [line.strip() for line in _text(path).splitlines()]
        found = [line for line in lines if line]
        if not found:
            raise ValueError(f"{shown_path(path)} has no problems: it is empty")
        return found

    def generator(self, problem: str, state: State, parts: Parts) -> Stage | None:
        if not parts:
            return Stage(self._asked(problem) + "Plan:", self.plan)
        text = self._asked(problem) + f"Plan: {parts[0]}\nPassage:"
        return Stage(text, self.passage, stop=None) if len(parts) == 1 else None

    def evaluator(self, problem: str, state: State, thought: Parts) -> Stage:
        return Stage(
            f"Read this passage:\n{thought[1]}\n\nHow coherent is it? From 1, not at all, to 10,"
            " very much. The coherency score is",
            8,
        )

    def value(self, text: str) -> float | None:
        return _from_1_to_10(text)

    def answer(self, problem: str, state: State) -> Stage:
        plan, passage = state[-1]
        text = self._asked(problem) + f"Plan: {plan}\nA first version: {passage}\nPassage:"
        return Stage(text, self.passage, stop=None)

    def solved(self, problem: str, state: State, answer: str) -> bool | None:
        """None: a passage is not right or wrong."""
        return None

    def _asked(self, problem: str) -> str:
        return (
            "Write a coherent passage of four short paragraphs, after a plan of one line. The"
            f" paragraphs end with these sentences, one each: {problem}\n"
        )


class Arrangement(NamedTuple):
    """A problem of Blocksworld, in English."""

    init: str
    goal: str
    plan: tuple[str, ...]  # reaches the goal


_RULES = """\
I move blocks with one hand. There are four actions: pick up a block, unstack a block from on top of
another one, put down a block, stack a block on top of another one.
My hand holds one block at most. I can pick up only a block that is clear and on the table, and
unstack only one that is clear and on top of the named block. A block is clear if it is not in my
hand and nothing is on top of it. I can put down, or stack, only the block that I hold, and stack it
only on top of a clear block. Then my hand is empty.
"""


@dataclasses.dataclass(frozen=True)
class Blocksworld:
    """Plans of six actions (PlanBench: Valmeekam et al., 2023, arXiv:2206.10498), one per level.

    Attributes:
        demonstrations: worked problems in the prompts of both roles.
        depth, thoughts, keep: see `Task`; six actions, and the rest of the plan.
        most: maximum number of tokens of an action.
    """

    demonstrations: Sequence[Arrangement] = ()
    depth: int = 7
    thoughts: int = 3
    keep: int = 1
    most: int = 24

    def __post_init__(self) -> None:
        for demo in self.demonstrations:
            if not World.read(demo.init).reaches(demo.goal, demo.plan):
                raise ValueError(f"the plan of a demonstration does not reach its goal: {demo}")

    @staticmethod
    def problems(path: str | os.PathLike[str]) -> list[Arrangement]:
        """The problems of a split with "init_text", "goal_text" and "plan_text", or of a pool.

        Raises:
            ValueError: no such file, or other contents.
        """
        if Path(path).suffix == ".json":
            pool = _json(path, _text(path))
            rows = pool.get("example_pool") if isinstance(pool, dict) else None
            if not isinstance(rows, list) or not rows:
                raise ValueError(f"{shown_path(path)} has no list 'example_pool'")
            names = ("init", "goal", "plan")
        else:
            names = ("init_text", "goal_text", "plan_text")
            rows = _rows(path, *names)
        found = []
        for row in rows:
            init, goal, plan = (row[name] for name in names)
            lines = plan.splitlines() if isinstance(plan, str) else plan
            actions = [line.strip() for line in lines if line.strip()]
            found.append(Arrangement(init, goal, tuple(a for a in actions if a[0] != "[")))
        return found

    def generator(self, problem: Arrangement, state: State, parts: Parts) -> Stage | None:
        if parts:
            return None
        shown_plans = "".join(
            _statement(demo) + "Plan:\n" + "".join(f"{action}\n" for action in demo.plan) + "\n"
            for demo in self.demonstrations
        )
        return Stage(_RULES + "\n" + shown_plans + self._so_far(problem, state), self.most)

    def evaluator(self, problem: Arrangement, state: State, thought: Parts) -> Stage:
        judged = "".join(
            _statement(demo) + f"Action: {action}\nGood or bad? {verdict}\n\n"
            for demo in self.demonstrations
            for action, verdict in (
                (demo.plan[0], "good"),
                (_impossible(demo), "bad"),
            )
        )
        text = _RULES + "\n" + judged + self._so_far(problem, state)
        return Stage(f"{text}Action: {thought[0]}\nGood or bad?", 6)

    def value(self, text: str) -> float | None:
        found = re.search(r"\b(good|bad)\b", text.lower())
        return None if found is None else float(found[1] == "good")

    def answer(self, problem: Arrangement, state: State) -> Stage:
        stage = self.generator(problem, state, ())
        assert stage is not None
        return stage

    def solved(self, problem: Arrangement, state: State, answer: str) -> bool | None:
        """Whether the simulated plan reaches the goal."""
        plan = [action for (action,) in state] + [answer]
        return World.read(problem.init).reaches(problem.goal, plan)

    def _so_far(self, problem: Arrangement, state: State) -> str:
        return _statement(problem) + "Plan:\n" + "".join(f"{action}\n" for (action,) in state)


TASKS: dict[str, type[Any]] = {
    "gsm8k": Gsm8k,
    "creative writing": CreativeWriting,
    "blocksworld": Blocksworld,
}


def _statement(problem: Arrangement) -> str:
    return f"At first {problem.init}.\nThe goal: {problem.goal}.\n"


def _impossible(problem: Arrangement) -> str:
    """An action of the plan that is impossible in the initial state."""
    world = World.read(problem.init)
    return next(action for action in problem.plan if world.after(action) is None)


def _from_1_to_10(text: str) -> float | None:
    """The first number, if it is from 1 to 10."""
    found = re.search(r"\d+", text)
    return float(found[0]) if found and 1 <= int(found[0]) <= 10 else None


def _text(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"the task's data cannot be read: {shown_path(path)}:"
            f" {getattr(error, 'strerror', None) or error}"
        ) from None


def _json(path: str | os.PathLike[str], text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{shown_path(path)} is not JSON: {error}") from None


def _rows(path: str | os.PathLike[str], *names: str) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, each with these keys."""
    found = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        row = _json(path, line)
        missing = [n for n in names if not (isinstance(row, dict) and n in row)]
        if missing:
            raise ValueError(f"{shown_path(path)}, line {number}, has no {shown(missing[0])}")
        found.append(row)
    if not found:
        raise ValueError(f"{shown_path(path)} has no problems: it is empty")
    return found
