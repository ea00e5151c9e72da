"""State-space output of every node of a tree, from one state."""
