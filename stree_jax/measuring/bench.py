"""`bench`: what drafting brings a target on this machine, as one table."""

import dataclasses
import itertools
import os
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from pallas_kernels import dispatch
from stree_jax.checkpoint.directories import new_file
from stree_jax.checks import check_int, require
from stree_jax.decoding.options import Options, check_keywords
from stree_jax.decoding.prompts import checked_prompts
from stree_jax.decoding.way import Way
from stree_jax.measuring.advice import advice
from stree_jax.measuring.clock import Progress, machine, num_bytes, silent
from stree_jax.measuring.methods import LOOKUP, PLAIN, Batch, Method, compare, different
from stree_jax.measuring.questions import PLAIN_TURNS, Question, naming, turn_by_turn
from stree_jax.measuring.record import Record
from stree_jax.measuring.report import acceptance_tables, check_file, draw_speeds, method_tables
from stree_jax.messages import needs, shown
from stree_jax.models.bits import bits_obstacle
from stree_jax.models.lm import HybridLM, check_model
from stree_jax.pretrained import from_pretrained
from stree_jax.text import Texts

# Written for this: similar to the training text of the embedded models, but not part of it.
PROMPTS = (
    "Question: Rosa has 12 jars with 8 beads in each. She gives away 30 beads. How many beads does"
    " she have left?\nAnswer:",
    'def count_lines(path):\n    """Return the number of lines in a text file."""\n    with open(',
    "The old house stood at the end of the lane, and nobody in the village",
    "Question: A bus ticket costs $3. Omar buys 4 tickets every week. How much does he spend in 5"
    " weeks?\nAnswer:",
)
_MAX_SPREAD = 1.3  # rounds of a quiet machine differ by a few per cent


