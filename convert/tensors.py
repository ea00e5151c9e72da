"""A tensor in a file, read on demand."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

MAX_TENSORS = 1 << 18  # in a checkpoint; the largest published ones have about 100,000


class Tensor(NamedTuple):
    """A tensor that has not been read yet."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]  # may return a read-only view of the file
