"""`matmul` on 8 CPU devices: the same to the bit. Run by `test_on_8_devices.py`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_array_equal

from pallas_kernels.matmul.api import matmul
from pallas_kernels.matmul.packed import PackedMatrix
from tests.cases.base import NEEDS_NATIVE
from tests.cases.matmul import DTYPES

pytestmark = NEEDS_NATIVE
run = functools.partial(matmul, implementation="native")
COLUMNS = 512
DENSE = np.random.default_rng(0).normal(size=(300, COLUMNS)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(16, 300)).astype(np.float32)


def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("rows", "columns"))


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_device_multiplies_its_rows_and_columns(dtype, check_vma):
    matrix = PackedMatrix.pack(DENSE, dtype)

    def local(x, blocks, scales):
        return run(x, PackedMatrix(blocks, scales, 300, COLUMNS // 4))

    of_blocks = P("columns")
    sharded = jax.shard_map(
        local,
        mesh=mesh(),
        in_specs=(P("rows"), of_blocks, None if matrix.scales is None else of_blocks),
        out_specs=P("rows", "columns"),
        check_vma=check_vma,
    )
    y = jax.jit(sharded)(X, matrix.blocks, matrix.scales)
    assert len(y.sharding.device_set) == 8
    assert_array_equal(y, run(jnp.asarray(X), matrix))


def test_each_device_runs_the_kernel_on_its_columns():
    """Of a matrix that is not packed; replication cannot be checked, as in programs of models."""
    x, matrix = (jnp.asarray(array[:64, :64], jnp.bfloat16) for array in (X, DENSE))
    product = functools.partial(matmul, implementation="pallas_interpret")
    options = dict(in_specs=(P("rows"), P(None, "columns")), out_specs=P("rows", "columns"))
    sharded = jax.shard_map(product, mesh=mesh(), check_vma=False, **options)
    assert_array_equal(jax.jit(sharded)(x, matrix), product(x, matrix))


def test_devices_at_once():
    """Each calls from its own thread."""
    matrix = PackedMatrix.pack(DENSE)
    want = run(jnp.asarray(X), matrix)
    placed = {device: jax.device_put((X, matrix), device) for device in jax.devices()}
    for device, y in [(d, jax.jit(run)(*each)) for _ in range(20) for d, each in placed.items()]:
        assert y.devices() == {device}
        assert_array_equal(y, want)
    with jax.default_device(jax.devices()[3]):
        y = jax.jit(run)(X, PackedMatrix.pack(DENSE))
        assert y.devices() == {jax.devices()[3]}
        assert_array_equal(y, want)
