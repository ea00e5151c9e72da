"""Chat templates: rendered as by transformers, and where they are found."""

import collections
import enum
import importlib.metadata
import json
import os
import re
import types

import numpy as np
import pytest

import stree_jax as st
from stree_jax import chat
from stree_jax.chat import ChatTemplate, checked_variables, load_chat_template, special_tokens
from tests.cases.chat_templates import ALIKE, MISTAKES
from tests.helpers import refusal

USER = [{"role": "user", "content": "Hello"}]
MESSAGES = [
    {"role": "system", "content": "  Be brief. ", "name": None},
    {"role": "user", "content": "Hello,\nwhat is 1 < 2?"},
    {"role": "assistant", "content": "<true> é", "thinking": "Hm."},
    {"role": "user", "content": [{"type": "text", "text": "And now?"}], "size": (1, 2.5)},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"é": ["<&>", None]}}}]
SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}


@pytest.mark.parametrize("source", ALIKE)
def test_templates_are_rendered_as_by_transformers(source):
    pytest.importorskip("transformers")
    from transformers.utils import chat_template_utils as peer

    variables = dict(tools=TOOLS, thinking=True, names={1: "one"}, add_generation_prompt=True)
    messages = [{k: v for k, v in message.items() if v is not None} for message in MESSAGES]
    wanted, _ = peer.render_jinja_template([messages], chat_template=source, **SPECIAL, **variables)
    assert ChatTemplate(source, SPECIAL).render(MESSAGES, **variables) == wanted[0]


def outcome(call):
    """What a call returns, or its refusal, in one line."""
    try:
        return call()
    except ValueError as error:
        refusal = error
    assert type(refusal) is ValueError
    assert str(refusal).isprintable()
    return str(refusal)


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


class Word(enum.StrEnum):
    A = "a"


CYCLE: list = []
CYCLE += [CYCLE, CYCLE]
PLAIN = [
    (True, "True"),
    (np.float32(0.5), "0.5"),
    (np.int64(3), "3"),
    (np.str_("a"), "a"),
    (Word.A, "a"),
    (float("nan"), "nan"),
    ((1, [2]), "(1, [2])"),
    (types.MappingProxyType({"a": 1}), "{'a': 1}"),
    (collections.OrderedDict(a=1), "{'a': 1}"),
    (collections.namedtuple("Pair", "a b")(1, 2), "(1, 2)"),
    (deep(90), str(deep(90))),
]
NO_JSON = {
    "it holds b'a'; use texts, numbers, lists and tables": b"a",
    "it holds <built-in function len>": len,
    r"it holds array([[0., 0., 0.],\n": np.zeros((3, 3)),
    "maximum recursion": deep(100_000),
    "recursion depth": CYCLE,
}
MISTAKEN = "the chat template cannot write these messages: "
# What is rendered, with which messages and variables, and why it is not.
REFUSED = [
    *((source, USER, {}, MISTAKEN, message) for source, message in MISTAKES.items()),
    *(
        ("{{ x }}", messages, variables, f"{where} is no JSON: ", message)
        for message, value in NO_JSON.items()
        for messages, variables, where in (
            (USER, {"x": value}, "chat['x']"),
            ([{"role": "user", "content": [value]}], {}, "a message"),
        )
    ),
    *(
        ("", messages, {}, 'messages are such as [{"role": "user", "content": "Hello"}], ', message)
        for messages, message in (
            *(([], "got []"), (USER[0], "got {'role': 'user', 'content': 'Hello'}")),
            *((b"abc", "got 97 among them"), (iter(USER), "got <")),
            *(([*USER, "Hello"], "got 'Hello' among them"), ([{"role": b"user"}], "among them")),
        )
    ),
]


@pytest.mark.parametrize(
    ("source", "messages", "variables", "begin", "message"), REFUSED, ids=range(len(REFUSED))
)
def test_what_is_refused(source, messages, variables, begin, message):
    found = outcome(lambda: ChatTemplate(source, {}).render(messages, **variables))
    assert found.startswith(begin)
    assert message in found


def test_variables():
    for wrong, message in (
        *((5, "got 5"), ({1: 2}, "got {1: 2}"), ({"messages": []}, "they are the prompt")),
    ):
        assert message in outcome(lambda wrong=wrong: checked_variables(wrong))
    assert checked_variables(None) == {}
    variables = checked_variables(types.MappingProxyType({"self": 1, "a b": 2, "x": 3}))
    assert ChatTemplate("{{ x }}", {}).render(USER, **variables) == "3"


@pytest.mark.parametrize(("value", "text"), PLAIN)
def test_values_that_are_given(value, text):
    """As variables and in messages: copies of JSON's types, whatever they were."""
    template = ChatTemplate("{{ x }}{{ messages[0].x }}", {})
    assert template.render([{"role": "user", "x": value}], x=value) == text * 2


def write(folder, files):
    """Writes JSON, texts and bytes by name; None makes a directory."""
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        if content is None:
            file.mkdir()
        elif isinstance(content, bytes):
            file.write_bytes(content)
        else:
            file.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


CONFIG = "tokenizer_config.json"
SEVERAL = {"chat_template": [{"name": name, "template": name} for name in ("default", "tool_use")]}


