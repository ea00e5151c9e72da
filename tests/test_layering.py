"""Dependencies point one way."""

import ast
import graphlib
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import pallas_kernels
import stree_jax

# What an import must not load. Ctrl-C during the library's imports is the command's to handle.
FORBIDDEN = {
    "stree_jax_command": "jax numpy typer stree_jax",
    "pallas_kernels": "stree_jax flax torch transformers",
    "stree_jax": "torch transformers orbax typer stree_jax.cli stree_jax.convert"
    " stree_jax.extensions stree_jax.testing stree_jax.training",
    "stree_jax.convert": "torch transformers stree_jax.cli stree_jax.training",
    "stree_jax.cli.main": "torch transformers stree_jax.extensions stree_jax.training",
    "stree_jax.extensions.medusa": "stree_jax.training stree_jax.extensions.reasoning",
    "stree_jax.extensions.mtp": "stree_jax.training stree_jax.extensions.reasoning",
    "stree_jax.extensions.eagle3": "stree_jax.training stree_jax.extensions.mtp.training",
    "stree_jax.extensions.dflash": "stree_jax.training stree_jax.extensions.dflash.training",
}


def test_importing_loads_nothing_it_should_not():
    """One after the other in one process: each may have what those before it have loaded."""
    code = "import sys\n" + "".join(f"import {name}; print(*sys.modules)\n" for name in FORBIDDEN)
    printed = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    for (package, forbidden), loaded in zip(FORBIDDEN.items(), printed, strict=True):
        assert not {*forbidden.split()} & {*loaded.split()}, package


# Packages from the bottom up: each may import itself and those before it.
LAYERS = str.split("""
    checkout messages array_types checks names mesh tree models checkpoint special_tokens
    compilation_cache heads convert pretrained decoding chat text testing serving measuring tuning
    training extensions loading lm_eval cli
""")


def test_layers_import_only_what_is_below_them():
    root = Path(stree_jax.__file__).parent
    for number, layer in enumerate(LAYERS):
        for file in filter(Path.is_file, (root / f"{layer}.py", *(root / layer).rglob("*.py"))):
            for module in imported(file):
                parts = [*module.split("."), ""]
                above = parts[0] == "stree_jax" and parts[1] in LAYERS[number + 1 :]
                assert not above, f"{file} imports {module}"


def imported(file):
    """Modules that a file imports, also inside functions, and the names taken from them."""
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def nodes(file):
    """The syntax tree of a file, without what only type checkers see."""
    waiting = [ast.parse(file.read_text())]
    while waiting:
        node = waiting.pop()
        yield node
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            children = node.orelse
        waiting += children


# Modules, beside packages, whose `__all__` is for extensions.
PUBLIC_MODULES = {
    f"stree_jax.{name}" for name in ("array_types", "checkpoint", "checks", "heads", "messages")
}


OURS = ("stree_jax", "pallas_kernels")


def test_extensions_use_public_names_only():
    for file in (Path(stree_jax.__file__).parent / "extensions").glob("*/*.py"):
        own = f"stree_jax.extensions.{file.parent.name}"
        for node in nodes(file):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                is_own = ast.unparse(node.value) in ("self", "cls", "super()")
                is_of_python = node.attr.endswith("__") or node.attr in ("_asdict", "_replace")
                assert is_own or is_of_python, (file, node.attr)
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith(OURS) for alias in node.names), file
            if isinstance(node, ast.ImportFrom) and node.module.startswith(OURS):
                for alias in node.names:
                    found = file, node.module, alias.name
                    assert is_public(node.module, alias.name, own), found


def is_public(module, name, own):
    """True for names of the room, and for those in the `__all__` of a package of the library."""
    if module.startswith(own):
        return not name.startswith("_")
    found = importlib.import_module(module)
    is_for_extensions = module in PUBLIC_MODULES or hasattr(found, "__path__")
    return is_for_extensions and name in getattr(found, "__all__", ())


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
    files = Path(pallas_kernels.__file__).parent.rglob("*.py")
    importers = [file.name for file in files if "jax.experimental.pallas.triton" in imported(file)]
    assert importers == ["triton.py"]


def test_the_public_names_exist():
    assert all(hasattr(stree_jax, name) for name in stree_jax.__all__)
    with pytest.raises(AttributeError, match="module 'stree_jax' has no attribute 'Medusa'"):
        _ = stree_jax.Medusa
    assert [name for name in dir(stree_jax) if name[:2] != "__"] == sorted(stree_jax.__all__)


def test_test_modules_import_no_test_modules():
    """Shared parts are in `stree_jax.testing`, tests/helpers.py and separate modules."""
    for file in Path(__file__).parent.rglob("*.py"):
        for module in imported(file):
            parts = module.split(".")
            assert parts[0] != "tests" or not any(p.startswith("test_") for p in parts), file
