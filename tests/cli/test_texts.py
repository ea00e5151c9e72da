"""Stops, log-probabilities, several texts and grammars on the command line."""

import json
import re

import jax
import numpy as np
import pytest

import stree_jax as st

PATTERN = "(yes|no) [a-c]{2}"
SCHEMA = {"type": "array", "items": {"enum": [1, "b"]}, "maxItems": 3}


@pytest.fixture(scope="module")
def path(tiny_pair):
    return tiny_pair / "target"


@pytest.fixture(scope="module")
def tokenizer(path):
    return st.load_tokenizer(path)


def expected(path, tokenizer, prompt, **options):
    """The result of `generate`, sampled with the seed of the command."""
    key = jax.random.key(0) if "key" not in options else options.pop("key")
    options = dict(max_new_tokens=6, temperature=1.0, key=key, tokenizer=tokenizer) | options
    return st.generate(st.from_pretrained(path), [tokenizer.encode(prompt).ids], **options)


def test_a_prompt(path, tokenizer, output):
    """Texts, and then their tokens with log-probabilities."""
    want = expected(path, tokenizer, "Once", n=2, log_probs=True)
    common = ["generate", path, "-p", "Once", "--max-new-tokens", 6, "--temperature", 1.0]
    shown = output(*common, "--n", 2, "--log-probs", "--ngram")
    lines = [json.loads(line) for line in re.findall(r"^\{.*\}$", shown, re.MULTILINE)]
    assert [line["token"] for line in lines] == want.tokens.ravel().tolist()
    np.testing.assert_allclose([line["log_prob"] for line in lines], want.log_probs.ravel(), 1e-4)
    assert [line["text"] for line in lines] == [tokenizer.decode([x]) for x in want.tokens.ravel()]
    for row in range(2):
        assert f"--- {row + 1} of 2\nOnce{want.texts[row]}\n" in shown
    assert "12 tokens, " in shown

    plain = expected(path, tokenizer, "Once", max_new_tokens=40)
    letter = next(each for each in plain.texts[0] if each.isascii() and each.isalnum())
    stop = plain.texts[0][plain.texts[0].index(letter) :][:1]
    cut = expected(path, tokenizer, "Once", max_new_tokens=40, stop=[stop, "\n"]).texts[0]
    shown = output(*common[:4], "--max-new-tokens", 40, *common[6:], "--stop", stop, "--stop", "\n")
    assert shown.startswith(f"Once{cut}\n")
    assert stop not in cut


def test_grammars(path, tmp_path, output):
    """Streamed as other texts are."""
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    common = ["generate", path, "-p", "Once", "--temperature", 1.0, "--draft", path, "--tree"]
    shown = output(*common, "branching:2,1", "--regex", PATTERN)
    text = shown.removeprefix("Once").splitlines()[0].replace("<|endoftext|>", "")
    assert re.fullmatch(PATTERN, text)
    shown = output(*common, "branching:2,1", "--json-schema", tmp_path / "schema.json")
    assert set(json.loads(shown.removeprefix("Once").splitlines()[0])) <= {1, "b"}


def test_a_file(path, tokenizer, tmp_path, command):
    """Each line may have its own; lines with different grammars are decoded together."""
    lines = [
        {"prompt": "Once"},
        {"prompt": "Once", "regex": None, "log_probs": True},
        {"prompt": "Once", "json_schema": SCHEMA, "n": 3},
        {"prompt": "Once", "regex": "("},
        {"prompt": "Once", "n": 0},
        {"prompt": "Once", "regex": "a", "json_schema": SCHEMA},
        {"prompt": "Once", "regex": None, "stop": ["e", [5, 6]]},
        {"prompt": "Once", "stop": [""]},
        {"prompt": "Once", "json_schema": json.dumps(SCHEMA), "max_new_tokens": 1},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    code, shown, errors = command(
        *("generate", path, "--prompts", tmp_path / "in.jsonl", "--rows", 3, "--ngram"),
        *("--temperature", 1.0, "--max-new-tokens", 24, "--regex", PATTERN),
    )
    assert code == 1
    for number, message in (
        (4, "pattern '(' cannot be used"),
        (5, "n must be an integer, at least 1; got 0"),
        (6, "a text has one grammar"),
        (8, "stop"),
    ):
        assert re.search(f"in.jsonl, line {number}: .*{re.escape(message)}", errors), errors
    records = {record["line"]: record for record in map(json.loads, shown.splitlines())}
    assert sorted(records) == [1, 2, 3, 7, 9]
    assert re.fullmatch(PATTERN, records[1]["text"])
    assert records[1]["finish_reason"] == "end_token"
    assert "log_probs" not in records[1]

    def of_line(number, **options):
        key = jax.random.fold_in(jax.random.key(0), number)[None]
        return expected(path, tokenizer, "Once", key=key, max_new_tokens=24, **options)

    want = of_line(2, log_probs=True)
    assert records[2]["tokens"] == want.tokens[0].tolist()
    np.testing.assert_allclose(records[2]["log_probs"], want.log_probs[0], rtol=1e-4)
    assert records[2]["finish_reason"] == "length"
    texts = [each["text"] for each in records[3]["texts"]]
    assert len(texts) == 3
    assert all(set(json.loads(text)) <= {1, "b"} for text in texts)
    assert "text" not in records[3]
    want = of_line(7, stop=["e", [5, 6]])
    assert records[7]["text"] == want.texts[0]
    assert records[7]["finish_reason"] == want.finish_reasons[0]
    assert records[9]["finish_reason"] == "length"
