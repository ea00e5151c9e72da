"""The state after the previous path and the outputs of a new tree, in one pass over the state."""
