"""The `stree-jax` command, most of it in this process: another takes seconds to import jax."""

import json
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
from pallas_kernels import dispatch
from stree_jax.cli.demo import busy, timings_of
from stree_jax.cli.trees import parse_tree
from stree_jax.compilation_cache import MAX_BYTES
from tests.extensions import eagle3_files

COMMAND = [str(Path(sys.executable).with_name("stree-jax"))]


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


def test_the_installed_command(tmp_path):
    """In its own process: help, and an error in one line."""

    def run(*arguments):
        return subprocess.run(
            [*COMMAND, *arguments], capture_output=True, text=True, timeout=300, cwd=tmp_path
        )

    result = run("--help")
    assert result.returncode == 0
    for command in ("demo", "generate", "convert", "inspect", "train", "distill", "tree"):
        assert command in result.stdout
    assert f"up to {MAX_BYTES // 2**20} MiB. STREE_JAX_CACHE" in " ".join(result.stdout.split())
    result = run("generate", "nowhere", "-p", "x")
    assert result.returncode == 2
    assert_one_line(result.stderr, "no checkpoint at nowhere")


def test_a_drawn_tree(output):
    drawing = output("tree", "paper:A")
    assert "13 nodes, depth 4, width 3" in drawing
    assert drawing.startswith("0\n├─ 1\n")
    assert "holds the place" not in drawing
    assert "This shape only holds the place: the draft model chooses" in output(
        "tree", "budget:6,2"
    )


def assert_one_line(text, message):
    assert text.startswith("stree-jax: error: ")
    assert message in text
    assert len(text.splitlines()) == 1


def test_a_tokenizer_that_cannot_encode_is_one_line(tmp_path, tiny_pair, command):
    """It loads, but has no token for an unknown word."""
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    code, _, error = command("generate", tiny_pair / "target", "-p", "b", "--tokenizer", tmp_path)
    assert code == 2
    assert_one_line(error, f"the tokenizer of {tmp_path} cannot encode --prompt:")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
            "is damaged: Precom",
        ),
        (
            {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
            "cannot encode --prompt: chunk size",
        ),
    ],
)
def test_a_panic_of_the_tokenizers_package_is_an_error(tmp_path, tiny_pair, command, part, message):
    """It derives from BaseException, and prints its own message first."""
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model} | part))
    code, _, error = command("generate", tiny_pair / "target", "-p", "a", "--tokenizer", tmp_path)
    assert code == 2
    assert_one_line(error[error.index("stree-jax: error:") :], message)


