"""`tune`: the fastest draft tree for a pair of models on this device, if any pays."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from stree_jax.checks import check_int
from stree_jax.decoding.drafters import Drafter, DynamicDrafter, ModelDrafter
from stree_jax.decoding.drafters.base import with_tokens_of
from stree_jax.decoding.generate import generate
from stree_jax.decoding.options import Options
from stree_jax.decoding.plan import Plan, plan
from stree_jax.decoding.prompts import checked_prompts, typed_key
from stree_jax.decoding.way import Way
from stree_jax.measuring.advice import advice, choice, is_beaten, spread
from stree_jax.measuring.clock import Progress, silent
from stree_jax.measuring.costs import SIZES, WIDTHS, Costs, measure_costs
from stree_jax.measuring.methods import PLAIN, Batch, Method, compare
from stree_jax.measuring.record import Record
from stree_jax.measuring.report import SPEED, Table
from stree_jax.models.lm import HybridLM, check_on_one_device
from stree_jax.tree import TreeTopology
from stree_jax.tuning.search import acceptance, best_trees, replay_tau
from stree_jax.tuning.trace import RankTrace, head_trace, rank_trace

NUM_RANKS = 8  # most children of a node
SHARPNESS = (1.5, 2.5, 3.5, 5.0)  # of dynamic trees; they share a program
# Sizes of target calls and widths of draft levels that are timed, finalists, rounds.
_THOROUGH = SIZES, WIDTHS, 4, 5
_QUICK = SIZES[::3], WIDTHS[::2], 2, 3
_FEW = 2  # trees that compete with a short chain and no drafts; each is compiled


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A tree and its speed; `topology` None is decoding without drafts.

    Attributes:
        name: name of the tree, such as "chain of 4".
        topology: the tree; for a dynamic one its size, `TreeTopology.budget(N, D)`.
        tau: tokens per target call: of the decoded texts if it was timed, else of the traced ones.
        predicted: tokens per second by acceptance and costs; 0 for a dynamic tree.
        sharpness: that of `DynamicDrafter`; None for static trees.
        record: what `bench` says of it, see `BenchReport.rows`; None if it was not timed.
    """

    name: str
    topology: TreeTopology | None
    tau: float
    predicted: float
    sharpness: float | None = None
    record: Record | None = None

    def method(self, drafter: Drafter) -> Method:
        """The way to decode with this tree."""
        if self.topology is None:
            return Method(self.name)
        if self.sharpness is not None:
            assert isinstance(drafter, ModelDrafter)
            drafter = DynamicDrafter(drafter.model, sharpness=self.sharpness)
        return Method(self.name, drafter, self.topology)


