"""LoRA adapters in PEFT's format, merged while a checkpoint is read."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.convert import convert, open_checkpoint
from tests.convert.adapter_files import pairs, written
from tests.convert.checkpoints import CONFIG, MIXER, WEIGHTS, read, write_safetensors
from tests.convert.torch_files import torch_file_of
from tests.extensions.qwen_files import wrapped
from tests.helpers import assert_same_model, by_message, refusal

IN, OUT = f"{MIXER}.in_proj", f"{MIXER}.out_proj"
EMBEDDING = "backbone.embedding"


def sums(weights, tensors, scales):
    """The merged weights by their definition, in float64."""
    merged = dict(weights)
    for module, scale in scales.items():
        a, b = (
            next(
                np.asarray(value, np.float64)
                for name, value in tensors.items()
                if f"{module}.lora_{half}." in name
            )
            for half in "AB"
        )
        merged[f"{module}.weight"] = weights[f"{module}.weight"] + scale * np.einsum(
            "or,ri->oi", b, a
        )
    return merged


def assert_merged(checkpoint, adapter, want):
    """All tensors, and that those without a change are the same to the bit."""
    tensors = open_checkpoint(checkpoint, adapter=adapter).tensors
    assert tensors.keys() == want.keys()
    for name, tensor in tensors.items():
        tolerance = 1e-5 if want[name].dtype == np.float64 else 0
        np.testing.assert_allclose(tensor.read(), want[name], rtol=0, atol=tolerance, err_msg=name)


SCALES = [
    ({}, 5 / 3, 5 / 3),
    ({"use_rslora": True}, 5 / 3**0.5, 5 / 3**0.5),
    ({"alpha_pattern": {"out_proj": 7}}, 5 / 3, 7 / 3),
    ({"alpha_pattern": {r"^backbone\.layers.1.mixer.in_proj": 7, "in_proj": 8}}, 7 / 3, 5 / 3),
    ({"alpha_pattern": {"^mixer.in_proj": 7, "proj": 8}}, 5 / 3, 5 / 3),
    ({"r": 8, "rank_pattern": {"in_proj": 3, f"{MIXER}.out_proj": 3}}, 5 / 3, 5 / 3),
]


@pytest.mark.parametrize(("changes", "of_in", "of_out"), SCALES, ids=[str(s[0]) for s in SCALES])
def test_the_scale_of_a_module(changes, of_in, of_out, checkpoint, tmp_path):
    tensors = pairs(WEIGHTS, IN, OUT)
    adapter = written(tmp_path / "adapter", tensors, **changes)
    assert_merged(checkpoint, adapter, sums(WEIGHTS, tensors, {IN: of_in, OUT: of_out}))


NAMES = [
    dict(prefix=""),
    dict(renamed=lambda name: name.replace("backbone", "model")),
    dict(renamed=lambda name: name.replace("backbone", "language_model.model")),
]


@pytest.mark.parametrize("names", NAMES, ids=["no prefix", "text model", "wrapper"])
def test_names_of_other_surroundings(names, checkpoint, tmp_path):
    tensors = {
        name.replace("A.weight", "A.default.weight"): matrix
        for name, matrix in pairs(WEIGHTS, IN, **names).items()
    }
    adapter = written(tmp_path / "adapter", tensors)
    want = sums(WEIGHTS, pairs(WEIGHTS, IN), {IN: 5 / 3})
    assert_merged(checkpoint, adapter, want)


def test_embeddings_and_whole_tensors(checkpoint, tmp_path):
    """Of an embedding the product is transposed; a tensor that is there replaces the model's."""
    rng = np.random.default_rng(1)
    rows, width = WEIGHTS[f"{EMBEDDING}.weight"].shape
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((3, rows), (width, 3)))
    embedding, head = (WEIGHTS[f"{name}.weight"] + 1 for name in (EMBEDDING, "lm_head"))
    base = f"base_model.model.{EMBEDDING}"
    tensors = {f"{base}.lora_embedding_A": a, f"{base}.lora_embedding_B": b}
    tensors |= {f"{base}.base_layer.weight": embedding, "base_model.model.lm_head.weight": head}
    adapter = written(tmp_path / "adapter", tensors, modules_to_save=["lm_head"])
    changed = embedding + 5 / 3 * np.einsum("vr,rm->vm", a.T.astype(np.float64), b.T)
    want = WEIGHTS | {f"{EMBEDDING}.weight": changed, "lm_head.weight": head}
    assert_merged(checkpoint, adapter, want)


