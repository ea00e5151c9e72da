"""Native functions as XLA calls them, with random shapes, also under sanitizers."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

from pallas_kernels import native
from pallas_kernels.native import build_backend
from tests.cases.base import NEEDS_NATIVE
from tests.helpers import linked_driver

pytestmark = pytest.mark.skipif(
    not build_backend.sources() or sys.platform != "linux", reason="a checkout on Linux only"
)


def call(library, folder, flags=(), *, compiler=None, **options):
    """As `digests`, with a library. Where a sanitizer is on, both must have it."""
    return digests(linked_driver(library, folder, flags, compiler), **options)


def digests(driver, *, runs=(), calls, seed, threads):
    """Lets the driver call its library; returns digests of the results."""
    environment = os.environ | {"UBSAN_OPTIONS": "halt_on_error=1"}
    command = [*runs, driver, str(calls), str(seed), str(threads)]
    found = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return found.stdout


def linked(level, folder=build_backend.HERE):
    """The library of a level, as a linker takes it."""
    return build_backend.library(level, folder), f"-Wl,-rpath,{folder}"


@NEEDS_NATIVE
def test_calls_of_any_shape_write_all_numbers_or_are_refused(tmp_path):
    """With more threads than there are tasks, most of which find nothing left to do.

    All instructions give the same bits: attention to 200 keys was contracted in different ways.
    """
    library, results = tmp_path / "libstree.so", set()
    shutil.copy(build_backend.library(native.level()), library)
    driver = linked_driver([library], tmp_path)
    for level in build_backend.own_levels():
        if build_backend.library(level).is_file():
            shutil.copy(build_backend.library(level), library)
            results.add(digests(driver, calls=800, seed=1, threads=64))
    assert len(results) == 1


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitizer, tmp_path, monkeypatch):
    """For every set of instructions that this processor has."""
    monkeypatch.setenv("CXX", "g++")
    flags, levels = ("-g", "-O1", f"-fsanitize={sanitizer}"), build_backend.own_levels()
    build_backend.build(tmp_path, flags, levels)
    for level in levels:
        call(linked(level, tmp_path), tmp_path, flags, calls=2800, seed=0, threads=4)


@NEEDS_NATIVE
@pytest.mark.slow
def test_all_instructions_give_the_same_bits(tmp_path):
    """Those of this processor, and NEON in an emulator if that and ziglang are installed."""
    same = dict(calls=2800, seed=2, threads=2)
    found = {each: call(linked(each), tmp_path, **same) for each in build_backend.own_levels()}
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator and find_spec("ziglang"):
        zig = sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl", "-static"
        for level, flags in build_backend.LEVELS["aarch64"].items():
            library = (
                *build_backend.FLAGS,
                *flags,
                '-DSTREE_JAX_SOURCES=""',
                *build_backend.sources(),
            )
            found[level] = call(library, tmp_path, compiler=zig, runs=[emulator], **same)
    if len(found) == 1:
        pytest.skip("there is one set of instructions, and no emulator of others")
    assert len(set(found.values())) == 1, found
