"""Where texts begin and end: one answer for `complete`, the command and its files of prompts."""

import json
import math
import shutil

import jax
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

import stree_jax as st
from stree_jax.special_tokens import end_tokens
from stree_jax.testing import random_model

PROMPT = "Question: Ann has"
IN_PIECES = "Once upon"  # in whole pieces of `sentencepiece`, without bytes
OPTIONS = dict(max_new_tokens=12)


def saved(folder, tokenizer):
    """A checkpoint with a tokenizer, whose texts go anywhere."""
    config = st.ModelConfig.tiny(vocab_size=tokenizer.get_vocab_size(), num_layers=1)
    st.save_pretrained(random_model(config), folder, tokenizer=tokenizer)
    return folder


def sentencepiece():
    """A tokenizer as those of Llama: a space before a text, characters as bytes, <s> and </s>."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in "é日".encode()), "▁"]
    words += ["Once", "▁upon", "▁a", "▁time", *"Onceuptim", "日", "本"]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(
        tmp_path_factory.mktemp("ends") / "model", st.load_tokenizer(st.demo_path("target"))
    )


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "model")


def completed(folder, prompt=PROMPT, **options):
    return st.complete(folder, prompt, **(OPTIONS | options))


def arguments(folder):
    return ["generate", folder, "--max-new-tokens", OPTIONS["max_new_tokens"]]


def an_end(folder):
    """A token that ends the text early, if it is an end token."""
    loaded, tokens = st.from_pretrained(folder), st.load_tokenizer(folder).encode(PROMPT).ids
    new = st.generate(loaded, [tokens], eos_token=(), **OPTIONS).tokens[0].tolist()
    return next(token for i, token in enumerate(new) if i > 1 and token not in new[:i])


SOURCES = {
    "generation_config": lambda end, word: {"generation_config.json": {"eos_token_id": end}},
    "a list": lambda end, word: {"generation_config.json": {"eos_token_id": [1, end]}},
    "the tokenizer": lambda end, word: {"tokenizer_config.json": {"eos_token": word}},
    "the tokenizer's object": lambda end, word: {
        "tokenizer_config.json": {"eos_token": {"content": word, "__type": "AddedToken"}}
    },
    "an older file": lambda end, word: {"special_tokens_map.json": {"eos_token": word}},
}


@pytest.mark.parametrize("source", SOURCES)
def test_all_ways_to_a_text_end_at_the_same_token(source, copy, output, tmp_path):
    """The command ran on where `complete` stopped."""
    end, tokenizer = an_end(copy), st.load_tokenizer(copy)
    everything = completed(copy)
    for name, content in SOURCES[source](end, tokenizer.id_to_token(end)).items():
        (copy / name).write_text(json.dumps(content))
    text = completed(copy)
    assert everything.startswith(text)
    assert text != everything
    # By path or not, and as the library's own programs load it.
    model = st.from_pretrained(copy)
    assert end in np.ravel(model.config.eos_token)
    tokens = tokenizer.encode(PROMPT).ids
    out = st.generate(model, [tokens], **OPTIONS)
    assert out.finish_reasons == ["end_token"]
    assert tokenizer.decode(out.tokens[0, : out.lengths[0] - 1].tolist()) == text
    # A native copy keeps it, without the files.
    st.save_pretrained(model, tmp_path / "native")
    assert end in np.ravel(st.from_pretrained(tmp_path / "native").config.eos_token)
    # The command, and a file.
    shown = output(*arguments(copy), "-p", PROMPT)
    assert shown.startswith(f"{PROMPT}{text}\n")
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": PROMPT}))
    record = json.loads(output(*arguments(copy), "--prompts", tmp_path / "in.jsonl"))
    assert record["text"] == text
    assert record["finish_reason"] == "end_token"


def test_eos_token(folder, copy, output, tmp_path):
    """Ids or texts of tokens, in place of the checkpoint's own."""
    end, tokenizer = an_end(folder), st.load_tokenizer(folder)
    word = tokenizer.id_to_token(end)
    text = completed(folder, eos_token=end)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    other = 1
    for given in (end, [end], word, [word, other], [str(word)], np.array([end, other])):
        assert completed(folder, eos_token=given) == text
    assert completed(copy, eos_token=other) == completed(folder)
    for given in ([end], [word], [other, end]):
        named = [part for each in given for part in ("--eos-token", each)]
        shown = output(*arguments(folder), "-p", PROMPT, *named)
        assert shown.startswith(f"{PROMPT}{text}\n")
    lines = [end, word, [word, other], None]
    lines = [{"prompt": PROMPT, "eos_token": each} for each in lines]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    shown = output(*arguments(folder), "--prompts", tmp_path / "in.jsonl")
    records = {record["line"]: record for record in map(json.loads, shown.splitlines())}
    texts = [records[line]["text"] for line in range(1, 5)]
    assert texts == [text, text, text, completed(folder)]
    for given in ("<|nothing|>", ["<|nothing|>"]):
        with pytest.raises(ValueError, match=r"eos_token = '<\|nothing\|>' is no token of"):
            completed(folder, eos_token=given)
    for given in (-1, 4096, 10**30, True, 1.5, math.nan):
        with pytest.raises(ValueError, match="eos_token must be an integer, from 0 to 4095"):
            completed(folder, eos_token=given)


