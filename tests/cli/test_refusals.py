"""Refusals of the command: one line on stderr, exit code 2, nothing written or compiled."""

import shlex
import sys

import pytest

from stree_jax.measuring import methods

LONG = "a" * 5000
LINES = {  # one that begins with an option is of `generate TARGET`
    "tree oak": "'oak' is not a tree",
    "tree auto": "auto has no shape",
    "generate nowhere -p x": "no checkpoint at nowhere",
    "generate {target}": "give either --prompt TEXT or --prompts FILE.jsonl",
    "-p x --prompts x": "give either --prompt TEXT",
    "-p x --output y": "--output is not for --prompt: its text is written to the terminal",
    "-p x --rows 2": "--rows is not for --prompt: it is one text, or --n",
    "--prompts x --output y": "--prompts x cannot be read",
    "--prompts x --output y --lossy": "--lossy is not for --prompts: its texts are always",
    "--prompts one.jsonl --mesh auto --distributed": "not for --prompts: a file has one process",
    "-p x --min-p 2": "error: min_p must be from 0 to 1, got 2.0",
    "-p x --stop ''": "error: stop has an empty entry: ['']; leave it out",
    "-p x --regex '('": "pattern '(' cannot be used: missing ), unterminated",
    "-p x --json-schema one.jsonl": "the schema is not JSON",
    "-p x --regex a --json-schema one.jsonl": "a text has one grammar",
    "-p x --top-p much": "Invalid value for '--top-p'",
    "frobnicate": "No such command 'frobnicate'",
    "inspect {long}": f"no checkpoint at {LONG[:297]}...: File name too long",
    "convert {target} {draft}": "exists; choose another name",
    "convert {target} out --to onnx": "to must be one of",
    "train nowhere.toml out": "cannot read the recipe nowhere.toml",
    "generate {target} -p ''": "--prompt is empty",
    "-p x --draft {draft} --ngram": "--draft and --ngram each select a drafter; choose one",
    "-p x --ngram --tree budget:8,3": "use one of --draft, --mtp, --eagle3, --dflash, or another",
    "-p x --medusa {draft}": "has no Medusa heads",
    "-p x --mtp": "has no multi-token prediction head in a folder mtp",
    "-p x --mtp --mesh data=1": "--mesh data=1: heads draft on one device; leave",
    "--prompts one.jsonl --medusa x --mesh auto": "draft with --draft or --ngram",
    "-p x --eagle3 {draft}": "is not an EAGLE-3 head",
    "-p x --tree chain:2": "needs a drafter",
    "-p x --tree auto": "topology = 'auto' needs a drafter",
    "-p x --draft ngram": "prompt lookup is --ngram",
    "bench {target} --draft ngram": "prompt lookup is --ngram",
    "-p x --sharpness 2": "give --tree budget:16,5 and",
    "-p x --max-new-tokens 9 --max-length 3": "1 tokens and max_new_tokens = 9: in all 10",
    "-p x --verifier typical --temperature 1 --ngram": "pass lossy=True if you want that",
    "convert {target} out --quantize int8 --keep foo": "keep = 'foo' is none of the matrices",
    "-p x --seed 18446744073709551616": "or a seed from 0 to 2**32 - 1, got 18446744073709551616",
    "generate {target} -p caf\udce9": "--prompt is not UTF-8",
    "-p x --mesh model=9999": "XLA_FLAGS=--xla_force_host_platform_device_count=9999 in the",
    "-p x --distributed": "--distributed goes with --mesh",
    "tree @nowhere.json": "nowhere.json cannot be read",
    "tune-tree {target}": "give one of --ngram, --draft, --medusa, --mtp, --eagle3",
    "tune-tree {target} --ngram --prompts nowhere.txt": "--prompts nowhere.txt cannot be read",
    "tune-tree {target} --ngram --output nowhere/tree.json": "the folder nowhere does not exist",
    "tune-tree {target} --ngram --output .": ". is a folder; name a file",
    "tune-tree {target} --ngram --prompts one.jsonl": 'line 2: not an object with a "prompt"',
    "bench {target} --json nowhere/x.json": "nowhere/x.json: the folder nowhere does not exist",
    "bench {target} --json .": ". is a folder; name a file",
    "bench {target} --plot x.pdf": "x.pdf is not a .png or .svg file",
    "bench {target} --plot x.png": "needs matplotlib; in the clone: pip install '.[bench]'",
    "bench {target} --medusa {medusa} --tree budget:8,2": "only a draft model chooses the shape",
    "bench {target} --medusa {medusa} --mesh data=2": "heads draft on one device",
    "bench {target} --draft {draft} --temperature 1 --verifier greedy": "greedy",
    "bench {target} --draft {draft} --verifier fast": "unknown verifier 'fast'",
    "bench {target} --prompts empty.txt": "--prompts empty.txt has no prompts",
    "-p x --draft-quantize int8": "is for a draft model or heads: give one",
    "-p x --quantize int3": 'quantize must be "int8", "int4", "int4:NAME,NAME" or None, got',
    "convert {target} new --keep head": "goes with quantize: without it all weights stay",
    "generate x --prompts y --show": "--show is not for --prompts: its texts are written as",
    "-p x --chat-template y": "--chat-template is not for --prompt: it is a text, not messages",
    "bench {target} --chat-template y": "--chat-template goes with --prompts",
    "--prompts one.jsonl --chat-template y": "y: there is no such file",
    "tree chain:0": "chain:0 says not to draft",
    "tree @null.json": "null.json says not to draft",
}


@pytest.mark.parametrize("line", LINES)
def test_refused(line, tiny_pair, refused, tmp_path, monkeypatch):
    files = {
        "one.jsonl": '{"prompt": "Once"}\n[]\n',
        "null.json": '{"parents": null}',
        "empty.txt": "",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(methods, "drafting", None)  # the first that `bench` would compile
    paths = {name: tiny_pair / name for name in ("target", "draft", "medusa")}
    words = shlex.split(line.format(**paths, long=LONG))
    given = ["generate", paths["target"], *words] if words[0][0] == "-" else words
    assert LINES[line] in refused(*given)
    assert {entry.name for entry in tmp_path.iterdir()} == {*files}
