"""Converted models compute what the original programs compute."""

import re

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import stree_jax as st
from stree_jax.convert import convert, open_checkpoint
from tests.convert import checkpoints, configs, numpy_mamba_in_llama, numpy_mamba_ssm
from tests.helpers import apply, assert_same_model, some

thorough = pytest.mark.thorough

# Of `make test`.
QUICK = (
    "mamba2",
    "granitemoehybrid, experts, rope",
    "qwen3_next, dense layers, narrow convolution",
)
QUICK_DESCRIBED = ("as mamba2attn-2.7b", "untied, llama3 rope")
TOKENS = np.random.default_rng(0).integers(3, 37, (2, 21)).astype(np.int32)


def assert_close(have, want):
    """To float32's rounding, which is at most 7e-6 of the largest logit."""
    assert_allclose(have, want, rtol=0, atol=2e-5 * np.abs(want).max())


def in_memory(hf, path):
    """The config that transformers saved of a model, and the tensors that it has in memory."""
    tensors = {name: value.detach().numpy() for name, value in hf.state_dict().items()}
    return checkpoints.read(path)[0], tensors


def assert_decodes_alike(model, hf):
    """24 greedy tokens of a ragged batch, drafted in trees, are the best by logits in float64."""
    prompts = [TOKENS[0, :13].tolist(), TOKENS[1].tolist()]
    drafter = st.NgramDrafter()
    out = st.generate(model, prompts, drafter=drafter, max_new_tokens=24, eos_token=[])
    for prompt, tokens in zip(prompts, out.tokens, strict=True):
        logits = checkpoints.hf_logits(hf, [[*prompt, *tokens]])[0]
        assert_array_equal(tokens, logits[len(prompt) - 1 : -1].argmax(axis=-1))


@pytest.mark.parametrize("name", some(configs.TRANSFORMERS_CONFIGS, *QUICK))
def test_transformers_there_and_back(name, tmp_path):
    """Forward pass, decoding, and transformers with our copy."""
    model_type, changes = name.split(",")[0], configs.TRANSFORMERS_CONFIGS[name]
    hf = checkpoints.hf_checkpoint(tmp_path / "hf", model_type, **changes)
    want = checkpoints.hf_logits(hf, TOKENS)
    model = st.from_pretrained(tmp_path / "hf")
    assert_close(apply(model, TOKENS), want)
    if name == model_type or model_type.startswith(("qwen3", "lfm", "kimi", "bailing")):
        assert_decodes_alike(model, hf)

    convert(tmp_path / "hf", tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "back", to=model_type)
    assert_same_model(st.from_pretrained(tmp_path / "back"), model)
    # transformers saves some tensors under the names of others.
    if model_type not in ("olmo_hybrid", "kimi_linear", "bailing_hybrid"):
        assert_same_tensors(tmp_path / "hf", tmp_path / "back")
    copy = checkpoints.transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert_array_equal(checkpoints.hf_logits(copy, TOKENS), want)


@thorough
def test_the_text_model_of_a_wrapper(tmp_path):
    """As transformers saves it, experts one by one, and as it is released, merged."""
    hf = checkpoints.hf_checkpoint(
        tmp_path / "hf", "qwen3_5_moe", auto="AutoModelForImageTextToText", **configs.QWEN_WRAPPER
    )
    model = st.from_pretrained(tmp_path / "hf")
    assert_close(apply(model, TOKENS), checkpoints.hf_logits(hf, TOKENS))
    config, tensors = in_memory(hf, tmp_path / "hf")
    assert tensors.pop("lm_head.weight").shape == (64, 32)  # tied, as the outer config says
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in tensors
    merged = checkpoints.write_safetensors(tmp_path / "merged", config, tensors)
    assert_same_model(st.from_pretrained(merged), model)
    notes = "\n".join(open_checkpoint(merged).ignored)
    assert re.search("model.visual.* and 20 others: not of the text model of qwen3_5_moe", notes)


def assert_same_tensors(before, after):
    (_, before), (_, after) = map(checkpoints.read, (before, after))
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert_array_equal(value, after[name], err_msg=name)