def test_end_tokens_of_a_grammar_end_its_rows(folder, output):
    """What ends a text by grammar is what ends it at all."""
    model, tokenizer = st.from_pretrained(folder), st.load_tokenizer(folder)
    tokens = tokenizer.encode(PROMPT).ids
    assert model.config.eos_token is None or 0 not in np.ravel(model.config.eos_token)
    grammar = st.regex("(yes|no)", tokenizer, eos_token=7)
    out = st.generate(model, [tokens], processors=[grammar], max_new_tokens=12)
    assert out.finish_reasons == ["end_token"]
    assert out.tokens[0, out.lengths[0] - 1] == 7
    shown = output(*arguments(folder), "-p", PROMPT, "--regex", "(yes|no)", "--eos-token", 7)
    assert shown.removeprefix(PROMPT).splitlines()[0] in ("yes", "no")
    with pytest.raises(ValueError, match="eos_token"):
        st.generate(model, [tokens], processors=[grammar], eos_token=[8], max_new_tokens=12)


@pytest.mark.parametrize("given", [math.nan, 10**30, True, "a", 1.5, {"a": 1}, [[1]], [None]])
def test_damaged_end_tokens(copy, given):
    """NaN and 10^30 passed in silence."""
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    for use in (st.from_pretrained, completed):
        with pytest.raises(ValueError, match=r"eos_token(_id)? must be"):
            use(copy)


def test_end_tokens_outside_of_the_model_never_come(copy):
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 5, 4096]}))
    model = st.from_pretrained(copy)
    own = [] if model.config.eos_token is None else np.ravel(model.config.eos_token).tolist()
    assert 5 in own
    assert not {-1, 4096} & set(own)
    assert end_tokens(model.config, None, None) == own


def test_a_special_token_is_a_stop(folder, copy, output, tmp_path):
    """Special tokens are not text, so a stop of that text could match nothing."""
    end, tokenizer = an_end(folder), st.load_tokenizer(folder)
    word = f"<|{end}|>"
    content = json.loads((copy / "tokenizer.json").read_text())
    old = tokenizer.id_to_token(end)
    content["model"]["vocab"][word] = content["model"]["vocab"].pop(old)
    content["model"]["merges"] = [
        pair for pair in content["model"]["merges"] if old not in (*pair, "".join(pair))
    ]
    content["added_tokens"] += [
        dict(id=end, content=word, special=True)
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ]
    (copy / "tokenizer.json").write_text(json.dumps(content))
    text = completed(folder, eos_token=end)
    assert completed(copy, stop=[word]) == text
    shown = output(*arguments(copy), "-p", PROMPT, "--stop", word)
    assert shown.startswith(f"{PROMPT}{text}\n")
    line = {"prompt": PROMPT, "stop": [word]}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    record = json.loads(output(*arguments(copy), "--prompts", tmp_path / "in.jsonl"))
    assert (record["text"], record["finish_reason"]) == (text, "stop")
    with pytest.raises(ValueError, match="special token"):
        completed(copy, stop=[f"a{word}"])


