"""The installed command, in a process of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.cli.cache import MAX_BYTES
from stree_jax.cli.main import main
from stree_jax.cli.trees import parse_tree

COMMAND = [str(Path(sys.executable).with_name("stree-jax"))]


@pytest.fixture(autouse=True, scope="module")
def _cache_of_the_tests(tmp_path_factory):
    """Commands share compiled programs, but not with the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STREE_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def run_here(monkeypatch, *arguments):
    """The command in this process, and its exit code."""
    monkeypatch.setattr(sys, "argv", ["stree-jax", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    return exit_.value.code or 0


@pytest.fixture
def output(monkeypatch, capsys):
    """What a command prints that runs in this process, which has imported all and is faster."""

    def output(*arguments):
        assert run_here(monkeypatch, *arguments) == 0
        return capsys.readouterr().out

    return output


def run(*arguments, **options):
    return subprocess.run(
        [*COMMAND, *(a if isinstance(a, bytes) else str(a) for a in arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        **options,
    )


@pytest.mark.parametrize(
    ("spec", "tree"),
    [
        ("chain:4", st.TreeTopology.chain(4)),
        ("complete:2,3", st.TreeTopology.complete(2, 3)),
        ("beam:3,4", st.TreeTopology.beam(3, 4)),
        ("budget:32,6", st.TreeTopology.budget(32, 6)),
        ("branching:3,2,1", st.TreeTopology.from_branching((3, 2, 1))),
        ("parents:-1,0,0", st.TreeTopology.from_parents([-1, 0, 0])),
        ("paper:B", st.TreeTopology.paper("B")),
    ],
)
def test_tree_specifications(spec, tree):
    assert parse_tree(spec) == tree


@pytest.mark.parametrize(
    "spec", ["", "chain", "chain:x", "chain:1,2", "complete:2", "oak:3", "paper:Z"]
)
def test_malformed_tree_specifications_are_refused(spec):
    with pytest.raises(ValueError, match=r"is not a tree: use chain:4|the paper's trees are"):
        parse_tree(spec)


def test_help_and_tree():
    result = run("--help")
    assert result.returncode == 0
    for command in ("demo", "generate", "convert", "inspect", "train", "distill", "tree"):
        assert command in result.stdout
    assert f"up to {MAX_BYTES // 2**20} MiB. STREE_JAX_CACHE" in " ".join(result.stdout.split())
    drawing = run("tree", "paper:A").stdout
    assert "13 nodes, depth 4, width 3" in drawing
    assert drawing.startswith("0\n├─ 1\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tree", "oak"], "'oak' is not a tree"),
        (["generate", "nowhere", "-p", "x"], "no checkpoint at nowhere"),
        (["generate", "{target}"], "give either --prompt TEXT, or --prompts FILE.jsonl"),
        (["generate", "{target}", "-p", "x", "--prompts", "x"], "give either --prompt TEXT"),
        (["generate", "{target}", "--prompts", "x"], "--prompts and --output come together"),
        (["generate", "{target}", "--prompts", "x", "--output", "y"], "--prompts x cannot be read"),
        (["generate", "{target}", "--prompts", "x", "--output", "y", "--lossy"], "for a --prompt"),
        (["generate", "{target}", "-p", "x", "--top-p", "much"], "Invalid value for '--top-p'"),
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
        (["generate", "{target}", "-p", "x", "--draft", "{draft}", "--ngram"], "choose one"),
        (["generate", "{target}", "-p", "x", "--medusa", "x", "--ngram"], "choose one"),
        (
            ["generate", "{target}", "-p", "x", "--ngram", "--tree", "budget:8,3"],
            "only a draft model chooses the shape",
        ),
        (["generate", "{target}", "-p", "x", "--medusa", "{draft}"], "has no Medusa heads"),
        (["medusa", "nowhere.toml", "{target}", "out"], "cannot read the recipe nowhere.toml"),
        (["generate", "{target}", "-p", "x", "--dtype", "int8"], "float32 or bfloat16, got 'int8'"),
        (["generate", "{target}", "-p", "x", "--temperature", "-1"], "temperature must be"),
        (["generate", "{target}", "-p", "x", "--tree", "chain:2"], "needs a drafter"),
        (["generate", "{target}", "-p", "x", "--sharpness", "2"], "give --tree budget:16,5 and"),
        (["generate", "{target}", "-p", "x", "--max-new-tokens", "0"], "max_new_tokens must be"),
        (
            ["generate", "{target}", "-p", "x", "--max-new-tokens", f"{10**12}"],
            "the limit is 16777216",
        ),
        (
            ["generate", "{target}", "-p", "x", "--seed", f"{2**64}"],
            "--seed must be from 0 to",
        ),
        (["generate", "{target}", "-p", b"caf\xe9"], "--prompt is not UTF-8"),
        (["generate", "{target}", "-p", "x", "--mesh", "data=x"], "is not a mesh: use data=2"),
        (["generate", "{target}", "-p", "x", "--mesh", "model=9999"], "is 9999 devices, and there"),
        (["generate", "{target}", "-p", "x", "--distributed"], "--distributed goes with --mesh"),
        (
            ["generate", "{target}", "--prompts", "x", "--output", "y", "--mesh", "auto"],
            "--mesh is for a --prompt",
        ),
        (["tree", "chain:4000"], "a tree of 4001 nodes and depth 4000 is too deep to draw"),
    ],
)
def test_errors_are_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    """In this process: a new one takes seconds to import jax."""
    paths = {"target": st.demo_path("target"), "draft": st.demo_path("draft")}
    arguments = [os.fsdecode(a) if isinstance(a, bytes) else a.format(**paths) for a in arguments]
    monkeypatch.setattr(sys, "argv", ["stree-jax", *arguments])
    monkeypatch.setenv("STREE_JAX_CACHE", "off")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    _assert_one_line(capsys.readouterr().err, message)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_installed_command_is_one_line(tmp_path):
    result = run("generate", "nowhere", "-p", "x", cwd=tmp_path)
    assert result.returncode == 2
    _assert_one_line(result.stderr, "no checkpoint at nowhere")


def _assert_one_line(text, message):
    assert text.startswith("stree-jax: error: ")
    assert message in text
    assert len(text.splitlines()) == 1


def test_a_tokenizer_that_cannot_encode_is_one_line(tmp_path):
    """It loads, but has no token for an unknown word."""
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    result = run("generate", st.demo_path("target"), "-p", "b", "--tokenizer", tmp_path)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"stree-jax: error: the tokenizer of {tmp_path} cannot encode --prompt:")


