"""Chat templates: render a conversation as the text that a checkpoint expects."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from stree_jax.checkpoint import first_line
from stree_jax.files import has_file
from stree_jax.messages import shown, shown_path

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A template of transformers: a Jinja program that writes a conversation as text.

    Attributes:
        source: the program.
        special_tokens: variables of the program such as `bos_token`, and the text of each.
    """

    source: str
    special_tokens: Mapping[str, str]

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Renders a conversation, up to where the assistant's next message begins.

        Rendered as transformers renders it: in a sandbox, with the filter `tojson`, the functions
        `raise_exception` and `strftime_now`, and the block `generation`.

        Args:
            messages: such as `[{"role": "user", "content": "Hello"}]`.
            **variables: more variables of the program, such as `tools`, or `enable_thinking`.

        Raises:
            ValueError: the template refuses the messages, is damaged, or jinja2 is not installed.
        """
        jinja2 = _jinja2()
        values: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True}
        values |= {**self.special_tokens, **variables, "messages": _plain(messages)}
        try:
            return _environment(jinja2).from_string(self.source).render(**values)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise ValueError(
                f"the chat template cannot write these messages: {first_line(error)}"
            ) from None


def load_chat_template(directory: str | os.PathLike[str], name: str = "default") -> ChatTemplate:
    """The chat template of a checkpoint.

    Args:
        directory: the checkpoint, with `chat_template.jinja` or a template in
            `tokenizer_config.json`.
        name: which one, if there are several.

    Raises:
        ValueError: there is none, or a file cannot be read.
    """
    folder = Path(directory)
    config = read_json(folder / "tokenizer_config.json")
    given = config.get("chat_template")
    if isinstance(given, str):
        given = [{"name": "default", "template": given}]
    templates = {each["name"]: each["template"] for each in given or []}
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in (folder / "chat_templates").glob("*.jinja")}
    for each, file in files.items():
        if has_file(file):
            templates[each] = file.read_text(encoding="utf-8")
    if name not in templates:
        known = f" named {shown(name)}; there are {sorted(templates)}" if templates else ""
        raise ValueError(f"{shown_path(folder)} has no chat template{known}; pass a text instead")
    return ChatTemplate(templates[name], special_tokens(folder))


def special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that the files of a tokenizer name."""
    config = read_json(folder / "special_tokens_map.json")
    config |= read_json(folder / "tokenizer_config.json")
    found = {}
    for name in _SPECIAL_TOKENS:
        token = config.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str):
            found[name] = token
    return found


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file; empty without the file.

    Raises:
        ValueError: the file is damaged.
    """
    if not has_file(file):
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{shown_path(file)} is damaged: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{shown_path(file)} is damaged: not an object")
    return content


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as plain JSON values, without None: templates are untrusted programs."""
    way_out = 'messages are such as [{"role": "user", "content": "Hello"}]'
    if not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"{way_out}, got {shown(messages)}")
    found = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"{way_out}, got {shown(message)} among them")
        try:
            found.append(
                json.loads(json.dumps({k: v for k, v in message.items() if v is not None}))
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"the message {shown(message)} is no JSON: {error}") from None
    return found


def _jinja2() -> Any:
    try:
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        raise ValueError("chat templates need jinja2: pip install 'stree-jax[chat]'") from None
    return jinja2


def _environment(jinja2: Any) -> Any:
    """The sandbox that templates run in."""

    class Generation(jinja2.ext.Extension):
        """The block `generation`, around the assistant's text."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, **keywords: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **keywords})

    def strftime_now(how: str) -> str:
        return datetime.now().strftime(how)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment
