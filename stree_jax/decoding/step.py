"""One step of the loop: draft and verify, emit, advance."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dispatch, log_softmax
from stree_jax.array_types import Array, Bool, Float, Int
from stree_jax.decoding import stops
from stree_jax.decoding.drafters import Drafter, root_only
from stree_jax.decoding.drafters.base import inner_layers
from stree_jax.decoding.processors import Processing
from stree_jax.decoding.sampling import (
    all_finite,
    best_tokens,
    filtered_logits,
    position_noise,
    token_log_probs,
)
from stree_jax.decoding.traced_checks import check_like, checked_proposal, checked_state, some
from stree_jax.decoding.types import (
    Context,
    DecodeState,
    DraftTree,
    Limits,
    Sampling,
    Statistics,
    Step,
    TokenLogProbs,
    Verdict,
)
from stree_jax.decoding.verifiers import Verifier
from stree_jax.models.cache import Cache, Pending, path_to, replayed
from stree_jax.models.lm import HybridLM
from stree_jax.tree import TreeTopology

# Codes of `DecodeState.failed`: logits were not finite, processors or filters left no token, or the
# row's next token has no place in its buffer.
TARGET_FAILED, DRAFT_FAILED, RULED_OUT, NO_ROOM = 1, 2, 3, 4


class Verified(NamedTuple):
    """A draft tree, what the target makes of it, and the verdict."""

    draft: DraftTree
    drafter: Any  # the drafter's state after `propose`
    hidden: Float[Array, "B N _"]
    cache: Cache  # with the path of the step before
    pending: Pending
    logits: Float[Array, "B N V"]
    processed: Float[Array, "B N V"]  # from which the verifier drew
    allows_some: Bool[Array, "B N"] | None  # where processors and filters leave a token
    processors: Any  # their states at all nodes
    verdict: Verdict
    on_path: Bool[Array, "B N"]
    nodes: Int[Array, "B _"]  # the path's node of each depth; 0 beyond its end


class Emitted(NamedTuple):
    """The new tokens of a step."""

    tokens: Int[Array, "B _"]  # the accepted drafts, the next token, then unspecified values
    num_new: Int[Array, " B"]  # how many of them the rows take
    active: Bool[Array, " B"]  # rows that took part in the step
    ended: Bool[Array, " B"]  # by an end token or a stop
    failed: Int[Array, " B"]
    stop: Int[Array, " B"]


def decode_step(
    topology: TreeTopology,
    verifier: Verifier,
    model: HybridLM,
    drafter: Drafter | None,
    state: DecodeState,
    limits: Limits,
    sampling: Sampling,
) -> tuple[DecodeState, DraftTree, Verdict]:
    """The state after a step, the draft tree, and the verdict, cut where the row ended.

    Without a drafter a drafter's state stays as it is; a tree of the root alone drafts nothing.
    """
    processing = Processing.of(sampling.processors, state.processors)
    verified = _draft_and_verify(topology, verifier, model, drafter, state, sampling, processing)
    depth = buffer_depth(state)
    emitted = _emit(verified, state, limits, processing, depth)
    return _advance(topology, drafter, state, limits, sampling, processing, verified, emitted)


def buffer_depth(state: DecodeState) -> int:
    """The depth that the buffers have room for: that of the tree, or of a larger one."""
    return state.statistics.accepted_per_depth.shape[1]


def _draft_and_verify(
    topology: TreeTopology,
    verifier: Verifier,
    model: HybridLM,
    drafter: Drafter | None,
    state: DecodeState,
    sampling: Sampling,
    processing: Processing,
) -> Verified:
    vocab_size = model.config.vocab_size
    keys = jax.vmap(lambda key, step: jax.random.split(jax.random.fold_in(key, step)))(
        state.keys, state.step
    )
    # Noise by row and output position, independent of the drafts and the number of steps.
    noise = None
    if not sampling.temperature_is_zero:
        noise = position_noise(state.keys, state.emitted, topology.depth, vocab_size)
        noise = jnp.where((sampling.temperature > 0)[:, None, None], noise, 0.0)
    step = Step(state.context, keys[:, 0], noise, sampling, processing)

    draft = root_only(state.context)
    drafter_state = state.drafter
    if drafter is not None and topology.num_nodes > 1:
        with jax.named_scope("draft"), dispatch.to_the_bit(False):  # drafts change no text
            returned = drafter.propose(state.drafter, step, topology)
            draft, drafter_state = checked_proposal(
                *(drafter, returned, state.drafter, len(state.done), topology, vocab_size),
                has_room=topology.depth < buffer_depth(state),
            )
            agreed = model.shard.broadcast_from_first((draft.tokens, draft.tree, draft.finite))
            draft = draft._replace(tokens=agreed[0], tree=agreed[1], finite=agreed[2])

    with jax.named_scope("verify"):
        hidden, pending, cache = model.tree(
            draft.tokens,
            draft.tree,
            state.cache,
            replay=(state.pending, state.path),
            inner=inner_layers(drafter) or (),
        )
        logits = model.logits(hidden[..., : model.config.d_model])[..., :vocab_size]
        states = processing.of_tree(draft.tokens, draft.tree, topology)
        processed, allows_some = processing.applied(logits, states)
        if sampling.filters and not sampling.temperature_is_zero:
            keeps_some = all_finite(filtered_logits(processed, sampling))
            allows_some = keeps_some if allows_some is None else keeps_some & allows_some
        if allows_some is not None:
            allows_some |= ~all_finite(logits)  # such a row fails by that name
        verdict = verifier.verify(draft, processed, step._replace(keys=keys[:, 1]), topology)
        of_rows = some(jnp.int32, len(state.done))
        verdict = check_like(
            f"{type(verifier).__name__}.verify", verdict, Verdict(of_rows, of_rows, of_rows)
        )
        # A rule that only compares logits gives equal verdicts where logits are equal.
        if not (verifier.follows_target and sampling.temperature_is_zero):
            verdict = model.shard.broadcast_from_first(verdict)
    on_path = draft.tree.on_path(verdict.last)
    nodes = draft.tree.at_depth(on_path, jnp.arange(topology.depth + 2, dtype=jnp.int32)[None])
    return Verified(
        draft=draft,
        drafter=drafter_state,
        hidden=hidden,
        cache=cache,
        pending=pending,
        logits=logits,
        processed=processed,
        allows_some=allows_some,
        processors=states,
        verdict=verdict,
        on_path=on_path,
        nodes=nodes,
    )


def _emit(
    verified: Verified, state: DecodeState, limits: Limits, processing: Processing, depth: int
) -> Emitted:
    """The new tokens, up to the end of sequence, a stop, the limit, the buffer's or a failure."""
    draft, verdict, on_path = verified.draft, verified.verdict, verified.on_path
    drafts = jnp.take_along_axis(draft.tokens, verified.nodes[:, 1:], axis=1)
    places = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None]
    is_next = places == verdict.num_accepted[:, None]
    tokens = jnp.where(is_next, verdict.next_token[:, None], drafts)

    count = verdict.num_accepted + 1
    is_end = (tokens[..., None] == limits.eos_tokens[:, None]).any(axis=-1)
    read = None
    if limits.stops is not None:
        read = stops.advanced(limits.stops, state.stop, tokens, state.emitted)
        is_end |= read[1]
    is_end &= places < count[:, None]
    ended = is_end.any(axis=-1)
    count = jnp.where(ended, lax.argmax(is_end, 1, jnp.int32) + 1, count)
    count = jnp.minimum(count, limits.max_new_tokens - state.emitted)

    count, is_ruled_out = processing.cut(count, draft.tree.depth, on_path, verified.allows_some)
    room = state.context.tokens.shape[1] - depth - 1 - state.context.length
    wanted = count
    count = jnp.minimum(count, jnp.maximum(room, 0))
    used = on_path & (draft.tree.depth < count[:, None])
    target_failed = (used & ~all_finite(verified.logits)).any(axis=-1)
    failed = jnp.where(target_failed, TARGET_FAILED, jnp.where(draft.finite, 0, DRAFT_FAILED))
    failed = jnp.where(state.done, state.failed, failed)
    is_active = ~state.done & (failed == 0)
    count = jnp.where(is_active, count, 0)
    failed = jnp.where(is_active & (wanted > room), NO_ROOM, failed)
    if is_ruled_out is not None:  # after the tokens before it, which are right
        failed = jnp.where(is_active & is_ruled_out, RULED_OUT, failed)
    stop = state.stop if read is None else stops.after(state.stop, *read, count)
    return Emitted(tokens, count, is_active, ended, failed, stop)