def test_a_model_is_that_of_the_merged_weights(tmp_path):
    """Projections are fused while read; names are of a wrapper's text model."""
    path = wrapped(tmp_path / "base")
    values, weights = read(path)
    layers = [f"model.language_model.layers.{i}" for i in (0, 1)]
    modules = [f"{layers[0]}.linear_attn.in_proj_z", f"{layers[1]}.self_attn.v_proj"]
    modules += [f"{layer}.mlp.down_proj" for layer in layers]
    tensors = pairs(weights, *modules)
    inside = {name.replace("language_model.", ""): matrix for name, matrix in tensors.items()}
    adapter = written(tmp_path / "adapter", inside)
    merged = sums(weights, tensors, dict.fromkeys(modules, 5 / 3))
    merged = {name: value.astype(np.float32) for name, value in merged.items()}
    by_hand = st.from_pretrained(write_safetensors(tmp_path / "by hand", values, merged))
    model = st.from_pretrained(path, adapter=str(adapter))
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-6)
    jax.tree.map(close, nnx.state(model), nnx.state(by_hand))
    convert(path, tmp_path / "native", adapter=adapter)
    assert_same_model(st.from_pretrained(tmp_path / "native"), model)
    st.load_mtp(tmp_path / "native", model)  # the head belongs to the changed model


def test_products_and_sums_are_in_float32(checkpoint, tmp_path):
    """Those in 16 bits would differ. The model stays in its own type."""
    low = {name: each.astype(ml_dtypes.bfloat16) for name, each in WEIGHTS.items()}
    write_safetensors(checkpoint, CONFIG, low)
    tensors = pairs(WEIGHTS, IN)
    tensors = {name: each.astype(np.float16) for name, each in tensors.items()}
    adapter = written(tmp_path / "adapter", tensors)
    wide = {f"{IN}.weight": low[f"{IN}.weight"].astype(np.float64)}
    assert_merged(checkpoint, adapter, low | sums(wide, tensors, {IN: 5 / 3}))
    assert open_checkpoint(checkpoint, adapter=adapter).dtype == "bfloat16"


def test_torch_files(checkpoint, tmp_path):
    tensors = pairs(WEIGHTS, IN)
    adapter = written(tmp_path / "adapter", tensors)
    (adapter / "adapter_model.safetensors").unlink()
    torch_file_of(adapter / "adapter_model.bin", tensors)
    assert_merged(checkpoint, adapter, sums(WEIGHTS, tensors, {IN: 5 / 3}))


