r"""Regular expressions of ECMA-262, as expressions over characters.

The syntax is that of the flag u, as far as a finite automaton can follow, without `\p`. The
anchors ^ and $ stand at the ends of a pattern or of its alternatives.
"""

import dataclasses
import re
import string
from collections.abc import Callable, Iterable
from typing import NoReturn, TypeAlias

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
class Series:
    """Parts one after the other."""

    parts: tuple["Expression", ...] = ()


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


Expression: TypeAlias = Characters | Series | Choice | Repeat


def any_text(least: int = 0, most: int | None = None) -> Expression:
    """Returns the expression of texts with some number of characters."""
    return Repeat(Characters(EVERY), least, most)


def literal(text: str) -> Expression:
    """Returns the expression of a text."""
    return Series(tuple(Characters(of_characters(character)) for character in text))


def of_characters(characters: Iterable[str]) -> Ranges:
    """Returns the ranges of given characters."""
    return ranges_of((ord(character), ord(character)) for character in characters)


def ranges_of(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Joins ranges in any order, which may overlap, without surrogates."""
    ranges: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        for start, end in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high)):
            if start > end:
                continue
            if ranges and start <= ranges[-1][1] + 1:
                ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
            else:
                ranges.append((start, end))
    return tuple(ranges)


def inverted(ranges: Ranges) -> Ranges:
    """Returns all other characters."""
    before = [-1, *(high for _, high in ranges)]
    after = [*(low for low, _ in ranges), LAST + 1]
    gaps = zip(before, after, strict=True)
    return ranges_of((low + 1, high - 1) for low, high in gaps if low + 1 < high)


_HEX = "[0-9a-fA-F]"
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_SPACES = "\t\n\v\f\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"
_CLASSES = {
    "d": of_characters(string.digits),
    "w": of_characters("_" + string.digits + string.ascii_letters),
    "s": of_characters(_SPACES + "".join(map(chr, range(0x2000, 0x200B)))),
}
_NOT_FINITE = "look-around, references and word boundaries are not supported"
_ANCHOR = "anchors inside, which may only be at the ends of a pattern or of its alternatives,"
_NO_REPEAT = "{ that begins no number of repeats, such as {2,3}; write \\{ for it"


def parse(pattern: str, *, is_whole: bool = True) -> Expression:
    """Reads a pattern, which matches whole texts or is found in them."""
    parser = _Parser(pattern)
    around = Series() if is_whole else any_text()
    expression = parser.choice(lambda: parser.alternative(around))
    if parser.at < len(pattern):
        parser.refuse("unbalanced parenthesis" if parser.take(")") else _ANCHOR)
    return expression


class _Parser:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str):
        self.text, self.at = pattern, 0

    def refuse(self, why: str) -> NoReturn:
        """Raises the error of a pattern."""
        raise ValueError(
            f"pattern {shown(self.text)} cannot be used: {why} at position {self.at}"
        ) from None

    def take(self, *options: str) -> str:
        """Passes the option that comes next; returns it, or an empty text."""
        for option in options:
            if self.text.startswith(option, self.at):
                self.at += len(option)
                return option
        return ""

    def one(self, missing: str) -> str:
        """Passes a character, and returns it."""
        if self.at == len(self.text):
            self.refuse(missing)
        self.at += 1
        return self.text[self.at - 1]

    def choice(self, alternative: Callable[[], Expression]) -> Expression:
        parts = [alternative()]
        while self.take("|"):
            parts.append(alternative())
        return Choice(tuple(parts))

    def alternative(self, around: Expression) -> Expression:
        """Reads an alternative; `around` stands where it has no anchor."""
        before = Series() if self.take("^") else around
        part = self.series()
        return Series((before, part, Series() if self.take("$") else around))

    def series(self) -> Expression:
        parts = []
        while self.at < len(self.text) and self.text[self.at] not in "|)$":
            parts.append(self.repeated(self.atom()))
        return Series(tuple(parts))

    def repeated(self, part: Expression) -> Expression:
        """Reads how often a part comes."""
        if sign := self.take("*", "+", "?"):
            counts = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        elif self.take("{"):
            counts = self.counts()
        else:
            return part
        self.take("?")  # which of the texts that match comes first makes no difference
        return Repeat(part, *counts)

    def counts(self) -> tuple[int, int | None]:
        match = re.compile(r"([0-9]*)(,?)([0-9]*)\}").match(self.text, self.at)
        if not match or not match[1]:
            self.refuse(_NO_REPEAT)
        least, comma, most = match.groups()
        for digits in (least, most):
            if len(digits.lstrip("0")) > 9 or int(digits or 0) > MOST_REPEATS:
                raise ValueError(
                    f"pattern {shown(self.text)} repeats a part {shown(digits)[1:-1]} times; at"
                    f" most {MOST_REPEATS} are possible"
                )
        self.at = match.end()
        if not comma:
            return int(least), int(least)
        if most and int(most) < int(least):
            self.refuse(f"the repeats {least} to {most}")
        return int(least), int(most) if most else None

    def atom(self) -> Expression:
        character = self.one("nothing")
        if character == "(":
            return self.group()
        if character == "[":
            return Characters(self.set())
        if character == "\\":
            return Characters(self.escape())
        if character == ".":
            return Characters(inverted(of_characters("\n\r\u2028\u2029")))
        self.at -= 1
        if character in "^*+?{":
            self.refuse({"^": _ANCHOR, "{": _NO_REPEAT}.get(character, "nothing to repeat"))
        self.at += 1
        return Characters(of_characters(character))

    def group(self) -> Expression:
        opened = self.at - 1
        if self.take("?"):
            if self.take("=", "!", "<=", "<!"):
                self.refuse(_NOT_FINITE)
            name = re.compile(r"<([^>]*)>").match(self.text, self.at)
            if name and name[1].isidentifier():
                self.at = name.end()
            elif not self.take(":"):
                self.refuse("a group that begins with (? and is no (?:...) or (?<name>...)")
        inside = self.choice(self.series)
        if self.take("$"):
            self.refuse(_ANCHOR)
        if not self.take(")"):
            self.at = opened
            self.refuse("missing ), unterminated subpattern")
        return inside

    def set(self) -> Ranges:
        """Reads what is between brackets."""
        is_inverted = bool(self.take("^"))
        members: list[tuple[int, int]] = []
        while not self.take("]"):
            low = self.member()
            if self.text[self.at : self.at + 2] != "-]" and self.take("-"):
                high = self.member()
                are_single = all(len(ends) == 1 and len({*ends[0]}) == 1 for ends in (low, high))
                if not are_single or low > high:
                    self.refuse("bad range of characters")
                low = ((low[0][0], high[0][0]),)
            members += low
        return inverted(ranges_of(members)) if is_inverted else ranges_of(members)

    def member(self) -> Ranges:
        character = self.one("unterminated character set")
        if character != "\\":
            return of_characters(character)
        return of_characters("\b") if self.take("b") else self.escape()

    def escape(self) -> Ranges:
        r"""Reads what follows a \ ."""
        letter = self.one("a \\ at the end")
        if letter.lower() in _CLASSES:
            ranges = _CLASSES[letter.lower()]
            return inverted(ranges) if letter.isupper() else ranges
        is_octal = letter == "0" and self.text[self.at : self.at + 1].isdecimal()
        if letter in "bB123456789k" or is_octal:
            self.refuse(_NOT_FINITE)
        if letter in "pP":
            self.refuse(f"\\{letter} is not supported; write a set of characters, such as [a-z],")
        if letter in _CONTROLS:
            return of_characters(_CONTROLS[letter])
        if letter in "xu":
            return self.code_point(letter)
        if letter.isascii() and letter.isalnum():
            self.at -= 2
            self.refuse(f"unknown escape \\{letter}")
        return of_characters(letter)

    def code_point(self, letter: str) -> Ranges:
        r"""Reads the number of a character after \x or \u."""
        pattern = rf"({_HEX}{{2}})" if letter == "x" else rf"({_HEX}{{4}})|\{{({_HEX}{{1,8}})\}}"
        match = re.compile(pattern).match(self.text, self.at)
        if not match:
            self.refuse(f"\\{letter} without the number of a character")
        digits = match[match.lastindex or 1]
        value = int(digits, 16)
        if value > LAST or 0xD800 <= value < 0xE000:
            self.refuse(f"\\{letter}{digits} is no character")
        self.at = match.end()
        return ((value, value),)
