"""The models that converted models are compared with are themselves correct.

The NumPy models stand in for programs that need a GPU. Where they and transformers have the same
formulas, `test_parity.py` compares both with the library; here is what only they have.
"""

import numpy as np
import pytest

from tests import numpy_parts
from tests.convert import checkpoints, configs, numpy_mamba_in_llama, numpy_mamba_ssm

TOKENS = np.random.default_rng(0).integers(3, 37, (2, 21))
# Few tokens, because the NumPy models loop over time and are run many times.
SHORT = TOKENS[0, :11]


# These tests check the oracles, not the library.
pytestmark = pytest.mark.slow


def assert_close(have, want, bound=1e-5):
    np.testing.assert_allclose(have, want, rtol=0, atol=bound * np.abs(want).max())


@pytest.mark.parametrize("name", checkpoints.DESCRIBED)
def test_numpy_models_are_causal_and_use_all_weights(name):
    module, files, _ = checkpoints.DESCRIBED[name]
    weights = checkpoints.described_weights(module, *files)

    def logits(weights, tokens):
        return module.logits(*files, weights, tokens)

    want = logits(weights, SHORT)
    assert np.isfinite(want).all()
    changed = SHORT.copy()
    changed[7] = 36 if SHORT[7] != 36 else 35
    have = logits(weights, changed)
    np.testing.assert_allclose(have[:7], want[:7], rtol=1e-12)
    assert (np.abs(have - want)[7:].max(axis=1) > 1e-3).all()
    for name, value in weights.items():
        noise = np.random.default_rng(1).normal(size=value.shape)
        have = logits(weights | {name: value + 0.1 * noise}, SHORT)
        assert np.abs(have - want).max() > 1e-3, name


def test_mamba_ssm_attention_extras_reduce_to_plain_attention():
    """With an identity convolution, a branch multiplied by zero, and the default scale."""
    attention = dict(causal=True, num_heads=2, rotary_emb_dim=4)
    plain = configs.mamba_ssm_config(attn_layer_idx=[0], attn_cfg=attention)
    weights = checkpoints.described_weights(numpy_mamba_ssm, plain)
    want = numpy_mamba_ssm.logits(plain, weights, SHORT)

    extras = dict(d_conv=3, mlp_dim=200, softmax_scale=8**-0.5, num_heads_kv=2, head_dim=8)
    full = plain | dict(attn_cfg=attention | extras)
    more = checkpoints.described_weights(numpy_mamba_ssm, full)
    mixer = "backbone.layers.0.mixer"
    for name in ("in_proj.weight", "in_proj.bias"):
        more[f"{mixer}.{name}"][:48] = weights[f"{mixer}.{name}"]
    more[f"{mixer}.out_proj.weight"][:, :16] = weights[f"{mixer}.out_proj.weight"]
    more[f"{mixer}.out_proj.weight"][:, 16:] = 0
    more[f"{mixer}.conv1d.weight"][:] = [0, 0, 1]
    more[f"{mixer}.conv1d.bias"][:] = 0
    for name, value in weights.items():
        if more[name].shape == value.shape:
            more[name] = value
    assert_close(numpy_mamba_ssm.logits(full, more, SHORT), want, 1e-12)


def test_interleaved_rotation_is_the_same_on_other_channels():
    x = np.random.default_rng(0).normal(size=(5, 2, 10))
    rope = numpy_parts.rope_frequencies(6, 100.0)
    order = [0, 3, 1, 4, 2, 5, 6, 7, 8, 9]
    want = numpy_parts.rotate(x, rope)[..., order]
    np.testing.assert_allclose(numpy_parts.rotate(x[..., order], rope, interleaved=True), want)


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
    plain = numpy_mamba_in_llama.logits(*both, weights, TOKENS[0], plain_rope=True)
    assert (np.abs(plain - have).max() > 1e-2) == (both[0]["rope_scaling"] is not None)
    if both[0]["rope_scaling"]:  # all three cases of the scaling occur
        scaled, unscaled = (numpy_mamba_in_llama.frequencies(both[0], each) for each in (0, 1))
        ratio = unscaled / scaled
        assert (ratio[0], ratio[-1]) == (1, 8)
        assert ((ratio > 1) & (ratio < 8)).any()


@pytest.mark.parametrize("name", configs.TRANSFORMERS_CONFIGS)
def test_transformers_models_use_all_weights(name, tmp_path):
    torch, changes = checkpoints.torch(), configs.TRANSFORMERS_CONFIGS[name]
    hf = checkpoints.hf_checkpoint(tmp_path, name.split(",")[0], **changes)
    want = checkpoints.hf_logits(hf, TOKENS)
    assert np.isfinite(want).all()
    # The gradient of a random sum shows which weights and experts matter.
    logits = hf(torch.tensor(TOKENS), use_cache=False).logits
    noise = np.random.default_rng(1).normal(size=logits.shape).astype(np.float32)
    (logits * torch.from_numpy(noise)).sum().backward()
    for weight, tensor in checkpoints.hf_weights(hf).items():
        if not isinstance(tensor, torch.nn.Parameter):
            tensor[0] += 2
            assert np.abs(checkpoints.hf_logits(hf, TOKENS) - want).max() > 1e-3, weight
            tensor[0] -= 2
        elif tensor.ndim == 3:
            assert (tensor.grad.abs().amax((1, 2)) > 1e-4).all(), weight
        else:
            assert tensor.grad.abs().max() > 1e-4, weight
