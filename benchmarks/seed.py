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
thoughts. By role (table 2 of the paper): the requests of one role alone, again.

The models are too small for these tasks. Look at speed and equality, not at what is solved.

    python -m benchmarks.seed [--tasks gsm8k ...] [--problems 2] [--rounds 2] [--chain 4]
        [--rows 8] [--output DIR | --commit]
"""

import argparse
import collections
import heapq
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import stree_jax as st
from benchmarks.common import (
    conclude,
    forget_programs,
    machine,
    plotted,
    print_table,
    progress_bar,
    read_options,
    save,
    summary,
)
from benchmarks.prompts import SHARED
from stree_jax.extensions import reasoning
from stree_jax.extensions.reasoning import Arrangement, Question
from stree_jax.tuning import measure_costs

PLAIN, QUEUE = "autoregressive", "SEED's queue (simulated)"
ROLES = ("generator", "evaluator")
# Children a node by level, in the paper's table 1.
K_CONFIGS = {
    "gsm8k": ((2, 2, 1), (4, 2, 1, 1)),
    "creative writing": ((2, 2, 1), (4, 2, 1, 1)),
    "blocksworld": ((2, 2, 1, 1), (8, 2, 1, 1, 1)),
}
MAX_LENGTH = 1024
# Used if there are no data sets.
QUESTIONS = (
    Question("Ines picks 14 pears from each of 6 trees and sells 50. How many are left?", "34"),
    Question("A train leaves every 15 minutes. How many trains leave in 4 hours?", "16"),
)
SENTENCES = (
    "The lamp went out. Nobody had asked the cook. It rained until Monday. The key was in the jar.",
    "He never liked boats. The letter was blue. They sold the piano. Then the bell rang twice.",
)
ARRANGEMENTS = (
    Arrangement(
        "the red block is clear, the hand is empty, the red block is on top of the blue block and"
        " the blue block is on the table",
        "the blue block is on top of the red block",
        (
            "unstack the red block from on top of the blue block",
            "put down the red block",
            "pick up the blue block",
            "stack the blue block on top of the red block",
        ),
    ),
    Arrangement(
        "the red block is clear, the blue block is clear, the hand is empty, the red block is on"
        " the table and the blue block is on the table",
        "the red block is on top of the blue block",
        ("pick up the red block", "stack the red block on top of the blue block"),
    ),
)


class Way(NamedTuple):
    """A way of decoding a search.

    Attributes:
        rows: of the scheduler.
        at_once: problems that are searched at the same time.
        drafter, topology: as in `generate`.
        same: its thoughts must be those of the autoregressive way.
    """

    rows: int
    at_once: int
    drafter: st.Drafter | None = None
    topology: st.TreeTopology | None = None
    same: bool = True


class Run(NamedTuple):
    """What one search of all problems gave."""

    seconds: float
    thoughts: list[reasoning.Thought]
    requests: dict[int, st.Request]  # by number, with whole prompts
    num_bytes: int

    @property
    def written(self) -> list[reasoning.Written]:
        """All texts of both roles."""
        return [text for thought in self.thoughts for text in thought.written]

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(len(text.completion.tokens) for text in self.written)

    def texts(self) -> dict[tuple[int, int, int], tuple[Any, ...]]:
        """Every thought and its value, by its place."""
        return {(t.problem, t.level, t.index): (t.parts, t.value, t.kept) for t in self.thoughts}

    def groups(self, role: str) -> list[list[list[reasoning.Written]]]:
        """The texts of a role, by branch, of each level of each problem."""
        found: dict[tuple[int, int], list[list[reasoning.Written]]] = collections.defaultdict(list)
        for thought in sorted(self.thoughts, key=lambda t: (t.problem, t.level, t.index)):
            branch = [text for text in thought.written if text.role == role]
            if branch:
                found[thought.problem, thought.level].append(branch)
        return list(found.values())


class Recorder(st.Scheduler):
    """A scheduler that remembers what was submitted."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.requests: dict[int, st.Request] = {}

    def submit(self, request: st.Request) -> int:
        """As `Scheduler`."""
        number = super().submit(request)
        text = list(request.prompt)
        if request.after is not None:
            tokens, length = request.after.context
            text = [*np.asarray(tokens)[0, : int(length[0])].tolist(), *text]
        self.requests[number] = st.Request(
            text,
            max_new_tokens=request.max_new_tokens,
            temperature=request.temperature,
            eos_token=request.eos_token,
            key=request.key,
        )
        return number


