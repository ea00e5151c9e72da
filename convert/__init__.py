"""Checkpoint converter, shipped as `stree_jax.convert`. Families and their rule tables go here."""