def _advance(
    topology: TreeTopology,
    drafter: Drafter | None,
    state: DecodeState,
    limits: Limits,
    sampling: Sampling,
    processing: Processing,
    verified: Verified,
    emitted: Emitted,
) -> tuple[DecodeState, DraftTree, Verdict]:
    """The state after the emitted tokens."""
    draft, verdict, count = verified.draft, verified.verdict, emitted.num_new
    # The cache must see every token but the last emitted one: the root and count - 1 drafts.
    # That is less than the verifier's path if the path was cut.
    end = jnp.take_along_axis(verified.nodes, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    last = jnp.where(count > 0, end, -1)
    cut = verdict._replace(last=last, num_accepted=jnp.maximum(count - 1, 0))
    drafts = verified.drafter
    if drafter is not None:
        with jax.named_scope("draft"):
            committed = drafter.commit(drafts, draft, cut, verified.hidden, topology)
        drafts = checked_state(
            *(f"{type(drafter).__name__}.commit: state", committed, state.drafter),
            has_room=topology.depth < buffer_depth(state),
        )

    records = state.log_probs
    if records is not None:
        new_records = _records(verified, emitted.tokens, sampling, records.best.shape[-1])
        records = _written(records, new_records, state.context.length)
    calls = state.calls
    if calls is not None:
        places = jnp.arange(emitted.tokens.shape[1], dtype=jnp.int32)[None]
        is_draft = places < verdict.num_accepted[:, None]
        this = state.statistics.target_calls[:, None] + 1
        calls = _written(calls, jnp.where(is_draft, this, -this), state.context.length)
    number = state.emitted + count
    is_full = number >= limits.max_new_tokens
    new = state._replace(
        # All new tokens are written: the buffers have room for a whole path past a row's end, and
        # what is beyond `count` is overwritten by the next step, or never read.
        context=Context(
            _written(state.context.tokens, emitted.tokens, state.context.length),
            state.context.length + count,
        ),
        emitted=number,
        done=state.done | (emitted.failed > 0) | emitted.ended | is_full,
        failed=emitted.failed,
        cache=verified.cache,
        pending=verified.pending,
        path=path_to(draft.tree, last),
        drafter=drafts,
        processors=processing.commit(verified.processors, last, emitted.tokens, count),
        step=state.step + 1,
        statistics=_counted(state.statistics, draft, verdict, count, emitted.active, last),
        log_probs=records,
        stop=emitted.stop,
        calls=calls,
    )
    return new, draft, cut


def settled(model: HybridLM, state: DecodeState) -> DecodeState:
    """The state after the last step's path is replayed."""
    cache = model.replay(state.cache, state.pending, state.path)
    return state._replace(cache=cache, path=replayed(state.path))


def _records(
    verified: Verified, new_tokens: Int[Array, "B _"], sampling: Sampling, num_best: int
) -> TokenLogProbs:
    """Log-probabilities of a step's new tokens, each at the node at which it was drawn."""
    nodes = verified.nodes[:, :-1, None]
    log_probs = log_softmax(jnp.take_along_axis(verified.logits, nodes, axis=1))
    if sampling.record_sampled is not None:
        processed = jnp.take_along_axis(verified.processed, nodes, axis=1)
        sampled = token_log_probs(processed, sampling)
        log_probs = jnp.where(sampling.record_sampled[:, None, None], sampled, log_probs)
    chosen = jnp.take_along_axis(log_probs, new_tokens[..., None], axis=-1)[..., 0]
    return TokenLogProbs(chosen, *best_tokens(log_probs, num_best))


def _written(buffers: Any, new: Any, at: Int[Array, " B"]) -> Any:
    """Each row of the buffers with its row of `new` from position `at` on."""

    def write(row: Array, new: Array, at: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(row, new, at, axis=0)

    return jax.tree.map(lambda buffer, new: jax.vmap(write)(buffer, new, at), buffers, new)


def _counted(
    statistics: Statistics,
    draft: DraftTree,
    verdict: Verdict,
    count: Int[Array, " B"],
    active: Bool[Array, " B"],
    last: Int[Array, " B"],
) -> Statistics:
    depth, num_nodes = (counts.shape[1] for counts in statistics[-2:])
    accepted = jnp.where(active, jnp.minimum(verdict.num_accepted, count), 0)
    drafted = jnp.where(active, draft.tree.valid.sum(axis=-1, dtype=jnp.int32) - 1, 0)
    return Statistics(
        target_calls=statistics.target_calls + active.astype(jnp.int32),
        emitted=statistics.emitted + count,
        drafted=statistics.drafted + drafted,
        accepted=statistics.accepted + accepted,
        accepted_per_depth=statistics.accepted_per_depth
        + (accepted[:, None] > jnp.arange(depth, dtype=jnp.int32)[None]).astype(jnp.int32),
        path_ends=statistics.path_ends
        + (last[:, None] == jnp.arange(num_nodes, dtype=jnp.int32)[None]).astype(jnp.int32),
    )
