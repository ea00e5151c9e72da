"""Quantised checkpoints in the published layouts, against loops over their bits in float64."""

import functools
import json
import re

import jax
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_array_equal

import stree_jax as st
from stree_jax.checkpoint.arrays import Tensor
from stree_jax.convert import convert, open_checkpoint
from stree_jax.convert.quantised import dequantised, read_scheme
from tests.convert import checkpoints
from tests.convert.quantised_files import (
    BFLOAT16,
    CHECKPOINTS,
    E4M3,
    E5M2,
    FINE,
    FLOATS,
    MODELOPT,
    both,
    compressed,
    fp8,
    int4,
    int8,
    ints,
    nvfp4,
)
from tests.helpers import assert_same_model, by_message, refusal

OF_ROWS = MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
OF_BLOCKS = compressed("float-quantized", block_structure=[4, 8])
OF_FIVE = ints("group", False, group_size=5, actorder="weight")
E4, E5 = ({"quant_method": "fp8", "fmt": fmt} for fmt in ("e4m3", "e5m2"))
# What a config says, how a weight is made, and the shapes of weights.


def words(size):
    """As compressed-tensors writes it of integers of 4 bits."""
    said = dict(num_bits=4, type="int", strategy="group", group_size=size, symmetric=True)
    return compressed("pack-quantized", **said)


FORMS = {
    "blocks": (FINE, fp8((8, 6), "_scale_inv"), [(16, 18), (9, 7), (3, 4), (2, 9, 13)]),
    "blocks, bfloat16": (FINE, fp8((8, 6), "_scale_inv", dtype=BFLOAT16), [(20, 13)]),
    "a block": (FINE, fp8("weight", "_scale_inv"), [(8, 6)]),
    "weights": (MODELOPT, fp8("weight", stored=lambda x: x.reshape(())), [(5, 4), (2, 3, 4)]),
    "of one number": (MODELOPT, fp8("weight", stored=lambda x: x.reshape(1)), [(4, 4)]),
    "rows": (FLOATS, fp8("row", dtype=BFLOAT16), [(5, 4), (4, 4), (1, 4)]),
    "rows, flat": (OF_ROWS, fp8("row", stored=lambda x: x[..., 0]), [(4, 4), (3, 5), (2, 3, 3)]),
    "E5M2": (E5, fp8("row", kind=E5M2, dtype=np.float16), [(5, 4)]),
    "experts": (MODELOPT, fp8((64, 64), stored=lambda x: x[:, 0, 0]), [(3, 4, 4)]),
    "compressed blocks": (OF_BLOCKS, fp8((4, 8)), [(6, 9)]),
    "NVFP4": (MODELOPT | {"quant_algo": "NVFP4"}, nvfp4(False), [(3, 32), (2, 3, 48)]),
    "NVFP4, packed": (compressed("nvfp4-pack-quantized"), nvfp4(True), [(5, 40)]),
    "int4": (words(32), int4((1, 32)), [(3, 96), (5, 32)]),
    "int4, groups of 64": (words(64), int4((1, 64)), [(3, 128)]),
    "int4, groups of 8": (words(8), int4((1, 8)), [(3, 40)]),
    "int8": (ints("channel"), int8("row"), [(5, 4)]),
    "int8, weights": (ints("tensor", False), int8("weight", zeros=True), [(5, 4)]),
    "int8, groups": (OF_FIVE, int8((1, 5), zeros=True), [(6, 15), (5, 5), (15, 6)]),
}


def opened(parts):
    return {
        name: Tensor(value.shape, value.dtype, functools.partial(np.asarray, value))
        for name, value in parts.items()
    }


def plain_of(path, said, parts):
    """The checkpoint with these tensors, whose config says that."""
    config = path / "config.json"
    return dequantised(path, read_scheme(config, {"quantization_config": said}), opened(parts))


@pytest.mark.parametrize("form", FORMS)
def test_values_are_those_of_the_format(form, tmp_path):
    """To the bit, in float32: of each number, by the position of its bits and of its scale."""
    said, make, shapes = FORMS[form]
    for seed, shape in enumerate(shapes):
        parts, want = make(np.random.default_rng(seed), shape)
        for base in ("x.weight", "experts.gate_up_proj")[: 1 + (len(shape) == 3)]:
            plain = plain_of(tmp_path, said, {base + end: x for end, x in parts.items()})
            (tensor,) = (plain.tensors[base],)
            assert plain.tensors.keys() == {base}
            assert (tensor.shape, tensor.dtype) == (shape, BFLOAT16)
            have = tensor.read()
            assert have.dtype == np.float32
            assert_array_equal(have, want)
            assert (tensor.bits < 8) is form.startswith(("int4", "NVFP4"))
            assert (tensor.four_bits is not None) is (form in ("int4", "int4, groups of 64"))
            if tensor.four_bits:
                values, scales = tensor.four_bits()
                assert (values.dtype, scales.dtype) == (np.int8, np.float16)
                assert_array_equal(values * scales.astype(np.float32), want)


