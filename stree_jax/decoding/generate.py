"""`generate` and `stream`: checks first, then one compiled program."""

import dataclasses
import math
import numbers
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from stree_jax.array_types import Array
from stree_jax.decoding.draft import Drafter, ModelDrafter
from stree_jax.decoding.loop import DRAFT_FAILED, SpeculativeDecoder
from stree_jax.decoding.prefill import PIECE
from stree_jax.decoding.state import Context, DecodeState, Limits, Sampling
from stree_jax.decoding.verify import VERIFIERS, Verifier
from stree_jax.models.cache import Cache
from stree_jax.models.lm import HybridLM
from stree_jax.tree import TreeTopology

PAD = -1  # fills `Generation.tokens` after a row's end

_ROUND = 64  # of buffer sizes


@dataclasses.dataclass(frozen=True)
class DecodeStatistics:
    """What a generation cost and gained. Counts are summed over the batch; arrays are per row.

    Attributes:
        tau: acceptance length, tokens emitted per target call; 1 for autoregressive decoding.
        num_target_calls: forward passes of the target, counted once for every unfinished row.
        num_tokens: tokens emitted.
        num_drafted: tokens proposed.
        num_accepted: drafts that were emitted.
        accepted_per_depth: `[D]`, steps in which at least 1, 2, ... D drafts were accepted.
        tau_per_row, target_calls_per_row: `[B]`.
    """

    tau: float
    num_target_calls: int
    num_tokens: int
    num_drafted: int
    num_accepted: int
    accepted_per_depth: np.ndarray
    tau_per_row: np.ndarray
    target_calls_per_row: np.ndarray


