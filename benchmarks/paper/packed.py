"""How much time and memory does packing the tree save in a whole generation (STree, table 1)?

Beam trees of M beams and N steps, greedy. The same drafts are verified packed, and unrolled into a
row per leaf; the tokens of both are checked against autoregressive decoding. The unrolled batch has
as many rows as the widest tree of the run has leaves, which an engine would not know in advance:
the comparison favours it. Memory is the temporary memory of the compiled loop, without weights and
caches.

    python -m benchmarks.packed [--pair embedded|random] [--beams 2 3 4 5] [--steps 4 8 16]
"""

import argparse
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

import stree_jax as st
from benchmarks.common import (
    conclude,
    interleaved,
    machine,
    plotted,
    print_table,
    read_options,
    save,
    summary,
)
from benchmarks.models import Pair, add_pair_options, chosen_pair, num_bytes, on_gpu
from benchmarks.paper.generation import Program, new_tokens, tau
from benchmarks.paper.unrolled import UnrolledLM


class CountedLeaves(NamedTuple):
    """A drafter's state, and the numbers of leaves of the trees it has drafted."""

    inner: Any
    most: jax.Array  # [B]
    total: jax.Array  # [B]


class LeafCounter(st.BeamDrafter):
    """Beam search that counts the leaves of its trees."""

    def prepare(self, *arguments: Any) -> CountedLeaves:
        """See `Drafter`."""
        zeros = jnp.zeros(arguments[0].length.shape, jnp.int32)
        return CountedLeaves(super().prepare(*arguments), zeros, zeros)

    def propose(self, state: CountedLeaves, *arguments: Any, **options: Any) -> tuple:
        """See `Drafter`."""
        draft, inner = super().propose(state.inner, *arguments, **options)
        is_child = draft.tree.parents[:, :, None] == jnp.arange(draft.tokens.shape[1])
        leaves = (~is_child.any(axis=1)).sum(axis=-1, dtype=jnp.int32)
        most, total = jnp.maximum(state.most, leaves), state.total + leaves
        return draft, CountedLeaves(inner, most, total)

    def commit(self, state: CountedLeaves, *arguments: Any) -> CountedLeaves:
        """See `Drafter`."""
        return state._replace(inner=super().commit(state.inner, *arguments))


class Comparison:
    """Packed and unrolled generations of a pair.

    Args:
        pair: target, draft and prompts, which are decoded one at a time.
        tokens: to generate after each prompt.
    """

    def __init__(self, pair: Pair, tokens: int):
        self._pair, self._tokens = pair, tokens
        self._drafter = LeafCounter(pair.draft)
        plain = Program(pair.target, pair.prompts[:1], max_new_tokens=tokens)
        self._want = [new_tokens(plain.run(s), s) for s in (plain.start([p]) for p in pair.prompts)]

    def measure(self, num_beams: int, num_steps: int, rounds: int) -> dict[str, Any]:
        """Speed and memory with beam trees, packed and unrolled interleaved.

        Args:
            num_beams, num_steps: of the tree.
            rounds: times that all prompts are decoded.
        """
        pair = self._pair
        options = dict(
            max_new_tokens=self._tokens,
            drafter=self._drafter,
            topology=st.TreeTopology.beam(num_beams, num_steps),
        )
        programs = {"packed": Program(pair.target, pair.prompts[:1], **options)}
        starts = {"packed": [programs["packed"].start([p]) for p in pair.prompts]}
        ends = {"packed": [programs["packed"].run(start) for start in starts["packed"]]}
        leaves = max(int(end.drafter.most[0]) for end in ends["packed"])
        unrolled = UnrolledLM.like(pair.target, leaves, num_steps + 1)
        programs["unrolled"] = Program(unrolled, pair.prompts[:1], **options)
        starts["unrolled"] = [programs["unrolled"].start([p]) for p in pair.prompts]
        ends["unrolled"] = [programs["unrolled"].run(start) for start in starts["unrolled"]]

        def decode_all(name: str) -> Any:
            return lambda: [programs[name].run(start) for start in starts[name]]

        seconds = interleaved({name: decode_all(name) for name in programs}, rounds, _nothing)
        calls = sum(int(end.statistics.target_calls[0]) for end in ends["packed"])
        emitted = sum(int(end.statistics.emitted[0]) for end in ends["packed"])
        total_leaves = sum(int(end.drafter.total[0]) for end in ends["packed"])
        return {
            "beams": num_beams,
            "steps": num_steps,
            "nodes": 1 + num_beams * num_steps,
            "leaves": {"mean": total_leaves / calls, "most": leaves},
            "tokens_computed": leaves * (num_steps + 1),
            "tau": tau(ends["packed"]),
            "milliseconds_a_step": {
                name: summary([1e3 * value / calls for value in values])
                for name, values in seconds.items()
            },
            "tokens_per_second": {
                name: summary([emitted / value for value in values])
                for name, values in seconds.items()
            },
            "packed_is_faster_by": float(
                np.median(np.divide(seconds["unrolled"], seconds["packed"]))
            ),
            "temporary_bytes": {
                name: program.memory.temporary for name, program in programs.items()
            },
            "same_tokens": all(
                [new_tokens(end, start) for start, end in zip(starts[n], ends[n], strict=True)]
                == self._want
                for n in programs
            ),
        }


