"""What lies in the place of a checkpoint or of one of its files: the message says so."""

import json
import os
import shutil

import pytest

import stree_jax as st
from stree_jax.chat import load_chat_template
from stree_jax.convert import convert
from stree_jax.testing import tiny_model
from tests.convert.checkpoints import refused, sharded, write_index
from tests.extensions.eagle3_files import saved

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4" * 64 + b"\nsize 9\n"
LFS = r"git lfs pull.*{} is a pointer of Git LFS"


def holds(name, content):
    def damage(checkpoint):
        (checkpoint / name).write_bytes(content)

    return damage


def all_of(*damages):
    return lambda checkpoint: [damage(checkpoint) for damage in damages]


def only(*names):
    """No config, and no weights but these."""

    def damage(checkpoint):
        for file in checkpoint.iterdir():
            file.unlink()
        for name in names:
            (checkpoint / name).write_bytes(b"x")

    return damage


def no_weights_but(*names):
    def damage(checkpoint):
        (checkpoint / "model.safetensors").unlink()
        for name in names:
            (checkpoint / name).write_bytes(b"x")

    return damage


def in_shards(name="part-{}.safetensors", *, index=True, missing=()):
    """The weights in two shards."""

    def damage(checkpoint):
        weight_map = sharded(checkpoint)
        for i in (0, 1):
            shard = (checkpoint / f"part-{i}.safetensors").rename(checkpoint / name.format(i))
            if i in missing:
                shard.unlink()
        if index:
            write_index(checkpoint, weight_map)

    return damage


def moved_to(folder):
    def damage(checkpoint):
        whole = checkpoint.parent / "whole"
        checkpoint.rename(whole)
        for each in folder if isinstance(folder, tuple) else (folder,):
            shutil.copytree(whole, checkpoint / each)

    return damage


def links(name, to):
    def damage(checkpoint):
        (checkpoint / name).unlink()
        (checkpoint / name).symlink_to(to)

    return damage


def directory(name):
    def damage(checkpoint):
        (checkpoint / name).unlink()
        (checkpoint / name).mkdir()

    return damage


def adapter(**config):
    def damage(checkpoint):
        only("adapter_model.safetensors")(checkpoint)
        (checkpoint / "adapter_config.json").write_text(json.dumps(config))

    return damage


CHECKPOINTS = [
    (holds("model.safetensors", POINTER), LFS.format(r"model\.safetensors")),
    (holds("config.json", POINTER), LFS.format(r"config\.json")),
    (holds("mamba_config.json", POINTER), LFS.format(r"mamba_config\.json")),
    (holds("model.safetensors.index.json", POINTER), LFS.format(r"index\.json")),
    (all_of(in_shards(), holds("part-1.safetensors", POINTER)), LFS.format(r"part-1\.safetensors")),
    (
        all_of(no_weights_but(), holds("pytorch_model.bin", POINTER)),
        LFS.format(r"pytorch_model\.bin"),
    ),
    (holds("model.safetensors", b"\n<!DOCTYPE html><title>"), "is a web page: download the file"),
    (holds("config.json", b""), r"config\.json is damaged: it is empty"),
    (links("config.json", "config.json"), "a link to 'config.json', cannot be read: Too many"),
    (links("model.safetensors", "../gone"), "a link to '../gone', cannot be read: No such file"),
    (directory("model.safetensors"), r"model\.safetensors is a directory; a file is expected"),
    (directory("config.json"), r"config\.json is a directory; a file is expected"),
    (in_shards(missing=[1]), r"names the file 'part-1\.safetensors', which does not exist: get"),
    (
        in_shards("model-0000{}-of-00002.safetensors", index=False),
        r"has no weights: .*has shards such as .*: get their index model\.safetensors\.index\.json",
    ),
    (
        no_weights_but("pytorch_model-00001-of-00002.bin"),
        r"shards such as .*: get their index pytorch_model\.bin\.index\.json",
    ),
    (
        adapter(base_model_name_or_path="org/base"),
        "an adapter .* for the model 'org/base': .*from_pretrained.'org/base', adapter=",
    ),
    (
        all_of(adapter(), holds("config.json", b"{}")),
        "an adapter .* for its model: .*; if the weights here are merged already, remove",
    ),
    (only(), "has no config.json or params.json; it is empty"),
    (only("model_index.json"), "it is a pipeline of diffusers"),
    (only("m.nemo"), r"no config\.json or .*; 'm\.nemo' is not read: take the original, in safete"),
    (only("m.gguf"), r"m\.gguf cannot be read: it does not begin with GGUF"),
    (all_of(only(), holds("m.gguf", POINTER)), LFS.format(r"m\.gguf")),
    (no_weights_but("model.onnx"), r"no weights: .*; 'model\.onnx' is not read: take the original"),
    (no_weights_but("optimizer.pt", "w.pth"), r"'w\.pth' is not read: if it is a state dict, load"),
    (no_weights_but("w.safetensors"), r"'w\.safetensors' has all of them, name it model\.safeten"),
    (no_weights_but("w.bin"), r"'w\.bin' has all of them, name it pytorch_model\.bin"),
    (only("model.safetensors"), r"it has 'model\.safetensors': get the config\.json that belongs"),
    (moved_to("snapshots/0a1b"), "no config.* give its folder 'snapshots/0a1b', which has one"),
    (moved_to(("checkpoint-500", "checkpoint-1000")), "give its folder 'checkpoint-1000', which"),
]


