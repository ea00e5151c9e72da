"""Specification of `log_softmax`."""

import numpy as np


def log_softmax(logits):
    """The log-probabilities of rows `[R, V]`."""
    below = logits - logits.max(axis=-1, keepdims=True)
    return below - np.log(np.exp(below).sum(axis=-1, keepdims=True))
