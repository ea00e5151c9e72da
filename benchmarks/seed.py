"""How fast are trees of thoughts built: serially, with drafts, with SEED's queue, as a batch?

"SEED: Accelerating Reasoning Tree Construction via Scheduled Speculative Decoding": breadth-first
search with a generator and an evaluator on GSM8K, Creative Writing and Blocksworld, at temperature
1. Ways, all with the same keys:

- autoregressive, speculative (a chain) and MCSD (a tree of the paper's sizes, whose drafts are
  sampled without replacement and tested): one branch after another;
- SEED's queue: all branches of a level draft at once, the target verifies one after another, first
  come, first served. SIMULATED from the steps that speculative decoding took and the measured times
  of drafting and verifying: one device cannot do both at once;
- batch: the branches of a level are rows; with refill: rows work on any of the problems.

Speed is tokens a second relative to the autoregressive way, rounds interleaved. MCSD's rule tests
drafts, so its texts are others of the same distribution; all other ways must give the same
thoughts.

The models are too small for these tasks. Look at speed and equality, not at what is solved.

    python -m benchmarks.seed [--tasks gsm8k ...] [--problems 2] [--rounds 2] [--chain 4]
        [--rows 8] [--output DIR | --commit]
"""

import argparse
import collections
import functools
import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import stree_jax as st
from benchmarks.common import Found, Panel, Table, forget_programs, summary, timed
from benchmarks.methods import PLAIN
from benchmarks.models import Pair, embedded_pair
from benchmarks.prompts import SHARED
from stree_jax.extensions import reasoning
from stree_jax.tuning import measure_costs

QUEUE = "SEED's queue (simulated)"
# Children a node by level, in the paper's table 1.
K_CONFIGS = {
    "gsm8k": ((2, 2, 1), (4, 2, 1, 1)),
    "creative writing": ((2, 2, 1), (4, 2, 1, 1)),
    "blocksworld": ((2, 2, 1, 1), (8, 2, 1, 1, 1)),
}
MAX_LENGTH = 1024
# Used in turn if there are no data sets.
BUILT_IN: dict[str, list[Any]] = {
    "gsm8k": [
        reasoning.Question(
            "Ines picks 14 pears from each of 6 trees and sells 50. How many are left?", "34"
        )
    ],
    "creative writing": [
        "The lamp went out. Nobody had asked the cook. It rained until Monday. The key was in the"
        " jar."
    ],
    "blocksworld": [
        reasoning.Arrangement(
            "the red block is clear, the blue block is clear, the hand is empty, the red block is"
            " on the table and the blue block is on the table",
            "the red block is on top of the blue block",
            ("pick up the red block", "stack the red block on top of the blue block"),
        )
    ],
}
FILES = {
    "gsm8k": "gsm8k/test.jsonl",
    "creative writing": "creative_writing/data_100_random_text.txt",
    "blocksworld": "blocksworld/split_v2_step_6_selfcontained.jsonl",
}
POOL = "blocksworld/prompts/pool_prompt_v2_step_6.json"  # of demonstrations


class Way(NamedTuple):
    """A way of decoding a search."""

    rows: int  # requests that decode at the same time
    at_once: int  # problems that are searched at the same time
    drafter: st.Drafter | None = None
    topology: st.TreeTopology | None = None
    same: bool = True  # its thoughts must be those of the autoregressive way


class Run(NamedTuple):
    """One search of all problems."""

    thoughts: list[reasoning.Thought]
    num_bytes: int

    @property
    def written(self) -> list[reasoning.Written]:
        """All texts of both roles."""
        return [text for thought in self.thoughts for text in thought.written]

    def total(self, field: str) -> int:
        """Sum of a statistic over all texts."""
        return sum(getattr(text.completion.stats, field) for text in self.written)

    def texts(self) -> dict[tuple[int, int, int], tuple[Any, ...]]:
        """Every thought and its value, by problem, level and index."""
        return {(t.problem, t.level, t.index): (t.parts, t.value, t.kept) for t in self.thoughts}

    def saved_by_queue(self, draft: float, verify: float) -> float:
        """Seconds that SEED's queue takes less than one branch after another."""
        saved, ordered = 0.0, sorted(self.thoughts, key=lambda thought: thought.index)
        levels = collections.defaultdict(collections.Counter)  # calls by index, in order
        for thought in ordered:
            for text in thought.written:
                level = levels[text.role, thought.problem, thought.level]
                level[thought.index] += text.completion.stats.num_target_calls
        for branches in levels.values():
            rounds = [*branches.values()]
            saved += sum(rounds) * (draft + verify) - queue_makespan(rounds, draft, verify)
        return saved


