"""Builds the native library.

Installing the package builds it; in a checkout so does

    python pallas_kernels/native/build_backend.py

A wheel has every set of instructions of its architecture; the clone, by that command or an editable
install, those that this processor runs.

It is C++17 without Python's ABI, one file for each set of vector instructions, and needs jaxlib's
headers and any compiler. Where none is on the PATH, the package `ziglang` brings one.

This module is the build backend of `pyproject.toml`: setuptools' own, which asks for ziglang too.
`setup.py` has the commands of setuptools that call `try_build`.
"""

import functools
import hashlib
import itertools
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
# What the compiler must know of each set of instructions; the best is the last.
LEVELS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "v3": ("-march=x86-64-v3",),
        "v3vnni": ("-march=x86-64-v3", "-mavxvnni"),
        "v4": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
        "v4vnni": ("-march=x86-64-v4", "-mprefer-vector-width=512", "-mavx512vnni"),
    },
    "aarch64": {"neon": (), "dotprod": ("-mcpu=generic+dotprod",)},  # zig takes no such -march
}
# Levels that differ from another one in products of 8 bits alone.
PRODUCTS = {"v3vnni": "v3", "v4vnni": "v4", "dotprod": "neon"}
# What wheels are for, in their names and for ziglang, which compiles them on any machine.
TARGETS = {
    "manylinux_2_28_x86_64": "x86_64-linux-gnu.2.28",
    "manylinux_2_28_aarch64": "aarch64-linux-gnu.2.28",
    "macosx_11_0_arm64": "aarch64-macos.11.0",
    "macosx_11_0_x86_64": "x86_64-macos.11.0",
}
# What a processor must have for them, as Linux lists it.
_AVX2 = {"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_NEEDED = {"v3": _AVX2, "v4": _AVX2 | _AVX512, "dotprod": {"asimddp"}}
_NEEDED |= {"v3vnni": _AVX2 | {"avx_vnni"}, "v4vnni": _NEEDED["v4"] | {"avx512_vnni"}}
CPU_INFO = Path("/proc/cpuinfo")
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden"),
    # Multiply-adds are fused where the source says so: compilers choose different ones.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)


def levels(target: str = "") -> dict[str, tuple[str, ...]]:
    """The sets of instructions of a target, or of this machine; empty: there are none."""
    name = target.partition("-")[0] or platform.machine().lower()
    return LEVELS.get({"amd64": "x86_64", "arm64": "aarch64"}.get(name, name), {})


def lacks(level: str) -> str:
    """What this processor lacks for these instructions; empty: nothing."""
    # Apple lists nothing, and all its processors with NEON have these.
    other = "Features: asimddp" if sys.platform == "darwin" else ""
    said = CPU_INFO.read_text() if CPU_INFO.is_file() else other
    flags = re.findall("^(?:flags|Features).*", said, re.MULTILINE)[:1]
    return ", ".join(sorted(_NEEDED.get(level, set()).difference(*map(str.split, flags))))


def own_levels() -> list[str]:
    """The sets of instructions that this processor runs; all where it does not say."""
    return [level for level in levels() if not lacks(level)] or list(levels())


def library(level: str, folder: Path = HERE) -> Path:
    """The file of the library for these instructions."""
    return folder / f"libstree-{level}.so"


def failure(folder: Path = HERE) -> Path:
    """The file that says why the library was not built."""
    return folder / "failure.txt"


def built(folder: Path = HERE) -> list[Path]:
    """Returns the files that a build has left: libraries, or why there are none."""
    return [*folder.glob("libstree-*.so"), *folder.glob("failure.txt")]


def sources() -> list[Path]:
    """The sources of all ops; none where the package is installed from a wheel."""
    return sorted(HERE.parent.glob("*/*.cc"))


def digest() -> str:
    """Tells a library of other sources or flags; empty where there are no sources."""
    if not sources():
        return ""
    contents = [file.read_bytes() for file in (*sources(), *sorted(HERE.parent.glob("*/*.h")))]
    return hashlib.sha256(b"\0".join([repr((LEVELS, FLAGS)).encode(), *contents])).hexdigest()


def compiler(target: str = "") -> list[str] | None:
    """The command of a C++ compiler: `CXX`, one on the PATH, or ziglang's; None: there is none."""
    if target:
        return [sys.executable, "-m", "ziglang", "c++", "-target", target]
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    for name in ("g++", "clang++", "c++"):
        if path := shutil.which(name):
            return [path]
    return [sys.executable, "-m", "ziglang", "c++"] if find_spec("ziglang") else None


def build(
    folder: Path = HERE, extra: tuple[str, ...] = (), chosen: Sequence[str] = (), target: str = ""
) -> None:
    """Compiles the library, one file for each set of instructions, and removes the others.

    A process that has loaded an older one keeps it: files are replaced, not written to. Without
    `chosen` it is all sets of this architecture, or of a target's. Raises a RuntimeError that says
    why it failed in one line, or an OSError.
    """
    command, known = compiler(target), levels(target)
    if not known or not (target or sys.platform in ("linux", "darwin")):
        raise RuntimeError(f"it is not for {sys.platform} on {platform.machine()}")
    if command is None:
        raise RuntimeError("there is no C++ compiler, nor the package ziglang")
    jaxlib = find_spec("jaxlib")
    if jaxlib is None or not jaxlib.submodule_search_locations:
        raise RuntimeError("jaxlib, whose headers it needs, is not installed")
    headers = Path(jaxlib.submodule_search_locations[0], "include")
    defined = f'-DSTREE_JAX_SOURCES="{digest()}"'
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="build-", dir=folder) as name,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        objects = Path(name).resolve()
        run = functools.partial(_run, command, objects)

        def part(level: str, source: Path) -> tuple[str, Path, str]:
            op = source.parent.name
            level = level if op == "matmul" else PRODUCTS.get(level, level)
            return level, source, f"{level}-{op}-{source.stem}.o"

        def compiled(part: tuple[str, Path, str]) -> None:
            level, source, made = part
            flags = (*FLAGS, *known[level], *extra, defined, "-isystem", str(headers), "-c")
            run(*flags, str(source), "-o", made)

        def linked(level: str) -> Path:
            made = library(level, objects)
            parts = [part(level, source)[2] for source in sources()]
            run(*FLAGS, "-shared", *extra, *parts, "-o", made.name)  # macOS's own name of it too
            return made

        chosen = chosen or list(known)
        list(pool.map(compiled, {part(*job) for job in itertools.product(chosen, sources())}))
        made = {folder / file.name: file for file in pool.map(linked, chosen)}
        for file, new in made.items():
            os.replace(new, file)
        for old in {*folder.glob("libstree-*.so")} - made.keys():
            old.unlink()


