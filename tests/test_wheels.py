"""Wheels in the folder `STREE_JAX_WHEELS`, as `make wheels` leaves them; NEON's in an emulator."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pallas_kernels.native import build_backend
from tests.helpers import linked_driver

WHEELS = os.environ.get("STREE_JAX_WHEELS")
pytestmark = pytest.mark.skipif(not WHEELS, reason="no folder of wheels is named")
ARM = "manylinux_2_28_aarch64"
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
GLIBC = Path(os.environ.get("QEMU_LD_PREFIX", "/usr/aarch64-linux-gnu"))  # libc6-arm64-cross
EMULATED = pytest.mark.skipif(
    not (EMULATOR and (GLIBC / "lib").is_dir()), reason="no emulator, or no C library for it"
)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """A function that unpacks a wheel, and returns what it has beside Python by level."""

    def unpacked(platform):
        folder = tmp_path_factory.mktemp(platform)
        (wheel,) = Path(WHEELS).glob(f"stree_jax-*-py3-none-{platform}.whl")
        with zipfile.ZipFile(wheel) as opened:
            opened.extractall(folder)
        (tags,) = folder.glob("*.dist-info/WHEEL")
        assert f"Tag: py3-none-{platform}\n" in tags.read_text()
        native = folder / "pallas_kernels/native"
        assert not [*folder.rglob("*.cc"), *folder.rglob("failure.txt")]
        levels = build_backend.levels(build_backend.TARGETS[platform])
        found = {level: build_backend.library(level, native) for level in levels}
        assert sorted(folder.rglob("*.so")) == sorted(found.values())
        return found

    return unpacked


def kernels(file):
    """The names of the ops in a library, which may export nothing else but operators of C++."""
    symbols = pytest.importorskip("lief").parse(str(file)).exported_symbols
    names = {symbol.name.lstrip("_") for symbol in symbols if symbol.value}
    own = {name for name in names if name.startswith("stree_jax_")}
    assert not [name for name in names - own if not re.match("Z(n|d)[al]", name)]
    return {name.removeprefix("stree_jax_") for name in own - {"stree_jax_sources"}}


@pytest.mark.parametrize("platform", build_backend.TARGETS)
def test_each_has_all_levels_of_its_platform(platform, libraries):
    lief = pytest.importorskip("lief")
    architecture = "x86_64" if platform.endswith("x86_64") else "a.*64"
    for file in libraries(platform).values():
        assert len(kernels(file)) == 15, file
        binary = lief.parse(str(file))
        if platform.startswith("manylinux"):
            assert re.fullmatch(architecture, binary.header.machine_type.name, re.IGNORECASE)
            continue
        assert re.fullmatch(architecture, binary.header.cpu_type.name, re.IGNORECASE)
        assert binary.header.file_type.name == "DYLIB"
        assert binary.build_version.minos == [11, 0, 0]
        assert [each.name for each in binary.libraries] == ["/usr/lib/libSystem.B.dylib"]
        assert binary.has_code_signature or platform.endswith("x86_64")


@pytest.mark.parametrize("platform", [name for name in build_backend.TARGETS if "linux" in name])
def test_glibc_may_be_as_old_as_the_name_says(platform):
    pytest.importorskip("auditwheel")
    (wheel,) = Path(WHEELS).glob(f"*{platform}.whl")
    command = [sys.executable, "-m", "auditwheel", "show", wheel]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    least = re.search(r'platform tag:\s+"manylinux_2_(\d+)_(\w+)"', said)
    assert int(least[1]) <= 28, said
    assert platform.endswith(least[2])


def emulate(processor, library, folder, chosen):
    """Tests ops against `reference.py` with a library: what failed, and the calls of each op."""
    zig = build_backend.compiler(build_backend.TARGETS[ARM])
    driver = linked_driver(library, folder, compiler=zig)
    command = shlex.join(map(str, [EMULATOR, "-L", GLIBC, "-cpu", processor, driver]))
    tests = [f"tests/kernels/test_{each}.py" for each in ("ops", "matmul", "other_ops")]
    options = ["-qrf", "-p", "tests.emulated", "-p", "no:cacheprovider", "-k", chosen]
    run = [sys.executable, "-m", "pytest", *options, "-m", "not gpu and not slow", *tests]
    environment = os.environ | {"STREE_JAX_EMULATED": command}
    done = subprocess.run(
        run, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True
    )
    counts = re.search(r"^\{.*\}$", done.stdout, re.MULTILINE)
    assert counts, done.stdout + done.stderr
    return re.findall("^FAILED (.*)$", done.stdout, re.MULTILINE), json.loads(counts[0])


@EMULATED
@pytest.mark.parametrize(
    ("level", "processor"), [("neon", "cortex-a53"), ("dotprod", "cortex-a76")]
)
def test_all_ops_are_right(level, processor, libraries, tmp_path):
    """On the first processor of its architecture, and one of the first with dot products."""
    file = libraries(ARM)[level]
    chosen = "native or in_order or extreme or finite or denormal or probabilities or norm_alone"
    failed, counts = emulate(processor, [file, f"-Wl,-rpath,{file.parent}"], tmp_path, chosen)
    assert not failed
    assert counts.keys() == kernels(file)


@EMULATED
def test_a_wrong_op_is_found(libraries, tmp_path):
    package, file = tmp_path / "pallas_kernels", libraries(ARM)["neon"]
    shutil.copytree(build_backend.HERE.parent, package, ignore=shutil.ignore_patterns("*.so"))
    header = package / "matmul/rounded.h"
    header.write_text(header.read_text().replace("vmull_high_s16(c, d)", "vmull_high_s16(c, c)"))
    library = [
        *build_backend.FLAGS,
        package / "matmul/native.cc",
        file,
        f"-Wl,-rpath,{file.parent}",
    ]
    failed, counts = emulate("cortex-a53", library, tmp_path, "native and matmul")
    assert counts.keys() == {"matmul"}
    assert failed
    assert all("int8" in each for each in failed), failed
