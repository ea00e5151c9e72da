"""`expert_mlps`, for the nodes of a tree and for a chunk of a prompt."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

import pallas_kernels as pk
from benchmarks.cases.base import Case, Problem, draw
from benchmarks.shapes import EXPERTS
from pallas_kernels.moe import pallas_triton as kernel
from pallas_kernels.moe.reference import expert_mlps as reference

PROMPT = "expert_mlps of a prompt"
_POSITIONS_PER_NODE = 8  # 64 nodes: the 512 tokens of a chunk of a prompt


def _operands(problem: Problem) -> tuple[jax.Array, ...]:
    """Random choices; matrices scaled as in a model."""
    width, hidden, experts, active, gated = problem.shape
    normal, tokens = draw(problem), problem.batch * problem.nodes
    weights, chosen = lax.top_k(normal(tokens, experts, dtype="float32"), active)
    columns = 2 * hidden if gated else hidden
    return (
        normal(tokens, width),
        jax.nn.softmax(weights, axis=1),
        chosen,
        normal(experts, width, columns) * width**-0.5,
        normal(experts, hidden, width) * hidden**-0.5,
    )


def _prompt_operands(problem: Problem) -> tuple[jax.Array, ...]:
    return _operands(problem._replace(nodes=_POSITIONS_PER_NODE * problem.nodes))


def expert_options(operands: tuple) -> dict[str, Any]:
    """Options for these operands: gated experts use silu (Granite), others relu2 (Nemotron)."""
    *_, experts_in, experts_out = operands
    gated = experts_in.shape[2] != experts_out.shape[1]
    return {"activation": "silu" if gated else "relu2", "gated": gated}


def _call(function: Callable[..., Any]) -> Callable[..., jax.Array]:
    def call(*operands: Any, **options: Any) -> jax.Array:
        return function(*operands, **expert_options(operands), **options)

    return call


def _truth(*operands: Any) -> tuple[np.ndarray]:
    *operands, _ = operands
    return (reference(*operands, **expert_options(operands)),)


def _unread(operands: tuple) -> int:
    """The matrices of experts that no token has chosen."""
    *_, chosen, experts_in, experts_out = operands
    unread = len(experts_in) - len(np.unique(chosen))
    return unread * (experts_in.nbytes + experts_out.nbytes) // len(experts_in)


_TREE = Case(
    _call(pk.expert_mlps),
    _call(kernel.expert_mlps),
    _operands,
    _truth,
    ("experts",),
    EXPERTS,
    unread=_unread,
)
CASES = {"expert_mlps": _TREE, PROMPT: _TREE._replace(operands=_prompt_operands)}
