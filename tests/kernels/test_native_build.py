"""How the native library is built, chosen and refused."""

import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import jax
import pytest

import stree_jax as st
from pallas_kernels import dispatch, native
from pallas_kernels.native import build_backend
from stree_jax.testing import tiny_model
from tests.helpers import emulated_tests, refusal

ROOT = Path(__file__).parents[2]
V3 = "abm avx2 bmi1 bmi2 f16c fma movbe"
V4 = f"{V3} avx512bw avx512cd avx512dq avx512f avx512vl"
DOTPROD = "fp asimd asimddp"
needs_sources = pytest.mark.skipif(
    not build_backend.sources(), reason="the tests run without a checkout"
)


def forget():
    for function in (native.obstacle, native.library, native.register):
        function.cache_clear()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the library on an x86-64 machine, empty; sources are there."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build_backend, "digest", lambda: "of the sources")
    library, failure, built = build_backend.library, build_backend.failure, build_backend.built
    monkeypatch.setattr(
        build_backend, "library", lambda level, folder=tmp_path: library(level, folder)
    )
    monkeypatch.setattr(build_backend, "failure", lambda: failure(tmp_path))
    monkeypatch.setattr(build_backend, "built", lambda: built(tmp_path))
    processor(monkeypatch, tmp_path, V4)
    yield tmp_path
    forget()


def processor(monkeypatch, path, flags, wanted=""):
    """A machine whose processor has these (None: it does not say), and the user's choice."""
    info = path / "cpuinfo"
    name = "Features" if flags == DOTPROD else "flags"
    info.write_text(f"processor: 0\n{name}\t\t: fpu sse2 {flags}\n")
    monkeypatch.setattr(build_backend, "CPU_INFO", info if flags else path / "nowhere")
    monkeypatch.setenv("STREE_JAX_NATIVE", wanted)
    forget()


def obstacle():
    forget()
    return native.obstacle()


def made(path, code):
    """A shared library of some C; skips where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=code, text=True, check=True)


def test_without_a_library_xla_runs_and_says_so(folder, monkeypatch):
    """Unless the user named its instructions."""
    assert obstacle() == (
        "the native library is not built: `pip install .` builds it, in a checkout"
        " `pip install -e .`"
    )
    assert native.level() is None
    assert dispatch.explain().startswith("xla: ")
    assert dispatch.explain().endswith(obstacle())
    monkeypatch.setenv("STREE_JAX_NATIVE", "v3")
    refusal("STREE_JAX_NATIVE=v3: the native library is not built", obstacle)
    monkeypatch.setenv("STREE_JAX_NATIVE", "")
    build_backend.failure().write_text("g++ failed: no space left\n")
    assert obstacle() == "the native library is not built: g++ failed: no space left"


def test_a_clone_has_what_its_machine_runs(folder, monkeypatch):
    """It runs on a machine that has more; one that does not say what it has builds all."""
    compiler = folder / "c++"
    compiler.write_text('#!/bin/sh\nfor last; do :; done; touch "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    build, names = build_backend.build, ["libstree-v3.so", "libstree-v4.so"]
    monkeypatch.setattr(build_backend, "build", lambda **chosen: build(folder, **chosen))
    every = sorted(build_backend.library(level).name for level in build_backend.levels())
    for flags, made in ((V4, names), (V3, names[:1]), ("", every), (V3, names[:1])):
        processor(monkeypatch, folder, flags)
        assert build_backend.try_build(build_backend.own_levels()) is None
        assert sorted(file.name for file in build_backend.built()) == made
    processor(monkeypatch, folder, V4)
    assert native.chosen_level() == "v3"
    assert build_backend.try_build() is None
    assert native.chosen_level() == "v4"


REFUSED = "STREE_JAX_NATIVE must be one of "


@pytest.mark.parametrize(
    ("machine", "flags", "wanted", "found"),
    [
        *(("x86_64", *row) for row in ((V4, "", "v4"), (V4, "v3", "v3"), (V3, "", "v3"))),
        ("x86_64", V4, "off", None),
        *(("x86_64", V4, *row) for row in (("OFF", None), ("V3", "v3"))),
        ("AMD64", V4, "", "v4"),
        ("x86_64", f"{V3} avx_vnni", "", "v3vnni"),
        *(("x86_64", f"{V4} avx512_vnni", *row) for row in (("", "v4vnni"), ("v4", "v4"))),
        *((machine, None, "", "neon") for machine in ("aarch64", "arm64")),  # it needs no flags
        *(("aarch64", *row) for row in ((DOTPROD, "", "dotprod"), (DOTPROD, "neon", "neon"))),
        ("aarch64", "", "dotprod", "STREE_JAX_NATIVE=dotprod: this processor has no asimddp"),
        ("x86_64", "avx2 fma", "", "this processor has no abm, bmi1, bmi2, f16c, movbe"),
        ("x86_64", None, "", "this processor has no abm, avx2, bmi1, bmi2, f16c, fma, movbe"),
        ("riscv64", None, "", "there is no native code for this processor"),
        ("x86_64", V4, "v5", f"{REFUSED}('off', 'v3', 'v3vnni', 'v4', 'v4vnni'), got 'v5'"),
        ("x86_64", V4, "neon", REFUSED),
        ("x86_64", V3, "v4", "STREE_JAX_NATIVE=v4: this processor has no avx512bw, avx512cd, "),
        ("x86_64", "avx2", "v3", "STREE_JAX_NATIVE=v3: this processor has no abm, bmi1, "),
        ("riscv64", None, "v3", f"{REFUSED}('off',), got 'v3'"),
    ],
)
def test_which_instructions_run(machine, flags, wanted, found, folder, monkeypatch):
    """The processor's best or those that were chosen; the reason why none; or a refusal."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    processor(monkeypatch, folder, flags, wanted)
    if found is None or found.startswith(("this", "there")):
        assert obstacle() == (found or "STREE_JAX_NATIVE=off")
    elif found.startswith("STREE_JAX"):
        refusal(re.escape(found), obstacle)
    else:
        assert native.chosen_level() == found
        assert found in native.NAMES


