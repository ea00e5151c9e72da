"""`replay_tree_scan` as its two halves: XLA writes the new state and reads it again."""

from pallas_kernels.replay.xla import replay
from pallas_kernels.tree_scan.xla import tree_scan


def replay_tree_scan(prev_x, prev_dt, prev_B, prev_path, x, dt, A, B, C, D, state, ancestor_mask):
    """See `api.replay_tree_scan`."""
    new_state = replay(prev_x, prev_dt, A, prev_B, state, prev_path)
    return tree_scan(x, dt, A, B, C, D, new_state, ancestor_mask), new_state
