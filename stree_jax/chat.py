"""Chat templates: render a conversation as the text that a checkpoint expects."""

import dataclasses
import importlib.metadata
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stree_jax.checkpoint.files import CHAT_TEMPLATES, folder_of, optional_json, read_text
from stree_jax.messages import first_line, needs, shown, shown_path
from stree_jax.special_tokens import special_tokens

_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A template of transformers: a Jinja program that writes a conversation as text.

    Attributes:
        source: the program.
        special_tokens: variables of the program such as `bos_token`, and the text of each.
    """

    source: str
    special_tokens: Mapping[str, str]

    def render(self, messages: Sequence[Mapping[str, Any]] | Any, /, **variables: Any) -> str:
        """Renders a conversation, up to where the assistant's next message begins.

        Rendered as transformers renders it: in a sandbox, with the filter `tojson`, the functions
        `raise_exception` and `strftime_now`, and the block `generation`. Templates are programs of
        strangers: `stree_jax.sandbox` limits what they may use up.

        Args:
            messages: such as `[{"role": "user", "content": "Hello"}]`.
            **variables: more variables of the program, such as `tools`, or `enable_thinking`.

        Raises:
            ValueError: messages or variables are no JSON; the template refuses them, is damaged, or
                does too much; or jinja2 is not installed.
        """
        sandbox = _sandbox()
        given = sandbox.Given()
        values = {"tools": None, "documents": None, "add_generation_prompt": True} | variables
        values["messages"] = _checked(messages)
        for name, value in values.items():
            try:
                values[name] = given.copy(value)
            except ValueError as error:
                where = "a message" if name == "messages" else f"chat[{shown(name)}]"
                raise ValueError(f"{where} {error}") from None
        try:
            return sandbox.render(self.source, self.special_tokens, values, given)
        except Exception as error:  # a stranger's program raises what it likes
            kind = type(error)
            named = "" if kind.__module__.startswith("jinja2") else f"{kind.__name__}: "
            raise ValueError(
                f"the chat template cannot write these messages: {named}{first_line(error)}"
            ) from None


def load_chat_template(
    directory: str | os.PathLike[str], name: str | None = None, *, tools: bool = False
) -> ChatTemplate:
    """The chat template of a checkpoint.

    Args:
        directory: the checkpoint, with files `CHAT_TEMPLATES` or templates in
            `tokenizer_config.json`.
        name: which one, if there are several. None: as transformers, "tool_use" if `tools` are
            given and there is one, else "default"; files come before the config.
        tools: whether tools are given.

    Raises:
        ValueError: there is none, or a file is damaged.
    """
    folder = folder_of(Path(directory))
    config = folder / "tokenizer_config.json"
    templates = _in_config(config, optional_json(config).get("chat_template"))
    files = {
        "default" if pattern == CHAT_TEMPLATES[0] else file.name.removesuffix(".jinja"): file
        for pattern in CHAT_TEMPLATES
        for file in sorted(folder.glob(pattern))
    }
    if name is None:
        name = "tool_use" if tools and "tool_use" in (files or templates) else "default"
    if name in files:
        return ChatTemplate(read_text(files[name]), special_tokens(folder))
    if name not in templates:
        names = sorted(templates | files)
        known = f" named {shown(name)}; there are {shown(names)}" if names else ""
        raise ValueError(f"{shown_path(folder)} has no chat template{known}; pass a text instead")
    return ChatTemplate(templates[name], special_tokens(folder))


def _in_config(file: Path, given: Any) -> dict[str, str]:
    """The templates in a tokenizer's config: a text, a list of names and texts, or a table."""
    parts = {"default": given} if isinstance(given, str) else {} if given is None else given
    if isinstance(parts, list) and all(isinstance(part, dict) for part in parts):
        pairs = [(part.get("name"), part.get("template")) for part in parts]
    else:
        pairs = [*parts.items()] if isinstance(parts, dict) else [(None, None)]
    if not all(isinstance(name, str) and isinstance(text, str) for name, text in pairs):
        raise ValueError(
            f"{shown_path(file)} is damaged: chat_template must be a text, or a list of"
            f' {{"name": ..., "template": ...}}, got {shown(given)}'
        )
    return dict(pairs)


def checked_variables(chat: Any) -> dict[str, Any]:
    """The variables that a user gives to a template, by name.

    Raises:
        ValueError: they are no table of names.
    """
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
    """The messages without None, and with the names of reasoning that templates know."""
    way_out = 'messages are such as [{"role": "user", "content": "Hello"}]'
    if not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"{way_out}, got {shown(messages)}")
    found = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"{way_out}, got {shown(message)} among them")
        kept = {name: value for name, value in message.items() if value is not None}
        for reasoning in [kept[name] for name in _REASONING if name in kept][:1]:
            kept = {"thinking": reasoning} | kept | {"reasoning_content": reasoning}
        found.append(kept)
    return found


def _sandbox() -> Any:
    try:
        import jinja2.ext
        import jinja2.sandbox  # noqa: F401
    except ImportError:
        raise ValueError(needs("a chat template", "jinja2", "chat")) from None
    version = importlib.metadata.version("jinja2")
    if tuple(map(int, re.findall("[0-9]+", version)[:3])) < (3, 1, 6):
        raise ValueError(
            f"chat templates need jinja2 3.1.6, whose sandbox has no known holes, not {version}:"
            " pip install -U jinja2"
        )
    from stree_jax import sandbox

    return sandbox