def queue_makespan(rounds: Sequence[int], draft: float, verify: float) -> float:
    """SEED's schedule: drafts run side by side, the target verifies in the order of their ends.

    Args:
        rounds: verifications of each branch.
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


def queue_saves(run: Run, roles: Sequence[str], draft: float, verify: float) -> float:
    """Seconds that the queue takes less than one branch after another."""
    saved = 0.0
    for role in roles:
        for group in run.groups(role):
            rounds = [
                sum(text.completion.stats.num_target_calls for text in branch) for branch in group
            ]
            saved += sum(rounds) * (draft + verify) - queue_makespan(rounds, draft, verify)
    return saved


def tasks(names: Sequence[str], count: int) -> dict[str, tuple[Any, list[Any]]]:
    """Each task, and its first problems: of the data sets if they are there."""
    found: dict[str, tuple[Any, list[Any]]] = {}
    if SHARED.is_dir():
        blocks = SHARED / "blocksworld"
        pool = reasoning.Blocksworld.problems(blocks / "prompts" / "pool_prompt_v2_step_6.json")
        known = {
            "gsm8k": lambda: reasoning.Gsm8k.problems(SHARED / "gsm8k" / "test.jsonl"),
            "creative writing": lambda: reasoning.CreativeWriting.problems(
                SHARED / "creative_writing" / "data_100_random_text.txt"
            ),
            "blocksworld": lambda: reasoning.Blocksworld.problems(
                blocks / "split_v2_step_6_selfcontained.jsonl"
            ),
        }
    else:
        print(f"problems: built-in ones, because {SHARED} is absent", flush=True)
        pool = list(ARRANGEMENTS)
        known = {
            "gsm8k": lambda: list(QUESTIONS),
            "creative writing": lambda: list(SENTENCES),
            "blocksworld": lambda: list(ARRANGEMENTS),
        }
    for name in names:
        options = {"demonstrations": tuple(pool[:1])} if name == "blocksworld" else {}
        found[name] = reasoning.TASKS[name](**options), known[name]()[:count]
    return found


def ways_of(draft: st.HybridLM, name: str, chain: int, rows: int, thoughts: int) -> dict[str, Way]:
    """All that are measured; `rows` are those of the largest batch."""
    drafter, topology = st.ModelDrafter(draft), st.TreeTopology.chain(chain)
    sampled = st.ModelDrafter(draft, child_sampling="without_replacement")
    many = 10**6
    return {
        PLAIN: Way(1, 1),
        f"speculative, chain of {chain}": Way(1, 1, drafter, topology),
        **{
            f"MCSD {k_config}": Way(
                1, 1, sampled, st.TreeTopology.from_branching(k_config), same=False
            )
            for k_config in K_CONFIGS[name]
        },
        f"batch of {thoughts}": Way(thoughts, 1, drafter, topology),
        f"batch of {thoughts}, refill": Way(thoughts, many, drafter, topology),
        f"batch of {rows}, refill": Way(rows, many, drafter, topology),
        f"batch of {rows}, refill, no drafts": Way(rows, many),
    }


def search(
    target: st.HybridLM, tokenizer: Any, task: Any, problems: Sequence[Any], way: Way
) -> Run:
    """All problems, timed."""
    scheduler = Recorder(
        target,
        rows=way.rows,
        max_length=MAX_LENGTH,
        drafter=way.drafter,
        topology=way.topology,
    )
    began = time.perf_counter()
    thoughts = list(
        reasoning.interleaved(
            scheduler, tokenizer, task, problems, key=jax.random.key(1), at_once=way.at_once
        )
    )
    return Run(time.perf_counter() - began, thoughts, scheduler.requests, scheduler.nbytes)


def replay(target: st.HybridLM, run: Run, role: str, way: Way) -> float:
    """Seconds a token of the requests of one role, in groups as in the search."""
    scheduler = st.Scheduler(
        target,
        rows=way.rows,
        max_length=MAX_LENGTH,
        drafter=way.drafter,
        topology=way.topology,
    )
    groups = [
        [run.requests[text.completion.request_id] for branch in group for text in branch]
        for group in run.groups(role)
    ]
    if way.at_once > 1:
        groups = [[request for group in groups for request in group]]
    tokens, began = 0, time.perf_counter()
    for group in groups:
        for request in group:
            scheduler.submit(request)
        tokens += sum(len(completion.tokens) for completion in scheduler.completions())
    return (time.perf_counter() - began) / tokens


def measure(
    target: st.HybridLM,
    tokenizer: Any,
    task: Any,
    problems: Sequence[Any],
    ways: dict[str, Way],
    *,
    rounds: int,
    advance: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """A row for each way, and one for SEED's queue behind the speculative one.

    Args:
        target: the model.
        tokenizer: its own.
        task: of `stree_jax.extensions.reasoning`.
        problems: of the task.
        ways: autoregressive, then speculative with a chain, then others.
        rounds: timed runs of each way.
        advance: called `len(ways) * (3 * rounds + 1)` times.
    """
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    by_role: dict[str, dict[str, list[float]]] = {
        name: {role: [] for role in ROLES} for name in ways
    }
    recorded: Run | None = None
    for number in range(rounds + 1):  # the first one compiles
        for name, way in ways.items():
            run = search(target, tokenizer, task, problems, way)
            recorded = recorded or run
            advance()
            if number:
                runs[name].append(run)
                for role in ROLES:
                    by_role[name][role].append(replay(target, recorded, role, way))
                    advance()

    plain, serial = list(ways)[:2]
    chain = ways[serial].topology
    assert chain is not None
    assert ways[serial].drafter is not None
    prompt = runs[plain][0].requests[0].prompt
    costs = measure_costs(
        target,
        ways[serial].drafter,
        prompt,
        max_nodes=chain.num_nodes,
        max_depth=chain.depth,
        temperature=1.0,
        key=jax.random.key(0),
    )
    verify = float(np.interp(chain.num_nodes, [*costs.target], [*costs.target.values()]))
    draft = costs.step(chain) - verify

    wanted = runs[plain][0].texts()

    def speeds(name: str) -> np.ndarray:
        return np.array([run.num_tokens / run.seconds for run in runs[name]])

    base = speeds(plain)
    rows = []
    for name, way in ways.items():
        run = runs[name][0]
        stats = [text.completion.stats for text in run.written]
        calls = sum(stat.num_target_calls for stat in stats)
        drafted = sum(stat.num_drafted for stat in stats)
        accepted = sum(stat.num_accepted for stat in stats)
        rows.append(
            {
                "way": name,
                "rows": way.rows,
                "simulated": False,
                "speed_up": summary((speeds(name) / base).tolist()),
                "speed_up_by_role": {
                    role: summary(np.divide(by_role[plain][role], by_role[name][role]).tolist())
                    for role in ROLES
                },
                "tau": run.num_tokens / calls,
                "accepted_of_drafted": accepted / drafted if drafted else None,
                "thoughts_per_second": float(
                    np.median([len(r.thoughts) / r.seconds for r in runs[name]])
                ),
                "bytes_of_rows": run.num_bytes,
                "identical": run.texts() == wanted if way.same else None,
                "solved": sum(bool(thought.solved) for thought in run.thoughts),
                "unparsed_values": sum(
                    thought.value is None and thought.level < task.depth for thought in run.thoughts
                ),
            }
        )
        if name != serial:
            continue
        # Reading prompts is not part of the schedule, and takes as long as before.
        saved = queue_saves(run, ROLES, draft, verify)
        seconds = np.array([r.seconds for r in runs[name]])
        role_seconds = {
            role: np.array(by_role[name][role])
            - queue_saves(run, [role], draft, verify) / role_tokens(run, role)
            for role in ROLES
        }
        rows.append(
            rows[-1]
            | {
                "way": QUEUE,
                "simulated": True,
                "seconds_draft": draft,
                "seconds_verify": verify,
                "speed_up": summary((speeds(name) * seconds / (seconds - saved) / base).tolist()),
                "speed_up_by_role": {
                    role: summary((by_role[plain][role] / role_seconds[role]).tolist())
                    for role in ROLES
                },
                "thoughts_per_second": float(np.median(len(run.thoughts) / (seconds - saved))),
                # Each branch has a cache of the target and one of the draft.
                "bytes_of_rows": task.thoughts * run.num_bytes,
            }
        )
    return rows


def role_tokens(run: Run, role: str) -> int:
    """Tokens that a role wrote."""
    return sum(len(text.completion.tokens) for text in run.written if text.role == role)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Speed-up of each way, by task."""
    names = list(dict.fromkeys(row["task"] for row in rows))
    with plotted(path, len(names), 5 * len(names), 4.5) as axes:
        for axis, name in zip(np.atleast_1d(axes), names, strict=True):
            part = [row for row in rows if row["task"] == name][::-1]
            axis.barh(
                [row["way"] for row in part],
                [row["speed_up"]["median"] for row in part],
                color=["lightgray" if row["simulated"] else "tab:blue" for row in part],
            )
            axis.axvline(1, color="black", linewidth=0.8)
            axis.set(title=name, xlabel="tokens per second, autoregressive = 1")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the tables, and writes JSON and plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=reasoning.TASKS, default=[*reasoning.TASKS])
    parser.add_argument("--problems", type=int, default=2, help="of each task")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--chain", type=int, default=4, help="drafts of a chain")
    parser.add_argument("--rows", type=int, default=8, help="of the largest batch")
    options = read_options(parser, arguments, plots=True)
    target = st.from_pretrained(st.demo_path("target"))
    draft = st.from_pretrained(st.demo_path("draft"))
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    chosen = tasks(options.tasks, options.problems)
    where = machine()  # before anything loads it
    all_ways = {
        name: ways_of(draft, name, options.chain, options.rows, task.thoughts)
        for name, (task, _) in chosen.items()
    }
    rows: list[dict[str, Any]] = []
    with progress_bar() as progress:
        total = sum(map(len, all_ways.values())) * (3 * options.rounds + 1)
        bar = progress.add_task("", total=total)
        for name, (task, problems) in chosen.items():
            progress.update(bar, description=name)
            found = measure(
                target,
                tokenizer,
                task,
                problems,
                all_ways[name],
                rounds=options.rounds,
                advance=lambda: progress.advance(bar),
            )
            rows += [{"task": name, "problems": len(problems)} | row for row in found]
            results = {
                "machine": where,
                "rounds": options.rounds,
                "chain": options.chain,
                "max_length": MAX_LENGTH,
                "ways": rows,
            }
            path = save("seed", __doc__, results, options.output)  # what there is so far
            forget_programs()

    for name in chosen:
        part = [row for row in rows if row["task"] == name]
        print_table(
            f"{name}: {part[0]['problems']} problems, {where['device']}; solved"
            f" {part[0]['solved']}, values not read {part[0]['unparsed_values']} (autoregressive)",
            (
                "way",
                "speed-up",
                *ROLES,
                "tau",
                "accepted",
                "thoughts/s",
                "MB of rows",
                "same thoughts",
            ),
            [
                (
                    row["way"],
                    f"{row['speed_up']['median']:.2f}x",
                    *(f"{row['speed_up_by_role'][role]['median']:.2f}x" for role in ROLES),
                    f"{row['tau']:.2f}",
                    "-"
                    if row["accepted_of_drafted"] is None
                    else f"{row['accepted_of_drafted']:.2f}",
                    f"{row['thoughts_per_second']:.2f}",
                    f"{row['bytes_of_rows'] / 1e6:.1f}",
                    {True: "yes", False: "NO", None: "in distribution"}[row["identical"]],
                )
                for row in part
            ],
        )
    same = all(row["identical"] is not False for row in rows)
    plot(rows, path.with_suffix(".png"))
    best = {
        name: max(
            (row for row in rows if row["task"] == name and not row["simulated"]),
            key=lambda row: row["speed_up"]["median"],
        )
        for name in chosen
    }
    conclude(
        "seed",
        passed=same,
        same_thoughts=same,
        best={
            name: [row["way"], round(row["speed_up"]["median"], 3)] for name, row in best.items()
        },
        results=str(path),
    )


if __name__ == "__main__":
    main()
