"""The arrays that flow through a decode step."""

import dataclasses
import typing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stree_jax.array_types import Array, Bool, Float32, Int, Key
from stree_jax.decoding.processors import Processing
from stree_jax.decoding.prompts import Context
from stree_jax.decoding.rules import Rule, classes_of
from stree_jax.mesh.partition import ROWS
from stree_jax.models.cache import Cache, Path, Pending, cache_specs, pending_specs
from stree_jax.models.lm import HybridLM
from stree_jax.tree import Tree


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Drawn:
    """How the children of a node were chosen; rules decide by it whether they are exact.

    Attributes:
        kind: one of these, or the drafter's own name:

            "top_k"                 any choice without random numbers
            "shared"                by `Step.noise`: the target uses it too
            "iid"                   independent samples of the draft's distribution
            "without_replacement"   samples of it, all different, in the order drawn
        by_depth: drawn once for a depth, from a distribution that does not depend on the path, and
            shared by all nodes of the depth.
    """

    kind: str = "top_k"
    by_depth: bool = False

    @property
    def is_sampled(self) -> bool:
        """True if children are samples of the draft's distribution, which a rule can test."""
        return self.kind in ("iid", "without_replacement")


class DraftTree(NamedTuple):
    """A tree of draft tokens, and the distributions that they were drawn from.

    Attributes:
        tokens: token of each node; node 0 is the root, the last emitted token.
        tree: parents of the nodes, and which nodes are valid.
        log_probs: the draft's distributions after temperature and filters, one row per node
            with children; None if children were not sampled.
        log_prob_row: the row of `log_probs` that a node's children were drawn from; -1 for leaves,
            and everywhere without `log_probs`.
        finite: False where the draft's logits were not finite; such a row fails.
        drawn: how children were chosen; static.
    """

    tokens: Int[Array, "B N"]
    tree: Tree
    log_probs: Float32[Array, "B Z V"] | None
    log_prob_row: Int[Array, " N"]
    finite: Bool[Array, " B"]
    drawn: Drawn = Drawn()

    @classmethod
    def of(
        cls,
        tokens: Int[Array, "B N"],
        tree: Tree,
        finite: Bool[Array, " B"] | None = None,
        drawn: Drawn = Drawn(),
    ) -> "DraftTree":
        """A tree whose drafts are no samples of a distribution; `finite` None: all rows are."""
        none = jnp.full(tokens.shape[1], -1, jnp.int32)
        finite = jnp.ones(len(tokens), bool) if finite is None else finite
        return cls(tokens, tree, None, none, finite, drawn)


class Verdict(NamedTuple):
    """A verifier's decision: a root-to-node path and the token after it.

    Attributes:
        last: the path's last node; 0 accepts no draft. The loop sets -1 for rows that have ended.
        num_accepted: drafts on the path, which is the depth of `last`.
        next_token: the target's token after the path.
    """

    last: Int[Array, " B"]
    num_accepted: Int[Array, " B"]
    next_token: Int[Array, " B"]


