"""The sandbox of chat templates: programs of strangers, which must come to an end.

The sandbox of jinja2 keeps a program from all but the values that it gets. This one also limits
what it may use up: seconds, and the sizes of the values that it makes, each alone and all together.
The limits are looked at wherever a program calls, filters, tests, compares, adds, multiplies, reads
an item, makes a list, goes round a loop or writes. Nothing can interrupt one operation of Python.
It gets copies of values within the limits, and where what it makes is a product, that is limited
before.

jinja2 is optional: import this module when it is there.
"""

import functools
import json
import re
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2.ext
import jinja2.sandbox
import jinja2.utils
import numpy as np
from jinja2 import nodes
from jinja2.visitor import NodeTransformer
from markupsafe import Markup, soft_str

from stree_jax.messages import shown

SECONDS = 5.0  # of a rendering
SOURCE = 100_000  # characters of a program
# Characters of the output, of a value, and of all values that are made on the way. The first two
# grow by the program's own and by what is given `TIMES`, the third by what is given `MADE_TIMES`.
OUTPUT, TEXT, MADE = 10_000, 100_000, 10_000_000
TIMES, MADE_TIMES = 16, 250
_MOST = 1_000_000_000  # characters of a value, whatever is given
LEVELS = 100  # of lists in lists
ITEM = 8  # characters that an item of a list counts as, beside its own
VALUES = 1_000_000
_PLAIN: dict[type, Any] = {str: str.__str__, int: int.__int__, float: float.__float__}
_BITS = 15_000  # of an integer; Python writes no more than 4,300 digits

_LISTS = (list, tuple, dict, set, frozenset, *map(type, ({}.keys(), {}.values(), {}.items())))
# Filters, and methods of texts with a dot: what they make, or their time, is a product.
_PRODUCTS = {"batch", "center", "indent", "join", "replace", "round", "slice", "tojson", "trim"}
_PRODUCTS |= {"urlize", "wordwrap", ".center", ".expandtabs", ".join", ".ljust", ".lstrip"}
_PRODUCTS |= {".replace", ".rfind", ".rindex", ".rjust", ".rpartition", ".rsplit", ".rstrip"}
_PRODUCTS |= {".strip", ".translate", ".zfill"}


class Given:
    """Makes copies of nothing but JSON's types: methods of other objects may do harm.

    Attributes:
        sizes: the size of each list and table, with all that is in it, by the `id` of its copy.
    """

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._values = 0

    def copy(self, value: Any, levels: int = LEVELS) -> Any:
        """A copy of a value.

        Raises:
            ValueError: "holds ...", what is no JSON.
        """
        if value is None or type(value) in (bool, int, float, str):
            return value
        for kind, plain in _PLAIN.items():
            if isinstance(value, kind):
                return plain(value)
        if levels == 0:
            raise ValueError(f"holds lists in lists, more than {LEVELS} deep")
        if isinstance(value, np.generic):
            return self.copy(value.item(), levels - 1)
        copy: Any
        if isinstance(value, Mapping):
            copy = {self.copy(k, 1): self.copy(v, levels - 1) for k, v in value.items()}
        elif isinstance(value, list | tuple):
            copy = [self.copy(part, levels - 1) for part in value]
            copy = copy if isinstance(value, list) else tuple(copy)
        else:
            raise ValueError(
                f"holds {shown(value)}, which is no JSON: use texts, numbers, lists and tables"
            )
        self._values += len(copy)
        if self._values > VALUES:
            raise ValueError(f"holds more than {VALUES} values")
        self.sizes[id(copy)] = sum(map(self.size, _parts_of(copy)))
        return copy

    def size(self, copy: Any) -> int:
        """The size of a copy as an item of a list."""
        return ITEM + (len(copy) if isinstance(copy, str) else self.sizes.get(id(copy), 0))


def _parts_of(value: Any) -> list[Any]:
    """The items of a list; the keys and values of a table."""
    return [*value, *value.values()] if isinstance(value, dict) else [*value]


def render(source: str, own: Mapping[str, str], values: Mapping[str, Any], given: Given) -> str:
    """Runs a program with its own variables, and with values of the user that `given` has copied.

    Raises:
        Exception: of any type, for example since the text cannot be encoded.
    """
    sandbox = _Sandbox(given.sizes, len(source), sum(map(given.size, values.values())))
    code = _compiled(source)
    template = sandbox.template_class.from_code(sandbox, code, sandbox.make_globals(None))
    pieces, length = [], 0
    for piece in template.generate({**sandbox.made(dict(own)), **values}):
        length += len(piece)
        if length > sandbox.output:
            _stop(f"writes more than {sandbox.output} characters")
        pieces.append(piece)
    text = "".join(pieces)
    text.encode()
    return text


