"""Flax NNX modules. Weights are modules whose methods mutate nothing; what flows is a pytree."""