def _nothing() -> None:
    pass


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Time of a step and memory against the number of nodes."""
    with plotted(path, 2, 10, 4) as (left, right):
        nodes = [row["nodes"] for row in rows]
        for name in ("packed", "unrolled"):
            times = [row["milliseconds_a_step"][name]["median"] for row in rows]
            memory = [row["temporary_bytes"][name] / 2**20 for row in rows]
            left.plot(nodes, times, "o", label=name)
            right.plot(nodes, memory, "o", label=name)
        left.set(xlabel="nodes of the beam tree", ylabel="ms a step, drafting included", ylim=0)
        right.set(xlabel="nodes of the beam tree", ylabel="temporary MiB of the loop", ylim=0)
        left.legend()


def main() -> None:
    """Measures, prints the table, and writes JSON and plot."""
    gpu = on_gpu()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_pair_options(parser)
    parser.add_argument("--beams", type=int, nargs="+", default=(2, 3, 4, 5) if gpu else (2, 4))
    parser.add_argument("--steps", type=int, nargs="+", default=(4, 8, 16) if gpu else (4, 8))
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    options = read_options(parser, plots=True)
    pair = chosen_pair(options, options.prompts)
    comparison = Comparison(pair, options.tokens)
    sizes = list(itertools.product(options.steps, options.beams))
    rows = [
        comparison.measure(num_beams, num_steps, options.rounds)
        for num_steps, num_beams in track(sizes, transient=True)
    ]
    where = machine()
    # bfloat16 rounds differently for another number of rows, which flips near ties of logits.
    exact = pair.target.dtype == jnp.float32
    same = all(row["same_tokens"] for row in rows)
    results = pair.settings() | {
        "machine": where,
        "weight_bytes": num_bytes(pair.target) + num_bytes(pair.draft),
        "tokens": options.tokens,
        "rounds": options.rounds,
        "rows": rows,
    }
    measure_of = {"tokens/s": "tokens_per_second", "ms a step": "milliseconds_a_step"}
    unit = "tokens/s" if pair.trained else "ms a step"
    print_table(
        f"{pair.name}, {where['device']}, packed and unrolled ({pair.note()})",
        (
            *("N", "M", "nodes", "leaves", "at most"),
            *(f"{name}, {unit}" for name in ("packed", "unrolled")),
            *("faster by", "MiB", "MiB", "tau"),
        ),
        [
            (
                row["steps"],
                row["beams"],
                row["nodes"],
                row["leaves"]["mean"],
                row["leaves"]["most"],
                *(row[measure_of[unit]][name]["median"] for name in ("packed", "unrolled")),
                f"{row['packed_is_faster_by']:.2f}x",
                *(row["temporary_bytes"][name] / 2**20 for name in ("packed", "unrolled")),
                f"{row['tau']:.2f}" if pair.trained else "-",
            )
            for row in rows
        ],
    )
    path = save("packed", __doc__, results, options.output)
    plot(rows, path.with_suffix(".png"))
    best = max(rows, key=lambda row: row["nodes"])
    conclude(
        "packed",
        passed=same or not exact,
        nodes=best["nodes"],
        packed_is_faster_by=round(best["packed_is_faster_by"], 3),
        same_tokens=same,
        results=str(path),
    )
