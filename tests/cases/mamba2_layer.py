"""The kernels between the projections of a Mamba-2 layer, one or two."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_array_equal

from pallas_kernels import (
    Convolution,
    DeferredRMSNorm,
    Gate,
    Mamba2Layout,
    Mamba2Pending,
    tree_scan_layer,
)
from pallas_kernels.tree_conv1d import reference as conv_reference
from pallas_kernels.tree_scan import reference as scan_reference
from tests.cases import base
from tests.cases.base import Budget, Op, relative_error

# The gate and the weight leave few large outputs; in bf16 they depend on rounded convolutions.
GATED = {False: base.OUTPUT[False], True: 5e-3}
PLAIN = Mamba2Layout(num_heads=4, head_dim=16, num_groups=2, state_size=16, x_heads=4, b_groups=2)
REPEATED = dataclasses.replace(PLAIN, num_groups=4, x_heads=2, b_groups=1)
WIDE = dataclasses.replace(PLAIN, head_dim=128, state_size=128)
KNOBS = dict(first_column=7, multipliers=(1.3, 1.1, 0.9, 1.2, 0.8), dt_limit=(0.3, 1.5))
CASES = base.table(
    {
        "root only": dict(nodes=1, replayed=1),
        "tree, and a row with an empty path": dict(batch=3),
        "neither gate nor norm": dict(gated=False, normed=False),
        "gate, no norm": dict(normed=False),
        "bf16": dict(bf16=True),
        "bf16, wide states": dict(layout=dataclasses.replace(PLAIN, state_size=256), bf16=True),
        "bf16, gate, no norm": dict(normed=False, bf16=True),
        "one query, two groups": dict(nodes=7, prefix=6, d_per_channel=True),
        "one query, bf16, blocks of channels": dict(layout=WIDE, nodes=3, prefix=2, bf16=True),
        "prefix, blocks of nodes": dict(nodes=40, replayed=18, prefix=21, bf16=True),
        "blocks of channels": dict(layout=WIDE, nodes=3),
        "repeated after the convolution": dict(
            layout=REPEATED, width=3, conv_bias=False, d_per_channel=True
        ),
        "repeated before it": dict(
            layout=dataclasses.replace(REPEATED, repeat_before_conv=True), nodes=20
        ),
        "repeated, prefix": dict(layout=REPEATED, nodes=20, prefix=3),
        "heads normed alone": dict(nodes=20, per_head=True),
        "parts of heads normed alone": dict(layout=WIDE, nodes=3, per_head=True),
        "all knobs": dict(layout=dataclasses.replace(PLAIN, **KNOBS), width=2),
        "all knobs, one query": dict(
            layout=dataclasses.replace(PLAIN, **KNOBS), width=2, nodes=4, prefix=3
        ),
    },
    layout=PLAIN,
    batch=2,
    nodes=13,
    replayed=6,
    prefix=0,  # nodes that a first call runs, before a second one runs the others
    width=4,
    conv_bias=True,
    d_per_channel=False,
    gated=True,
    normed=True,
    per_head=False,  # the norm
)


def make_inputs(case):
    """Float64 inputs that are exact in the case's type."""
    rng, draw = base.drawn(case)
    exact = functools.partial(draw, dtype=np.float32)
    layout, batch, old = case.layout, case.batch, case.replayed
    heads, size = layout.num_heads, layout.head_dim
    old_parents = base.random_parents(rng, batch, old)
    last = np.array([old - 1, -1, 0])[:batch]
    path = base.ancestor_mask(old_parents)[np.arange(batch), np.maximum(last, 0)]
    return SimpleNamespace(
        projected=draw(batch, case.nodes, layout.columns[-1] + heads),
        weights=(
            draw(case.width, layout.num_channels),
            draw(layout.num_channels) if case.conv_bias else None,
            exact(heads),
            exact(heads),
            exact(heads * size if case.d_per_channel else heads),
        ),
        norm_weight=draw(heads * size) if case.normed else None,
        ssm=exact(batch, heads, size, layout.state_size),
        conv_state=draw(batch, case.width - 1, layout.num_channels),
        parents=base.random_parents(rng, batch, case.nodes),
        pending=(
            draw(batch, old, heads, size),
            np.abs(exact(batch, old, heads)),
            draw(batch, old, layout.num_groups, layout.state_size),
            draw(batch, old, layout.num_channels),
        ),
        path=path & (last >= 0)[:, None],
        old_parents=old_parents,
        last=last,
    )


def reference(inputs, layout):
    """The outputs without gate, the record, and both states before the root."""
    conv_weight, conv_bias, dt_bias, A_log, D = inputs.weights
    (old_x, old_dt, old_B, old_conv_input), path = inputs.pending, inputs.path
    record, C, conv_state = conv_reference.tree_conv1d_layer(
        *(inputs.projected, conv_weight, conv_bias, dt_bias, inputs.conv_state, inputs.parents),
        layout=layout,
        previous=(old_conv_input, inputs.old_parents, inputs.last),
    )
    x, dt, B, _ = record
    D = np.broadcast_to(D.reshape(layout.num_heads, -1), x.shape[2:])
    y, ssm = scan_reference.replay_tree_scan(
        *(old_x, old_dt, old_B, path), *(x, dt, -np.exp(A_log), B, C, D, inputs.ssm, inputs.parents)
    )
    return y, record, ssm, conv_state


