"""Every op with operands of real shapes, to be checked, timed and tuned."""

from benchmarks.cases import moe, rms_norm, ssd, tree_attention, tree_conv1d, tree_scan
from benchmarks.cases.base import Case

CASES: dict[str, Case] = {
    **tree_scan.CASES,
    **ssd.CASES,
    **tree_attention.CASES,
    **moe.CASES,
    **rms_norm.CASES,
    **tree_conv1d.CASES,
}