@dataclasses.dataclass(frozen=True)
class TuningReport:
    """The result of `tune`; `str` gives a table and one sentence of advice.

    Attributes:
        best: the static tree to use; None: do not draft.
        rows: the timed finalists, the fastest first; then the other candidates by predicted speed.
        advice: recommendation with its reason.
        costs: costs of the parts of a step.
        sharpness: that of the fastest dynamic tree; None if the drafter is not a `ModelDrafter`.
        drafter: the drafter that it was tuned for.
    """

    best: TreeTopology | None
    rows: tuple[Candidate, ...]
    advice: str
    costs: Costs
    sharpness: float | None = None
    drafter: Drafter | None = dataclasses.field(default=None, repr=False)

    @property
    def way(self) -> Way:
        """The fastest static choice: `generate(target, prompts, **report.way)`."""
        return Way() if self.best is None else Way(self.drafter, self.best)

    @property
    def trees(self) -> tuple[TreeTopology, ...]:
        """The few for `generate(topology=report.trees)`: the fastest timed ones, a short chain."""
        timed = [row.topology for row in self.rows if row.record and row.sharpness is None]
        static = [tree for tree in timed if tree is not None and tree.num_nodes > 1]
        return tuple(dict.fromkeys([TreeTopology.chain(2), *static[:_FEW]]))

    def __str__(self) -> str:
        records = [row.record for row in self.rows if row.record is not None]
        timed = [vars(record) | {"spread": spread(record)} for record in records]
        columns = {"tree": "{method}", "nodes": "{nodes}", "tau": "{tau:.2f}"}
        columns |= SPEED | {"+-": "{spread:,.0f}"}
        others = f"... and {len(self.rows) - len(timed)} trees that were not timed"
        return "\n".join([str(Table("", timed, columns)).rstrip(), others, self.advice])

    __repr__ = __str__


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
    progress: Progress = silent,
) -> TuningReport:
    """Finds the draft tree that decodes these prompts fastest here, one prompt at a time.

    The target generates a text for each prompt. On the first half of the texts the drafter's
    candidates are ranked, which gives the acceptance of every static tree exactly; the parts of a
    step are timed on this device; the most promising trees are then timed by decoding the other
    half, interleaved with decoding without drafts. A tree must beat the simpler choices by more
    than the spread of the measurement.

    For a `ModelDrafter`, dynamic trees as large as the most promising static one are timed too.

    Args:
        target: the model.
        drafter: fills static trees, such as a `ModelDrafter` or an `NgramDrafter`.
        prompts: at least two prompts, typical of those that will be decoded.
        temperature: temperature at which texts are decoded.
        key: random key or seed, required above temperature 0.
        max_nodes: most nodes of a tree, root included.
        max_depth: most drafts on a path.
        max_new_tokens: most new tokens of each text.
        thorough: if False, a third of the sizes is timed and half as many trees are decoded, three
            times instead of five: most of the time is compilation.
        progress: callback with the current task, its finished parts and the number of its parts.

    Returns:
        The measurements; `best` is the tree, or None: do not draft.

    Raises:
        ValueError: a bad argument, or a drafter whose trees are not static.
    """
    _check(target, drafter, prompts)
    check_int("max_nodes", max_nodes, 2)
    check_int("max_depth", max_depth, 1)
    sizes, widths, num_finalists, rounds = _THOROUGH if thorough else _QUICK
    half = len(prompts) // 2
    keys = (None, None) if key is None else jax.random.split(typed_key(key))
    first, second = (
        Options(max_new_tokens=max_new_tokens, temperature=temperature, key=half_key)
        for half_key in keys
    )

    drafter = with_tokens_of(drafter, target)
    progress("the target writes", 0, 1)
    request = plan(target, prompts[:half], first)
    texts = generate(target, prompts[:half], options=first)
    written = [row[:length] for row, length in zip(texts.tokens, texts.lengths, strict=True)]
    progress("the target writes", 1, 1)
    trace = _traced(drafter, target, request, written)
    max_depth = min(max_depth, trace.max_depth or max_depth)
    costs = measure_costs(
        target,
        drafter,
        list(prompts[0]),
        first,
        max_nodes=max_nodes,
        max_depth=max_depth,
        sizes=sizes,
        widths=widths,
        progress=progress,
    )
    candidates = _candidates(trace, costs, max_nodes, max_depth)
    finalists = _finalists(candidates, num_finalists)
    if isinstance(drafter, ModelDrafter):
        tree = next(row.topology for row in candidates if row.topology is not None)
        # 8 expanded nodes score 72 drafts in two levels.
        size = TreeTopology.budget(min(tree.num_nodes, 64), tree.depth)
        finalists += [
            Candidate(f"dynamic {size.num_nodes}, sharpness {value:g}", size, 0.0, 0.0, value)
            for value in SHARPNESS
        ]
    *_, records = compare(
        target,
        [row.method(drafter) for row in finalists],
        [Batch([prompt], second) for prompt in prompts[half:]],
        rounds,
        lambda _, done, total: progress("runs of the best trees", done, total),
        parts=False,
    )
    pairs = zip(finalists, records, strict=True)
    timed = [
        dataclasses.replace(row, tau=record.tau, record=record)
        for row, record in sorted(pairs, key=lambda pair: -pair[1].tokens_per_second["median"])
    ]
    static = [row for row in timed if row.sharpness is None]
    dynamic = next((row for row in timed if row.sharpness is not None), None)
    static_records = [row.record for row in static if row.record is not None]
    best = choice(static_records)
    names = {row.name for row in timed}
    return TuningReport(
        best=next(row.topology for row in static if row.record is best),
        rows=(*timed, *(row for row in candidates if row.name not in names)),
        advice=advice(static_records) + _better(best, dynamic),
        costs=costs,
        sharpness=None if dynamic is None else dynamic.sharpness,
        drafter=drafter,
    )


def _better(best: Record, row: Candidate | None) -> str:
    """A sentence about a dynamic tree that beats the best static choice."""
    if row is None or row.topology is None or row.record is None:
        return ""
    if not is_beaten(best, row.record):
        return ""
    return (
        f" Dynamic trees are faster: DynamicDrafter(draft, sharpness={row.sharpness:g}) with"
        f" TreeTopology.budget({row.topology.num_nodes}, {row.topology.depth}),"
        f" {row.record.speed_up['median']:.2f} times as fast as without (tau {row.tau:.2f})."
    )


def _check(target: HybridLM, drafter: Drafter | None, prompts: Any) -> None:
    """Refuses what `tune` cannot tune."""
    check_on_one_device(target, "tune")
    if drafter is None:
        raise ValueError(
            "drafter is None; tune chooses a tree for a drafter such as ModelDrafter(...)"
        )
    if drafter.chooses_shape:
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
    num_ranks = min(NUM_RANKS, target.config.vocab_size)
    if drafter.rank_trace is not None:
        return drafter.rank_trace(target, request, written, num_ranks)
    head = drafter.draft_model if isinstance(drafter, ModelDrafter) else drafter
    if head.outputs_ahead is not None:
        return head_trace(drafter, head, target, request, written, num_ranks)
    return rank_trace(drafter, target, request, written, num_ranks)


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
    rows = [Candidate(PLAIN, None, 1.0, 1 / costs.step(TreeTopology.chain(0)))]
    for topology, name in named.items():
        tau = replay_tau(topology, trace)
        rows.append(Candidate(name, topology, tau, tau / costs.step(topology)))
    return sorted(rows, key=lambda row: -row.predicted)


def _finalists(candidates: list[Candidate], most: int) -> list[Candidate]:
    """No draft; then the most promising trees, of different sizes, the best chain among them."""
    trees = [row for row in candidates if row.topology is not None]
    chosen: dict[int, Candidate] = {}
    for row in trees:  # neighbours in size differ by less than the measurement error
        size = 1 if row.topology is None else row.topology.num_nodes
        if len(chosen) < most and all(abs(size - known) > 0.2 * known for known in chosen):
            chosen[size] = row
    chain = next(row for row in trees if row.name.startswith("chain"))
    none = next(row for row in candidates if row.topology is None)
    return [none, *chosen.values()] + ([chain] if chain not in chosen.values() else [])
