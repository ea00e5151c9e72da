"""What keeps a program from giving a token the same bits in every tree and batch."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxprs_in_params

from pallas_kernels import dispatch, log_softmax, triton
from stree_jax.mesh.partition import ONE_DEVICE
from stree_jax.models.cache import empty_path
from stree_jax.models.lm import HybridLM
from stree_jax.tree import TreeTopology

# Operations of jax that take several numbers to one, in an order that is not written.
_SUMS = {"conv_general_dilated", "dot_general", "ragged_dot_general", "reduce", "reduce_window"}
_SUMS |= {"cumlogsumexp", "cumprod", "cumsum", "reduce_prod", "reduce_sum", "reduce_window_sum"}
_SUMS |= {"scatter-add", "scatter-mul"}


@jax.transfer_guard("allow")
def bits_obstacle(
    model: HybridLM, nodes: int = 2, rows: int = 1, *, to_the_bit: bool = False
) -> str | None:
    """Why a token's log-probabilities are not the same to the bit in every tree and batch.

    None: they are. On a CPU this holds for packed models whose sums are all in native code, or in
    an order that is written, and for chunks of prompts too. On a GPU it holds for models in
    bfloat16 or 8 bits whose kernels have one order; prompts are read in XLA's. The model is traced
    on a tree.

    Args:
        model: the target.
        nodes: nodes of the tree of each row; kernels take a faster algorithm for large trees.
        rows: rows of the batch.
        to_the_bit: of `generate(to_the_bit=True)`, which runs no faster algorithm.
    """
    device, is_interpreted = dispatch.device_of(model), model.implementation == "pallas_interpret"
    on_cpu = device.platform == "cpu" and not is_interpreted
    if model.partition != ONE_DEVICE:
        return "it is on a mesh, whose devices add up their shares"
    if on_cpu:
        if not model.output_head.storage.sums_in_one_order:
            return "its matrices are not packed; model.packed() are"
    else:
        obstacle = triton.UNAVAILABLE or dispatch.device_obstacle(device)
        if obstacle and not is_interpreted:
            return obstacle
        if model.activation_dtype == jnp.float32:
            return "XLA orders products of float32 on a GPU; load the model with dtype='bfloat16'"
    parts = [*model.config.distinct_layers]
    for part in parts:
        if not part.equal_to_the_bit:
            return f"layers of kind {part.kind!r} do not promise it"
        parts += part.parts.values()
    sizes = nodes, rows, on_cpu, to_the_bit
    with dispatch.on(model):
        if not _has_other_orders(_traced.trace(model, *sizes).jaxpr.jaxpr):
            return None
        with dispatch.recorded() as ran:  # once more: a trace that jax has kept records nothing
            program = jax.make_jaxpr(functools.partial(_log_probs, sizes=sizes))(model).jaxpr
    scope = next(sums_in_other_orders(program))
    how = ran.get(scope.rpartition("/")[2])
    return f"the order of sums may change in {scope}" + (f" ({how})" if how else "")


@functools.lru_cache(maxsize=16)
def _has_other_orders(program: Jaxpr) -> bool:
    """Of a trace that jax keeps: each request asks, and large models have many operations."""
    return next(sums_in_other_orders(program), None) is not None


def sums_in_other_orders(program: Jaxpr, scope: str = "") -> Iterator[str]:
    """Yields the scope of each sum of floats in a program whose order may change with its sizes.

    These are XLA's sums, and kernels that are not in `triton.IN_ONE_ORDER`.
    """
    for equation in program.eqns:
        inside = "/".join(filter(None, (scope, str(equation.source_info.name_stack))))
        if equation.primitive.name == "pallas_call":
            name = equation.params["name"]
            if name not in triton.IN_ONE_ORDER:
                yield f"{inside}/{name}"
            continue
        results: list[Any] = [variable.aval for variable in equation.outvars]
        is_sum = equation.primitive.name in _SUMS
        if is_sum and any(jnp.issubdtype(result.dtype, jnp.inexact) for result in results):
            yield inside
        for inner in jaxprs_in_params(equation.params):
            yield from sums_in_other_orders(inner, inside)


def _log_probs(model: HybridLM, sizes: tuple[int, int, bool, bool]) -> Any:
    """What a model computes of a tree after a replay, and on a CPU of a sequence."""
    nodes, rows, with_sequence, to_the_bit = sizes
    with dispatch.to_the_bit(to_the_bit):
        tokens, lengths = jnp.zeros((rows, nodes), jnp.int32), jnp.ones(rows, jnp.int32)
        cache, results = model.init_cache(rows, nodes + 2), []
        if with_sequence:
            hidden, cache = model.prefill_hidden(tokens, lengths, cache)
            results.append(log_softmax(model.logits(hidden)))
        tree = TreeTopology.chain(nodes - 1).tree(jnp.ones((rows, nodes), bool))
        path = empty_path(rows, nodes)
        replay = model.init_pending(rows, nodes), path
        logits, pending, cache = model.tree_forward(tokens, tree, cache, replay=replay)
        return results, log_softmax(logits), model.replay(cache, pending, path)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _traced(model: HybridLM, *sizes: Any) -> Any:
    return _log_probs(model, sizes)
