"""`replay_tree_scan` as its two halves, each of which chooses its implementation.

The new state is written, and read again.
"""

from pallas_kernels.replay.api import replay
from pallas_kernels.tree_scan.api import tree_scan


def replay_tree_scan(
    prev_x,
    prev_dt,
    prev_B,
    prev_path,
    x,
    dt,
    A,
    B,
    C,
    D,
    state,
    ancestor_mask,
    *,
    implementation,
):
    """See `api.replay_tree_scan`."""
    previous = (prev_x, prev_dt, A, prev_B, state, prev_path)
    new_state = replay(*previous, implementation=implementation)
    tree = (x, dt, A, B, C, D, new_state, ancestor_mask)
    return tree_scan(*tree, implementation=implementation), new_state