@dataclasses.dataclass(frozen=True)
class BenchReport:
    """The result of `bench`; `str` gives its head and a table for each temperature.

    Attributes:
        head: what was measured where: the target and its weights, what runs (CPU code, "xla" or
            "pallas"), machine, versions, sizes.
        rows: a `stree_jax.measuring.Record` for each way and temperature.
    """

    head: Mapping[str, Any]
    rows: Sequence[Record]

    @property
    def different(self) -> list[str]:
        """Ways whose tokens should be those of autoregressive decoding, and are not."""
        return different(self.rows)

    @property
    def busy(self) -> str:
        """A warning if rounds took so different times that speeds mean little; else empty."""
        rounds = [row.tokens_per_second_by_round for row in self.rows]
        spread = max((max(speeds) / min(speeds) for speeds in rounds), default=1.0)
        if spread < _MAX_SPREAD:
            return ""
        return (
            f"This machine is busy: equal rounds took {spread:.1f} times as long as others. Speeds"
            " are for a quiet one; run again."
        )

    @property
    def advice(self) -> list[str]:
        """What to draft with, a sentence for each temperature."""
        sentences = []
        for heat in dict.fromkeys(row.temperature for row in self.rows):
            sentence = advice([row for row in self.rows if row.temperature == heat])
            sentences.append(f"Temperature {heat:g}: {sentence[0].lower()}{sentence[1:]}")
        if len(self.rows[0].tokens_per_second_by_round) < 3:
            sentences.append("Fewer than 3 rounds: differences may be noise.")
        return sentences

    def described(self) -> list[str]:
        """Lines: what runs, where, and with which weights."""
        weights, host, obstacle = (
            self.head[name] for name in ("weights", "machine", "bits_obstacle")
        )
        equal = f"may differ in a bit: {obstacle}" if obstacle else "are equal to the bit"
        cores = f"{host['processor']}, {host['cores']} cores"
        versions = f"jax {host['jax']}, Python {host['python']}"
        return [
            *[PLAIN_TURNS] * self.head.get("plain_turns", False),
            f"runs as {self.head['runs']}",
            f"numbers with and without drafts {equal}",
            f"{host['device']}, {cores}; {versions}; load {host['load_average']:g}",
            f"{self.head['target']}: {weights['parameters'] / 1e6:,.1f} M parameters,"
            f" {weights['dtype']}, {weights['bytes'] / 1e6:,.1f} MB",
        ]

    def tables(self) -> list[Any]:
        """For each temperature a table of speeds, and one of what was accepted."""
        head = self.head
        title = f"{head['prompts']} prompts, {head['rows']} at a time, up to"
        title += f" {head['max_new_tokens']} new tokens each"
        return [*method_tables(title, self.rows), *acceptance_tables(self.rows)]

    def __str__(self) -> str:
        lines = [*self.described(), *map(str, self.tables()), self.busy, *self.advice]
        return "\n".join(filter(None, lines))

    __repr__ = __str__

    def content(self) -> dict[str, Any]:
        """All that was measured, as JSON can hold it."""
        return {**self.head, "decoding": [row.to_dict() for row in self.rows]}

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the speeds into a .png or .svg file; needs matplotlib, the extra `bench`.

        Raises:
            ValueError: another kind of file, or no matplotlib.
        """
        file = check_picture(path)
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 1 + 0.5 * len(self.rows)), layout="constrained")
        draw_speeds(figure.subplots(), self.content()["decoding"])
        figure.legend(loc="outside lower left", ncols=4)
        with new_file(file) as new:
            figure.savefig(new, format=file.suffix[1:])


def check_picture(path: str | os.PathLike[str]) -> Path:
    """Returns the file of a picture; refuses another kind, or if there is no matplotlib."""
    file = check_file(path)
    require(file.suffix in (".png", ".svg"), f"{file} is not a .png or .svg file; name one")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(needs("a picture", "matplotlib", "bench")) from None
    return file


@jax.transfer_guard("allow")
def bench(
    target: HybridLM | str | os.PathLike[str] | Any,
    ways: Mapping[str, Way | Mapping[str, Any]] | Any = types.MappingProxyType({}),
    prompts: Sequence[Any] | None = None,
    *,
    temperatures: Sequence[float] | Any = (0.0,),
    max_new_tokens: int = 96,
    rows: int = 1,
    rounds: int = 3,
    name: str | None = None,
    progress: Progress = silent,
    each_round: Callable[[BenchReport], object] = lambda report: None,
    **options: Any,
) -> BenchReport:
    """Decodes prompts in several ways, interleaved, and compares speed, acceptance and texts.

    No drafts and prompt lookup (a chain of 4) are always among the ways.

        print(st.bench(target, {"draft": st.Way(st.ModelDrafter(draft))}, prompts))

    Args:
        target: a model, or the directory or hub name of a checkpoint.
        ways: by name, an `st.Way`, or a dict of its fields.
        prompts: lists of token ids, or each a `stree_jax.measuring.Question`; of a checkpoint they
            may be texts, and four are built in.
        temperatures: each gives a table. Above 0 all ways draw with the same key.
        max_new_tokens: new tokens of each text, at most.
        rows: texts decoded at the same time, of one category and turn. The last batch is filled
            with the first prompts.
        rounds: timed runs of each batch, after one that compiles.
        name: the target's, for the report.
        progress: callback with the current task, its finished parts and the number of its parts.
        each_round: callback with what is known after each round.
        **options: other options of `generate` for all texts, such as `top_p`, `eos_token`, `key`.

    Returns:
        A record for each way and temperature, and what was measured where.

    Raises:
        ValueError: a bad argument, or a way that `generate` refuses; raised before anything is
            compiled.
    """
    require("temperature" not in options, "bench has no temperature, but temperatures=[0.0, 1.0]")
    check_keywords("bench", options, Options().keys())
    check_int("rows", rows, 1)
    check_int("rounds", rounds, 1)
    for label, way in ways.items():
        if label in (PLAIN, LOOKUP.name):
            raise ValueError(f"ways has {label!r}, which is always there; give it another name")
        if not {*way.keys()} <= {"drafter", "topology", "verifier"}:
            raise ValueError(
                f"the way {shown(label)} is {shown(way)}; give keywords of generate: drafter,"
                " topology, verifier, as a dict or an st.Way"
            )
    methods = [Method(PLAIN), LOOKUP, *(Method(label, **way) for label, way in ways.items())]
    temperatures = dict.fromkeys(temperatures)
    if isinstance(target, str | os.PathLike):
        from stree_jax.convert import find  # not imported by `import stree_jax`

        name, folder = name or str(target), find(target)
        texts = Texts.at(folder)
        target = from_pretrained(folder)
        prompts = [
            Question.of(texts, prompt, name=f"prompt {i}") if isinstance(prompt, str) else prompt
            for i, prompt in enumerate(PROMPTS if prompts is None else prompts, 1)
        ]
    check_model(target)
    if prompts is None:
        raise ValueError("bench of a loaded model needs prompts: give lists of token ids")
    questions = [prompt if isinstance(prompt, Question) else Question(prompt) for prompt in prompts]
    token_ids = [question.prompt for question in questions]
    checked_prompts(token_ids, target.config.vocab_size)
    common = {"key": 0, "max_new_tokens": max_new_tokens} | options
    for texts in (question.texts for question in questions if question.turns):
        common.setdefault("eos_token", texts.end_tokens(target.config) or None)
    settings = [Options(temperature=heat, **common) for heat in temperatures]
    with naming([question.name or f"prompts[{i}]" for i, question in enumerate(questions)]):
        planned = [  # refuses before it compiles
            method.planned(target, Batch(token_ids, at_heat)).decoder.topology.num_nodes
            for method, at_heat in itertools.product(methods, settings)
        ]
    _, whole = HybridLM.abstract(target.config)
    head = {
        "target": name or "target",
        "runs": dispatch.explain(dispatch.device_of(target)),
        "bits_obstacle": bits_obstacle(target, max(planned), rows),
        "machine": machine(),  # before this loads it
        "weights": {
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(whole)),
            "dtype": target.dtype.name,
            "bytes": num_bytes(nnx.state(target)),
        },
        "prompts": sum(max(1, len(question.turns)) for question in questions),
        "rows": rows,
        "max_new_tokens": max_new_tokens,
        "plain_turns": any(question.is_plain for question in questions),
    }
    report = BenchReport(head, [])
    for at_heat in settings:
        batches = [*turn_by_turn(target, questions, rows, at_heat, progress)]
        before = report.rows
        for records in compare(target, methods, batches, rounds, progress):
            report = BenchReport(head, [*before, *records])
            each_round(report)
    return report
