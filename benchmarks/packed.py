"""How much time and memory does packing the tree save in a whole generation (STree, table 1)?

Beam trees of M beams and N steps, greedy. The same drafts are verified packed, and unrolled into a
row per leaf; the tokens of both are checked against autoregressive decoding. The unrolled batch has
as many rows as the widest tree of the run has leaves, which an engine would not know in advance:
the comparison favours it. Prefill, the same for both, is timed, too. Memory is the temporary memory
of the compiled loop, without weights and caches.

    python -m benchmarks.packed [--beams 2 4] [--steps 4 8] [--prompts 4] [--tokens 100]
        [--rounds 5]
"""

import argparse
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import stree_jax as st
from benchmarks.common import Found, main, timed
from benchmarks.models import Pair, embedded_pair
from benchmarks.steps import Program
from benchmarks.unrolled import UnrolledLM
from stree_jax.decoding.types import DecodeState
from stree_jax.measuring.clock import speeds, summary
from stree_jax.measuring.report import Table

OPTIONS = {"--beams": (2, 4), "--steps": (4, 8), "--prompts": 4, "--tokens": 100, "--rounds": 5}


def most_leaves(program: Program, prompts: Sequence[list[int]]) -> int:
    """The most leaves of a draft tree in the generations of some prompts."""
    trees = [draft.tree.parents[0] for prompt in prompts for draft, _ in program.steps(prompt)]
    return max(len(parents) - len({*parents.tolist()} - {-1}) for parents in trees)


def new_tokens(prompt: Sequence[int], end: DecodeState) -> list[int]:
    """The tokens after the prompt."""
    return end.context.tokens[0, len(prompt) : int(end.context.length[0])].tolist()


def without_drafts(pair: Pair, tokens: int) -> list[list[int]]:
    """The new tokens of each prompt, decoded autoregressively."""
    program = Program(pair.target, pair.prompts[0], max_new_tokens=tokens)
    return [new_tokens(prompt, program(prompt)) for prompt in pair.prompts]


def compared(
    pair: Pair, topology: st.TreeTopology, want: list, tokens: int, rounds: int
) -> dict[str, Any]:
    """Speed and memory of a beam tree, packed and unrolled interleaved; `want`: without drafts."""
    drafting = {"drafter": st.BeamDrafter(pair.draft), "topology": topology}
    compiled = functools.partial(Program, prompt=pair.prompts[0], max_new_tokens=tokens, **drafting)
    packed = compiled(pair.target)
    leaves = most_leaves(packed, pair.prompts)
    unrolled = compiled(UnrolledLM.like(pair.target, leaves, topology.depth + 1))
    programs = {"packed": packed, "unrolled": unrolled}
    ends, taken = timed(f"{topology.width} beams", programs, pair.prompts, rounds)
    statistics = [end.statistics for end in ends["packed"]]
    calls = sum(int(each.target_calls[0]) for each in statistics)
    emitted = sum(int(each.emitted[0]) for each in statistics)
    speed = speeds(dict.fromkeys(programs, emitted), taken, "unrolled")
    texts = [[*map(new_tokens, pair.prompts, ends[name])] for name in programs]
    return {
        "beams": topology.width,
        "steps": topology.depth,
        "nodes": topology.num_nodes,
        "leaves": {"most": leaves},
        "tokens_computed": leaves * (topology.depth + 1),
        "tau": emitted / calls,
        "milliseconds_a_step": {
            name: summary(1e3 * each.sum(axis=1) / calls) for name, each in taken.items()
        },
        "tokens_per_second": {n: each["tokens_per_second"] for n, each in speed.items()},
        "packed_is_faster_by": speed["packed"]["speed_up"]["median"],
        "temporary_bytes": {name: each.temporary for name, each in programs.items()},
        "same_tokens": texts == [want] * 2,
    }


def run(options: argparse.Namespace) -> Iterator[Found]:
    """Beam trees of several sizes, packed and unrolled."""
    pair = embedded_pair(options.prompts)
    want = without_drafts(pair, options.tokens)
    rows = [
        compared(pair, st.TreeTopology.beam(width, depth), want, options.tokens, options.rounds)
        for depth, width in itertools.product(options.steps, options.beams)
    ]
    best = max(rows, key=lambda row: row["nodes"])
    columns = {"N": "{steps}", "M": "{beams}", "nodes": "{nodes}", "tau": "{tau:.2f}"}
    columns |= {"most leaves": "{leaves[most]}"}
    for name in ("packed", "unrolled"):
        columns |= {f"{name}, ms a step": f"{{milliseconds_a_step[{name}][median]:.3g}}"}
        columns |= {f"{name}, bytes": f"{{temporary_bytes[{name}]:,}}"}
    columns |= {"faster by": "{packed_is_faster_by:.2f}x"}
    yield Found(
        pair.settings() | {"rows": rows},
        [Table(pair.name, rows, columns)],
        wrong=[f"{row['nodes']} nodes" for row in rows if not row["same_tokens"]],
        line={"nodes": best["nodes"], "packed_is_faster_by": best["packed_is_faster_by"]},
    )


if __name__ == "__main__":
    main(run, OPTIONS)
