"""Tree-of-thoughts search through a scheduler, and the tasks of the SEED paper."""

from stree_jax.extensions.reasoning.blocks import World
from stree_jax.extensions.reasoning.search import (
    Stage,
    Task,
    Thought,
    Written,
    breadth_first,
    interleaved,
    render,
)
from stree_jax.extensions.reasoning.tasks import (
    TASKS,
    Arrangement,
    Blocksworld,
    CreativeWriting,
    Gsm8k,
    Question,
)

__all__ = [
    "TASKS",
    "Arrangement",
    "Blocksworld",
    "CreativeWriting",
    "Gsm8k",
    "Question",
    "Stage",
    "Task",
    "Thought",
    "World",
    "Written",
    "breadth_first",
    "interleaved",
    "render",
]
