"""Attention of tree nodes to a cached prefix and to their ancestors."""
