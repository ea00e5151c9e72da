"""Specification of `replay_tree_scan`: the two recurrences, one after the other."""

from pallas_kernels.replay.reference import replay
from pallas_kernels.tree_scan.reference import tree_scan


def replay_tree_scan(prev_x, prev_dt, prev_B, prev_path, x, dt, A, B, C, D, state, parents):
    """The outputs at every node of a tree that grows from the end of the previous tree's path.

    Args:
        prev_x, prev_dt, prev_B, prev_path: the previous tree and its path, as in `replay`.
        x, dt, A, B, C, D, parents: the new tree, as in `tree_scan`.
        state: `[B, H, P, S]` before the root of the previous tree.

    Returns:
        outputs `[B, N, H, P]` and the state before the root of the new tree `[B, H, P, S]`.
    """
    new_state = replay(prev_x, prev_dt, A, prev_B, state, prev_path)
    outputs, _ = tree_scan(x, dt, A, B, C, D, new_state, parents)
    return outputs, new_state
