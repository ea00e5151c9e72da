"""Multi-token prediction heads beside Nemotron-3 targets: read, written, refused."""

import json
import os

import jax
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.checkpoint.arrays import CHECKSUMS
from stree_jax.convert import convert, open_checkpoint
from tests.convert import checkpoints
from tests.extensions.mtp_files import KEYS, files, saved


def same(head, other):
    assert head.config == other.config
    jax.tree.map(np.testing.assert_array_equal, nnx.state(head), nnx.state(other))


def test_other_names_and_keys_are_the_same_head(tmp_path):
    path = saved(tmp_path / "original")
    target = st.from_pretrained(path)
    want = st.load_mtp(path, target)
    values, tensors, head = files()
    letters = dict(mtp_layers_block_type=None, mtp_hybrid_override_pattern="*E")
    both = dict(mtp_layers_block_type=["full_attention", "moe"], mtp_hybrid_override_pattern="*E")
    for i, changes in enumerate((letters, both, dict(mtp_layers_block_type=None))):
        same(st.load_mtp(saved(tmp_path / f"keys-{i}", changes), target), want)
    inside = {f"language_model.{name}": value for name, value in (tensors | head).items()}
    outer = {"model_type": "nemotron_h_omni", "text_config": values | KEYS}
    wrapped = checkpoints.write_safetensors(tmp_path / "wrapped", outer, inside)
    same(st.load_mtp(wrapped, target), want)


def test_convert_carries_the_head_in_both_directions(tmp_path):
    path = saved(tmp_path / "original")
    target = st.from_pretrained(path)
    want = st.load_mtp(path, target)
    assert convert(path, tmp_path / "native") is None
    native = st.from_pretrained(tmp_path / "native")
    same(st.load_mtp(tmp_path / "native", native), want)
    same(st.load_mtp(tmp_path / "native" / "mtp", target), want)
    assert (tmp_path / "native" / "mtp" / CHECKSUMS).is_file()
    assert convert(tmp_path / "native", tmp_path / "back", to="hf") is None
    from safetensors.numpy import load_file

    tensors = load_file(tmp_path / "back" / "model.safetensors")
    for name, value in files()[2].items():
        np.testing.assert_array_equal(tensors[name], value)
    assert open_checkpoint(tmp_path / "back").description.mtp.problem is None
    assert convert(tmp_path / "native", tmp_path / "again") is None
    same(st.load_mtp(tmp_path / "again", native), want)


def test_a_head_of_another_size_or_none(tmp_path):
    path = saved(tmp_path / "original")
    wide = nnx.merge(*st.HybridLM.abstract(st.ModelConfig.tiny(d_model=32)))
    with pytest.raises(
        ValueError, match="is of a model of width 16 with 37 tokens, and the target"
    ):
        st.load_mtp(path, wide)
    rounded = st.load_mtp(path, st.from_pretrained(path, dtype="bfloat16"))
    assert rounded.in_proj.kernel.dtype == "bfloat16"
    assert rounded.feed_forward.correction.dtype == "float32"


REFUSED = [
    (dict(num_nextn_predict_layers=2), {}, "num_nextn_predict_layers = 2 with .* only .* one head"),
    (dict(num_nextn_predict_layers=0), {}, "num_nextn_predict_layers = 0 with .* tensors"),
    (dict(num_nextn_predict_layers="1"), {}, "must be a number of heads, got '1'"),
    (dict(mtp_layers_block_type=["moe", "attention"]), {}, "only a head of attention and experts"),
    (dict(mtp_layers_block_type=["attention", "mlp"]), {}, "only a head of attention and experts"),
    (dict(mtp_hybrid_override_pattern="*-"), {}, "contradict each other; keep the one that is"),
    (dict(n_shared_experts=2), {}, "n_shared_experts = 2 in a head, not 1"),
    (dict(mtp_n_routed_experts=4), {}, "heads of Puzzle checkpoints are not supported"),
    ({}, {"mtp.layers.0.enorm.weight": None}, r"mtp.layers.0.enorm.weight .16,. is missing"),
    ({}, {"mtp.layers.0.hnorm.weight": (8,)}, "hnorm.weight has shape .8,., the config says"),
    ({}, {"mtp.layers.2.norm.weight": (16,)}, "layers.2.norm.weight' .* is not expected"),
    ({}, {"mtp.lm_head.weight": (37, 16)}, "mtp.lm_head.weight' .* is not expected"),
]


