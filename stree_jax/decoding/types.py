"""The arrays that flow through a decode step."""

import dataclasses
import typing
from typing import Any, NamedTuple

import jax

from stree_jax.array_types import Array, Bool, Float32, Int, Key
from stree_jax.models.cache import Cache, Path, Pending
from stree_jax.tree import Tree


class Context(NamedTuple):
    """The text of each row so far. A drafter may look at all of it."""

    tokens: Int[Array, "B L"]  # prompt, then new tokens, then anything
    length: Int[Array, " B"]  # valid tokens; the last of them is the root of the next tree


class DraftTree(NamedTuple):
    """A tree of draft tokens and, where a verifier needs them, the distributions they came from."""

    tokens: Int[Array, "B N"]
    tree: Tree
    log_probs: Float32[Array, "B Z V"] | None  # the draft's, after temperature, top-k and top-p
    log_prob_row: Int[Array, " N"]  # row of `log_probs` that a node's children were drawn from; -1
    finite: Bool[Array, " B"]  # False: the draft's logits were not finite, the row fails


class Verdict(NamedTuple):
    """A verifier's decision: a root-to-node path and the token after it."""

    last: Int[Array, " B"]  # the path's last node; 0 accepts no draft, -1 is a row that has ended
    num_accepted: Int[Array, " B"]
    next_token: Int[Array, " B"]  # from the target, after the path


@typing.no_type_check  # jax unflattens it with leaves that are no arrays, as when it lowers
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How logits become probabilities, the same for draft and target.

    The arrays have one entry a row. The flags are static: programs differ by them.

    Attributes:
        temperature: above 0 unless `temperature_is_zero`.
        top_k: 0 keeps all tokens.
        top_p: 1 keeps all tokens.
        temperature_is_zero: of all rows; the target's best token is the only one possible.
        use_top_k_or_top_p: False skips the sort that they need.
    """

    temperature: Float32[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float32[Array, " B"]
    temperature_is_zero: bool = dataclasses.field(default=False, metadata={"static": True})
    use_top_k_or_top_p: bool = dataclasses.field(default=True, metadata={"static": True})


class Limits(NamedTuple):
    """When a row ends. Arrays, so that one compiled loop serves any of them."""

    max_new_tokens: Int[Array, " B"]
    eos_tokens: Int[Array, "B Y"]  # any of them ends the row; -1: none


class Statistics(NamedTuple):
    """Counts since the start of the generation."""

    target_calls: Int[Array, " B"]
    emitted: Int[Array, " B"]
    drafted: Int[Array, " B"]
    accepted: Int[Array, " B"]
    accepted_per_depth: Int[Array, "B D"]  # steps that accepted at least 1, 2, ... drafts


class DecodeState(NamedTuple):
    """All that a decode step reads and writes; the loop donates it. Each row has its own."""

    context: Context
    emitted: Int[Array, " B"]  # new tokens so far
    done: Bool[Array, " B"]
    failed: Int[Array, " B"]  # 0, or a code of `loop`: whose logits were not finite
    cache: Cache  # the target's, before `pending` is replayed
    pending: Pending
    path: Path  # accepted in the previous tree, replayed by the next step (STree, algorithm 1)
    drafter: Any  # the drafter's own state
    keys: Key[Array, " B"]  # one stream a row
    step: Int[Array, " B"]  # of the row; keys are folded with it
    statistics: Statistics
