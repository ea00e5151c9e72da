"""Tree operations of Mamba-2 and of attention: one op, one folder, one specification.

Each op is a plain function of arrays. It has a `reference.py` (sequential, NumPy, any float type:
the specification), an `xla.py` (closed form, any device), and where it pays a `pallas_triton.py`
kernel. `dispatch` says which one runs and why. Needs jax only.
"""

from pallas_kernels import dispatch
from pallas_kernels.add_rms_norm.api import add_rms_norm
from pallas_kernels.attention_tree.api import attention_tree
from pallas_kernels.attention_tree.keys import KeyCache, NodeKeys, replay_keys, write_keys
from pallas_kernels.attention_tree.layout import AttentionLayout
from pallas_kernels.expert_mlps.api import expert_mlps
from pallas_kernels.gated_rms_norm.api import gated_rms_norm
from pallas_kernels.mamba2_tree.api import (
    Mamba2Weights,
    Previous,
    implementation_of_mamba2_tree,
    mamba2_tree,
)
from pallas_kernels.mamba2_tree.layout import Layout
from pallas_kernels.mamba2_tree.records import (
    Mamba2Pending,
    RecordQueue,
    after_turn,
    enqueued,
    oldest_record,
)
from pallas_kernels.numerics import Unscaled
from pallas_kernels.replay.api import replay
from pallas_kernels.replay_tree_scan.api import replay_tree_scan
from pallas_kernels.ssd.api import ssd
from pallas_kernels.tree_attention.api import tree_attention
from pallas_kernels.tree_conv1d.api import (
    conv_window,
    replay_conv_state,
    replay_window,
    tree_conv1d,
)
from pallas_kernels.tree_scan.api import tree_scan

__all__ = [
    "AttentionLayout",
    "KeyCache",
    "Layout",
    "Mamba2Pending",
    "Mamba2Weights",
    "NodeKeys",
    "Previous",
    "RecordQueue",
    "Unscaled",
    "add_rms_norm",
    "after_turn",
    "attention_tree",
    "conv_window",
    "dispatch",
    "enqueued",
    "expert_mlps",
    "gated_rms_norm",
    "implementation_of_mamba2_tree",
    "mamba2_tree",
    "oldest_record",
    "replay",
    "replay_conv_state",
    "replay_keys",
    "replay_tree_scan",
    "replay_window",
    "ssd",
    "tree_attention",
    "tree_conv1d",
    "tree_scan",
    "write_keys",
]
