"""How fast are trees of thoughts built: serially, with drafts, as a batch?

"SEED: Accelerating Reasoning Tree Construction via Scheduled Speculative Decoding": breadth-first
search with a generator and an evaluator on GSM8K, Creative Writing and Blocksworld, at temperature
1. Ways, all with the same keys:

- no drafts, speculative (a chain) and MCSD (a tree of the paper's sizes, whose drafts are
  sampled without replacement and tested): one branch after another;
- batch: the branches of a level are rows; with refill: rows work on any of the problems.

SEED's own queue (all branches of a level draft at once, the target verifies one after another)
needs a second device.

Speed is tokens a second relative to no drafts, rounds interleaved. MCSD's rule tests
drafts, so its texts are others of the same distribution; all other ways must give the same
thoughts.

The models are too small for these tasks: compare speed and equality, not what is solved.

    python -m benchmarks.seed [--tasks gsm8k ...] [--problems 2] [--rounds 2] [--chain 4]
        [--rows 8] [--output DIR | --commit]
"""

import argparse
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

import stree_jax as st
from benchmarks.common import Found, main, names, timed
from benchmarks.models import Pair, embedded_pair
from benchmarks.prompts import SHARED
from benchmarks.seed_tasks import TASKS, Arrangement, Blocksworld, Question
from stree_jax.decoding.programs import free_programs
from stree_jax.extensions import reasoning
from stree_jax.measuring.clock import speeds
from stree_jax.measuring.methods import PLAIN
from stree_jax.measuring.report import Table

# Children a node by level, in the paper's table 1.
K_CONFIGS = {
    "gsm8k": ((2, 2, 1), (4, 2, 1, 1)),
    "creative writing": ((2, 2, 1), (4, 2, 1, 1)),
    "blocksworld": ((2, 2, 1, 1), (8, 2, 1, 1, 1)),
}
OPTIONS = {"--tasks": names(K_CONFIGS), "--problems": 2, "--rounds": 2, "--chain": 4, "--rows": 8}
MAX_LENGTH = 1024
ALL = 10**6  # problems at once
# Used in turn if there are no data sets.
BUILT_IN: dict[str, list[Any]] = {
    "gsm8k": [
        Question("Ines picks 14 pears from each of 6 trees and sells 50. How many are left?", "34")
    ],
    "creative writing": [
        "The lamp went out. Nobody had asked the cook. It rained until Monday. The key was in the"
        " jar."
    ],
    "blocksworld": [
        Arrangement(
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
    same: bool = True  # its thoughts must be those without drafts


def tasks(names: Sequence[str], count: int) -> dict[str, tuple[Any, list[Any]]]:
    """Each task and its first problems, from the data sets if they exist."""
    pool, known = BUILT_IN["blocksworld"], BUILT_IN
    if SHARED.is_dir():
        pool = Blocksworld.problems(SHARED / POOL)
        known = {name: TASKS[name].problems(SHARED / FILES[name]) for name in names}
    else:
        print(f"problems: built-in ones, because {SHARED} is absent", flush=True)
    options: dict[str, Any] = {"blocksworld": {"demonstrations": tuple(pool[:1])}}
    return {
        name: (
            TASKS[name](**options.get(name, {})),
            [*itertools.islice(itertools.cycle(known[name]), count)],
        )
        for name in names
    }


def ways_of(draft: st.HybridLM, name: str, chain: int, rows: int, thoughts: int) -> dict[str, Way]:
    """All ways: no drafts, speculative with a chain, then others; `rows` of the largest."""
    drafter, topology = st.ModelDrafter(draft), st.TreeTopology.chain(chain)
    sampled = st.ModelDrafter(draft, child_sampling="without_replacement")
    return {
        PLAIN: Way(1, 1),
        f"speculative, chain of {chain}": Way(1, 1, drafter, topology),
        **{
            f"MCSD {sizes}": Way(1, 1, sampled, st.TreeTopology.from_branching(sizes), same=False)
            for sizes in K_CONFIGS[name]
        },
        f"batch of {thoughts}": Way(thoughts, 1, drafter, topology),
        f"batch of {thoughts}, refill": Way(thoughts, ALL, drafter, topology),
        f"batch of {rows}, refill": Way(rows, ALL, drafter, topology),
        f"batch of {rows}, refill, no drafts": Way(rows, ALL),
    }


def measure(
    pair: Pair, tokenizer: Any, task: Any, problems: list[Any], ways: Mapping[str, Way], rounds: int
) -> list[dict[str, Any]]:
    """A record for each way of `ways_of`, for problems of a task."""

    def search(way: Way, _: None) -> tuple[list[reasoning.Thought], int]:
        drafting = {"drafter": way.drafter, "topology": way.topology}
        scheduler = st.Scheduler(pair.target, rows=way.rows, max_length=MAX_LENGTH, **drafting)
        key = jax.random.key(1)
        thoughts = reasoning.interleaved(
            scheduler, tokenizer, task, problems, key=key, at_once=way.at_once
        )
        return list(thoughts), scheduler.nbytes

    searches = {name: functools.partial(search, way) for name, way in ways.items()}
    found, taken = timed("search", searches, [None], rounds)
    runs = {name: thoughts for name, ((thoughts, _),) in found.items()}
    done = {n: [text.completion for t in run for text in t.written] for n, run in runs.items()}
    tokens = {name: sum(len(each.tokens) for each in texts) for name, texts in done.items()}
    # Every thought and its value, by problem, level and index.
    values = {
        name: {(t.problem, t.level, t.index): (t.parts, t.value, t.kept) for t in run}
        for name, run in runs.items()
    }
    speed = speeds(tokens, taken, PLAIN)
    return [
        {
            "way": name,
            "rows": way.rows,
            "tau": tokens[name] / sum(each.stats.num_target_calls for each in done[name]),
            "bytes_of_rows": found[name][0][1],
            "identical": values[name] == values[PLAIN] if way.same else None,
            "solved": sum(bool(thought.solved) for thought in runs[name]),
            "speed_up": speed[name]["speed_up"],
        }
        for name, way in ways.items()
    ]


def run(options: argparse.Namespace) -> Iterator[Found]:
    """All ways on the first problems of each task."""
    pair = embedded_pair(0)
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    rows: list[dict[str, Any]] = []
    tables, best = [], {}
    columns = {"way": "{way}", "speed-up": "{speed_up[median]:.2f}x", "tau": "{tau:.2f}"}
    columns |= {"bytes of rows": "{bytes_of_rows:,}"}
    for name, (task, problems) in tasks(options.tasks, options.problems).items():
        ways = ways_of(pair.draft, name, options.chain, options.rows, task.thoughts)
        found = measure(pair, tokenizer, task, problems, ways, options.rounds)
        rows += [{"task": name, "problems": len(problems)} | row for row in found]
        free_programs()
        tables.append(Table(name, found, columns | {"same thoughts": "{identical}"}))
        best[name] = max(found, key=lambda row: row["speed_up"]["median"])["way"]
        yield Found(
            {"max_length": MAX_LENGTH, "ways": rows},
            tables,
            wrong=[f"{row['way']}, {row['task']}" for row in rows if row["identical"] is False],
            line={"best": best},
        )


if __name__ == "__main__":
    main(run, OPTIONS)
