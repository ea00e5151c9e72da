"""`ssd`: a chunk of a prompt."""

import jax

import pallas_kernels as pk
from benchmarks.cases.base import Case, Problem, ssm_operands
from benchmarks.shapes import MIXERS
from pallas_kernels.ssd import pallas_triton as kernel
from pallas_kernels.ssd.reference import ssd as reference

_POSITIONS_PER_NODE = 15  # 13 nodes: a length that is no multiple of the block


def _operands(problem: Problem) -> tuple[jax.Array, ...]:
    return tuple(ssm_operands(problem._replace(nodes=_POSITIONS_PER_NODE * problem.nodes)).values())


CASES = {
    "ssd": Case(
        pk.ssd,
        kernel.ssd,
        _operands,
        lambda *arguments: reference(*arguments[:-1]),
        ("output", "state"),
        MIXERS,
        feedback={6: 1},
    ),
}
