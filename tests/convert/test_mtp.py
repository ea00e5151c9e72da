"""Multi-token prediction heads of Nemotron-3, Qwen and Ling 3: read, written, refused."""

import re
from functools import partial

import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.checkpoint.arrays import CHECKSUMS
from stree_jax.convert import convert, open_checkpoint
from tests.convert import checkpoints
from tests.convert.checkpoints import inspected
from tests.extensions import ling_files, qwen_files
from tests.extensions.mtp_files import KEYS, files, saved
from tests.helpers import assert_same_model, by_message, refusal, some


def test_other_names_and_keys_are_the_same_head(tmp_path):
    path = saved(tmp_path / "original")
    target = st.from_pretrained(path)
    want = st.load_mtp(path, target)
    values, tensors, head = files()
    letters = dict(mtp_layers_block_type=None, mtp_hybrid_override_pattern="*E")
    both = dict(mtp_layers_block_type=["full_attention", "moe"], mtp_hybrid_override_pattern="*E")
    for i, changes in enumerate((letters, both, dict(mtp_layers_block_type=None))):
        assert_same_model(st.load_mtp(saved(tmp_path / f"keys-{i}", changes), target), want)
    inside = {f"language_model.{name}": value for name, value in (tensors | head).items()}
    outer = {"model_type": "nemotron_h_omni", "text_config": values | KEYS}
    wrapped = checkpoints.write_safetensors(tmp_path / "wrapped", outer, inside)
    assert_same_model(st.load_mtp(wrapped, target), want)


# How a checkpoint is saved, the tensors of its head, and a family beside "hf" that holds both.
CARRIED = {
    "nemotron": (saved, files, ()),
    "ling": (ling_files.saved, ling_files.files, ()),
    "qwen": (qwen_files.saved, qwen_files.files, ("qwen3_5_text",)),
    "qwen, experts": (
        *(partial(each, experts=True) for each in (qwen_files.saved, qwen_files.files)),
        ("qwen3_5_moe_text",),
    ),
}


@pytest.mark.parametrize("kind", some(CARRIED, "nemotron"))
def test_convert_carries_the_head_in_both_directions(kind, tmp_path):
    save, files, others = CARRIED[kind]
    path = save(tmp_path / "original")
    target = st.from_pretrained(path)
    want = st.load_mtp(path, target)
    assert convert(path, tmp_path / "native") is None
    assert convert(tmp_path / "native", tmp_path / "again") is None
    for copy in ("native", "native/mtp", "again"):
        assert_same_model(st.load_mtp(tmp_path / copy, target), want)
    assert (tmp_path / "native" / "mtp" / CHECKSUMS).is_file()
    for to in ("hf", *others):
        assert convert(tmp_path / "native", tmp_path / to, to=to) is None
        assert_same_model(st.load_mtp(tmp_path / to, st.from_pretrained(tmp_path / to)), want)
    tensors, rounding = checkpoints.read(tmp_path / to)[1], 2e-7 if others else 0
    for name, value in files()[2].items():
        if "mlp.experts." not in name:  # read merged, and written one by one
            np.testing.assert_allclose(tensors[name], value, rtol=0, atol=rounding)  # 1 + w - 1


def test_a_head_of_another_size(tmp_path):
    path = saved(tmp_path / "original")
    wide = nnx.merge(*st.HybridLM.abstract(st.ModelConfig.tiny(d_model=32)))
    refusal("has width 16 and tokens 37, and the target width 32", st.load_mtp, path, wide)


REFUSED = [
    (dict(num_nextn_predict_layers=2), {}, "num_nextn_predict_layers = 2 with .* only .* one head"),
    (dict(num_nextn_predict_layers=0), {}, "num_nextn_predict_layers = 0 with .* tensors"),
    (dict(mtp_layers_block_type=["moe", "attention"]), {}, "only a head of attention and experts"),
    (dict(mtp_hybrid_override_pattern="*-"), {}, "only a head of attention and experts"),
    (dict(n_shared_experts=2), {}, "n_shared_experts = 2 in a head, not 1"),
    (dict(mtp_n_routed_experts=4), {}, "heads of Puzzle checkpoints are not supported"),
    ({}, {"mtp.layers.0.enorm.weight": None}, r"mtp.layers.0.enorm.weight .16,. is missing"),
    ({}, {"mtp.layers.2.norm.weight": (16,)}, "layers.2.norm.weight' .* is not expected"),
]


