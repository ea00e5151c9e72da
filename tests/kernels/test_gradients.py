"""A fast version runs forward and has the derivative of XLA."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_kernels as pk
from pallas_kernels.matmul import matmul, rows
from pallas_kernels.rms_norm.api import NORMS
from pallas_kernels.tree_delta import xla
from tests.cases import matmul as matmul_cases
from tests.cases import moe
from tests.cases import ssd as ssd_cases
from tests.cases import tree_attention as attention_cases
from tests.cases import tree_delta as delta_cases
from tests.cases import tree_scan as scan_cases
from tests.cases.base import NEEDS_NATIVE, assert_finite, relative_error


def normal(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape)) for shape in shapes]


def gated(norm):
    y, gate, weight = normal((3, 32), (3, 40), (32,))
    run = functools.partial(pk.gated_rms_norm, norm=norm, num_groups=2, gate_start=8)
    return run, (y, gate, None if norm == "none" else weight)


def added(parts):
    def run(residual, output, weight, *squares, implementation):
        output = pk.DeferredRMSNorm(output, *squares, 0.5) if parts else output
        return pk.add_rms_norm(
            residual, output, weight, epsilon=1e-5, implementation=implementation
        )

    squares = [jnp.asarray(np.random.default_rng(1).uniform(size=(3, parts)))] if parts else []
    return run, (*normal((3, 32), (3, 32), (32,)), *squares)


def of_floats(op, arguments, **options):
    """The op as a function of what has a derivative, unlike masks and bytes; and these."""
    is_float = [jax.tree.all(jax.tree.map(_is_float, each)) for each in arguments]

    def run(*floats, implementation):
        left = iter(floats)
        given = (next(left) if f else x for f, x in zip(is_float, arguments, strict=True))
        return op(*given, **options, implementation=implementation)

    return run, tuple(x for f, x in zip(is_float, arguments, strict=True) if f)


def _is_float(leaf):
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def attention():
    case = attention_cases.CASES["several blocks"]
    return of_floats(pk.tree_attention, attention_cases.inputs(case), scale=0.25)


def scan():
    return of_floats(pk.tree_scan, scan_cases.arguments(pk.tree_scan, scan_cases.CASES["tree"]))


def delta(op, apart=False):
    """The gated delta rule: of a tree, after a path of another, or of a sequence."""
    case = delta_cases.CASES["padded nodes"].but(replayed=6, apart=apart)
    options = dict(chunk_size=8) if op is pk.delta_chunks else {}
    return of_floats(op, delta_cases.arguments(op, case), **options)


def product(name):
    return of_floats(matmul, matmul_cases.on_device(matmul_cases.CASES[name]))


def embedded(name):
    _, matrix = matmul_cases.on_device(matmul_cases.CASES[name])
    return of_floats(rows, (matrix, jnp.array([3, 40, 3])))


def experts(case):
    """ "products" is XLA's other way."""

    def run(*arguments, implementation):
        op = functools.partial(pk.expert_mlps, implementation=implementation)
        op = moe.in_products if implementation == "products" else op
        return op(*arguments, activation="silu", gated=True)

    return of_floats(run, moe.on_device(case))


UNPACKED = ("unpacked bf16", "unpacked int8")
PRODUCTS = ("some rows", "one row", "bf16", "int8", "int4", "several", "cut in blocks")
EXPERTS = {f"expert_mlps, {case}": functools.partial(experts, case) for case in (moe.MANY, moe.FEW)}
KERNELS = {
    **EXPERTS,
    **{f"gated_rms_norm, {norm}": functools.partial(gated, norm) for norm in NORMS},
    "add_rms_norm": functools.partial(added, 0),
    "add_rms_norm, deferred": functools.partial(added, 4),
    "ssd": lambda: (functools.partial(pk.ssd, chunk_size=8), ssd_cases.on_device(ssd_cases.PLAIN)),
    "tree_attention": attention,
    "tree_delta": functools.partial(delta, pk.tree_delta),
    **{f"matmul, {name}": functools.partial(product, name) for name in UNPACKED},
}
DELTAS = (pk.tree_delta, pk.replay_tree_delta, pk.delta_chunks)
NATIVE = {
    "tree_scan": scan,
    **{op.__name__: functools.partial(delta, op) for op in DELTAS},
    **{f"{op.__name__}, channels": functools.partial(delta, op, apart=True) for op in DELTAS},
    **{f"matmul, {name}": functools.partial(product, name) for name in PRODUCTS},
    **{f"rows, {name}": functools.partial(embedded, name) for name in ("some rows", "bf16")},
}


