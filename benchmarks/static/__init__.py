"""Programs compiled for GPUs that are not attached: `python -m benchmarks.static`.

Nothing here may import jax: `deviceless` sets XLA's flags first.
"""
