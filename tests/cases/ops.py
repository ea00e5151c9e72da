"""All ops, by name."""

from tests.cases.log_softmax import LOG_SOFTMAX
from tests.cases.mamba2_layer import MAMBA2_LAYER
from tests.cases.matmul import MATMUL, ROWS
from tests.cases.moe import EXPERT_MLPS
from tests.cases.rms_norm import ADD_RMS_NORM, GATED_RMS_NORM
from tests.cases.short_conv import SHORT_CONV_LAYER
from tests.cases.ssd import SSD
from tests.cases.threshold import LARGEST_THRESHOLD
from tests.cases.tree_attention import TREE_ATTENTION
from tests.cases.tree_attention_layer import TREE_ATTENTION_LAYER
from tests.cases.tree_conv1d import TREE_CONV1D
from tests.cases.tree_delta import DELTA_CHUNKS, REPLAY_DELTA, REPLAY_TREE_DELTA, TREE_DELTA
from tests.cases.tree_scan import REPLAY, REPLAY_TREE_SCAN, TREE_SCAN

OPS = {
    "tree_scan": TREE_SCAN,
    "replay": REPLAY,
    "replay_tree_scan": REPLAY_TREE_SCAN,
    "tree_delta": TREE_DELTA,
    "replay_delta": REPLAY_DELTA,
    "replay_tree_delta": REPLAY_TREE_DELTA,
    "delta_chunks": DELTA_CHUNKS,
    "tree_conv1d": TREE_CONV1D,
    "mamba2_layer": MAMBA2_LAYER,
    "short_conv_layer": SHORT_CONV_LAYER,
    "tree_attention": TREE_ATTENTION,
    "tree_attention_layer": TREE_ATTENTION_LAYER,
    "gated_rms_norm": GATED_RMS_NORM,
    "add_rms_norm": ADD_RMS_NORM,
    "ssd": SSD,
    "expert_mlps": EXPERT_MLPS,
    "matmul": MATMUL,
    "rows": ROWS,
    "largest_threshold": LARGEST_THRESHOLD,
    "log_softmax": LOG_SOFTMAX,
}
