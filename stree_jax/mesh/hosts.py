"""Host-side collectives between processes."""

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils


def by_first(action: Callable[[], str]) -> str:
    """Runs `action` in process 0 only, and broadcasts its text to all processes.

    All processes call this; the others wait.

    Raises:
        Exception: what `action` raised, in process 0.
        ValueError: `action` raised, in the other processes, which would else wait for ever.
    """
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
