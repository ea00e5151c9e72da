"""A generation compiled ahead: its memory is known, and what is timed is the device's work."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import stree_jax as st
from stree_jax.decoding.generate import plan
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.state import DecodeState, Sampling


class Memory(NamedTuple):
    """What a compiled program holds, in bytes."""

    arguments: int
    temporary: int

    @classmethod
    def of(cls, compiled: Any) -> "Memory":
        """From the compiler's own accounts."""
        analysis = compiled.memory_analysis()
        return cls(analysis.argument_size_in_bytes, analysis.temp_size_in_bytes)


class Program:
    """The loop of one request. Prompts must be of one padded width, for one program to do.

    Args:
        model: the target.
        prompts: of one batch.
        **options: of `stree_jax.generate`.
    """

    def __init__(self, model: st.HybridLM, prompts: Sequence[Sequence[int]], **options: Any):
        self._model = model
        self._options = options
        self._plan = plan(model, prompts, **options)
        p = self._plan
        state = self.start(prompts)
        self._run = SpeculativeDecoder.run.lower(
            p.decoder, model, p.drafter, state, p.limits, p.sampling
        ).compile()
        self.memory = Memory.of(self._run)

    def start(self, prompts: Sequence[Sequence[int]], key: jax.Array | None = None) -> DecodeState:
        """The state after reading these prompts, to be run as often as one likes."""
        p = plan(self._model, prompts, **(self._options | ({} if key is None else {"key": key})))
        return p.decoder.start(self._model, p.drafter, p.context, p.keys)

    def run(self, state: DecodeState, temperature: float | None = None) -> DecodeState:
        """The whole generation; waits for it. The state is copied, since the loop donates its own.

        Args:
            state: from `start`.
            temperature: another one than the request's, not 0.
        """
        p = self._plan
        sampling = p.sampling
        if temperature is not None:
            sampling = Sampling(jnp.float32(temperature), *sampling[1:])
        return jax.block_until_ready(
            self._run(self._model, p.drafter, _copied(state), p.limits, sampling)
        )


@jax.jit
def _copied(state: DecodeState) -> DecodeState:
    return jax.tree.map(jnp.copy, state)


def new_tokens(state: DecodeState, before: DecodeState) -> list[list[int]]:
    """What each row has got since `before`."""
    rows, ends = np.asarray(state.context.tokens), np.asarray(state.context.length)
    return [
        row[start:end].tolist()
        for row, start, end in zip(rows, np.asarray(before.context.length), ends, strict=True)
    ]


def tau(states: Sequence[DecodeState]) -> float:
    """Tokens emitted for each target call of a row."""
    emitted = sum(int(state.statistics.emitted.sum()) for state in states)
    return emitted / sum(int(state.statistics.target_calls.sum()) for state in states)