@thorough
def test_the_floor_of_the_time_step_is_a_quirk(tmp_path):
    """transformers clamps at time_step_min, which the published config does not ask for."""
    changes = dict(tie_word_embeddings=False, time_step_min=0.3)
    hf = checkpoints.hf_checkpoint(tmp_path / "hf", "nemotron_h", **changes)
    want = checkpoints.hf_logits(hf, TOKENS)
    assert_close(apply(st.from_pretrained(tmp_path / "hf", quirks=["hf_dt_floor"]), TOKENS), want)
    by_config = apply(st.from_pretrained(tmp_path / "hf"), TOKENS)
    assert np.abs(by_config - want).max() > 1e-2 * np.abs(want).max()


@pytest.mark.parametrize("name", some(checkpoints.DESCRIBED, *QUICK_DESCRIBED))
def test_described_models_there_and_back(name, tmp_path):
    module, files, target = checkpoints.DESCRIBED[name]
    path = tmp_path / "model"
    weights = checkpoints.described_checkpoint(path, module, *files)
    model = st.from_pretrained(path)
    want = np.stack([module.logits(*files, weights, row) for row in TOKENS])
    assert_close(apply(model, TOKENS), want)

    convert(path, tmp_path / "back", to=target)
    assert_same_tensors(path, tmp_path / "back")
    assert st.from_pretrained(tmp_path / "back").config == model.config


@thorough
def test_a_rotation_without_its_scaling_is_a_quirk(tmp_path):
    """Upstream's fast inference code ignores `rope_scaling`."""
    module, files, _ = checkpoints.DESCRIBED["untied, llama3 rope"]
    weights = checkpoints.described_checkpoint(tmp_path / "model", module, *files)
    want = module.logits(*files, weights, TOKENS[0], plain_rope=True)
    by_config = apply(st.from_pretrained(tmp_path / "model"), TOKENS)[0]
    assert np.abs(by_config - want).max() > 1e-2 * np.abs(want).max()
    model = st.from_pretrained(tmp_path / "model", quirks=["plain_rope"])
    assert_close(apply(model, TOKENS)[0], want)


@thorough
def test_codestral(tmp_path):
    """The original format; its head, state and expansion sizes are not in its config."""
    sizes = dict(headdim=64, d_state=128, ngroups=2)
    config = configs.mamba_ssm_config(d_model=64, n_layer=1, ssm_cfg=sizes, tie_embeddings=False)
    weights = checkpoints.described_weights(numpy_mamba_ssm, config)
    params = dict.fromkeys(("rms_norm", "residual_in_fp32", "fused_add_norm"), True)
    params |= dict(tie_embeddings=False, pad_vocab_size_multiple=16)
    path = checkpoints.write_safetensors(
        tmp_path / "codestral",
        dict(dim=64, n_layers=1, vocab_size=37, n_groups=2) | params,
        {f"model.{name}": value for name, value in weights.items()},
        "consolidated.safetensors",
    )
    want = numpy_mamba_ssm.logits(config, weights, TOKENS[0])
    assert_close(apply(st.from_pretrained(path), TOKENS[:1])[0], want)


@thorough
@pytest.mark.parametrize(
    ("model_type", "changes", "wide"),
    [
        ("mamba2", dict(n_groups=2, use_bias=True), r"A_log$|\.D$|dt_bias$"),
        ("qwen3_5_text", {}, r"A_log$|dt_bias$|norm"),
    ],
)
def test_bfloat16_there_and_back(model_type, changes, wide, tmp_path):
    """Only what needs it stays wide, and transformers computes the same from the copy."""
    torch, transformers = checkpoints.torch(), checkpoints.transformers()
    hf = checkpoints.hf_checkpoint(tmp_path / "hf", model_type, **changes)
    hf.to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "back", to="hf")
    (_, before), (_, after) = (checkpoints.read(tmp_path / name) for name in ("hf", "back"))
    assert before.keys() == after.keys()
    for name in before:
        assert after[name].dtype == ("float32" if re.search(wide, name) else "bfloat16"), name
        assert_array_equal(before[name].astype("float32"), after[name].astype("float32"))
    read = transformers.AutoModelForCausalLM.from_pretrained
    again, copy = (read(tmp_path / name).eval() for name in ("hf", "back"))
    assert copy.dtype == torch.bfloat16
    assert_array_equal(checkpoints.hf_logits(copy, TOKENS), checkpoints.hf_logits(again, TOKENS))


