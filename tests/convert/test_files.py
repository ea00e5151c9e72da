"""Reading files: what is refused, and that nothing is run, crashes or stays half written."""

import contextlib
import dataclasses
import io
import json
import os
import pickle
import struct
import zipfile

import jax
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.convert import convert, open_checkpoint
from stree_jax.convert.torch_file import open_torch_file
from tests.convert import peers

CONFIG = peers.mamba_ssm_config(tie_embeddings=False)
WEIGHTS = peers.mamba_ssm_weights(CONFIG)


@pytest.fixture
def checkpoint(tmp_path):
    return peers.write_safetensors(tmp_path / "model", CONFIG, WEIGHTS)


def refused(path, message):
    """Refused by everything that reads it, and without a trace."""
    for use in (open_checkpoint, st.from_pretrained, lambda p: convert(p, path.parent / "out")):
        with pytest.raises(ValueError, match=message):
            use(path)
    assert not [entry for entry in path.parent.iterdir() if "out" in entry.name]


def rewritten(checkpoint, **changes):
    """The checkpoint with other tensors: None removes one."""
    weights = {name: value for name, value in (WEIGHTS | changes).items() if value is not None}
    return peers.write_safetensors(checkpoint, CONFIG, weights)


HF = {"model_type": "mamba2", "hidden_size": 16, "num_heads": 4, "head_dim": 8}

ATTENTION = {"causal": True, "num_heads": 2}

MIXER = "backbone.layers.1.mixer"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{MIXER}.D": None}, rf"{MIXER}\.D \(4,\) is missing"),
        (
            {"extra.weight": np.ones((2, 3), np.float32)},
            r"extra\.weight\W \(2, 3\) is not expected",
        ),
        ({f"{MIXER}.D": np.ones(5, np.float32)}, r"D has shape \(5,\), the config says \(4,\)"),
        ({f"{MIXER}.D": np.ones(4, np.int32)}, "D holds int32, not real numbers"),
        (
            {f"{MIXER}.in_proj.weight": WEIGHTS[f"{MIXER}.in_proj.weight"].T},
            r"in_proj\.weight has shape \(16, 84\), the config says \(84, 16\)",
        ),
    ],
)
def test_names_and_shapes(checkpoint, changes, message):
    refused(rewritten(checkpoint, **changes), message)


def test_all_problems_are_reported_at_once(checkpoint):
    path = rewritten(
        checkpoint,
        **{f"{MIXER}.D": None, f"{MIXER}.A_log": np.ones(3, np.float32), "x": np.ones(1)},
    )
    with pytest.raises(ValueError, match=r"'x' .*; .*A_log has shape .*; .*D \(4,\) is missing"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("A_log", np.nan), ("A_log", 1000.0), ("D", np.inf), ("norm.weight", np.nan)],
)
def test_weights_that_are_not_finite(checkpoint, tmp_path, name, value):
    weight = WEIGHTS[f"{MIXER}.{name}"].copy()
    weight[1] = value
    path = rewritten(checkpoint, **{f"{MIXER}.{name}": weight})
    for use in (st.from_pretrained, lambda p: convert(p, tmp_path / "out")):
        with pytest.raises(ValueError, match=f"{name} holds NaN, infinity or a number too large"):
            use(path)
    assert not (tmp_path / "out").exists()


def test_a_tied_head_that_is_not_the_embedding(tmp_path):
    config = peers.mamba_ssm_config()
    weights = peers.mamba_ssm_weights(config)
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    path = peers.write_safetensors(tmp_path / "tied", config, weights)
    with pytest.raises(ValueError, match=r"ties the head to the embedding, but lm_head\.weight is"):
        st.from_pretrained(path)


