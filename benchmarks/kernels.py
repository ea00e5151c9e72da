"""Every kernel with operands of real shapes: what the tuner and the GPU session check and time."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels as pk
import stree_jax as st
from benchmarks.shapes import (
    ATTENTIONS,
    EXPERTS,
    HEADS,
    MIXERS,
    AttentionShape,
    ExpertShape,
    HeadShape,
    MixerShape,
)
from pallas_kernels.add_rms_norm import pallas_triton as add_norm_kernel
from pallas_kernels.add_rms_norm.reference import add_rms_norm as add_norm_reference
from pallas_kernels.attention_tree import pallas_triton as layer_kernel
from pallas_kernels.attention_tree.reference import attention_tree as layer_reference
from pallas_kernels.best_token import pallas_triton as head_kernel
from pallas_kernels.best_token.reference import best_token as head_reference
from pallas_kernels.expert_mlps import pallas_triton as expert_kernel
from pallas_kernels.expert_mlps.reference import expert_mlps as expert_reference
from pallas_kernels.gated_rms_norm import pallas_triton as norm_kernel
from pallas_kernels.gated_rms_norm.reference import gated_rms_norm as norm_reference
from pallas_kernels.mamba2_tree import pallas_triton as mixer_kernel
from pallas_kernels.mamba2_tree.reference import mamba2_tree as mixer_reference
from pallas_kernels.replay import pallas_triton as replay_kernel
from pallas_kernels.replay.reference import replay as replay_reference
from pallas_kernels.replay_tree_scan import pallas_triton as fused_kernel
from pallas_kernels.replay_tree_scan.reference import replay_tree_scan as fused_reference
from pallas_kernels.ssd import pallas_triton as ssd_kernel
from pallas_kernels.ssd.reference import ssd as ssd_reference
from pallas_kernels.tree_attention import config as attention_config
from pallas_kernels.tree_attention import pallas_triton as attention_kernel
from pallas_kernels.tree_attention.reference import tree_attention as attention_reference
from pallas_kernels.tree_conv1d import pallas_triton as conv_kernel
from pallas_kernels.tree_conv1d.reference import tree_conv1d as conv_reference
from pallas_kernels.tree_scan import pallas_triton as scan_kernel
from pallas_kernels.tree_scan.reference import tree_scan as scan_reference
from stree_jax.layer_config import AttentionConfig

# Relative error against float64, as the tests have it. bf16: rounding the output; a square has
# twice the error of what is squared; experts also round between their two matrices; a state is
# float32, and its products are split into two bf16 halves; a logit is a float32 sum of exact
# products.
LIMITS = {
    ("output", "float32"): 2e-6,
    ("output", "bfloat16"): 4e-3,
    ("square", "float32"): 4e-6,
    ("square", "bfloat16"): 8e-3,
    ("state", "float32"): 2e-6,
    ("state", "bfloat16"): 1e-5,
    ("experts", "float32"): 4e-6,
    ("experts", "bfloat16"): 8e-3,
    ("logit", "float32"): 2e-6,
    ("logit", "bfloat16"): 2e-6,
}
_DISTINCT = 8  # different trees in a batch
# Positions of a sequence, and of a piece of a prompt, in the place of each node of a tree.
_SCANNED_A_NODE = 15  # 13 nodes: no whole blocks
_READ_A_NODE = 8  # 64 nodes: the 512 that are read at a time


class Problem(NamedTuple):
    """What one kernel is given. The second row of a batch has an empty path, a third of a cache."""

    shape: MixerShape | AttentionShape | HeadShape | ExpertShape
    nodes: int
    dtype: str
    batch: int = 1
    capacity: int = 0  # of the attention's cache
    seed: int = 0


class Kernel(NamedTuple):
    """One op, and how to give it something to do.

    Attributes:
        function: takes the operands and an `implementation`.
        with_blocks: takes the operands, `blocks` and `interpret`.
        operands: of a problem, on the device.
        reference: takes the operands in float64 and the parents of the trees `[B, N]`.
        outputs: "output", "square", "experts", "state" or "logit" for each.
        feedback: operands that are updated in place, and the outputs that are their next values.
        shapes: of real models.
    """

    function: Callable[..., Any]
    with_blocks: Callable[..., Any]
    operands: Callable[[Problem], tuple[jax.Array, ...]]
    reference: Callable[..., tuple[np.ndarray, ...]]
    outputs: tuple[str, ...]
    feedback: Mapping[int, int]
    shapes: Mapping[str, Any]


def random_tree(nodes: int, seed: int) -> st.TreeTopology:
    """A tree of this size; each node's parent is one of the nodes before it."""
    rng = np.random.default_rng(seed)
    return st.TreeTopology((-1, *(int(rng.integers(0, i)) for i in range(1, nodes))))


