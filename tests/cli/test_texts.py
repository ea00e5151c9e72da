"""Stops, log-probabilities, several texts and grammars on the command line."""

import io
import json
import re
import sys

import jax
import pytest
from numpy.testing import assert_allclose

import stree_jax as st

PATTERN = "(yes|no) [a-c]{2}"
SCHEMA = {"type": "array", "items": {"enum": [1, "b"]}, "maxItems": 3}


@pytest.fixture(scope="module")
def path(tiny_pair):
    return tiny_pair / "target"


@pytest.fixture(scope="module")
def tokenizer(path):
    return st.load_tokenizer(path)


@pytest.fixture
def expected(path, tokenizer):
    """The result of `generate`, sampled with the seed of the command, or with that of a line."""
    model, prompt = st.from_pretrained(path), tokenizer.encode("Once").ids

    def expected(line=None, **options):
        key = jax.random.key(0)
        key = key if line is None else jax.random.fold_in(key, line)[None]
        options = dict(max_new_tokens=6, temperature=1.0) | options
        return st.generate(model, [prompt], key=key, tokenizer=tokenizer, **options)

    return expected


@pytest.mark.thorough
def test_a_prompt(path, tokenizer, expected, output):
    """Texts, and then their tokens with log-probabilities."""
    want = expected(n=2, log_probs=True)
    common = ["generate", path, "-p", "Once", "--temperature", 1.0, "--max-new-tokens"]
    shown = output(*common, 6, "--n", 2, "--log-probs", "--ngram")
    lines = [json.loads(line) for line in re.findall(r"^\{.*\}$", shown, re.MULTILINE)]
    assert [line["token"] for line in lines] == want.tokens.ravel().tolist()
    assert_allclose([line["log_prob"] for line in lines], want.log_probs.ravel(), 1e-4)
    assert [line["text"] for line in lines] == [tokenizer.decode([x]) for x in want.tokens.ravel()]
    for row in range(2):
        assert f"--- {row + 1} of 2\nOnce{want.texts[row]}\n" in shown
    assert "12 tokens, " in shown

    plain = expected(max_new_tokens=40)
    stop = next(each for each in plain.texts[0] if each.isascii() and each.isalnum())
    cut = expected(max_new_tokens=40, stop=[stop, "\n"]).texts[0]
    assert output(*common, 40, "--stop", stop, "--stop", "\n").startswith(f"Once{cut}\n")
    assert stop not in cut


@pytest.mark.thorough
def test_grammars(path, tmp_path, output):
    """Streamed as other texts are."""
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    common = ["generate", path, "-p", "Once", "--temperature", 1.0, "--draft", path]
    common += ["--tree", "chain:1"]
    shown = output(*common, "--regex", "(yes|no)", "--eos-token", 7)  # ends what has a grammar too
    assert shown.removeprefix("Once").splitlines()[0] in ("yes", "no")
    shown = output(*common, "--json-schema", tmp_path / "schema.json")
    assert set(json.loads(shown.removeprefix("Once").splitlines()[0])) <= {1, "b"}


@pytest.mark.thorough
def test_a_file(path, expected, continued):
    """Each line may have its own; lines with different grammars are decoded together."""
    lines = [
        {},
        {"regex": None, "log_probs": True},
        {"json_schema": SCHEMA, "n": 3},
        {"regex": None, "stop": ["e", [5, 6]]},
        {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 1},
    ]
    options = ["--rows", 3, "--ngram", "--temperature", 1.0, "--max-new-tokens", 24]
    lines = [{"prompt": "Once"} | line for line in lines]
    records, _ = continued(path, lines, *options, "--regex", PATTERN)
    assert sorted(records) == [1, 2, 3, 4, 5]
    assert re.fullmatch(PATTERN, records[1]["text"])
    assert "log_probs" not in records[1]
    want = expected(2, max_new_tokens=24, log_probs=True)
    assert records[2]["tokens"] == want.tokens[0].tolist()
    assert_allclose(records[2]["log_probs"], want.log_probs[0], rtol=1e-4)
    texts = [each["text"] for each in records[3]["texts"]]
    assert len(texts) == 3
    assert all(set(json.loads(text)) <= {1, "b"} for text in texts)
    assert "text" not in records[3]
    want = expected(4, max_new_tokens=24, stop=["e", [5, 6]])
    assert records[4]["text"] == want.texts[0]
    reasons = {line: records[line]["finish_reason"] for line in (1, 2, 4, 5)}
    assert reasons == {1: "end_token", 2: "length", 4: want.finish_reasons[0], 5: "length"}


def test_accepted_drafts_are_shown(tiny_pair, output):
    """In brackets, in the text that is there without them."""
    common = ["generate", tiny_pair / "target", "-p", "The", "--max-new-tokens", 8]
    draft = ["--draft", tiny_pair / "draft", "--tree", "chain:2"]
    plain = output(*common)
    shown = output(*common, *draft, "--show")
    text, counts = shown.split("\n", 1)[1].rsplit("\n8 tokens from ", 1)
    assert "[" in text
    assert "The" + re.sub(r"[\[\]]", "", text) == plain.rsplit("\n", 2)[0]
    accepted = int(re.search(r", (\d+) of them accepted drafts", counts)[1])
    calls = int(re.search(r"8 tokens, (\d+) target calls", counts)[1])
    assert accepted in (8 - calls, 9 - calls)  # the limit may cut the last call at a draft


@pytest.mark.parametrize("more", [[], ["--show"], ["--n", 2]], ids=["streamed", "shown", "two"])
def test_a_character_that_the_terminal_lacks_is_replaced(path, command, monkeypatch, more):
    """As in a file of Latin-1, or an old terminal; the text goes on."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii", write_through=True))
    code, _, error = command("generate", path, "-p", "Zo\u00eb says", "--max-new-tokens", 4, *more)
    assert (code, error) == (0, "")
    assert b"Zo? says" in written.getvalue()
    assert b" tokens, " in written.getvalue().splitlines()[-1]
