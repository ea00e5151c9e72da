"""A generation compiled ahead of time: its memory is known, and Python is not timed."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import stree_jax as st
from benchmarks.common import Memory, summary, timed
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.options import plan
from stree_jax.decoding.types import DecodeState


class Program:
    """The loop of one request, compiled. All prompts must have the same padded width.

    Args:
        model: the target.
        prompts: token ids of each row of the batch.
        **options: those of `stree_jax.generate`; rows run to `max_new_tokens`, past any end token.
    """

    def __init__(self, model: st.HybridLM, prompts: Sequence[Sequence[int]], **options: Any):
        self._model = model
        self._options = options | {"eos_token": ()}
        self._plan = plan(model, prompts, **self._options)
        p = self._plan
        state = self.start(prompts)
        self._run = SpeculativeDecoder.run.lower(
            p.decoder, model, p.drafter, state, p.limits, p.sampling
        ).compile()
        self.memory = Memory.of(self._run)

    def start(self, prompts: Sequence[Sequence[int]]) -> DecodeState:
        """The state after the prefill of these prompts; `run` does not consume it."""
        p = plan(self._model, prompts, **self._options)
        return p.decoder.start(self._model, p.drafter, p.context, p.keys)

    def run(self, state: DecodeState) -> DecodeState:
        """Runs the whole generation and blocks. The loop donates a copy of the state."""
        p = self._plan
        return jax.block_until_ready(
            self._run(self._model, p.drafter, _copied(state), p.limits, p.sampling)
        )


@jax.jit
def _copied(state: DecodeState) -> DecodeState:
    return jax.tree.map(jnp.copy, state)


class Timed(NamedTuple):
    """A program's generations."""

    ends: list[DecodeState]  # final states
    texts: list[list[list[int]]]  # new tokens of the rows of each
    seconds: np.ndarray  # [rounds, generations]

    def counts(self, name: str) -> np.ndarray:
        """A statistic of each generation, summed over its rows."""
        return np.array([int(getattr(end.statistics, name).sum()) for end in self.ends])

    def tau(self) -> float:
        """Tokens emitted per target call."""
        return float(self.counts("emitted").sum() / self.counts("target_calls").sum())

    def record(self, plain: "Timed") -> dict[str, Any]:
        """Tau, speed, and speed and tokens relative to those of autoregressive decoding."""
        mine, reference = (each.counts("emitted") / each.seconds for each in (self, plain))
        return {
            "tau": self.tau(),
            "tokens_per_second": summary(mine.ravel()),
            "speed_up": summary((mine / reference).ravel()),
            "same_tokens": self.texts == plain.texts,
        }


def timed_programs(
    title: str,
    programs: Mapping[str, Program],
    batches: Sequence[Sequence[Sequence[int]]],
    rounds: int,
) -> dict[str, Timed]:
    """Runs all programs on all batches of prompts, interleaved; the prefill is not timed."""
    starts = {name: [*map(program.start, batches)] for name, program in programs.items()}

    def decode(name: str, number: int) -> DecodeState:
        return programs[name].run(starts[name][number])

    ways = {name: functools.partial(decode, name) for name in programs}
    ends, seconds = timed(title, ways, range(len(batches)), rounds)
    return {
        name: Timed(ends[name], [*map(new_tokens, ends[name], starts[name])], seconds[name])
        for name in programs
    }


def new_tokens(state: DecodeState, before: DecodeState) -> list[list[int]]:
    """The tokens of each row that are new since `before`."""
    rows, ends = np.asarray(state.context.tokens), np.asarray(state.context.length)
    return [
        row[start:end].tolist()
        for row, start, end in zip(rows, np.asarray(before.context.length), ends, strict=True)
    ]
