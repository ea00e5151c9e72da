"""`tune`: the fastest draft tree for a pair of models on this device, if any pays."""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from stree_jax.checks import check_int
from stree_jax.decoding.drafters import Drafter, DynamicDrafter, ModelDrafter
from stree_jax.decoding.drafters.base import with_tokens_of
from stree_jax.decoding.generate import generate
from stree_jax.decoding.plan import Plan, plan
from stree_jax.decoding.prompts import checked_prompts, typed_key
from stree_jax.decoding.results import Generation
from stree_jax.measuring.clock import timed_rounds
from stree_jax.measuring.costs import SIZES, WIDTHS, Costs, measure_costs
from stree_jax.models.lm import HybridLM, check_on_one_device
from stree_jax.tree import TreeTopology
from stree_jax.tuning.dynamic import dynamic_tau, fitted
from stree_jax.tuning.search import acceptance, best_trees, replay_tau, standard_error
from stree_jax.tuning.trace import RankTrace, head_trace, rank_trace

NUM_RANKS = 8  # most children of a node
_FINALISTS, _QUICK_FINALISTS = 4, 2
_ROUNDS, _QUICK_ROUNDS = 5, 3
_QUICK_GRID = (1.5, 2.5, 5.0)  # of sharpness
_ENOUGH_TOKENS = 500


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A tree and its speed; `topology` None is decoding without drafts.

    Attributes:
        name: name of the tree, such as "chain of 4".
        topology: the tree; for a dynamic one its size, `TreeTopology.budget(N, D)`.
        tau: tokens per target call; replayed if the tree was not timed.
        predicted: tokens per second predicted from acceptance and costs.
        measured: median tokens per second; None if the tree was not timed.
        spread: half the interquartile range of the rounds, in tokens per second.
        speed_up: median over rounds of the ratio to decoding without drafts.
        identical: whether the texts are those of decoding without drafts; None if not timed.
        sharpness: fitted `sharpness` of `DynamicDrafter`; None for static trees.
    """

    name: str
    topology: TreeTopology | None
    tau: float
    predicted: float
    measured: float | None = None
    spread: float | None = None
    speed_up: float | None = None
    identical: bool | None = None
    sharpness: float | None = None

    @property
    def num_nodes(self) -> int:
        """Nodes of the tree, the root included."""
        return 1 if self.topology is None else self.topology.num_nodes

    @property
    def speed(self) -> float:
        """Median tokens per second; 0 if it was not timed."""
        return self.measured or 0.0

    def is_beaten_by(self, other: "Candidate") -> bool:
        """Whether another one is faster by more than the spread of both."""
        return other.speed - self.speed > max(self.spread or 0, other.spread or 0)


@dataclasses.dataclass(frozen=True)
class TuningReport:
    """The result of `tune`; `str` gives a table and one sentence of advice.

    Attributes:
        best: the static tree to use; None: do not draft.
        rows: the timed finalists, the fastest first; then the other candidates by predicted speed.
        advice: recommendation with its reason.
        costs: costs of the parts of a step.
        temperature: temperature of the measured texts.
        num_traced: number of tokens that tau was replayed on.
        sharpness: the `sharpness` of `DynamicDrafter` with the highest acceptance on these texts;
            None if the drafter is not a `ModelDrafter`.
    """

    best: TreeTopology | None
    rows: tuple[Candidate, ...]
    advice: str
    costs: Costs
    temperature: float
    num_traced: int
    sharpness: float | None = None

    def __str__(self) -> str:
        decoded = [row for row in self.rows if row.measured is not None]
        untimed = len(self.rows) - len(decoded)
        lines = [
            f"{'tree':<20}{'nodes':>6}{'depth':>6}{'tau':>7}{'predicted':>11}{'tokens/s':>15}"
            f"{'speed-up':>10}"
        ]
        for row in decoded:
            depth = 0 if row.topology is None else row.topology.depth
            speed, ratio = f"{row.measured:,.0f} +-{row.spread:,.0f}", f"{row.speed_up:.2f}x"
            lines.append(
                f"{row.name:<20}{row.num_nodes:>6}{depth:>6}{row.tau:>7.2f}"
                f"{row.predicted:>11,.0f}{speed:>15}{ratio:>10}"
            )
        if untimed:
            lines.append(f"... and {untimed} trees that were not timed")
        if self.sharpness is not None:
            lines.append(f"sharpness of dynamic trees: {self.sharpness:g}")
        return "\n".join([*lines, self.advice])


@jax.transfer_guard("allow")
def tune(
    target: HybridLM,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]] | Any,
    *,
    temperature: float = 0.0,
    key: jax.Array | int | None = None,
    max_nodes: int = 64,
    max_depth: int = 8,
    max_new_tokens: int = 128,
    thorough: bool = True,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> TuningReport:
    """Finds the draft tree that decodes these prompts fastest here, one prompt at a time.

    The target generates a text for each prompt. On the first half of the texts the drafter's
    candidates are ranked, which gives the acceptance of every static tree exactly; the parts of a
    step are timed on this device; the most promising trees are then timed by decoding the other
    half, interleaved with decoding without drafts. A tree must beat the simpler choices by more
    than the spread of the measurement.

    For a `ModelDrafter`, a dynamic tree as large as the most promising static one is timed too. Its
    sharpness is fitted on the first half.

    Args:
        target: the model.
        drafter: fills static trees, such as a `ModelDrafter` or an `NgramDrafter`.
        prompts: at least two prompts, typical of those that will be decoded.
        temperature: temperature at which texts are decoded.
        key: random key or seed, required above temperature 0.
        max_nodes: most nodes of a tree, root included.
        max_depth: most drafts on a path.
        max_new_tokens: most new tokens of each text.
        thorough: if False, a third of the sizes is timed, half of the values of sharpness are
            tried, and half as many trees are decoded, three times instead of five: most of the
            time is compilation.
        progress: callback with the current task, its finished parts and the number of its parts.

    Returns:
        The measurements; `best` is the tree, or None: do not draft.

    Raises:
        ValueError: a bad argument, or a drafter whose trees are not static.
    """
    _check(target, drafter, prompts)
    check_int("max_nodes", max_nodes, 2)
    check_int("max_depth", max_depth, 1)
    options: dict[str, Any] = dict(max_new_tokens=max_new_tokens, temperature=temperature)
    half = len(prompts) // 2
    keys = (None, None) if key is None else jax.random.split(typed_key(key))
    first, second = (dict(options, key=each) for each in keys)

    drafter = with_tokens_of(drafter, target)
    progress("the target writes", 0, 1)
    request = plan(target, prompts[:half], **first)
    texts = generate(target, prompts[:half], **first)
    written = [row[:length] for row, length in zip(texts.tokens, texts.lengths, strict=True)]
    progress("the target writes", 1, 1)
    trace = _traced(drafter, target, request, written)
    max_depth = min(max_depth, trace.max_depth or max_depth)
    num_traced = int(texts.lengths.sum())
    if num_traced < _ENOUGH_TOKENS:
        warnings.warn(
            f"acceptance was measured on {num_traced} tokens, to +-{standard_error(trace):.2f};"
            " give more prompts, or let texts be longer",
            stacklevel=2,
        )

    sizes, widths = (SIZES, WIDTHS) if thorough else (SIZES[::3], WIDTHS[::2])
    num_parts = 3 + sum(size < max_nodes for size in sizes) + len(widths)
    done = itertools.count(1)
    costs = measure_costs(
        target,
        drafter,
        list(prompts[0]),
        max_nodes=max_nodes,
        max_depth=max_depth,
        temperature=temperature,
        key=key,
        advance=lambda: progress("timing parts of a step", min(next(done), num_parts), num_parts),
        sizes=sizes,
        widths=widths,
    )
    candidates = _candidates(trace, costs, max_nodes, max_depth)
    finalists = _finalists(candidates, _FINALISTS if thorough else _QUICK_FINALISTS)
    sharpness = None
    if isinstance(drafter, ModelDrafter):
        progress("fitting dynamic trees", 0, 1)
        largest = next(row.topology for row in candidates if row.topology is not None)
        grid = {} if thorough else {"grid": _QUICK_GRID}
        finalists.append(_dynamic(drafter, target, request, written, largest, costs, **grid))
        sharpness = finalists[-1].sharpness
        progress("fitting dynamic trees", 1, 1)
    rounds = _ROUNDS if thorough else _QUICK_ROUNDS
    rows = _decoded(target, drafter, prompts[half:], finalists, second, rounds, progress)
    best = simplest(rows)
    names = {row.name for row in rows}
    return TuningReport(
        best=best.topology,
        rows=(*rows, *(row for row in candidates if row.name not in names)),
        advice=advice(best, rows),
        costs=costs,
        temperature=float(temperature),
        num_traced=num_traced,
        sharpness=sharpness,
    )


def _check(target: HybridLM, drafter: Drafter | None, prompts: Any) -> None:
    """Refuses what `tune` cannot tune."""
    check_on_one_device(target, "tune")
    if drafter is None:
        raise ValueError(
            "drafter is None; tune chooses a tree for a drafter such as ModelDrafter(...)"
        )
    if getattr(drafter, "chooses_shape", False):
        raise ValueError(
            f"{type(drafter).__name__} chooses its trees itself; tune a ModelDrafter of its model"
        )
    checked_prompts(prompts, target.config.vocab_size)
    if len(prompts) < 2:
        raise ValueError(f"tune needs at least 2 prompts, one to measure on; got {len(prompts)}")


def _traced(
    drafter: Drafter, target: HybridLM, request: Plan, written: list[np.ndarray]
) -> RankTrace:
    """The ranks of what the target wrote, by the drafter's own method if it has one."""
    vocab_size = target.config.vocab_size
    num_ranks = min(NUM_RANKS, vocab_size)
    own = getattr(drafter, "rank_trace", None)  # see `Drafter`
    if callable(own):
        return own(target, request, written, num_ranks)
    head = drafter.model if isinstance(drafter, ModelDrafter) else drafter
    if hasattr(head, "outputs_ahead"):  # see `HeadModel`
        return head_trace(drafter, head, target, request, written, num_ranks)
    return rank_trace(drafter, request, written, num_ranks, vocab_size, target)


