"""The exit from Pallas-Triton. Most of this needs jax-triton, which one leg of `.ci/run` has."""

import importlib.metadata
import json

import pytest

from pallas_kernels import dispatch
from pallas_kernels.tree_scan import jax_triton_versions
from tests.cases.tree_scan import CASES, small_replay
from tests.helpers import python, refusal

OBSTACLE = jax_triton_versions.obstacle()
needs_jax_triton = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))


@pytest.mark.parametrize(
    ("jax_triton", "jax_version", "triton", "reason"),
    [
        ("0.3.1", "0.10.2", "3.6.0", None),
        ("0.3.1", "0.12.0.1", "3.9.0", None),
        ("0.3.1", "0.13.0", "3.9.0", "jax from 0.10.2, before 0.13"),
        ("0.3.1", "0.12.0", "3.5.1", "triton from 3.6"),
        ("0.3.0", "0.10.2", "3.6.0", "jax-triton 0.3.1"),
        ("0.4.1", "0.11.2", "3.7.1", "jax-triton 0.3.1"),
    ],
)
def test_which_versions_go_together(jax_triton, jax_version, triton, reason):
    got = jax_triton_versions.incompatible(jax_triton, jax_version, triton)
    assert got is None if reason is None else reason in got


def test_where_it_is_refused(monkeypatch):
    def version(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    refusal("jax-triton is not installed; use 'xla'", small_replay)
    refusal(
        "unknown implementation 'jax_triton' of tree_conv1d",
        dispatch.choose,
        "tree_conv1d",
        "jax_triton",
    )
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "1")
    monkeypatch.setattr(jax_triton_versions, "incompatible", lambda *versions: None)
    refusal("state_size = 12 is not a power of two", small_replay, state_size=12)


def run(what, **environment):
    output = python("-m", "tests.kernels.jax_triton_runs", what, **environment)
    return json.loads(output.splitlines()[-1])


@needs_jax_triton
def test_lowers():
    """As `test_lowering.py` does. Needs a plugin of jax for CUDA, but no GPU."""
    assert run("lowered") == [[1, True]] * 8


@needs_jax_triton
def test_the_kernel_is_the_recurrence():
    errors = run("interpreted", TRITON_INTERPRET="1")
    assert errors.keys() == {case.name for case in CASES.values() if not case.bf16}
    assert max(errors.values()) < 1e-6
