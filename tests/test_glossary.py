"""Every letter in a shape is in the glossary, and means one thing."""

import ast
import re
from pathlib import Path

import pallas_kernels
from stree_jax import array_types

LETTERS = re.findall(r"^    ([A-Z]+) {2,}\S", array_types.__doc__, re.MULTILINE)
PACKAGES = [Path(pallas_kernels.__file__).parent, Path(array_types.__file__).parent]


def annotated_shapes(source):
    """The strings in `Float[Array, "..."]` and its like."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
            first, *rest = node.slice.elts
            is_array = ast.unparse(first).rpartition(".")[2] in ("Array", "ndarray")
            if is_array and len(rest) == 1 and isinstance(getattr(rest[0], "value", None), str):
                yield rest[0].value


def unknown_axes(source):
    """Axis names that are neither in the glossary nor a word."""
    for shape in annotated_shapes(source):
        for axis in shape.split():
            name = axis.lstrip("*#")
            known = name in LETTERS or name in ("...", "_") or name.isdigit()
            if not known and not re.fullmatch(r"[a-z][a-z_]+", name):
                yield f'{axis!r} in "{shape}"'
    for shape in re.findall(r"`\[([A-Z][^\]`]*)\]`", source):  # in docstrings and comments
        for name in re.findall(r"\b[A-Za-z_]+\b", shape):
            if name not in LETTERS and not re.fullmatch(r"[a-z][a-z_]+", name):
                yield f"{name!r} in `[{shape}]`"


def test_every_letter_is_in_the_glossary():
    assert len(LETTERS) == len(set(LETTERS)) > 20
    wrong = 'def f(x: Float[Array, "B *rows z"]) -> Float[Array, "experts _ 1 ..."]: "`[B, k]`"'
    assert list(unknown_axes(wrong)) == ["'z' in \"B *rows z\"", "'k' in `[B, k]`"]
    for file in (file for package in PACKAGES for file in package.rglob("*.py")):
        assert not list(unknown_axes(file.read_text())), file
