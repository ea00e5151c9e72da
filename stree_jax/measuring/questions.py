"""Questions of a data set: prompts by category, and turns with answers in between."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stree_jax.decoding.options import Options
from stree_jax.measuring.clock import Progress, silent
from stree_jax.measuring.methods import PLAIN, Batch, Method
from stree_jax.messages import shown
from stree_jax.models.lm import HybridLM
from stree_jax.text import Texts


class Question(NamedTuple):
    """A prompt, or turns of a user that are answered in between.

    Attributes:
        prompt: tokens of the first prompt.
        category: what it is a case of, for a row of its own in tables.
        turns: messages of the user; of another prompt none.
        texts: the `Texts` that writes them as tokens.
    """

    prompt: Sequence[int]
    category: str | None = None
    turns: Sequence[Mapping[str, Any]] = ()
    texts: Any = None

    @classmethod
    def of(cls, texts: Texts, asked: Any, category: Any = None, name: str = "the prompt") -> Any:
        """That of a text or of messages, which are turns if all of them are a user's."""
        if category is not None and not (isinstance(category, str) and category.strip()):
            raise ValueError(f"category must be a text, got {shown(category)}")
        messages = asked if isinstance(asked, list) else [None]
        if any(not isinstance(each, dict) or each.get("role") != "user" for each in messages):
            return cls(texts.tokens(asked, name=name), category)
        found = cls(texts.tokens(asked[:1], name=name), category, asked, texts)
        found.after(["."] * (len(asked) - 1))  # refuses what the template does not take
        return found

    def after(self, answers: Sequence[str]) -> Sequence[int]:
        """The prompt of the turn after these answers."""
        if not answers:
            return self.prompt
        said = [{"role": "assistant", "content": answer} for answer in answers]
        pairs = zip(self.turns, said, strict=False)
        return self.texts.tokens([*sum(pairs, ()), self.turns[len(said)]])


def turn_by_turn(
    target: HybridLM,
    questions: Sequence[Question],
    rows: int,
    options: Options,
    progress: Progress = silent,
) -> Iterator[Batch]:
    """Yields batches of one category and turn; the answers between turns are the target's own."""
    answers: list[list[str]] = [[] for _ in questions]
    for category in dict.fromkeys(each.category for each in questions):
        own, turn = [i for i, each in enumerate(questions) if each.category == category], 0
        while own:
            turn += 1
            prompts = {i: questions[i].after(answers[i]) for i in own}
            later = [i for i in own if len(questions[i].turns) > turn]
            for start in range(0, len(own), rows):
                places = [own[(start + i) % len(own)] for i in range(rows)]
                batch = Batch([prompts[i] for i in places], options, category)
                yield batch
                if {*places}.isdisjoint(later):
                    continue
                out = Method(PLAIN).decode(target, batch)
                for row, i in enumerate(places):
                    texts, new = questions[i].texts, out.tokens[row, : out.lengths[row]].tolist()
                    if i in later:
                        said = texts.tokenizer(questions[i].turns).decode(new)
                        said = texts.without_end(said, new, out.finish_reasons[row])
                        answers[i][turn - 1 :] = [said]
                progress(f"answers to turn {turn}", min(start + rows, len(own)), len(own))
            own = later