def queue_makespan(rounds: Sequence[int], draft: float, verify: float) -> float:
    """Seconds of SEED's schedule: parallel drafts, verified in the order in which they end.

    Args:
        rounds: number of verifications of each branch.
        draft: seconds of drafting.
        verify: seconds of a verification.
    """
    ready = [(draft, branch) for branch, left in enumerate(rounds) if left]
    heapq.heapify(ready)
    left, end = list(rounds), 0.0
    while ready:
        when, branch = heapq.heappop(ready)
        end = max(end, when) + verify
        left[branch] -= 1
        if left[branch]:
            heapq.heappush(ready, (end + draft, branch))
    return end


def tasks(names: Sequence[str], count: int) -> dict[str, tuple[Any, list[Any]]]:
    """Each task and its first problems, from the data sets if they exist."""
    pool, known = BUILT_IN["blocksworld"], BUILT_IN
    if SHARED.is_dir():
        pool = reasoning.Blocksworld.problems(SHARED / POOL)
        known = {name: reasoning.TASKS[name].problems(SHARED / FILES[name]) for name in names}
    else:
        print(f"problems: built-in ones, because {SHARED} is absent", flush=True)
    options: dict[str, Any] = {"blocksworld": {"demonstrations": tuple(pool[:1])}}
    return {
        name: (
            reasoning.TASKS[name](**options.get(name, {})),
            [*itertools.islice(itertools.cycle(known[name]), count)],
        )
        for name in names
    }


def ways_of(draft: st.HybridLM, name: str, chain: int, rows: int, thoughts: int) -> dict[str, Way]:
    """All ways: autoregressive, speculative with a chain, then others; `rows` of the largest."""
    drafter, topology = st.ModelDrafter(draft), st.TreeTopology.chain(chain)
    sampled = st.ModelDrafter(draft, child_sampling="without_replacement")
    many = 10**6
    return {
        PLAIN: Way(1, 1),
        f"speculative, chain of {chain}": Way(1, 1, drafter, topology),
        **{
            f"MCSD {sizes}": Way(1, 1, sampled, st.TreeTopology.from_branching(sizes), same=False)
            for sizes in K_CONFIGS[name]
        },
        f"batch of {thoughts}": Way(thoughts, 1, drafter, topology),
        f"batch of {thoughts}, refill": Way(thoughts, many, drafter, topology),
        f"batch of {rows}, refill": Way(rows, many, drafter, topology),
        f"batch of {rows}, refill, no drafts": Way(rows, many),
    }


