"""Chat templates: as transformers renders them, and those of strangers who mean harm."""

import collections
import enum
import functools
import importlib.metadata
import json
import os
import random
import re
import time
import types

import numpy as np
import pytest

import stree_jax as st
from stree_jax import sandbox
from stree_jax.chat import ChatTemplate, checked_variables, load_chat_template, special_tokens
from tests.cases import random_chats
from tests.cases.chat_templates import ALIKE, HARMLESS, MISTAKES, REFUSED

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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # while transformers' are compiled
@pytest.mark.parametrize("seed", range(4))
def test_random_templates_are_rendered_as_by_transformers(seed):
    """The same text, or an error in both, but for limits and for slices of constant numbers."""
    peer = pytest.importorskip("transformers.utils.chat_template_utils")
    rng, counts = random.Random(seed), collections.Counter()
    for _ in range(1500):
        source, messages = random_chats.template(rng), random_chats.conversation(rng)
        given = {"names": {1: "one"}, "x": random_chats.json_value(rng), "tools": TOOLS}
        try:
            (wanted,), _ = peer.render_jinja_template(
                [messages], chat_template=source, add_generation_prompt=True, **SPECIAL, **given
            )
        except Exception:  # of any type
            wanted = None
        try:
            found, refusal = ChatTemplate(source, SPECIAL).render(messages, **given), ""
        except ValueError as error:
            found, refusal = None, str(error)
        is_known = wanted is None or re.search(
            "it (may )?(makes?|writes)|is not subscriptable|'slice'", refusal
        )
        assert is_known or found is not None, (source, messages, given, refusal)
        assert found in (None, wanted), (source, messages, given)
        counts[wanted is not None, found is not None] += 1
    assert counts[True, True] > 300
    assert counts[True, False] < 15


def outcome(call):
    """What a call returns, or its refusal, in one line."""
    try:
        return call()
    except ValueError as error:
        refusal = error
    assert type(refusal) is ValueError
    assert str(refusal).isprintable()
    return str(refusal)


@pytest.mark.parametrize(
    ("source", "message"), [(each, why) for why, all_ in REFUSED.items() for each in all_]
)
def test_what_templates_use_up_has_limits(source, message, monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 0.2)
    if message != "runs for more than":
        monkeypatch.setattr(sandbox, "SECONDS", 30.0)
    if message == "on its way":
        monkeypatch.setattr(sandbox, "MADE", 3_000_000)
    start = time.monotonic()
    found = outcome(lambda: ChatTemplate(source, {}).render(USER))
    assert found.startswith("the chat template cannot write these messages: it ")
    assert message in found
    assert time.monotonic() - start < 10.0


@pytest.mark.parametrize(("source", "text"), HARMLESS.items())
def test_harmless_templates(source, text):
    assert ChatTemplate(source, {}).render(USER) == text


@pytest.mark.parametrize(("source", "message"), MISTAKES.items())
def test_mistakes_of_templates(source, message):
    found = outcome(lambda: ChatTemplate(source, {}).render(USER))
    assert found.startswith("the chat template cannot write these messages: ")
    assert message in found


def test_limits_grow_with_what_is_given():
    """A long conversation is rendered, in lists, lines and pieces; so is a long tool."""
    messages = [{"role": "user", "content": f"word {i}\n" * 200} for i in range(300)]
    text = "".join(message["content"] for message in messages)
    assert len(text) > 4 * sandbox.TEXT
    for source in (
        "{% for message in messages %}{{ message.content }}{% endfor %}",
        "{% for message in messages %}{{ message.content.split('\n')|join('\n') }}{% endfor %}",
        "{{ messages|map(attribute='content')|join|indent(0)|replace('x', 'y') }}",
        "{{ [messages, 1, messages][0]|map(attribute='content')|join }}",
        "{% macro m(all) %}{{ all|join(attribute='content') }}{% endmacro %}{{ m(messages) }}",
    ):
        assert ChatTemplate(source, {}).render(messages) == text
    tools = [{"description": text * 2}]
    found = ChatTemplate("{{ tools|tojson(indent=4) }}", {}).render(USER, tools=tools)
    assert json.loads(found) == tools
    refused = outcome(
        lambda: ChatTemplate("{{ messages[0].content * 20000 }}", {}).render(messages)
    )
    assert "it makes a text or a list of more than" in refused


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
    (np.bool_(False), "False"),
    (np.int64(3), "3"),
    (np.str_("a"), "a"),
    (Word.A, "a"),
    (float("nan"), "nan"),
    ((1, [2]), "(1, [2])"),
    ({1: None, None: 2.0}, "{1: None, None: 2.0}"),
    (types.MappingProxyType({"a": 1}), "{'a': 1}"),
    (collections.OrderedDict(a=1), "{'a': 1}"),
    (collections.namedtuple("Pair", "a b")(1, 2), "(1, 2)"),
    (deep(90), str(deep(90))),
]
NO_JSON = [
    (b"a", "holds b'a', which is no JSON"),
    ({1}, "holds {1}, which is no JSON"),
    (frozenset(), "no JSON"),
    (object(), "no JSON"),
    (len, "no JSON"),
    (1j, "no JSON"),
    (range(3), "no JSON"),
    (iter([]), "no JSON"),
    (np.zeros((3, 3)), r"holds array([[0., 0., 0.],\n"),
    (np.datetime64("2020-01-01"), "no JSON"),
    (np.longdouble(1), "more than 100 deep"),
    ({(1, (2, 3)): 1}, "more than 100 deep"),
    ({frozenset(): 1}, "no JSON"),
    (deep(200), "holds lists in lists, more than 100 deep"),
    (deep(100_000), "more than 100 deep"),
    (CYCLE, "more than 100 deep"),
    ({"a": {"b": CYCLE}}, "more than 100 deep"),
    (types.SimpleNamespace(a=1), "no JSON"),
]
NO_TEXT = [
    ("\ud800", "surrogates not allowed"),
    (["\ud800"], "['\\ud800']"),
    (10**5000, "more than 15000 bits"),
    ("x" * 10_000, "x" * 10_000),
]


