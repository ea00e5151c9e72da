"""The two kernels between the projections of a Mamba-2 layer, against their float64 references."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    DeferredRMSNorm,
    Gate,
    Mamba2Layout,
    Mamba2Pending,
    conv_gather_index,
    replay_gather_index,
    replay_tree_scan,
    tree_conv1d_layer,
    tree_scan,
)
from pallas_kernels.tree_conv1d import reference as conv_reference
from pallas_kernels.tree_scan import reference as scan_reference
from tests.kernels.cases import ancestor_mask, random_parents, relative_error
from tests.kernels.test_tree_ops import BUDGET, IMPLEMENTATIONS, STATE_BUDGET

# The gate and the weight leave few large outputs; in bf16 they depend on rounded convolutions.
GATED_BUDGET = {False: BUDGET[False], True: 5e-3}


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of the trees, the layout, and which weights there are."""

    name: str
    layout: Mamba2Layout
    batch: int = 2
    nodes: int = 13
    replayed: int = 6
    prefix: int = 0  # nodes that a first call runs, before a second one runs the others
    width: int = 4
    conv_bias: bool = True
    d_per_channel: bool = False
    gated: bool = True
    normed: bool = True
    per_head: bool = False  # the norm
    bf16: bool = False

    def __str__(self):
        return self.name


PLAIN = Mamba2Layout(num_heads=4, head_dim=16, num_groups=2, state_size=16, x_heads=4, b_groups=2)
REPEATED = dataclasses.replace(PLAIN, num_groups=4, x_heads=2, b_groups=1)
KNOBS = dict(first_column=7, multipliers=(1.3, 1.1, 0.9, 1.2, 0.8), dt_limit=(0.3, 1.5))
CASES = (
    Case("root only", PLAIN, nodes=1, replayed=1),
    Case("tree, and a row with an empty path", PLAIN, batch=3),
    Case("neither gate nor norm", PLAIN, gated=False, normed=False),
    Case("gate, no norm", PLAIN, normed=False),
    Case("bf16", PLAIN, bf16=True),
    Case("bf16, wide states", dataclasses.replace(PLAIN, state_size=256), bf16=True),
    Case("bf16, gate, no norm", PLAIN, normed=False, bf16=True),
    Case("prefix of the root", PLAIN, nodes=5, prefix=1),
    Case("prefix, blocks of nodes", PLAIN, nodes=40, replayed=18, prefix=21, bf16=True),
    Case("blocks of channels", dataclasses.replace(PLAIN, head_dim=128, state_size=128), nodes=3),
    Case("repeated after the convolution", REPEATED, width=3, conv_bias=False, d_per_channel=True),
    Case("repeated before it", dataclasses.replace(REPEATED, repeat_before_conv=True), nodes=20),
    Case("repeated, bf16", REPEATED, nodes=20, replayed=20, bf16=True),
    Case("repeated, prefix", REPEATED, nodes=20, prefix=3),
    Case("heads normed alone", PLAIN, nodes=20, per_head=True),
    Case(
        "bf16, heads normed alone",
        dataclasses.replace(PLAIN, head_dim=64),
        nodes=20,
        per_head=True,
        bf16=True,
    ),
    Case(
        "parts of heads normed alone",
        dataclasses.replace(PLAIN, head_dim=128, state_size=128),
        nodes=3,
        per_head=True,
    ),
    Case("all knobs", dataclasses.replace(PLAIN, **KNOBS), width=2),
)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Float64 inputs that are exact in the case's type."""

    projected: np.ndarray
    weights: tuple
    norm_weight: np.ndarray | None
    ssm: np.ndarray
    conv_state: np.ndarray
    parents: np.ndarray
    pending: tuple
    path: np.ndarray
    old_parents: np.ndarray
    last: np.ndarray


