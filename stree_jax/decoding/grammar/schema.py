"""From a JSON schema to a regular expression, by outlines-core.

outlines-core reads some keywords and passes over all others, so a text that it allows may not be
valid. Here a schema is first rewritten to one that it reads whole: references are replaced by what
they refer to, formats by patterns, and a keyword that would be passed over is refused.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from stree_jax.checkpoint import first_line
from stree_jax.checks import check_int
from stree_jax.decoding.grammar.patterns import (
    byte_automaton,
    import_outlines_core,
    without_anchors,
)
from stree_jax.messages import shown

_MOST_REFERENCES = 3  # to a schema within itself

# Keywords by which a schema refuses values; all others only describe.
_ASSERTIONS = set(
    re.findall(
        r"\S+",
        """
    $dynamicRef $recursiveRef $ref additionalItems additionalProperties allOf anyOf const contains
    dependencies dependentRequired dependentSchemas else enum exclusiveMaximum exclusiveMinimum
    format if items maxContains maxItems maxLength maxProperties maximum minContains minItems
    minLength minProperties minimum multipleOf not oneOf pattern patternProperties prefixItems
    properties propertyNames required then type unevaluatedItems unevaluatedProperties uniqueItems
    """,
    )
)
# What decides how outlines-core reads a schema, the first that is there, and what it reads then.
_READ = {
    "properties": {"type", "required", "additionalProperties"},
    "allOf": set(),
    "anyOf": set(),
    "oneOf": set(),
    "prefixItems": {"type", "items", "minItems", "maxItems"},
    "enum": {"type"},
    "const": {"type"},
    "$ref": set(),
    "type": set(),
}
_READ_OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": set(),
    "integer": set(),
    "boolean": set(),
    "null": set(),
    "array": {"items", "minItems", "maxItems"},
    "object": {"additionalProperties", "minProperties", "maxProperties"},
}
_DATE = (
    "[12][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_CLOCK})"
_HOST = "[A-Za-z0-9]+(?:[.-][A-Za-z0-9]+)*"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": rf"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@{_HOST}\.[A-Za-z]{{2,}}",
    "uri": rf"https?://{_HOST}(?::[1-9][0-9]{{0,3}})?(?:/[A-Za-z0-9._~=&+-]*)*",
}


Schema = dict[str, Any]


def regex_of_schema(schema: Any) -> str:
    """The regular expression of the JSON texts that a schema validates.

    Raises:
        ValueError: a malformed schema, one that cannot be enforced, or outlines-core is missing.
    """
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the schema is not JSON: {error}") from None
    if not isinstance(schema, Mapping | bool):
        raise ValueError(f"schema must be a dictionary or a JSON text, got {shown(schema)}")
    rewritten = _Rewriting(schema).schema(schema, "the schema", ())
    if rewritten is None:
        raise ValueError("the schema refers to itself without an end, so no text is valid")
    try:
        text = json.dumps(rewritten)
        return import_outlines_core().json_schema.build_regex_from_schema(text)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the schema cannot be used: {first_line(error)}") from None


class _Rewriting:
    """Rewrites parts of a schema; `where` names a part in messages.

    A part that refers to itself too often becomes None: what contains it does without, or becomes
    None too.
    """

    def __init__(self, root: Any):
        self.root = root
        self.by_keyword: dict[str, Callable[..., Schema | None]] = {
            "properties": self.properties,
            "allOf": self.all_of,
            "anyOf": self.any_of,
            "oneOf": self.any_of,
            "prefixItems": self.prefix_items,
            "enum": self.values,
            "const": self.values,
            "$ref": self.reference,
            "type": self.of_type,
        }

    def schema(self, part: Any, where: str, inside: tuple[str, ...]) -> Schema | None:
        """A part, rewritten.

        Args:
            part: the part.
            where: its name in messages.
            inside: the references that it is in.
        """
        if part is True or part == {}:
            return {}
        if not isinstance(part, Mapping):
            raise ValueError(f"{where} must be a dictionary, got {shown(part)}")
        keyword = next((each for each in _READ if each in part), None)
        if keyword is None:
            unread = sorted(_ASSERTIONS & set(part))
            if unread:
                raise ValueError(f"{where} has {unread[0]!r} and no type; add its type")
            return {}
        read = {keyword, *_READ[keyword]}
        if keyword == "type":
            for name in _listed(part["type"]):
                if not isinstance(name, str) or name not in _READ_OF_TYPE:
                    raise ValueError(f"{where} has the unknown type {shown(name)}")
                read |= _READ_OF_TYPE[name]
        for other in sorted(_ASSERTIONS & set(part) - read):
            raise ValueError(
                f"{where} has {other!r}, which a grammar cannot enforce here; leave it out, and"
                " check the text afterwards"
            )
        return self.by_keyword[keyword](dict(part), where, inside)

    def properties(self, part: Schema, where: str, inside: tuple[str, ...]) -> Schema | None:
        """An object with named properties."""
        if not isinstance(part["properties"], Mapping):
            raise ValueError(f"'properties' of {where} must be a dictionary")
        required = part.get("required", [])
        for name in required:
            if name not in part["properties"]:
                raise ValueError(f"{where} requires {shown(name)}, which is not in its properties")
        found = {}
        for name, each in part["properties"].items():
            _check_name(name, where)
            value = self.schema(each, f"{where}.{name}", inside)
            if value is not None:
                found[name] = value
            elif name in required:
                return None
        return {"type": "object", "properties": found, "required": list(required)}

    def all_of(self, part: Schema, where: str, inside: tuple[str, ...]) -> Schema | None:
        """One part in a list."""
        parts = _listed(part["allOf"])
        if len(parts) != 1:
            raise ValueError(f"'allOf' of {where} has {len(parts)} parts; a grammar can have one")
        return self.schema(parts[0], where, inside)

    def any_of(self, part: Schema, where: str, inside: tuple[str, ...]) -> Schema | None:
        """Alternatives."""
        parts = _listed(part.get("anyOf", part.get("oneOf")))
        found = [self.schema(each, f"{where}[{i}]", inside) for i, each in enumerate(parts)]
        possible = [each for each in found if each is not None]
        return {"anyOf": possible} if possible else None

    def prefix_items(self, part: Schema, where: str, inside: tuple[str, ...]) -> Schema | None:
        """An array with a schema for each item."""
        parts = _listed(part["prefixItems"])
        least, most = part.get("minItems", 0), part.get("maxItems", len(parts))
        if not least <= len(parts) <= most:
            raise ValueError(f"{where} has {len(parts)} prefixItems, not {least} to {most}")
        found = [self.schema(each, f"{where}[{i}]", inside) for i, each in enumerate(parts)]
        return None if None in found else {"prefixItems": found}

    def values(self, part: Schema, where: str, inside: tuple[str, ...]) -> Schema:
        """Given values."""
        values = _listed(part["enum"]) if "enum" in part else [part["const"]]
        if not values:
            raise ValueError(f"'enum' of {where} is empty")
        for value in values:
            _check_names_in(value, where)
        return {"enum": values}

    def reference(self, part: Schema, where: str, inside: tuple[str, ...]) -> Schema | None:
        """The part that a reference refers to."""
        name = part["$ref"]
        if not (isinstance(name, str) and name.startswith("#")):
            raise ValueError(f"{where} refers to {shown(name)}; only #/... is possible")
        if inside.count(name) >= _MOST_REFERENCES:
            return None
        found = self.root
        for key in unquote(name).removeprefix("#").split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or key not in found:
                raise ValueError(f"{where} refers to {shown(name)}, which is not there")
            found = found[key]
        return self.schema(found, where, (*inside, name))

    def of_type(self, part: Schema, where: str, inside: tuple[str, ...]) -> Schema | None:
        """A value of a type, or of one of several."""
        found = []
        for name in _listed(part["type"]):
            kept = {key: part[key] for key in _READ_OF_TYPE[name] if key in part}
            rewrite = {"string": self.string, "array": self.array, "object": self.object}
            value = rewrite[name](kept, where, inside) if name in rewrite else {}
            if value is not None:
                found.append({"type": name} | value)
        if not found:
            return None
        return found[0] if len(found) == 1 else {"anyOf": found}

    def string(self, part: Schema, where: str, inside: tuple[str, ...]) -> Schema:
        """Either lengths, or a pattern, or a format."""
        lengths = _counts(part, where, "minLength", "maxLength")
        if len({"pattern", "format"} & set(part)) + bool(lengths) > 1:
            raise ValueError(f"{where} has {sorted(part)}; a grammar can have one of them")
        pattern = part.get("pattern")
        if "format" in part:
            if part["format"] not in _FORMATS:
                raise ValueError(
                    f"{where} has the format {shown(part['format'])}; known: {sorted(_FORMATS)}"
                )
            pattern = _FORMATS[part["format"]]
        if pattern is None:
            return lengths
        if not isinstance(pattern, str):
            raise ValueError(f"{where} has the pattern {shown(pattern)}, which is no text")
        pattern = without_anchors(pattern)
        next_state = byte_automaton(pattern).next_state
        if (next_state[:, [*range(0x20), ord('"'), ord("\\")]] >= 0).any():
            raise ValueError(
                f"{where} has the pattern {shown(pattern)}, which matches quotes, backslashes or"
                r' control characters; JSON writes them otherwise: use [^"\\\x00-\x1f] for .'
            )
        return {"pattern": f"(?:{pattern})"}

    def array(self, part: Schema, where: str, inside: tuple[str, ...]) -> Schema | None:
        """An array of similar items."""
        counts = _counts(part, where, "minItems", "maxItems")
        items = self.schema(part.get("items", {}), f"{where}[]", inside)
        if items is None:
            return None if counts.get("minItems") else {"maxItems": 0}
        return counts | ({"items": items} if items else {})

    def object(self, part: Schema, where: str, inside: tuple[str, ...]) -> Schema | None:
        """An object with any properties."""
        counts = _counts(part, where, "minProperties", "maxProperties")
        if counts.get("minProperties", 0) > 1 or counts.get("maxProperties", 0) > 0:
            raise ValueError(f"{where} counts its properties, which a grammar cannot do")
        values = part.get("additionalProperties", True)
        if values is False:
            counts["maxProperties"] = 0
            values = True
        found = self.schema(values, f"{where}.*", inside)
        if found is None:
            return None if counts.get("minProperties") else {"maxProperties": 0}
        return counts | ({"additionalProperties": found} if found else {})


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _counts(part: Schema, where: str, *names: str) -> dict[str, int]:
    found = {name: check_int(f"{name} of {where}", part[name], 0) for name in names if name in part}
    least, most = found.get(names[0], 0), found.get(names[1], math.inf)
    if least > most:
        raise ValueError(f"{where} has {names[0]} {least} and {names[1]} {most}")
    return found


def _check_name(name: Any, where: str) -> None:
    if not isinstance(name, str) or json.dumps(name, ensure_ascii=False) != f'"{name}"':
        raise ValueError(
            f"{where} has the property {shown(name)}; names with quotes, backslashes or control"
            " characters are not possible"
        )


def _check_names_in(value: Any, where: str) -> None:
    """outlines-core takes the names in a given object for regular expressions."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            _check_name(name, where)
            if re.escape(name).replace("\\-", "-").replace("\\ ", " ") != name:
                raise ValueError(f"{where} has an object with the property {shown(name)}")
            _check_names_in(each, where)
    for each in value if isinstance(value, list) else ():
        _check_names_in(each, where)