@pytest.mark.parametrize(
    ("files", "plain", "with_tools"),
    [
        ({CONFIG: {"chat_template": "a"}}, "a", "a"),
        ({CONFIG: {"chat_template": ""}}, "", ""),
        ({CONFIG: SEVERAL}, "default", "tool_use"),
        ({CONFIG: {"chat_template": {"default": "a", "tool_use": "b"}}}, "a", "b"),
        ({CONFIG: {"chat_template": [{"name": "default", "template": t} for t in "ab"]}}, "b", "b"),
        ({"chat_template.jinja": "a"}, "a", "a"),
        ({CONFIG: SEVERAL, "additional_chat_templates/tool_use.jinja": "b"}, "default", "b"),
        (
            {
                "chat_template.jinja": "a",
                "chat_templates/tool_use.jinja": "b",
                "additional_chat_templates/tool_use.jinja": "c",
                "additional_chat_templates/default.jinja": "d",
                "additional_chat_templates/readme.txt": "e",
            },
            "d",
            "c",
        ),
    ],
)
def test_where_templates_are(files, plain, with_tools, tmp_path):
    """In the config, one or several; in files, which come first."""
    write(tmp_path, files)
    assert load_chat_template(tmp_path).source == plain
    assert load_chat_template(tmp_path, tools=True).source == with_tools


def test_templates_of_other_names(tmp_path):
    files = {"additional_chat_templates/rag.jinja": "rag"}
    write(tmp_path, {CONFIG: {"chat_template": []}} | files)
    refusal(
        re.escape("named 'default'; there are ['rag']"), load_chat_template, tmp_path, tools=True
    )
    (tmp_path / "additional_chat_templates/rag.jinja").unlink()
    refusal("has no chat template; pass a text", load_chat_template, tmp_path)


@pytest.mark.parametrize("saved", ["config", "files"])
def test_the_template_with_tools_is_that_of_transformers(saved, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    peer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    peer.chat_template = {"default": "without", "tool_use": "with {{ tools|length }}"}
    peer.save_pretrained(tmp_path, save_jinja_files=saved == "files")
    assert (tmp_path / "additional_chat_templates").exists() == (saved == "files")
    for tools in (None, [], TOOLS):
        wanted = peer.apply_chat_template(USER, tools=tools, tokenize=False)
        template = load_chat_template(tmp_path, tools=tools is not None)
        assert template.render(USER, tools=tools) == wanted


# What stands for a template.
NO_TEMPLATES = [
    *(5, False, ["a"], [["default", "a"]], [{"template": "a"}], [{"name": "default"}]),
    *([{"name": [], "template": "a"}], {"default": {"a": "b"}}, {"default": 1}),
]
NO_TOKENS = (5, [], {}, {"content": {"content": "a"}})
DAMAGED = {
    **{f"template {json.dumps(each)}": {CONFIG: {"chat_template": each}} for each in NO_TEMPLATES},
    **{f"token {each}": {CONFIG: SEVERAL | {"bos_token": each}} for each in NO_TOKENS},
    "token in the map": {CONFIG: SEVERAL, "special_tokens_map.json": {"eos_token": [5]}},
    "no object": {CONFIG: [1]},
    "no JSON": {CONFIG: "{"},
    "no UTF-8": {CONFIG: b"\xff"},
    "large": {CONFIG: b" " * (17 << 20)},
    "a directory": {CONFIG: None},
    "a template without UTF-8": {"chat_template.jinja": b"\xff"},
    "a template that is a pipe": {"chat_template.jinja": os.mkfifo},
    "a large template": {"chat_template.jinja": b" " * (17 << 20)},
}


@pytest.mark.parametrize("files", DAMAGED.values(), ids=DAMAGED)
def test_damaged_files(files, tmp_path):
    for name in [name for name, content in files.items() if content is os.mkfifo]:
        os.mkfifo(tmp_path / name)
        files = {}
    write(tmp_path, files)
    found = outcome(lambda: load_chat_template(tmp_path).source)
    assert str(tmp_path) in found
    assert re.search(" is damaged: | is a directory; a file | is no regular file; a file ", found)


@pytest.mark.parametrize(
    ("config", "older", "found"),
    [
        ({"bos_token": "a", "eos_token": {"content": "b"}}, {}, dict(bos_token="a", eos_token="b")),
        ({"bos_token": None, "add_bos_token": True, "mask_token": "m"}, {}, {"mask_token": "m"}),
        ({"image_token": "i", "other_token": 5}, {}, {"image_token": "i"}),
        ({"extra_special_tokens": {"audio_token": "a", "x": "y"}}, {}, {"audio_token": "a"}),
        ({"extra_special_tokens": ["a"], "additional_special_tokens": [5]}, {}, {}),
        ({"eos_token": "a"}, *[{"eos_token": "b", "unk_token": "c"}] * 2),
        ({"eos_token": "a", "added_tokens_decoder": {}}, {"eos_token": "b"}, {"eos_token": "a"}),
    ],
)
def test_special_tokens(config, older, found, tmp_path):
    write(tmp_path, {CONFIG: config, "special_tokens_map.json": older})
    assert special_tokens(tmp_path) == found


def test_an_old_jinja2(monkeypatch):
    chat._sandbox.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.1.5")
    refused = outcome(lambda: ChatTemplate("", {}).render(USER))
    assert refused.startswith("chat templates need jinja2 3.1.6")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.2.dev1")
    assert ChatTemplate("a", {}).render(USER) == "a"
