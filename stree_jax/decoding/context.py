"""The text of each row, which everything in a decode step reads."""

from typing import NamedTuple

from stree_jax.array_types import Array, Int


class Context(NamedTuple):
    """The text of each row so far."""

    tokens: Int[Array, "B L"]  # prompt, new tokens, then unspecified values
    length: Int[Array, " B"]  # valid tokens; the last of them is the root of the next tree
