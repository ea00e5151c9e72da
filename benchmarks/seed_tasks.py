"""The tasks of the SEED paper (arXiv:2406.18200, section 5.1, appendix C), with our own prompts."""

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stree_jax.extensions.reasoning import Stage

Parts = tuple[str, ...]  # a thought
State = tuple[Parts, ...]


class Question(NamedTuple):
    """A problem of GSM8K."""

    text: str
    answer: str  # a number


@dataclasses.dataclass(frozen=True)
class Gsm8k:
    """Grade-school maths as sub-questions and answers (Cobbe et al., 2021, arXiv:2110.14168)."""

    depth: int = 4  # three steps and the answer
    thoughts: int = 3
    keep: int = 1
    most: int = 48  # tokens of a sub-question, and of an answer

    @staticmethod
    def problems(path: Path) -> list[Question]:
        """Reads GSM8K's test.jsonl."""
        return [
            Question(row["question"], row["answer"].rpartition("####")[2].strip().replace(",", ""))
            for row in _rows(path)
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
        """True if the last number of the answer is the correct one."""
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
    """

    depth: int = 2  # one step and the answer
    thoughts: int = 3
    keep: int = 1
    plan: int = 48  # tokens
    passage: int = 160

    @staticmethod
    def problems(path: Path) -> list[str]:
        """Reads a text file: a problem on each line, of four sentences."""
        return [line.strip() for line in path.read_text().splitlines() if line.strip()]

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


class World(NamedTuple):
    """A state of the blocks: what each stands on (None: the table), and which is in the hand.

    The domain with four actions of PlanBench (Valmeekam et al., 2023, arXiv:2206.10498).
    """

    below: dict[str, str | None]
    held: str | None = None

    @classmethod
    def read(cls, text: str) -> "World":
        """Parses sentences such as "the red block is on top of the blue block"; ignores others."""
        held = re.findall(r"holding the (\w+) block", text)
        places: list[tuple[str, str | None]] = [*_ON.findall(text)]
        places += [(block, None) for block in re.findall(r"the (\w+) block is on the table", text)]
        return cls(dict(places), held[0] if held else None)

    def after(self, action: str) -> "World | None":
        """The world after an action in English; None if the action is unknown or impossible."""
        text = action.strip().rstrip(".").lower()
        for kind, sentence in enumerate(_ACTIONS):
            if match := re.fullmatch(sentence, text):
                return self._after(kind, *match.groups())
        return None

    def _after(self, kind: int, block: str, under: str | None = None) -> "World | None":
        if kind in (0, 3):  # pick up, unstack
            if self.held or not self._is_clear(block) or self.below[block] != under:
                return None
            return World({b: u for b, u in self.below.items() if b != block}, block)
        if self.held != block or (under is not None and not self._is_clear(under)):
            return None
        return World(self.below | {block: under})

    def _is_clear(self, block: str) -> bool:
        return block in self.below and block not in self.below.values()

    def reaches(self, goal: str, plan: Iterable[str]) -> bool:
        """True if the plan reaches the goal without an impossible action."""
        wanted, world = _ON.findall(goal), self
        for action in plan:
            following = world.after(action)
            if following is None or world._has(wanted):
                break
            world = following
        return world._has(wanted)

    def _has(self, wanted: list[tuple[str, str]]) -> bool:
        return bool(wanted) and all(self.below.get(block) == under for block, under in wanted)


_ON = re.compile(r"the (\w+) block is on top of the (\w+) block")
_ACTIONS = (
    r"pick up the (\w+) block",
    r"put down the (\w+) block",
    r"stack the (\w+) block on top of the (\w+) block",
    r"unstack the (\w+) block from on top of the (\w+) block",
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
    """Plans of six actions, one for each level, after worked problems in the prompts."""

    demonstrations: Sequence[Arrangement] = ()
    depth: int = 7  # six actions, and the rest of the plan
    thoughts: int = 3
    keep: int = 1
    most: int = 24  # tokens of an action

    @staticmethod
    def problems(path: Path) -> list[Arrangement]:
        """Reads PlanBench's problems of a split, or of a pool of demonstrations."""
        if path.suffix == ".json":
            names, rows = ("init", "goal", "plan"), json.loads(path.read_text())["example_pool"]
        else:
            names, rows = ("init_text", "goal_text", "plan_text"), _rows(path)
        found = []
        for init, goal, plan in ([row[name] for name in names] for row in rows):
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
        """True if the simulated plan reaches the goal."""
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


def _rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
