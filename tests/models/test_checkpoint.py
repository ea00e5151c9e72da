import gc
import json
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.checkpoint import load
from stree_jax.checkpoint.files import read_json
from stree_jax.convert import convert, open_checkpoint
from stree_jax.testing import tiny_model
from tests.helpers import apply, assert_same_model, by_message, refusal


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("original") / "model"
    st.save_pretrained(tiny_model("groups"), path)
    return path


@pytest.fixture
def saved(original, tmp_path):
    return shutil.copytree(original, tmp_path / "model")


@pytest.mark.parametrize("name", ["groups", "mixed hybrid", "qwen3_5 hybrid", "qwen3_next hybrid"])
def test_round_trip(name, tmp_path):
    """Also if layers of one kind differ in size."""
    st.save_pretrained(tiny_model(name), tmp_path / "model", model_card="# A card\n")
    assert_same_model(st.from_pretrained(tmp_path / "model").in_first(), tiny_model(name))
    assert (tmp_path / "model" / "README.md").read_text() == "# A card\n"


def test_a_native_checkpoint_is_opened_once(saved, tmp_path, monkeypatch):
    """As one of another program: config.json is read once, and each weight is reported."""
    checkpoint = open_checkpoint(saved)
    assert (checkpoint.config, checkpoint.dtype) == (tiny_model("groups").config, "float32")
    assert checkpoint.head is None
    names, steps = [], []
    monkeypatch.setattr(load, "read_json", lambda path: names.append(path.name) or read_json(path))
    convert(saved, tmp_path / "out", progress=lambda *step: steps.append(step))
    assert names == ["config.json"]
    assert len(steps) == len(checkpoint.rules)
    assert steps[-1][0] == steps[-1][1]


