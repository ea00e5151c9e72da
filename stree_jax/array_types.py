"""The glossary: one letter a dimension, everywhere in this library.

    B  batch rows                 H  SSD heads
    T  sequence positions         P  channels of a head
    N  nodes of a tree            S  state size
    Q  query nodes (the last Q)   G  groups that share B and C
    D  depth of a tree            K  conv width
    V  vocabulary                 C  conv channels (x, B and C together)
    L  token buffer, cache places M  model width
    W  attention's query heads    U  its key and value heads
    E  channels of one of them    X  columns of an input projection

The letters are also the axis names in array annotations, which the tests check at every call.
`A`, `B`, `C`, `D` and `dt` as *variables* are Mamba-2's own names for its parameters.
"""

from jax import Array
from jaxtyping import Bool, Float, Float32, Int, Key, PyTree, Shaped

Tokens = Int[Array, "B T"]
Lengths = Int[Array, " B"]

__all__ = [
    "Array",
    "Bool",
    "Float",
    "Float32",
    "Int",
    "Key",
    "Lengths",
    "PyTree",
    "Shaped",
    "Tokens",
]