@pytest.mark.parametrize("library", ["numpy", "jaxlib"])
def test_ctrl_c_during_imports_is_quiet(library):
    command = [*COMMAND, "tree", "chain:2"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen(command, **pipes) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        while library not in maps.read_text() and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=60)
    assert process.returncode == 130
    assert output == (b"", b"")


def test_generate_streams_the_text_of_generate(output):
    target, tokenizer = (
        st.from_pretrained(st.demo_path("target")),
        st.load_tokenizer(st.demo_path("target")),
    )
    prompt = "Question: Tom has 3 apples"
    want = st.generate(
        target,
        [tokenizer.encode(prompt).ids],
        max_new_tokens=24,
        eos_token=target.config.eos_token,
    )
    text = tokenizer.decode(want.tokens[0, : want.lengths[0]].tolist())
    common = ["generate", st.demo_path("target"), "-p", prompt, "--max-new-tokens", 24]
    plain = run(*common)
    assert plain.returncode == 0
    assert plain.stdout.startswith(prompt + text)
    count = int(want.lengths[0])
    assert re.search(rf"{count} tokens, {count} target calls, .* tau 1\.00", plain.stdout)
    drafted = output(*common, "--draft", st.demo_path("draft"), "--tree", "branching:2,1")
    assert drafted.startswith(prompt + text)
    assert "tau 1.00" not in drafted
    assert output(*common, "--ngram").startswith(prompt + text)