def _candidates(trace: RankTrace, costs: Costs, max_nodes: int, max_depth: int) -> list[Candidate]:
    """Trees made for this acceptance, chains, the paper's trees and no draft; fastest first."""
    named: dict[TreeTopology, str] = {
        TreeTopology.chain(depth): f"chain of {depth}"
        for depth in range(1, min(8, max_depth, max_nodes - 1) + 1)
    }
    for letter in "ABCDE":
        topology = TreeTopology.paper(letter).level_order()
        if topology.num_nodes <= max_nodes and topology.depth <= max_depth:
            named[topology] = f"paper {letter}"
    for topology in best_trees(acceptance(trace, max_depth), costs, max_nodes, max_depth):
        named.setdefault(topology, f"tree {topology.num_nodes}, depth {topology.depth}")
    none = Candidate("no draft", None, 1.0, 1 / costs.step(TreeTopology.chain(0)))
    rows = [none]
    for topology, name in named.items():
        tau = replay_tau(topology, trace)
        rows.append(Candidate(name, topology, tau, tau / costs.step(topology)))
    return sorted(rows, key=lambda row: -row.predicted)


def _dynamic(
    drafter: ModelDrafter,
    target: HybridLM,
    request: Plan,
    written: list,
    static: TreeTopology,
    costs: Costs,
    **grid: Any,
) -> Candidate:
    """A dynamic tree of the size of a static one."""
    # 8 expanded nodes score 72 drafts in two levels.
    topology = TreeTopology.budget(min(static.num_nodes, 64), static.depth)
    taus = dynamic_tau(drafter.model, target, request, written, [topology], **grid)[topology]
    sharpness = fitted(taus)
    widths = DynamicDrafter(drafter.model).widths(topology)
    return Candidate(
        f"dynamic {topology.num_nodes}, depth {topology.depth}",
        topology,
        taus[sharpness],
        taus[sharpness] / costs.step(topology, widths),
        sharpness=sharpness,
    )