@typing.no_type_check  # jax unflattens it with leaves that are not arrays, as when it lowers
@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How logits become probabilities, the same for draft and target.

    The arrays have one entry per row. The flag is static: each value compiles its own program.

    Attributes:
        temperature: 0 takes the best token.
        filters: what rules tokens out, in this order; the numbers of a filter are arrays too.
        processors: what changes the logits before temperature and filters; shared arrays have no
            axis of rows. The loop applies them to the target, and a drafter should, see `Step`.
        temperature_is_zero: whether all rows have temperature 0, where only the target's best token
            is possible. If False, some rows may still have it if the verifier follows the target.
        record_sampled: rows whose recorded log-probabilities are those after temperature and
            filters; None: no row's are.
    """

    temperature: Float32[Array, " B"]
    filters: tuple[Rule, ...] = ()
    processors: tuple[Rule, ...] = ()
    temperature_is_zero: bool = dataclasses.field(default=False, metadata={"static": True})
    record_sampled: Bool[Array, " B"] | None = None

    def tree_flatten_with_keys(self):
        """The arrays; and what is static: the flag, and the classes of filters and processors."""
        names = ("temperature", "filters", "processors", "record_sampled")
        arrays = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names]
        return arrays, (self.temperature_is_zero, classes_of((self.filters, self.processors)))

    @classmethod
    def tree_unflatten(cls, static, arrays):
        """The inverse of `tree_flatten_with_keys`."""
        temperature, filters, processors, record_sampled = arrays
        return cls(temperature, filters, processors, static[0], record_sampled)


class Step(NamedTuple):
    """The inputs of a decode step: drafter and verifier get the same ones, except for `keys`.

    More fields may be added: read them by name.

    Attributes:
        context: the text so far; its last token is the root of the tree.
        keys: a random key per row, of this step and of the drafter or verifier alone. Split a key
            before using it twice.
        noise: Gumbel noise of the next `topology.depth + 1` output positions, with which the target
            draws its tokens, see `sample_tokens`; entry d is for the token after a node of depth d.
            None at temperature 0.
        sampling: sampling settings of each row.
        processors: the logits processors with their states at the root. A verifier gets logits that
            went through them; a drafter masks its own, or has drafts rejected.
    """

    context: Context
    keys: Key[Array, " B"]
    noise: Float32[Array, "B _ V"] | None
    sampling: Sampling
    processors: Processing = Processing()


class Stops(NamedTuple):
    """Automata over the new tokens of rows, which find sequences of tokens or of characters."""

    class_of: Int[Array, "B V"]  # the class of each token
    next_state: Int[Array, "B states classes"]  # -1 - n: a stop ends here, and state n follows
    min_new_tokens: Int[Array, " B"]  # stops that end with one of as many first tokens do not count


class Limits(NamedTuple):
    """Conditions that end a row. Arrays, so that one compiled loop serves all values."""

    max_new_tokens: Int[Array, " B"]
    eos_tokens: Int[Array, "B Y"]  # any of them ends the row; padded with -1
    stops: Stops | None = None  # None: no row has stops


class Statistics(NamedTuple):
    """Counts since the start of the generation, per row."""

    target_calls: Int[Array, " B"]
    emitted: Int[Array, " B"]
    drafted: Int[Array, " B"]
    accepted: Int[Array, " B"]
    accepted_per_depth: Int[Array, "B D"]  # steps that accepted at least 1, 2, ... drafts
    path_ends: Int[Array, "B N"]  # steps whose path ended at each node


class TokenLogProbs(NamedTuple):
    """Log-probabilities of new tokens; entry p is of the token at position p of the text.

    Unspecified in prompts and after the last token.
    """

    chosen: Float32[Array, "B L"]
    best: Float32[Array, "B L best"]  # of the best tokens, in descending order
    best_tokens: Int[Array, "B L best"]

    @classmethod
    def empty(cls, batch: int, length: int, num_best: int) -> "TokenLogProbs":
        """Buffers of rows that have no new token, with `num_best` best tokens at each position."""
        best = (batch, length, num_best)
        return cls(
            jnp.zeros(best[:2], jnp.float32),
            jnp.zeros(best, jnp.float32),
            jnp.zeros(best, jnp.int32),
        )


class DecodeState(NamedTuple):
    """All state of a decode step. The loop donates it."""

    context: Context
    emitted: Int[Array, " B"]  # new tokens so far
    done: Bool[Array, " B"]
    failed: Int[Array, " B"]  # 0, or why it failed, see `stree_jax.decoding.step`
    cache: Cache  # the target's, before `pending` is replayed
    pending: Pending
    path: Path  # accepted in the previous tree, replayed by the next step (STree, algorithm 1)
    drafter: Any  # the drafter's state
    processors: tuple[Any, ...]  # states of `Sampling.processors` after the text so far
    keys: Key[Array, " B"]  # one random stream per row
    step: Int[Array, " B"]  # steps so far; folded into the keys of sampled drafts and of tests
    statistics: Statistics
    stop: Int[Array, " B"]  # states of `Limits.stops`; -1: a stop has ended the row
    log_probs: TokenLogProbs | None = None  # if the decoder records them
    # If the decoder records calls: the call, from 1, that emitted the token at each position of the
    # text; negative if it is no accepted draft, but the target's own. 0 in prompts.
    calls: Int[Array, "B L"] | None = None


def state_specs(model: HybridLM) -> Any:
    """The mesh specs of a state of this model; a draft model is replicated."""
    axis = model.partition.axis
    specs: Any = DecodeState(*[ROWS] * len(DecodeState._fields))  # type: ignore[arg-type]
    return specs._replace(
        cache=cache_specs(model.config, axis), pending=pending_specs(model.config, axis)
    )