@pytest.mark.parametrize(("damage", "message"), CHECKPOINTS, ids=[m for _, m in CHECKPOINTS])
def test_in_the_place_of_a_checkpoint(damage, message, checkpoint):
    damage(checkpoint)
    refused(checkpoint, message)


def test_in_the_place_of_the_directory(checkpoint, tmp_path):
    with pytest.raises(
        ValueError, match=r"is a file; a checkpoint is a directory, such as .*model$"
    ):
        st.from_pretrained(checkpoint / "model.safetensors")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ValueError, match="a link to 'loop', cannot be read: Too many levels"):
        st.from_pretrained(tmp_path / "loop")
    if os.geteuid() != 0:
        checkpoint.chmod(0)
        with pytest.raises(ValueError, match="model cannot be read: Permission denied"):
            st.from_pretrained(checkpoint)
        checkpoint.chmod(0o700)


TOKENIZERS = [
    (holds("tokenizer.json", POINTER), LFS.format(r"tokenizer\.json")),
    (holds("tokenizer.json", b""), r"tokenizer\.json is damaged: it is empty"),
    (
        holds("tokenizer.model", b"x"),
        r"no tokenizer at .*; transformers reads tokenizer\.model: Auto",
    ),
    (
        only("vocab.json", "merges.txt"),
        r"reads merges\.txt, vocab\.json: AutoTokenizer.*--tokenizer",
    ),
    (
        holds("tekken.json", b"x"),
        r"reads tekken\.json: AutoTokenizer\.from_pretrained\('.*model'\)",
    ),
    (lambda path: (path / "tokenizer.json").mkdir(), r"tokenizer\.json is a directory; a file is"),
    (lambda path: None, r"no tokenizer at .*tokenizer\.json$"),
]


@pytest.mark.parametrize(("damage", "message"), TOKENIZERS, ids=[m for _, m in TOKENIZERS])
def test_in_the_place_of_a_tokenizer(damage, message, checkpoint):
    damage(checkpoint)
    with pytest.raises(ValueError, match=message) as error:
        st.load_tokenizer(checkpoint)
    assert "\n" not in str(error.value)


def test_other_files_are_no_tokenizer(checkpoint):
    """Given themselves, also beside a tokenizer."""
    for name in ("vocab.json", "tokenizer.model"):
        (checkpoint / name).write_text("{}")
        with pytest.raises(ValueError, match=f"no tokenizer at .*{name}; transformers reads"):
            st.load_tokenizer(checkpoint / name)
    (checkpoint / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"vocab\.json; give the tokenizer\.json beside it"):
        st.load_tokenizer(checkpoint / "vocab.json")


def test_pointers_elsewhere(checkpoint, tmp_path):
    (checkpoint / "chat_template.jinja").write_bytes(POINTER)
    with pytest.raises(ValueError, match=LFS.format(r"chat_template\.jinja")):
        load_chat_template(checkpoint)
    (checkpoint / "tokenizer.model").write_bytes(POINTER)
    refused_side_file = LFS.format("(tokenizer.model|chat_template.jinja)")
    with pytest.raises(ValueError, match=refused_side_file):
        convert(checkpoint, tmp_path / "out")
    target = tiny_model("nemotron_h hybrid")
    head = saved(tmp_path / "head")
    (head / "model.safetensors").write_bytes(POINTER)
    with pytest.raises(ValueError, match=LFS.format(r"model\.safetensors")):
        st.load_eagle3(head, target)
    native = tmp_path / "native"
    st.save_pretrained(target, native)
    (largest,) = sorted(native.glob("params/**/d/*"))[:1]
    largest.write_bytes(POINTER)
    with pytest.raises(ValueError, match="cannot read its weights .*git lfs pull"):
        st.from_pretrained(native)