def test_copies_without_a_head_say_so(tmp_path):
    path = saved(tmp_path / "again", tensors={})
    target = st.from_pretrained(path)
    refusal("this copy has no multi-token prediction head .* original", st.load_mtp, path, target)
    path = saved(tmp_path / "never", dict(num_nextn_predict_layers=0), {})
    assert "MTP head" not in inspected(path)
    refusal("its config does not say num_nextn_predict_layers = 1", st.load_mtp, path, target)
    assert "multi-token prediction (attention, moe), " in inspected(saved(tmp_path / "whole"))


@pytest.mark.thorough
def test_a_head_of_qwen_beside_a_wrapped_model(tmp_path):
    path = qwen_files.saved(tmp_path / "original")
    target = st.from_pretrained(path)
    want = st.load_mtp(path, target)
    wrapped = qwen_files.wrapped(tmp_path / "wrapped")
    assert_same_model(st.load_mtp(wrapped, st.from_pretrained(wrapped)), want)
    assert "multi-token prediction (attention, mlp), " in inspected(wrapped)
    said = "model.visual.merger.weight: not of the text model of qwen3_5"
    assert said in open_checkpoint(wrapped).ignored
    without = qwen_files.saved(tmp_path / "unsaid", dict(mtp_num_hidden_layers=None))
    assert_same_model(st.load_mtp(without, target), want)  # Qwen3-Next's config does not say it
    rounded = st.load_mtp(path, st.from_pretrained(path, dtype="bfloat16"))
    assert rounded.in_proj.kernel.dtype == "bfloat16"
    assert rounded.final_norm_scale.dtype == rounded.attention.q_norm_scale.dtype == "float32"


@pytest.mark.parametrize("index", ["none", "without it", "with it"])
def test_a_head_in_a_file_of_its_own(index, tmp_path):
    """As in FP8 releases of Qwen; copies by other programs have an index that does not name it."""
    want = qwen_files.saved(tmp_path / "original")
    values, tensors, head = qwen_files.files()
    name = "model.safetensors" if index == "none" else "layers-0.safetensors"
    path = checkpoints.write_safetensors(
        tmp_path / "split", values | qwen_files.KEYS, tensors, name
    )
    checkpoints.write_safetensors(path, values | qwen_files.KEYS, head, "mtp.safetensors")
    if index != "none":
        of_head = dict.fromkeys(head if index == "with it" else (), "mtp.safetensors")
        checkpoints.write_index(path, dict.fromkeys(tensors, name) | of_head)
    target = st.from_pretrained(path)
    assert_same_model(st.load_mtp(path, target), st.load_mtp(want, target))
    if index != "with it":
        again = head | {"lm_head.weight": tensors["lm_head.weight"]}
        checkpoints.write_safetensors(path, values, again, "mtp.safetensors")
        message = (
            "mtp.safetensors has 1 tensors that other files have too, such as 'lm_head.weight'"
        )
        refusal(message, st.from_pretrained, path)


OF_QWEN = [
    (dict(mtp_num_hidden_layers=2), {}, "mtp_num_hidden_layers = 2 with 15 .* only .* one head"),
    (dict(mtp_use_dedicated_embeddings=True), {}, "mtp_use_dedicated_embeddings = true"),
    ({}, "all", "this copy has no multi-token prediction head .transformers drops it .*original"),
]


OF_LING = [
    (dict(num_nextn_predict_layers=2), {}, "num_nextn_predict_layers = 2 with .* only .* one head"),
    ({}, {"model.layers.2.eh_proj.weight": None}, r"2.eh_proj.weight .16, 32. is missing"),
    ({}, {"model.layers.2.embed_tokens.weight": (37, 16)}, "2.embed_tokens.* is not expected"),
    ({}, "all", "this copy has no multi-token prediction head .transformers drops it .*original"),
]
HEADS = {
    "nemotron": (files, saved, REFUSED),
    "qwen": (qwen_files.files, qwen_files.wrapped, OF_QWEN),
    "ling": (ling_files.files, ling_files.saved, OF_LING),
}


@by_message(
    ("kind", "changes", "shapes", "message"),
    [(kind, *row) for kind, (*_, rows) in HEADS.items() for row in rows],
)
def test_what_is_refused(kind, changes, shapes, message, tmp_path):
    """The head alone: its target loads, `inspect` and `convert` say what is wrong with it."""
    files, save, _ = HEADS[kind]
    head = {}
    if shapes != "all":
        new = {name: shape and np.ones(shape, np.float32) for name, shape in shapes.items()}
        head = files()[2] | new
    path = save(tmp_path / "original", changes, head)
    target = st.from_pretrained(path)
    assert str(path) in refusal(message, st.load_mtp, path, target)
    assert "cannot be used" in inspected(path)
    assert re.search(message, convert(path, tmp_path / "native"))
    assert not (tmp_path / "native" / "mtp").exists()