def test_a_wrong_choice_is_refused_at_the_call(folder, monkeypatch):
    """Not at the first step, after a text's beginning was shown."""
    with jax.default_device(jax.devices("cpu")[0]):
        model = tiny_model()
        processor(monkeypatch, folder, V4, "v9")
        refusal(REFUSED, st.stream, model, [[1]])


def test_damaged_libraries_are_refused(folder):
    file = build_backend.library("v4")
    file.write_text("damaged")
    assert "the native library cannot be loaded" in obstacle()
    made(file, "int other;")
    assert "undefined symbol: stree_jax_sources" in obstacle()
    whole = file.read_bytes()
    for size in (0, 64, len(whole) - 1):
        file.unlink()  # this process has loaded it
        file.write_bytes(whole[:size])
        assert "the native library cannot be loaded" in obstacle(), size


def test_a_library_of_other_sources_is_refused(folder):
    made(build_backend.library("v4"), 'const char* const stree_jax_sources = "of others";')
    assert obstacle().startswith("the native library is older than its sources: `pip install .` b")


def test_another_version_of_xlas_interface_is_a_reason(folder, monkeypatch):
    def refuse(*arguments, **options):
        raise RuntimeError("the API version (0.9) is incompatible")

    code = 'const char* const stree_jax_sources = "of the sources"; int stree_jax_matmul;'
    made(build_backend.library("v4"), code)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    assert obstacle() == (
        f"jax {jax.__version__} refuses the native library: the API version (0.9) is incompatible"
    )
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *arguments, **options: None)
    assert obstacle() is None
    assert native.level() == "v4"


def test_the_digest_knows_sources_headers_and_flags(tmp_path, monkeypatch):
    monkeypatch.setattr(build_backend, "HERE", tmp_path / "native")
    (tmp_path / "native").mkdir()
    digests = {build_backend.digest()}
    assert digests == {""}  # a wheel has no sources
    for name in ("native/library.cc", "native/vectors.h"):
        (tmp_path / name).write_text("int x;")
        digests.add(build_backend.digest())
        (tmp_path / name).write_text("int y;")
        digests.add(build_backend.digest())
    monkeypatch.setattr(build_backend, "FLAGS", ("-O2",))
    digests.add(build_backend.digest())
    assert len(digests) == 6


def test_the_compiler_is_the_named_one_or_one_that_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "ccache 'my g++'")
    assert build_backend.compiler() == ["ccache", "my g++"]
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    ziglang = [sys.executable, "-m", "ziglang", "c++"]
    monkeypatch.setattr(build_backend, "find_spec", lambda name: name == "ziglang")
    assert build_backend.compiler() == ziglang
    monkeypatch.setattr(build_backend, "find_spec", lambda name: None)
    assert build_backend.compiler() is None
    assert build_backend.requirements() == ["ziglang>=0.13"]
    for name in ("c++", "g++"):
        (tmp_path / name).touch(0o755)
        assert build_backend.compiler() == [str(tmp_path / name)]
    assert build_backend.requirements() == []


