"""Drafters, verifiers and the one loop that runs them."""

from stree_jax.decoding.draft_model import DraftModel, WholeModel, WholeModelState
from stree_jax.decoding.head_model import HeadModel, HeadState, with_last
from stree_jax.decoding.plan import Plan
from stree_jax.decoding.prefix import slots
from stree_jax.decoding.prompts import buffer_size, list_size
from stree_jax.decoding.rules import is_given
from stree_jax.decoding.sampling import all_finite, filtered_logits, position_noise
from stree_jax.decoding.token_bytes import as_tokenizer, token_bytes
from stree_jax.tree import KnownNodes, LevelNodes, append_subtree

# The names that they had before.
Reader = WholeModelState
HeadReader = HeadState

__all__ = [
    "DraftModel",
    "HeadModel",
    "HeadReader",
    "HeadState",
    "KnownNodes",
    "LevelNodes",
    "Plan",
    "Reader",
    "WholeModel",
    "WholeModelState",
    "all_finite",
    "append_subtree",
    "as_tokenizer",
    "buffer_size",
    "filtered_logits",
    "is_given",
    "list_size",
    "position_noise",
    "slots",
    "token_bytes",
    "with_last",
]