def trees(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Parents `[B, N]` and ancestor masks `[B, N, N]`; the rows' trees differ."""
    few = [
        random_tree(problem.nodes, problem.seed + 100 * problem.nodes + row)
        for row in range(min(problem.batch, _DISTINCT))
    ]
    rows = [few[row % len(few)] for row in range(problem.batch)]
    return (
        np.array([tree.parents for tree in rows], np.int32),
        np.stack([tree.ancestor_mask for tree in rows]),
    )


def accepted(problem: Problem) -> np.ndarray:
    """A path of each tree `[B, N]`, to its last node; none in the second row."""
    path = trees(problem)[1][:, -1].copy()
    path[1:2] = False
    return path


def draw(problem: Problem) -> Callable[..., jax.Array]:
    """A function that draws arrays in the type of the activations, or another."""
    keys = iter(jax.random.split(jax.random.key(problem.seed), 64))

    def normal(*sizes: int, kind: str | None = None) -> jax.Array:
        return jax.random.normal(next(keys), sizes).astype(kind or problem.dtype)

    return normal


def _recurrent(problem: Problem) -> dict[str, jax.Array]:
    heads, channels, state, groups = problem.shape
    normal, batch, nodes = draw(problem), problem.batch, problem.nodes
    return {
        "x": normal(batch, nodes, heads, channels),
        "dt": jax.nn.softplus(normal(batch, nodes, heads, kind="float32")),
        "A": -jnp.exp(normal(heads, kind="float32")),
        "B": normal(batch, nodes, groups, state),
        "C": normal(batch, nodes, groups, state),
        "D": normal(heads, channels, kind="float32"),
        "state": normal(batch, heads, channels, state, kind="float32"),
    }


def _in_tree(problem: Problem) -> dict[str, jax.Array]:
    _, masks = trees(problem)
    both = {"mask": jnp.asarray(masks), "path": jnp.asarray(accepted(problem))}
    return _recurrent(problem) | both


def _of_state(*names: str) -> Callable[[Problem], tuple[jax.Array, ...]]:
    def operands(problem: Problem) -> tuple[jax.Array, ...]:
        values = _in_tree(problem)
        return tuple(values[name] for name in names)

    return operands


def _of_level(problem: Problem) -> tuple[jax.Array, ...]:
    """A tree that grows by its newest quarter."""
    x, dt, A, B, C, D, state, mask = KERNELS["tree_scan"].operands(problem)
    newest = -(-problem.nodes // 4)
    return x, dt, A, B, C[:, -newest:], D, state, mask


def _of_sequence(problem: Problem) -> tuple[jax.Array, ...]:
    """A prompt, which is longer than a tree."""
    return tuple(_recurrent(problem._replace(nodes=_SCANNED_A_NODE * problem.nodes)).values())


def _of_fused(problem: Problem) -> tuple[jax.Array, ...]:
    before = _in_tree(problem._replace(seed=problem.seed + 1))
    previous = tuple(before[name] for name in ("x", "dt", "B", "path"))
    return previous + KERNELS["tree_scan"].operands(problem)


def _of_conv(problem: Problem) -> tuple[jax.Array, ...]:
    heads, head_dim, state, groups = problem.shape
    channels, width = heads * head_dim + 2 * groups * state, 4
    normal = draw(problem)
    parents, _ = trees(problem)
    return (
        normal(problem.batch, problem.nodes, channels),
        normal(problem.batch, width - 1, channels),
        normal(width, channels),
        normal(channels),
        pk.conv_window(jnp.asarray(parents), width),
    )


def _of_mixer(problem: Problem) -> tuple[jax.Array, ...]:
    """The last operand is the state; see `_mixer_call`."""
    earlier = problem._replace(seed=problem.seed + 1)
    before = _in_tree(earlier)
    _, conv_state, weight, bias, window = _of_conv(problem)
    heads = problem.shape.num_heads
    layout = _layout(*problem.shape)
    normal, rows = draw(problem), (problem.batch, problem.nodes)
    _, masks = trees(problem)
    old_parents, last = _along(accepted(earlier))
    return (
        normal(*rows, layout.columns[-1] + heads),
        normal(heads * problem.shape.head_dim),
        *(weight, bias, *(normal(heads, kind="float32") for _ in range(3))),
        *(conv_state, window, jnp.asarray(masks)),
        *(before[name] for name in ("x", "dt", "B")),
        normal(*rows, layout.num_channels),
        before["path"],
        pk.replay_window(jnp.asarray(old_parents), jnp.asarray(last), weight.shape[0]),
        before["state"],
    )


def _layout(num_heads: int, head_dim: int, state_size: int, num_groups: int) -> pk.Layout:
    return pk.Layout(num_heads, head_dim, num_groups, state_size, num_heads, num_groups)


def _along(path: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Parents of the nodes of a path `[B, N]`, and its last node, -1 if it is empty."""
    parents, last = np.full(path.shape, -1, np.int32), np.full(len(path), -1, np.int32)
    for row, nodes in enumerate(map(np.flatnonzero, path)):
        parents[row, nodes[1:]] = nodes[:-1]
        last[row] = nodes[-1] if len(nodes) else -1
    return parents, last


def _mixer_call(function: Callable[..., Any], *, queued: bool = False) -> Callable[..., tuple]:
    """`mamba2_tree` of flat operands, gated and normed; returns all that it does, the state last.

    Of the mean squares' parts it returns the sum: how many there are depends on the block sizes.
    With `queued` the record is the second of two in a queue.
    """

    def call(projected: Any, norm_weight: Any, *operands: Any, **options: Any) -> tuple:
        *weights, conv_state, window, mask, x, dt, B, inputs, path, back, ssm = operands
        old = pk.Mamba2Pending(x, dt, B, inputs)
        y, record, ssm, conv_state = function(
            *(projected, pk.Mamba2Weights(*weights), ssm, conv_state, window, mask),
            layout=_layout(*ssm.shape[1:], B.shape[2]),
            grown=None,
            previous=pk.Previous(_second_of_two(old) if queued else old, path, back),
            gated=True,
            norm_weight=norm_weight,
            norm_epsilon=1e-5,
            **options,
        )
        if queued:
            record = pk.oldest_record(record, turns=1)
        return (y.value, jnp.sum(y.mean_squares, axis=-1), *record, conv_state, ssm)

    return call


def _second_of_two(record: pk.Mamba2Pending) -> pk.RecordQueue:
    """In a queue in which the layer before had its turn."""
    queue = pk.enqueued([jax.tree.map(jnp.ones_like, record), record])
    return queue._replace(oldest=queue.oldest + 1)


def _true_mixer(projected: Any, norm_weight: Any, *operands: Any) -> tuple[np.ndarray, ...]:
    *weights, conv_state, _, _, x, dt, B, inputs, path, _, ssm, parents = operands
    y, record, ssm, conv_state, mean_squares = mixer_reference(
        *(projected, weights, ssm, conv_state, parents),
        layout=_layout(*ssm.shape[1:], B.shape[2]),
        previous=((x, dt, B, inputs), path, *_along(path)),
        gated=True,
        norm_weight=norm_weight,
    )
    return (y, mean_squares, *record, conv_state, ssm)


def _of_norm(problem: Problem) -> tuple[jax.Array, ...]:
    normal, size = draw(problem), problem.shape.num_heads * problem.shape.head_dim
    rows = (problem.batch, problem.nodes, size)
    return normal(*rows), normal(*rows), normal(size)


def _of_add_norm(problem: Problem) -> tuple[jax.Array, ...]:
    """The output's mean squares are in four parts a head, as those of mamba2-2.7b."""
    residual, output, weight = _of_norm(problem)
    parts = jnp.square(
        draw(problem)(*output.shape[:2], 4 * problem.shape.num_heads, kind="float32")
    )
    return residual.astype("float32"), output, parts / parts.shape[-1], weight


def _add_norm_call(function: Callable[..., Any]) -> Callable[..., tuple]:
    """`add_rms_norm` of an unscaled output."""

    def call(residual: Any, output: Any, mean_squares: Any, weight: Any, **options: Any) -> tuple:
        return function(residual, pk.Unscaled(output, mean_squares, 1e-5), weight, **options)

    return functools.partial(call, **_ADD_NORM)


def _of_head(problem: Problem) -> tuple[jax.Array, ...]:
    width, vocab_size = problem.shape
    normal = draw(problem)
    return normal(problem.batch, problem.nodes, width), normal(vocab_size, width)


def _head_call(function: Callable[..., Any]) -> Callable[..., tuple]:
    """`best_token`; returns the best logits, and those that its tokens have."""

    def call(hidden: Any, head: Any, **options: Any) -> tuple:
        token, logit = function(hidden, head, **_head_options(head), **options)
        rows = head[token].astype("float32")
        have = jnp.einsum("bnm,bnm->bn", hidden.astype("float32"), rows, precision="highest")
        return logit, have

    return call


def _head_options(head: Any) -> dict[str, Any]:
    return {"vocab_size": head.shape[0], "multiplier": 1.0}


def _true_head(hidden: Any, head: Any, _: Any) -> tuple[np.ndarray, ...]:
    _, logit = head_reference(hidden.reshape(-1, hidden.shape[-1]), head, **_head_options(head))
    return (logit.reshape(hidden.shape[:2]),) * 2


def _of_experts(problem: Problem) -> tuple[jax.Array, ...]:
    """The matrices are scaled as those of a model, and the choices random."""
    width, hidden, experts, active, gated = problem.shape
    normal, tokens = draw(problem), problem.batch * problem.nodes
    weights, chosen = lax.top_k(normal(tokens, experts, kind="float32"), active)
    columns = 2 * hidden if gated else hidden
    return (
        normal(tokens, width),
        jax.nn.softmax(weights, axis=1),
        chosen,
        normal(experts, width, columns) * width**-0.5,
        normal(experts, hidden, width) * hidden**-0.5,
    )


def _of_experts_of_prompt(problem: Problem) -> tuple[jax.Array, ...]:
    return _of_experts(problem._replace(nodes=_READ_A_NODE * problem.nodes))


def _expert_call(function: Callable[..., Any]) -> Callable[..., jax.Array]:
    """`expert_mlps` of operands that are their own shape."""

    def call(*operands: Any, **options: Any) -> jax.Array:
        return function(*operands, **expert_options(operands), **options)

    return call


def expert_options(operands: tuple) -> dict[str, Any]:
    """Of these operands: Granite's experts are gated and activated by silu, Nemotron's neither."""
    *_, experts_in, experts_out = operands
    gated = experts_in.shape[2] != experts_out.shape[1]
    return {"activation": "silu" if gated else "relu2", "gated": gated}


def _true_experts(*operands: Any) -> tuple[np.ndarray]:
    *operands, _ = operands
    return (expert_reference(*operands, **expert_options(operands)),)


def _of_attention(problem: Problem) -> tuple[jax.Array, ...]:
    return _attended(problem, trees(problem)[1])


def _of_prompt(problem: Problem) -> tuple[jax.Array, ...]:
    """A piece of a prompt, behind a cache."""
    problem = problem._replace(nodes=_READ_A_NODE * problem.nodes)
    causal = np.tri(problem.nodes, dtype=bool)
    return _attended(problem, np.broadcast_to(causal, (problem.batch, *causal.shape)))


def _attended(problem: Problem, masks: np.ndarray) -> tuple[jax.Array, ...]:
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


def _attention_with_blocks(query: Any, *rest: Any, blocks: Any, interpret: bool) -> jax.Array:
    shape = AttentionShape(query.shape[2], rest[2].shape[1], query.shape[3])
    blocks = _shared(blocks, query, shape, rest[2])
    options = dict(scale=query.shape[-1] ** -0.5, blocks=blocks, interpret=interpret)
    return attention_kernel.tree_attention(query, *rest, **options)


def _attention_layer_with_blocks(
    *operands: Any, blocks: Any, interpret: bool, rotated: bool = True
) -> tuple:
    projected, keys = operands[0], operands[-1]
    blocks = _shared(blocks, projected, _attention_shape(projected, keys), keys)
    call = _attention_layer_call(layer_kernel.attention_tree, rotated=rotated)
    return call(*operands, blocks=blocks, interpret=interpret)


def _shared(blocks: Any, queries: Any, shape: AttentionShape, keys: Any) -> Any:
    """Of a `Choice` the block sizes for these arrays, else the block sizes themselves."""
    if not isinstance(blocks, attention_config.Choice):
        return blocks
    batch, num_queries = queries.shape[:2]
    found = attention_config.shared(
        blocks,
        queries.dtype,
        num_rows=num_queries * shape.num_heads // shape.num_kv_heads,
        num_groups=batch * shape.num_kv_heads,
        capacity=keys.shape[2],
        head_dim=shape.head_dim,
    )
    if found is None:
        raise ValueError("with this choice a cache has one share, for which there is another")
    return found


def _true_attention(query: Any, *rest: Any) -> tuple[np.ndarray]:
    *arguments, _ = rest
    return (attention_reference(query, *arguments, scale=query.shape[-1] ** -0.5),)


def _of_attention_layer(problem: Problem) -> tuple[jax.Array, ...]:
    """The last operands are the cache; see `_attention_layer_call`."""
    _, old_keys, old_values, keys, values, length, masks = _of_attention(problem)
    columns = _attention_layout(problem.shape, True).num_columns
    length = jnp.maximum(length - problem.nodes, 0)  # so that there are places for the path
    return (
        draw(problem._replace(seed=problem.seed + 1))(problem.batch, problem.nodes, columns),
        *(masks.sum(axis=2, dtype=jnp.int32) - 1, masks),
        *(old_keys, old_values, jnp.asarray(accepted(problem))),
        *(length, values, keys),
    )


def _attention_layout(shape: AttentionShape, rotated: bool) -> pk.AttentionLayout:
    return AttentionConfig(*shape, rotary_dim=shape.head_dim if rotated else 0).layout


def _attention_shape(projected: Any, keys: Any) -> AttentionShape:
    groups, head_dim = keys.shape[1], keys.shape[3]
    return AttentionShape(projected.shape[-1] // head_dim - 2 * groups, groups, head_dim)


def _attention_layer_call(
    function: Callable[..., Any], *, rotated: bool = True
) -> Callable[..., tuple]:
    """`attention_tree` of flat operands; returns all that it does, the cache's keys last.

    The length is that before the path in all repetitions, so that all of them are the same work.
    """

    def call(*operands: Any, **options: Any) -> tuple:
        projected, depth, mask, old_keys, old_values, path, length, values, keys = operands
        y, nodes, cache = function(
            *(projected, pk.KeyCache(keys, values, length), depth, mask),
            layout=_attention_layout(_attention_shape(projected, keys), rotated),
            grown=None,
            previous=(pk.NodeKeys(old_keys, old_values), path),
            **options,
        )
        return (y, *nodes, cache.values, cache.keys)

    return call


def _true_attention_layer(*operands: Any, rotated: bool = True) -> tuple[np.ndarray, ...]:
    projected, depth, mask, old_keys, old_values, path, length, values, keys, _ = operands
    y, nodes, (keys, values, _) = layer_reference(
        *(projected, (keys, values, length), depth, mask),
        layout=_attention_layout(_attention_shape(projected, keys), rotated),
        previous=(old_keys, old_values, path),
    )
    return (y, *nodes, values, keys)


def _true_norm(y: Any, gate: Any, weight: Any, _: Any) -> tuple[np.ndarray]:
    rows = (-1, y.shape[-1])
    options = dict(norm="gate_then_norm", epsilon=1e-5, num_groups=1)
    truth = norm_reference(y.reshape(rows), gate.reshape(rows), weight, **options)
    return (truth.reshape(y.shape),)


def _true_add_norm(
    residual: Any, output: Any, mean_squares: Any, weight: Any, _: Any
) -> tuple[np.ndarray, ...]:
    rows = (-1, output.shape[-1])
    both = add_norm_reference(
        *(residual.reshape(rows), output.reshape(rows), weight),
        unscaled=(mean_squares.reshape(-1, mean_squares.shape[-1]), 1e-5),
        **_ADD_NORM,
    )
    return tuple(value.reshape(output.shape) for value in both)


def _true_scan(*arguments: Any) -> tuple[np.ndarray]:
    *arguments, _, parents = arguments
    return (scan_reference(*arguments, parents)[0],)


def _true_level(x: Any, dt: Any, A: Any, B: Any, C: Any, *rest: Any) -> tuple[np.ndarray]:
    *others, _, parents = rest
    queries = C.shape[1]
    every = np.zeros((*B.shape[:3], C.shape[3]))
    every[:, -queries:] = C
    return (scan_reference(x, dt, A, B, every, *others, parents)[0][:, -queries:],)


LEVEL = "tree_scan of a level"
PROMPT = "tree_attention of a prompt"
EXPERTS_OF_PROMPT = "expert_mlps of a prompt"
QUEUED = "mamba2_tree in a queue"
UNROTATED = "attention_tree without positions"
_MIXER_OUTPUTS = ("output", "square", "output", "state", "output", "output", "output", "state")
_SCANNED = ("x", "dt", "A", "B", "C", "D", "state", "mask")
_GATE_THEN_NORM = dict(norm="gate_then_norm", epsilon=1e-5, num_groups=1)
_ADD_NORM = dict(epsilon=1e-5, multiplier=1.0)
_SCAN = Kernel(
    pk.tree_scan,
    scan_kernel.tree_scan,
    _of_state(*_SCANNED),
    _true_scan,
    ("output",),
    {},
    MIXERS,
)
_ATTENTION = Kernel(
    _attention,
    _attention_with_blocks,
    _of_attention,
    _true_attention,
    ("output",),
    {},
    ATTENTIONS,
)
_ATTENTION_LAYER = Kernel(
    _attention_layer_call(pk.attention_tree),
    _attention_layer_with_blocks,
    _of_attention_layer,
    _true_attention_layer,
    ("output",) * 5,
    {-2: -2, -1: -1},
    ATTENTIONS,
)
_EXPERTS = Kernel(
    _expert_call(pk.expert_mlps),
    _expert_call(expert_kernel.expert_mlps),
    _of_experts,
    _true_experts,
    ("experts",),
    {},
    EXPERTS,
)
KERNELS: dict[str, Kernel] = {
    "tree_scan": _SCAN,
    LEVEL: _SCAN._replace(operands=_of_level, reference=_true_level),
    "replay": Kernel(
        pk.replay,
        replay_kernel.replay,
        _of_state("x", "dt", "A", "B", "state", "path"),
        lambda *arguments: (replay_reference(*arguments[:-1]),),
        ("state",),
        {4: 0},
        MIXERS,
    ),
    "replay_tree_scan": Kernel(
        pk.replay_tree_scan,
        fused_kernel.replay_tree_scan,
        _of_fused,
        lambda *arguments: fused_reference(*arguments[:11], arguments[-1]),
        ("output", "state"),
        {10: 1},
        MIXERS,
    ),
    "mamba2_tree": Kernel(
        _mixer_call(pk.mamba2_tree),
        _mixer_call(mixer_kernel.mamba2_tree),
        _of_mixer,
        _true_mixer,
        _MIXER_OUTPUTS,
        {-1: -1},
        MIXERS,
    ),
    QUEUED: Kernel(
        _mixer_call(pk.mamba2_tree, queued=True),
        _mixer_call(mixer_kernel.mamba2_tree, queued=True),
        _of_mixer,
        _true_mixer,
        _MIXER_OUTPUTS,
        {-1: -1},
        MIXERS,
    ),
    "ssd": Kernel(
        pk.ssd,
        ssd_kernel.ssd,
        _of_sequence,
        lambda *arguments: ssd_reference(*arguments[:-1]),
        ("output", "state"),
        {6: 1},
        MIXERS,
    ),
    "tree_attention": _ATTENTION,
    PROMPT: _ATTENTION._replace(operands=_of_prompt),
    "attention_tree": _ATTENTION_LAYER,
    UNROTATED: _ATTENTION_LAYER._replace(
        function=_attention_layer_call(pk.attention_tree, rotated=False),
        with_blocks=functools.partial(_attention_layer_with_blocks, rotated=False),
        reference=functools.partial(_true_attention_layer, rotated=False),
    ),
    "best_token": Kernel(
        _head_call(pk.best_token),
        _head_call(head_kernel.best_token),
        _of_head,
        _true_head,
        ("logit", "logit"),
        {},
        HEADS,
    ),
    "expert_mlps": _EXPERTS,
    EXPERTS_OF_PROMPT: _EXPERTS._replace(operands=_of_experts_of_prompt),
    "gated_rms_norm": Kernel(
        functools.partial(pk.gated_rms_norm, **_GATE_THEN_NORM),
        functools.partial(norm_kernel.gated_rms_norm, **_GATE_THEN_NORM),
        _of_norm,
        _true_norm,
        ("output",),
        {},
        MIXERS,
    ),
    "add_rms_norm": Kernel(
        _add_norm_call(pk.add_rms_norm),
        _add_norm_call(add_norm_kernel.add_rms_norm),
        _of_add_norm,
        _true_add_norm,
        ("state", "output"),
        {},
        MIXERS,
    ),
    "tree_conv1d": Kernel(
        functools.partial(pk.tree_conv1d, activation="silu"),
        functools.partial(conv_kernel.tree_conv1d, activation="silu"),
        _of_conv,
        lambda *arguments: (conv_reference(*arguments[:4], arguments[-1], "silu"),),
        ("output",),
        {},
        MIXERS,
    ),
}


def kind_of_shapes(name: str) -> type:
    """`MixerShape`, `AttentionShape`, `HeadShape` or `ExpertShape`: what a kernel is given."""
    (kind,) = {type(shape) for shape in KERNELS[name].shapes.values()}
    return kind


ATTENTION_OPS = tuple(name for name in KERNELS if kind_of_shapes(name) is AttentionShape)
# In a queue XLA's operations copy all of it, which nobody asks them for. The kernel's work is the
# same as without, but for the place in memory; so are its block sizes.
TIMED = tuple(name for name in KERNELS if name not in (LEVEL, QUEUED, UNROTATED))
COMPILED = (*TIMED, QUEUED, UNROTATED)


def small(shape: Any) -> Any:
    """A shape with two heads, two groups of them, or few words or experts, for float64 is slow."""
    if isinstance(shape, ExpertShape):
        return shape._replace(num_experts=8)
    if isinstance(shape, HeadShape):
        return shape._replace(vocab_size=min(shape.vocab_size, 4001))
    if isinstance(shape, AttentionShape):
        return shape._replace(num_heads=2 * shape.num_heads // shape.num_kv_heads, num_kv_heads=2)
    return shape._replace(num_heads=2, num_groups=min(shape.num_groups, 2))


def as_tuple(value: Any) -> tuple:
    """The outputs of a kernel, of which there may be one."""
    return value if isinstance(value, tuple) else (value,)


def relative_error(value: jax.Array, truth: np.ndarray | jax.Array) -> float:
    """Of all numbers together (Frobenius norms)."""
    got, wanted = float64(value), float64(truth)
    error = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
    return error if math.isfinite(error) else math.inf


def float64(value: np.ndarray | jax.Array) -> np.ndarray:
    """The same numbers; NumPy alone does not know how to convert bfloat16."""
    if isinstance(value, jax.Array):
        value = np.asarray(value.astype("float32"))
    return value.astype(np.float64)


def refused(name: str, problem: Problem) -> str | None:
    """Why a kernel does not take a problem, or None."""
    kernel = KERNELS[name]
    operands = jax.eval_shape(functools.partial(kernel.operands, problem))
    try:
        jax.eval_shape(functools.partial(kernel.function, implementation="pallas"), *operands)
    except ValueError as error:
        return str(error)
    return None


def errors(
    name: str, problem: Problem, implementations: tuple[str, ...]
) -> dict[str, list[float] | str]:
    """Relative errors of a kernel's outputs against float64, or what it failed with."""
    kernel = KERNELS[name]
    operands = kernel.operands(problem)
    parents, _ = trees(problem)
    exact = [
        float64(value) if jnp.issubdtype(value.dtype, jnp.floating) else np.asarray(value)
        for value in operands
    ]
    truth = kernel.reference(*exact, parents)
    result: dict[str, list[float] | str] = {}
    for implementation in implementations:
        run = jax.jit(functools.partial(kernel.function, implementation=implementation))
        try:
            got = as_tuple(run(*operands))
            result[implementation] = [
                relative_error(value, wanted) for value, wanted in zip(got, truth, strict=True)
            ]
        except Exception as error:  # a kernel that does not compile must not hide the others
            result[implementation] = f"failed: {error!s:.500}"
    return result


def within_limits(name: str, dtype: str, found: list[float] | str) -> bool:
    """Whether these are errors, and all of them small enough."""
    if isinstance(found, str):
        return False
    limits = [LIMITS[output, dtype] for output in KERNELS[name].outputs]
    return all(error <= limit for error, limit in zip(found, limits, strict=True))


def bytes_moved(name: str, operands: tuple[jax.Array, ...]) -> int:
    """What a call must move: operands read once, and results.

    Of caches that is what is filled, of experts those that are chosen.
    """
    outputs = jax.eval_shape(
        functools.partial(KERNELS[name].function, implementation="xla"), *operands
    )
    total = sum(value.size * value.dtype.itemsize for value in (*operands, *as_tuple(outputs)))
    if kind_of_shapes(name) is ExpertShape:
        *_, chosen, experts_in, experts_out = operands
        unread = len(experts_in) - len(np.unique(chosen))
        total -= unread * (experts_in.nbytes + experts_out.nbytes) // len(experts_in)
    if name in ATTENTION_OPS:
        if name in ("attention_tree", UNROTATED):
            length, values, keys = operands[-3:]
            total -= keys.nbytes + values.nbytes  # results, which are written at the path only
        else:
            keys, values, length = operands[3:6]
        filled = int(length.sum()) / (keys.shape[0] * keys.shape[2])
        total -= round((1 - filled) * (keys.nbytes + values.nbytes))
    return total


def repeated(
    function: Callable[..., Any], feedback: Mapping[int, int], count: int
) -> Callable[..., Any]:
    """Calls a kernel `count` times on the device, each after the one before, in one program.

    Operands are the same each time but the one that is updated in place, so small problems are
    timed with a warm L2 cache.
    """

    def run(*operands: jax.Array) -> tuple:
        def step(_: Any, before: tuple) -> tuple:
            # Or XLA sees that all calls are the same.
            held, before = lax.optimization_barrier((operands, before))
            held = [*held]
            for operand, output in feedback.items():
                held[operand] = before[output]
            return as_tuple(function(*held))

        return lax.fori_loop(1, count, step, as_tuple(function(*operands)))

    return run