def _finalists(candidates: list[Candidate], most: int) -> list[Candidate]:
    """No draft; then the most promising trees, of different sizes, the best chain among them."""
    trees = [row for row in candidates if row.topology is not None]
    chosen: dict[int, Candidate] = {}
    for row in trees:  # neighbours in size differ by less than the measurement error
        size = row.num_nodes
        if len(chosen) < most and all(abs(size - other) > 0.2 * other for other in chosen):
            chosen[size] = row
    chain = next(row for row in trees if row.name.startswith("chain"))
    none = next(row for row in candidates if row.topology is None)
    return [none, *chosen.values()] + ([chain] if chain not in chosen.values() else [])


def _decoded(
    target: HybridLM,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    finalists: list[Candidate],
    options: dict[str, Any],
    rounds: int,
    progress: Callable[[str, int, int], None],
) -> list[Candidate]:
    """The finalists with measured speeds, the fastest first."""

    def decode(row: Candidate, prompt: Sequence[int]) -> Generation:
        draft: dict[str, Any] = {}
        if row.topology is not None:
            draft = dict(drafter=drafter, topology=row.topology)
        if row.sharpness is not None:
            assert isinstance(drafter, ModelDrafter)
            draft["drafter"] = DynamicDrafter(drafter.model, sharpness=row.sharpness)
        return generate(target, [prompt], **options, **draft)

    ticks, total = itertools.count(1), len(finalists) * len(prompts) * (1 + rounds)
    ways = {row.name: functools.partial(decode, row) for row in finalists}
    timed = timed_rounds(ways, prompts, rounds, lambda: progress("decoding", next(ticks), total))
    *_, (outputs, seconds) = timed
    plain, rows = outputs[finalists[0].name], []
    base = sum(out.stats.num_tokens for out in plain) / seconds[finalists[0].name].sum(axis=1)
    for row in finalists:
        output, own = outputs[row.name], seconds[row.name].sum(axis=1)
        tokens = sum(out.stats.num_tokens for out in output)
        low, middle, high = np.quantile(tokens / own, [0.25, 0.5, 0.75])
        same = (np.array_equal(a.tokens, b.tokens) for a, b in zip(output, plain, strict=True))
        rows.append(
            dataclasses.replace(
                row,
                tau=tokens / sum(out.stats.num_target_calls for out in output),
                measured=float(middle),
                spread=float(high - low) / 2,
                speed_up=float(np.median(tokens / own / base)),
                identical=all(same),
            )
        )
    return sorted(rows, key=lambda row: row.speed, reverse=True)