# --- Configs.


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"ssm_cfg": {}}, "ssm_cfg.layer is 'Mamba1' \\(the default\\); only Mamba-2"),
        ({"ssm_cfg": {"layer": "Mamba1"}}, "ssm_cfg.layer is 'Mamba1'; only Mamba-2"),
        (CONFIG | {"attn_layer_idx": [1]}, "attn_cfg.causal is not true"),
        (CONFIG | {"attn_layer_idx": [2]}, "attn_layer_idx must be a list of layers below 2"),
        (
            CONFIG | {"attn_layer_idx": [1], "attn_cfg": ATTENTION | {"novel": 1}},
            r"unknown fields \['attn_cfg.novel'\]",
        ),
        (
            CONFIG
            | {"attn_layer_idx": [1], "attn_cfg": ATTENTION | {"rotary_emb_interleaved": True}},
            "rotary_emb_interleaved = true is not supported",
        ),
        (CONFIG | {"rms_norm": False}, r"rms_norm = false \(LayerNorm\) is not supported"),
        (CONFIG | {"novel": 1}, r"unknown fields \['novel'\]; they might change"),
        (
            CONFIG | {"ssm_cfg": CONFIG["ssm_cfg"] | {"novel": 1}},
            r"unknown fields \['ssm_cfg.novel'\]",
        ),
        (CONFIG | {"d_model": "16"}, "d_model must be an integer .*'16'"),
        (CONFIG | {"n_layer": 10**9}, "n_layer must be an integer from 1 to 4096"),
        (CONFIG | {"d_model": None}, "d_model is missing"),
        (CONFIG | {"quantization_config": {"bits": 4}}, "quantised checkpoints are not supported"),
        ({"model_type": "mamba"}, "'mamba': Mamba-1 layers"),
        ({"model_type": "jamba"}, "'jamba': Mamba-1 layers"),
        ({"model_type": "qwen3_next"}, "'qwen3_next': gated delta net"),
        ({"model_type": "recurrent_gemma"}, "'recurrent_gemma': RG-LRU"),
        ({"model_type": "bamba", "partial_rotary_factor": "x", "novel": 1}, "unknown fields"),
        (
            {"model_type": "bamba", "rope_parameters": {"partial_rotary_factor": 0.25}},
            "partial_rotary_factor is not 0.5",
        ),
        ({"model_type": "bamba", "rope_scaling": {"type": "yarn"}}, "rope_type is 'yarn'"),
        (
            {"model_type": "bamba", "rope_scaling": {"type": "llama3"}},
            r"rope_parameters\.factor is missing",
        ),
        ({"model_type": "bamba", "mamba_n_heads": 3}, "mamba_n_heads = 3 does not divide 8192"),
        ({"model_type": "falcon_h1", "mlp_multipliers": [1]}, "mlp_multipliers must be 2 numbers"),
        ({"model_type": "falcon_h1", "hidden_act": "relu"}, "hidden_act is 'relu', not one of"),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["mamba"]},
            "layer_types has 1 entries for num_hidden_layers = 32",
        ),
        (
            {"model_type": "granitemoehybrid", "num_experts_per_tok": 9},
            "num_active = 9 is more than the 8 experts",
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "M*x"},
            "hybrid_override_pattern must consist of M\\*-E, got 'M\\*x'",
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "M*", "num_hidden_layers": 3},
            "has 2 letters for 3 layers",
        ),
        ({"model_type": "nemotron_h", "layers_block_type": ["rwkv"]}, r"unknown kinds \[.*rwkv"),
        ({"model_type": "zamba2", "use_long_context": True}, "use_long_context = true is not"),
        (
            {"model_type": "zamba2", "num_hidden_layers": 1, "layers_block_type": ["mamba"]},
            "no layer of layers_block_type is 'hybrid'",
        ),
        ({"model_type": "nemotron_h_omni"}, "a multimodal wrapper"),
        ({"model_type": "llama"}, "of no known family \\(model_type = 'llama'\\)"),
        ({"d_model": 8, "n_layer": 2}, "has no ssm_cfg: a Mamba-1 model"),
        ({"model_type": "mamba2", "hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "mamba2", "hidden_size": 100}, "is not num_heads \\* head_dim"),
        ({"dim": 64, "n_layers": 1, "vocab_size": 9, "n_heads": 8}, "of no known family"),
        (CONFIG | {"attn_layer_idx": 1}, "attn_layer_idx must be a list of layers"),
        (
            CONFIG | {"ssm_cfg": CONFIG["ssm_cfg"] | {"norm_before_gate": "false"}},
            "norm_before_gate must be true or false, got 'false'",
        ),
        (CONFIG | {"ssm_cfg": CONFIG["ssm_cfg"] | {"d_conv": 1}}, r"config\.json: conv_width must"),
        (HF | {"time_step_limit": [0.0, {"__float__": ["x"]}]}, "time_step_limit must be two"),
        (HF | {"layer_norm_epsilon": 10**400}, "layer_norm_epsilon must be a number, got 1000"),
        (HF | {"layer_norm_epsilon": 0}, "layer_norm_epsilon must be a number above 0"),
        (HF | {"use_bias": 1}, "use_bias must be true or false, got 1"),
        ([1], "it is not a JSON object"),
    ],
)
def test_configs_that_are_refused(checkpoint, config, message):
    (checkpoint / "config.json").write_text(json.dumps(config))
    refused(checkpoint, message)


