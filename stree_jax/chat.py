"""Chat templates: render a conversation as the text that a checkpoint expects."""

import dataclasses
import functools
import importlib.metadata
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from stree_jax.checkpoint.files import CHAT_TEMPLATES, folder_of, optional_json, read_text
from stree_jax.messages import first_line, needs, shown, shown_path
from stree_jax.special_tokens import special_tokens

_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A Jinja program of transformers that writes a conversation as text."""

    source: str
    special_tokens: Mapping[str, str]

    def render(self, messages: Sequence[Mapping[str, Any]] | Any, /, **variables: Any) -> str:
        """Renders a conversation, up to where the assistant's next message begins.

        The sandbox keeps a stranger's program from other values, not from taking time and memory.
        """
        values = {"tools": None, "documents": None, "add_generation_prompt": True} | variables
        values["messages"] = _checked(messages)
        for name, value in values.items():
            try:
                values[name] = _plain(value)
            except (TypeError, RecursionError) as error:
                where = "a message" if name == "messages" else f"chat[{shown(name)}]"
                raise ValueError(f"{where} is no JSON: {first_line(error)}") from None
        _sandbox()
        try:
            return _compiled(self.source).render({**self.special_tokens, **values})
        except Exception as error:  # a stranger's program raises what it likes
            kind = type(error)
            named = "" if kind.__module__.startswith("jinja2") else f"{kind.__name__}: "
            raise ValueError(
                f"the chat template cannot write these messages: {named}{first_line(error)}"
            ) from None


class NoChatTemplateError(ValueError):
    """A checkpoint has no chat template."""


def load_chat_template(directory: Path, *, tools: bool = False) -> ChatTemplate:
    """Returns the chat template of a checkpoint, from files or its config."""
    folder = folder_of(directory)
    config = folder / "tokenizer_config.json"
    templates = _in_config(config, optional_json(config).get("chat_template"))
    files = {
        "default" if pattern == CHAT_TEMPLATES[0] else file.name.removesuffix(".jinja"): file
        for pattern in CHAT_TEMPLATES
        for file in sorted(folder.glob(pattern))
    }
    name = "tool_use" if tools and "tool_use" in (files or templates) else "default"
    if name not in templates | files:
        names = sorted(templates | files)
        known = f" named {shown(name)}; there are {shown(names)}" if names else ""
        raise (ValueError if names else NoChatTemplateError)(
            f"{shown_path(folder)} has no chat template{known}; pass a text instead (the command"
            " takes --chat-template FILE)"
        )
    source = read_text(files[name]) if name in files else templates[name]
    return ChatTemplate(source, special_tokens(folder))


def _in_config(file: Path, templates: Any) -> dict[str, str]:
    """Returns the templates of a tokenizer's config, by name."""
    pairs: list[tuple[Any, Any]] = [(None, None)]  # of what is damaged
    if templates is None:
        pairs = []
    elif isinstance(templates, str):
        pairs = [("default", templates)]
    elif isinstance(templates, dict):
        pairs = [*templates.items()]
    elif isinstance(templates, list) and all(isinstance(part, dict) for part in templates):
        pairs = [(part.get("name"), part.get("template")) for part in templates]
    if not all(isinstance(name, str) and isinstance(text, str) for name, text in pairs):
        raise ValueError(
            f"{shown_path(file)} is damaged: chat_template must be a text, or a list of"
            f' {{"name": ..., "template": ...}}, got {shown(templates)}'
        )
    return dict(pairs)


def checked_variables(chat: Any) -> dict[str, Any]:
    """Returns the variables that a user gives to a template, by name."""
    if chat is None:
        return {}
    if not isinstance(chat, Mapping) or not all(isinstance(name, str) for name in chat):
        raise ValueError(
            f'chat must be variables of the template, such as {{"tools": [...]}}, got {shown(chat)}'
        )
    if "messages" in chat:
        raise ValueError("chat cannot have 'messages': they are the prompt")
    return dict(chat)


def _checked(messages: Any) -> list[dict[str, Any]]:
    """Returns messages without None, with the names of reasoning that templates know."""
    way_out = 'messages are such as [{"role": "user", "content": "Hello"}]'
    if not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"{way_out}, got {shown(messages)}")
    checked = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"{way_out}, got {shown(message)} among them")
        kept = {name: value for name, value in message.items() if value is not None}
        for reasoning in [kept[name] for name in _REASONING if name in kept][:1]:
            kept = {"thinking": reasoning} | kept | {"reasoning_content": reasoning}
        checked.append(kept)
    return checked


def _plain(value: Any) -> Any:
    """Copies JSON's types: a template must not reach methods of others."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    kinds: Any = ((str, str.__str__), (int, int.__int__), (float, float.__float__))
    for kind, plain in kinds:
        if isinstance(value, kind):
            return plain(value)
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, Mapping):
        return {_plain(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(_plain, value))
    raise TypeError(f"it holds {shown(value)}; use texts, numbers, lists and tables")


@functools.lru_cache(maxsize=4)
def _compiled(source: str) -> Any:
    return _sandbox().from_string(source)


@functools.cache
def _sandbox() -> Any:
    """Returns the environment in which templates run, as transformers makes it."""
    try:
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        raise ValueError(needs("a chat template", "jinja2", "chat")) from None
    version = importlib.metadata.version("jinja2")
    if tuple(map(int, re.findall("[0-9]+", version)[:3])) < (3, 1, 6):
        raise ValueError(
            f"chat templates need jinja2 3.1.6, whose sandbox has no known holes, not {version}:"
            " pip install -U jinja2"
        )

    class Generation(jinja2.ext.Extension):
        """The block around an assistant's text; transformers notes where it lies."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    class Dict:
        """`dict` without the methods that would change what is given."""

        def __call__(self, *args: Any, **items: Any) -> dict:
            return dict(*args, **items)

        def fromkeys(self, *args: Any) -> dict:
            return dict.fromkeys(*args)

    class Namespace(jinja2.utils.Namespace):
        """Has no names with an underscore, which are Python's own."""

        def __init__(self, /, *args: Any, **items: Any) -> None:
            super().__init__()
            for name, value in dict(*args, **items).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if str(name).startswith("_"):
                raise jinja2.sandbox.SecurityError(f"a namespace has no attribute {shown(name)}")
            super().__setitem__(name, value)

    def raise_exception(message: Any) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        how = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "dict": Dict(),
        "namespace": Namespace,
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment
