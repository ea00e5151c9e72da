"""Attention of tree nodes to a cache and to their ancestors; alone, and as a whole layer."""