@pytest.mark.parametrize(("changes", "own", "message"), REFUSED, ids=[m for *_, m in REFUSED])
def test_what_is_refused(changes, own, message, tmp_path):
    """The head alone: its target loads, and `convert` says why it left the head out."""
    head = {**files()[2], **{k: s and np.ones(s, np.float32) for k, s in own.items()}}
    path = saved(tmp_path / "original", changes, {k: v for k, v in head.items() if v is not None})
    target = st.from_pretrained(path)
    with pytest.raises(ValueError, match=message) as error:
        st.load_mtp(path, target)
    assert "\n" not in str(error.value)
    assert "cannot be used" in inspected(path)
    if not own:
        return
    assert message.split(" ")[0].split(".weight")[0] in convert(path, tmp_path / "native")
    assert not (tmp_path / "native" / "mtp").exists()


def inspected(path):
    from rich.console import Console

    from stree_jax.cli.convert import run_inspect

    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=400, file=nowhere)
        run_inspect(console, str(path), tensors=False)
    return console.export_text()


def test_copies_without_a_head_say_so(tmp_path):
    path = saved(tmp_path / "again", tensors={})
    target = st.from_pretrained(path)
    with pytest.raises(
        ValueError, match="this copy has no multi-token prediction head .* original"
    ):
        st.load_mtp(path, target)
    path = saved(tmp_path / "never", dict(num_nextn_predict_layers=0), {})
    assert "MTP head" not in inspected(path)
    with pytest.raises(ValueError, match="its config does not say num_nextn_predict_layers = 1"):
        st.load_mtp(path, target)
    assert "multi-token prediction (attention, moe), " in inspected(saved(tmp_path / "whole"))


METHOD = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}


@pytest.mark.parametrize(
    ("changes", "quantisation", "says"),
    [
        (METHOD, None, "config.json says quantization_config"),
        ({"model_type": "nemotron_h_omni", "text_config": METHOD}, None, "says text_config.quanti"),
        ({"model_type": "nemotron_h_omni", "llm_config": METHOD}, None, "says llm_config.quanti"),
        ({}, {"quant_algo": "NVFP4", "group_size": 16}, r"hf_quant_config.json says .*'NVFP4'"),
        ({}, {"quant_algo": None, "kv_cache_quant_algo": "FP8"}, None),
    ],
    ids=["config", "wrapped", "wrapped, older", "beside", "its cache alone"],
)
def test_quantised_releases_name_the_original(changes, quantisation, says, tmp_path):
    """They leave the head as it is, but pack the target's experts."""
    path, target = saved(tmp_path / "quantised", changes), st.from_pretrained(saved(tmp_path / "b"))
    if quantisation is not None:
        beside = {"producer": {"name": "modelopt"}, "quantization": quantisation}
        (path / "hf_quant_config.json").write_text(json.dumps(beside))
    for load in (lambda: st.from_pretrained(path), lambda: st.load_mtp(path, target)):
        if says is None:
            load()
            continue
        match = f"{says}.*: quantised checkpoints are not supported, use the bfloat16 original"
        with pytest.raises(ValueError, match=match) as error:
            load()
        assert "\n" not in str(error.value)


def test_a_head_on_a_mesh_is_refused(tmp_path):
    path = saved(tmp_path / "original")
    with pytest.raises(ValueError, match="a multi-token-prediction head runs on one device"):
        st.load_mtp(path, st.from_pretrained(path), mesh=st.make_mesh())