def simplest(rows: list[Candidate]) -> Candidate:
    """The simplest choice that no static tree beats: no draft, else a chain, else the fastest."""
    static = [row for row in rows if row.sharpness is None]
    none = [row for row in static if row.topology is None]
    chains = [row for row in static if row.name.startswith("chain")]
    fastest = static[0]
    return next(row for row in (*none, *chains, fastest) if not row.is_beaten_by(fastest))


def advice(best: Candidate, rows: list[Candidate]) -> str:
    """What to draft with and why, in a sentence; and a second one if dynamic trees are faster."""
    tree = next(row for row in rows if row.topology is not None and row.sharpness is None)
    if best.topology is not None:
        said = (
            f"Draft with {best.name}: {best.speed_up:.2f} times as fast as without drafts"
            f" (tau {best.tau:.2f})."
        )
    elif tree.speed >= best.speed:
        said = (
            f"Do not draft: {tree.name} is {tree.speed_up:.2f} times as fast as no draft, which is"
            " within the spread of the measurement."
        )
    else:
        needed = tree.tau * best.speed / tree.speed
        said = (
            f"Do not draft: the best tree needs tau {needed:.1f} on this device, this drafter"
            f" reaches {tree.tau:.1f}."
        )
    for row in rows:
        if row.sharpness is not None and row.topology is not None and best.is_beaten_by(row):
            said += (
                f" Dynamic trees are faster: DynamicDrafter(draft, sharpness={row.sharpness:g})"
                f" with TreeTopology.budget({row.num_nodes}, {row.topology.depth}),"
                f" {row.speed_up:.2f} times as fast as without drafts (tau {row.tau:.2f})."
            )
    return said