@pytest.mark.parametrize(
    ("config", "mamba_config", "message"),
    [
        ({}, {"d_inner": 24}, r"mamba_config\.json: d_inner = 24 is not ssm_cfg\.ngroups"),
        ({}, {"n_layer": 9}, r"n_layer is not config\.json's num_hidden_layers"),
        ({}, {"attn_layers": [9]}, "attn_layers must be a list of layers below"),
        ({}, {"novel": 1}, r"unknown fields \['novel'\]"),
        ({"rope_scaling": {"rope_type": "yarn"}}, {}, "rope_type is 'yarn'"),
    ],
)
def test_damaged_mamba_in_llama(tmp_path, config, mamba_config, message):
    path = tmp_path / "model"
    configs = peers.mamba_in_llama_configs()
    peers.mamba_in_llama_checkpoint(path, *configs)
    names = ("config.json", "mamba_config.json")
    for name, values, changes in zip(names, configs, (config, mamba_config), strict=True):
        (path / name).write_text(json.dumps(values | changes))
    refused(path, message)


def test_quirks_are_known_and_belong_to_a_family(checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"unknown quirks \['fast'\]; known: \['hf_dt_floor'"):
        open_checkpoint(checkpoint, ["fast"])
    with pytest.raises(ValueError, match=r"this family has no quirk \['plain_rope'\]"):
        open_checkpoint(checkpoint, ["plain_rope"])
    convert(checkpoint, tmp_path / "native")
    with pytest.raises(ValueError, match="is native; quirks are for"):
        st.from_pretrained(tmp_path / "native", quirks=["plain_rope"])


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\x00", '{"a": }'])
def test_damaged_json(checkpoint, text):
    (checkpoint / "config.json").write_text(text)
    refused(checkpoint, r"config\.json is damaged")


