"""A tensor in a file, read on demand."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Tensor(NamedTuple):
    """A tensor that has not been read yet."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]  # may return a read-only view of the file
