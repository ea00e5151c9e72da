"""The site: Sphinx, MyST and sphinx-book-theme; `make docs` builds it, and warnings are errors.

The pages are Markdown that reads well without the site, too. The API reference is made of the
docstrings, which are written for a terminal; what Sphinx needs beyond that is done here:

    an indented block after a colon     is literal, not a quotation
    `name`                              links to an object of that name, if there is one
    fields of a NamedTuple              have their shape and comment from the source
    classes with a metaclass            have the arguments of their `__init__`
    `.. heads`                          is the names of all kinds of heads
"""

import inspect
import re
import subprocess
import textwrap
from pathlib import Path
from typing import Any

from flax import nnx
from sphinx.util.inspect import stringify_signature

import stree_jax
from stree_jax.heads import HEADS

project = "stree-jax"
author = ""
release = version = stree_jax.__version__


def _repository() -> str:
    """The address that this clone is from, if a browser can open it."""
    command = ["git", "config", "--get", "remote.origin.url"]
    address = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    url = re.sub(r"^git@([^:]+):", r"https://\1/", address.stdout.strip()).removesuffix(".git")
    return url if re.match("https?://", url) else ""


repository = _repository()

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_design",
]
myst_heading_anchors = 4
highlight_language = "text"

html_theme = "sphinx_book_theme"
html_title = f"stree-jax {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "repository_url": repository,
    "use_repository_button": bool(repository),
    # Else the theme makes a second search field, and its scripts bind the menu's buttons to it.
    "navbar_persistent": [],
}

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 76
default_role = "py:obj"

# Several arguments are documented together, which only a plain list of names can show.
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]

# -n reports every name without a target. What is another project's, or no name, has none here.
nitpick_ignore_regex = [
    ("py:obj", "(?s).*"),
    ("py:class", r"(?!stree_jax|pallas_kernels).*"),
    ("py:class", r"stree_jax\.(array_types|mesh|models)\..*"),
    ("py:class", r"stree_jax\.(tree\.(KnownNodes|LevelNodes)|measuring\.clock\.Quartiles)"),
    ("py:class", r"stree_jax\.decoding\.(types|loop|options|plan|draft_model|prefix\.prefix)\..*"),
    ("py:class", r"stree_jax\.(convert\.(fields|rules)|checkpoint|testing\.models)\..*"),
]


def _without_signature(function: Any) -> inspect.Signature:
    """Takes the signature from a function and from the functions that it wraps."""
    signature = inspect.signature(function)
    while function is not None:
        vars(function).pop("__signature__", None)
        function = getattr(function, "__wrapped__", None)
    return signature


# Sphinx looks for defaults in the source, where these have `**keywords`.
_SPELLED_OUT = {
    function: _without_signature(function)
    for function in (stree_jax.generate, stree_jax.stream, stree_jax.complete)
}


def _literal_blocks(lines: list[str]) -> list[str]:
    """An indented block after a line that ends in a colon becomes a literal block."""
    found = list(lines)
    for i, line in enumerate(lines[:-2]):
        indent = len(line) - len(line.lstrip())
        below = lines[i + 2]
        is_block = not lines[i + 1].strip() and below.strip()
        deeper = len(below) - len(below.lstrip()) >= indent + 4
        if is_block and deeper and not line.rstrip().endswith("::"):
            if line.rstrip().endswith(":"):
                found[i] = line.rstrip() + ":"
            elif line.strip():
                found[i + 1] = f"\n{' ' * indent}::\n"
    return "\n".join(found).split("\n")


def _fields(cls: type) -> list[str]:
    """Fields of a NamedTuple with their annotation and comment, as a section of a docstring."""
    source = textwrap.dedent(inspect.getsource(cls))
    rows = re.findall(r"^    (\w+): (.+?)(?:  # (.*))?$", source, re.MULTILINE)
    named = [row for row in rows if row[0] in cls._fields]  # type: ignore[attr-defined]
    lines = [f"    {name}: ``{kind}``{', ' if what else ''}{what}" for name, kind, what in named]
    return ["", "Attributes:", *lines, ""]


def _docstring(app: Any, kind: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = _literal_blocks(lines)
    if kind == "class" and hasattr(thing, "_fields") and "Attributes:" not in lines:
        lines += _fields(thing)


def _signature(
    app: Any, kind: str, name: str, thing: Any, options: Any, signature: str, returns: str
) -> tuple[str | None, str | None]:
    """Arguments of modules, whose metaclass hides them, and options; short names of types."""
    if kind == "class" and issubclass(thing, nnx.Module):
        all_of_it = inspect.signature(thing.__init__)
        arguments = [*all_of_it.parameters.values()][1:]
        signature = stringify_signature(inspect.Signature(arguments), unqualified_typehints=True)
    elif kind == "function" and thing in _SPELLED_OUT:
        own = _SPELLED_OUT[thing].replace(return_annotation=inspect.Signature.empty)
        signature = stringify_signature(own, unqualified_typehints=True)
    elif kind == "class" and getattr(thing, "_is_protocol", False):
        signature = ""

    def short(text: str | None) -> str | None:
        text = text and text.replace("jaxlib._jax.Array", "Array").replace("<factory>", "...")
        return text and re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)

    return short(signature), short(returns)


def _skip(app: Any, kind: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Fields of a NamedTuple stand in the text of their class."""
    return True if type(thing).__name__ == "_tuplegetter" else None


def _heads(app: Any, page: str, source: list[str]) -> None:
    """The names of all kinds of heads stand where a page has `.. heads`."""
    names = sorted(name for room in HEADS.values() for name in room.names)
    kinds = ("autoclass" if name[0].isupper() else "autofunction" for name in names)
    entries = (f".. {kind}:: {name}" for kind, name in zip(kinds, names, strict=True))
    source[0] = source[0].replace(".. heads\n", "\n".join(entries) + "\n")


def setup(app: Any) -> None:
    """Before napoleon, which reads the sections of docstrings."""
    app.connect("source-read", _heads)
    app.connect("autodoc-process-docstring", _docstring, priority=400)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-skip-member", _skip)