@functools.partial(
    jax.jit, static_argnames=("layout", "gated", "per_head", "norm_epsilon", "implementation")
)
def layer(
    projected,
    weights,
    states,
    index,
    mask,
    prefix,
    previous,
    norm_weight,
    *,
    layout,
    gated,
    norm_epsilon,
    implementation,
    per_head=False,
):
    """`Mamba2Mixer.tree` between its projections."""
    conv_weight, conv_bias, dt_bias, A_log, D = weights
    ssm, conv_state = states
    path = None if previous is None else previous[1]
    convolution = Convolution(
        *(projected, conv_weight, conv_bias, dt_bias, conv_state, index, prefix),
        None if previous is None else previous[::2],
        layout,
    )
    gate = None
    if gated:
        options = dict(start=layout.columns[0], multiplier=layout.multipliers[0])
        options |= dict(norm_epsilon=norm_epsilon, norm_per_head=per_head)
        gate = Gate(projected, norm_weight, **options)
    y, pending, *states = tree_scan_layer(
        *(convolution, A_log),
        D if D.shape[0] == layout.num_heads else D.reshape(layout.num_heads, -1),
        *(ssm, mask, path),
        gate=gate,
        implementation=implementation,
    )
    return y, pending, states


@functools.cache
def errors(case, implementation):
    """Of outputs, their mean squares, the record and the state; the convolution's is exact."""
    inputs, layout, kind = make_inputs(case), case.layout, case.kind
    true_y, true_record, true_ssm, true_conv_state = reference(inputs, layout)
    if case.gated:
        z = conv_reference.sections(inputs.projected, layout)[0]
        if case.per_head:
            true_y = scan_reference.gated_and_normed_by_head(true_y, z, inputs.norm_weight, 1e-3)
        else:
            true_y, true_squares = scan_reference.gated(true_y, z, inputs.norm_weight)

    def small(value):
        return None if value is None else base.on_device(value, kind)

    def exact(value):
        return base.on_device(value, jnp.float32)

    weights = (*map(small, inputs.weights[:2]), *map(exact, inputs.weights[2:]))
    x, dt, B, conv_input = inputs.pending
    pending = Mamba2Pending(small(x), exact(dt), small(B), small(conv_input))
    index = base.conv_gather_index(base.on_device(inputs.parents, jnp.int32), case.width)
    back = base.replay_gather_index(
        *(base.on_device(v, jnp.int32) for v in (inputs.old_parents, inputs.last)), case.width
    )
    mask = base.on_device(base.ancestor_mask(inputs.parents))
    projected, first = small(inputs.projected), case.prefix or case.nodes
    run = functools.partial(
        layer,
        norm_weight=small(inputs.norm_weight),
        layout=layout,
        gated=case.gated,
        per_head=case.per_head,
        norm_epsilon=1e-3,
        implementation=implementation,
    )
    y, record, states = run(
        *(projected[:, :first], weights, [exact(inputs.ssm), small(inputs.conv_state)]),
        *(index[:, :first], mask[:, :first, :first], None),
        (pending, base.on_device(inputs.path), back),
    )
    if case.prefix:
        more, record, after = run(
            *(projected[:, first:], weights, states, index[:, first:], mask, record, None)
        )
        y = jax.tree.map(lambda *values: jnp.concatenate(values, axis=1), y, more)
        jax.tree.map(assert_array_equal, after, states)

    ssm, conv_state = states
    deferred = case.normed and not case.per_head
    assert isinstance(y, DeferredRMSNorm) == deferred
    found = {}
    if deferred:
        assert y.epsilon == 1e-3
        assert y.mean_squares.dtype == jnp.float32
        found["mean_squares"] = relative_error(jnp.sum(y.mean_squares, axis=-1), true_squares)
        y = y.value
    assert (y.dtype, record.x.dtype, record.dt.dtype) == (kind, kind, jnp.float32)
    base.assert_finite(y)
    assert_array_equal(np.asarray(ssm)[inputs.last < 0], inputs.ssm[inputs.last < 0])
    assert_array_equal(conv_state, true_conv_state)
    found["y"] = relative_error(y, true_y.reshape(y.shape))
    found["ssm"] = relative_error(ssm, true_ssm)
    for name, value, wanted in zip(record._fields, record, true_record, strict=True):
        found[name] = relative_error(value, wanted)
    return found


def budgets(case):
    rounded, output = Budget(base.OUTPUT[case.bf16]), base.OUTPUT
    y = Budget((GATED if case.gated else output)[case.bf16], 1.5, floor=2e-7)
    found = dict(y=y, ssm=Budget(base.STATE[case.bf16]), dt=Budget(output[False]))
    found |= dict(x=rounded, B=rounded, conv_input=rounded)
    # Few numbers, of which XLA's may all be correct by chance: the floor is four roundings.
    squares = y._replace(floor=5e-7)
    return found | (dict(mean_squares=squares) if case.normed and not case.per_head else {})


def lacks(case, implementation):
    """Native convolutions have no repeated heads or groups."""
    repeated = case.layout.x_heads != case.layout.num_heads
    return base.native_lacks_bf16(case, implementation) or (implementation == "native" and repeated)


MAMBA2_LAYER = Op(
    *(CASES, errors, budgets, base.WITH_NATIVE),
    lacks=lacks,
    slow=("gate, no norm",),
)
