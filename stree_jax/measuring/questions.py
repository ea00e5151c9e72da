"""Questions of a data set: prompts by category, and turns with answers in between."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stree_jax.chat import NoChatTemplateError
from stree_jax.decoding.options import Options
from stree_jax.measuring.clock import Progress, silent
from stree_jax.measuring.methods import PLAIN, Batch, Method
from stree_jax.messages import shown
from stree_jax.models.lm import HybridLM
from stree_jax.text import Texts

PLAIN_TURNS = "turns are joined as plain text: the target has no chat template"


class Question(NamedTuple):
    """A prompt, or turns of a user that are answered in between.

    Attributes:
        prompt: tokens of the first prompt.
        category: what it is a case of, for a row of its own in tables.
        turns: messages of the user; of another prompt none.
        texts: the `Texts` that writes them as tokens.
        is_plain: there is no chat template: turns and answers are joined as plain text.
        name: what errors call it, such as a line of a file.
    """

    prompt: Sequence[int]
    category: str | None = None
    turns: Sequence[Mapping[str, Any]] = ()
    texts: Any = None
    is_plain: bool = False
    name: str = ""

    @classmethod
    def of(cls, texts: Texts, asked: Any, category: Any = None, name: str = "the prompt") -> Any:
        """Makes one of a text or of messages, which are turns if all of them are a user's."""
        if category is not None and not (isinstance(category, str) and category.strip()):
            raise ValueError(f"category must be a text, got {shown(category)}")
        turns: list[Any] = asked if isinstance(asked, list) else [None]
        if any(not isinstance(turn, dict) or turn.get("role") != "user" for turn in turns):
            return cls(texts.tokens(asked, name=name), category)
        is_plain = False
        try:
            texts.template()
        except NoChatTemplateError:
            is_plain = all(isinstance(turn.get("content"), str) for turn in turns)
        question = cls((), category, turns, texts, is_plain)
        first = texts.tokens(question.as_asked(turns[:1]), name=name)
        question = question._replace(prompt=first)
        question.after(["."] * (len(turns) - 1))  # refuses what the template does not take
        return question

    def as_asked(self, messages: Sequence[Mapping[str, Any]]) -> Any:
        """Messages as `Texts` takes them: without a chat template one text."""
        contents = (message["content"] for message in messages)
        return "\n\n".join(contents) if self.is_plain else messages

    def after(self, answers: Sequence[str]) -> Sequence[int]:
        """The prompt of the turn after these answers."""
        if not answers:
            return self.prompt
        replies = [{"role": "assistant", "content": answer} for answer in answers]
        pairs = zip(self.turns, replies, strict=False)
        return self.texts.tokens(self.as_asked([*sum(pairs, ()), self.turns[len(answers)]]))


@contextlib.contextmanager
def naming(names: Sequence[str]) -> Iterator[None]:
    """Errors of `generate` have the names of questions in the place of those of rows."""
    try:
        yield
    except ValueError as error:
        message = re.sub(r"prompts\[(\d+)\]", lambda row: names[int(row[1])], str(error))
        raise ValueError(message) from None


def turn_by_turn(
    target: HybridLM,
    questions: Sequence[Question],
    rows: int,
    options: Options,
    progress: Progress = silent,
) -> Iterator[Batch]:
    """Yields batches of one category and turn; the answers between turns are the target's own."""
    answers: list[list[str]] = [[] for _ in questions]
    for category in dict.fromkeys(question.category for question in questions):
        waiting = [i for i, question in enumerate(questions) if question.category == category]
        turn = 0
        while waiting:
            turn += 1
            prompts = {i: questions[i].after(answers[i]) for i in waiting}
            with naming([f"{questions[i].name or f'prompts[{i}]'}, turn {turn}," for i in waiting]):
                Method(PLAIN).planned(target, Batch([*prompts.values()], options))
            later = [i for i in waiting if len(questions[i].turns) > turn]
            num_waiting = len(waiting)
            for start in range(0, num_waiting, rows):
                places = [waiting[(start + i) % num_waiting] for i in range(rows)]
                batch = Batch([prompts[i] for i in places], options, category)
                yield batch
                if {*places}.isdisjoint(later):
                    continue
                out = Method(PLAIN).decode(target, batch)
                for row, i in enumerate(places):
                    texts, new = questions[i].texts, out.tokens[row, : out.lengths[row]].tolist()
                    if i in later:
                        prompt = questions[i].as_asked(questions[i].turns)
                        text = texts.tokenizer(prompt).decode(new)
                        answer = texts.without_end(text, new, out.finish_reasons[row])
                        answers[i][turn - 1 :] = [answer]
                progress(f"answers to turn {turn}", min(start + rows, num_waiting), num_waiting)
            waiting = later
