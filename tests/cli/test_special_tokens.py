"""Where texts begin and end: one answer for `complete`, the command and its files of prompts."""

import json
import math
import shutil

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

import stree_jax as st
from stree_jax.special_tokens import end_tokens
from tests.helpers import refusal, saved_model, some

PROMPT = "Question: Ann has"
IN_PIECES = "Once upon"  # in whole pieces of `sentencepiece`, without bytes
OPTIONS = dict(max_new_tokens=12)


def sentencepiece():
    """A tokenizer as those of Llama: a space before a text, characters as bytes, <s> and </s>."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in "é日".encode()), "▁"]
    words += ["Once", "▁upon", "▁a", "▁time", *"Onceuptim", "日", "本"]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    space = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(space)
    text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*text, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ends") / "model"
    saved_model(folder, st.load_tokenizer(st.demo_path("target")))
    return folder


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "model")


def completed(folder, prompt=PROMPT, **options):
    return st.complete(folder, prompt, **(OPTIONS | options))


@pytest.fixture
def check(output, continued):
    """Checks the text of the command, with a prompt and with a file; returns why it ended."""

    def check(folder, text, *flags, prompt=PROMPT, **line):
        most = ["--max-new-tokens", OPTIONS["max_new_tokens"]]
        shown = output("generate", folder, "-p", prompt, *most, *flags)
        assert shown.startswith(f"{prompt}{text}\n")
        records, _ = continued(folder, [{"prompt": prompt} | line], *most)
        assert records[1]["text"] == text
        return records[1]["finish_reason"]

    return check


def an_end(folder):
    """A token that ends the text early, if it is an end token."""
    loaded, tokens = st.from_pretrained(folder), st.load_tokenizer(folder).encode(PROMPT).ids
    new = st.generate(loaded, [tokens], eos_token=(), **OPTIONS).tokens[0].tolist()
    return next(token for i, token in enumerate(new) if i > 1 and token not in new[:i])


SOURCES = {
    "generation_config.json": lambda end, word: {"eos_token_id": [1, end]},
    "tokenizer_config.json": lambda end, word: {"eos_token": {"content": word, "special": True}},
}


@pytest.mark.parametrize("source", some(SOURCES, "generation_config.json"))
def test_all_ways_to_a_text_end_at_the_same_token(source, copy, check, tmp_path):
    """The command ran on where `complete` stopped."""
    end, tokenizer = an_end(copy), st.load_tokenizer(copy)
    everything = completed(copy)
    (copy / source).write_text(json.dumps(SOURCES[source](end, tokenizer.id_to_token(end))))
    text = completed(copy)
    assert everything.startswith(text)
    assert text != everything == completed(copy, eos_token=())
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
    assert check(copy, text) == "end_token"


@pytest.mark.thorough
def test_eos_token(folder, copy, check):
    """Ids or texts of tokens, in place of the checkpoint's own."""
    end, other = an_end(folder), 1
    word = st.load_tokenizer(folder).id_to_token(end)
    text = completed(folder, eos_token=end)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    for given in (end, [end], word, [word, other], [str(word)], np.array([end, other])):
        assert completed(folder, eos_token=given) == text
    assert completed(copy, eos_token=other) == completed(folder)
    check(folder, text, "--eos-token", end, eos_token=end)
    check(folder, text, "--eos-token", word, eos_token=word)
    check(folder, text, "--eos-token", other, "--eos-token", end, eos_token=[word, other])
    check(folder, completed(folder), eos_token=None)
    for given in ("<|nothing|>", ["<|nothing|>"]):
        refusal(r"eos_token = '<\|nothing\|>' is no token of", completed, folder, eos_token=given)
    for given in (-1, 4096, 10**30, True, 1.5, math.nan):
        refusal("eos_token must be an integer, from 0 to 4095", completed, folder, eos_token=given)


def test_end_tokens_outside_of_the_model_never_come(copy):
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 5, 4096]}))
    model = st.from_pretrained(copy)
    own = [] if model.config.eos_token is None else np.ravel(model.config.eos_token).tolist()
    assert 5 in own
    assert not {-1, 4096} & set(own)
    assert end_tokens(model.config, None, None) == own


def test_a_tokenizer_is_loaded_for_whole_texts(folder, copy, check):
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
    check(copy, want, prompt=text)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama") / "model"
    saved_model(folder, sentencepiece())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


@pytest.mark.thorough
def test_the_token_that_begins_a_text(llama, output, continued):
    """The tokenizer's, once; `--no-bos` leaves it out."""
    with_one = st.complete(llama, IN_PIECES, max_new_tokens=8)
    assert st.complete(llama, f"<s>{IN_PIECES}", max_new_tokens=8) == with_one
    tokenizer = st.load_tokenizer(llama)
    without = tokenizer.encode(IN_PIECES, add_special_tokens=False).ids
    model = st.from_pretrained(llama)
    out = st.generate(model, [without], max_new_tokens=8, tokenizer=tokenizer)
    most = ["--max-new-tokens", 8]
    for flags, text in (([], with_one), (["--bos"], with_one), (["--no-bos"], out.texts[0])):
        shown = output("generate", llama, "-p", IN_PIECES, *most, *flags)
        assert shown.removeprefix(IN_PIECES).splitlines()[0].strip() == text.strip()
    lines = [{"prompt": IN_PIECES}, {"prompt": IN_PIECES, "bos": False}]
    records, _ = continued(llama, lines, *most)
    assert records[1]["text"] == with_one
    assert records[2]["text"].strip() == out.texts[0].strip()


@pytest.mark.thorough
def test_tokens_beyond_the_model_never_come(copy):
    """An added [PAD] made grammars refuse, with a way out that did not exist."""
    tokenizer = st.load_tokenizer(copy)
    tokenizer.add_tokens([AddedToken("[PAD]"), AddedToken("yes!")])
    model = st.from_pretrained(copy)
    assert tokenizer.get_vocab_size() > model.config.vocab_size
    tokens = tokenizer.encode(PROMPT).ids

    def text(grammar, **options):
        options = dict(max_new_tokens=12, eos_token=0, tokenizer=tokenizer) | options
        out = st.generate(model, [tokens], processors=[grammar], **options)
        assert out.tokens.max() < model.config.vocab_size
        return out.texts[0].removesuffix("<|endoftext|>")

    grammar = st.regex("yes!{1,3}|no", tokenizer, eos_token=0)
    for drafter in (None, st.NgramDrafter()):
        assert text(grammar, drafter=drafter) in ("yes!", "yes!!", "yes!!!", "no")
    # Where nothing else is possible, the grammar is refused, with a way out that exists.
    pad = tokenizer.token_to_id("[PAD]")
    refusal(
        r"make it with eos_token=..., an end token of the model",
        text,
        st.regex("no", tokenizer, eos_token=pad),
        eos_token=None,
    )


@pytest.mark.parametrize("given", [math.nan, 10**30, True, "a", {"a": 1}, [[1]]])
def test_damaged_end_tokens(copy, given):
    """NaN and 10^30 passed in silence."""
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    for use in (st.from_pretrained, completed):
        refusal(r"eos_token(_id)? must be", use, copy)