@pytest.mark.parametrize(("value", "text"), PLAIN)
def test_values_that_are_given(value, text):
    """As variables and in messages: copies of JSON's types, whatever they were."""
    template = ChatTemplate("{{ x }}{{ messages[0].x }}", {})
    assert template.render([{"role": "user", "x": value}], x=value) == text * 2
    if isinstance(value, list | dict):
        template.render([{"role": "user", "x": value}], x=value)


@pytest.mark.parametrize(("value", "message"), NO_JSON)
def test_values_that_are_no_json(value, message):
    template = ChatTemplate("{{ x }}", {})
    assert message in outcome(lambda: template.render(USER, x=value))
    found = outcome(lambda: template.render([{"role": "user", "content": [value]}]))
    assert found.startswith("a message holds ")
    assert message in found
    assert outcome(lambda: template.render(USER, tools=[value])).startswith("chat['tools'] holds")


def test_too_many_values(monkeypatch):
    """A list that is twice in another counts twice."""
    monkeypatch.setattr(sandbox, "VALUES", 1000)
    for value in ([0] * 1001, functools.reduce(lambda part, _: [part, part], range(50), 0)):
        refused = outcome(lambda value=value: ChatTemplate("", {}).render(USER, x=value))
        assert refused == "chat['x'] holds more than 1000 values"


@pytest.mark.parametrize(("value", "text"), NO_TEXT, ids=range(len(NO_TEXT)))
def test_values_that_are_no_text(value, text):
    assert text in outcome(lambda: ChatTemplate("{{ x }}", {}).render(USER, x=value))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages are such as"),
        (5, "got 5"),
        (USER[0], "got {'role': 'user', 'content': 'Hello'}"),
        (b"abc", "got 97 among them"),
        (iter(USER), "messages are such as"),
        ([*USER, "Hello"], "got 'Hello' among them"),
        ([{}], "got {} among them"),
        ([{"role": b"user"}], "among them"),
        ([{"role": "user", "x": deep(5000)}], "more than 100 deep"),
    ],
)
def test_bad_messages(messages, message):
    assert message in outcome(lambda: ChatTemplate("", {}).render(messages))


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (5, "got 5"),
        ("tools", "got 'tools'"),
        ({1: 2}, "got {1: 2}"),
        ([("tools", [])], "got [('tools', [])]"),
        ({"messages": []}, "they are the prompt"),
    ],
)
def test_bad_variables(chat, message):
    assert message in outcome(lambda: checked_variables(chat))


def test_names_of_variables():
    assert checked_variables(None) == {}
    variables = checked_variables(types.MappingProxyType({"self": 1, "a b": 2, "x": 3}))
    assert ChatTemplate("{{ x }}", {}).render(USER, **variables) == "3"


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
        ({CONFIG: SEVERAL, "chat_template.jinja": "a"}, "a", "a"),
        ({CONFIG: SEVERAL, "additional_chat_templates/tool_use.jinja": "b"}, "default", "b"),
        (
            {"chat_template.jinja": "a", "additional_chat_templates/tool_use.jinja": "b"},
            "a",
            "b",
        ),
        ({"chat_template.jinja": "a", "chat_templates/tool_use.jinja": "b"}, "a", "b"),
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


