"""The state after one path of a tree, in one contraction."""
