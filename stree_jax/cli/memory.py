"""Whether the rows of a scheduler fit into memory, by their sizes: nothing is allocated."""

from collections.abc import Sequence
from typing import Any

import jax

from stree_jax.models.cache import init_cache
from stree_jax.models.lm import HybridLM


def free_memory(num_devices: int) -> int | None:
    """Bytes that can be allocated on a device; None: unknown.

    Args:
        num_devices: devices of this process that are used; on a CPU they share the memory.
    """
    device = jax.local_devices()[0]
    if stats := device.memory_stats():
        return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":") for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024 // num_devices
    except (OSError, ValueError, KeyError):
        return None


def row_bytes(models: Sequence[HybridLM], length: int) -> int:
    """Bytes that one row of `length` tokens needs at least: its text, and the models' caches.

    On a mesh on each device of the row's shard.
    """

    def cache(model: HybridLM) -> Any:
        local = model.config.local(model.partition.shards)
        return init_cache(local, 1, length, model.activation_dtype)

    caches = jax.eval_shape(lambda: [cache(model) for model in models])
    return 4 * length + sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))