@pytest.mark.slow  # imports it
def test_transformers_computes_the_same():
    """Of blocks that it can read: they divide the weight."""
    torch, _ = checkpoints.torch(), checkpoints.transformers()
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    parts, want = fp8((8, 6), "_scale_inv")(np.random.default_rng(0), (16, 18))
    own = {
        "weight": torch.from_numpy(parts[""].view(np.uint8)).view(torch.float8_e4m3fn),
        "weight_scale_inv": torch.from_numpy(parts["_scale_inv"]),
    }
    assert_array_equal(Fp8Dequantize(None).convert(own)["weight"].numpy(), want)


NAN, NEGATIVE = (lambda x, put=put: np.full_like(x, put) for put in (np.nan, -1))
ZERO, TWO, FLAT = np.zeros_like, lambda x: np.ones(2, x.dtype), lambda x: x.reshape(-1)
NO = "'x.weight{}' is missing, of a weight in {}".format
HOLDS = "'x.weight{}' holds {}; of a weight in {} it is {}".format
SHAPE = "'x.weight{}' has shape {}; those of a weight {} are {}".format
BAD = "'x.weight{}' holds NaN, infinity or a negative number".format
# A form, what happens to a tensor of the weight, None: it is lost, and the message.
DAMAGED = [
    ("blocks", "", None, NO("", "FP8")),
    ("blocks", "_scale_inv", None, NO("_scale", "FP8")),
    ("NVFP4", "_scale_2", None, NO("_scale_2", "NVFP4")),
    ("blocks", "", np.float32, HOLDS("", "float32", "FP8", "float8_e4m3fn or float8_e5m2")),
    ("NVFP4", "_scale", np.float32, HOLDS("_scale", "float32", "NVFP4", "float8_e4m3fn")),
    ("NVFP4", "_scale_inv", np.ones(1), "'x.weight_scale_inv' is not of a weight in NVFP4"),
    ("NVFP4, packed", "", np.ones((5, 40)), "'x.weight' is not of a weight in NVFP4"),
    ("blocks", "_scale_inv", np.transpose, SHAPE("_scale_inv", (3, 2), (16, 18), "(2, 3)")),
    ("NVFP4", "_scale", np.transpose, SHAPE("_scale", (2, 3), (3, 32), (3, 2))),
    ("NVFP4", "_scale_2", TWO, "'x.weight_scale_2' has shape (2,), not (1,)"),
    ("int8, groups", "_zero_point", FLAT, "'x.weight_zero_point' has shape (18,), not (6, 3)"),
    ("weights", "", FLAT, "'x.weight' has shape (20,), and is no matrix"),
    ("blocks", "_scale_inv", NAN, BAD("_scale_inv")),
    ("NVFP4", "_scale", NEGATIVE, BAD("_scale")),
    ("NVFP4, packed", "_global_scale", ZERO, "'x.weight_global_scale' is 0"),
]


@by_message(("form", "end", "damage", "message"), DAMAGED)
def test_damaged_weights(form, end, damage, message, tmp_path):
    """One line that names the tensor, when the checkpoint is opened, or its weight is read."""
    said, make, shapes = FORMS[form]
    parts, _ = make(np.random.default_rng(0), shapes[0])
    lost = parts.pop(end, None)
    if damage is not None:
        parts[end] = np.asarray(damage(lost) if callable(damage) else damage)
    tensors = {f"x.weight{end}": x for end, x in parts.items()}
    refusal(
        re.escape(message), lambda: plain_of(tmp_path, said, tensors).tensors["x.weight"].read()
    )


MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
CACHE = {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
CONFIGS = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes' is not read, only"),
    ("fp4", "the scheme 'fp4' is not read"),
    (MODELOPT | {"quant_algo": "NVFP4_AWQ"}, "'NVFP4_AWQ' is not read"),
    (MIXED | {"quantized_layers": {"a": {"quant_algo": "MXFP8"}}}, "'MXFP8' is not read"),
    (compressed("marlin-24"), "'marlin-24' is not read"),
    (FLOATS | {"transform_config": {"config_groups": {"R1": {}}}}, "'transform_config' is not"),
    (FLOATS | {"config_groups": {"a": {"format": "mxfp4-pack-quantized"}}}, "'mxfp4-pack-quant"),
    (FINE | {"weight_block_size": [128]}, r"a scale cannot be of a block [128]"),
    (ints("group", group_size="x"), r"a scale cannot be of a block [1, 'x']"),
    (
        FLOATS | {"config_groups": {str(n): {"weights": {"group_size": n}} for n in range(1, 99)}},
        "98 groups of weights are too many to be real",
    ),
    (CACHE, None),
    (compressed("float-quantized", group_size=None, block_structure=None), None),
]