def test_nothing_there(tmp_path):
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"has no config\.json or params\.json")
    with pytest.raises(ValueError, match="no checkpoint at .*nowhere"):
        st.from_pretrained(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; a checkpoint is a directory"):
        st.from_pretrained(tmp_path / "file")


def test_a_hub_name_without_a_network(monkeypatch):
    import huggingface_hub

    def offline(*_, **__):
        raise ConnectionError("cannot reach the hub\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match="no directory some/model, .*: cannot reach the hub$"):
        st.from_pretrained("some/model")
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"install stree-jax\[hub\]"):
        st.from_pretrained("some/model")


def test_a_hub_name(monkeypatch, checkpoint):
    """The configs first, then only the weights that are needed."""
    import huggingface_hub

    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(checkpoint)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert st.from_pretrained("some/model").config.d_model == 16
    assert "config.json" in asked[0][1]
    assert asked[1:] == [("some/model", ["model*.safetensors"])]


def test_both_forms_of_a_model_in_one_directory(tmp_path):
    """As in Codestral-Mamba's repository: config.json goes with model.*, params.json does not."""
    path = tmp_path / "both"
    peers.write_safetensors(tmp_path / "ssm", CONFIG, WEIGHTS)
    convert(tmp_path / "ssm", path, to="hf")
    want = st.from_pretrained(path)
    params = dict(dim=16, n_layers=2, vocab_size=37, n_groups=1)
    other = {f"model.{name}": value for name, value in WEIGHTS.items()}
    peers.write_safetensors(path, params, other, "consolidated.safetensors")
    checkpoint = open_checkpoint(path)
    assert checkpoint.description.family == "transformers mamba2"
    assert st.from_pretrained(path).config == want.config


def test_a_file_and_an_index_of_another(checkpoint):
    write_index(checkpoint, {"x": "part-0.safetensors"})
    refused(checkpoint, "has both model.safetensors and model.safetensors.index.json")


# As published, but for the sizes; the first with fields that only old conversions have.
CODESTRAL_HF = """{
  "_name_or_path": "/repo/codestral", "_attn_implementation_autoset": true,
  "architectures": ["Mamba2ForCausalLM"], "bos_token_id": 0, "chunk_size": 256,
  "conv_kernel": 4, "eos_token_id": [0, 2], "expand": 2, "head_dim": 8, "hidden_act": "silu",
  "hidden_size": 16, "initializer_range": 0.1, "intermediate_size": 32,
  "layer_norm_epsilon": 1e-05, "model_type": "mamba2", "n_groups": 1, "norm_before_gate": true,
  "num_heads": 4, "num_hidden_layers": 2, "pad_token_id": 0, "rescale_prenorm_residual": false,
  "residual_in_fp32": true, "rms_norm": true, "state_size": 8, "tie_word_embeddings": false,
  "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_limit": [0.0, Infinity],
  "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256, "time_step_scale": 1.0,
  "torch_dtype": "bfloat16", "transformers_version": "4.44.0.dev0", "use_bias": false,
  "use_cache": true, "use_conv_bias": true, "vocab_size": 48 }"""


@pytest.mark.parametrize("embedding", ["embedding", "embeddings"])
def test_a_config_of_transformers_4(checkpoint, embedding):
    """Bare Infinity, fields that nothing reads, a list of end tokens, the old embedding's name."""
    want = st.from_pretrained(checkpoint)
    weights = dict(WEIGHTS)
    weights[f"backbone.{embedding}.weight"] = weights.pop("backbone.embedding.weight")
    peers.write_safetensors(checkpoint, {}, weights)
    (checkpoint / "config.json").write_text(CODESTRAL_HF)
    have = st.from_pretrained(checkpoint)
    assert have.config == dataclasses.replace(
        want.config, vocab_size=48, padded_vocab_size=None, eos_token=(0, 2)
    )
    jax.tree.map(np.testing.assert_array_equal, nnx.state(have), nnx.state(want))
    notes = "; ".join(open_checkpoint(checkpoint).ignored)
    assert "norm_before_gate: transformers never read it" in notes


MAMBA2_130M = """{ "d_model": 16, "d_intermediate": 0, "n_layer": 2, "vocab_size": 37,
  "ssm_cfg": {"layer": "Mamba2", "d_state": 8, "headdim": 8}, "attn_layer_idx": [],
  "attn_cfg": {}, "rms_norm": true, "residual_in_fp32": true, "fused_add_norm": true,
  "pad_vocab_size_multiple": 16, "tie_embeddings": false }"""


def test_the_published_config_of_mamba_ssm(checkpoint):
    (checkpoint / "config.json").write_text(MAMBA2_130M)
    assert open_checkpoint(checkpoint).description.family == "mamba_ssm"
    assert open_checkpoint(checkpoint).ignored == [
        "fused_add_norm: a choice of kernels",
        "attn_cfg: attention settings; no layer has attention",
    ]


# --- safetensors.


def test_truncated_and_scrambled_safetensors(checkpoint):
    """Every cut and a hundred random changes end in a ValueError or a sound model."""
    file = checkpoint / "model.safetensors"
    data = file.read_bytes()
    for cut in (0, 1, 7, 8, 100, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:cut])
        refused(checkpoint, "is damaged")
    rng = np.random.default_rng(0)
    header = 8 + struct.unpack("<Q", data[:8])[0]
    for _ in range(100):
        changed = bytearray(data)
        for at in rng.integers(header, size=rng.integers(1, 5)):
            changed[at] = rng.integers(256)
        file.write_bytes(changed)
        with contextlib.suppress(ValueError):
            open_checkpoint(checkpoint)


def test_float8_is_refused_by_name(checkpoint):
    header = {"x": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}
    encoded = json.dumps(header).encode()
    file = checkpoint / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(4))
    refused(checkpoint, "stored as F8_E4M3; quantised checkpoints are not supported")


def sharded(checkpoint):
    """The checkpoint in two files and an index."""
    from safetensors.numpy import save_file

    names = sorted(WEIGHTS)
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for part in set(weight_map.values()):
        tensors = {name: WEIGHTS[name] for name in names if weight_map[name] == part}
        save_file(tensors, checkpoint / part)
    (checkpoint / "model.safetensors").unlink()
    return weight_map


