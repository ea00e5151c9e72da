"""Tree operations of Mamba-2 and of attention: one op, one folder, one specification.

Each op is a plain function of arrays. It has a `reference.py` (sequential, NumPy, any float type:
the specification), an `xla.py` (closed form, any device), and where it pays a `pallas_triton.py`
kernel. `dispatch` says which one runs and why. Needs jax only.
"""

from pallas_kernels import dispatch
from pallas_kernels.moe.api import expert_mlps
from pallas_kernels.numerics import DeferredRMSNorm
from pallas_kernels.rms_norm.api import add_rms_norm, gated_rms_norm
from pallas_kernels.ssd.api import ssd
from pallas_kernels.tree_attention.api import tree_attention, tree_attention_layer
from pallas_kernels.tree_attention.kv_cache import KVCache, NodeKV, replay_kv, write_kv
from pallas_kernels.tree_attention.layout import AttentionLayout
from pallas_kernels.tree_conv1d.api import (
    conv_window,
    replay_conv_state,
    replay_window,
    tree_conv1d,
    tree_conv1d_layer,
)
from pallas_kernels.tree_conv1d.layout import Mamba2Layout, Mamba2Pending
from pallas_kernels.tree_scan.api import replay, replay_tree_scan, tree_scan
from pallas_kernels.tree_scan.gate import Gate

__all__ = [
    "AttentionLayout",
    "DeferredRMSNorm",
    "Gate",
    "KVCache",
    "Mamba2Layout",
    "Mamba2Pending",
    "NodeKV",
    "add_rms_norm",
    "conv_window",
    "dispatch",
    "expert_mlps",
    "gated_rms_norm",
    "replay",
    "replay_conv_state",
    "replay_kv",
    "replay_tree_scan",
    "replay_window",
    "ssd",
    "tree_attention",
    "tree_attention_layer",
    "tree_conv1d",
    "tree_conv1d_layer",
    "tree_scan",
    "write_kv",
]