def test_builds_that_fail_leave_the_reason(folder, monkeypatch):
    """And no library, which would run in the place of what failed."""
    old, compiler = build_backend.library("v3"), folder / "c++"

    def reason():
        old.touch()
        found = build_backend.try_build()
        assert build_backend.failure().read_text() == f"{found}\n"
        assert build_backend.built() == [build_backend.failure()]
        return found

    def reason_of(script):
        compiler.write_text(f"#!/bin/sh\n{script}\nexit 3\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        return reason()

    monkeypatch.setattr(build_backend, "sources", lambda: [ROOT / "native.cc"])
    build = build_backend.build
    monkeypatch.setattr(build_backend, "build", lambda **chosen: build(folder, **chosen))
    said = "echo 'In file included from x:' >&2; echo 'x.h:1: error: y' >&2"
    assert reason_of(said) == f"{folder}/c++ failed: x.h:1: error: y"
    assert reason_of("echo killed >&2") == f"{folder}/c++ failed: killed"
    assert reason_of("") == f"{folder}/c++ failed: exit status 3"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "No such file or directory: 'no-such-compiler'" in reason()
    monkeypatch.setattr(build_backend, "compiler", lambda target: None)
    assert reason() == "there is no C++ compiler, nor the package ziglang"
    monkeypatch.setattr(build_backend, "compiler", lambda target: ["c++"])
    monkeypatch.setattr(build_backend, "find_spec", lambda name: None)
    assert reason() == "jaxlib, whose headers it needs, is not installed"
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert reason() == f"it is not for {sys.platform} on riscv64"
    assert not list(folder.glob("build-*"))


@needs_sources
def test_the_headers_are_of_the_oldest_jax_that_is_supported():
    """XLA refuses what was built with newer headers than its own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (oldest,) = (d[5:] for d in project["project"]["dependencies"] if d.startswith("jax>="))
    headers = [d for d in project["build-system"]["requires"] if d.startswith("jaxlib")]
    assert [d.partition(";")[0] for d in headers] == [f"jaxlib=={oldest}", f"jaxlib>={oldest}"]


@pytest.mark.slow
@needs_sources
def test_an_install_whose_compiler_fails_warns(tmp_path):
    """And builds a wheel, without pip and its network."""
    pytest.importorskip("setuptools", minversion="77")
    clone, wheels = tmp_path / "clone", tmp_path / "wheels"
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "*.so", "failure.txt", "*.run")
    shutil.copytree(ROOT, clone, ignore=ignored)
    code = "import build_backend as b, sys; b.build_wheel(sys.argv[1])"
    path = str(clone / "pallas_kernels/native")
    environment = os.environ | {"PYTHONPATH": path, "CXX": "/bin/false"}
    options = dict(cwd=clone, env=environment, capture_output=True, text=True, check=True)
    said = subprocess.run([sys.executable, "-c", code, str(wheels)], **options).stderr
    (wheel,) = wheels.iterdir()
    assert re.search("-py3-none-(?!any)", wheel.name)  # for a platform and any Python
    with zipfile.ZipFile(wheel) as opened:
        names = {Path(name).name for name in opened.namelist()}
    assert "failure.txt" in names
    assert not [name for name in names if name.endswith((".so", ".cc"))]
    assert "is not built" in said
    assert "so XLA runs instead: /bin/false failed: exit status 1" in said


@pytest.mark.thorough
@needs_sources
@pytest.mark.skipif("v3" not in build_backend.own_levels(), reason="the rest would not run here")
def test_products_of_vnni_are_right(tmp_path):
    """Its code, with its one instruction written in C."""
    vnni = ["-D__AVXVNNI__", "-include", Path(__file__).with_name("dpbusd.h")]
    flags = [*build_backend.FLAGS, *build_backend.levels()["v3"], *vnni]
    source = build_backend.HERE.with_name("matmul") / "native.cc"  # comes before the library's
    library = [*flags, source, build_backend.library("v3")]
    chosen = "matmul and (native or int8 or 8_bits or in_order)"
    failed, counts = emulated_tests(library, tmp_path, chosen)
    assert not failed
    assert counts.keys() == {"matmul"}
