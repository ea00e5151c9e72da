"""Damaged, missing and malicious files."""

import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.checkpoint.load import is_finite
from stree_jax.convert import convert, open_checkpoint
from tests.convert import checkpoints, configs, numpy_mamba_ssm
from tests.convert.checkpoints import (
    CONFIG,
    MIXER,
    WEIGHTS,
    refused,
    rewritten,
    sharded,
    write_index,
)
from tests.helpers import assert_same_model, refusal


def test_all_problems_are_reported_at_once(checkpoint):
    path = rewritten(
        checkpoint,
        **{f"{MIXER}.D": None, f"{MIXER}.A_log": np.ones(3, np.float32), "x": np.ones(1)},
    )
    refusal(r"'x' .*; .*A_log has shape .*; .*D \(4,\) is missing", open_checkpoint, path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("A_log", 1000.0),
        ("A_log", np.array([0x7F800001], np.uint32).view(np.float32)[0]),  # NumPy warns of it
        ("D", np.inf),
        ("norm.weight", np.nan),
    ],
)
def test_weights_that_are_not_finite(checkpoint, tmp_path, name, value):
    weight = WEIGHTS[f"{MIXER}.{name}"].copy()
    weight[1] = value
    path = rewritten(checkpoint, **{f"{MIXER}.{name}": weight})
    for use in (st.from_pretrained, lambda p: convert(p, tmp_path / "out")):
        refusal(f"{name} holds NaN, infinity or a number too large", use, path)
    assert not (tmp_path / "out").exists()
    large = jnp.ones((1 << 22) + 1)  # checked by a program, where numpy would be slow
    assert is_finite(name, large)
    assert not is_finite(name, large.at[1].set(value))


@pytest.mark.parametrize("to", ["native", pytest.param("hf", marks=pytest.mark.thorough)])
def test_a_full_disk(checkpoint, tmp_path, to):
    """A limit on the size of files. Orbax's threads may print."""
    code = """
import resource, signal, sys
import stree_jax.cli.main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
stree_jax.cli.main.main()
"""
    arguments = ["convert", str(checkpoint), str(tmp_path / "out"), "--to", to]
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"STREE_JAX_CACHE": "off"},
    )
    assert result.returncode == 2, result.stderr
    assert to == "native" or result.stderr.count("\n") == 1
    lines = result.stderr.splitlines()
    (error,) = (line for line in lines if line.startswith("stree-jax: error: "))
    assert str(tmp_path) in error
    left = [entry.name for entry in tmp_path.iterdir() if "out" in entry.name]
    assert "out" not in left
    assert to == "native" or not left
    convert(checkpoint, tmp_path / "out", to=to)
    assert [entry.name for entry in tmp_path.iterdir() if "out" in entry.name] == ["out"]
    modes = {e.stat().st_mode for e in (tmp_path / "out").iterdir() if e.is_file()}
    assert len(modes) == 1, "weights are as private as the config"


def test_side_files_in_the_cache_of_the_hub(checkpoint, tmp_path):
    """There each file is a link to a blob."""
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    blobs = snapshot.parents[1] / "blobs"
    snapshot.parent.mkdir(parents=True)
    blobs.mkdir()
    checkpoint.rename(snapshot)
    (blobs / "123").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/123")
    convert(snapshot, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("to", ["native", "hf"])
def test_side_files_come_from_inside(checkpoint, tmp_path, to):
    """No links to files elsewhere, no pipes, no directories; native copies keep templates."""
    (tmp_path / "secret").write_text("secret")
    folder = checkpoint / "additional_chat_templates"
    (folder / "folder.jinja").mkdir(parents=True)
    (folder / "tool_use.jinja").write_text("tools")
    (folder / "link.jinja").symlink_to(tmp_path / "secret")
    (folder / "inside.jinja").symlink_to("tool_use.jinja")
    (folder / "secret.txt").write_text("secret")
    os.mkfifo(folder / "pipe.jinja")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "a.jinja").write_text("secret")
    (checkpoint / "chat_templates").symlink_to(tmp_path / "outside")
    (checkpoint / "chat_template.jinja").write_text("default")
    (checkpoint / "vocab.json").symlink_to("chat_template.jinja")
    (checkpoint / "tokenizer.json").symlink_to(tmp_path / "secret")
    (checkpoint / "merges.txt").symlink_to(folder / ".." / ".." / "secret")
    (checkpoint / "added_tokens.json").mkdir()
    os.mkfifo(checkpoint / "tokenizer.model")
    convert(checkpoint, tmp_path / "out", to=to)
    convert(tmp_path / "out", tmp_path / "copy")
    assert (tmp_path / "out" / "vocab.json").read_text() == "default"
    for name in ("tokenizer.json", "merges.txt", "tokenizer.model", "added_tokens.json"):
        assert not os.path.lexists(tmp_path / "out" / name)
    for copy in (tmp_path / "out", tmp_path / "copy"):
        found = {str(f.relative_to(copy)): f.read_text() for f in copy.rglob("*.jinja")}
        assert found == {
            "chat_template.jinja": "default",
            "additional_chat_templates/tool_use.jinja": "tools",
            "additional_chat_templates/inside.jinja": "tools",
        }
        assert not (copy / "additional_chat_templates" / "secret.txt").exists()


