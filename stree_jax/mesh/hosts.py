"""Host-side collectives between processes, and copies to the host."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec


def by_first(action: Callable[[], str]) -> str:
    """Runs `action` in process 0 only, and broadcasts its text to all, which wait."""
    text = ""
    refused: Exception | None = None
    if jax.process_index() == 0:
        try:
            text = action()
        except Exception as error:
            refused = error
    if jax.process_count() > 1:
        message = (text if refused is None else str(refused)).encode()
        here = np.array([len(message), refused is None], np.int32)
        length, good = multihost_utils.broadcast_one_to_all(here).tolist()
        letters = np.zeros(length, np.uint8)
        if jax.process_index() == 0:
            letters[:] = np.frombuffer(message, np.uint8)
        text = bytes(multihost_utils.broadcast_one_to_all(letters)).decode()
        if not good and refused is None:
            raise ValueError(f"in process 0: {text}")
    if refused is not None:
        raise refused
    return text


def on_host(tree: Any, num_rows: int | None = None) -> Any:
    """Copies arrays, or their first rows, to each process's memory; all of them call this."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    if any(not (leaf.is_fully_addressable or leaf.is_fully_replicated) for leaf in arrays):
        places: list[Any] = [leaf.sharding for leaf in arrays]
        (mesh,) = {place.mesh for place in places}
        everywhere = NamedSharding(mesh, PartitionSpec())
        tree = jax.jit(_same, out_shardings=everywhere)(tree)
    tree = jax.tree.map(np.asarray, tree)
    return tree if num_rows is None else jax.tree.map(lambda leaf: leaf[:num_rows], tree)


def of_first(numbers: Sequence[int], like: jax.Array) -> tuple[int, ...]:
    """The numbers of process 0, if an array like this lies in several; all of them call this."""
    if like.is_fully_addressable:
        return (*numbers,)
    return (*multihost_utils.broadcast_one_to_all(np.array(numbers, np.int32)).tolist(),)


def total_of_processes(numbers: np.ndarray) -> np.ndarray:
    """The sums of the numbers that the processes have; all of them call this."""
    return multihost_utils.process_allgather(numbers).sum(axis=0, dtype=numbers.dtype)


def _same(tree: Any) -> Any:
    return tree
