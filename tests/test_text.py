"""`complete`, and chat templates against transformers."""

import json
import re
import sys

import jax
import pytest

import stree_jax as st
from stree_jax import chat, text
from stree_jax.chat import ChatTemplate, load_chat_template
from stree_jax.testing import random_model

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' +"
    " message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    # Blank lines and indentation, a namespace, breaks, tools as JSON, special tokens.
    "long": """\
{%- set found = namespace(system="none", count=0) %}
{{- bos_token }}
{% for message in messages %}
    {%- if message.role == "system" %}
        {%- set found.system = message.content | trim %}
        {%- continue %}
    {%- endif %}
    {%- set found.count = found.count + 1 %}
    {% if found.count > 3 %}{% break %}{% endif %}
    [{{ message.role | upper }}] {{ message.content }}{{ eos_token if not loop.last }}
{% endfor %}
{{ found.system }} {{ tools | tojson }} {{ {"é": "<&>"} | tojson(indent=2) }}
""",
    "generation": (
        "{% for message in messages %}{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}{% endgeneration %}"
        "{% else %}{{ message.content }}{% endif %}|{% endfor %}"
    ),
    "date": "{{ strftime_now('%Y') }} {% if thinking is defined %}{{ thinking }}{% endif %}",
}
MESSAGES = [
    {"role": "system", "content": "  Be brief. ", "name": None},
    {"role": "user", "content": "Hello,\nwhat is 1 < 2?"},
    {"role": "assistant", "content": "<true> é"},
    {"role": "user", "content": "And now?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with a tokenizer as transformers saves it."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    config = st.ModelConfig.tiny(vocab_size=tokenizer.get_vocab_size(), num_layers=1)
    model = random_model(config)
    st.save_pretrained(model, folder, tokenizer=tokenizer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": {"content": "<|im_end|>", "__type": "AddedToken", "special": True},
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_rendered_as_by_transformers(name, folder):
    transformers = pytest.importorskip("transformers")
    peer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
    )
    variables = dict(tools=TOOLS, thinking=True)
    wanted = peer.apply_chat_template(
        MESSAGES,
        chat_template=TEMPLATES[name],
        tokenize=False,
        add_generation_prompt=True,
        **variables,
    )
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    assert ChatTemplate(TEMPLATES[name], special).render(MESSAGES, **variables) == wanted


def test_where_templates_are(folder, tmp_path):
    """In the config, one or several; separate files come first."""
    template = load_chat_template(folder)
    assert template.source == CHATML
    assert template.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    several = [{"name": name, "template": name} for name in ("default", "tool_use")]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert load_chat_template(tmp_path).source == "default"
    assert load_chat_template(tmp_path, "tool_use").source == "tool_use"
    (tmp_path / "chat_template.jinja").write_text("of a file")
    (tmp_path / "chat_templates").mkdir()
    (tmp_path / "chat_templates" / "rag.jinja").write_text("rag")
    assert load_chat_template(tmp_path).source == "of a file"
    assert load_chat_template(tmp_path, "rag").source == "rag"
    with pytest.raises(ValueError, match=re.escape("there are ['default', 'rag', 'tool_use']")):
        load_chat_template(tmp_path, "other")


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        ("{{ raise_exception('No system role') }}", MESSAGES, "these messages: No system role"),
        ("{% for %}", MESSAGES, "cannot write these messages"),
        ("{{ ''.__class__.__mro__ }}", MESSAGES, "unsafe"),
        ("{{ messages[0].content.x.y }}", MESSAGES, "has no attribute"),
        ("{{ messages.append(1) }}", MESSAGES, "unsafe"),
        ("", [], "messages are such as"),
        ("", [{"content": "Hello"}], "among them"),
        ("", [{"role": "user", "content": {1, 2}}], "is no JSON"),
    ],
)
def test_bad_templates_and_messages(source, messages, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        ChatTemplate(source, {}).render(messages)
    assert "\n" not in str(error.value)


def generated(folder, prompt, **options):
    """The tokens of `generate`, and the tokenizer."""
    tokenizer = st.load_tokenizer(folder)
    tokens = tokenizer.encode(prompt).ids
    out = st.generate(st.from_pretrained(folder), [tokens], **options)
    return out.tokens[0, : out.lengths[0]].tolist(), tokenizer


def test_a_text(folder):
    """That of `generate` with the same options; with any drafter; loaded once."""
    options = dict(max_new_tokens=6, temperature=1.0, key=jax.random.key(3))
    tokens, tokenizer = generated(folder, "Once upon", **options)
    found = st.complete(folder, "Once upon", **options)
    assert found == tokenizer.decode(tokens)
    text._model.cache_clear()
    assert st.complete(folder, "Once upon", drafter=folder, **options) == found
    assert text._model.cache_info().misses == 1
    cut = st.complete(folder, "Once upon", stop=[[tokens[3]]], **options)
    assert cut == tokenizer.decode(tokens[: tokens.index(tokens[3])])
    model = st.from_pretrained(folder)
    for tokenizer in (folder, st.load_tokenizer(folder)):
        assert st.complete(model, "Once upon", tokenizer=tokenizer, **options) == found


def test_a_conversation(folder):
    """The template's text is encoded, and the end token of the tokenizer ends the answer."""
    options = dict(max_new_tokens=6, temperature=1.0, key=jax.random.key(3))
    written = ChatTemplate(CHATML, {}).render(MESSAGES)
    tokens, tokenizer = generated(folder, written, **options)
    assert st.complete(folder, MESSAGES, **options) == tokenizer.decode(tokens)
    end = tokens[2]
    assert st.complete(folder, MESSAGES, eos_token=end, **options) == tokenizer.decode(
        tokens[: tokens.index(end)]
    )


def test_refusals(folder, monkeypatch):
    model, demo = st.from_pretrained(folder), st.demo_path("target")
    calls = [
        (lambda: st.complete(model, "x"), "a model has no tokenizer: pass tokenizer=..."),
        (lambda: st.complete(folder, ""), "prompt is empty"),
        (lambda: st.complete(folder, []), "messages are such as"),
        (lambda: st.complete(model, MESSAGES, tokenizer=demo), "has no chat template"),
        (
            lambda: st.complete(model, MESSAGES, tokenizer=st.load_tokenizer(folder)),
            "a tokenizer alone has no chat template",
        ),
        (lambda: st.complete(model, "x", tokenizer=5), "tokenizer must be that of"),
        (lambda: st.complete("nowhere", "x"), "no checkpoint at nowhere"),
        (lambda: st.complete(folder, "x", temperature=-1.0), "temperature must be a number"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setitem(sys.modules, "jinja2.ext", None)
    with pytest.raises(ValueError, match=re.escape("pip install 'stree-jax[chat]'")):
        chat.ChatTemplate("", {}).render(MESSAGES)


def test_the_tokenizer_of_transformers(folder):
    transformers = pytest.importorskip("transformers")
    peer = transformers.AutoTokenizer.from_pretrained(folder)
    model = st.from_pretrained(folder)
    assert st.complete(model, MESSAGES, tokenizer=peer, max_new_tokens=4) == st.complete(
        folder, MESSAGES, max_new_tokens=4
    )