def gradients(run, arguments, **options):
    def total(arguments):
        outputs = run(*arguments, **options)
        return sum((value**3).sum() for value in jax.tree.leaves(outputs))

    return jax.tree.leaves(jax.jit(jax.grad(total))(tuple(arguments)))


@pytest.mark.parametrize(
    ("implementation", "call"),
    [
        *(
            pytest.param(way, call, id=f"{way} {name}", marks=pytest.mark.thorough)
            for way, calls in {"pallas_interpret": KERNELS, "products": EXPERTS}.items()
            for name, call in calls.items()
        ),
        *(
            pytest.param("native", call, id=f"native {name}", marks=NEEDS_NATIVE)
            for name, call in NATIVE.items()
        ),
    ],
)
def test_gradients_are_those_of_xla(implementation, call):
    run, arguments = call()
    both = (gradients(run, arguments, implementation=i) for i in ("xla", implementation))
    for wanted, got in zip(*both, strict=True):
        assert relative_error(got, wanted) < 1e-5


def test_gradients_are_finite_with_large_time_steps():
    x, dt, *rest = ssd_cases.on_device(ssd_cases.PLAIN)
    run = functools.partial(pk.ssd, chunk_size=8)
    found = gradients(run, (x, dt * 100.0, *rest), implementation="xla")
    assert all(jnp.isfinite(value).all() for value in found)


def one_by_one(q, k, v, g, beta, state):
    """`delta_chunks` as a scan over positions, with the plain recurrence's derivatives."""
    each = v.shape[2] // k.shape[2]
    q, k = (jnp.repeat(xla.normed(x), each, axis=2) for x in (q * 1.0, k * 1.0))

    def step(state, now):
        q, k, v, g, beta = now
        state = jnp.exp(g.reshape(*g.shape[:2], 1, -1)) * state
        u = beta[..., None] * (v - jnp.einsum("bhps,bhs->bhp", state, k))
        state = state + u[..., None] * k[..., None, :]
        return state, jnp.einsum("bhps,bhs->bhp", state, q) * q.shape[-1] ** -0.5

    state, y = lax.scan(step, state, [x.swapaxes(0, 1) for x in (q, k, v, g, beta)])
    return y.swapaxes(0, 1), state


@pytest.mark.parametrize(
    "name",
    [
        *("tree", "betas to 2", "decays of -100 among 0", "equal keys"),
        *("channels, tree", "channels, decays to a bound", "channels, decays of six decades"),
    ],
)
def test_gradients_of_delta_chunks_are_those_of_the_recurrence(name):
    case = delta_cases.CASES[name].but(nodes=21, batch=1, shape="random")
    *given, valid = delta_cases.arguments(pk.delta_chunks, case)
    run = functools.partial(pk.delta_chunks, valid=valid, chunk_size=8)
    for one, other in zip(gradients(run, given), gradients(one_by_one, given), strict=True):
        assert relative_error(one, other) < 5e-6


def test_gradients_are_finite_where_positions_hold_nan():
    for op, apart in itertools.product((pk.delta_chunks, pk.tree_delta), (False, True)):
        for gradient in gradients(*delta(op, apart), implementation="xla"):
            assert_finite(gradient)
