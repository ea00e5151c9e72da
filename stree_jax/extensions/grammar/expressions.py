"""Regular expressions of two dialects, as expressions over characters.

`regex` has the syntax of Rust's crate regex, JSON schemas that of ECMA-262 with the flag u, as far
as a finite automaton can follow: no look-around, references and word boundaries.
"""

import dataclasses
import functools
import re
import unicodedata
from collections.abc import Iterable
from typing import NamedTuple, NoReturn, TypeAlias

from stree_jax.messages import shown

# Characters as ranges of code points, first and last, in ascending order.
Ranges: TypeAlias = tuple[tuple[int, int], ...]

LAST = 0x10FFFF
EVERY: Ranges = ((0, 0xD7FF), (0xE000, LAST))  # surrogates are no characters
MOST_REPEATS = 10_000


@dataclasses.dataclass(frozen=True)
class Characters:
    """One character of a set."""

    ranges: Ranges


@dataclasses.dataclass(frozen=True)
class Sequence_:
    """Parts one after the other."""

    parts: tuple["Expression", ...]


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of several parts; of none, nothing matches."""

    parts: tuple["Expression", ...]


@dataclasses.dataclass(frozen=True)
class Repeat:
    """A part several times; `most` None: without limit."""

    part: "Expression"
    least: int
    most: int | None


@dataclasses.dataclass(frozen=True)
class Edge:
    """The start or the end of the text."""

    is_start: bool


Expression: TypeAlias = Characters | Sequence_ | Choice | Repeat | Edge
ANY_TEXT = Repeat(Characters(EVERY), 0, None)


def literal(text: str) -> Expression:
    """The expression of a text."""
    return Sequence_(tuple(Characters(((ord(each), ord(each)),)) for each in text))


def ranges_of(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges in any order, which may overlap, without surrogates."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        for start, end in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high)):
            if start > end:
                continue
            if found and start <= found[-1][1] + 1:
                found[-1] = found[-1][0], max(end, found[-1][1])
            else:
                found.append((start, end))
    return tuple(found)


def inverted(ranges: Ranges) -> Ranges:
    """All other characters."""
    ends = [-1, *(high for _, high in ranges)], [*(low for low, _ in ranges), LAST + 1]
    return ranges_of((low + 1, high - 1) for low, high in zip(*ends, strict=True) if low + 1 < high)


class Dialect(NamedTuple):
    r"""What the two syntaxes have otherwise.

    Attributes:
        is_ecma: whether it is that of ECMA-262.
        newlines: the characters that `.` leaves out.
        spaces: the characters of `\s`.
    """

    is_ecma: bool
    newlines: str
    spaces: str


_SPACES = "\t\n\v\f\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
RUST = Dialect(is_ecma=False, newlines="\n", spaces=_SPACES + "\x85")
ECMA = Dialect(is_ecma=True, newlines="\n\r\u2028\u2029", spaces=_SPACES + "\ufeff")
_NOT_FINITE = "look-around, references and word boundaries are not supported"
_HEX = "[0-9a-fA-F]"
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}


def parse(pattern: str, dialect: Dialect) -> Expression:
    """The expression of a pattern.

    Raises:
        ValueError: it is malformed, or not supported; the message says where and why.
    """
    parser = _Parser(pattern, dialect)
    found = parser.choice()
    if parser.at < len(pattern):
        parser.refuse("unbalanced parenthesis")
    return found


def without_anchors(pattern: str) -> str:
    """The pattern without a ^ at its start and a $ at its end: it matches whole texts anyway."""
    pattern = pattern.removeprefix("^")
    is_anchor = pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2
    return pattern[:-1] if is_anchor else pattern


def has_anchors(expression: Expression) -> bool:
    """Whether an expression has the start or the end of the text in it."""
    match expression:
        case Sequence_(parts) | Choice(parts):
            return any(map(has_anchors, parts))
        case Repeat(part, _, _):
            return has_anchors(part)
    return isinstance(expression, Edge)


def _of(characters: str) -> Ranges:
    return ranges_of((ord(each), ord(each)) for each in characters)


class _Parser:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str, dialect: Dialect):
        self.text, self.dialect, self.at = pattern, dialect, 0
        self.ignores_case = self.dot_is_all = False

    def refuse(self, why: str) -> NoReturn:
        """Raises the error of a pattern."""
        raise ValueError(
            f"pattern {shown(self.text)} cannot be used: {why} at position {self.at}"
        ) from None

    def take(self, *options: str) -> str:
        """The option that comes next, which is passed; empty if none does."""
        for option in options:
            if self.text.startswith(option, self.at):
                self.at += len(option)
                return option
        return ""

    def one(self, missing: str) -> str:
        """The next character."""
        if self.at == len(self.text):
            self.refuse(missing)
        self.at += 1
        return self.text[self.at - 1]

    def choice(self) -> Expression:
        parts = [self.sequence()]
        while self.take("|"):
            parts.append(self.sequence())
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def sequence(self) -> Expression:
        parts: list[Expression] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            if (part := self.atom()) is not None:
                parts.append(self.repeated(part))
        return Sequence_(tuple(parts))

    def repeated(self, part: Expression) -> Expression:
        """A part with what says how often."""
        while True:
            if sign := self.take("*", "+", "?"):
                counts = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
            elif self.take("{"):
                counts = self.counts()
            else:
                return part
            if isinstance(part, Edge):
                self.refuse("nothing to repeat")
            part = Repeat(part, *counts)
            self.take("?")  # which of the texts that match comes first makes no difference

    def counts(self) -> tuple[int, int | None]:
        found = re.compile(r"([0-9]*)(,?)([0-9]*)\}").match(self.text, self.at)
        if not found or not (found[1] or found[3]):
            self.refuse("{ that begins no number of repeats, such as {2,3}; write \\{ for it")
        least, comma, most = found.groups()
        if not least:
            self.refuse(f"{{,{most}}} has no lower number, write {{0,{most}}}:")
        for digits in (least, most):
            if len(digits.lstrip("0")) > 9 or int(digits or 0) > MOST_REPEATS:
                raise ValueError(
                    f"pattern {shown(self.text)} repeats a part {shown(digits)[1:-1]} times; at"
                    f" most {MOST_REPEATS} are possible"
                )
        self.at = found.end()
        if not comma:
            return int(least), int(least)
        if most and int(most) < int(least):
            self.refuse(f"the repeats {least} to {most}")
        return int(least), int(most) if most else None

    def atom(self) -> Expression | None:
        """The next part; None: a group that only sets flags."""
        start = self.at
        character = self.one("nothing")
        if character == "(":
            return self.group()
        if character == "[":
            return Characters(self.any_case(self.set()))
        if character == "\\":
            found = self.escape()
            return found if isinstance(found, Edge) else Characters(self.any_case(found))
        if character == ".":
            leaves_out = "" if self.dot_is_all else self.dialect.newlines
            return Characters(inverted(_of(leaves_out)))
        if character in "^$":
            return Edge(is_start=character == "^")
        self.at = start
        if character in "*+?":
            self.refuse("nothing to repeat")
        if character == "{":
            self.refuse("{ that begins no number of repeats, such as {2,3}; write \\{ for it")
        self.at += 1
        return Characters(self.any_case(_of(character)))

    def any_case(self, ranges: Ranges) -> Ranges:
        """These characters, and those that differ by case alone if case is ignored."""
        if not self.ignores_case:
            return ranges
        cased = (each for low, high in ranges for each in _cased() if low <= ord(each) <= high)
        return ranges_of([*ranges, *_of("".join(_cased()[each] for each in cased))])

    def group(self) -> Expression | None:
        opened = self.at - 1
        flags = self.ignores_case, self.dot_is_all
        if self.take("?"):
            if self.take("=", "!", "<=", "<!"):
                self.refuse(_NOT_FINITE)
            if self.take("P<", "<"):
                name, _, rest = self.text[self.at :].partition(">")
                if not name.isidentifier() or not rest:  # a group has a )
                    self.refuse("bad name of a group")
                self.at += len(name) + 1
            elif not self.take(":") and not self.flags():
                return None
        found = self.choice()
        if not self.take(")"):
            self.at = opened
            self.refuse("missing ), unterminated subpattern")
        self.ignores_case, self.dot_is_all = flags
        return found

    def flags(self) -> bool:
        """Reads flags; whether they are those of a group that follows, and not of what is left."""
        value = True
        while not (end := self.take(":", ")")):
            flag = self.one("missing ), unterminated subpattern")
            if self.dialect.is_ecma or flag not in "is-":
                self.refuse(
                    f"the flag {shown(flag)} is not supported; write the pattern without it"
                )
            if flag == "-":
                value = False
            elif flag == "i":
                self.ignores_case = value
            else:
                self.dot_is_all = value
        return end == ":"

    def set(self) -> Ranges:
        """What is between brackets."""
        is_inverted = bool(self.take("^"))
        found: list[tuple[int, int]] = []
        is_first = not self.dialect.is_ecma  # where ] stands for itself
        while is_first or not self.take("]"):
            if not self.dialect.is_ecma:
                if self.text[self.at : self.at + 2] in ("&&", "--", "~~"):
                    self.refuse("operations on sets of characters are not supported")
                if self.text[self.at : self.at + 1] == "[":
                    self.refuse("[ inside of a set of characters; write \\[ for it, or a plain set")
            low, is_first = self.member(), False
            if self.text[self.at : self.at + 2] != "-]" and self.take("-"):
                high = self.member()
                if not (_is_one(low) and _is_one(high)) or low[0][0] > high[0][0]:
                    self.refuse("bad range of characters")
                low = ((low[0][0], high[0][0]),)
            found += low
        ranges = ranges_of(found)
        return inverted(self.any_case(ranges)) if is_inverted else ranges

    def member(self) -> Ranges:
        character = self.one("unterminated character set")
        if character != "\\":
            return _of(character)
        if self.take("b"):
            return _of("\b")
        found = self.escape()
        if isinstance(found, Edge):
            self.refuse("an anchor in a set of characters")
        return found

    def escape(self) -> Ranges | Edge:
        r"""What follows a \ ."""
        start, letter = self.at, self.one("a \\ at the end")
        is_ecma = self.dialect.is_ecma
        if letter in "dDwWsS":
            ranges = _class_of(letter.lower(), self.dialect)
            return inverted(ranges) if letter.isupper() else ranges
        if letter in "pP":
            ranges = self.property()
            return inverted(ranges) if letter == "P" else ranges
        if letter in "bB123456789" or (letter == "k" and is_ecma):
            self.refuse(_NOT_FINITE)
        if letter in "Az" and not is_ecma:
            return Edge(is_start=letter == "A")
        if letter in _CONTROLS:
            return _of(_CONTROLS[letter])
        if letter == "0" and is_ecma and not self.text[self.at : self.at + 1].isdecimal():
            return ((0, 0),)
        if letter == "c" and is_ecma:
            control = self.one("a \\c at the end")
            if control.isascii() and control.isalpha():
                return _of(chr(ord(control) % 32))
        if letter in "xuU":
            return self.code_point(letter)
        if letter.isascii() and letter.isalnum():
            self.at = start
            self.refuse(f"unknown escape \\{letter}")
        return _of(letter)

    def code_point(self, letter: str) -> Ranges:
        r"""The character after \x, \u or \U."""
        size = {"x": 2, "u": 4, "U": 8}[letter]
        found = re.compile(rf"\{{({_HEX}{{1,8}})\}}|({_HEX}{{{size}}})").match(self.text, self.at)
        if not found:
            self.refuse(f"\\{letter} without the number of a character")
        digits, after = found[1] or found[2], found.end()
        value = int(digits, 16)
        low = re.compile(rf"\\u({_HEX}{{4}})").match(self.text, after)
        if low and 0xD800 <= value < 0xDC00:  # half of a pair
            value = 0x10000 + ((value - 0xD800) << 10) + int(low[1], 16) - 0xDC00
            after = low.end()
        if value > LAST or 0xD800 <= value < 0xE000:
            self.refuse(f"\\{letter}{digits} is no character")
        self.at = after
        return ((value, value),)

    def property(self) -> Ranges:
        r"""The characters of a general category, such as \p{Lu} and \pL."""
        pattern = r"\{(?:General_Category=|gc=)?([^}]*)\}|([^{])"
        found = re.compile(pattern).match(self.text, self.at)
        name = (found[1] or found[2] or "") if found else ""
        self.at = found.end() if found else self.at
        begin = _SHORT.get(name, name)
        if not name or not any(each.startswith(begin) for each in _categories()):
            self.refuse(
                f"the property {shown(name)} is not known; general categories such as Lu are"
            )
        return _of_categories(begin)


_SHORT = {"Letter": "L", "Mark": "M", "Number": "N", "Punctuation": "P", "Symbol": "S"}
_SHORT |= {"Separator": "Z", "Other": "C", "Lowercase_Letter": "Ll", "Uppercase_Letter": "Lu"}


def _is_one(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _class_of(letter: str, dialect: Dialect) -> Ranges:
    if letter == "s":
        return _of(dialect.spaces)
    if dialect.is_ecma:
        return _of("0123456789" + (_WORD if letter == "w" else ""))
    return _of_categories("Nd") if letter == "d" else _of_categories("L", "M", "Nd", "Nl", "Pc")


_WORD = "_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@functools.cache
def _of_categories(*names: str) -> Ranges:
    """The characters of the general categories whose names begin so."""
    found = [each for each in _categories() if each.startswith(names)]
    return ranges_of(pair for each in found for pair in _categories()[each])


@functools.cache
def _categories() -> dict[str, list[tuple[int, int]]]:
    """The characters of each general category."""
    found: dict[str, list[tuple[int, int]]] = {}
    start, before = 0, unicodedata.category("\0")
    for code in range(1, LAST + 2):
        category = unicodedata.category(chr(code)) if code <= LAST else ""
        if category != before:
            found.setdefault(before, []).append((start, code - 1))
            start, before = code, category
    return found


@functools.cache
def _cased() -> dict[str, str]:
    """The characters that differ from others by case alone, and these others."""
    same: dict[str, set[str]] = {}
    for low, high in EVERY:
        for each in map(chr, range(low, high + 1)):
            for other in {each.lower(), each.upper(), each.casefold()} - {each}:
                if len(other) == 1:
                    same.setdefault(each, set()).add(other)
                    same.setdefault(other, set()).add(each)
    return {each: "".join(others) for each, others in same.items()}
