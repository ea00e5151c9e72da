"""The exit from Pallas-Triton. Most of this needs jax-triton, which no test environment has."""

import functools
import importlib.metadata
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch, jax_triton_backend
from tests.kernels.cases import CASES

OBSTACLE = jax_triton_backend.obstacle("replay")
needs_jax_triton = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))


@pytest.mark.parametrize(
    ("jax_triton", "jax_version", "triton", "reason"),
    [
        ("0.3.1", "0.10.2", "3.6.0", None),
        ("0.3.1", "0.12.0.1", "3.9.0", None),
        ("0.4.1", "0.11.2", "3.7.1", None),
        ("0.4.1", "0.11.2", "3.6.0", "needs triton from 3.7"),
        ("0.4.1", "0.12.0.1", "3.9.0", "needs jax from 0.11, before 0.12"),
        ("0.4.1", "0.10.2", "3.9.0", "needs jax from 0.11, before 0.12"),
        ("0.3.0", "0.10.2", "3.6.0", "never tried together"),
        ("0.5.0.dev1", "0.11.2", "3.9.0", "never tried together"),
    ],
)
def test_which_versions_go_together(jax_triton, jax_version, triton, reason):
    got = jax_triton_backend.incompatible(jax_triton, jax_version, triton)
    assert got is None if reason is None else reason in got


def test_without_jax_triton_it_is_refused(monkeypatch):
    def version(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ValueError, match="jax-triton is not installed; use 'xla'"):
        dispatch.choose("replay", "jax_triton", None)
    assert dispatch.choose("replay", "xla", None) == "xla"


def test_it_is_refused_for_other_ops_and_shapes(monkeypatch):
    with pytest.raises(ValueError, match="no jax-triton kernel of it, only of.*'tree_scan'"):
        dispatch.choose("tree_conv1d", "jax_triton", None)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "1")
    monkeypatch.setattr(jax_triton_backend, "incompatible", lambda *versions: None)
    with pytest.raises(ValueError, match="odd shape"):
        dispatch.choose("replay", "jax_triton", "odd shape")
    assert dispatch.choose("replay", "jax_triton", None) == "jax_triton"


@needs_jax_triton
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("nodes", [13, 64])
def test_lowers(nodes, dtype, capability):
    """As `test_lowering.py` does. Needs a plugin of jax for CUDA, but no GPU."""
    from pallas_kernels.replay import jax_triton as replay_kernels
    from pallas_kernels.tree_scan import jax_triton as scan_kernels

    struct, f32 = jax.ShapeDtypeStruct, jnp.float32
    x, dt, A = struct((1, nodes, 8, 64), dtype), struct((1, nodes, 8), f32), struct((8,), f32)
    B, D = struct((1, nodes, 2, 128), dtype), struct((8, 64), f32)
    state, mask = struct((1, 8, 64, 128), f32), struct((1, nodes, nodes), jnp.bool_)
    for function, arguments in (
        (scan_kernels.tree_scan, (x, dt, A, B, B, D, state, mask)),
        (replay_kernels.replay, (x, dt, A, B, state, struct((1, nodes), jnp.bool_))),
    ):
        compiled_for = functools.partial(function, compute_capability=capability)
        traced = jax.jit(compiled_for).trace(*arguments)
        code = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert code.count("custom_call @triton_kernel_call") == 1
        assert ("output_operand_alias" in code) == (function is replay_kernels.replay)


@needs_jax_triton
def test_the_kernels_are_the_recurrence():
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton_interpreted"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    errors = json.loads(result.stdout.splitlines()[-1])
    for case in CASES:
        if not case.bf16:
            assert errors[case.name]["tree_scan"] < (3e-5 if case.dt_scale > 1 else 1e-6), case
            assert errors[case.name]["replay"] < 1e-6, case
