"""`expert_mlps`, the experts of a mixture."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import expert_mlps
from pallas_kernels.matmul.packed import PackedMatrix
from pallas_kernels.moe import pallas_triton, xla
from pallas_kernels.moe.reference import expert_mlps as reference
from tests.cases import base
from tests.cases.base import Budget, Op, relative_error

# float32: sums of some ten terms, twice. bf16: rounding what an expert has inside, and the outputs.
EXPERTS = {False: 1e-6, True: 6e-3}
BLOCKS = pallas_triton.BlockSizes(rows=16, columns=32, inner=16, num_stages=1)
CASES = base.table(
    {
        "some rows an expert": {},
        "few tokens": dict(tokens=2),
        "one token": dict(tokens=1, active=1),
        "not gated": dict(activation="relu2", gated=False),
        "a limit": dict(limit=0.25),
        "blocks of rows": dict(tokens=40, experts=3, one=True),
        "experts that nobody chooses": dict(tokens=17, experts=20, one=True),
        "all experts": dict(tokens=5, experts=3, active=3, width=16),
        "bf16": dict(tokens=30, bf16=True),
        "large blocks of rows": dict(tokens=50, experts=3, rows=64, bf16=True),
    },
    tokens=9,
    width=32,
    hidden=48,
    experts=5,
    active=2,
    activation="silu",
    gated=True,
    limit=None,
    one=False,  # all tokens choose the same experts
    rows=16,  # of a block
)
MANY, FEW = CASES["some rows an expert"], CASES["few tokens"]


@functools.cache
def inputs(case):
    """Float64 arrays that are exact in the case's type, and the choices."""
    rng, draw = base.drawn(case)
    columns = 2 * case.hidden if case.gated else case.hidden
    chosen = [
        rng.permutation(np.arange(case.active) if case.one else case.experts)[: case.active]
        for _ in range(case.tokens)
    ]
    return (
        draw(case.tokens, case.width),
        np.abs(draw(case.tokens, case.active, dtype=np.float32)),
        np.array(chosen, np.int32),
        draw(case.experts, case.width, columns),
        draw(case.experts, case.hidden, case.width),
    )


def on_device(case):
    x, weights, chosen, *experts = inputs(case)
    x, *experts = (base.on_device(value, case.kind) for value in (x, *experts))
    return x, base.on_device(weights, jnp.float32), base.on_device(chosen), *experts


def in_products(x, weights, chosen, *experts, **options):
    """XLA's other way, one product for all experts, which a CPU does not take."""
    return xla.weighted_sum(xla.products(x, chosen, *experts, **options), weights)


@functools.cache
def errors(case, implementation):
    options = dict(activation=case.activation, gated=case.gated, limit=case.limit)
    if implementation == "xla":
        run = functools.partial(expert_mlps, **options, implementation="xla")
    elif implementation == "products":
        run = functools.partial(in_products, **options)
    elif implementation == "native":
        run = functools.partial(xla.packed_mlps, **options, product="native")
    else:
        run = functools.partial(
            pallas_triton.expert_mlps,
            **options,
            interpret=implementation == "pallas_interpret",
            blocks=dataclasses.replace(BLOCKS, rows=case.rows),
        )
    arrays = on_device(case)
    if implementation == "native":
        arrays = *arrays[:3], *map(PackedMatrix.pack, arrays[3:])
    got = jax.jit(run)(*arrays)
    assert got.dtype == case.kind
    return {"output": relative_error(got, reference(*inputs(case), **options))}


def budgets(case):
    return {"output": Budget(EXPERTS[case.bf16], 1.5)}


EXPERT_MLPS = Op(
    *(CASES, errors, budgets, (*base.WITH_NATIVE, "products")),
    slow=("all experts",),
    lacks=base.native_lacks_bf16,
)