def test_templates_by_name(tmp_path):
    write(tmp_path, {CONFIG: SEVERAL, "additional_chat_templates/rag.jinja": "rag"})
    assert load_chat_template(tmp_path, "tool_use").source == "tool_use"
    assert load_chat_template(tmp_path, "rag", tools=True).source == "rag"
    with pytest.raises(ValueError, match=re.escape("there are ['default', 'rag', 'tool_use']")):
        load_chat_template(tmp_path, "other")
    (tmp_path / CONFIG).unlink()
    with pytest.raises(ValueError, match=re.escape("named 'default'; there are ['rag']")):
        load_chat_template(tmp_path, tools=True)


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
    *(5, True, False, 0, ["a"], [None], [["default", "a"]], [{"template": "a"}]),
    *([{"name": "default"}], [{}], [{"name": None, "template": "a"}]),
    *([{"name": [], "template": "a"}], [{"name": "default", "template": None}]),
    *([{"name": "default", "template": []}], {"default": {"a": "b"}}, {"default": 1}),
    *({"name": "default", "template": 5}, [{"name": "default", "template": "a"}, 5]),
]
DAMAGED = {
    **{f"template {json.dumps(each)}": {CONFIG: {"chat_template": each}} for each in NO_TEMPLATES},
    "no object": {CONFIG: [1]},
    "a text": {CONFIG: '"a"'},
    "no JSON": {CONFIG: "{"},
    "empty": {CONFIG: ""},
    "no UTF-8": {CONFIG: b"\xff"},
    "UTF-16": {CONFIG: '{"chat_template": "a"}'.encode("utf-16")},
    "deep": {CONFIG: '{"a": ' * 100_000},
    "rather deep": {CONFIG: {"a": deep(50)}},
    "large": {CONFIG: b" " * (17 << 20)},
    "a directory": {CONFIG: None},
    "a pipe": {CONFIG: os.mkfifo},
    "a template without UTF-8": {"chat_template.jinja": b"\xff"},
    "a template in UTF-16": {"chat_template.jinja": "a".encode("utf-16")},
    "a template that is a directory": {"chat_template.jinja": None},
    "a template that is a pipe": {"chat_template.jinja": os.mkfifo},
    "a large template": {"chat_template.jinja": b" " * (17 << 20)},
    "no UTF-8 beside": {"additional_chat_templates/default.jinja": b"\xff"},
    "a directory beside": {"additional_chat_templates/default.jinja": None},
    "special tokens without an object": {CONFIG: SEVERAL, "special_tokens_map.json": [1]},
    "special tokens without UTF-8": {CONFIG: SEVERAL, "special_tokens_map.json": b"\xff"},
    **{
        f"bos_token of {json.dumps(token)[:20]}": {CONFIG: SEVERAL | {"bos_token": token}}
        for token in (5, True, 1.5, [], ["a"], {}, {"content": None}, {"content": {"content": "a"}})
    },
    "eos_token in the map": {CONFIG: SEVERAL, "special_tokens_map.json": {"eos_token": [5]}},
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


@pytest.mark.parametrize("value", [None, [], {}])
def test_no_template(value, tmp_path):
    write(tmp_path, {CONFIG: {"chat_template": value}})
    assert "has no chat template; pass a text" in outcome(lambda: load_chat_template(tmp_path))


@pytest.mark.parametrize(
    ("config", "older", "found"),
    [
        (
            {"bos_token": "a", "eos_token": {"content": "b"}},
            {},
            {"bos_token": "a", "eos_token": "b"},
        ),
        ({"bos_token": None, "add_bos_token": True, "mask_token": "m"}, {}, {"mask_token": "m"}),
        ({"image_token": "i", "other_token": 5}, {}, {"image_token": "i"}),
        ({"extra_special_tokens": {"audio_token": "a", "x": "y"}}, {}, {"audio_token": "a"}),
        ({"extra_special_tokens": ["a"], "additional_special_tokens": [5]}, {}, {}),
        (
            {"eos_token": "a"},
            {"eos_token": "b", "unk_token": "c"},
            {"eos_token": "b", "unk_token": "c"},
        ),
        ({"eos_token": "a", "added_tokens_decoder": {}}, {"eos_token": "b"}, {"eos_token": "a"}),
    ],
)
def test_special_tokens(config, older, found, tmp_path):
    write(tmp_path, {CONFIG: config, "special_tokens_map.json": older})
    assert special_tokens(tmp_path) == found


def test_large_special_tokens():
    refused = outcome(
        lambda: ChatTemplate("{{ bos_token }}", {"bos_token": "x" * 200_000}).render(USER)
    )
    assert "it makes a text or a list of more than" in refused


@pytest.mark.parametrize("version", ["3.1.5", "3.0", "2.11.3"])
def test_an_old_jinja2(version, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    refused = outcome(lambda: ChatTemplate("", {}).render(USER))
    assert refused.startswith("chat templates need jinja2 3.1.6")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.2.dev1")
    assert ChatTemplate("a", {}).render(USER) == "a"