def test_a_path_with_dots(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    st.save_pretrained(tiny_model("groups"), "../beside")
    assert_same_model(st.from_pretrained("../beside").in_first(), tiny_model("groups"))


@pytest.mark.parametrize("name", ["a[1]", "a\\b", "a*b", "[!a]?"])
def test_a_path_with_characters_of_patterns(name, tmp_path):
    """Orbax globs paths, and tensorstore takes a backslash for a slash."""
    for path in (tmp_path / name / "model", tmp_path / name):
        for seed in range(2):
            st.save_pretrained(tiny_model("groups", seed=seed), path, overwrite=True)
            assert_same_model(st.from_pretrained(path).in_first(), tiny_model("groups", seed=seed))
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_weights_are_read_back_before_an_old_one_goes(saved, monkeypatch):
    from orbax.checkpoint import v1 as ocp

    save = ocp.save

    def forget(path, arrays):
        save(path, arrays)
        for file in (path / "state" / "d").iterdir():
            file.unlink()

    monkeypatch.setattr(ocp, "save", forget)
    with pytest.raises(OSError, match="weights were not written as they are"):
        st.save_pretrained(tiny_model("groups"), saved, overwrite=True)
    assert_same_model(st.from_pretrained(saved).in_first(), tiny_model("groups"))


def test_a_checkpoint_of_format_1_loads():
    """Written at commit 45c8e32, with that version's logits; layers were kinds then."""
    path = Path(__file__).parent / "format_1"
    model, known = st.from_pretrained(path), json.loads((path / "logits.json").read_text())
    assert model.config.kinds == ("parallel", "mlp", "mamba2", "attention", "moe")
    assert model.config.layers[0].mamba2 == model.config.layers[2]
    assert model.config.layers[2].dt_limit == (0.01, float("inf"))
    logits = apply(model, np.array([known["tokens"]], np.int32))[0]
    np.testing.assert_allclose(logits, known["logits"], rtol=0, atol=1e-5)


def test_the_type_is_chosen_when_loading(saved):
    loaded = st.from_pretrained(saved, dtype="bfloat16")
    assert loaded.embedding.dtype == jnp.bfloat16
    mixer = loaded.blocks[0].mixer
    assert mixer.A_log.dtype == mixer.dt_bias.dtype == mixer.D.dtype == jnp.float32
    refusal("float32 or bfloat16, got float16", st.from_pretrained, saved, dtype="float16")


def test_saving_over_something_must_be_asked_for(saved):
    refusal(
        "exists; choose another name or pass overwrite=True",
        st.save_pretrained,
        tiny_model(),
        saved,
    )
    st.save_pretrained(tiny_model(), saved, overwrite=True)
    assert st.from_pretrained(saved).config == tiny_model().config
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failed_rename_leaves_the_old_one(saved, monkeypatch, error):
    """The new directory cannot take the old one's place, which was already moved away."""
    rename = os.rename

    def fail(source, to):
        if Path(source).name == "new":
            raise error
        return rename(source, to)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(error):
        st.save_pretrained(tiny_model(), saved, overwrite=True)
    monkeypatch.undo()
    assert st.from_pretrained(saved).config == tiny_model("groups").config
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def changes(name, change):
    """A damage: another value in a JSON file."""

    def damage(saved):
        file = saved / name
        file.write_text(json.dumps(change(json.loads(file.read_text()))))

    return damage


def header(**values):
    return changes("config.json", lambda header: header | values)


def tiny(**values):
    """The config of a model of other sizes."""
    return header(model=st.ModelConfig.tiny(**values).to_dict())


def like_groups(**values):
    """That of the saved model, with other sizes."""
    same = dict(num_groups=2, conv_width=3, norm="norm_then_gate", d_per_channel=True)
    same |= dict(in_proj_bias=True, out_proj_bias=True, conv_bias=False, tie_embeddings=False)
    return tiny(**(same | dict(padded_vocab_size=40) | values))


def crcs(change):
    return changes("checksums.json", lambda sums: sums | {"crc32": change(sums["crc32"])})


def holds(name, content):
    return lambda saved: (saved / name).write_text(content)


def resaved(name, value):
    """A damage: one number changed, with the checksums of before."""

    def damage(saved):
        from orbax.checkpoint import v1 as ocp

        weights = nnx.to_pure_dict(nnx.state(tiny_model("groups")))
        where = weights
        *parents, last = name.split(".")
        for key in parents:
            where = where[int(key) if key.isdigit() else key]
        where[last] = where[last].at[..., 1].set(value)
        shutil.rmtree(saved / "params")
        ocp.save(saved / "params", weights)

    return damage


def older(name, value):
    """The same in an older checkpoint, which has no checksums."""

    def damage(saved):
        resaved(name, value)(saved)
        (saved / "checksums.json").unlink()

    return damage


NESTED = json.loads("[" * 600 + "1" + "]" * 600)
DEEP = r"config\.json is damaged: it is nested more than 32"
BAD_FLAG = tiny_model("groups").config.to_dict() | {"tie_embeddings": -1}
OTHER = "disagree with its config: .*"
SUMS = r"checksums\.json is damaged"
TOO_LARGE = "holds NaN, infinity or a number too large"
REFUSED = [
    (header(version=99), "version 99; this stree_jax reads 1"),
    (header(version=True), "version True; this stree_jax reads 1"),  # which is equal to 1
    (header(format="other"), "not a native checkpoint"),
    (holds("config.json", "{"), r"config\.json is damaged"),
    (header(model={"norm_eps": NESTED}), DEEP),
    (header(model=BAD_FLAG), r"model/config\.json: tie_embeddings must be bool, got -1"),
    (tiny(num_layers=8192), r"config\.json says 8192 layers, but there are only 2\d ar"),
    (lambda saved: shutil.rmtree(saved / "params"), "'params' is missing"),
    (
        lambda saved: (saved / "params" / "state" / "_METADATA").unlink(),
        "is damaged: cannot read its weights",
    ),
    (like_groups(d_model=16, vocab_size=21, padded_vocab_size=24), rf"{OTHER}embedding is \(40,"),
    (like_groups(num_layers=3), rf"{OTHER}blocks\.2\..* is missing"),
    (like_groups(num_layers=1), rf"{OTHER}blocks\.1\..* is not expected"),
    (tiny(d_model=32), r"and \d+ more"),
    (holds("checksums.json", "{"), SUMS),
    (crcs(lambda _: 1), SUMS),
    (crcs(lambda _: {"x": 1}), SUMS),
    (crcs(lambda sums: dict.fromkeys(sums, "silu")), SUMS),
    (crcs(lambda sums: dict([*sums.items()][1:])), SUMS),
    (resaved("blocks.1.mixer.D", 0.5), r"cannot read blocks\.1\.mixer\.D \(it has another check"),
    (older("embedding", np.nan), f"embedding {TOO_LARGE}"),
    (older("blocks.0.mixer.A_log", 100.0), rf"blocks\.0\.mixer\.A_log {TOO_LARGE}"),
]


@by_message(("damage", "message"), REFUSED)
def test_refused(saved, damage, message):
    damage(saved)
    refusal(message, st.from_pretrained, saved)


def test_truncated_weights(saved, capfd):
    """With and without the sizes of the files; nothing but the error is printed."""
    data = max((saved / "params").rglob("*"), key=lambda file: file.stat().st_size)
    data.write_bytes(data.read_bytes()[:100])
    refusal("is damaged: cannot read its weights .* has 100 bytes", st.from_pretrained, saved)
    (saved / "checksums.json").unlink()
    refusal(r"is damaged: cannot read blocks\.\d", st.from_pretrained, saved)
    gc.collect()
    assert capfd.readouterr() == ("", "")


def test_numbers_too_large_for_the_chosen_type(saved):
    older("final_norm_scale", 3.4e38)(saved)
    assert np.isfinite(st.from_pretrained(saved).final_norm_scale[...]).all()
    refusal(
        "final_norm_scale holds .* too large for bfloat16",
        st.from_pretrained,
        saved,
        dtype="bfloat16",
    )