def write_index(checkpoint, weight_map):
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards(checkpoint):
    want = st.from_pretrained(checkpoint)
    write_index(checkpoint, sharded(checkpoint))
    have = st.from_pretrained(checkpoint)
    np.testing.assert_array_equal(have.embedding[...], want.embedding[...])
    np.testing.assert_array_equal(
        have.blocks[1].mixer.in_proj.kernel[...], want.blocks[1].mixer.in_proj.kernel[...]
    )


@pytest.mark.parametrize(
    "name",
    [
        "../part-0.safetensors",
        "/etc/passwd",
        "sub/x.safetensors",
        "..\\x",
        "",
        ".",
        3,
        "x" * 5000,
        "a\0b",
    ],
)
def test_shards_outside_the_directory(checkpoint, name):
    weight_map = sharded(checkpoint)
    write_index(checkpoint, weight_map | {"x": name})
    refused(checkpoint, "not a plain file name|does not exist")


def test_an_index_that_does_not_fit_its_shards(checkpoint):
    weight_map = sharded(checkpoint)
    first = next(iter(weight_map))
    other = {"part-0.safetensors": "part-1.safetensors"}
    cases = [
        ({}, "has no weight_map"),
        (weight_map | {"ghost": "part-0.safetensors"}, "1 tensors are not in their files"),
        (weight_map | {first: "part-9.safetensors"}, "'part-9.safetensors', which does not exist"),
        (weight_map | {first: other[weight_map[first]]}, "1 tensors are not in their files"),
        ({k: v for k, v in weight_map.items() if k != first}, "1 tensors are in files it does not"),
    ]
    for changed, message in cases:
        write_index(checkpoint, changed)
        refused(checkpoint, message)


# --- PyTorch's zip files, written by hand: these tests need no torch.


class Named:
    """Pickles as a global name."""

    def __init__(self, module, name):
        self.module, self.name = module, name