@dataclasses.dataclass(frozen=True)
class Generation:
    """The result of `generate`.

    Attributes:
        tokens: `[B, max_new_tokens]` int32, the new tokens, end of sequence included, then `PAD`.
        lengths: `[B]` int32, new tokens of each row.
        stats: what it cost.
        cache: the target's cache, which has seen all tokens of a row but the last.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    stats: DecodeStatistics
    cache: Cache


def generate(
    model: HybridLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    drafter: Drafter | None = None,
    topology: TreeTopology | None = None,
    verifier: str | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos_token: int | Sequence[int] | None = None,
    max_length: int | None = None,
    key: jax.Array | None = None,
) -> Generation:
    """Continues prompts, with the target's own output whatever the drafter is.

    At temperature 0 in float32 the tokens are those of autoregressive decoding; above it they
    follow the same distribution. A row's output depends on its prompt, the key and its place in the
    batch, not on the other rows.

    Args:
        model: the target.
        prompts: a list of token ids for each row; lengths may differ.
        max_new_tokens: most tokens to add to each row.
        drafter: what proposes tokens; None: plain autoregressive decoding.
        topology: the draft tree; None: the drafter's default.
        verifier: "greedy", "target_only", "multi_step", "without_replacement" or "chain"; None: the
            one that fits drafter and temperature.
        temperature: 0 takes the best token.
        top_k, top_p: sample from the `top_k` best tokens (0: all), and of these from the fewest
            that reach probability `top_p`. Applied to target and draft alike.
        eos_token: a row ends after this token, or after any of these.
        max_length: most tokens of a row, prompt and output; a request for more is refused. None:
            what the model was made for (`ModelConfig.max_length`), if it says.
        key: random key; needed above temperature 0.

    Raises:
        ValueError: a bad argument, before anything is compiled.
        FloatingPointError: logits that are not finite; names the row.
    """
    request = plan(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        drafter=drafter,
        topology=topology,
        verifier=verifier,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eos_token=eos_token,
        max_length=max_length,
        key=key,
    )
    state = request.decoder.start(model, request.drafter, request.context, request.keys)
    state = request.decoder.run(model, request.drafter, state, request.limits, request.sampling)
    _check_finite(state)

    lengths = np.asarray(state.emitted)
    rows = np.asarray(state.context.tokens)
    tokens = np.full((len(rows), max_new_tokens), PAD, np.int32)
    for i, (row, start) in enumerate(zip(rows, np.asarray(request.context.length), strict=True)):
        tokens[i, : lengths[i]] = row[start : start + lengths[i]]
    return Generation(tokens, lengths, _statistics(state), state.cache)


def stream(
    model: HybridLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    drafter: Drafter | None = None,
    topology: TreeTopology | None = None,
    verifier: str | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos_token: int | Sequence[int] | None = None,
    max_length: int | None = None,
    key: jax.Array | None = None,
) -> Iterator[list[list[int]]]:
    """As `generate`, but yields the tokens as they are accepted.

    Arguments and errors are those of `generate`, with bad arguments refused at the call.

    Yields:
        After each target call the new tokens of each row; an empty list for a row that has ended.
    """
    request = plan(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        drafter=drafter,
        topology=topology,
        verifier=verifier,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eos_token=eos_token,
        max_length=max_length,
        key=key,
    )

    def steps() -> Iterator[list[list[int]]]:
        state = request.decoder.start(model, request.drafter, request.context, request.keys)
        before = np.asarray(request.context.length)
        while not np.asarray(state.done).all():
            state, _, _ = request.decoder.step(
                model, request.drafter, state, request.limits, request.sampling
            )
            _check_finite(state)
            after, rows = np.asarray(state.context.length), np.asarray(state.context.tokens)
            yield [row[a:b].tolist() for row, a, b in zip(rows, before, after, strict=True)]
            before = after

    return steps()


class Plan(NamedTuple):
    """A request that was checked: the program to run and what to run it on."""

    decoder: SpeculativeDecoder
    drafter: Drafter | None
    context: Context
    keys: Array
    limits: Limits
    sampling: Sampling


def plan(
    model: HybridLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    drafter: Drafter | None = None,
    topology: TreeTopology | None = None,
    verifier: str | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos_token: int | Sequence[int] | None = None,
    max_length: int | None = None,
    key: jax.Array | None = None,
) -> Plan:
    """Checks a request; arguments and errors are those of `generate`. Compiles nothing."""
    if not isinstance(model, HybridLM):
        raise ValueError(
            f"model must be a HybridLM, got {type(model).__name__}; load one with from_pretrained"
        )
    vocab_size = model.config.vocab_size
    context = _checked_prompts(prompts, vocab_size)
    _check_int("max_new_tokens", max_new_tokens, 1)
    _check_int("top_k", top_k, 0)
    if not (isinstance(temperature, numbers.Real) and 0 <= temperature < math.inf):
        raise ValueError(f"temperature must be a number from 0 on, got {temperature!r}")
    if 0 < temperature < np.finfo(np.float32).tiny:
        raise ValueError(f"temperature = {temperature!r} is 0 in float32; use 0")
    if not (isinstance(top_p, numbers.Real) and 0 < top_p <= 1):
        raise ValueError(f"top_p must be in (0, 1], got {top_p!r}")
    eos_tokens = [] if eos_token is None else np.ravel(eos_token).tolist()
    for token in eos_tokens:
        _check_int("eos_token", token, 0, vocab_size - 1)
    _check_length(context, max_new_tokens, max_length, model.config.max_length)
    greedy = temperature == 0
    if key is None and not greedy:
        raise ValueError("temperature > 0 needs a random key: pass key=jax.random.key(0)")

    if drafter is not None and (isinstance(drafter, type) or not isinstance(drafter, Drafter)):
        raise ValueError(
            f"drafter must be a ModelDrafter(...) or NgramDrafter(...), got {drafter!r:.80}"
        )
    topology = _checked_topology(topology, drafter, vocab_size)
    if isinstance(drafter, ModelDrafter) and drafter.model.config.vocab_size != vocab_size:
        raise ValueError(
            f"draft and target have different vocabularies: {drafter.model.config.vocab_size} and"
            f" {vocab_size} tokens; they must share one tokenizer"
        )
    chosen = _checked_verifier(verifier, drafter, topology, greedy=greedy)
    if topology.num_nodes == 1:  # nothing to draft and nothing to test
        drafter = None
        chosen = chosen if greedy else VERIFIERS["target_only"]
    decoder = SpeculativeDecoder(
        topology=topology,
        verifier=chosen,
        filtered=not greedy and (top_k > 0 or top_p < 1),
        capacity=_round_up(max_new_tokens, _ROUND),
        # A step on a GPU is short beside a wait of the host and copies of what each layer leaves.
        rounds=1 if dispatch.device_obstacle() else 2,
    )
    return Plan(
        decoder,
        drafter,
        context,
        _row_keys(jax.random.key(0) if key is None else key, len(prompts)),
        Limits(jnp.int32(max_new_tokens), jnp.asarray(eos_tokens or [-1], jnp.int32)),
        Sampling(jnp.float32(temperature), jnp.int32(min(top_k, vocab_size)), jnp.float32(top_p)),
    )


def _checked_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> Context:
    """Right-padded prompts in a buffer of rounded size."""
    if len(prompts) == 0:
        raise ValueError("prompts is empty; pass a list with at least one list of token ids")
    rows = []
    for i, prompt in enumerate(prompts):
        try:
            row = np.asarray(prompt)
        except ValueError:  # lists of different lengths inside
            row = np.empty((0, 0))
        if isinstance(prompt, str) or row.ndim != 1:
            raise ValueError(
                f"prompts[{i}] is not a list of token ids: prompts is a list of lists, one a row"
            )
        if row.size == 0:
            raise ValueError(f"prompts[{i}] is empty; a prompt has at least one token")
        if not np.issubdtype(row.dtype, np.integer):
            raise ValueError(f"prompts[{i}] has {row.dtype} values; token ids are integers")
        outside = row[(row < 0) | (row >= vocab_size)]
        if outside.size:
            raise ValueError(
                f"prompts[{i}] has token id {outside[0]}, outside the vocabulary of {vocab_size}"
            )
        rows.append(row)
    longest = max(map(len, rows))
    # Few widths, so that nearby requests share one compiled program.
    width = (
        _round_up(longest, PIECE)
        if longest > PIECE
        else max(_ROUND, 1 << (longest - 1).bit_length())
    )
    tokens = np.zeros((len(rows), width), np.int32)
    for buffer, row in zip(tokens, rows, strict=True):
        buffer[: len(row)] = row
    return Context(jnp.asarray(tokens), jnp.asarray([len(row) for row in rows], jnp.int32))


def _checked_topology(
    topology: TreeTopology | None, drafter: Drafter | None, vocab_size: int
) -> TreeTopology:
    if topology is None:
        topology = TreeTopology.chain(0) if drafter is None else drafter.default_topology()
    if not isinstance(topology, TreeTopology):
        raise ValueError(f"topology must be a TreeTopology, got {topology!r}")
    if drafter is None and topology.num_nodes > 1:
        raise ValueError(
            f"a tree of {topology.num_nodes} nodes needs a drafter: pass drafter=ModelDrafter(...)"
        )
    branching = max(map(len, topology.children))
    if branching > vocab_size:
        raise ValueError(f"nodes with {branching} children, but only {vocab_size} tokens exist")
    return topology.level_order()


def _checked_verifier(
    name: str | None, drafter: Drafter | None, topology: TreeTopology, *, greedy: bool
) -> Verifier:
    children = "top_k" if drafter is None else drafter.children(topology, greedy=greedy)
    if name is None:
        if greedy:
            name = "greedy"
        elif children == "iid":
            name = "multi_step"
        else:
            name = "without_replacement" if children == "without_replacement" else "target_only"
    if not isinstance(name, str) or name not in VERIFIERS:
        raise ValueError(f"unknown verifier {name!r}; known: {sorted(VERIFIERS)}")
    verifier = VERIFIERS[name]
    verifier.check(children, topology, greedy=greedy)
    # At temperature 0 the one token that the target can sample is its best.
    return VERIFIERS["greedy"] if greedy else verifier


def _check_length(
    context: Context, max_new_tokens: int, max_length: int | None, made_for: int | None
) -> None:
    """Attention's positions end somewhere: what would go beyond is refused, not cut."""
    if max_length is not None:
        _check_int("max_length", max_length, 1)
    limit = made_for if max_length is None else max_length
    lengths = np.asarray(context.length)
    row = int(lengths.argmax())
    wanted = int(lengths[row]) + max_new_tokens
    if limit is not None and wanted > limit:
        way_out = "" if max_length is not None else "; max_length = ... goes beyond it"
        raise ValueError(
            f"prompts[{row}] has {lengths[row]} tokens and max_new_tokens = {max_new_tokens}: in"
            f" all {wanted}, and the limit is {limit}" + way_out
        )


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):  # type: ignore[operator]
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be an integer, {span}; got {value!r}")


