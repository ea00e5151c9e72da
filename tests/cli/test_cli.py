"""The `stree-jax` command, most of it in this process: another takes seconds to import jax."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from pallas_kernels import dispatch
from stree_jax.cli import options
from stree_jax.cli.main import _COMMANDS
from stree_jax.compilation_cache import MAX_BYTES
from stree_jax.decoding.plan import plan
from stree_jax.heads import HEADS, Room
from stree_jax.loading import parse_tree
from stree_jax.testing import tiny_model
from tests.extensions import eagle3_files
from tests.helpers import by_message, disk_is_full, saved_model

thorough = pytest.mark.thorough

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


def test_python_has_the_same_words(tmp_path):
    file = tmp_path / "tree.json"
    file.write_text('{"parents": null, "trees": [[-1, 0], [-1, 0, 1]]}')
    asked = partial(plan, tiny_model(), [[1]], drafter=st.NgramDrafter())
    assert asked(topology="branching:2,1").decoder.topology.parents == (-1, 0, 0, 1, 2)
    assert asked(topology=f"@{file}").drafter is None  # not to draft
    assert [tree.name for tree in asked(topology=f"auto@{file}").trees[1:]] == [
        "chain of 1",
        "chain of 2",
    ]


def test_the_installed_command(tmp_path):
    """In its own process: help, and an error in one line."""

    def run(*arguments):
        return subprocess.run(
            [*COMMAND, *arguments], capture_output=True, text=True, timeout=300, cwd=tmp_path
        )

    result = run("--help")
    assert result.returncode == 0
    for command in ("demo", "bench", "generate", "convert", "inspect", "train", "distill", "tree"):
        assert command in result.stdout
    assert f"up to {MAX_BYTES // 2**20} MiB. STREE_JAX_CACHE" in " ".join(result.stdout.split())
    result = run("generate", "nowhere", "-p", "x")
    assert result.returncode == 2
    assert result.stderr.startswith("stree-jax: error: no checkpoint at nowhere")
    assert len(result.stderr.splitlines()) == 1


def test_the_version_and_flags_without_a_type(output):
    assert output("--version") == f"stree-jax {st.__version__}\n"
    for command in ((), ("generate",)):
        typed = [line for line in output(*command, "--help").splitlines() if "<bool>" in line]
        assert [line.split()[1] for line in typed] == ["--help"]  # typer's own
    assert "<int>" in output("generate", "--help")


@pytest.mark.parametrize("name", [name for name, _ in _COMMANDS.values()])
def test_the_help_of_a_command(name, output):
    """It names no file that an install lacks, and one option for the length of texts."""
    said = output(name, "--help")
    assert not re.search(r"\b(docs|examples|benchmarks)/", said)
    assert ("--max-new-tokens" in said) == (name in ("demo", "bench", "generate", "tune-tree"))


def test_a_drawn_tree(output):
    drawing = output("tree", "paper:A")
    assert "13 nodes, depth 4, width 3" in drawing
    assert drawing.startswith("0\n├─ 1\n")
    assert "holds the place" not in drawing
    assert "This shape only holds the place: the draft model chooses" in output(
        "tree", "budget:6,2"
    )


WORDS = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}  # no token for the unknown
BPE = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
BAD_MAP = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}


@by_message(
    ("tokenizer", "message"),
    [
        ({"model": WORDS}, " cannot encode --prompt:"),
        ({"model": BPE} | BAD_MAP, "/tokenizer.json is damaged: Precom"),
    ],
)
def test_a_tokenizer_that_cannot_encode_is_one_line(
    tmp_path, tiny_pair, command, tokenizer, message
):
    """Panics of the package derive from BaseException, and print their own message first."""
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"} | tokenizer))
    code, _, error = command("generate", tiny_pair / "target", "-p", "b", "--tokenizer", tmp_path)
    assert code == 2
    *_, line = error.splitlines()
    assert line.startswith("stree-jax: error: ")
    assert f"{tmp_path}{message}" in line


@pytest.mark.parametrize(
    ("writer", "files", "line", "named"),
    [
        ("shutil.copyfile", ("old", None, "copy"), "convert {target} {out}", "copy"),
        ("rich.console.Console.print", (), "tree chain:1", "the standard output"),
    ],
)
def test_a_full_disk_is_named(
    writer, files, line, named, tiny_pair, refused, tmp_path, monkeypatch
):
    monkeypatch.setattr(writer, partial(disk_is_full, files=files))
    arguments = line.format(target=tiny_pair / "target", out=tmp_path / "out").split()
    assert f"error: {named}: No space left on device" in refused(*arguments)


def test_wrong_native_code_is_refused_first(refused, monkeypatch):
    monkeypatch.setenv("STREE_JAX_NATIVE", "v9")
    assert "STREE_JAX_NATIVE must be one of ('off', " in refused("generate", "nowhere", "-p", "x")


@pytest.mark.parametrize("module", ["numpy._core._exceptions", "jaxlib._jax", "typer"])
def test_ctrl_c_during_imports_is_quiet(module, tmp_path):
    """The first is imported by numpy's C, where KeyboardInterrupt becomes an ImportError."""
    code = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background ignores it
class Interrupting:
    def find_spec(name, *_):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupting)