@pytest.fixture
def _listens_to_ctrl_c():
    """A process inherits that its parent ignores Ctrl-C, as in the background of a script."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_listens_to_ctrl_c")
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


def test_generate_streams_the_text_of_generate(tiny_pair, output, tmp_path):
    path = tiny_pair / "target"
    target, tokenizer = st.from_pretrained(path), st.load_tokenizer(path)
    prompt = "Once"
    want = st.generate(target, [tokenizer.encode(prompt).ids], max_new_tokens=24)
    text = tokenizer.decode(want.tokens[0].tolist())
    common = ["generate", path, "-p", prompt, "--max-new-tokens", 24]
    plain = output(*common)
    assert plain.startswith(prompt + text)
    assert re.search(r"24 tokens, 24 target calls, .* tau 1\.00", plain)
    drafted = output(*common, "--draft", tiny_pair / "draft", "--tree", "branching:2,1")
    assert drafted.startswith(prompt + text)
    assert "tau 1.00" not in drafted
    assert output(*common, "--ngram").startswith(prompt + text)
    head = eagle3_files.saved(tmp_path / "head", vocab=target.config.vocab_size, layers=(1,))
    drafted = output(*common, "--eagle3", head, "--tree", "chain:1")
    assert drafted.startswith(prompt + text)


def records(path):
    return {record["line"]: record for record in map(json.loads, path.read_text().splitlines())}


def test_a_file_of_prompts(tmp_path, tiny_pair, command, monkeypatch):
    """Bad lines are named and stop nothing; an interrupted run resumes with the same texts."""
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
    target = tiny_pair / "target"
    common = ["generate", target, "--prompts", "in.jsonl", "--rows", 2, "--max-new-tokens", 7]
    common += ["--temperature", 0.8, "--output"]
    code, shown, _ = command(*common, "out.jsonl")
    assert code == 1
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

    # Cut within a line, as by a kill: the run resumes with what is missing.
    whole = (tmp_path / "out.jsonl").read_text()
    Path("out.jsonl").write_text(whole[: whole.index("\n") + 30])
    code, shown, _ = command(*common, "out.jsonl")
    assert code == 1
    assert "3 texts of " in shown
    assert "1 were there before" in shown
    assert records(tmp_path / "out.jsonl") == done

    # Neither another file nor a run with other options is appended to.
    for arguments, message in (
        ([*common, "out.jsonl", "--seed", 1], "was made with other options"),
        ([*common, "in.jsonl"], "line 1 is no output of this command"),
        ([*common, "nowhere/out.jsonl"], "the folder nowhere does not exist"),
        ([*common, "out.jsonl", "--top-k", -1], "top_k must be an integer, at least 0"),
    ):
        code, _, error = command(*arguments)
        assert code == 2
        assert_one_line(error, message)
    Path("in.jsonl").write_text(json.dumps({"prompt": "another"}) + "\n")
    code, _, error = command(*common, "out.jsonl")
    assert code == 2
    assert_one_line(error, "has another prompt for line")
    assert records(tmp_path / "out.jsonl") == done


def test_text_is_printed_as_it_is(tiny_pair, output):
    """No wrapping, markup, emoji codes or tab expansion."""
    prompt = "\ta[:100:] = [bold]x[/bold]  # " + "long " * 30
    text = output("generate", tiny_pair / "target", "-p", prompt, "--max-new-tokens", 1)
    assert text.startswith(prompt)


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
        assert f"runs as {dispatch.explain()}\n" in shown


def test_sampling_depends_on_the_seed_alone(tiny_pair, output):
    common = ["generate", tiny_pair / "target", "-p", "The", "--max-new-tokens", 16]
    common += ["--temperature", 1, "--top-p", 0.9]
    first, other = (output(*common, "--seed", seed) for seed in (1, 2))
    drafted = output(*common, "--seed", 1, "--draft", tiny_pair / "draft")
    assert "16 tokens, 16 target calls" not in drafted
    # Without the summary line, whose speed varies.
    text = [out.rsplit("16 tokens, ", 1)[0] for out in (first, other, drafted)]
    assert text[0] == text[2] != text[1]


def check_demo(text, methods):
    line = json.loads(text.splitlines()[-1])
    report, best = line["demo"], line["best"]
    assert list(report) == methods
    assert all(method["identical"] for method in report.values())
    assert best["speed_up"] == report[best["method"]]["speed_up"]
    assert best["speed_up"] == max(method["speed_up"] for method in report.values())
    assert "next token" in text
    assert f"runs as {dispatch.explain()}\n" in text
    return [method["tau"] for method in report.values()]


def test_speeds_and_speed_ups_of_the_demo_agree():
    """Under load the median of ratios is another than the ratio of medians."""
    seconds = np.array([[1.0, 1.1], [3.0, 1.2], [1.6, 2.5]])
    plain, tree = timings_of(seconds, 300)
    assert (plain.speed, plain.speed_up, plain.slowest, plain.fastest) == (187.5, 1, 1, 1)
    assert tree.speed == 250
    assert tree.speed_up == tree.speed / plain.speed
    assert (tree.slowest, tree.fastest) == (1.6 / 2.5, 3.0 / 1.2)
    assert busy(seconds).startswith("This machine is busy: equal rounds took 3.0 times as long")
    assert busy(seconds[:1]) == busy(np.array([[1.0, 2.0], [1.1, 2.2]])) == ""


METHODS = ["autoregressive", "chain of 4", "tree of 13"]


def test_demo_of_a_pair(tiny_pair, output):
    pair = ["--target", tiny_pair / "target", "--draft", tiny_pair / "draft"]
    taus = check_demo(output("demo", "--max-new-tokens", 8, *pair), METHODS)
    assert taus[0] == 1 < taus[1] < taus[2]


@pytest.mark.slow
def test_demo_of_the_embedded_pair(output):
    """Its tuned tree is a chain of 4, which is there anyway."""
    tuned = parse_tree(f"@{st.demo_path('target').with_name('tree.json')}")
    assert tuned == st.TreeTopology.chain(4)
    taus = check_demo(output("demo", "--max-new-tokens", 24), METHODS)
    assert taus[0] == 1 < taus[1] < taus[2]


def test_train(tmp_path, output, monkeypatch):
    """Progress bar and checkpoint only; tests/training tests training itself."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    (tmp_path / "text.txt").write_text(" ".join(rng.choice(["cat", "dog", "sun"], size=3000)))
    (tmp_path / "recipe.toml").write_text(
        "vocab_size = 260\n[model]\nd_model = 16\nnum_layers = 1\nhead_dim = 8\nstate_size = 8\n"
        "[training]\nsteps = 2\nbatch_size = 1\nsequence_length = 8\nsave_every = 1\n"
        "[[text]]\npath = 'text.txt'\n"
    )
    shown = output("train", "recipe.toml", "model")
    assert "2/2" in shown
    assert "step 1 of 2: loss" in shown  # not a terminal
    card = (tmp_path / "model" / "README.md").read_text()
    assert "Command: `stree-jax train recipe.toml model`" in card

    recipe = (tmp_path / "recipe.toml").read_text()
    start = recipe.index("[training]")
    (tmp_path / "heads.toml").write_text("[model]\nnum_heads = 2\n" + recipe[start:])
    assert "2/2" in output("medusa", "heads.toml", "model", "heads")
    heads = st.load_medusa(tmp_path / "heads", st.from_pretrained(tmp_path / "model"))
    assert heads.num_heads == 2
    (tmp_path / "head.toml").write_text(
        "[model]\nsteps = 2\nattention = {num_heads = 2, num_kv_heads = 1, head_dim = 8}\n"
        "moe = {num_experts = 4, num_active = 2, hidden_size = 8, router = 'sigmoid'}\n"
        + recipe[start:]
    )
    assert "2/2" in output("train-mtp", "head.toml", "model", "head")
    common = ["generate", "model", "-p", "cat dog", "--max-new-tokens", 5]
    plain = output(*common)
    for heads in (["--medusa", "heads"], ["--mtp-head", "head"]):
        drafted = output(*common, *heads, "--tree", "branching:2,1")
        assert plain.splitlines()[0] == drafted.splitlines()[0]
