"""The state-space scan over a tree, and the replay of an accepted path."""
