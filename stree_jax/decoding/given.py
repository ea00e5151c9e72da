"""Checks of what a decode program is given, while it is traced: it has none.

`generate` checks values, and makes these arrays of them; `SpeculativeDecoder` is given them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from stree_jax.decoding.returned import check_arrays, kind_of
from stree_jax.decoding.types import Context, Limits, Sampling


def check_prompts(prompts: Any) -> None:
    """Refuses what is no `Context` of right-padded texts."""
    if not isinstance(prompts, Context):
        raise ValueError(
            "prompts must be a Context(tokens, length) of arrays [B, L] and [B], got"
            f" {kind_of(prompts)}"
        )
    batch = jnp.shape(prompts.length)[:1]
    wanted = {"length": ((None,), jnp.integer), "tokens": ((*batch, None), jnp.integer)}
    check_arrays("prompts must have", prompts, wanted)


def check_keys(keys: Any, batch: int) -> None:
    """Refuses what is not a random key for each row, typed or raw."""
    is_array = isinstance(keys, jax.Array)
    is_raw = is_array and keys.dtype == jnp.uint32
    is_typed = is_array and jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    if not (is_raw or is_typed) or keys.ndim != 1 + is_raw or len(keys) != batch:
        raise ValueError(
            f"keys must be a random key for each of {batch} rows, jax.random.split(key, {batch}),"
            f" got {kind_of(keys)}"
        )


def check_settings(limits: Any, sampling: Any, batch: int) -> None:
    """Refuses limits and sampling settings that are not those of the rows, or of one for all."""
    if not isinstance(limits, Limits):
        raise ValueError(
            "limits must be a Limits(max_new_tokens, eos_tokens) of arrays [B] and [B, Y], got"
            f" {kind_of(limits)}"
        )
    if not isinstance(sampling, Sampling):
        raise ValueError(
            f"sampling must be a Sampling(temperature) of an array [B], got {kind_of(sampling)}"
        )

    def rows(values: Any) -> int:
        return 1 if jnp.shape(values)[:1] == (1,) else batch

    most, ends, heat = limits.max_new_tokens, limits.eos_tokens, sampling.temperature
    wanted: dict[str, Any] = {"max_new_tokens": ((rows(most),), jnp.integer)}
    wanted["eos_tokens"] = (rows(ends), None), jnp.integer
    check_arrays("limits must have", limits, wanted)
    check_arrays("sampling must have", sampling, {"temperature": ((rows(heat),), jnp.floating)})


def check_not_donated(state: Any) -> None:
    """Refuses a state whose arrays another program took."""
    done = state.done
    if not isinstance(done, jax.core.Tracer) and done.is_deleted():
        raise ValueError("the state was donated: use the state that run returned")


def donating(program: Any) -> Any:
    """Decorates a compiled method that donates its state: a state given twice is refused."""

    @functools.wraps(program)
    def call(decoder: Any, model: Any, drafter: Any, state: Any, *more: Any, **named: Any) -> Any:
        check_not_donated(state)
        with jax.transfer_guard("allow"):  # of `max_steps`
            return program(decoder, model, drafter, state, *more, **named)

    compiled: Any = call
    compiled.lower, compiled.trace = program.lower, program.trace
    return compiled
