"""The options of a text as options of a command: fields of `Options` that have a help text."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from stree_jax.decoding.options import Options

_HELP = {
    "max_new_tokens": "Maximum number of new tokens.",
    "min_new_tokens": "No end token before as many new tokens.",
    "temperature": "0 is greedy decoding.",
    "top_k": "Sample from the k most probable tokens; 0: all.",
    "top_p": "Nucleus sampling: keep probability mass p.",
    "min_p": "Keep tokens that are at least p times as probable as the best.",
}

# These fields, and what they are on the command line where nothing is given.
DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in dataclasses.fields(Options) if field.name in _HELP
} | {"max_new_tokens": 128}


def with_text_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for each of `DEFAULTS`; it gets their values as `settings`."""
    own = inspect.signature(command, eval_str=True)
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[type(default), typer.Option(help=_HELP[name])],
        )
        for name, default in DEFAULTS.items()
    ]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        settings = {name: values.pop(name) for name in DEFAULTS}
        command(**values, settings=settings)

    kept = [each for each in own.parameters.values() if each.name != "settings"]
    parameters = [*kept, *added]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run