def records(path):
    return {record["line"]: record for record in map(json.loads, path.read_text().splitlines())}


def test_a_file_of_prompts(tmp_path, monkeypatch, capsys):
    """Bad lines are named and stop nothing; an interrupted run goes on; the texts are the same."""
    monkeypatch.chdir(tmp_path)
    lines = [
        {"prompt": "Question: Tom has 3 apples"},
        {"prompt": "The", "max_new_tokens": 3, "other": "keys stay unread"},
        '{"prompt": ',
        {"prompt": ""},
        {"prompt": "She", "temperature": 0.0},
        {"text": "x"},
        {"prompt": "long", "max_new_tokens": 10**9},
        {"prompt": "He", "seed": 5},
        {"prompt": "He", "top_p": 7.0},
    ]
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    Path("in.jsonl").write_text("\n".join([*texts, "", ""]))
    target = st.demo_path("target")
    common = ["generate", target, "--prompts", "in.jsonl", "--rows", 2, "--max-new-tokens", 7]
    common += ["--temperature", 0.8, "--output"]
    assert run_here(monkeypatch, *common, "out.jsonl") == 1
    shown = capsys.readouterr().out
    for number, message in (
        (3, "not JSON"),
        (4, "the prompt is empty"),
        (6, 'not an object with a "prompt"'),
        (7, "in all 1000000001, and the limit is"),
        (9, "top_p must be in"),
    ):
        assert f"in.jsonl, line {number}: " in shown
        assert message in shown
    assert "4 texts of " in shown
    assert "5 lines could not be used" in shown
    done = records(tmp_path / "out.jsonl")
    assert sorted(done) == [1, 2, 5, 8]
    assert done[2]["num_tokens"] == 3

    # A text is that of `generate` with the line's key.
    model, tokenizer = st.from_pretrained(target), st.load_tokenizer(target)
    key = jax.random.fold_in(jax.random.key(0), 1)[None]
    tokens = tokenizer.encode(lines[0]["prompt"]).ids
    out = st.generate(model, [tokens], max_new_tokens=7, temperature=0.8, key=key)
    assert done[1]["text"] == tokenizer.decode(out.tokens[0, : out.lengths[0]].tolist())

    # Cut amid a line, as by a kill: the run goes on with what is missing.
    whole = (tmp_path / "out.jsonl").read_text()
    Path("out.jsonl").write_text(whole[: whole.index("\n") + 30])
    assert run_here(monkeypatch, *common, "out.jsonl") == 1
    assert "3 texts of " in (shown := capsys.readouterr().out)
    assert "1 were there before" in shown
    assert records(tmp_path / "out.jsonl") == done

    # Neither another file nor a run with other options is appended to.
    for arguments, message in (
        ([*common, "out.jsonl", "--seed", 1], "was made with other options"),
        ([*common, "in.jsonl"], "line 1 is no output of this command"),
        ([*common, "nowhere/out.jsonl"], "the folder nowhere does not exist"),
        ([*common, "out.jsonl", "--top-k", -1], "top_k must be an integer, at least 0"),
    ):
        assert run_here(monkeypatch, *arguments) == 2
        _assert_one_line(capsys.readouterr().err, message)
    Path("in.jsonl").write_text(json.dumps({"prompt": "another"}) + "\n")
    assert run_here(monkeypatch, *common, "out.jsonl") == 2
    _assert_one_line(capsys.readouterr().err, "has another prompt for line")
    assert records(tmp_path / "out.jsonl") == done


def test_text_is_printed_as_it_is():
    """No wrapping, markup, emoji codes or tab expansion."""
    prompt = "\ta[:100:] = [bold]x[/bold]  # " + "long " * 30
    result = run("generate", st.demo_path("target"), "-p", prompt, "--max-new-tokens", 1)
    assert result.stdout.startswith(prompt)


