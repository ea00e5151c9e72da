"""The models that converted models are compared with are themselves correct.

The NumPy models stand in for programs that need a GPU. They agree with transformers models where
the formulas coincide, and their other features have properties that can be checked.
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


def numpy_weights(model):
    return {name: tensor.detach().numpy() for name, tensor in checkpoints.hf_weights(model).items()}


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


def test_mamba_ssm_against_transformers_mamba2(tmp_path):
    hf = checkpoints.hf_checkpoint(tmp_path, n_groups=4, use_bias=True, tie_word_embeddings=True)
    config = configs.mamba_ssm_config(
        d_model=32, ssm_cfg=dict(headdim=8, d_state=16, ngroups=4, bias=True), vocab_size=64
    )
    weights = numpy_weights(hf)
    weights["backbone.embedding.weight"] = weights.pop("backbone.embeddings.weight")
    weights["lm_head.weight"] = weights["backbone.embedding.weight"]
    want = checkpoints.hf_logits(hf, TOKENS[:1])[0]
    assert_close(numpy_mamba_ssm.logits(config, weights, TOKENS[0]), want)


def test_mamba_ssm_against_transformers_bamba(tmp_path):
    """Bamba is mamba_ssm's hybrid: attention layers, and an MLP in every layer."""
    hf = checkpoints.hf_checkpoint(tmp_path, "bamba", intermediate_size=128)
    config = configs.mamba_ssm_config(
        d_model=32,
        n_layer=3,
        d_intermediate=128,
        vocab_size=64,
        ssm_cfg=dict(headdim=16, d_state=16),
        attn_layer_idx=[1],
        attn_cfg=dict(
            causal=True,
            num_heads=4,
            num_heads_kv=2,
            rotary_emb_dim=4,
            qkv_proj_bias=False,
            out_proj_bias=False,
        ),
        tie_embeddings=False,
    )
    w = numpy_weights(hf)
    weights = {
        "backbone.embedding.weight": w["model.embed_tokens.weight"],
        "backbone.norm_f.weight": w["model.final_layernorm.weight"],
        "lm_head.weight": w["lm_head.weight"],
    }
    for i in range(3):
        old, new = f"model.layers.{i}", f"backbone.layers.{i}"
        weights[f"{new}.norm.weight"] = w[f"{old}.input_layernorm.weight"]
        weights[f"{new}.norm2.weight"] = w[f"{old}.pre_ff_layernorm.weight"]
        up, gate = (w[f"{old}.feed_forward.{part}_proj.weight"] for part in ("up", "gate"))
        weights[f"{new}.mlp.fc1.weight"] = np.concatenate([up, gate])
        weights[f"{new}.mlp.fc2.weight"] = w[f"{old}.feed_forward.down_proj.weight"]
        weights |= {
            name.replace(f"{old}.mamba", f"{new}.mixer"): value
            for name, value in w.items()
            if name.startswith(f"{old}.mamba")
        }
    qkv = [w[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    weights["backbone.layers.1.mixer.in_proj.weight"] = np.concatenate(qkv)
    out = w["model.layers.1.self_attn.o_proj.weight"]
    weights["backbone.layers.1.mixer.out_proj.weight"] = out
    want = checkpoints.hf_logits(hf, TOKENS[:1])[0]
    assert weights.keys() == numpy_mamba_ssm.shapes(config).keys()
    assert_close(numpy_mamba_ssm.logits(config, weights, TOKENS[0]), want)


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


@pytest.mark.parametrize("name", configs.MAMBA_IN_LLAMA_CONFIGS)
def test_mamba_in_llama_mixer_against_transformers_bamba(name, tmp_path):
    """Against a Bamba without attention, in which each head has its own copy of x and B."""
    torch = checkpoints.torch()
    changes, mamba_changes = configs.MAMBA_IN_LLAMA_CONFIGS[name]
    changes = changes | dict(rms_norm_eps=1e-5)  # Bamba uses it in its mixer, too
    config, mamba = configs.mamba_in_llama_configs(changes, mamba_changes | dict(attn_layers=[]))
    weights = checkpoints.described_checkpoint(tmp_path, numpy_mamba_in_llama, config, mamba)
    want = numpy_mamba_in_llama.logits(config, mamba, weights, TOKENS[0])
    heads, head_dim = mamba["ssm_cfg"]["ngroups"], mamba["ssm_cfg"]["d_state"]
    inner, d_xb = mamba["d_inner"], mamba["d_xb"]

    def repeated(rows):
        """The rows of x or B, repeated for all heads."""
        by_head = rows.reshape(-1, head_dim, *rows.shape[1:])
        return np.repeat(by_head, inner // d_xb, axis=0).reshape(inner, *rows.shape[1:])

    def widened(xbc):
        x, B, C = np.split(xbc, [d_xb, 2 * d_xb])
        return np.concatenate([repeated(x), repeated(B), C])

    def as_bamba(name, value):
        if "conv1d" in name:
            value = widened(value)
        elif "in_proj" in name:
            z, xbc, dt = np.split(value, [inner, 2 * inner + 2 * d_xb])
            value = np.concatenate([z, widened(xbc), dt])
        name = name.replace("model.norm.", "model.final_layernorm.").replace("mlp", "feed_forward")
        return name.replace("post_attention_layernorm", "pre_ff_layernorm"), value

    hf = checkpoints.hf_checkpoint(
        tmp_path / "hf",
        "bamba",
        attn_layer_indices=None,
        vocab_size=40,
        mamba_n_heads=heads,
        mamba_n_groups=heads,
        mamba_d_state=head_dim,
        mamba_d_head=head_dim,
        mamba_expand=inner // 32,
        tie_word_embeddings=config["tie_word_embeddings"],
    )
    state = dict(as_bamba(*item) for item in weights.items())
    if config["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    hf.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
    assert_close(want, checkpoints.hf_logits(hf, TOKENS[:1])[0])


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
