"""The whole of a Mamba-2 layer between its projections, against its float64 reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    Layout,
    Mamba2Pending,
    Mamba2Weights,
    Previous,
    Unscaled,
    after_turn,
    conv_window,
    enqueued,
    mamba2_tree,
    oldest_record,
    replay_window,
)
from pallas_kernels.mamba2_tree.reference import mamba2_tree as reference
from tests.kernels.cases import ancestor_mask, random_parents, relative_error
from tests.kernels.test_tree_ops import BUDGET, IMPLEMENTATIONS, STATE_BUDGET

# Behind gate and weight few numbers decide; those of bf16 come from what the convolution rounded.
GATED_BUDGET = {False: BUDGET[False], True: 5e-3}


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of the trees, the layout, and which weights there are."""

    name: str
    layout: Layout
    batch: int = 2
    nodes: int = 13
    replayed: int = 6
    grown: int = 0  # nodes that a first call runs, before a second one runs the others
    places: int = 0  # of the queue that the record is in
    width: int = 4
    conv_bias: bool = True
    d_per_channel: bool = False
    gated: bool = True
    normed: bool = True
    bf16: bool = False

    def __str__(self):
        return self.name


PLAIN = Layout(num_heads=4, head_dim=16, num_groups=2, state_size=16, x_heads=4, b_groups=2)
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
    Case("grown from the root", PLAIN, nodes=5, grown=1),
    Case("grown, blocks of nodes", PLAIN, nodes=40, replayed=18, grown=21, bf16=True),
    Case("blocks of channels", dataclasses.replace(PLAIN, head_dim=64, state_size=128), nodes=3),
    Case("repeated after the convolution", REPEATED, width=3, conv_bias=False, d_per_channel=True),
    Case("repeated before it", dataclasses.replace(REPEATED, repeat_before_conv=True), nodes=20),
    Case("in a queue", PLAIN, batch=3, nodes=6, places=3),
    Case("alone in a queue, bf16", REPEATED, nodes=20, replayed=20, places=2, bf16=True),
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


