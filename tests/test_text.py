"""`complete`: text in, text out."""

import json
import os
import re
import shutil
import sys

import jax
import pytest

import stree_jax as st
from stree_jax import chat, text
from stree_jax.chat import ChatTemplate
from stree_jax.convert import convert
from stree_jax.testing import perturbed
from tests.helpers import refusal, saved_model

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' +"
    " message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
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
    saved_model(folder, tokenizer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": {"content": "<|im_end|>", "__type": "AddedToken", "special": True},
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


SAMPLED = dict(max_new_tokens=6, temperature=1.0, key=jax.random.key(3))


def generated(folder, prompt, **options):
    """The tokens of `generate`, and the tokenizer."""
    tokenizer = st.load_tokenizer(folder)
    tokens = tokenizer.encode(prompt).ids
    out = st.generate(st.from_pretrained(folder), [tokens], **options)
    return out.tokens[0, : out.lengths[0]].tolist(), tokenizer


def test_a_text(folder, tmp_path, monkeypatch):
    """That of `generate` with the same options; with any drafter; each is loaded once."""
    tokens, tokenizer = generated(folder, "Once upon", **SAMPLED)
    found = st.complete(folder, "Once upon", **SAMPLED)
    assert found == tokenizer.decode(tokens)
    loaded = []
    monkeypatch.setattr(
        text, "from_pretrained", lambda *a, **k: loaded.append(a) or st.from_pretrained(*a, **k)
    )
    copy = shutil.copytree(folder, tmp_path / "model")
    for _ in range(2):
        assert st.complete(copy, "Once upon", drafter=copy, **SAMPLED) == found
    assert len(loaded) == 2  # a target in float32, a draft in bfloat16
    cut = st.complete(folder, "Once upon", stop=[[tokens[3]]], **SAMPLED)
    assert cut == tokenizer.decode(tokens[: tokens.index(tokens[3])])
    model = st.from_pretrained(folder)
    for tokenizer in (folder, st.load_tokenizer(folder)):
        assert st.complete(model, "Once upon", tokenizer=tokenizer, **SAMPLED) == found


@pytest.mark.parametrize(("to", "weights"), [("native", "params"), ("hf", "model.safetensors")])
def test_weights_that_were_replaced_are_loaded(folder, tmp_path, to, weights):
    """Beside the same config.json, and with the same time."""
    other, options = tmp_path / "other", dict(max_new_tokens=6)
    st.save_pretrained(perturbed(st.from_pretrained(folder), 0.5), other)
    texts = {}
    for name, source in (("model", folder), ("new", other)):
        convert(source, tmp_path / name, to=to)
        (tmp_path / name / "checksums.json").unlink(missing_ok=True)
        texts[name] = st.complete(tmp_path / name, "Once", tokenizer=folder, **options)
    old, new = (tmp_path / name / weights for name in ("model", "new"))
    os.utime(new, ns=(old.stat().st_mtime_ns,) * 2)
    old.rename(tmp_path / "gone")
    new.rename(old)
    assert texts["model"] != texts["new"]
    assert st.complete(tmp_path / "model", "Once", tokenizer=folder, **options) == texts["new"]


def test_a_conversation(folder):
    """The template's text is encoded, and the end token of the tokenizer ends the answer."""
    written = ChatTemplate(CHATML, {}).render(MESSAGES)
    tokens, tokenizer = generated(folder, written, **SAMPLED)
    assert st.complete(folder, MESSAGES, **SAMPLED) == tokenizer.decode(tokens)
    end = tokens[2]
    assert st.complete(folder, MESSAGES, eos_token=end, **SAMPLED) == tokenizer.decode(
        tokens[: tokens.index(end)]
    )


def test_refusals(folder, monkeypatch):
    model, demo = st.from_pretrained(folder), st.demo_path("target")
    calls = [
        (lambda: st.complete(model, "x"), "a model has no tokenizer: pass tokenizer=..."),
        (lambda: st.complete(folder, ""), "prompt is empty"),
        (lambda: st.complete(model, MESSAGES, tokenizer=demo), "has no chat template"),
        (lambda: st.complete(folder, MESSAGES, chat={"messages": []}), "they are the prompt"),
    ]
    for call, message in calls:
        refusal(re.escape(message), call)
    chat._sandbox.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setitem(sys.modules, "jinja2.ext", None)
    with pytest.raises(
        ValueError, match=re.escape("needs jinja2; in the clone: pip install '.[chat]'")
    ):
        chat.ChatTemplate("", {}).render(MESSAGES)


def test_the_tokenizer_of_transformers(folder):
    """Its template writes the conversation, and with tools it is another one."""
    transformers = pytest.importorskip("transformers")
    peer = transformers.AutoTokenizer.from_pretrained(folder)
    model = st.from_pretrained(folder)
    assert st.complete(model, MESSAGES, tokenizer=peer, max_new_tokens=4) == st.complete(
        folder, MESSAGES, max_new_tokens=4
    )
    peer.chat_template = {
        "default": "{{ raise_exception(bos_token) }}",
        "tool_use": "{{ raise_exception(eos_token ~ tools|length) }}",
    }
    refusal(
        re.escape("write these messages: <|endoftext|>"),
        st.complete,
        model,
        MESSAGES,
        tokenizer=peer,
    )
    refusal(
        re.escape("cannot write these messages: <|im_end|>1"),
        st.complete,
        model,
        MESSAGES,
        tokenizer=peer,
        chat={"tools": TOOLS},
    )
