"""Every implementation of the tree ops against its sequential float64 reference, on one table."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    conv_gather_index,
    replay,
    replay_conv_state,
    replay_gather_index,
    replay_tree_scan,
    tree_conv1d,
    tree_scan,
)
from pallas_kernels.tree_conv1d import reference as conv_reference
from pallas_kernels.tree_scan.reference import replay as replay_reference
from pallas_kernels.tree_scan.reference import replay_tree_scan as replay_tree_scan_reference
from pallas_kernels.tree_scan.reference import tree_scan as tree_scan_reference
from tests.kernels.cases import (
    CASES,
    accepted_path,
    make_inputs,
    previous_inputs,
    relative_error,
)

# The kernel itself runs on a GPU (`make test-gpu`), its interpreter everywhere.
IMPLEMENTATIONS = ("xla", "pallas_interpret", pytest.param("pallas", marks=pytest.mark.gpu))
# Error against float64, relative. float32: sums of some hundred terms. bf16: rounding the output;
# the state is float32, and the kernel's products with it are split into two bf16 halves.
BUDGET = {False: 1e-6, True: 3e-3}
STATE_BUDGET = {False: 1e-6, True: 5e-6}
# dt * A beyond 1e3 has float32 spacing 6e-5, and an exponent is a difference of two such numbers.
LARGE_STEPS = 30


def kinds(inputs, case):
    """The inputs in the types that models have them in."""
    kind = jnp.bfloat16 if case.bf16 else jnp.float32
    exact = {
        name: jnp.asarray(getattr(inputs, name), jnp.float32) for name in ("dt", "A", "D", "state")
    }
    small = {name: jnp.asarray(getattr(inputs, name), kind) for name in ("x", "B", "C")}
    return {**exact, **small, "mask": jnp.asarray(inputs.mask)}


def arrays(case):
    inputs = make_inputs(case)
    return inputs, kinds(inputs, case)


@functools.cache
def scanned(case, implementation):
    """Outputs of the existing queries, and their relative error."""
    inputs, a = arrays(case)
    first = case.nodes - (case.queries or case.nodes)
    got = jax.jit(functools.partial(tree_scan, implementation=implementation))(
        a["x"], a["dt"], a["A"], a["B"], a["C"][:, first:], a["D"], a["state"], a["mask"]
    )
    truth, _ = tree_scan_reference(
        inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C, inputs.D, inputs.state, inputs.parents
    )
    assert got.dtype == a["x"].dtype
    assert np.isfinite(np.asarray(got, np.float32)).all()
    exists = slice(first, case.nodes - case.padded)
    return relative_error(got[:, : exists.stop - first], truth[:, exists])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tree_scan(case, implementation):
    budget = BUDGET[case.bf16] * (LARGE_STEPS if case.dt_scale > 1 else 1)
    assert scanned(case, implementation) < budget


@pytest.mark.parametrize("kernel", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_is_as_exact_as_xla(case, kernel):
    """An error budget relative to the other implementation, not a widened tolerance."""
    assert scanned(case, kernel) <= 1.5 * scanned(case, "xla") + 1e-7


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_replay(case, implementation):
    inputs, a = arrays(case)
    path = accepted_path(inputs)
    truth = replay_reference(inputs.x, inputs.dt, inputs.A, inputs.B, inputs.state, path)
    got = jax.jit(functools.partial(replay, implementation=implementation))(
        a["x"], a["dt"], a["A"], a["B"], a["state"], jnp.asarray(path)
    )
    assert got.dtype == jnp.float32
    assert relative_error(got, truth) < STATE_BUDGET[case.bf16]
    for row in np.flatnonzero(inputs.last < 0):
        np.testing.assert_array_equal(got[row], a["state"][row])


@functools.cache
def replayed_and_scanned(case, implementation):
    """Relative errors of outputs and state; rows with an empty path keep theirs exactly."""
    inputs, a = arrays(case)
    previous, path = previous_inputs(case)
    before = kinds(previous, case)
    first = case.nodes - (case.queries or case.nodes)
    y, state = jax.jit(functools.partial(replay_tree_scan, implementation=implementation))(
        *(before[name] for name in ("x", "dt", "B")),
        jnp.asarray(path),
        *(a[name] for name in ("x", "dt", "A", "B")),
        a["C"][:, first:],
        *(a[name] for name in ("D", "state", "mask")),
    )
    true_y, true_state = replay_tree_scan_reference(
        *(previous.x, previous.dt, previous.B, path),
        *(inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C, inputs.D),
        *(inputs.state, inputs.parents),
    )
    assert y.dtype == a["x"].dtype
    assert state.dtype == jnp.float32
    assert np.isfinite(np.asarray(y, np.float32)).all()
    for row in np.flatnonzero(previous.last < 0):
        np.testing.assert_array_equal(state[row], a["state"][row])
    exists = slice(first, case.nodes - case.padded)
    error = relative_error(y[:, : exists.stop - first], true_y[:, exists])
    return error, relative_error(state, true_state)


# `tree_scan` and `replay`, tested on all cases, are the same kernel: these cases have trees of
# different sizes, several blocks, and states that both halves use.
FUSED = [
    *("root only", "newest level", "groups", "padded nodes", "blocks of nodes"),
    *("three rows, one with an empty path", "large time steps", "bf16, many nodes"),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", [case for case in CASES if case.name in FUSED], ids=str)
def test_replay_tree_scan(case, implementation):
    error, state_error = replayed_and_scanned(case, implementation)
    assert error < BUDGET[case.bf16] * (LARGE_STEPS if case.dt_scale > 1 else 1)
    assert state_error < STATE_BUDGET[case.bf16]
    xla_error, _ = replayed_and_scanned(case, "xla")
    assert error <= 1.5 * xla_error + 1e-7


# Cases that differ for a convolution, in turn without the activation and with it.
CONVOLVED = [
    *("root only", "two nodes", "tree", "newest level", "a group a head", "blocks of nodes"),
    *("bf16", "bf16, many nodes"),
]
ACTIVATED = {name: (None, "silu")[i % 2] for i, name in enumerate(CONVOLVED)}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", [case for case in CASES if case.name in CONVOLVED], ids=str)
def test_tree_conv1d(case, implementation):
    inputs, _ = arrays(case)
    kind = jnp.bfloat16 if case.bf16 else jnp.float32
    names = ("conv_input", "conv_state", "conv_weight", "conv_bias")
    activation = ACTIVATED[case.name]
    truth = conv_reference.tree_conv1d(
        *(getattr(inputs, name) for name in names), inputs.parents, activation
    )
    window = conv_gather_index(jnp.asarray(inputs.parents, jnp.int32), case.width)
    first = case.nodes - (case.queries or case.nodes)
    got = jax.jit(
        functools.partial(tree_conv1d, activation=activation, implementation=implementation)
    )(*(jnp.asarray(getattr(inputs, name), kind) for name in names), window[:, first:])
    assert got.dtype == kind
    assert relative_error(got, truth[:, first:]) < (3e-3 if case.bf16 else 1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tree_conv1d_without_bias(implementation):
    inputs = jnp.arange(32, dtype=jnp.float32).reshape(1, 2, 16)
    window = conv_gather_index(jnp.array([[-1, 0]], jnp.int32), 2)
    got = tree_conv1d(
        *(inputs, jnp.ones((1, 1, 16)), jnp.full((2, 16), 2.0), None, window),
        implementation=implementation,
    )
    np.testing.assert_array_equal(
        got[0], [2 * (inputs[0, 0] + 1), 2 * (inputs[0, 1] + inputs[0, 0])]
    )


def test_tree_conv1d_refuses():
    inputs, window = jnp.ones((1, 2, 12)), jnp.zeros((1, 2, 2), jnp.int32)
    arguments = (inputs, jnp.ones((1, 1, 12)), jnp.ones((2, 12)), None, window)
    with pytest.raises(ValueError, match="activation = 'relu'"):
        tree_conv1d(*arguments, activation="relu")
    with pytest.raises(ValueError, match="channels = 12 is not a multiple of 16"):
        tree_conv1d(*arguments, implementation="pallas_interpret")
    pointwise = (
        jnp.ones((1, 2, 16)),
        jnp.ones((1, 0, 16)),
        jnp.ones((1, 16)),
        None,
        window[..., :1],
    )
    with pytest.raises(ValueError, match="width 1 has no state; use 'xla'"):
        tree_conv1d(*pointwise, implementation="pallas_interpret")
    np.testing.assert_array_equal(tree_conv1d(*pointwise), 1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_replay_conv_state(case):
    inputs, _ = arrays(case)
    truth = conv_reference.replay_conv_state(
        inputs.conv_input, inputs.conv_state, inputs.parents, inputs.last
    )
    window = replay_gather_index(
        jnp.asarray(inputs.parents, jnp.int32), jnp.asarray(inputs.last, jnp.int32), case.width
    )
    got = replay_conv_state(
        jnp.asarray(inputs.conv_input, jnp.float32),
        jnp.asarray(inputs.conv_state, jnp.float32),
        window,
    )
    np.testing.assert_array_equal(got, truth)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 6])
def test_conv_state_mixes_cache_and_path(accepted):
    """Paths shorter and longer than K - 1 = 3."""
    inputs = np.arange(1, 9, dtype=np.float32).reshape(1, 8, 1)
    before = -np.array([3, 2, 1], np.float32).reshape(1, 3, 1)
    chain = jnp.arange(-1, 7, dtype=jnp.int32)[None]
    window = replay_gather_index(chain, jnp.array([accepted], jnp.int32), 4)
    got = replay_conv_state(jnp.asarray(inputs), jnp.asarray(before), window)
    all_inputs = [-3, -2, -1, *range(1, accepted + 2)]
    assert got[0, :, 0].tolist() == all_inputs[-3:]


def test_the_documented_window():
    parents = jnp.array([[-1, 0, 0, 1, 1, 2]], jnp.int32)
    window = conv_gather_index(parents, 4)[0]
    assert window[0].tolist() == [0, 1, 2, 3]
    assert window[2].tolist() == [1, 2, 3, 5]
    assert window[5].tolist() == [2, 3, 5, 8]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_masking_comes_before_exp(implementation):
    """A sibling's exponent is +200 here, past float32's exp; it must not even turn into inf * 0."""
    parents = np.array([[-1, 0, 0]])
    shape = (1, 3, 1, 16)
    ones = jnp.ones(shape)
    dt = jnp.array([0.1, 200.0, 0.1]).reshape(1, 3, 1)
    y = tree_scan(
        ones,
        dt,
        -jnp.ones(1),
        ones,
        ones,
        jnp.zeros((1, 16)),
        jnp.ones((1, 1, 16, 16)),
        jnp.asarray(np.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], bool)),
        implementation=implementation,
    )
    truth, _ = tree_scan_reference(
        np.ones(shape),
        np.asarray(dt, np.float64),
        -np.ones(1),
        np.ones(shape),
        np.ones(shape),
        np.zeros((1, 16)),
        np.ones((1, 1, 16, 16)),
        parents,
    )
    np.testing.assert_allclose(y, truth, rtol=1e-5)
