"""Block sizes that the tuner tries."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from benchmarks.cases.base import Problem
from pallas_kernels import tuning
from pallas_kernels.moe import pallas_triton as experts
from pallas_kernels.rms_norm import pallas_triton as norms
from pallas_kernels.ssd import pallas_triton as sequence
from pallas_kernels.tree_attention import config as attention_config
from pallas_kernels.tree_conv1d import pallas_triton as convolution
from pallas_kernels.tree_scan import pallas_triton as scan


class Space(NamedTuple):
    """The block sizes to try for a kernel."""

    timed: str  # the case of `benchmarks.cases` that is timed
    defaults: Mapping[str, Any]  # default block sizes, by case
    case: Callable[[Problem], str]  # names the case of a problem
    values: Mapping[str, tuple[int, ...]]  # to try, by field; the most important field comes first


def _attention_case(problem: Problem) -> str:
    heads, groups, head_dim = problem.shape
    return attention_config.case(problem.dtype, problem.nodes * heads // groups, head_dim)


_WARPS = {"num_warps": (2, 4, 8), "num_stages": (1, 2, 3)}
_STATE = (16 * 128, 32 * 128, 64 * 128)
_ATTENTION = Space(
    "tree_attention",
    attention_config.DEFAULTS,
    _attention_case,
    {"busy_warps": (512, 1024, 2048, 4096)}
    | _WARPS
    | {"keys": (32, 64, 128), "rows": (16, 32, 64)},
)
SPACES = {
    "tree_scan": Space(
        "replay_tree_scan",
        scan.DEFAULTS,
        lambda of: scan.case(of.dtype, of.shape.head_dim * of.shape.state_size),
        {"state": (*_STATE, 128 * 128)}
        | _WARPS
        | dict.fromkeys(("queries", "keys", "replayed"), (16, 32, 64))
        | {"part": (32, 64, 128)},
    ),
    "tree_conv1d": Space(
        "tree_conv1d_layer",
        convolution.DEFAULTS,
        lambda _: "any",
        {"channels": (64, 128, 256, 512), "num_warps": (1, 2, 4, 8), "queries": (8, 16, 32)},
    ),
    "ssd": Space(
        "ssd",
        sequence.DEFAULTS,
        lambda of: tuning.dtype_case(of.dtype),
        {"state": _STATE, "positions": (16, 32, 64), "part": (32, 64, 128)} | _WARPS,
    ),
    "tree_attention": _ATTENTION,
    "tree_attention_layer": _ATTENTION._replace(timed="tree_attention_layer"),
    "expert_mlps": Space(
        "expert_mlps",
        experts.DEFAULTS,
        lambda of: tuning.dtype_case(of.dtype),
        {"rows": (16, 32, 64), "columns": (32, 64, 128), "inner": (32, 64, 128)}
        | {"num_warps": (4, 8), "num_stages": (2, 3, 4)},
    ),
    "rms_norm": Space(
        "gated_rms_norm",
        norms.DEFAULTS,
        lambda of: norms.case(of.shape.num_heads * of.shape.head_dim),
        {"block": (1024, 2048, 4096, 8192), "num_warps": (2, 4, 8, 16)},
    ),
}