def measure(
    pair: Pair, tokenizer: Any, task: Any, problems: list[Any], ways: Mapping[str, Way], rounds: int
) -> list[dict[str, Any]]:
    """A record for each way, and one for SEED's queue after the speculative one.

    Args:
        pair: target and draft.
        tokenizer: the target's.
        task: one of `stree_jax.extensions.reasoning.TASKS`.
        problems: those of the task.
        ways: result of `ways_of`.
        rounds: number of timed runs of each way.
    """

    def search(way: Way, _: None) -> Run:
        drafting = {"drafter": way.drafter, "topology": way.topology}
        scheduler = st.Scheduler(pair.target, rows=way.rows, max_length=MAX_LENGTH, **drafting)
        key = jax.random.key(1)
        thoughts = reasoning.interleaved(
            scheduler, tokenizer, task, problems, key=key, at_once=way.at_once
        )
        return Run(list(thoughts), scheduler.nbytes)

    searches = {name: functools.partial(search, way) for name, way in ways.items()}
    found, taken = timed("search", searches, [None], rounds)
    runs = {name: run for name, (run,) in found.items()}
    tokens = {
        name: sum(len(text.completion.tokens) for text in run.written) for name, run in runs.items()
    }
    plain, serial = list(ways)[:2]
    base = tokens[plain] / taken[plain][:, 0]

    def speeds(name: str, saved: float = 0.0) -> dict[str, Any]:
        seconds = taken[name][:, 0] - saved
        return {
            "speed_up": summary((tokens[name] / seconds / base).tolist()),
            "thoughts_per_second": float(np.median(len(runs[name].thoughts) / seconds)),
        }

    rows = []
    for name, way in ways.items():
        run = runs[name]
        drafted, accepted = run.total("num_drafted"), run.total("num_accepted")
        rows.append(
            {
                "way": name,
                "rows": way.rows,
                "simulated": False,
                "tau": tokens[name] / run.total("num_target_calls"),
                "accepted_of_drafted": accepted / drafted if drafted else None,
                "bytes_of_rows": run.num_bytes,
                "identical": run.texts() == runs[plain].texts() if way.same else None,
                "solved": sum(bool(thought.solved) for thought in run.thoughts),
                "unparsed_values": sum(
                    thought.value is None and thought.level < task.depth for thought in run.thoughts
                ),
            }
            | speeds(name)
        )
        if name == serial:
            prompt = tokenizer.encode(run.written[0].prompt).ids
            draft, verify = parts_of_a_step(pair, way, prompt)
            rows.append(
                rows[-1]
                | {"way": QUEUE, "simulated": True}
                | {"seconds_draft": draft, "seconds_verify": verify}
                # Prefill is not part of the schedule, and takes as long as before.
                | speeds(name, run.saved_by_queue(draft, verify))
                # Each branch has a cache of the target and one of the draft.
                | {"bytes_of_rows": task.thoughts * run.num_bytes}
            )
    return rows


def parts_of_a_step(pair: Pair, way: Way, prompt: Sequence[int]) -> tuple[float, float]:
    """Seconds of drafting and of verifying a chain."""
    chain = way.topology
    costs = measure_costs(
        pair.target,
        way.drafter,
        prompt,
        max_nodes=chain.num_nodes,
        max_depth=chain.depth,
        temperature=1.0,
        key=jax.random.key(0),
    )
    verify = float(np.interp(chain.num_nodes, [*costs.target], [*costs.target.values()]))
    return costs.step(chain) - verify, verify


def run(options: argparse.Namespace) -> Iterator[Found]:
    """All ways on the first problems of each task."""
    pair = embedded_pair(0)
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    rows: list[dict[str, Any]] = []
    tables, panels, best = [], [], {}
    label = "tokens per second, autoregressive = 1"
    columns = {"way": "{way}", "speed-up": "{speed_up[median]:.2f}x", "tau": "{tau:.2f}"}
    columns |= {"thoughts/s": "{thoughts_per_second:.2f}", "bytes of rows": "{bytes_of_rows:,}"}
    for name, (task, problems) in tasks(options.tasks, options.problems).items():
        ways = ways_of(pair.draft, name, options.chain, options.rows, task.thoughts)
        found = measure(pair, tokenizer, task, problems, ways, options.rounds)
        rows += [{"task": name, "problems": len(problems)} | row for row in found]
        forget_programs()
        tables.append(Table(name, found, columns | {"same thoughts": "{identical}"}))
        speed = {row["way"]: row["speed_up"]["median"] for row in found}
        panels.append(Panel("", label, found, "{way}", {name: "{speed_up[median]}"}))
        measured = {row["way"]: speed[row["way"]] for row in found if not row["simulated"]}
        best[name] = max(measured, key=measured.__getitem__)
        yield Found(
            {"max_length": MAX_LENGTH, "ways": rows},
            tables,
            panels,
            wrong=[f"{row['way']}, {row['task']}" for row in rows if row["identical"] is False],
            line={"best": best},
        )


if __name__ == "__main__":
    from benchmarks.experiments import main

    main("seed", __doc__)
