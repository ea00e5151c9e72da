"""Specification of `best_token`: all logits, and the first of the largest."""

import numpy as np


def best_token(hidden, head, vocab_size, multiplier):
    """The best token of each row, and its logit.

    Args:
        hidden: `[R, M]`. head: `[W, M]`; rows from `vocab_size` on are padding.

    Returns:
        Tokens and logits `[R]`.
    """
    logits = multiplier * hidden @ head[:vocab_size].T
    token = np.argmax(logits, axis=1)
    return token, logits[np.arange(len(token)), token]