def test_a_tokenizer_is_loaded_for_whole_texts(folder, copy, output, tmp_path):
    """Truncation and padding are what its last user left there: prompts had 4 tokens."""
    text = "She said that the train leaves at noon from there"
    want = completed(folder, text)
    tokenizer = st.load_tokenizer(folder)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=32)
    tokenizer.save(str(copy / "tokenizer.json"))
    loaded = st.load_tokenizer(copy)
    assert loaded.encode(text).ids == st.load_tokenizer(folder).encode(text).ids
    assert completed(copy, text) == want
    assert completed(st.from_pretrained(copy), text, tokenizer=tokenizer) == want
    assert tokenizer.truncation["max_length"] == 4  # the user's own is as it was
    shown = output(*arguments(copy), "-p", text)
    assert shown.startswith(f"{text}{want}\n")
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": text}))
    record = json.loads(output(*arguments(copy), "--prompts", tmp_path / "in.jsonl"))
    assert record["text"] == want


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = saved(tmp_path_factory.mktemp("llama") / "model", sentencepiece())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def test_the_text_of_sentencepiece(llama, output, tmp_path):
    """Spaces stay, characters of several bytes come once, and streams give the same text."""
    model, tokenizer = st.from_pretrained(llama), st.load_tokenizer(llama)
    tokens = tokenizer.encode(IN_PIECES).ids
    assert tokens[0] == 1
    assert tokens.pop() == 2  # the end of a text that goes on is not there yet
    options = dict(max_new_tokens=40, temperature=4.0)
    command = ["generate", llama, "--max-new-tokens", 40, "--temperature", 4.0]
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": IN_PIECES}) + "\n")
    texts = []
    for seed in range(6):
        key = jax.random.key(seed)
        text = st.complete(llama, IN_PIECES, key=key, **options)
        out = st.generate(model, [tokens], key=key, **options)
        new = out.tokens[0, : out.lengths[0]].tolist()
        # Decoding a prefix and the whole gives what is new, with its first space.
        whole, known = tokenizer.decode(tokens + new), tokenizer.decode(tokens)
        assert whole == known + text
        pieces = st.stream(model, [tokens], tokenizer=tokenizer, key=key, **options)
        pieces = [piece for (piece,) in pieces]
        assert [token for piece in pieces for token in piece] == new
        assert "".join(piece.text for piece in pieces) == tokenizer.decode(new)
        shown = output(*command, "-p", IN_PIECES, "--seed", seed)
        assert shown.startswith(f"{IN_PIECES}{text}\n")
        texts.append(text)
        found = output(*command, "--prompts", tmp_path / "in.jsonl", "--seed", seed)
        text = st.complete(llama, IN_PIECES, key=jax.random.fold_in(key, 1)[None], **options)
        assert json.loads(found)["text"] == text
    assert any(text.startswith(" ") for text in texts)
    assert any(ord(each) > 127 for text in texts for each in text)


