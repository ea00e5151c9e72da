"""Trees of thoughts, decoded in several ways. The experiment `benchmarks.seed`."""

import argparse
import collections
import functools
import heapq
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
    reasoning.Question(
        "Ines picks 14 pears from each of 6 trees and sells 50. How many are left?", "34"
    ),
    reasoning.Question("A train leaves every 15 minutes. How many trains leave in 4 hours?", "16"),
)
SENTENCES = (
    "The lamp went out. Nobody had asked the cook. It rained until Monday. The key was in the jar.",
    "He never liked boats. The letter was blue. They sold the piano. Then the bell rang twice.",
)
ARRANGEMENTS = (
    reasoning.Arrangement(
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
    reasoning.Arrangement(
        "the red block is clear, the blue block is clear, the hand is empty, the red block is on"
        " the table and the blue block is on the table",
        "the red block is on top of the blue block",
        ("pick up the red block", "stack the red block on top of the blue block"),
    ),
)


class Way(NamedTuple):
    """A way of decoding a search.

    Attributes:
        rows: number of requests that decode at the same time.
        at_once: number of problems that are searched at the same time.
        drafter, topology: as in `generate`.
        same: whether its thoughts must be those of the autoregressive way.
    """

    rows: int
    at_once: int
    drafter: st.Drafter | None = None
    topology: st.TreeTopology | None = None
    same: bool = True

    def scheduler(self, kind: type[st.Scheduler], target: st.HybridLM) -> Any:
        """An empty scheduler."""
        drafting = {"drafter": self.drafter, "topology": self.topology}
        return kind(target, rows=self.rows, max_length=MAX_LENGTH, **drafting)


class Run(NamedTuple):
    """One search of all problems."""

    thoughts: list[reasoning.Thought]
    requests: dict[int, st.Request]  # by number, with whole prompts
    num_bytes: int

    @property
    def stats(self) -> list[st.DecodeStatistics]:
        """Statistics of each text of both roles."""
        return [text.completion.stats for each in self.thoughts for text in each.written]

    def num_tokens(self, roles: Sequence[str] = ROLES) -> int:
        """Tokens that these roles wrote."""
        texts = (text for each in self.thoughts for text in each.written if text.role in roles)
        return sum(len(text.completion.tokens) for text in texts)

    def texts(self) -> dict[tuple[int, int, int], tuple[Any, ...]]:
        """Every thought and its value, by problem, level and index."""
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
    """Each task and its first problems, from the data sets if they exist."""
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


def replay(target: st.HybridLM, run: Run, way: Way, role: str, _: None) -> int:
    """Decodes the requests of a role again, in groups as in the search; returns their tokens."""
    scheduler = way.scheduler(st.Scheduler, target)
    groups = [
        [run.requests[text.completion.request_id] for branch in group for text in branch]
        for group in run.groups(role)
    ]
    if way.at_once > 1:
        groups = [[request for group in groups for request in group]]
    tokens = 0
    for group in groups:
        for request in group:
            scheduler.submit(request)
        tokens += sum(len(completion.tokens) for completion in scheduler.completions())
    return tokens


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
        scheduler, key = way.scheduler(Recorder, pair.target), jax.random.key(1)
        thoughts = reasoning.interleaved(
            scheduler, tokenizer, task, problems, key=key, at_once=way.at_once
        )
        return Run(list(thoughts), scheduler.requests, scheduler.nbytes)

    searches = {name: functools.partial(search, way) for name, way in ways.items()}
    found, search_seconds = timed("search", searches, [None], rounds)
    runs = {name: run for name, (run,) in found.items()}
    seconds = {name: taken[:, 0] for name, taken in search_seconds.items()}
    replays = {
        f"{name}, {role}": functools.partial(replay, pair.target, runs[PLAIN], way, role)
        for name, way in ways.items()
        for role in ROLES
    }
    tokens, replay_seconds = timed("by role", replays, [None], rounds)
    by_role = {key: replay_seconds[key][:, 0] / tokens[key][0] for key in replays}

    plain, serial = list(ways)[:2]
    wanted, base = runs[plain].texts(), runs[plain].num_tokens() / seconds[plain]

    def speeds(run: Run, seconds: np.ndarray, role_seconds: Sequence[np.ndarray]) -> dict[str, Any]:
        return {
            "speed_up": summary((run.num_tokens() / seconds / base).tolist()),
            "speed_up_by_role": {
                role: summary((by_role[f"{plain}, {role}"] / own).tolist())
                for role, own in zip(ROLES, role_seconds, strict=True)
            },
            "thoughts_per_second": float(np.median(len(run.thoughts) / seconds)),
        }

    rows = []
    for name, way in ways.items():
        run, own = runs[name], [by_role[f"{name}, {role}"] for role in ROLES]
        drafted = sum(stat.num_drafted for stat in run.stats)
        accepted = sum(stat.num_accepted for stat in run.stats)
        rows.append(
            {
                "way": name,
                "rows": way.rows,
                "simulated": False,
                "tau": run.num_tokens() / sum(stat.num_target_calls for stat in run.stats),
                "accepted_of_drafted": accepted / drafted if drafted else None,
                "bytes_of_rows": run.num_bytes,
                "identical": run.texts() == wanted if way.same else None,
                "solved": sum(bool(thought.solved) for thought in run.thoughts),
                "unparsed_values": sum(
                    thought.value is None and thought.level < task.depth for thought in run.thoughts
                ),
            }
            | speeds(run, seconds[name], own)
        )
        if name == serial:
            draft, verify = parts_of_a_step(pair, way, run.requests[0].prompt)
            # Prefill is not part of the schedule, and takes as long as before.
            saved = {role: queue_saves(run, [role], draft, verify) for role in ROLES}
            own = [
                each - saved[role] / run.num_tokens([role])
                for role, each in zip(ROLES, own, strict=True)
            ]
            rows.append(
                rows[-1]
                | {"way": QUEUE, "simulated": True}
                | {"seconds_draft": draft, "seconds_verify": verify}
                | speeds(run, seconds[name] - sum(saved.values()), own)
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
    columns = {"way": "{way}", "speed-up": "{speed_up[median]:.2f}x", "tau": "{tau:.2f}"}
    columns |= {role: f"{{speed_up_by_role[{role}][median]:.2f}}x" for role in ROLES}
    columns |= {"thoughts/s": "{thoughts_per_second:.2f}", "bytes of rows": "{bytes_of_rows:,}"}
    for name, (task, problems) in tasks(options.tasks, options.problems).items():
        ways = ways_of(pair.draft, name, options.chain, options.rows, task.thoughts)
        found = measure(pair, tokenizer, task, problems, ways, options.rounds)
        rows += [{"task": name, "problems": len(problems)} | row for row in found]
        forget_programs()
        tables.append(Table(name, found, columns | {"same thoughts": "{identical}"}))
        speed = {row["way"]: row["speed_up"]["median"] for row in found}
        panels.append(Panel(y="tokens per second, autoregressive = 1", bars={name: speed}))
        measured = {row["way"]: speed[row["way"]] for row in found if not row["simulated"]}
        best[name] = max(measured, key=measured.__getitem__)
        yield Found(
            {"max_length": MAX_LENGTH, "ways": rows},
            tables,
            panels,
            wrong=[f"{row['way']}, {row['task']}" for row in rows if row["identical"] is False],
            line={"best": best},
        )
