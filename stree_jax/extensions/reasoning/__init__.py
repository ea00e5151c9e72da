"""Tree-of-thoughts search through a scheduler."""

from stree_jax.extensions.reasoning.search import (
    Stage,
    Task,
    Thought,
    Written,
    breadth_first,
    interleaved,
    render,
)

__all__ = ["Stage", "Task", "Thought", "Written", "breadth_first", "interleaved", "render"]
