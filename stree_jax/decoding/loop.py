"""The speculative loop: draft, forward (which first replays the previous step's path), verify.

A one-node tree is autoregressive decoding and a chain is vanilla speculative decoding, so there is
one loop for all of them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from pallas_kernels import dispatch
from stree_jax.array_types import Array
from stree_jax.checks import check_ids, check_int
from stree_jax.decoding.drafters import Drafter
from stree_jax.decoding.prefix.prefix import Prefix, read_text
from stree_jax.decoding.processors import first_states
from stree_jax.decoding.prompts import MAX_TOKENS
from stree_jax.decoding.rules import rule_specs
from stree_jax.decoding.step import buffer_depth, decode_step, settled
from stree_jax.decoding.traced_checks import check_keys, checked_prompts, checked_settings
from stree_jax.decoding.types import (
    Context,
    DecodeState,
    DraftTree,
    Limits,
    Sampling,
    Statistics,
    TokenLogProbs,
    Verdict,
    state_specs,
)
from stree_jax.decoding.verifiers import Verifier, verifier_of
from stree_jax.mesh.partition import ROWS
from stree_jax.mesh.programs import on_mesh
from stree_jax.messages import shown
from stree_jax.models.cache import empty_path
from stree_jax.models.lm import HybridLM, check_model
from stree_jax.tree import TreeTopology

MAX_STEPS = 2**31 - 1  # the loop counts them in int32


def _run_specs(model: HybridLM) -> Any:
    specs, whole = state_specs(model), PartitionSpec()
    return (specs, ROWS, rule_specs, whole, whole), specs


def _step_specs(model: HybridLM) -> Any:
    specs: Any = state_specs(model)
    draft: Any = DraftTree(ROWS, ROWS, ROWS, PartitionSpec(), ROWS, ROWS)  # type: ignore[arg-type]
    return (specs, ROWS, rule_specs), (specs, draft, ROWS)


def check_not_donated(state: DecodeState) -> None:
    """Refuses a state that was given to `run`, `step` or `insert` before."""
    is_known = isinstance(state.done, jax.Array) and not isinstance(state.done, jax.core.Tracer)
    if is_known and state.done.is_deleted():  # NumPy's arrays are never donated
        raise ValueError("the state was donated: use the state that run returned")


def _donating(program: Any) -> Any:
    """Decorates a compiled method that donates its state."""
    allowed = jax.transfer_guard("allow")(program)  # of `max_steps`

    @functools.wraps(program)
    def call(decoder: Any, model: Any, drafter: Any, state: Any, *more: Any, **named: Any) -> Any:
        check_not_donated(state)
        return allowed(decoder, model, drafter, state, *more, **named)

    compiled: Any = call
    compiled.lower, compiled.trace = program.lower, program.trace
    return compiled


@dataclasses.dataclass(frozen=True)
class SpeculativeDecoder:
    """The static part of a decode program: everything but weights and arrays.

    Attributes:
        topology: the draft tree, nodes in level order.
        verifier: the verification rule, or its name in `VERIFIERS`.
        max_length: most tokens of a row, prompt and output. `plan` rounds it up, see `buffer_size`.
        steps_per_sync: steps per termination check, for which the host waits. With two steps in
            the loop's body XLA alternates between two buffers for a step's results; with one step
            it copies them. From 4 on, such bodies run in an inner loop of static trip count, which
            needs no check. Up to `steps_per_sync - 1` steps are wasted at the end.
        num_best: record the log-probability of each new token, and those of this many best ones;
            None: record nothing.
        record_calls: record which call emitted each new token, and whether it was a draft.
        to_the_bit: run the target by algorithms that give a token the same bits in every tree.

    Raises:
        ValueError: a bad size, no rule, or nodes in another order.
    """

    topology: TreeTopology | Any
    verifier: Verifier | Any
    max_length: int
    steps_per_sync: int = 1
    num_best: int | None = None
    record_calls: bool = False
    to_the_bit: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.topology, TreeTopology):
            raise ValueError(
                f"topology must be a TreeTopology, got {shown(self.topology)}; a choice of trees is"
                " made on the host, between runs, by generate, stream and Scheduler"
            )
        if self.topology != self.topology.level_order():
            raise ValueError("the nodes of topology are not in level order; use its level_order()")
        object.__setattr__(self, "verifier", verifier_of(self.verifier))
        check_int("max_length", self.max_length, 1, MAX_TOKENS)
        check_int("steps_per_sync", self.steps_per_sync, 1, MAX_STEPS)
        if self.num_best is not None:
            check_int("num_best", self.num_best, 0)

    @property
    def capacity(self) -> int:
        """Size of the token buffer: a whole path may be written past a row's end."""
        return self.max_length + self.topology.depth + 1

    def _checked(self, prompts: Context | Any) -> Context:
        """The prompts, which must have room."""
        prompts = checked_prompts(prompts)
        if (width := prompts.tokens.shape[1]) > self.capacity:
            raise ValueError(
                f"the prompts are a buffer of {width} tokens, and with max_length ="
                f" {self.max_length} a row has {self.capacity} places; cut the buffer, or make"
                f" max_length at least {width}"
            )
        return prompts

    @jax.transfer_guard("allow")
    def read(
        self,
        model: HybridLM,
        drafter: Drafter | None,
        prompts: Context | Any,
        before: Prefix | None = None,
    ) -> Prefix:
        """Prefills the prompts but for the last token of each, which becomes the first root.

        Args:
            model: the target.
            drafter: the drafter, which reads the same tokens.
            prompts: the texts.
            before: the prefix of their beginnings, which are not read again: as many rows, with
                buffers of any size; its drafter's state is one of `drafter`, or None.

        Raises:
            ValueError: the prompts are no `Context`, a buffer with more places than `capacity`, or
                ids outside the vocabulary; those of traced arrays are not checked.
        """
        check_model(model)
        prompts = self._checked(prompts)
        check_ids("prompts", prompts.tokens, model.config.vocab_size, prompts.length)
        return read_text(model, drafter, prompts, self.topology, self.max_length, before)

    @jax.transfer_guard("allow")
    def start(
        self,
        model: HybridLM,
        drafter: Drafter | None,
        prompts: Context | Any,
        keys: Array | Any,
        sampling: Sampling | None = None,
    ) -> DecodeState:
        """Prefills the prompts and starts a row with each.

        With logits processors `sampling` is that of `run`: their states begin here.
        """
        check_keys(keys, len(self._checked(prompts).length))
        prefix = self.read(model, drafter, prompts)
        callers = (model, drafter, prompts, keys, sampling)
        return self.start_from(model, prefix, keys, sampling, callers)

    @jax.transfer_guard("allow")
    def start_from(
        self,
        model: HybridLM,
        prefix: Prefix,
        keys: Array,
        sampling: Sampling | None = None,
        callers: Any = None,
    ) -> DecodeState:
        """Starts a row from each of a prefix that was read for this decoder and drafter.

        Args:
            model: the target.
            prefix: the prefix, with caches for `max_length` tokens.
            keys: one random key per row.
            sampling: with logits processors, the settings of `run`: their states begin here.
            callers: arrays of the caller, which the state must not share, since the loop donates
                it; None: those given here.
        """
        check_keys(keys, len(prefix.context.length))
        # Caches and the drafter's state bypass `begin`: passing through a program copies them.
        state = self.begin(model, prefix.context, keys)
        state = state._replace(cache=prefix.cache, drafter=prefix.drafter)
        if sampling is not None:
            processors = first_states(sampling.processors, prefix.context, model.config.vocab_size)
            state = state._replace(processors=processors)
        state = model.partition.put(state, model.partition.spec_of(len(state.done)))
        return owned(state, (prefix, keys, sampling) if callers is None else callers)

    @functools.partial(jax.jit, static_argnums=0)
    @on_mesh(lambda model: ((ROWS, ROWS), state_specs(model)._replace(cache=ROWS)), modules=1)
    def begin(self, model: HybridLM, prompts: Context | Any, keys: Array | Any) -> DecodeState:
        """The state before the first step, without cache and drafter."""
        prompts = self._checked(prompts)
        batch, width = prompts.tokens.shape
        num_nodes, depth = self.topology.num_nodes, self.topology.depth
        tokens = jnp.pad(prompts.tokens, ((0, 0), (0, self.capacity - width)))
        zeros = jnp.zeros(batch, jnp.int32)
        return DecodeState(
            context=Context(tokens, prompts.length),
            emitted=zeros,
            done=jnp.zeros(batch, bool),
            failed=zeros,
            cache=(),
            pending=model.init_pending(batch, num_nodes),
            path=empty_path(batch, num_nodes),
            drafter=None,
            processors=(),
            keys=jax.random.clone(keys),  # the loop donates the state, not the caller's keys
            step=zeros,
            statistics=Statistics(
                *[zeros] * 4, *(jnp.zeros((batch, size), jnp.int32) for size in (depth, num_nodes))
            ),
            stop=zeros,
            log_probs=None
            if self.num_best is None
            else TokenLogProbs.empty(batch, self.capacity, self.num_best),
            calls=jnp.zeros_like(tokens) if self.record_calls else None,
        )

    @_donating
    @functools.partial(jax.jit, static_argnums=0, donate_argnames="state")
    @on_mesh(_run_specs)
    def run(
        self,
        model: HybridLM,
        drafter: Drafter | None,
        state: DecodeState,
        limits: Limits | Any,
        sampling: Sampling | Any,
        max_steps: int | Array | None = None,
        stop_after_ended: int | Array | None = None,
    ) -> DecodeState:
        """Steps until all rows are done, in one program. Replays the last path too.

        Args:
            model: the target.
            drafter: the drafter given to `start`.
            state: a state from `start`, `run` or `stree_jax.decoding.slots`; donated. One that a
                decoder with a deeper chain has started serves any tree of fewer nodes too.
            limits: token limit and end-of-sequence tokens of each row.
            sampling: sampling settings of each row.
            max_steps: most steps, rounded up to a multiple of `steps_per_sync`; traced.
            stop_after_ended: return once this many rows have ended in this run; traced.

        On a mesh each shard of the batch counts its own steps and ended rows.
        """
        limits, sampling = checked_settings(limits, sampling, len(state.done))
        before, static = state, (self.topology, self.verifier)

        def unfinished(state: DecodeState) -> Array:
            go_on = jnp.any(~state.done)
            if max_steps is not None:  # steps are counted in every row
                go_on &= state.step[0] - before.step[0] < max_steps
            if stop_after_ended is not None:
                go_on &= (state.done & ~before.done).sum(dtype=jnp.int32) < stop_after_ended
            return go_on

        # The body closes over the weights, so that the loop does not carry them.
        def step(_: Any, state: DecodeState) -> DecodeState:
            return decode_step(*static, model, drafter, state, limits, sampling)[0]

        def some_steps(state: DecodeState) -> DecodeState:
            return lax.fori_loop(
                0, self.steps_per_sync, step, state, unroll=min(2, self.steps_per_sync)
            )

        record = state.pending, state.path
        if self.topology.depth < buffer_depth(state):  # no path waits: the last run replayed it
            sizes = len(state.done), self.topology.num_nodes
            pending, path = model.init_pending(*sizes), empty_path(*sizes)
            state = state._replace(pending=pending, path=path)
        with dispatch.to_the_bit(self.to_the_bit):
            state = settled(model, lax.while_loop(unfinished, some_steps, state))
        if self.topology.depth < buffer_depth(state):
            state = state._replace(pending=record[0], path=record[1])
        return state

    @_donating
    @functools.partial(jax.jit, static_argnums=0, donate_argnames="state")
    @on_mesh(_step_specs)
    def step(
        self,
        model: HybridLM,
        drafter: Drafter | None,
        state: DecodeState,
        limits: Limits | Any,
        sampling: Sampling | Any,
    ) -> tuple[DecodeState, DraftTree, Verdict]:
        """One iteration of `run`, for streaming and inspection."""
        limits, sampling = checked_settings(limits, sampling, len(state.done))
        static = self.topology, self.verifier
        with dispatch.to_the_bit(self.to_the_bit):
            return decode_step(*static, model, drafter, state, limits, sampling)


