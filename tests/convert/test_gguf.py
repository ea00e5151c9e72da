"""GGUF files: whole models, blocks of quantised numbers, and files that lie."""

import dataclasses
import json
import re
import struct
import sys
import warnings

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import stree_jax as st
from benchmarks.llama_cpp import write_gguf
from pallas_kernels.matmul import QuantizedMatrix
from stree_jax.convert import convert, find, open_checkpoint
from stree_jax.convert.gguf_file import open_parts
from stree_jax.convert.writing import write_as
from stree_jax.models.matrices import named_weights, quantized_kinds
from tests.convert import checkpoints, configs, gguf_files
from tests.convert.gguf_files import gguf, original, write
from tests.extensions import dflash_files, mtp_files, qwen_files
from tests.helpers import assert_same_model, by_message, refusal

ORDER = (
    "queries and keys are taken to be in the order of llama.cpp's converter, which this file does"
    " not say; if they are in another one, texts are wrong"
)
KINDS = gguf.GGMLQuantizationType
NOT_READ = "qwen3_next, dense layers, narrow convolution"
MODELS = {
    name: each
    for name, each in configs.TRANSFORMERS_CONFIGS.items()
    if name.split(",")[0] in gguf_files.ARCHITECTURES and name != NOT_READ
} | {
    "qwen3_next": {},
    "falcon_h1, untied": configs.TRANSFORMERS_CONFIGS["falcon_h1, multipliers, no norm"]
    | dict(tie_word_embeddings=False),
    "granitemoehybrid, tied": dict(tie_word_embeddings=True),
    "qwen3_5_text, tied": dict(tie_word_embeddings=True, linear_num_value_heads=6),
}


