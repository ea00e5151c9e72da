"""Choosing the children of a node, for all drafters with models or heads."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.numerics import best_of
from stree_jax.array_types import Array, Bool, Float, Float32, Int
from stree_jax.decoding.sampling import all_finite, best_tokens, filtered_logits, token_log_probs
from stree_jax.decoding.types import Step
from stree_jax.decoding.verifiers import CHILD_SAMPLING
from stree_jax.messages import shown


def check_child_sampling(value: str, known: Sequence[str] = CHILD_SAMPLING) -> None:
    """Refuses child samplings that a drafter does not have; all have "auto"."""
    if value not in ("auto", *known):
        others = repr(known[0]) if len(known) == 1 else f"one of {tuple(known)}"
        raise ValueError(f"child_sampling must be 'auto' or {others}, got {shown(value)}")


def chosen_child_sampling(value: str, *, temperature_is_zero: bool) -> str:
    """One of `CHILD_SAMPLING`, where "auto" is top-k at temperature 0 and shared above it."""
    if value == "auto":
        return "top_k" if temperature_is_zero else "shared"
    if temperature_is_zero and value != "top_k":
        raise ValueError(
            f"child_sampling = {value!r} needs temperature > 0; use 'auto' at temperature 0"
        )
    return value


def shared_scores(
    logits: Float[Array, "B Z V"], step: Step, depth: int | np.ndarray | Array
) -> Float32[Array, "B Z V"]:
    """Log-probabilities at nodes, up to a constant, plus the target's noise at their depths."""
    assert step.noise is not None  # `chosen_child_sampling` refuses temperature 0
    noise = jnp.take(step.noise, jnp.atleast_1d(depth), axis=1)
    return filtered_logits(logits, step.sampling) + noise


def drawn_children(
    how: str,
    logits: Float[Array, "B Z V"],
    width: int,
    step: Step,
    depth: int | np.ndarray | Array,
    keys: Array,
) -> tuple[Int[Array, "B Z width"], Bool[Array, "B Z width"], Float32[Array, "B Z V"] | None]:
    """Returns `draw` by a drafter's logits, and the distributions that it sampled from."""
    log_probs = None
    if how == "shared":
        logits = shared_scores(logits, step, depth)
    elif how != "top_k":
        logits = log_probs = token_log_probs(logits, step.sampling)
    return *draw(how, logits, width, keys), log_probs


def draw(how: str, scores: Array, width: int, keys: Array) -> tuple[Array, Array]:
    """`width` children of each node, best first or in the order drawn.

    Tokens `[B, Z, width]`, and which are valid: the first is if the scores `[B, Z, V]` are finite.
    """
    if how == "iid":
        shape = (width, *scores.shape[1:-1])
        drawn = jax.vmap(lambda key, row: jax.random.categorical(key, row, shape=shape))(
            keys, scores
        )
        drawn = jnp.moveaxis(drawn, 1, -1).astype(jnp.int32)
        return drawn, jnp.broadcast_to(all_finite(scores)[..., None], drawn.shape)
    if how == "without_replacement":
        # Gumbel-top-k: the order of the perturbed scores is the order of sequential draws.
        scores += jax.vmap(lambda key: jax.random.gumbel(key, scores.shape[1:], jnp.float32))(keys)
    # A NaN must come first, and how `top_k` orders it depends on the device.
    scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
    if width == 1:  # a third of the time of `top_k` on a CPU
        drawn, best = (part[..., None] for part in best_of(scores))
    else:
        best, drawn = best_tokens(scores, width)
    return drawn, jnp.isfinite(best)
