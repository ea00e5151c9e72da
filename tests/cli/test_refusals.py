"""Refusals of the command: one line on stderr, exit code 2, nothing written."""

import os

import pytest

GENERATE = ["generate", "{target}", "-p", "x"]
PROMPTS = ["generate", "{target}", "--prompts", "one.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tree", "oak"], "'oak' is not a tree"),
        (["generate", "nowhere", "-p", "x"], "no checkpoint at nowhere"),
        (["generate", "{target}"], "give either --prompt TEXT or --prompts FILE.jsonl"),
        ([*GENERATE, "--prompts", "x"], "give either --prompt TEXT"),
        ([*GENERATE, "--output", "y"], "--output is for the texts of --prompts"),
        ([*GENERATE, "--rows", "2"], "--rows is for the texts of --prompts"),
        ([*GENERATE, "--max-length", "0"], "max_length must be an integer, at least 1; got 0"),
        ([*PROMPTS, "--max-length", "0"], "max_length must be an integer, at least 1; got 0"),
        ([*PROMPTS, "--rows", "0"], "--rows must be an integer, at least 1; got 0"),
        (["generate", "{target}", "--prompts", "x", "--output", "y"], "--prompts x cannot be read"),
        (["generate", "{target}", "--prompts", "x", "--output", "y", "--lossy"], "for a --prompt"),
        ([*GENERATE, "--min-p", "2"], "error: min_p must be from 0 to 1, got 2.0"),
        ([*GENERATE, "--n", "0"], "error: n must be an integer, at least 1; got 0"),
        ([*GENERATE, "--stop", ""], "error: stop has an empty entry: ['']; leave it out"),
        ([*GENERATE, "--regex", "("], "pattern '(' cannot be used: missing ), unterminated"),
        ([*GENERATE, "--regex", "a{{100000}}"], "repeats a part 100000 times; at most 10000"),
        ([*PROMPTS, "--regex", "("], "pattern '(' cannot be used"),
        ([*GENERATE, "--json-schema", "nowhere"], "--json-schema nowhere cannot be read"),
        ([*GENERATE, "--json-schema", "one.jsonl"], "the schema is not JSON"),
        ([*GENERATE, "--regex", "a", "--json-schema", "one.jsonl"], "a text has one grammar"),
        ([*GENERATE, "--top-p", "much"], "Invalid value for '--top-p'"),
        (["frobnicate"], "No such command 'frobnicate'"),
        (["tree", "complete:2,40"], "at most 4096 are possible"),
        (["inspect", "nowhere"], "no checkpoint at nowhere"),
        (["inspect", "a" * 5000], f"no checkpoint at {'a' * 297}...: File name too long"),
        (["convert", "{draft}", "a" * 5000], f"{'a' * 290}"),
        (["convert", "{target}", "{draft}"], "exists; choose another name"),
        (["convert", "{target}", "out", "--to", "onnx"], "to must be one of"),
        (["convert", "{target}", "out", "--dtype", "int8"], "float32 or bfloat16, got 'int8'"),
        (["train", "nowhere.toml", "out"], "cannot read the recipe nowhere.toml"),
        (["generate", "{target}", "-p", ""], "--prompt is empty"),
        ([*GENERATE, "--draft", "{draft}", "--ngram"], "choose one"),
        ([*GENERATE, "--medusa", "x", "--ngram"], "choose one"),
        ([*GENERATE, "--ngram", "--tree", "budget:8,3"], "only a draft model chooses the shape"),
        ([*GENERATE, "--medusa", "{draft}"], "has no Medusa heads"),
        ([*GENERATE, "--mtp", "--ngram"], "choose one"),
        ([*GENERATE, "--mtp"], "has no multi-token prediction head in a folder mtp"),
        (
            [*GENERATE, "--mtp", "--mesh", "data=1"],
            "--mesh data=1: heads draft on one device; leave",
        ),
        ([*PROMPTS, "--medusa", "x", "--mesh", "auto"], "draft with --draft or --ngram"),
        ([*GENERATE, "--mtp-head", "nowhere"], "no checkpoint at nowhere"),
        ([*GENERATE, "--eagle3", "x", "--mtp-head", "y"], "choose one"),
        ([*GENERATE, "--eagle3", "nowhere"], "no checkpoint at nowhere"),
        ([*GENERATE, "--eagle3", "{draft}"], "is not an EAGLE-3 head"),
        (["medusa", "nowhere.toml", "{target}", "out"], "cannot read the recipe nowhere.toml"),
        ([*GENERATE, "--dtype", "int8"], "float32 or bfloat16, got 'int8'"),
        ([*GENERATE, "--temperature", "-1"], "error: temperature must be a number"),
        ([*GENERATE, "--temperature", "1e-40"], "error: temperature = 1e-40 is 0 in float32"),
        ([*GENERATE, "--tree", "chain:2"], "needs a drafter"),
        ([*GENERATE, "--sharpness", "2"], "give --tree budget:16,5 and"),
        ([*GENERATE, "--max-new-tokens", "0"], "error: max_new_tokens must be"),
        ([*GENERATE, "--max-new-tokens", f"{10**12}"], "the limit is 16777216"),
        (
            [*GENERATE, "--max-new-tokens", "9", "--max-length", "3"],
            "error: prompts[0] has 1 tokens and max_new_tokens = 9: in all 10, and the limit is 3",
        ),
        (
            [*GENERATE, "--verifier", "typical", "--temperature", "1", "--ngram"],
            "distribution; pass lossy=True if you want that",
        ),
        (
            ["convert", "{target}", "out", "--quantize", "int8", "--keep", "foo"],
            "error: keep = 'foo' is none of the matrices",
        ),
        ([*GENERATE, "--seed", f"{2**64}"], "--seed must be an integer, from 0 to"),
        (["generate", "{target}", "-p", b"caf\xe9"], "--prompt is not UTF-8"),
        ([*GENERATE, "--mesh", "data=x"], "is not a mesh: use data=2"),
        (
            [*GENERATE, "--mesh", "model=9999"],
            "XLA_FLAGS=--xla_force_host_platform_device_count=9999 in the",
        ),
        ([*GENERATE, "--distributed"], "--distributed goes with --mesh"),
        (["tree", "chain:4000"], "a tree of 4001 nodes and depth 4000 is too deep to draw"),
        (["tree", ""], "is not a tree: use chain:4"),
        (["tree", "chain"], "is not a tree: use chain:4"),
        (["tree", "chain:x"], "is not a tree: use chain:4"),
        (["tree", "chain:1,2"], "is not a tree: use chain:4"),
        (["tree", "complete:2"], "is not a tree: use chain:4"),
        (["tree", "oak:3"], "is not a tree: use chain:4"),
        (["tree", "paper:Z"], "the paper's trees are"),
        (["tree", "@nowhere.json"], "nowhere.json cannot be read"),
        (["tree", "@one.jsonl"], "one.jsonl is not a tree of tune-tree"),
        (["tune-tree", "{target}"], "give either --draft DRAFT, --ngram, --medusa HEADS, --mtp or"),
        (
            ["tune-tree", "{target}", "--ngram", "--prompts", "nowhere.txt"],
            "--prompts nowhere.txt cannot be read",
        ),
        (
            ["tune-tree", "{target}", "--ngram", "--output", "nowhere/tree.json"],
            "the folder nowhere does not exist",
        ),
        (
            ["tune-tree", "{target}", "--ngram", "--prompts", "one.jsonl"],
            'one.jsonl, line 2: not an object with a "prompt"',
        ),
        (
            ["tune-tree", "{target}", "--ngram", "--max-nodes", "1"],
            "error: max_nodes must be an integer, at least 2; got 1",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_refused(arguments, message, tiny_pair, refused, tmp_path, monkeypatch):
    paths = {name: tiny_pair / name for name in ("target", "draft")}
    arguments = [os.fsdecode(a) if isinstance(a, bytes) else a.format(**paths) for a in arguments]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.jsonl").write_text('{"prompt": "Once"}\n[]\n')
    assert message in refused(*arguments)
    assert [entry.name for entry in tmp_path.iterdir()] == ["one.jsonl"]