def _row_keys(key: Array, batch: int) -> Array:
    """One random stream a row, so that what a row draws does not depend on its neighbours."""
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        try:
            key = jax.random.wrap_key_data(jnp.asarray(key))
        except (TypeError, ValueError):
            raise ValueError(
                f"key must be a random key such as jax.random.key(0), got {key!r:.80}"
            ) from None
    if key.ndim:
        raise ValueError(f"key must be a single random key, got an array of shape {key.shape}")
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(batch))


def _check_finite(state: DecodeState) -> None:
    failed = np.asarray(state.failed)
    if failed.any():
        row = int(np.flatnonzero(failed)[0])
        which = "draft" if failed[row] == DRAFT_FAILED else "target"
        raise FloatingPointError(
            f"the {which} model's logits are not finite in row {row}, after"
            f" {int(np.asarray(state.emitted)[row])} new tokens; generation was stopped"
        )


def _statistics(state: DecodeState) -> DecodeStatistics:
    counts = jax.tree.map(np.asarray, state.statistics)
    calls, tokens = int(counts.target_calls.sum()), int(counts.emitted.sum())
    return DecodeStatistics(
        tau=tokens / calls,
        num_target_calls=calls,
        num_tokens=tokens,
        num_drafted=int(counts.drafted.sum()),
        num_accepted=int(counts.accepted.sum()),
        accepted_per_depth=counts.accepted_per_depth.sum(axis=0),
        tau_per_row=counts.emitted / counts.target_calls,
        target_calls_per_row=counts.target_calls,
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