class Call:
    """Pickles as a call of a global."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments


class Storage:
    """Pickles as a persistent id."""

    def __init__(self, *pid):
        self.pid = pid


def pickled(value):
    """Protocol 2, opcode by opcode, since the names cannot be imported here."""
    out = io.BytesIO()

    def write(item):
        match item:
            case Named():
                out.write(b"c" + f"{item.module}\n{item.name}\n".encode())
            case Call():
                write(item.function)
                write(item.arguments)
                out.write(b"R")
            case Storage():
                write(item.pid)
                out.write(b"Q")
            case tuple():
                out.write(b"(")
                for part in item:
                    write(part)
                out.write(b"t")
            case dict():
                out.write(b"}(")
                for key, part in item.items():
                    write(key)
                    write(part)
                out.write(b"u")
            case _:
                out.write(pickle.dumps(item, protocol=2)[2:-1])

    out.write(b"\x80\x02")
    write(value)
    out.write(b".")
    return out.getvalue()


FLOATS = Named("torch", "FloatStorage")
REBUILD = Named("torch._utils", "_rebuild_tensor_v2")


def tensor(key="0", size=6, offset=0, shape=(2, 3), strides=(3, 1), kind=FLOATS):
    storage = Storage("storage", kind, key, "cpu", size)
    return Call(
        REBUILD, storage, offset, shape, strides, False, Call(Named("collections", "OrderedDict"))
    )


def torch_file(path, state, *, data=bytes(range(24)), compression=zipfile.ZIP_STORED, extra=()):
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", state if isinstance(state, bytes) else pickled(state))
        archive.writestr("archive/data/0", data)
        for name, content in extra:
            archive.writestr(f"archive/{name}", content)
    return path


def test_a_torch_file_by_hand(tmp_path):
    tensors = open_torch_file(torch_file(tmp_path / "x.bin", {"w": tensor()}))
    want = np.frombuffer(bytes(range(24)), np.float32).reshape(2, 3)
    np.testing.assert_array_equal(tensors["w"].read(), want)
    view = open_torch_file(
        torch_file(tmp_path / "v.bin", {"w": tensor(offset=1, shape=(2, 2), strides=(1, 3))})
    )
    np.testing.assert_array_equal(view["w"].read(), want[:, 1:].T)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("subprocess", "Popen"),
        ("torch", "load"),
        ("torch._utils", "_rebuild_qtensor"),
        ("numpy", "load"),
        ("collections", "defaultdict"),
        ("stree_jax.convert.torch_file", "open_torch_file"),
    ],
)
def test_pickles_that_ask_for_anything_else(tmp_path, module, name):
    """Nothing is run: the argument would leave a file behind."""
    marker = tmp_path / "ran"
    state = {"w": Call(Named(module, name), f"touch {marker}")}
    with pytest.raises(ValueError, match=rf"refused: its pickle asks for {module}\.{name}"):
        open_torch_file(torch_file(tmp_path / "x.bin", state))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"w": tensor(size=7)}, "should have 7 numbers of type float32, its record has 24 bytes"),
        ({"w": tensor(key="1")}, "storage '1' should have 6 numbers .* 0 bytes"),
        ({"w": tensor(key="../0")}, "storage '../0' should have"),
        ({"w": tensor(offset=1)}, r"a tensor of shape \(2, 3\) is larger than its storage"),
        ({"w": tensor(offset=-1)}, "make no sense"),
        ({"w": tensor(shape=(10**9, 10**9), strides=(0, 0))}, "is larger than its storage"),
        ({"w": tensor(shape=(2, -3))}, "make no sense"),
        ({"w": tensor(shape=(2.0, 3))}, "make no sense"),
        ({"w": tensor(shape=(1,) * 9, strides=(1,) * 9)}, "make no sense"),
        ({"w": tensor(strides=(1,))}, "make no sense"),
        ({"w": Call(REBUILD, 1, 0, (2,), (1,))}, "a tensor without a storage"),
        ({"w": Call(FLOATS, 6)}, "a call that builds no tensor"),
        ({"w": Storage("module", "x")}, "an unknown kind of storage"),
        ({"w": 3}, "is not a state dict: entry 'w' is a int"),
        ({"model": {"w": tensor()}}, "has one as its entry 'model', .* Save that entry alone"),
        ((1,), "holds a tuple, not a state dict"),
        ([1], "opcodes that no state dict needs"),
        ({3: tensor()}, "not a dict with names as keys"),
        (Call(REBUILD), "a call that builds no tensor"),
        (b"", "is damaged"),
        (b"\x80\x02X", "is damaged"),
        (b"\x80\x02" + b"(" * 10_000, "is damaged"),
    ],
)
def test_torch_files_that_lie(tmp_path, state, message):
    with pytest.raises(ValueError, match=message):
        open_torch_file(torch_file(tmp_path / "x.bin", state))


@pytest.mark.parametrize(
    "state",
    [
        b"\x80\x02}" + b")" + b"\x85" * 2_000_000 + b"K\x01s.",  # a deep tuple as a key: hash
        b"\x80\x02}" + b")" + b"\x85" * 3_000 + b"K\x01s.",
        # Tuples of the same tuple twice, over and over: 2^100 leaves to print or to hash.
        b"\x80\x02}" + b")q\x00" + b"h\x00\x86q\x00" * 100 + b"K\x01s.",
        b"\x80\x02}" + b")q\x00" + b"h\x00\x86q\x00" * 100 + b"Q.",
        b"\x80\x02}" + b"K\x01r\xff\xff\xff\x7f" + b".",  # a memo of 2^31 entries
    ],
)
def test_small_pickles_that_would_fill_the_memory(tmp_path, state):
    """Refused at once; elsewhere these crash the process or keep it busy for ever."""
    with pytest.raises(ValueError, match=r"x\.bin"):
        open_torch_file(torch_file(tmp_path / "x.bin", state))


def test_torch_files_of_float8_are_refused_by_name(tmp_path):
    state = {"w": Call(Named("torch._utils", "_rebuild_tensor_v3"), 1)}
    with pytest.raises(ValueError, match="a type such as float8; quantised checkpoints"):
        open_torch_file(torch_file(tmp_path / "x.bin", state))


def test_a_parameter_with_attributes(tmp_path):
    """As mamba_ssm's A_log and dt_bias have them."""
    rebuild = Named("torch._utils", "_rebuild_parameter_with_state")
    hooks = Call(Named("collections", "OrderedDict"))
    state = {"w": Call(rebuild, tensor(), True, hooks, {"_no_weight_decay": True})}
    assert open_torch_file(torch_file(tmp_path / "x.bin", state))["w"].shape == (2, 3)


