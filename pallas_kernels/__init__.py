"""Ops for tree decoding: Mamba-2, gated delta rule, attention; on XLA, in Pallas-Triton, in C++.

A step runs the nodes of a token tree through a model, and then advances the model's state along the
accepted path. The ops are the parts of that step which XLA cannot fuse well:

    tree_conv1d         depthwise causal convolution along the paths of a tree
    tree_conv1d_layer   the same from the input projection on, with time steps and pending record
    short_conv_layer    a gated short convolution (LFM2) between its projections
    tree_scan           outputs of the Mamba-2 recurrence at tree nodes, from one state at the root
    replay              the state after one path of a tree
    replay_tree_scan    both in one pass over the state, with gate and norm
    tree_scan_layer     the same from the input projection on: convolution, replay and scan
    tree_delta          outputs of the gated delta rule at tree nodes, and the record for replay
    replay_delta        the state after one path of such a tree
    replay_tree_delta   both, one after the other
    tree_delta_layer    the same from the input projection on, for few nodes on a GPU
    delta_chunks        the gated delta rule over a whole sequence, in chunks
    tree_attention      attention of tree nodes to a cache and to their ancestors; also of prompts
    tree_attention_layer  the same from the input projection on, with rotary embedding and replay
    rms_norm            root-mean-square norm of rows
    add_rms_norm        residual addition and the norm before the next layer
    gated_rms_norm      gate and norm after the scan
    ssd                 the Mamba-2 recurrence over a whole sequence, in chunks
    expert_mlps         the chosen experts of each token
    matmul              rows times a matrix that is packed for a CPU
    log_softmax         log-probabilities of rows of logits
    largest_threshold   the search behind top-k and top-p

Every op is a pure function of arrays that returns new arrays; the ones that update a state or a
cache update it in place if it is donated. Each op has a folder, with `reference.py` (the
specification: sequential NumPy in any float type), `xla.py` (closed form, on any device),
for most `pallas_triton.py` (the kernel and its block sizes), for some `native.py` and
`native.cc` (C++ for CPUs), and `api.py` (the public functions).
`dispatch` chooses the implementation and says why; every op raises a ValueError for one that does
not exist or cannot run these shapes. Needs jax and jaxtyping only.

Tree ops compute outputs at the last `Q` of `N` nodes: with `Q == N` a target model verifies a whole
tree, with `Q < N` a draft model grows a tree level by level. Dimension letters are those of
`stree_jax.array_types`.
"""

from pallas_kernels import dispatch
from pallas_kernels.log_softmax.api import log_softmax
from pallas_kernels.matmul.api import matmul
from pallas_kernels.matmul.packed import PackedMatrix
from pallas_kernels.matmul.quantized import QuantizedMatrix
from pallas_kernels.moe.api import expert_mlps
from pallas_kernels.numerics import DeferredRMSNorm, PartialSums
from pallas_kernels.rms_norm.api import GatedNorm, add_rms_norm, gated_rms_norm, rms_norm
from pallas_kernels.ssd.api import ssd
from pallas_kernels.threshold.api import largest_threshold
from pallas_kernels.tree_attention.api import tree_attention, tree_attention_layer
from pallas_kernels.tree_attention.kv_cache import KVCache, NodeKV, replay_kv, write_kv
from pallas_kernels.tree_attention.layout import AttentionLayout, HeadNorms
from pallas_kernels.tree_attention.online_softmax import SoftmaxParts
from pallas_kernels.tree_conv1d.api import (
    conv_gather_index,
    replay_conv_state,
    replay_gather_index,
    short_conv_layer,
    tree_conv1d,
    tree_conv1d_layer,
)
from pallas_kernels.tree_conv1d.layout import Convolution, Mamba2Layout, Mamba2Pending
from pallas_kernels.tree_delta.api import (
    delta_chunks,
    replay_delta,
    replay_tree_delta,
    tree_delta,
    tree_delta_layer,
)
from pallas_kernels.tree_delta.gates import Decays, StepSizes
from pallas_kernels.tree_scan.api import replay, replay_tree_scan, tree_scan, tree_scan_layer
from pallas_kernels.tree_scan.gate import Gate

__all__ = [
    "AttentionLayout",
    "Convolution",
    "Decays",
    "DeferredRMSNorm",
    "Gate",
    "GatedNorm",
    "HeadNorms",
    "KVCache",
    "Mamba2Layout",
    "Mamba2Pending",
    "NodeKV",
    "PackedMatrix",
    "PartialSums",
    "QuantizedMatrix",
    "SoftmaxParts",
    "StepSizes",
    "add_rms_norm",
    "conv_gather_index",
    "delta_chunks",
    "dispatch",
    "expert_mlps",
    "gated_rms_norm",
    "largest_threshold",
    "log_softmax",
    "matmul",
    "replay",
    "replay_conv_state",
    "replay_delta",
    "replay_gather_index",
    "replay_kv",
    "replay_tree_delta",
    "replay_tree_scan",
    "rms_norm",
    "short_conv_layer",
    "ssd",
    "tree_attention",
    "tree_attention_layer",
    "tree_conv1d",
    "tree_conv1d_layer",
    "tree_delta",
    "tree_delta_layer",
    "tree_scan",
    "tree_scan_layer",
    "write_kv",
]