def owned(state: DecodeState, callers: Any) -> DecodeState:
    """Makes the first state safe to donate: it shares no buffer with the caller's arrays.

    If any of these arrays is committed to a device, so will be a step's result, and an uncommitted
    first state would make the second step compile again: so it is committed to the cache's device.
    Only shared buffers are copied, and NumPy's arrays, such as those of a prefix that was saved.
    """
    state = jax.tree.map(
        lambda leaf: leaf if isinstance(leaf, jax.Array) else jnp.array(leaf), state
    )
    first = jax.tree.leaves(state.cache)[0]
    if isinstance(first, jax.core.Tracer):  # inside a larger program
        return state
    where = first.sharding
    if isinstance(where, jax.sharding.NamedSharding):
        where = jax.sharding.NamedSharding(where.mesh, jax.sharding.PartitionSpec())
    leaves = jax.tree.leaves(callers)
    commits = any(map(_is_committed, [*leaves, *jax.tree.leaves(state)]))
    seen = {id(leaf) for leaf in leaves}

    def owned(leaf: Any) -> Any:
        if id(leaf) in seen:
            leaf = jnp.copy(leaf)
        seen.add(id(leaf))
        return jax.device_put(leaf, where) if commits and not _is_committed(leaf) else leaf

    return jax.tree.map(owned, state)


def _is_committed(leaf: Any) -> bool:
    return getattr(leaf, "committed", False)