A, B = (f"base_model.model.{IN}.lora_{half}.weight" for half in "AB")
ROWS, COLUMNS = WEIGHTS[f"{IN}.weight"].shape
HUGE = np.full((3, COLUMNS), 3e38, np.float32)
# Changes to the adapter's config and to its tensors, and the message.
REFUSED = [
    ({"peft_type": "LOHA"}, {}, "peft_type = 'LOHA', only 'LORA' can be merged here"),
    ({"use_dora": True}, {}, r"use_dora = True is not supported: merge it with peft"),
    ({"target_parameters": ["experts.up"]}, {}, "target_parameters = .*experts.up.* is not"),
    ({"bias": "lora_only"}, {}, "bias = 'lora_only' is not supported, only 'none'"),
    ({"init_lora_weights": "pissa"}, {}, "init_lora_weights = 'pissa' changed the model too"),
    ({"novel": 1}, {}, r"unknown fields \['novel'\]; they might change"),
    ({"r": 0}, {}, "r must be an integer, from 1"),
    ({"alpha_pattern": {"in_(x|y)": 1}}, {}, "alpha_pattern has 'in_.*only names of modules are"),
    ({"rank_pattern": {"in_proj": 2}}, {}, r"A \(3, .* which do not fit with rank 2"),
    ({}, {A: None}, "in_proj.weight' has only lora_B here, of a pair A and B"),
    ({}, {A: np.ones((COLUMNS, 3))}, "do not fit with rank 3"),
    ({}, {A: np.ones((3, COLUMNS), np.int32)}, "holds int32, no real numbers"),
    ({}, {A: np.full((3, COLUMNS), np.nan)}, "cannot read .*in_proj.weight: .*holds NaN or infi"),
    ({}, {A: HUGE, B: np.full((ROWS, 3), 9, np.float32)}, "in_proj.* holds NaN, infinity or"),
    ({}, {A.replace("in_", "up_"): np.ones((3, 9))}, "changes '.*up_proj.weight', which is not"),
    ({}, {A.replace("A.w", "A.default.w"): np.ones((3, COLUMNS))}, "changes .* again"),
    (
        {},
        {f"{MIXER}.conv1d.lora_{half}.weight": np.ones((3, 3, 1)) for half in "AB"},
        "conv1d.weight' has shape .* and only matrices can be changed here",
    ),
    ({}, {"lm_head.weight": np.ones((1, 16))}, r"lm_head.weight' has shape \(1, 16\) here, in the"),
]


@by_message(("changes", "tensors", "message"), REFUSED)
def test_what_is_refused(changes, tensors, message, checkpoint, tmp_path):
    adapter = written(tmp_path / "adapter", pairs(WEIGHTS, IN) | tensors, **changes)
    refused(checkpoint, adapter, message)


def refused(checkpoint, adapter, message):
    into = functools.partial(convert, checkpoint, checkpoint.parent / "out", adapter=adapter)
    said = refusal(message, into)
    assert len(said.replace(str(adapter), "").replace(str(checkpoint), "")) < 500
    assert not (checkpoint.parent / "out").exists()


def test_what_has_no_adapter(checkpoint, tmp_path):
    refused(checkpoint, checkpoint, "is not an adapter .PEFT.: it has no adapter_config.json$")
    refused(checkpoint, tmp_path / "gone", "there is no such directory")
    refusal("adapter must be a directory or .* got 3", st.from_pretrained, checkpoint, adapter=3)
    adapter = written(tmp_path / "adapter", pairs(WEIGHTS, IN))
    convert(checkpoint, tmp_path / "native")
    refused(
        tmp_path / "native", adapter, "native, and .* stree-jax convert SRC DST --adapter ADAPTER"
    )
    (adapter / "adapter_model.safetensors").unlink()
    refused(checkpoint, adapter, "has no weights: none of adapter_model.safetensors, adapter_mod")


def test_a_tied_embedding_would_change_the_head(tmp_path):
    config = CONFIG | {"tie_embeddings": True}
    path = write_safetensors(tmp_path / "tied", config, WEIGHTS | {"lm_head.weight": None})
    whole = {f"{EMBEDDING}.weight": WEIGHTS[f"{EMBEDDING}.weight"] + 1}
    adapter = written(tmp_path / "adapter", whole)
    refused(path, adapter, "changes the embedding, and with it the head that is tied to it: save")


def test_an_adapter_that_changes_only_the_vision_tower(tmp_path):
    path = wrapped(tmp_path / "base")
    whole = {"base_model.model.model.visual.merger.weight": np.zeros((37, 16), np.float32)}
    adapter = written(tmp_path / "adapter", whole)
    refused(path, adapter, "changes nothing of the text model")