def test_convert_and_inspect(tmp_path, monkeypatch, output):
    """A round trip through the Hugging Face format preserves all tensors."""
    monkeypatch.chdir(tmp_path)
    assert "wrote hf (hf)" in output("convert", st.demo_path("target"), "hf", "--to", "hf")
    shown = output("convert", "hf", "native")
    for text in (
        "transformers bamba",
        "1 attention, 4 mamba2, 5 mlp",
        "stored as",
        "bfloat16",
        "ignored",
    ):
        assert text in shown
    assert (tmp_path / "native" / "tokenizer.json").is_file()
    have, want = st.from_pretrained(tmp_path / "native"), st.from_pretrained(st.demo_path("target"))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(have), nnx.state(want))
    for path, family in (("native", "stree-jax (native)"), ("hf", "transformers bamba")):
        shown = output("inspect", path, "--tensors")
        assert family in shown
        assert "blocks.8.mixer.A_log" in shown
        assert "can be loaded and converted" in shown


def test_sampling_depends_on_the_seed_alone(output):
    common = ["generate", st.demo_path("target"), "-p", "The", "--max-new-tokens", 16]
    common += ["--temperature", 1, "--top-p", 0.9]
    first, other = (output(*common, "--seed", seed) for seed in (1, 2))
    drafted = output(*common, "--seed", 1, "--draft", st.demo_path("draft"))
    assert "16 tokens, 16 target calls" not in drafted
    # Without the summary line, whose speed varies.
    text = [out.rsplit("16 tokens, ", 1)[0] for out in (first, other, drafted)]
    assert text[0] == text[2] != text[1]


def test_demo():
    result = run("demo", "--max-new-tokens", 24)
    assert result.returncode == 0, result.stderr
    line = json.loads(result.stdout.splitlines()[-1])
    report, best = line["demo"], line["best"]
    tuned = parse_tree(f"@{st.demo_path('target').with_name('tree.json')}")
    names = [] if tuned is None else [f"tuned tree of {tuned.num_nodes}"]
    assert list(report) == ["autoregressive", "chain of 4", "tree of 13", *names]
    assert all(method["identical"] for method in report.values())
    taus = [method["tau"] for method in report.values()]
    assert taus[0] == 1 < taus[1] < taus[2]
    assert best["speed_up"] == report[best["method"]]["speed_up"]
    assert best["speed_up"] == max(method["speed_up"] for method in report.values())
    assert "next token" in result.stdout


def test_train(tmp_path):
    """Progress bar and checkpoint only; tests/training tests training itself."""
    rng = np.random.default_rng(0)
    (tmp_path / "text.txt").write_text(" ".join(rng.choice(["cat", "dog", "sun"], size=3000)))
    (tmp_path / "recipe.toml").write_text(
        "vocab_size = 260\n[model]\nd_model = 16\nnum_layers = 1\nhead_dim = 8\nstate_size = 8\n"
        "[training]\nsteps = 2\nbatch_size = 1\nsequence_length = 8\nsave_every = 1\n"
        "[[text]]\npath = 'text.txt'\n"
    )
    result = run("train", "recipe.toml", "model", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "2/2" in result.stdout
    assert "step 1 of 2: loss" in result.stdout  # not a terminal
    card = (tmp_path / "model" / "README.md").read_text()
    assert "Command: `stree-jax train recipe.toml model`" in card

    recipe = (tmp_path / "recipe.toml").read_text()
    start = recipe.index("[training]")
    (tmp_path / "heads.toml").write_text("[model]\nnum_heads = 2\n" + recipe[start:])
    result = run("medusa", "heads.toml", "model", "heads", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "2/2" in result.stdout
    heads = st.load_medusa(tmp_path / "heads", st.from_pretrained(tmp_path / "model"))
    assert heads.num_heads == 2
    common = ["generate", "model", "-p", "cat dog", "--max-new-tokens", 5]
    plain = run(*common, cwd=tmp_path)
    drafted = run(*common, "--medusa", "heads", "--tree", "branching:2,1", cwd=tmp_path)
    assert plain.stdout.splitlines()[0] == drafted.stdout.splitlines()[0], drafted.stderr