@functools.cache
def errors(case, implementation):
    """Relative errors of outputs, their mean squares, record and states."""
    inputs, layout = make_inputs(case), case.layout
    kind = jnp.bfloat16 if case.bf16 else jnp.float32
    truth = reference(
        *(inputs.projected, inputs.weights, inputs.ssm, inputs.conv_state, inputs.parents),
        layout=layout,
        previous=(inputs.pending, inputs.path, inputs.old_parents, inputs.last),
        gated=case.gated,
        norm_weight=inputs.norm_weight,
    )

    def small(value):
        return None if value is None else jnp.asarray(value, kind)

    def exact(value):
        return jnp.asarray(value, jnp.float32)

    weights = Mamba2Weights(*map(small, inputs.weights[:2]), *map(exact, inputs.weights[2:]))
    x, dt, B, conv_input = inputs.pending
    pending = Mamba2Pending(small(x), exact(dt), small(B), small(conv_input))
    window = conv_window(jnp.asarray(inputs.parents, jnp.int32), case.width)
    back = replay_window(
        *(jnp.asarray(value, jnp.int32) for value in (inputs.old_parents, inputs.last)), case.width
    )
    # The others in the queue have other numbers. It starts at its last place.
    others = [
        jax.tree.map(lambda array, i=i: array + i, pending) for i in range(1, case.places - 1)
    ]
    record = pending
    if case.places:
        turned = jax.tree.map(lambda array: jnp.roll(array, -1, 0), enqueued([pending, *others]))
        record = turned._replace(oldest=jnp.array([case.places - 1], jnp.int32))
    previous = Previous(record, jnp.asarray(inputs.path), back)
    mask = jnp.asarray(ancestor_mask(inputs.parents))
    projected, first = small(inputs.projected), case.grown or case.nodes
    options = dict(gated=case.gated, norm_epsilon=1e-3, implementation=implementation)
    run = jax.jit(functools.partial(mamba2_tree, layout=layout, **options))
    norm_weight = small(inputs.norm_weight)

    y, record, ssm, conv_state = run(
        *(projected[:, :first], weights, exact(inputs.ssm), small(inputs.conv_state)),
        *(window[:, :first], mask[:, :first, :first]),
        previous=previous,
        norm_weight=norm_weight,
    )
    if case.grown:
        states = (ssm, conv_state)
        more, record, *after = run(
            *(projected[:, first:], weights, *states, window[:, first:], mask),
            grown=record,
            norm_weight=norm_weight,
        )
        y = jax.tree.map(lambda *values: jnp.concatenate(values, axis=1), y, more)
        jax.tree.map(np.testing.assert_array_equal, after, list(states))

    if case.places:
        for turns, other in enumerate(others):
            jax.tree.map(np.testing.assert_array_equal, oldest_record(record, turns), other)
        record = oldest_record(record, len(others))
    assert isinstance(y, Unscaled) == case.normed
    found = {}
    if case.normed:
        assert y.epsilon == 1e-3
        assert y.mean_squares.dtype == jnp.float32
        found["mean_squares"] = relative_error(jnp.sum(y.mean_squares, axis=-1), truth[4])
        y = y.value
    assert (y.dtype, record.x.dtype, record.dt.dtype) == (kind, kind, jnp.float32)
    assert np.isfinite(np.asarray(y, np.float32)).all()
    np.testing.assert_array_equal(np.asarray(ssm)[inputs.last < 0], inputs.ssm[inputs.last < 0])
    np.testing.assert_array_equal(conv_state, truth[3])
    found |= {"y": relative_error(y, truth[0]), "ssm": relative_error(ssm, truth[2])}
    for name, value, wanted in zip(record._fields, record, truth[1], strict=True):
        found[name] = relative_error(value, wanted)
    return found


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_mamba2_tree(case, implementation):
    found = errors(case, implementation)
    for name in ("x", "B", "conv_input"):
        assert found[name] < BUDGET[case.bf16], name
    budget = (GATED_BUDGET if case.gated else BUDGET)[case.bf16]
    assert found["y"] < budget
    assert found["dt"] < BUDGET[False]
    assert found["ssm"] < STATE_BUDGET[case.bf16]
    if case.normed:
        assert found["mean_squares"] < budget
    for name in found.keys() & {"y", "mean_squares"}:
        assert found[name] <= 1.5 * errors(case, "xla")[name] + 2e-7, name


def test_a_norm_is_behind_a_gate():
    case = Case("refused", PLAIN, gated=False)
    with pytest.raises(ValueError, match="norm_weight is of a norm behind the gate"):
        errors(case, "xla")


def test_a_queue_is_of_trees_of_one_size():
    case = Case("refused", PLAIN, nodes=5, replayed=6, places=2)
    with pytest.raises(ValueError, match="a tree of 5 nodes does not fit a queue of trees of 6"):
        errors(case, "xla")


def test_layers_take_turns_at_a_queue():
    """The example of `records`, for three steps: each layer finds what it left the step before."""

    def record(value):
        arrays = (jnp.zeros((1, 2, 3, 4)), jnp.zeros((1, 2, 3)), jnp.zeros((1, 2, 1, 5)))
        return Mamba2Pending(*(array + value for array in (*arrays, jnp.zeros((1, 2, 6)))))

    queue = enqueued([record(value) for value in (0, 1, 2)])
    for step in range(1, 4):
        for layer in range(3):
            found = {float(leaf.min()) for leaf in jax.tree.leaves(oldest_record(queue))}
            assert found == {10.0 * (step - 1) + layer}
            queue = after_turn(queue, record(10 * step + layer))
    assert queue.records.x.shape[0] == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(head_dim=12), "head_dim = 12 is not a power of two .* use 'xla'"),
        (dict(state_size=256), "state_size = 256 of float32 inputs is more than 128; use 'xla'"),
    ],
)
def test_what_the_kernel_refuses(change, message):
    case = Case("refused", dataclasses.replace(PLAIN, **change), nodes=3)
    with pytest.raises(ValueError, match=message):
        errors(case, "pallas_interpret")
    assert errors(case, "xla")["y"] < BUDGET[False]