def test_torch_files_give_what_torch_loads(tmp_path):
    """All dtypes and layouts, including views of one storage."""
    torch = checkpoints.torch()
    from stree_jax.convert.torch_file import open_torch_file

    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state = {
        "contiguous": base,
        "transposed": base.T,
        "slice": base[1:3, 2:5],
        "bfloat16": base.bfloat16(),
        "float16": base.half(),
        "float64": base.double(),
        "int64": base.long(),
        "bool": base > 3,
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(base),
    }
    torch.save(state, tmp_path / "pytorch_model.bin")
    loaded = open_torch_file(tmp_path / "pytorch_model.bin")
    assert loaded.keys() == state.keys()
    for name, value in state.items():
        have = loaded[name].read()
        assert have.shape == loaded[name].shape == tuple(value.shape)
        assert str(have.dtype) == str(value.dtype).removeprefix("torch.")
        assert_array_equal(have.astype("float64"), value.detach().double().numpy(), err_msg=name)


@thorough
def test_mamba_ssm_as_it_is_released(tmp_path):
    """A `.bin` in which the tied head shares the embedding's storage."""
    torch = checkpoints.torch()
    path = tmp_path / "ssm"
    config = configs.mamba_ssm_config()
    weights = checkpoints.described_checkpoint(path, numpy_mamba_ssm, config)
    want = apply(st.from_pretrained(path), TOKENS)
    (path / "model.safetensors").unlink()
    state = torch.nn.Module().state_dict()  # an OrderedDict with _metadata
    assert state._metadata
    state |= {name: torch.from_numpy(value) for name, value in weights.items()}
    state["lm_head.weight"] = state["backbone.embedding.weight"]
    torch.save(state, path / "pytorch_model.bin")
    assert_array_equal(apply(st.from_pretrained(path), TOKENS), want)


@pytest.mark.parametrize("model_type", ["nemotron_h", "granitemoehybrid"])
def test_a_state_dict_of_transformers(model_type, tmp_path):
    """Saved as it is, without transformers' own renaming."""
    changes = dict(
        nemotron_h=dict(layers_block_type=["linear_attention", "moe", "full_attention", "moe"]),
        granitemoehybrid=dict(num_local_experts=4, num_experts_per_tok=2),
    )
    hf = checkpoints.hf_checkpoint(tmp_path / "disk", model_type, **changes[model_type])
    config, tensors = in_memory(hf, tmp_path / "disk")
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight")
    assert any(name.endswith("experts.down_proj") for name in tensors)
    memory = checkpoints.write_safetensors(tmp_path / "memory", config, tensors)
    assert_same_model(*map(st.from_pretrained, (tmp_path / "disk", memory)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["untied, llama3 rope", "tied, plain rope, d_xb < d_inner"])
def test_mamba_in_llama_without_mamba_is_transformers_llama(name, tmp_path):
    """transformers can load the files, as the Llama that config.json says."""
    transformers = checkpoints.transformers()
    changes, mamba_changes = configs.MAMBA_IN_LLAMA_CONFIGS[name]
    both = configs.mamba_in_llama_configs(changes, mamba_changes | dict(attn_layers=[0, 1, 2]))
    weights = checkpoints.described_checkpoint(tmp_path, numpy_mamba_in_llama, *both)
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert isinstance(hf, transformers.LlamaForCausalLM)
    want = checkpoints.hf_logits(hf, TOKENS[:1])[0]
    have = numpy_mamba_in_llama.logits(*both, weights, TOKENS[0])
    assert_close(have, want)
    if both[0]["rope_scaling"]:  # all three cases of the scaling occur
        scaled, unscaled = (numpy_mamba_in_llama.frequencies(both[0], each) for each in (0, 1))
        ratio = unscaled / scaled
        assert (ratio[0], ratio[-1]) == (1, 8)
        assert ((ratio > 1) & (ratio < 8)).any()
