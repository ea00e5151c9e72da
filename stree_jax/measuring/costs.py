"""Measured costs of the parts of a decode step on this device."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import dispatch
from pallas_kernels.numerics import best_of
from stree_jax.array_types import Float
from stree_jax.decoding.drafters import Drafter
from stree_jax.decoding.drafters.base import first_state, inner_layers
from stree_jax.decoding.options import Options
from stree_jax.decoding.plan import Plan, plan
from stree_jax.decoding.sampling import position_noise
from stree_jax.decoding.types import Step, Verdict
from stree_jax.measuring.clock import Progress, silent
from stree_jax.models.cache import Cache, path_to
from stree_jax.models.lm import HybridLM
from stree_jax.tree import TreeTopology

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
WIDTHS = (1, 2, 4, 8, 16, 32)
_ROUNDS = 5
_SECONDS = 0.05  # shortest sample; below it is noise


class Costs(NamedTuple):
    """Seconds of the parts of a decode step of one row, interpolated between measured sizes.

    Attributes:
        target: seconds of a target call, by number of nodes.
        first_level: seconds to draft the children of the root.
        level: seconds to draft a level below, by number of nodes whose children are drafted.
    """

    target: dict[int, float]
    first_level: float
    level: dict[int, float]

    def step(self, topology: TreeTopology) -> float:
        """Seconds of a step with a tree."""
        inner = np.zeros(topology.depth + 1, int)
        for depth, children in zip(topology.depths, topology.children, strict=True):
            inner[depth] += bool(children)
        first = self.first_level if topology.depth else 0.0
        levels = sum(_interpolated(self.level, count) for count in inner[1:-1].tolist())
        return _interpolated(self.target, topology.num_nodes) + first + levels


def _interpolated(table: dict[int, float], size: int) -> float:
    sizes = sorted(table)
    return float(np.interp(size, sizes, [table[at] for at in sizes]))


def measure_costs(
    model: HybridLM,
    drafter: Drafter,
    prompt: list[int],
    options: Options,
    *,
    max_nodes: int,
    max_depth: int,
    sizes: Sequence[int] = SIZES,
    widths: Sequence[int] = WIDTHS,
    progress: Progress = silent,
) -> Costs:
    """Times the parts of a step after a prompt, as options say it, interleaved; takes medians.

    `sizes` and `widths` are numbers of nodes of target calls and of draft levels, up to those of
    the largest tree; each compiles.
    """
    sizes = [size for size in sizes if size < max_nodes] + [max_nodes]
    widths = [width for width in widths if width < max_nodes // 2] + [max_nodes // 2]
    options = dataclasses.replace(options, max_new_tokens=8)

    def drafts(topology: TreeTopology) -> Callable[[int], object]:
        request = plan(model, [prompt], options, drafter=drafter, topology=topology)
        return drafting(model, request)

    with dispatch.on(model):
        plain = plan(model, [prompt], options)
        cache = plain.decoder.start(model, None, plain.context, plain.keys).cache
    parts: dict[Any, Callable[[int], object]] = {("draft", "first"): drafts(TreeTopology.chain(1))}
    for size in sizes:
        # A balanced tree: the cost depends on the number of nodes only.
        tree = TreeTopology(tuple((node - 1) // 2 if node else -1 for node in range(size)))
        parts["target", size] = functools.partial(_target_calls, model, cache, topology=tree)
    if max_depth > 1:
        for width in widths:
            parts["draft", width] = drafts(TreeTopology.from_branching((width, 1)))
    with dispatch.on(model):
        seconds = medians(parts, progress)

    first = seconds["draft", "first"]
    return Costs(
        target={size: seconds["target", size] for size in sizes},
        first_level=first,
        level={width: max(seconds.get(("draft", width), 0.0) - first, 0.0) for width in widths},
    )


def drafting(model: HybridLM, request: Plan) -> Callable[[int], object]:
    """A part of a step: so many trees are drafted one after the other, without the target."""
    decoder, drafter, context, *_ = request
    assert drafter is not None
    topology = decoder.topology
    with dispatch.on(model):
        state = first_state(drafter, context.length, topology, decoder.max_length)
    noise = None
    if not request.sampling.temperature_is_zero:  # made once per step for both models
        size = topology.depth, model.config.vocab_size
        noise = position_noise(request.keys, context.length, *size)
    room = decoder.capacity - context.tokens.shape[1]
    context = context._replace(tokens=jnp.pad(context.tokens, ((0, 0), (0, room))))
    step = Step(context, request.keys, noise, request.sampling)
    width = (1 + len(inner_layers(drafter) or ())) * model.config.d_model
    states = len(context.length), topology.num_nodes, width
    hidden = jnp.zeros(states, model.dtype)  # the target's
    return functools.partial(_drafts, drafter, state, step, hidden, topology=topology)


def medians(parts: dict[Any, Callable[[int], object]], progress: Progress) -> dict:
    """Seconds of one iteration of each part."""
    counts = {}
    for done, (name, part) in enumerate(parts.items(), 1):
        jax.block_until_ready(part(1))  # compiles
        progress("timing parts of a step", done, len(parts))
        once = seconds_of(part, 4) / 4
        counts[name] = int(np.clip(_SECONDS / once, 4, 1000))
    samples: dict[Any, list[float]] = {name: [] for name in parts}
    for _ in range(_ROUNDS):
        for name, part in parts.items():
            # Two lengths, so that the overhead of a call cancels.
            few, many = seconds_of(part, counts[name] // 4), seconds_of(part, counts[name])
            samples[name].append((many - few) / (counts[name] - counts[name] // 4))
    return {name: float(np.median(values)) for name, values in samples.items()}


def seconds_of(part: Callable[[int], object], count: int) -> float:
    """Seconds of one call of a part, with so many iterations."""
    began = time.perf_counter()
    jax.block_until_ready(part(count))
    return time.perf_counter() - began


@functools.partial(jax.jit, static_argnames="topology")
def _target_calls(
    model: HybridLM, cache: Cache, count: int | jax.Array, *, topology: TreeTopology
) -> Any:
    """Calls of the target on one tree, each after the replay of an empty path."""
    tree = topology.tree(jnp.ones((1, topology.num_nodes), bool))
    path = path_to(tree, jnp.array([-1], jnp.int32))
    nodes = jnp.arange(topology.num_nodes, dtype=jnp.int32)[None]
    vocab_size = model.config.vocab_size

    def call(_: Any, carry: Any) -> Any:
        tokens, pending, cache = carry
        logits, pending, cache = model.tree_forward(tokens, tree, cache, replay=(pending, path))
        # The next tree depends on every node of this one. Its tokens differ, as those of a drafted
        # tree do: equal ones would choose the same experts, and fewer would be read.
        best = best_of(logits, vocab_size)[0].sum(axis=1, keepdims=True, dtype=jnp.int32)
        return (best + nodes) % vocab_size, pending, cache

    carry = (nodes % vocab_size, model.init_pending(1, topology.num_nodes), cache)
    return lax.fori_loop(0, count, call, carry)[0]


@functools.partial(jax.jit, static_argnames="topology")
def _drafts(
    drafter: Drafter,
    state: Any,
    step: Step,
    hidden: Float[jax.Array, "B N width"],
    count: int | jax.Array,
    *,
    topology: TreeTopology,
) -> Any:
    """Drafts trees and discards them."""
    context, zeros = step.context, jnp.zeros_like(step.context.length)
    verdict = Verdict(zeros - 1, zeros, zeros)

    def draft(_: Any, carry: Any) -> Any:
        state, last = carry
        # The next tree depends on this one, or XLA drafts once.
        places = jnp.arange(context.tokens.shape[1], dtype=jnp.int32)[None]
        at_root = places == context.length[:, None] - 1
        linked = context._replace(tokens=jnp.where(at_root, last[:, None], context.tokens))
        tree, state = drafter.propose(state, step._replace(context=linked), topology)
        state = drafter.commit(state, tree, verdict, hidden, topology)
        return state, tree.tokens[:, -1]

    return lax.fori_loop(0, count, draft, (state, zeros))[1]
