"""`best_token`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from benchmarks.cases.base import Case, Problem, draw
from benchmarks.shapes import HEADS
from pallas_kernels.best_token import pallas_triton as kernel
from pallas_kernels.best_token.reference import best_token as reference


def _operands(problem: Problem) -> tuple[jax.Array, ...]:
    width, vocab_size = problem.shape
    normal = draw(problem)
    return normal(problem.batch, problem.nodes, width), normal(vocab_size, width)


def _call(function: Callable[..., Any]) -> Callable[..., tuple]:
    """`best_token`; returns the best logits, and those that its tokens have."""

    def call(hidden: Any, head: Any, **options: Any) -> tuple:
        token, logit = function(hidden, head, **_options(head), **options)
        rows = head[token].astype("float32")
        have = jnp.einsum("bnm,bnm->bn", hidden.astype("float32"), rows, precision="highest")
        return logit, have

    return call


def _options(head: Any) -> dict[str, Any]:
    return {"vocab_size": head.shape[0], "multiplier": 1.0}


def _truth(hidden: Any, head: Any, _: Any) -> tuple[np.ndarray, ...]:
    _, logit = reference(hidden.reshape(-1, hidden.shape[-1]), head, **_options(head))
    return (logit.reshape(hidden.shape[:2]),) * 2


CASES = {
    "best_token": Case(
        _call(pk.best_token),
        _call(kernel.best_token),
        _operands,
        _truth,
        ("logit", "logit"),
        HEADS,
    ),
}
