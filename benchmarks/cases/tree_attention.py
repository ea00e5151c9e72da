"""`tree_attention`, for trees and prompts, and `tree_attention_layer`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from benchmarks.cases.base import Case, Problem, accepted, draw, trees
from benchmarks.shapes import ATTENTIONS, AttentionShape
from pallas_kernels.tree_attention import config, pallas_triton, pallas_triton_layer, reference
from stree_jax.models import AttentionConfig

PROMPT = "tree_attention of a prompt"
_POSITIONS_PER_NODE = 8  # 64 nodes: the 512 tokens of a chunk of a prompt


def _tree_operands(problem: Problem) -> tuple[jax.Array, ...]:
    return _operands(problem, trees(problem)[1])


def _prompt_operands(problem: Problem) -> tuple[jax.Array, ...]:
    """A chunk of a prompt, after a cache."""
    problem = problem._replace(nodes=_POSITIONS_PER_NODE * problem.nodes)
    causal = np.tri(problem.nodes, dtype=bool)
    return _operands(problem, np.broadcast_to(causal, (problem.batch, *causal.shape)))


def _operands(problem: Problem, masks: np.ndarray) -> tuple[jax.Array, ...]:
    heads, groups, head_dim = problem.shape
    normal, batch, nodes = draw(problem), problem.batch, problem.nodes
    length = np.full(batch, problem.capacity)
    length[1:2] = problem.capacity // 3
    return (
        normal(batch, nodes, heads, head_dim),
        *(normal(batch, nodes, groups, head_dim) for _ in range(2)),
        *(normal(batch, groups, problem.capacity, head_dim) for _ in range(2)),
        jnp.asarray(length, jnp.int32),
        jnp.asarray(masks),
    )


def _attention(query: jax.Array, *arguments: jax.Array, **options: Any) -> jax.Array:
    return pk.tree_attention(query, *arguments, scale=query.shape[-1] ** -0.5, **options)


def _with_blocks(query: Any, *rest: Any, blocks: Any, interpret: bool) -> jax.Array:
    shape = AttentionShape(query.shape[2], rest[2].shape[1], query.shape[3])
    blocks = _block_sizes(blocks, query, shape, rest[2])
    options = dict(scale=query.shape[-1] ** -0.5, blocks=blocks, interpret=interpret)
    return pallas_triton.tree_attention(query, *rest, **options)


def _block_sizes(blocks: Any, queries: Any, shape: AttentionShape, keys: Any) -> Any:
    """The block sizes that a `Choice` gives for these arrays; block sizes pass unchanged."""
    if not isinstance(blocks, config.Choice):
        return blocks
    batch, num_queries = queries.shape[:2]
    return config.block_sizes(
        queries.dtype,
        num_rows=num_queries * shape.num_heads // shape.num_kv_heads,
        num_groups=batch * shape.num_kv_heads,
        capacity=keys.shape[2],
        head_dim=shape.head_dim,
        choice=blocks,
    )


def _truth(query: Any, *rest: Any) -> tuple[np.ndarray]:
    *arguments, _ = rest
    return (reference.tree_attention(query, *arguments, scale=query.shape[-1] ** -0.5),)


def _unfilled(keys: Any, values: Any, length: Any) -> int:
    """Bytes of a cache beyond its length."""
    filled = int(length.sum()) / (keys.shape[0] * keys.shape[2])
    return round((1 - filled) * (keys.nbytes + values.nbytes))


def _layer_operands(problem: Problem) -> tuple[jax.Array, ...]:
    """The last operands are the cache; see `_layer_call`."""
    _, old_keys, old_values, keys, values, length, masks = _tree_operands(problem)
    columns = _layout(problem.shape).num_columns
    length = jnp.maximum(length - problem.nodes, 0)  # so that the path fits
    return (
        draw(problem._replace(seed=problem.seed + 1))(problem.batch, problem.nodes, columns),
        *(masks.sum(axis=2, dtype=jnp.int32) - 1, masks),
        *(old_keys, old_values, jnp.asarray(accepted(problem))),
        *(length, values, keys),
    )


def _layout(shape: AttentionShape) -> pk.AttentionLayout:
    return AttentionConfig(*shape, rotary_dim=shape.head_dim).layout


def _layer_shape(projected: Any, keys: Any) -> AttentionShape:
    groups, head_dim = keys.shape[1], keys.shape[3]
    return AttentionShape(projected.shape[-1] // head_dim - 2 * groups, groups, head_dim)


def _layer_call(function: Callable[..., Any]) -> Callable[..., tuple]:
    """The layer on flat operands; returns all of its outputs, the cache's keys last.

    The length is always that before the path, so that repeated calls do the same work.
    """

    def call(*operands: Any, **options: Any) -> tuple:
        projected, depth, mask, old_keys, old_values, path, length, values, keys = operands
        y, nodes, cache = function(
            *(projected, pk.KVCache(keys, values, length), depth, mask),
            layout=_layout(_layer_shape(projected, keys)),
            prefix_pending=None,
            previous=(pk.NodeKV(old_keys, old_values), path),
            **options,
        )
        return (y, *nodes, cache.values, cache.keys)

    return call


def _layer_with_blocks(*operands: Any, blocks: Any, interpret: bool) -> tuple:
    projected, keys = operands[0], operands[-1]
    blocks = _block_sizes(blocks, projected, _layer_shape(projected, keys), keys)
    call = _layer_call(pallas_triton_layer.tree_attention_layer)
    return call(*operands, blocks=blocks, interpret=interpret)


def _true_layer(*operands: Any) -> tuple[np.ndarray, ...]:
    projected, depth, mask, old_keys, old_values, path, length, values, keys, _ = operands
    y, nodes, (keys, values, _) = reference.tree_attention_layer(
        *(projected, (keys, values, length), depth, mask),
        layout=_layout(_layer_shape(projected, keys)),
        previous=(old_keys, old_values, path),
    )
    return (y, *nodes, values, keys)


def _layer_unread(operands: tuple) -> int:
    """The cache beyond its length, and the cache as a result: only the path is written."""
    length, values, keys = operands[-3:]
    return keys.nbytes + values.nbytes + _unfilled(keys, values, length)


_TREE = Case(
    _attention,
    _with_blocks,
    _tree_operands,
    _truth,
    ("output",),
    ATTENTIONS,
    unread=lambda operands: _unfilled(*operands[3:6]),
)
CASES = {
    "tree_attention": _TREE,
    PROMPT: _TREE._replace(operands=_prompt_operands),
    "tree_attention_layer": Case(
        _layer_call(pk.tree_attention_layer),
        _layer_with_blocks,
        _layer_operands,
        _true_layer,
        ("output",) * 5,
        ATTENTIONS,
        feedback={-2: -2, -1: -1},
        unread=_layer_unread,
    ),
}