def test_the_token_that_begins_a_text(llama, output, tmp_path):
    """The tokenizer's, once; `--no-bos` leaves it out."""
    with_one = st.complete(llama, IN_PIECES, max_new_tokens=8)
    assert st.complete(llama, f"<s>{IN_PIECES}", max_new_tokens=8) == with_one
    tokenizer = st.load_tokenizer(llama)
    without = tokenizer.encode(IN_PIECES, add_special_tokens=False).ids
    model = st.from_pretrained(llama)
    out = st.generate(model, [without], max_new_tokens=8, tokenizer=tokenizer)
    common = ["generate", llama, "--max-new-tokens", 8]
    for flags, text in (([], with_one), (["--bos"], with_one), (["--no-bos"], out.texts[0])):
        shown = output(*common, "-p", IN_PIECES, *flags)
        assert shown.removeprefix(IN_PIECES).splitlines()[0].strip() == text.strip()
    lines = [{"prompt": IN_PIECES}, {"prompt": IN_PIECES, "bos": False}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    shown = output(*common, "--prompts", tmp_path / "in.jsonl")
    records = {record["line"]: record for record in map(json.loads, shown.splitlines())}
    assert records[1]["text"] == with_one
    assert records[2]["text"].strip() == out.texts[0].strip()


def test_files_of_prompts(copy, command, tmp_path):
    """A byte-order mark is no error; lines may be conversations, with variables."""
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ mood }}assistant:"
    )
    (copy / "chat_template.jinja").write_text(template)
    messages = [{"role": "user", "content": "Hello"}]
    lines = [
        {"prompt": PROMPT},
        {"messages": messages},
        {"messages": messages, "chat": {"mood": "glad "}},
        {"messages": messages, "prompt": PROMPT},
        {"messages": [{"content": "no role"}]},
        {"messages": 5},
        {"prompt": 5},
        {"prompt": PROMPT, "n": 1_000_000_000},
        {"prompt": PROMPT, "json_schema": {"maxItems": 10**9, "type": "array"}},
        {"prompt": PROMPT, "eos_token": "<|nothing|>"},
        {"prompt": PROMPT, "bos": 1},
        {"prompt": PROMPT, "chat": {"mood": "glad "}},
    ]
    content = "\r\n".join(map(json.dumps, lines)).encode()
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + content)
    code, shown, errors = command(
        "generate", copy, "--prompts", tmp_path / "in.jsonl", "--max-new-tokens", 6
    )
    assert code == 1
    records = {record["line"]: record["text"] for record in map(json.loads, shown.splitlines())}
    options = dict(max_new_tokens=6)
    assert records == {
        1: st.complete(copy, PROMPT, **options),
        2: st.complete(copy, messages, **options),
        3: st.complete(copy, messages, chat={"mood": "glad "}, **options),
    }
    for number, message in (
        (4, "it has a prompt and messages"),
        (5, "role"),
        (6, "messages"),
        (7, 'not an object with a "prompt"'),
        (8, "n = 1000000000: a batch has at most 65536 rows"),
        (9, "maxItems"),
        (10, "eos_token = '<|nothing|>' is no token"),
        (11, "bos must be true or false, got 1"),
        (12, "chat is for messages, and the prompt is a text"),
    ):
        found = [line for line in errors.splitlines() if f"in.jsonl, line {number}: " in line]
        assert len(found) == 1
        assert message in found[0]


def test_tokens_beyond_the_model_never_come(copy):
    """An added [PAD] made grammars refuse, with a way out that did not exist."""
    tokenizer = st.load_tokenizer(copy)
    tokenizer.add_tokens([AddedToken("[PAD]"), AddedToken("yes!")])
    model = st.from_pretrained(copy)
    assert tokenizer.get_vocab_size() > model.config.vocab_size
    tokens = tokenizer.encode(PROMPT).ids
    options = dict(max_new_tokens=12, eos_token=0, tokenizer=tokenizer)
    for kwargs in ({}, dict(drafter=st.NgramDrafter())):
        grammar = st.regex("yes!{1,3}|no", tokenizer, eos_token=0)
        out = st.generate(model, [tokens], processors=[grammar], **options, **kwargs)
        assert out.texts[0].removesuffix("<|endoftext|>") in ("yes!", "yes!!", "yes!!!", "no")
        assert out.tokens.max() < model.config.vocab_size
    schema = {"enum": ["yes!"]}
    grammar = st.json_schema(schema, tokenizer, eos_token=0)
    out = st.generate(model, [tokens], processors=[grammar], **options)
    assert json.loads(out.texts[0].removesuffix("<|endoftext|>")) == "yes!"
    # Where nothing else is possible, the grammar is refused, with a way out that exists.
    grammar = st.regex("no", tokenizer, eos_token=tokenizer.token_to_id("[PAD]"))
    with pytest.raises(ValueError, match=r"make it with eos_token=..., an end token of the model"):
        st.generate(model, [tokens], processors=[grammar], max_new_tokens=4)
