"""Dependencies point one way."""

import ast
import graphlib
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pallas_kernels
import stree_jax

# What `import package` must not load, in a process of its own.
FORBIDDEN = {
    "pallas_kernels": {"stree_jax", "flax", "torch", "transformers"},
    "stree_jax": {
        "torch",
        "transformers",
        "orbax",
        "typer",
        "stree_jax.cli",
        "stree_jax.convert",
        "stree_jax.testing",
        "stree_jax.training",
    },
    "stree_jax.convert": {"torch", "transformers", "stree_jax.cli", "stree_jax.training"},
    "stree_jax.cli.main": {"torch", "transformers", "stree_jax.training"},
}


def test_the_command_is_there_before_the_library():
    """Ctrl-C during the library's imports is its to handle."""
    code = "import stree_jax_command, sys; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert not {"jax", "numpy", "typer", "stree_jax"} & set(result.stdout.split())


@pytest.mark.parametrize("package", FORBIDDEN)
def test_importing_loads_nothing_it_should_not(package):
    code = f"import {package}, sys; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert not FORBIDDEN[package] & set(result.stdout.split())


# Packages from the bottom up: each may import itself and those before it.
LAYERS = [
    "checkout",
    "messages",
    "array_types",
    "directories",
    "checks",
    "layer_config",
    "presets",
    "config",
    "partition",
    "tree",
    "models",
    "sharding",
    "stored",
    "processes",
    "checkpoint",
    "medusa_checkpoint",
    "convert",
    "pretrained",
    "decoding",
    "testing",
    "serving",
    "reasoning",
    "tuning",
    "training",
    "cli",
]


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_import_only_what_is_below_them(layer):
    root = Path(stree_jax.__file__).parent
    files = (
        [root / f"{layer}.py"] if (root / f"{layer}.py").is_file() else (root / layer).rglob("*.py")
    )
    above = LAYERS[LAYERS.index(layer) + 1 :]
    for file in files:
        for module in imported(file):
            parts = module.split(".")
            if parts[0] == "stree_jax" and len(parts) > 1:
                assert parts[1] not in above, f"{file} imports {module}"


def imported(file):
    """Modules that a file imports, also inside functions, and the names taken from them."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", [pallas_kernels, stree_jax])
def test_no_modules_import_each_other(package):
    """Not even inside functions."""
    root = Path(package.__file__).parent
    modules = {
        ".".join((package.__name__, *file.relative_to(root).with_suffix("").parts)): file
        for file in root.rglob("*.py")
    }
    modules = {name.removesuffix(".__init__"): file for name, file in modules.items()}
    graph = {name: modules.keys() & {*imported(file)} - {name} for name, file in modules.items()}
    for needed in graph.values():  # `from package import module` needs the module alone
        needed -= {other.rpartition(".")[0] for other in needed}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_one_module_owns_the_triton_import():
    root = Path(pallas_kernels.__file__).parent
    importers = {
        file.name
        for file in root.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom)
        and node.module == "jax.experimental.pallas"
        and any(alias.name == "triton" for alias in node.names)
    }
    assert importers == {"triton.py"}


def test_the_public_names_exist():
    assert all(hasattr(stree_jax, name) for name in stree_jax.__all__)


@pytest.mark.parametrize("package", [pallas_kernels, stree_jax])
def test_every_package_ships(package):
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    found = {
        module.name
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
        if module.ispkg
    }
    assert found <= set(project["tool"]["setuptools"]["packages"])
