"""Multi-token prediction heads beside Nemotron-3 targets: read, written, refused."""

import functools
import json
import os
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.checkpoint.arrays import CHECKSUMS
from stree_jax.convert import convert, open_checkpoint
from stree_jax.convert.writing import write_as
from stree_jax.decoding import outputs_ahead
from stree_jax.testing import HYBRIDS
from tests.convert import checkpoints
from tests.extensions.numpy_mtp import Head

KEYS = {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"]}
IGNORED = {"mtp_use_repeated_layer": True, "keep_mtp_spec_in_bf16": True, "n_shared_experts": 1}
TEXT = np.array([5, 9, 2, 30, 11, 7], np.int32)


def shapes(config):
    """The tensors of a head by their names in files, from the table of sizes of the format."""
    width, latent = config["hidden_size"], config.get("moe_latent_size")
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    first = {
        "enorm": (width,),
        "hnorm": (width,),
        "eh_proj": (width, 2 * width),
        "norm": (width,),
        "mixer.q_proj": (queries, width),
        "mixer.k_proj": (keys, width),
        "mixer.v_proj": (keys, width),
        "mixer.o_proj": (width, queries),
    }
    hidden, shared = config["moe_intermediate_size"], config["moe_shared_expert_intermediate_size"]
    last = {"norm": (width,), "mixer.gate": (config["n_routed_experts"], width)}
    for i in range(config["n_routed_experts"]):
        last |= {
            f"mixer.experts.{i}.up_proj": (hidden, latent or width),
            f"mixer.experts.{i}.down_proj": (latent or width, hidden),
        }
    last |= {
        "mixer.shared_experts.up_proj": (shared, width),
        "mixer.shared_experts.down_proj": (width, shared),
        "final_layernorm": (width,),
    }
    if latent:
        last |= {"mixer.fc1_latent_proj": (latent, width), "mixer.fc2_latent_proj": (width, latent)}
    named = {f"mtp.layers.0.{name}.weight": shape for name, shape in first.items()}
    named |= {f"mtp.layers.1.{name}.weight": shape for name, shape in last.items()}
    bias = "mtp.layers.1.mixer.gate.e_score_correction_bias"
    return named | {bias: (config["n_routed_experts"],)}


@functools.cache
def files(latent=True):
    """Config and tensors of a tiny Nemotron-3 with its head."""
    config = HYBRIDS["nemotron_h"]
    if not latent:
        config = config.with_layers(
            ("mamba2", "attention", "moe"),
            moe=st.MoeConfig(**{**vars(config.moe), "latent_size": None}),
        )
    from safetensors.numpy import load_file

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_as(checkpoints.random_model(config), path, "hf")
        values = json.loads((path / "config.json").read_text())
        tensors = load_file(path / "model.safetensors")
    rng = np.random.default_rng(1)
    head = {name: checkpoints.random_weight(name, s, rng) for name, s in shapes(values).items()}
    return values, tensors, head


def saved(path, changes=(), tensors=None, latent=True):
    values, target, head = files(latent)
    tensors = target | (head if tensors is None else tensors)
    config = values | KEYS | IGNORED | dict(changes)
    return checkpoints.write_safetensors(path, config, tensors)


@jax.jit
def ahead(target, model, text):
    hidden = target.hidden(text)
    outputs = outputs_ahead(model, text, hidden, 3)
    return hidden, [model.logits(output) for output in outputs]


@pytest.mark.parametrize("latent", [True, False], ids=["latent", "dense"])
def test_a_head_is_that_of_the_files_in_float64(latent, tmp_path):
    path = saved(tmp_path / "original", latent=latent)
    target = st.from_pretrained(path)
    head = st.load_mtp(path, target)
    values, tensors, own = files(latent)
    exact = Head(
        own
        | {
            "embedding": tensors["backbone.embeddings.weight"],
            "lm_head": tensors["lm_head.weight"],
        },
        num_heads=values["num_attention_heads"],
        num_kv_heads=values["num_key_value_heads"],
        groups=values["n_group"],
        active_groups=values["topk_group"],
        active=values["num_experts_per_tok"],
        scale=values["routed_scaling_factor"],
        eps=values["layer_norm_epsilon"],
    )
    hidden, logits = ahead(target, st.MtpModel(target, head), TEXT[None])
    for place in range(3):
        text, path = TEXT[: place + 2], TEXT[place + 2 : place + 4]
        want = exact.logits(text, np.asarray(hidden)[0], path)
        got = np.array([level[0, place] for level in logits])[: len(want)]
        np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


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


def test_a_head_is_for_one_target(tmp_path):
    path = saved(tmp_path / "original")
    target, other = st.from_pretrained(path), checkpoints.random_model(HYBRIDS["bamba"])
    head = st.load_mtp(path, target)
    st.save_mtp(head, target, tmp_path / "head")
    rounded = st.from_pretrained(path, dtype="bfloat16")
    loaded = st.load_mtp(tmp_path / "head", rounded)
    assert loaded.in_proj.kernel.dtype == "bfloat16"
    assert loaded.feed_forward.correction.dtype == "float32"
    with pytest.raises(ValueError, match="head in .* is for another target; load that one, or"):
        st.load_mtp(tmp_path / "head", other)
    with pytest.raises(
        ValueError, match="is of a model of width 16 with 37 tokens, and the target"
    ):
        st.load_mtp(path, nnx.merge(*st.HybridLM.abstract(st.ModelConfig.tiny(d_model=32))))
    st.save_pretrained(target, tmp_path / "alone")
    with pytest.raises(ValueError, match="has no multi-token prediction head in a folder mtp"):
        st.load_mtp(tmp_path / "alone", target)
    with pytest.raises(ValueError, match="'mtp', with load_mtp or generate --mtp"):
        st.from_pretrained(tmp_path / "head")
    header = json.loads((tmp_path / "head" / "config.json").read_text())
    header["head"]["feed_forward"]["kind"] = "rwkv"
    (tmp_path / "head" / "config.json").write_text(json.dumps(header))
    with pytest.raises(ValueError, match=r"config.json is damaged: unknown feed_forward 'rwkv'"):
        st.load_mtp(tmp_path / "head", target)


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