"""
    (tmp_path / "sitecustomize.py").write_text(code)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command, environment = [*COMMAND, "tree", "chain:2"], os.environ | {"PYTHONPATH": path}
    result = subprocess.run(command, env=environment, capture_output=True)
    assert (result.returncode, result.stdout, result.stderr) == (130, b"", b"")


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
    drafted = output(*common, "--draft", tiny_pair / "draft", "--tree", "chain:2")
    assert drafted.startswith(prompt + text)
    assert "tau 1.00" not in drafted
    assert output(*common, "--ngram").startswith(prompt + text)
    head = eagle3_files.saved(tmp_path / "head", vocab=target.config.vocab_size, layers=(1,))
    drafted = output(*common, "--eagle3", head, "--tree", "chain:1")
    assert drafted.startswith(prompt + text)


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


@thorough
def test_sampling_depends_on_the_seed_alone(tiny_pair, output):
    common = ["generate", tiny_pair / "target", "-p", "The", "--max-new-tokens", 16]
    common += ["--temperature", 1, "--top-p", 0.9]
    # Without the summary line, whose speed varies.
    first, again, other = (
        output(*common, "--seed", seed).rsplit("16 tokens, ", 1)[0] for seed in (1, 1, 2)
    )
    assert first == again != other


@thorough
def test_demo_of_a_pair(tiny_pair, output):
    pair = ["--target", tiny_pair / "target", "--draft", tiny_pair / "draft"]
    text = output("demo", "--max-new-tokens", 8, *pair)
    names = ["no drafts", "prompt lookup, chain of 4", "chain of 4", "tree of 5"]
    cells = [line.split("│") for line in text.splitlines() if line[:1] == "│"]
    cells = [row for row in cells if len(row) > 7]  # not those of what was accepted
    rows = {name.strip(): [cell.strip() for cell in row] for _, name, *row in cells}
    assert list(rows) == names
    assert all(row[3] == "yes" for row in rows.values())
    assert "of them accepted drafts" in text
    assert f"runs as {dispatch.explain()}\n" in text
    taus = [float(rows[name][2]) for name in (names[0], *names[2:])]
    assert taus[0] == 1 < min(taus[1:])


@thorough
def test_train(tmp_path, output, monkeypatch):
    """A model, and heads on texts that it generates: progress, checkpoints, and their drafts."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    (tmp_path / "text.txt").write_text(" ".join(rng.choice(["cat", "dog", "sun"], size=3000)))
    (tmp_path / "recipe.toml").write_text(
        "vocab_size = 260\n[model]\nd_model = 16\nnum_layers = 1\nhead_dim = 8\nstate_size = 8\n"
        "[training]\nsteps = 2\nbatch_size = 1\nsequence_length = 8\nsave_every = 1\n"
        "[[text]]\npath = 'text.txt'\n"
    )
    shown = output("train", "recipe.toml", "model")
    assert " s  training steps, loss " in shown  # not a terminal
    assert (tmp_path / "model" / "README.md").read_text().startswith("Held-out loss: ")

    recipe = (tmp_path / "recipe.toml").read_text()
    start = recipe.index("[training]")
    table = recipe[start:].replace("steps = 2", "steps = 2\ngenerated = 1.0")
    (tmp_path / "heads.toml").write_text("[model]\nnum_heads = 2\n" + table)
    assert " s  training steps, loss " in output("medusa", "heads.toml", "model", "heads")
    heads = st.load_medusa(tmp_path / "heads", st.from_pretrained(tmp_path / "model"))
    assert heads.num_heads == 2
    assert np.any(heads.kernel[...])  # which begin as zeros
    (tmp_path / "head.toml").write_text(
        "[model]\nsteps = 2\nattention = {num_heads = 2, num_kv_heads = 1, head_dim = 8}\n"
        "moe = {num_experts = 4, num_active = 2, hidden_size = 8, router = 'sigmoid'}\n"
        + recipe[start:]
    )
    assert " s  training steps, loss " in output("train-mtp", "head.toml", "model", "head")
    (tmp_path / "block.toml").write_text(
        "[model]\ninner_layers = [1]\nblock_size = 3\nmarkov_rank = 2\n"
        "confidence_head = 'markov'\nmlp = {hidden_size = 8}\n"
        "attention = {num_heads = 2, num_kv_heads = 1, head_dim = 8}\n" + recipe[start:]
    )
    assert " s  training steps, loss " in output("train-dflash", "block.toml", "model", "block")
    common = ["generate", "model", "-p", "cat dog", "--max-new-tokens", 5]
    plain = output(*common)
    for heads in (["--medusa", "heads"], ["--mtp-head", "head"], ["--dflash", "block"]):
        drafted = output(*common, *heads, "--tree", "chain:1")
        assert plain.splitlines()[0] == drafted.splitlines()[0]


@thorough
def test_a_model_in_8_bits(tmp_path, output):
    """Converted, described, decoded: the text of the target in 8 bits, with drafts in 8 bits."""
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    plain, small = tmp_path / "plain", tmp_path / "small"
    saved_model(plain, tokenizer)
    output("convert", plain, small, "--quantize", "int8", "--keep", "*.out_proj.kernel")
    assert "float32, 2 matrices in 8 bits" in output("inspect", small)
    assert ") int8" in output("inspect", small, "--tensors")
    generate = ["generate", plain, "-p", "Once upon", "--max-new-tokens", 8]
    text, _ = output(*generate, "--quantize", "int8").splitlines()
    drafted = ["--draft", plain, "--draft-quantize", "int8", "--tree", "chain:1"]
    drafts, counts = output(*generate, "--quantize", "int8", *drafted).splitlines()
    assert drafts == text
    assert "tau 2" in counts


def test_a_new_kind_of_head_has_its_options(monkeypatch):
    """Its line of the table is enough."""
    monkeypatch.setitem(HEADS, "own", Room("own", option="A head.", own="The target's."))
    made = options._of_drafts()()
    assert made.own.help == "The target's."
    assert made.own_head.help == "A head."
