"""The arrays that flow through a decode step."""

from typing import Any, NamedTuple

from stree_jax.array_types import Array, Bool, Float, Float32, Int, Key
from stree_jax.models.cache import Cache, Path, Pending
from stree_jax.tree import Tree


class Context(NamedTuple):
    """What has been read and written so far; a drafter may look at all of it."""

    tokens: Int[Array, "B L"]  # prompt, then new tokens, then anything
    length: Int[Array, " B"]  # valid tokens; the last of them is the root of the next tree


class DraftTree(NamedTuple):
    """A tree of draft tokens and, where a verifier needs them, the distributions they came from."""

    tokens: Int[Array, "B N"]
    tree: Tree
    log_probs: Float32[Array, "B R V"] | None  # the draft's, after temperature and filters
    rows: Int[Array, " N"]  # row of `log_probs` that gave the children of a node; -1: no children
    finite: Bool[Array, " B"]  # the draft's logits were


class Verdict(NamedTuple):
    """What a verifier decides: a root-to-node path and the token after it."""

    last: Int[Array, " B"]  # the path's last node; 0 accepts no draft
    num_accepted: Int[Array, " B"]
    next_token: Int[Array, " B"]  # the bonus token, sampled from the target


class Statistics(NamedTuple):
    """Counts since the start of the generation."""

    target_calls: Int[Array, " B"]
    emitted: Int[Array, " B"]
    drafted: Int[Array, " B"]
    accepted: Int[Array, " B"]
    accepted_per_depth: Int[Array, "B D"]  # steps that accepted at least 1, 2, ... drafts


class DecodeState(NamedTuple):
    """All that a decode step reads and writes; in the loop it is donated."""

    context: Context
    emitted: Int[Array, " B"]  # new tokens so far
    done: Bool[Array, " B"]
    failed: Int[Array, " B"]  # 0; 1: the target's logits were not finite; 2: the draft's
    cache: Cache  # the target's, before `pending` is replayed
    pending: Pending
    path: Path  # of the previous tree, to be replayed (deferred, STree algorithm 1)
    drafter: Any  # the drafter's own state
    keys: Key[Array, " B"]  # one stream a row
    step: Int[Array, ""]
    statistics: Statistics


class Limits(NamedTuple):
    """When a row ends. Arrays, so that a compiled loop serves any of them."""

    max_new_tokens: Int[Array, ""]
    eos_tokens: Int[Array, " E"]  # any of them ends a row; -1: none


class Sampling(NamedTuple):
    """How logits become probabilities, the same for draft and target. Arrays, as in `Limits`."""

    temperature: Float32[Array, ""]
    top_k: Int[Array, ""]  # 0: all
    top_p: Float[Array, ""]  # 1: all
