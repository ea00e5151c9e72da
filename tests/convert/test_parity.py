"""Converted models compute what the originals do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.convert import convert
from tests.convert import numpy_mamba_ssm, peers
from tests.tiny import apply

TOKENS = np.random.default_rng(0).integers(3, 37, (2, 21)).astype(np.int32)


def assert_close(have, want, bound=1e-5):
    """Within `bound`, relative to the largest logit."""
    np.testing.assert_allclose(have, want, rtol=0, atol=bound * np.abs(want).max())


@jax.jit
def prefill_then_decode(model, tokens, lengths, rest):
    """Logits after a ragged prefill, then after each of `rest` `[B, R]` decoded one by one."""
    logits, cache = model.prefill(tokens, lengths)
    out = [logits]
    topology = st.TreeTopology.chain(0)
    tree = topology.tree(jnp.ones((len(tokens), 1), bool))
    for token in rest.T:
        logits, pending, cache = model.tree_forward(token[:, None], tree, cache)
        path = st.models.cache.path_to(tree, jnp.zeros(len(tokens), jnp.int32))
        cache = model.replay(cache, pending, path)
        out.append(logits[:, 0])
    return jnp.stack(out, axis=1)


@pytest.mark.parametrize("name", peers.HF_CONFIGS)
def test_transformers(name, tmp_path):
    changes = peers.HF_CONFIGS[name]
    hf = peers.hf_checkpoint(tmp_path / "hf", **changes)
    model = st.from_pretrained(tmp_path / "hf")
    want = peers.hf_logits(hf, TOKENS)
    assert_close(apply(model, TOKENS), want)

    # Ragged: rows of 9 and 13 tokens, then four more each. The originals run without padding.
    lengths = np.array([9, 13], np.int32)
    padded = np.where(np.arange(13) < lengths[:, None], TOKENS[:, :13], 0)
    rest = np.stack([TOKENS[i, n : n + 4] for i, n in enumerate(lengths)])
    have = prefill_then_decode(model, padded, lengths, rest)
    for row, length in enumerate(lengths):
        assert_close(have[row], want[row, length - 1 : length + 4])


@pytest.mark.parametrize("name", peers.MAMBA_SSM_CONFIGS)
def test_mamba_ssm(name, tmp_path):
    config = peers.mamba_ssm_config(**peers.MAMBA_SSM_CONFIGS[name])
    weights = peers.mamba_ssm_weights(config)
    model = st.from_pretrained(peers.write_safetensors(tmp_path / "ssm", config, weights))
    want = np.stack([numpy_mamba_ssm.logits(config, weights, row) for row in TOKENS])
    assert_close(apply(model, TOKENS), want)
    assert model.config.vocab_size == 37
    assert model.config.num_embeddings == 48


def test_codestral(tmp_path):
    """The original format; its head, state and expansion sizes are not in its config."""
    config = peers.mamba_ssm_config(
        d_model=64,
        n_layer=1,
        ssm_cfg=dict(headdim=64, d_state=128, ngroups=2),
        tie_embeddings=False,
    )
    weights = peers.mamba_ssm_weights(config)
    params = dict(dim=64, n_layers=1, vocab_size=37, n_groups=2, rms_norm=True)
    params |= dict(residual_in_fp32=True, fused_add_norm=True, pad_vocab_size_multiple=16)
    path = peers.write_safetensors(
        tmp_path / "codestral",
        params | dict(tie_embeddings=False),
        {f"model.{name}": value for name, value in weights.items()},
        "consolidated.safetensors",
    )
    want = numpy_mamba_ssm.logits(config, weights, TOKENS[0])
    assert_close(apply(st.from_pretrained(path), TOKENS[:1])[0], want)


def test_tree_decoding_of_a_converted_model(tmp_path):
    """With an MLP in every layer, a padded vocabulary and a draft of another format."""
    config = peers.mamba_ssm_config(d_intermediate=100, tie_embeddings=False)
    weights = peers.mamba_ssm_weights(config)
    target = st.from_pretrained(peers.write_safetensors(tmp_path / "target", config, weights))
    other = peers.mamba_ssm_config(n_layer=1, tie_embeddings=False)
    draft = st.from_pretrained(
        peers.write_safetensors(tmp_path / "draft", other, peers.mamba_ssm_weights(other, 1))
    )
    prompts = [[3, 4, 5], [6, 7, 8, 9, 10]]
    plain = st.generate(target, prompts, max_new_tokens=12)
    for drafter in (st.ModelDrafter(draft), st.ModelDrafter(target)):
        tree = st.generate(
            target,
            prompts,
            max_new_tokens=12,
            drafter=drafter,
            topology=st.TreeTopology.from_branching((2, 1)),
        )
        np.testing.assert_array_equal(tree.tokens, plain.tokens)
    assert tree.stats.tau == 3  # its own draft: every depth accepted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hf_to_native_to_hf_is_bit_identical(dtype, tmp_path):
    """Values and config; transformers then computes the same from the copy."""
    from safetensors.numpy import load_file

    torch, transformers = peers.torch(), peers.transformers()
    hf = peers.hf_checkpoint(tmp_path / "hf", n_groups=2, use_bias=True)
    hf.to(getattr(torch, dtype)).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "back", to="hf")
    before = load_file(tmp_path / "hf" / "model.safetensors")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    for name in before:
        stays_wide = name.endswith(("A_log", ".D", "dt_bias"))
        assert after[name].dtype == ("float32" if stays_wide else dtype), name
        np.testing.assert_array_equal(before[name].astype("float32"), after[name].astype("float32"))
    copy = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert copy.dtype == getattr(torch, dtype)
    np.testing.assert_array_equal(peers.hf_logits(copy, TOKENS), peers.hf_logits(hf, TOKENS))


def test_torch_files_give_what_torch_loads(tmp_path):
    """Every type and layout that a state dict may hold, among them views of one storage."""
    torch = peers.torch()
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
        np.testing.assert_array_equal(
            have.astype("float64"), value.detach().double().numpy(), err_msg=name
        )


def test_mamba_ssm_as_it_is_released(tmp_path):
    """A `.bin` in which the tied head shares the embedding's storage."""
    torch = peers.torch()
    config = peers.mamba_ssm_config()
    weights = peers.mamba_ssm_weights(config)
    path = peers.write_safetensors(tmp_path / "ssm", config, weights)
    want = apply(st.from_pretrained(path), TOKENS)
    (path / "model.safetensors").unlink()
    state = {name: torch.from_numpy(value) for name, value in weights.items()}
    state["lm_head.weight"] = state["backbone.embedding.weight"]
    module = torch.nn.Module()
    for name, value in state.items():
        module.register_buffer(name.replace(".", "/"), value)
    # An OrderedDict with _metadata, as `model.state_dict()` gives.
    saved = module.state_dict()
    for name in list(saved):
        saved[name.replace("/", ".")] = saved.pop(name)
    assert saved._metadata
    torch.save(saved, path / "pytorch_model.bin")
    np.testing.assert_array_equal(apply(st.from_pretrained(path), TOKENS), want)
