"""The options of a text as options of a command, and as fields of a line of a prompts file."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from stree_jax.decoding.options import Options
from stree_jax.decoding.prompts import check_num_rows
from stree_jax.messages import shown

_HELP = {
    "max_new_tokens": "Maximum number of new tokens.",
    "min_new_tokens": "No end token before as many new tokens.",
    "temperature": "0 is greedy decoding.",
    "top_k": "Sample from the k most probable tokens; 0: all.",
    "top_p": "Nucleus sampling: keep probability mass p.",
    "min_p": "Keep tokens that are at least p times as probable as the best.",
}

_NUMBERS = {
    field.name: field.default for field in dataclasses.fields(Options) if field.name in _HELP
} | {"max_new_tokens": 128}
_OTHERS: dict[str, Any] = {
    "eos_token": Annotated[
        list[str] | None,
        typer.Option(
            help="End after this token, an id or its text; may be repeated. By default the"
            " checkpoint's end tokens."
        ),
    ],
    "bos": Annotated[
        bool,
        typer.Option(
            "--bos/--no-bos",
            help="Begin with the token that the tokenizer puts before a text, if it has one.",
        ),
    ],
    "stop": Annotated[
        list[str] | None, typer.Option(help="Stop before this text; may be repeated.")
    ],
    "log_probs": Annotated[
        bool, typer.Option("--log-probs", help="Log-probability of each new token, as JSON.")
    ],
    "n": Annotated[int, typer.Option("--n", help="Number of texts of each prompt.")],
    "regex": Annotated[
        str | None, typer.Option(help="The new text matches this regular expression as a whole.")
    ],
    "json_schema": Annotated[
        Path | None,
        typer.Option(help="The new text is JSON that the schema in this file validates."),
    ],
}

# The options that are not given.
DEFAULTS: dict[str, Any] = {
    **_NUMBERS,
    "eos_token": None,
    "bos": True,
    "stop": None,
    "log_probs": False,
    "n": 1,
    "regex": None,
    "json_schema": None,
}


class Wanted(NamedTuple):
    """The texts to generate for a prompt.

    Attributes:
        options: keywords of `Options`.
        num_texts: how many texts.
        grammar: the name of a function that makes a grammar, and its argument; or None.
        eos_token: ids or texts of the tokens that end a text; None: the checkpoint's.
        bos: whether a text gets the tokenizer's special tokens.
    """

    options: dict[str, Any]
    num_texts: int
    grammar: tuple[str, Any] | None
    eos_token: Any
    bos: bool


def wanted(settings: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> Wanted:
    """The texts that the settings ask for; a line's `own` values replace those of the command.

    Raises:
        ValueError: two grammars, or an invalid number of texts.
    """
    own = own or {}
    values = {name: settings[name] for name in DEFAULTS}
    if values["eos_token"] is not None:  # on the command line a number is an id
        given = values["eos_token"]
        values["eos_token"] = [int(each) if each.isdecimal() else each for each in given] or None
    if {"regex", "json_schema"} & set(own):  # a line's grammar replaces that of the command
        values |= {"regex": None, "json_schema": None}
    values |= {name: value for name, value in own.items() if name in DEFAULTS}
    grammars = [(name, values.pop(name)) for name in ("regex", "json_schema")]
    grammars = [(name, value) for name, value in grammars if value is not None]
    if len(grammars) > 1:
        raise ValueError("a text has one grammar: give a regular expression or a JSON schema")
    num_texts = values.pop("n")
    check_num_rows("n", num_texts)
    eos_token, bos = values.pop("eos_token"), values.pop("bos")
    if not isinstance(bos, bool):
        raise ValueError(f"bos must be true or false, got {shown(bos)}")
    values["stop"] = values["stop"] or ()
    return Wanted(values, num_texts, grammars[0] if grammars else None, eos_token, bos)


def read_schema(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with the schema itself in the place of the path of its file.

    Raises:
        ValueError: the file cannot be read.
    """
    path = settings["json_schema"]
    if path is None:
        return dict(settings)
    try:
        return {**settings, "json_schema": path.read_text(encoding="utf-8-sig")}
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--json-schema {path} cannot be read: {error}") from None


def with_options(name: str, options: Mapping[str, tuple[Any, Any]]) -> Any:
    """A decorator that gives a command options, whose values it gets as the dict `name`.

    Args:
        name: a keyword-only parameter of the command, in whose place the options are listed.
        options: the annotation and the default of each option.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        added = [
            inspect.Parameter(
                option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
            for option, (annotation, default) in options.items()
        ]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(**{name: {option: values.pop(option) for option in options}}, **values)

        kept = [*own.parameters.values()]
        at = [*own.parameters].index(name)
        parameters = [*kept[:at], *added, *kept[at + 1 :]]
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorated


with_text_options = with_options(
    "settings",
    {
        name: (
            _OTHERS.get(name) or Annotated[type(default), typer.Option(help=_HELP[name])],
            default,
        )
        for name, default in DEFAULTS.items()
    },
)