def make_inputs(case):
    import ml_dtypes

    rng = np.random.default_rng(0)
    layout, batch = case.layout, case.batch
    small = ml_dtypes.bfloat16 if case.bf16 else np.float32

    def draw(*shape, dtype=np.float32):
        return rng.normal(size=shape).astype(dtype).astype(np.float64)

    heads, size = layout.num_heads, layout.head_dim
    old = case.replayed
    old_parents = random_parents(rng, batch, old)
    last = np.array([old - 1, -1, 0])[:batch]
    path = ancestor_mask(old_parents)[np.arange(batch), np.maximum(last, 0)]
    return Inputs(
        projected=draw(batch, case.nodes, layout.columns[-1] + heads, dtype=small),
        weights=(
            draw(case.width, layout.num_channels, dtype=small),
            draw(layout.num_channels, dtype=small) if case.conv_bias else None,
            draw(heads),
            draw(heads),
            draw(heads * size if case.d_per_channel else heads),
        ),
        norm_weight=draw(heads * size, dtype=small) if case.normed else None,
        ssm=draw(batch, heads, size, layout.state_size),
        conv_state=draw(batch, case.width - 1, layout.num_channels, dtype=small),
        parents=random_parents(rng, batch, case.nodes),
        pending=(
            draw(batch, old, heads, size, dtype=small),
            np.abs(draw(batch, old, heads)),
            draw(batch, old, layout.num_groups, layout.state_size, dtype=small),
            draw(batch, old, layout.num_channels, dtype=small),
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
        *(old_x, old_dt, old_B, path),
        *(x, dt, -np.exp(A_log), B, C, D, inputs.ssm, inputs.parents),
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
    """What `Mamba2Mixer.tree` does between its projections."""
    conv_weight, conv_bias, dt_bias, A_log, D = weights
    ssm, conv_state = states
    pending, C, conv_state = tree_conv1d_layer(
        *(projected, conv_weight, conv_bias, dt_bias, conv_state, index),
        layout=layout,
        prefix_pending=prefix,
        previous=None if previous is None else (previous[0], previous[2]),
        implementation=implementation,
    )
    gate = None
    if gated:
        options = dict(start=layout.columns[0], multiplier=layout.multipliers[0])
        options |= dict(norm_epsilon=norm_epsilon, norm_per_head=per_head)
        gate = Gate(projected, norm_weight, **options)
    D = D if D.shape[0] == layout.num_heads else D.reshape(layout.num_heads, -1)
    tree = (pending.x, pending.dt, A_log, pending.B, C, D, ssm, mask)
    options = dict(gate=gate, A_is_log=True, implementation=implementation)
    if previous is None:
        y = tree_scan(*tree, **options)
    else:
        old, path, _ = previous
        y, ssm = replay_tree_scan(old.x, old.dt, old.B, path, *tree, **options)
    return y, pending, (ssm, conv_state)


@functools.cache
def errors(case, implementation):
    """Relative errors of outputs, their mean squares, record and states."""
    inputs, layout = make_inputs(case), case.layout
    kind = jnp.bfloat16 if case.bf16 else jnp.float32
    true_y, true_record, true_ssm, true_conv_state = reference(inputs, layout)
    if case.gated:
        z = conv_reference.sections(inputs.projected, layout)[0]
        if case.per_head:
            true_y = scan_reference.gated_and_normed_by_head(true_y, z, inputs.norm_weight, 1e-3)
        else:
            true_y, true_squares = scan_reference.gated(true_y, z, inputs.norm_weight)

    def small(value):
        return None if value is None else jnp.asarray(value, kind)

    def exact(value):
        return jnp.asarray(value, jnp.float32)

    weights = (*map(small, inputs.weights[:2]), *map(exact, inputs.weights[2:]))
    x, dt, B, conv_input = inputs.pending
    pending = Mamba2Pending(small(x), exact(dt), small(B), small(conv_input))
    index = conv_gather_index(jnp.asarray(inputs.parents, jnp.int32), case.width)
    back = replay_gather_index(
        *(jnp.asarray(value, jnp.int32) for value in (inputs.old_parents, inputs.last)), case.width
    )
    mask = jnp.asarray(ancestor_mask(inputs.parents))
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
        *(projected[:, :first], weights, (exact(inputs.ssm), small(inputs.conv_state))),
        *(index[:, :first], mask[:, :first, :first], None),
        (pending, jnp.asarray(inputs.path), back),
    )
    if case.prefix:
        more, record, after = run(
            *(projected[:, first:], weights, states, index[:, first:], mask, record, None)
        )
        y = jax.tree.map(lambda *values: jnp.concatenate(values, axis=1), y, more)
        jax.tree.map(np.testing.assert_array_equal, after, states)

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
    assert np.isfinite(np.asarray(y, np.float32)).all()
    np.testing.assert_array_equal(np.asarray(ssm)[inputs.last < 0], inputs.ssm[inputs.last < 0])
    np.testing.assert_array_equal(conv_state, true_conv_state)
    found["y"] = relative_error(y, true_y.reshape(y.shape))
    found["ssm"] = relative_error(ssm, true_ssm)
    for name, value, wanted in zip(record._fields, record, true_record, strict=True):
        found[name] = relative_error(value, wanted)
    return found


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_layer(case, implementation):
    found = errors(case, implementation)
    for name in ("x", "B", "conv_input"):
        assert found[name] < BUDGET[case.bf16], name
    budget = (GATED_BUDGET if case.gated else BUDGET)[case.bf16]
    assert found["y"] < budget
    assert found["dt"] < BUDGET[False]
    assert found["ssm"] < STATE_BUDGET[case.bf16]
    if case.normed and not case.per_head:
        assert found["mean_squares"] < budget
    for name in found.keys() & {"y", "mean_squares"}:
        assert found[name] <= 1.5 * errors(case, "xla")[name] + 2e-7, name


def test_a_gate_must_fit():
    x, dt, A = jnp.ones((1, 1, 2, 16)), jnp.ones((1, 1, 2)), -jnp.ones(2)
    B, state, mask = jnp.ones((1, 1, 1, 16)), jnp.ones((1, 2, 16, 16)), jnp.ones((1, 1, 1), bool)
    run = functools.partial(tree_scan, x, dt, A, B, B, A, state, mask)
    with pytest.raises(ValueError, match="32 gates from column 9 on, of 40 columns"):
        run(gate=Gate(jnp.ones((1, 1, 40)), start=9))
    with pytest.raises(ValueError, match=r"norm_weight \(16,\) is not of 32 channels"):
        run(gate=Gate(jnp.ones((1, 1, 40)), jnp.ones(16)))


def test_a_layout_must_fit():
    projected, weight = jnp.ones((1, 1, PLAIN.num_columns)), jnp.ones((4, PLAIN.num_channels))
    state, index = jnp.ones((1, 3, PLAIN.num_channels)), jnp.zeros((1, 1, 4), jnp.int32)
    run = functools.partial(tree_conv1d_layer, layout=PLAIN)
    with pytest.raises(ValueError, match="the projection has 195 columns, .* has 196"):
        run(projected[..., 1:], weight, None, jnp.ones(4), state, index)
    weight, state = weight[:, 1:], state[..., 1:]
    with pytest.raises(ValueError, match="conv_weight has 127 channels, .* has 128"):
        run(projected, weight, None, jnp.ones(4), state, index)


def test_each_kernel_refuses_for_itself():
    case = Case("refused", dataclasses.replace(PLAIN, state_size=256), nodes=3)
    message = "replay_tree_scan .* state_size = 256 of float32 inputs is more than 128; use 'xla'"
    with pytest.raises(ValueError, match=message):
        errors(case, "pallas_interpret")
    assert errors(case, "xla")["y"] < BUDGET[False]
    case = Case("refused", dataclasses.replace(PLAIN, head_dim=18), nodes=3)
    message = "tree_conv1d_layer .* channels = 72 is not a multiple of 16; use 'xla'"
    with pytest.raises(ValueError, match=message):
        errors(case, "pallas_interpret")