def _run(command: list[str], folder: Path, *arguments: str) -> None:
    """Runs the compiler in a folder, where ziglang's caches are unless the user has others."""
    caches = {"ZIG_GLOBAL_CACHE_DIR": str(folder), "ZIG_LOCAL_CACHE_DIR": str(folder)}
    environment = {**caches, **os.environ, "LC_ALL": "C"}
    if "ziglang" in command:
        # Its names of processors have no hyphens; its libraries have symbols for debuggers.
        arguments = (*(each.replace("x86-64-v", "x86_64_v") for each in arguments), "-s")
    run = functools.partial(subprocess.run, capture_output=True, text=True, errors="replace")
    done = run([*command, *arguments], cwd=folder, env=environment)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        errors = [line for line in said if "error" in line.lower()]
        why = (*errors, *said, f"exit status {done.returncode}")[0]
        raise RuntimeError(f"{shlex.join(command)} failed: {why.strip()[:200]}")


def try_build(chosen: Sequence[str] = ()) -> str | None:
    """Builds in place. If that fails, leaves and returns the reason, and no older library."""
    try:
        build(chosen=chosen)
    except (RuntimeError, OSError) as error:
        for old in built():
            old.unlink()
        failure().write_text(f"{error}\n")
        return str(error)
    failure().unlink(missing_ok=True)
    return None


def requirements() -> list[str]:
    """Lists the packages that a build needs beyond those of pyproject.toml."""
    return [] if compiler() else ["ziglang>=0.13"]


def __getattr__(name: str) -> object:
    """The hooks of PEP 517 and 660: setuptools' own, which only builds import, and the compiler."""
    if not name.startswith(("build_", "get_requires_", "prepare_")):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from setuptools import build_meta

    hook = getattr(build_meta, name)
    if name in ("get_requires_for_build_wheel", "get_requires_for_build_editable"):
        return lambda *settings, **options: [*hook(*settings, **options), *requirements()]
    return hook


if __name__ == "__main__":
    build(chosen=own_levels())