@by_message(("said", "message"), CONFIGS)
def test_what_configs_say(said, message, tmp_path):
    """An unknown scheme is refused by its name, wherever it is said, before tensors are opened."""
    path, beside = tmp_path / "config.json", tmp_path / "hf_quant_config.json"
    places = [
        ("quantization_config", {"quantization_config": said}, {}),
        ("text_config.compression_config", {"text_config": {"compression_config": said}}, {}),
        ("quantization", {}, {"quantization": said}),
    ]
    of_modelopt = "modelopt" in str(said)  # the only one with a file of its own
    for where, values, own in places[: 2 + of_modelopt]:
        beside.write_text(json.dumps(own))
        if message is None:
            scheme = read_scheme(path, values, ["text_config"])
            assert scheme.values in ({}, {"text_config": {}})
            assert any(where in each for each, _ in scheme.said)
            continue
        refusal(f"says {where}: .*{re.escape(message)}", read_scheme, path, values, ["text_config"])


def test_a_config_and_tensors_that_disagree(tmp_path):
    """Tensors say what they are: float32 is read as such. Without a config nothing says how."""
    tensors = {"x.weight": np.ones((2, 2), np.float32)}
    plain = plain_of(tmp_path, FINE, tensors)
    assert_array_equal(plain.tensors["x.weight"].read(), tensors["x.weight"])
    (note,) = plain.notes
    assert note.endswith("config.json says quantization_config: no weight is quantised")
    refusal(
        "'x.weight' is quantised, and no file says how: get the",
        plain_of,
        tmp_path,
        None,
        {"x.weight": np.zeros((2, 2), E4M3)},
    )


BY_NAME = {"quantized_layers": {"x": {"quant_algo": "FP8"}, "y": {"quant_algo": "NVFP4"}}}
LOST = "has no zero points, but symmetric = False"
# What a config says, and a weight that is another one.
HELD = [
    (ints("channel", False), int8("row"), LOST),
    (ints("channel"), int8("row", zeros=True), "has zero points, but symmetric = True"),
    (ints("channel", symmetric="no"), int8("row"), "symmetric must be true or false, got 'no'"),
    (ints("tensor"), int8("row"), "has shape (6, 1); those of a weight (6, 32) are (1, 1)"),
    (
        ints("group", group_size=8),
        int8("row"),
        "has shape (6, 1); those of a weight (6, 32) are (6, 4)",
    ),
    (ints("group"), int8("row"), "are not said"),
    (ints("token"), int8("row"), "the strategy 'token' is not read, only tensor, channel"),
    (ints("group", group_size=8, actorder="group"), int8((1, 8)), "actorder = 'group' is not read"),
    (
        ints("channel", num_bits=4),
        int8("row"),
        "num_bits = 4 and type = 'int' are not read in int8",
    ),
    (FLOATS, nvfp4(True), "is in NVFP4, not in FP8"),
    (MODELOPT, fp8("row"), "has shape (6, 1); those of a weight (6, 32) are (1, 1)"),
    (
        MODELOPT | {"quant_algo": "MIXED_PRECISION"} | BY_NAME,
        nvfp4(False),
        "is in NVFP4, not in FP8",
    ),
    (FINE, fp8("row", "_scale_inv"), "has shape (6, 1); those of a weight (6, 32) are (1, 6)"),
    (E4, fp8("row", kind=E5M2), "holds float8_e5m2, not float8_e4m3fn"),
    (E5 | {"fmt": "e3m4"}, fp8("row"), "'e3m4' is not read"),
]


@by_message(("said", "make", "message"), HELD)
def test_a_weight_is_as_its_config_says(said, make, message, tmp_path):
    """Not one of other values, because a tensor was lost, or the config is another model's."""
    parts, _ = make(np.random.default_rng(0), (6, 32))
    tensors = {f"x.weight{end}": part for end, part in parts.items()}
    told = refusal(re.escape(message), plain_of, tmp_path, said, tensors)
    assert str(tmp_path) in told


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_model_is_that_of_the_values(name, tmp_path):
    """To the bit, with its head; and it says what is quantised, and what was left out."""
    save, *how, words = CHECKPOINTS[name]
    places = both(tmp_path, save(tmp_path / "original"), *how)
    models = [st.from_pretrained(path) for path in places]
    assert_same_model(*models)
    heads = [nnx.state(st.load_mtp(path, models[1])) for path in places]
    jax.tree.map(assert_array_equal, *heads)
    assert open_checkpoint(places[0]).dtype == "bfloat16"
    said = checkpoints.inspected(places[0])
    assert f"{words}, whose values are computed in float32" in said
    assert ("scales of activations or caches, such as" in said) == bool(how[-1])


def test_conversion_rounds_once(tmp_path):
    """Without a dtype to bfloat16: values are float32 until then."""
    save, *how, _ = CHECKPOINTS["Nemotron-3 of ModelOpt"]
    path, plain = both(tmp_path, save(tmp_path / "original"), *how)
    assert convert(path, tmp_path / "native") is None
    have = st.from_pretrained(tmp_path / "native", dtype=None)
    assert_same_model(have, st.from_pretrained(plain, dtype="bfloat16"))