@functools.lru_cache(maxsize=4)
def _compiled(source: str) -> types.CodeType:
    if len(source) > SOURCE:
        _stop(f"has more than {SOURCE} characters")
    sandbox = _Sandbox({}, 0, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of Python, such as about {{ (1)[0] }}
        return sandbox.compile(_Hooks().visit(sandbox.parse(source)))


class _Generation(jinja2.ext.Extension):
    """The block `generation` of transformers, around the assistant's text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Hooks(NodeTransformer):
    """Puts filters of the sandbox where jinja2 has no hooks."""

    def visit_Output(self, node: Any) -> Any:
        self.generic_visit(node)
        node.nodes = [_hook("_text", child) for child in node.nodes]
        return node

    def visit_Concat(self, node: Any) -> Any:
        return _hook("_made", self.visit_Output(node))

    def visit_For(self, node: Any) -> Any:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_hook("_look", nodes.Const(None)), lineno=node.lineno))
        return node

    def visit_List(self, node: Any) -> Any:
        self.generic_visit(node)
        is_constant = all(isinstance(item, nodes.Const) for item in node.items)
        return node if is_constant else _hook("_made", node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: Any) -> Any:
        return self.visit_List(node) if node.ctx == "load" else node

    def visit_Compare(self, node: Any) -> Any:
        self.generic_visit(node)
        is_cheap = all(isinstance(operand.expr, nodes.Const) for operand in node.ops)
        return node if is_cheap else _hook("_look", node)

    def visit_Getitem(self, node: Any) -> Any:
        self.generic_visit(node)
        return _hook("_new", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Name(self, node: Any) -> Any:
        is_made = node.ctx == "load" and node.name in ("varargs", "kwargs")
        return _hook("_made", node) if is_made else node

    def visit_AssignBlock(self, node: Any) -> Any:
        self.generic_visit(node)
        node.filter = _hook("_made", node.filter)
        return node

    visit_FilterBlock = visit_AssignBlock


def _hook(name: str, node: Any) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno if node else 0)


class _Namespace(jinja2.utils.Namespace):
    """Refuses names with an underscore, as transformers does."""

    def __init__(self, /, *args: Any, **attributes: Any) -> None:
        attributes = dict(*args, **attributes)
        super().__init__({_public(name): value for name, value in attributes.items()})

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(_public(name), value)

    def __repr__(self) -> str:  # what is in it has any size
        return "<Namespace>"


def _public(name: Any) -> Any:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.sandbox.SecurityError(f"a namespace has no attribute {shown(name)}")
    return name


class _Dict:
    """The function `dict`. The type itself has methods that change a dict."""

    def __call__(self, *args: Any, **items: Any) -> dict:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict:
        return dict.fromkeys(*args)


class _Formatter(jinja2.sandbox.SandboxedEscapeFormatter):
    """`str.format` within the limits."""

    def format_field(self, value: Any, format_spec: str) -> str:
        sandbox: Any = self._env
        sandbox.fits(_widths(format_spec))
        return sandbox.made(super().format_field(value, format_spec))


def _widths(form: str) -> int:
    """The sum of the numbers in a format; widths and precisions are among them."""
    return sum(map(int, re.findall(r"\d+", form)))


def _numbers(values: Any) -> int:
    return sum(abs(value) for value in values if isinstance(value, int))


def raise_exception(message: Any) -> None:
    """A function of templates: refuses the messages."""
    raise jinja2.TemplateError(message)


def _stop(why: str) -> NoReturn:
    raise jinja2.TemplateRuntimeError(f"it {why}; pass a text instead")


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """One rendering.

    Args:
        sizes: of the lists and tables that are given.
        program: characters of the program.
        given: size of all that is given.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, sizes: Mapping[int, int], program: int, given: int) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants would be made where no hook is
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        self._end = time.monotonic() + SECONDS
        self._sizes = sizes
        self._most = min(TEXT + program + TIMES * given, _MOST)
        self.output = self._most - TEXT + OUTPUT
        self._made = self._left = MADE + MADE_TIMES * given
        self.globals |= {
            "cycler": lambda *items: jinja2.utils.Cycler(*self.made(items)),
            "dict": _Dict(),
            "lipsum": self._lipsum,
            "namespace": _Namespace,
            "raise_exception": raise_exception,
            "strftime_now": self._strftime_now,
        }
        self.filters |= {"format": self._format, "tojson": self._to_json}
        for name, function in self.filters.items():
            self.filters[name] = self._limited(name, function, self.made)
        for name, function in self.tests.items():
            self.tests[name] = self._limited(name, function, self._look)
        self.filters |= {"_text": self._text, "_made": self.made}
        self.filters |= {"_new": self._new, "_look": self._look}

    def fits(self, size: int) -> None:
        """Refuses a value of so many characters."""
        if size > self._most:
            _stop(f"makes a text or a list of more than {self._most} characters")

    def made(self, value: Any) -> Any:
        """Lets a value that the program has made pass, if it is within the limits."""
        if isinstance(value, types.GeneratorType):
            return self._each(value)
        self.fits(len(value) if isinstance(value, str) else self._size(value))
        return self._new(value)

    def _look(self, value: Any = None) -> Any:
        """Lets a value pass, if there is time."""
        if time.monotonic() > self._end:
            _stop(f"runs for more than {SECONDS:g} seconds")
        return value

    def _new(self, value: Any) -> Any:
        """Lets a value pass that is within the limits, since it is part of another one."""
        self._look()
        if isinstance(value, str):
            self._left -= len(value)
        elif isinstance(value, _LISTS):
            self._left -= ITEM * len(value)  # type: ignore[arg-type]
        if self._left < 0:
            _stop(f"makes more than {self._made} characters on its way")
        return value

    def _each(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self._left -= ITEM
            self._look()
            yield value

    @jinja2.pass_context  # or constants would be written where no hook is
    def _text(self, context: Any, value: Any) -> str:
        """A piece of output, or of a text that is put together."""
        if not isinstance(value, str):
            self.fits(self._size(value))
            value = str(value)
        return self._new(value)

    def _size(self, value: Any) -> int:
        """The characters of a value. A list that is twice in another counts twice."""
        size, level = 0, [value]
        for _ in range(LEVELS):
            inner: list[Any] = []
            for part in level:
                if isinstance(part, str):
                    size += len(part)
                elif isinstance(part, _LISTS) and id(part) in self._sizes:
                    size += self._sizes[id(part)]
                elif isinstance(part, _LISTS):
                    parts = _parts_of(part)
                    size += ITEM * len(parts)
                    self.fits(size)
                    inner += parts
                elif isinstance(part, int):
                    _check_bits(part.bit_length())
            if not inner:
                return size
            level = inner
        _stop(f"makes lists in lists, more than {LEVELS} deep")

    def _limited(self, name: str, function: Any, limit: Callable[[Any], Any]) -> Any:
        """A filter or a test, of which `limit` lets the results pass."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def limited(*args: Any, **options: Any) -> Any:
            if name in _PRODUCTS:
                args = (*args[:first], *self._checked(name, args[first:], options))
            return limit(function(*args, **options))

        return limited

    def _checked(self, name: str, args: tuple, options: Mapping[str, Any]) -> tuple:
        """The arguments of an operation in `_PRODUCTS`, if the product is within the limits."""
        args = tuple(self.made([*a]) if isinstance(a, Iterator | range) else a for a in args)
        first, *others = [*args, *options.values()]
        size, numbers = self._size(first), _numbers(others)
        if size * sum(map(self._size, others)) + (1000 + size) * numbers > self._made:
            _stop(f"may make more than {self._made} characters with {name.strip('.')}")
        return args

    def call(self, context: Any, function: Any, /, *args: Any, **options: Any) -> Any:
        """Calls a function, a method or a macro."""
        self._look()  # a macro may call for ever
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str) and (name := f".{function.__name__}") in _PRODUCTS:
            args = self._checked(name, (owner, *args), options)[1:]
        return self.made(super().call(context, function, *args, **options))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Computes with `intercepted_binops`."""
        if operator == "*" and isinstance(left, int):
            left, right = right, left
        if operator == "%" and isinstance(left, str):
            self._check_form(left, right)
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            power = right if operator == "**" else 1
            _check_bits((left.bit_length() - 1) * power)  # at least
        elif operator == "*" and isinstance(left, str | list | tuple) and isinstance(right, int):
            self.fits(len(left) * right)
        return self.made(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Reads an item."""
        self._look()
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a program may read an attribute; it gets no bytes, which have methods too."""
        makes_bytes = isinstance(obj, str | int) and attr in ("encode", "to_bytes")
        return not makes_bytes and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` and `format_map` with limits; None: it is another function."""
        if super().wrap_str_format(value) is None:
            return None
        text = value.__self__
        escape = text.escape if isinstance(text, Markup) else str
        formatter = _Formatter(self, escape=escape)

        def form(*args: Any, **fields: Any) -> str:
            if value.__name__ == "format_map":
                (fields,), args = args, ()
            return type(text)(formatter.vformat(text, args, fields))

        return form

    def _format(self, form: Any, *args: Any, **fields: Any) -> str:
        self._check_form(soft_str(form), fields or args)
        return jinja2.filters.do_format(form, *args, **fields)

    def _check_form(self, form: str, values: Any) -> None:
        """Refuses `form % values` if it may be too long."""
        widths = _widths(form)
        if re.search(r"%[^%a-zA-Z]*\*", form):
            widths += _numbers(values if isinstance(values, tuple) else (values,))
        self.fits(len(form) + form.count("%") * self._size(values) + widths)

    def _lipsum(self, n: Any = 5, html: Any = True, min: Any = 20, max: Any = 100) -> str:
        self.fits(12 * int(n) * int(max))  # 12 characters a word
        return jinja2.utils.generate_lorem_ipsum(n, html, min, max)

    def _strftime_now(self, form: Any) -> str:
        self.fits(256 * len(form))  # what Python has room for
        return datetime.now().strftime(form)

    def _to_json(
        self,
        value: Any,
        ensure_ascii: Any = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: Any = False,
    ) -> str:
        """The filter `tojson`, with the arguments of transformers."""
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return "".join(map(self._new, encoder.iterencode(value)))


def _check_bits(bits: int) -> None:
    if bits > _BITS:
        _stop(f"makes a number of more than {_BITS} bits")
