"""Wheels in the folder `STREE_JAX_WHEELS`, as `make wheels` leaves them; NEON's in an emulator."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pallas_kernels.native import build_backend
from tests.helpers import emulated_tests

WHEELS = Path(os.environ.get("STREE_JAX_WHEELS", "none"))
SYSTEM = "/usr/lib/libSystem.B.dylib"
ARM = "manylinux_2_28_aarch64"
OPS = {
    name
    for source in build_backend.sources()
    for name in re.findall(r"XLA_FFI_Error\* stree_jax_(\w+)\(", source.read_text())
}
ZIG = build_backend.compiler(build_backend.TARGETS[ARM])
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
GLIBC = Path(os.environ.get("QEMU_LD_PREFIX", "/usr/aarch64-linux-gnu"))  # libc6-arm64-cross
pytestmark = pytest.mark.skipif(not WHEELS.is_dir(), reason="no folder of wheels is named")
emulated = pytest.mark.skipif(
    not (EMULATOR and GLIBC.is_dir()), reason="no emulator, or no C library for it"
)


def libraries(platform, folder):
    """Unpacks a wheel; that, and its libraries by level."""
    wheel = next(WHEELS.glob(f"stree_jax-*-py3-none-{platform}.whl"), None)
    if wheel is None:
        pytest.skip(f"there is no wheel for {platform}")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder)
    levels = build_backend.levels(build_backend.TARGETS[platform])
    native = folder / "pallas_kernels/native"
    return wheel, {level: build_backend.library(level, native) for level in levels}


def kernels(file):
    """The names of the ops in a library; beside them it may export operators of C++."""
    symbols = pytest.importorskip("lief").parse(str(file)).exported_symbols
    names = {symbol.name.lstrip("_") for symbol in symbols}
    own = {name for name in names if name.startswith("stree_jax_")}
    assert not [name for name in names - own if not re.match("Z[nd]|dso_handle|mh_dylib", name)]
    return {name.removeprefix("stree_jax_") for name in own - {"stree_jax_sources"}}


@pytest.mark.parametrize("platform", build_backend.TARGETS)
def test_each_has_all_levels_of_its_platform(platform, tmp_path):
    lief = pytest.importorskip("lief")
    wheel, files = libraries(platform, tmp_path)
    (tags,) = tmp_path.glob("*.dist-info/WHEEL")
    assert f"Tag: py3-none-{platform}\n" in tags.read_text()
    native = tmp_path / "pallas_kernels/native"
    assert {*native.iterdir()} - {*native.glob("*.py")} == {*files.values()}
    processor = "x86_64" if platform.endswith("x86_64") else "aarch64|arm64"
    for file in files.values():
        assert kernels(file) == OPS, file
        binary = lief.parse(str(file))
        if "linux" in platform:
            assert re.fullmatch(processor, binary.header.machine_type.name.lower())
        else:
            assert re.fullmatch(processor, binary.header.cpu_type.name.lower())
            assert binary.build_version.minos == [11, 0, 0]
            assert [each.name for each in binary.libraries] == [file.name, SYSTEM]
            assert binary.has_code_signature == (processor != "x86_64")
    if "linux" in platform:
        command = [sys.executable, "-m", "auditwheel", "show", wheel]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        oldest = re.search(rf"manylinux_2_(\d+)_{processor.split('|')[0]}\"", said)
        assert int(oldest[1]) <= 28, said


def emulator(processor):
    return [EMULATOR, "-L", GLIBC, "-cpu", processor]


# The first processor of the architecture, and one of the first with dot products.
@emulated
@pytest.mark.parametrize(
    ("level", "processor"), [("neon", "cortex-a53"), ("dotprod", "cortex-a76")]
)
def test_all_ops_are_right(level, processor, tmp_path):
    file = libraries(ARM, tmp_path)[1][level]
    chosen = "native or in_order or extreme or finite or denormal or probabilities"
    library = [file, f"-Wl,-rpath,{file.parent}"]
    failed, counts = emulated_tests(library, tmp_path, chosen, ZIG, emulator(processor))
    assert not failed
    assert counts.keys() == kernels(file)


@emulated
def test_a_wrong_op_is_found(tmp_path):
    package, file = tmp_path / "sources", libraries(ARM, tmp_path)[1]["neon"]
    shutil.copytree(build_backend.HERE.parent, package, ignore=shutil.ignore_patterns("*.so"))
    header = package / "matmul/rounded.h"
    header.write_text(header.read_text().replace("vmull_high_s16(c, d)", "vmull_high_s16(c, c)"))
    wrong = [*build_backend.FLAGS, package / "matmul/native.cc"]  # comes before the library's
    library = [*wrong, file, f"-Wl,-rpath,{file.parent}"]
    chosen, runs = "native and matmul", emulator("cortex-a53")
    failed, counts = emulated_tests(library, tmp_path, chosen, ZIG, runs)
    assert counts.keys() == {"matmul"}
    assert failed
    assert all("int8" in each for each in failed), failed