def test_a_tied_head_that_is_not_the_embedding(tmp_path):
    config = configs.mamba_ssm_config()
    weights = checkpoints.described_weights(numpy_mamba_ssm, config)
    weights["lm_head.weight"] = weights["backbone.embedding.weight"] + 1
    path = checkpoints.write_safetensors(tmp_path / "tied", config, weights)
    refusal(r"ties the head to the embedding, but lm_head\.weight is", st.from_pretrained, path)


def test_a_hub_name_without_a_network(monkeypatch):
    import huggingface_hub

    def offline(*_, **__):
        raise ConnectionError("cannot reach the hub\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    refusal("no directory some/model, .*: cannot reach the hub$", st.from_pretrained, "some/model")
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    needs = r"a name on the hub needs huggingface-hub; in the clone: pip install '\.\[hub\]'"
    refusal(needs, st.from_pretrained, "some/model")


def test_a_hub_name(monkeypatch, checkpoint):
    """Configs are downloaded first, then only the weights that are needed."""
    import huggingface_hub

    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(checkpoint)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    whole = st.from_pretrained("some/model")
    assert {"config.json", "additional_chat_templates/*.jinja"} <= set(asked[0][1])
    assert asked[1:] == [("some/model", ["model*.safetensors", "mtp.safetensors"])]
    write_index(checkpoint, sharded(checkpoint))  # Qwen's in FP8 are layers-0, outside, mtp
    asked.clear()
    assert_same_model(st.from_pretrained("some/model"), whole)
    files = ["mtp.safetensors", "part-0.safetensors", "part-1.safetensors"]
    assert asked[1:] == [("some/model", files)]


def test_both_forms_of_a_model_in_one_directory(tmp_path):
    """As in Codestral-Mamba's repository: config.json belongs to model.*, params.json does not."""
    path = tmp_path / "both"
    checkpoints.write_safetensors(tmp_path / "ssm", CONFIG, WEIGHTS)
    convert(tmp_path / "ssm", path, to="hf")
    want = st.from_pretrained(path)
    params = dict(dim=16, n_layers=2, vocab_size=37, n_groups=1)
    other = {f"model.{name}": value for name, value in WEIGHTS.items()}
    checkpoints.write_safetensors(path, params, other, "consolidated.safetensors")
    checkpoint = open_checkpoint(path)
    assert checkpoint.description.family == "transformers mamba2"
    assert st.from_pretrained(path).config == want.config


def test_what_is_no_directory_and_no_tokenizer(checkpoint, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (checkpoint / "vocab.json").write_text("{}")
    (checkpoint / "tokenizer.model").write_text("x")
    is_none = "only a tokenizer.json is read; of other files transformers makes one"
    for load, path, message in (
        (st.from_pretrained, checkpoint / "model.safetensors", "is a file; a checkpoint is a dir"),
        (st.from_pretrained, tmp_path / "loop", "a link to 'loop', cannot be read: Too many level"),
        (st.load_tokenizer, checkpoint, is_none),
        (st.load_tokenizer, checkpoint / "tokenizer.model", is_none),
        (st.load_tokenizer, checkpoint / "vocab.json", "vocab.json is damaged"),
    ):
        refusal(message, load, path)


def test_truncated_safetensors(checkpoint):
    file = checkpoint / "model.safetensors"
    data = file.read_bytes()
    for cut in (0, 1, 7, 8, 100, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:cut])
        refused(checkpoint, "is damaged")
