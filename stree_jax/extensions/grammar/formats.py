"""Texts of formats of JSON schemas, which every validator accepts."""

from stree_jax.extensions.grammar.expressions import parse

_DATE = (
    "[12][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_CLOCK})"
_HOST = "[A-Za-z0-9]+(?:[.-][A-Za-z0-9]+)*"
_SHORT_HOST = r"[a-z0-9]{1,31}(?:\.[a-z0-9]{1,31}){0,3}"
_EMAIL = rf"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@{_HOST}\.[A-Za-z]{{2,}}"
_URI = rf"https?://{_HOST}(?::[1-9][0-9]{{0,3}})?(?:/[A-Za-z0-9._~=&+-]*)*"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": "P(?:[0-9]{1,4}W|[0-9]{1,4}D|T[0-9]{1,4}[HMS])",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    **dict.fromkeys(("email", "idn-email"), _EMAIL),
    **dict.fromkeys(("hostname", "idn-hostname"), _SHORT_HOST),
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": "[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){7}",
    **dict.fromkeys(("uri", "uri-reference", "iri", "iri-reference", "uri-template"), _URI),
    "json-pointer": "(?:/[A-Za-z0-9_-]*)*",
    "relative-json-pointer": "(?:0|[1-9][0-9]{0,3})(?:/[A-Za-z0-9_-]*)*",
    "regex": "[A-Za-z0-9 _-]*",
}
FORMATS = {name: parse(pattern) for name, pattern in _PATTERNS.items()}
