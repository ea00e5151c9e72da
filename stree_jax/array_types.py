"""The glossary: one letter per dimension, everywhere in `stree_jax` and `pallas_kernels`.

    B   batch rows
    T   sequence positions
    N   nodes of a tree
    O   nodes of the previous tree
    Q   query nodes: the last Q of the N nodes
    D   depth of a tree
    Z   rows of logits or log-probabilities that a caller asked for
    V   vocabulary
    Y   end-of-sequence tokens of a row, padded
    L   length of the token buffer, and of an attention cache
    M   model width
    I   input width of a mixer: M, or 2 M for a shared block
    X   columns of an input projection
    H   SSD heads, or heads of a delta rule
    P   channels of one of them
    HP  channels of all of them, H * P
    G   groups of heads that share B and C, or q and k
    S   SSM state size, or channels of q and k of a delta rule
    K   conv width
    J   conv inputs that a cache keeps, K - 1
    C   conv channels: x, B and C together
    W   attention query heads
    U   attention key and value heads
    E   channels of an attention head
    R   rotated pairs of an attention head
    F   hidden channels of an MLP or of an expert
    A   experts that a token uses

They are the axis names in array annotations, which the tests check at every call. A dimension that
occurs in one place only is a word, such as `experts`. `A`, `B`, `C` and `D` as *variables* are
Mamba-2's own names for its parameters (Dao and Gu, 2024, arXiv:2405.21060).
"""

from jax import Array
from jaxtyping import Bool, Float, Float32, Int, Key

Tokens = Int[Array, "B T"]
Lengths = Int[Array, " B"]

__all__ = ["Array", "Bool", "Float", "Float32", "Int", "Key", "Lengths", "Tokens"]
