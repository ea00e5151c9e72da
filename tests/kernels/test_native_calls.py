"""Native functions as XLA calls them, with random shapes, also under sanitizers."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from pallas_kernels import native
from pallas_kernels.native import build_backend
from tests.cases.base import NEEDS_NATIVE

pytestmark = pytest.mark.skipif(
    not build_backend.sources() or sys.platform != "linux", reason="a checkout on Linux only"
)


def call(library, folder, flags=(), *, calls, seed, threads):
    """Compiles the driver and lets it call a library, which must have the same sanitizer."""
    if (compiler := build_backend.compiler()) is None:
        pytest.skip("there is no C++ compiler")
    source, driver = Path(__file__).with_name("driver.cc"), folder / "driver"
    flags = ("-std=c++17", "-O1", *flags, "-isystem", jax.ffi.include_dir(), source)
    subprocess.run([*compiler, *flags, "-o", driver, "-ldl", "-pthread"], check=True)
    environment = os.environ | {"UBSAN_OPTIONS": "halt_on_error=1"}
    command = [driver, library, str(calls), str(seed), str(threads)]
    subprocess.run(command, env=environment, check=True)


@NEEDS_NATIVE
def test_calls_of_any_shape_write_all_numbers_or_are_refused(tmp_path):
    """With more threads than there are tasks, most of which find nothing left to do."""
    call(build_backend.library(native.level()), tmp_path, calls=560, seed=1, threads=64)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitizer, tmp_path, monkeypatch):
    """For every set of instructions that this processor has."""
    monkeypatch.setenv("CXX", "g++")
    flags, levels = ("-g", "-O1", f"-fsanitize={sanitizer}"), build_backend.own_levels()
    build_backend.build(tmp_path, flags, levels)
    for level in levels:
        call(build_backend.library(level, tmp_path), tmp_path, flags, calls=2800, seed=0, threads=4)
