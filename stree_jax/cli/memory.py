"""Whether the rows of a scheduler fit into memory, by their sizes: nothing is allocated."""

from collections.abc import Sequence

import jax

from stree_jax.models.lm import HybridLM


def free_memory() -> int | None:
    """Bytes that can be allocated on the default device; None: unknown."""
    device = jax.devices()[0]
    if stats := device.memory_stats():
        return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":") for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None


def row_bytes(models: Sequence[HybridLM], length: int) -> int:
    """Bytes that one row of `length` tokens needs at least: its text, and the models' caches."""
    caches = [jax.eval_shape(lambda of=model: of.init_cache(1, length)) for model in models]
    return 4 * length + sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))