def test_other_torch_files(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(pickle.dumps({"w": 1}))
    with pytest.raises(ValueError, match="is not a zip archive: files of torch before 1.6"):
        open_torch_file(path)
    torch_file(path, {"w": tensor()}, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="is compressed or encrypted"):
        open_torch_file(path)
    torch_file(path, {"w": tensor()}, extra=[("byteorder", b"big")])
    with pytest.raises(ValueError, match="big-endian"):
        open_torch_file(path)
    with pytest.warns(UserWarning, match="Duplicate name"):
        torch_file(path, {"w": tensor()}, extra=[("data/0", b"")])
    with pytest.raises(ValueError, match="record 'data/0' occurs twice"):
        open_torch_file(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/other", b"")
    with pytest.raises(ValueError, match=r"has no record 'data\.pkl'"):
        open_torch_file(path)


def test_truncated_and_scrambled_torch_files(tmp_path):
    path = torch_file(
        tmp_path / "x.bin", {"w": tensor(), "v": tensor(shape=(3, 2), strides=(1, 3))}
    )
    data = path.read_bytes()
    for cut in range(0, len(data), 7):
        path.write_bytes(data[:cut])
        with pytest.raises(ValueError, match=r"x\.bin"):
            open_torch_file(path)
    rng = np.random.default_rng(0)
    for _ in range(300):
        changed = bytearray(data)
        for at in rng.integers(len(data), size=rng.integers(1, 5)):
            changed[at] = rng.integers(256)
        path.write_bytes(changed)
        with contextlib.suppress(ValueError):
            for value in open_torch_file(path).values():
                value.read()


# --- Whole conversions.


def test_the_destination_is_whole_or_absent(checkpoint, tmp_path, monkeypatch):
    (checkpoint / "tokenizer.json").write_text("{}")
    convert(checkpoint, tmp_path / "native")
    assert (tmp_path / "native" / "tokenizer.json").read_text() == "{}"
    with pytest.raises(ValueError, match="native exists; choose another name"):
        convert(checkpoint, tmp_path / "native")
    with pytest.raises(ValueError, match="to must be one of .*got 'onnx'"):
        convert(checkpoint, tmp_path / "out", to="onnx")

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.numpy.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        convert(checkpoint, tmp_path / "out", to="hf")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model", "native"]


def test_a_destination_that_appears_during_the_work_is_kept(checkpoint, tmp_path, monkeypatch):
    from stree_jax import checkpoint as native

    def slow(*arguments, **options):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "precious").write_text("mine")
        return real(*arguments, **options)

    real = native._quiet
    monkeypatch.setattr(native, "_quiet", slow)
    with pytest.raises(ValueError, match="appeared in the meantime"):
        convert(checkpoint, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["precious"]
    assert sorted(os.listdir(tmp_path)) == ["model", "out"]


def test_a_model_that_transformers_cannot_hold(tmp_path):
    config = peers.mamba_ssm_config(
        d_intermediate=100, ssm_cfg=dict(D_has_hdim=True, rmsnorm=False)
    )
    path = peers.write_safetensors(tmp_path / "x", config, peers.mamba_ssm_weights(config))
    message = (
        r"mamba2 has no place for layers = .*'mlp'.*; mamba2.d_per_channel = True \(only False"
    )
    with pytest.raises(ValueError, match=message):
        convert(path, tmp_path / "out", to="mamba2")
    with pytest.raises(ValueError, match="no family of transformers can hold this model"):
        convert(path, tmp_path / "out", to="hf")
    with pytest.raises(ValueError, match=r"to must be one of \('native', 'hf', 'mamba2', 'bamba'"):
        convert(path, tmp_path / "out", to="gguf")
    assert os.listdir(tmp_path) == ["x"]


def test_bfloat16_keeps_the_scalars_in_float32(checkpoint, tmp_path):
    convert(checkpoint, tmp_path / "small", dtype="bfloat16")
    model = st.from_pretrained(tmp_path / "small", dtype=None)
    assert str(model.embedding.dtype) == "bfloat16"
    mixer = model.blocks[0].mixer
    for weight, name in ((mixer.A_log, "A_log"), (mixer.D, "D"), (mixer.dt_bias, "dt_bias")):
        want = WEIGHTS[f"backbone.layers.0.mixer.{name}"]
        np.testing.assert_array_equal(weight[...], want)