def assert_same(model, other):
    """Equal configs, and weights to the rounding of float32."""
    assert model.config == other.config
    want, have = dict(named_weights(model)), dict(named_weights(other))
    assert want.keys() == have.keys()
    for name, weight in want.items():
        assert_allclose(have[name], weight, rtol=1e-6, atol=3e-7, err_msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_models(name, tmp_path):
    """Of a directory or a file."""
    model, values, tensors = original(tmp_path / "hf", name.partition(",")[0], **MODELS[name])
    folder = tmp_path / "gguf"
    folder.mkdir()
    file = write(folder / "model.gguf", values, tensors)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert_same(model, st.from_pretrained(folder))
    assert [str(each.message) for each in said] == [f"{folder}: {ORDER}"] * (name == "bamba")
    assert (ORDER in " ".join(checkpoints.inspected(file).split())) == (name == "bamba")
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": {"x": 1}}))
    assert open_checkpoint(file).description.config == model.config


@pytest.mark.parametrize(
    ("name", "changes"), [("bamba", {}), ("granitemoehybrid", {"position_embedding_type": "rope"})]
)
def test_files_in_the_order_of_their_graph(name, changes, tmp_path):
    """The benchmark's writer: what llama.cpp turns is what transformers turns, and files say so."""
    changes |= {"mamba_n_groups": 1}
    model, values, tensors = original(tmp_path / "hf", name, **changes)
    write_gguf(tmp_path / "hf", tmp_path / "hf" / "model.gguf", "float32")
    (tmp_path / "hf" / "model.safetensors").unlink()
    assert_same(model, st.from_pretrained(tmp_path / "hf"))
    _, found, _ = open_parts(tmp_path / "hf" / "model.gguf")
    query, (layer,) = (
        "self_attn.q_proj.weight",
        {i for i in range(3) if f"blk.{i}.attn_q.weight" in found},
    )
    want = tensors[f"model.layers.{layer}.{query}"].reshape(values["num_attention_heads"], -1, 32)
    turned = want.shape[1] // 2 if name == "bamba" else want.shape[1]
    have = found[f"blk.{layer}.attn_q.weight"].read().reshape(want.shape)
    assert_array_equal(have[:, 1], want[:, turned // 2])  # the pair of the first
    assert_array_equal(have[:, turned:], want[:, turned:])


def test_names_of_other_versions(tmp_path):
    """Qwen3-Next of the first converter, its projection still in one; gates and ups in one."""
    model, values, tensors = original(tmp_path / "hf", "qwen3_next")

    def edit(found):
        for name in [name for name in found if "in_proj_qkv" in name or "in_proj_z" in name]:
            del found[name]
        for i in range(2):
            begin = f"model.layers.{i}.mlp.experts"
            halves = [found.pop(f"{begin}.{name}_proj.weight") for name in ("gate", "up")]
            found[f"blk.{i}.ffn_gate_up_exps.weight"] = np.concatenate(halves, axis=1)
        whole = tensors["model.layers.0.linear_attn.in_proj_qkvz.weight"]
        return found | {"blk.0.ssm_in.weight": whole}

    assert_same(model, st.from_pretrained(write(tmp_path / "x.gguf", values, tensors, edit=edit)))
    whole = {"blk.0.ssm_in.weight": tensors["model.layers.0.linear_attn.in_proj_qkvz.weight"]}
    file = write(tmp_path / "y.gguf", values, tensors, edit=lambda found: found | whole)
    checkpoints.refused(file, r"qkvz\.weight twice, also as 'blk\.0\.attn_qkv\.weight\+attn_gate")


def one_by_one(path):
    """A head whose experts are not merged."""
    merged = qwen_files.saved(path.with_name("merged"), experts=True)
    target = st.from_pretrained(merged)
    path.mkdir()
    write_as(target, path, "qwen3_5_moe_text", st.load_mtp(merged, target))


HEADS = {"qwen3_5": qwen_files.saved, "qwen3_5_moe": one_by_one, "nemotron_h_omni": mtp_files.saved}


@pytest.mark.thorough
@pytest.mark.parametrize("name", HEADS)
def test_a_wrapper_and_its_head(name, tmp_path):
    """config.json of a multimodal release, of whose text model the file is; and its head."""
    HEADS[name](tmp_path / "hf")
    target = st.from_pretrained(tmp_path / "hf")
    values, tensors = checkpoints.read(tmp_path / "hf")
    file = write(tmp_path / "model.gguf", values, tensors)
    loaded = st.from_pretrained(file)
    assert_same(target, loaded)
    assert_same(st.load_mtp(tmp_path / "hf", target), st.load_mtp(file, loaded))
    values["quantization_config"] = {"x": 1}  # of the original: the file has its own types
    outer = {"model_type": name, "vision_config": {}, "text_config": values}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    described = open_checkpoint(file).description
    assert described.config == target.config
    assert described.mtp.problem is None


@pytest.mark.parametrize(("form", "size"), [(dflash_files.SECOND, 6), ({}, 9)])
def test_a_head_of_dflash(form, size, tmp_path):
    """The same as from its own files, if the config beside it is that of its block."""
    target, file = st.testing.tiny_model("nemotron_h hybrid"), tmp_path / "x.gguf"
    hf, (config, tensors) = dflash_files.saved(tmp_path / "hf", **form), dflash_files.files(**form)
    for block_size in (size, 8):
        writer = gguf.GGUFWriter(file, "dflash")
        writer.add_block_count(2)
        writer.add_uint32("dflash.block_size", block_size)
        for name, x in tensors.items():
            _, layer, inside = re.fullmatch(r"(layers\.(\d)\.)?(.*)", name).groups()
            begin = f"blk.{layer}." if layer else ""
            gguf_files.add(writer, begin + dflash_files.GGUF[inside], x)
        gguf_files.finish(writer)
        (tmp_path / "config.json").write_text(json.dumps(config))
        if block_size == size:
            assert_same_model(st.load_dflash(file, target), st.load_dflash(hf, target))
            refusal("is no model but a head of DFlash; load it", st.from_pretrained, file)
    refusal(
        f"says block_size = {size}, and .* 8: get the config.json", st.load_dflash, file, target
    )


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q4_K", "Q6_K"])
def test_blocks(name, tmp_path, monkeypatch):
    """Random bytes, as the package reads them, a row at once."""
    monkeypatch.setattr("stree_jax.convert.gguf_file._AT_ONCE", 1)
    size, num_bytes = gguf.GGML_QUANT_SIZES[KINDS[name]]
    data = np.random.default_rng(0).integers(0, 60, (3, 2 * num_bytes), np.uint8)  # no NaN
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba2")
    writer.add_tensor("x", data, raw_dtype=KINDS[name])
    gguf_files.finish(writer)
    _, tensors, stored = open_parts(tmp_path / "x.gguf")
    assert (tensors["x"].shape, tensors["x"].dtype) == ((3, 2 * size), np.float32)
    assert_array_equal(tensors["x"].read(), gguf.dequantize(data, KINDS[name]))
    assert stored == f"1 tensors {name}"
    assert (tensors["x"].four_bits is not None) is (name == "Q4_0")
    if tensors["x"].four_bits:
        values, scales = tensors["x"].four_bits()
        assert (values.dtype, scales.dtype) == (np.int8, np.float16)
        assert_array_equal(values * scales.astype(np.float32), tensors["x"].read())


def test_q4_0_is_not_widened(tmp_path, monkeypatch):
    """Its numbers become the model's, without rounding; other few bits become 8."""
    _, values, tensors = original(tmp_path / "hf", "mamba2")
    file = write(tmp_path / "model.gguf", values, tensors, KINDS["Q4_0"])
    assert "4 matrices, 4 of them as in the file" in " ".join(checkpoints.inspected(file).split())
    want = dict(named_weights(st.from_pretrained(file)))

    def abstract_only(matrix, *more):
        assert isinstance(matrix, jax.ShapeDtypeStruct)
        return of(matrix, *more)

    of = QuantizedMatrix.of
    with monkeypatch.context() as patch:
        patch.setattr(QuantizedMatrix, "of", abstract_only)
        loaded = st.from_pretrained(file, quantize="int4:embedding,head")
    assert {*quantized_kinds(loaded).values()} == {"int4"}
    for name, weight in named_weights(loaded):
        assert_array_equal(weight, want[name])
    file = write(tmp_path / "five.gguf", values, tensors, KINDS["Q5_0"])
    assert {*open_checkpoint(file).kinds("int4").values()} == {"int8"}


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0"])
def test_models_in_fewer_bits(name, tmp_path):
    """Matrices are what was stored, to the bit; the others are as they were."""
    model, values, tensors = original(tmp_path / "hf", "mamba2")
    file = write(tmp_path / "model.gguf", values, tensors, KINDS[name])
    checkpoint, loaded = open_checkpoint(file), st.from_pretrained(file)
    assert checkpoint.dtype == ("bfloat16" if name == "BF16" else "float32")
    assert checkpoint.quantised == ("6 tensors Q8_0" if name == "Q8_0" else "")
    plain = np.asarray(dict(named_weights(model))["embedding"])
    want = gguf.dequantize(gguf.quantize(plain, KINDS[name]), KINDS[name])
    assert_array_equal(loaded.embedding[...], want)
    assert_array_equal(loaded.blocks[0].mixer.D, model.blocks[0].mixer.D)


def test_what_lies_beside_it(tmp_path):
    """Its tokenizer and end tokens, a second file, and parts of one."""
    model, values, tensors = original(tmp_path / "hf", "mamba2")
    folder = tmp_path / "gguf"
    folder.mkdir()
    file = write(folder / "a.gguf", values, tensors)
    refusal("no tokenizer at .*: only a tokenizer.json is read", st.load_tokenizer, file)
    tokenizer = (st.demo_path("target") / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert find(file) == file
    assert st.load_tokenizer(file).get_vocab_size() == st.load_tokenizer(folder).get_vocab_size()
    assert st.from_pretrained(file).config.eos_token == (2, 5, 7)
    convert(file, tmp_path / "native")
    assert_same(st.from_pretrained(file), st.from_pretrained(tmp_path / "native"))
    assert (tmp_path / "native" / "tokenizer.json").read_text() == tokenizer
    write(folder / "b.gguf", values, tensors)
    refusal(r"several GGUF files, 'a\.gguf', 'b\.gguf': give the path", st.from_pretrained, folder)
    parts = [folder / f"c-0000{i}-of-00002.gguf" for i in (1, 2)]
    half = dict(list(tensors.items())[:5])
    write(parts[0], values, half)
    refusal(r"c-00002-of-00002\.gguf does not exist: get all 2 parts", st.from_pretrained, parts[0])
    write(parts[1], values, {name: x for name, x in tensors.items() if name not in half})
    model.config = dataclasses.replace(model.config, eos_token=(2, 5, 7))
    assert_same(model, st.from_pretrained(parts[1]))
    write(parts[1], values, tensors)
    refusal("of an earlier part again", st.from_pretrained, parts[1])


# A changed fact, and what is said of it.
CONTENTS = [
    ("head_count", None, r"granitehybrid\.attention\.head_count must be an integer, .*; got None"),
    ("block_count", 2, r"has unknown tensors: \['blk\.2"),
    ("nextn_predict_layers", 3, "nextn_predict_layers must be an integer, from 0 to 2; got 3"),
    ("head_count_kv", [1, 2, 2], r"head_count_kv = \[1, 2, 2\]"),
    ("head_count_kv", "x", r"head_count_kv must be an integer, at least 1; got 'x'"),
]


@pytest.fixture(scope="module")
def granite(tmp_path_factory):
    return original(tmp_path_factory.mktemp("granite") / "hf", "granitemoehybrid")[1:]


@by_message(("fact", "value", "message"), CONTENTS)
def test_files_that_do_not_fit(fact, value, message, granite, tmp_path):
    changes = {fact: value}
    if value == "x":
        changes = {fact: None, "string": ("granitehybrid.attention.head_count_kv", "x")}
    checkpoints.refused(write(tmp_path / "model.gguf", *granite, **changes), message)


def test_a_config_of_another_model(granite, tmp_path):
    """Of other heads, by which queries and keys would be put in another order; or none."""
    values, tensors = granite
    file = write(tmp_path / "model.gguf", values, tensors)
    (tmp_path / "config.json").unlink()
    checkpoints.refused(file, r"model\.gguf has no config\.json beside it: put that of the model")
    heads = values["num_attention_heads"]
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_attention_heads": 2 * heads}))
    checkpoints.refused(file, f"says num_attention_heads = {2 * heads}, and .*gguf {heads}: get")


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def field(key, kind, data):
    return text(key) + struct.pack("<I", kind) + data


def tensor(name="x", shape=(4, 2), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(fields=(), tensors=(), *, magic=b"GGUF", version=3, counts=None):
    counts = counts or (len(tensors), len(fields))
    return struct.pack("<4sIQQ", magic, version, *counts) + b"".join((*fields, *tensors))


HUGE = 2**62


def of(*tensors, fields=()):
    return header(fields, tensors) + bytes(99)


ALIGNMENT = field("general.alignment", 4, bytes(4))
LIES = {
    "no architecture": (of(tensor()), "is of the architecture None; GGUF files are read of mamb"),
    "nothing": (b"", "is damaged: it is empty"),
    "another magic": (header(magic=b"GGML"), "does not begin with GGUF"),
    "big endian": (header(version=3 << 24), "it has version 50331648, not"),
    "a cut header": (header(tensors=[tensor()])[:-1], "header is cut off"),
    "no tensors": (header(), "has no tensors"),
    "many tensors": (header(counts=(HUGE, 0)), f"{HUGE} tensors and 0 fields are too many"),
    "a long key": (header([struct.pack("<Q", HUGE)]), "header is cut off"),
    "no text": (header([field(b"\xff", 4, bytes(4))]), "can't decode byte 0xff"),
    "an unknown type of field": (header([field("k", 99, b"")]), "metadata of the unknown type 99"),
    "a long list": (header([field("k", 9, struct.pack("<IQ", 4, HUGE))]), "cut off, or endless"),
    "a tensor twice": (of(tensor(), tensor()), "'x' is there twice"),
    "no alignment": (of(tensor(), fields=[ALIGNMENT]), r"general\.alignment must be an .*; got 0"),
    "many axes": (of(tensor(shape=(1,) * 9)), "has 9 axes"),
    "a huge shape": (of(tensor(shape=(HUGE, HUGE))), "too few for 'x'; downl"),
    "a huge offset": (of(tensor(offset=HUGE)), f"'x' is at {HUGE}, not 0, behind the one before"),
    "a cut tensor": (of(tensor())[:-68], "bytes are too few for 'x'"),
    "tensors over each other": (of(tensor(), tensor("y")), "'y' is at 0, not 32, behind the one"),
    "an unknown type": (of(tensor(kind=99)), "type 99, which this version"),
    "integers": (of(tensor(kind=26)), "type I32, which is not supported"),
    "a part of a block": (of(tensor(kind=8)), r"'x' has shape \(2, 4\) in blocks of 32"),
}


@pytest.mark.parametrize("name", LIES)
def test_files_that_lie(name, tmp_path):
    data, message = LIES[name]
    (tmp_path / "x.gguf").write_bytes(data)
    checkpoints.refused(tmp_path / "x.gguf", rf"x\.gguf.*{message}")


def test_without_the_package(tmp_path, monkeypatch):
    (tmp_path / "x.gguf").write_bytes(header(tensors=[tensor()]) + bytes(99))
    monkeypatch.setitem(sys.modules, "gguf", None)
    refusal(
        r"x\.gguf: reading GGUF files needs gguf; in the clone: pip install",
        open_checkpoint,
        tmp_path,
    )
