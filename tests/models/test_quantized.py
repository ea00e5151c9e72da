"""Matrices in 8 bits: their numbers, checkpoints, heads, and text with drafts."""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

import stree_jax as st
from pallas_kernels import PackedMatrix, QuantizedMatrix
from pallas_kernels.matmul import KINDS
from stree_jax.checkpoint import save_pretrained
from stree_jax.convert import convert
from stree_jax.convert.writing import write_as
from stree_jax.measuring.clock import num_bytes
from stree_jax.models.matrices import FewBits, Packed, named_weights, quantized_kinds
from stree_jax.names import flatten, unflatten
from stree_jax.testing import perturbed, tiny_model
from stree_jax.training.trainer import cast
from tests.cases.base import NEEDS_NATIVE
from tests.helpers import apply, by_message, crcs, refusal, temporary_bytes

thorough = pytest.mark.thorough

FAMILY = "nemotron_h hybrid"  # with routers and experts


def in_float64(matrix, axis, kind):
    """Values and scales, one group after another, as the README of the format would say it."""
    matrix = np.moveaxis(np.asarray(matrix, np.float64), axis, -1)
    values, scales = np.zeros(matrix.shape), []
    for start in range(0, matrix.shape[-1], 32):
        group = matrix[..., start : start + 32]
        if kind == "int4":
            at = np.abs(group).argmax(axis=-1, keepdims=True)
            scale = np.float16(np.take_along_axis(group, at, -1)[..., 0] / -8).astype(float)
        else:
            scale = np.abs(group).max(axis=-1) / 127
            power = 2.0 ** (np.floor(np.log2(np.where(scale > 0, scale, 1))) - 7)
            scale = np.ceil(scale / power) * power  # 8 bits, rounded up
        scales.append(scale)
        steps = np.rint(group / np.where(scale != 0, scale, 1)[..., None])
        values[..., start : start + 32] = steps.clip(-8, 7) if kind == "int4" else steps
    return np.moveaxis(values, -1, axis), np.moveaxis(np.stack(scales, -1), -1, axis)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((70, 5), -2), ((3, 33, 40), -2), ((31, 2), -2), ((6, 96), -1), ((4, 1), -1)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers(shape, axis, kind):
    """Every group has its scale: of any size, of a column of zeros, of a part of a group."""
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 3, size=shape)
    np.moveaxis(matrix, axis, 0)[:, 0] = 0
    matrix = matrix.astype(np.float32)
    own = QuantizedMatrix.of(matrix, axis, kind)
    values, scales = in_float64(matrix, axis, kind)
    assert (own.values.dtype.name, own.scales.dtype) == (kind, KINDS[kind])
    assert_allclose(own.scales.astype(float), scales, rtol=0)
    whole = own.values.astype(float)
    assert np.abs(whole - values).max() <= 1  # a tie may be rounded the other way
    assert (whole != values).mean() < 0.01
    wide = np.asarray(own.wide())
    assert wide.dtype == np.float32
    step = np.moveaxis(np.repeat(np.moveaxis(scales, axis, 0), 32, 0)[: shape[axis]], 0, axis)
    most = 1 if kind == "int4" else 0.5  # 8 steps become 7
    assert (np.abs(wide - matrix) <= most * np.abs(step) * (1 + 1e-3)).all()
    exact = whole * step
    assert_array_equal(wide, exact)
    small = dataclasses.replace(own, dtype=np.dtype(jnp.bfloat16)).wide()
    assert_array_equal(small, exact.astype(np.float32).astype(jnp.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_matrix_has_the_same_numbers(kind):
    matrix = np.random.default_rng(0).normal(size=(2, 45, 70)).astype(np.float32)
    own = QuantizedMatrix.of(matrix, kind=kind)
    for packed in (PackedMatrix.pack(own), PackedMatrix.pack(matrix, kind)):
        back = packed.quantized()
        assert_array_equal(back.values, own.values)
        assert_array_equal(back.scales, own.scales)
        assert_array_equal(packed.canonical(), own.wide())
        part = packed.cut(5, 60).cut(3, 50)
        assert_array_equal(part.canonical(), own.wide()[..., 8:55])


@functools.cache
def model():
    return tiny_model(FAMILY, dtype="bfloat16")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A checkpoint in bfloat16, one in 8 bits, and one of transformers."""
    path = tmp_path_factory.mktemp("stored")
    save_pretrained(model(), path / "plain")
    for kind in KINDS:
        save_pretrained(model().quantized(kind), path / kind)
    (path / "hf").mkdir()
    write_as(model(), path / "hf", "hf")
    return path


def arrays(model):
    return jax.tree.map(np.asarray, dict(named_weights(model)))


@thorough
def test_which_weights(stored):
    """All matrices but routers; packed where others are packed. Whatever is kept stays."""
    names = quantized_kinds(model().quantized())
    kernels = [name for name, _ in named_weights(model()) if name.endswith(".kernel")]
    assert {"embedding", "blocks.3.mixer.experts_in", *kernels} <= names.keys()
    assert not any(name.endswith(("router", "scale", "conv_weight")) for name in names)
    loaded = st.from_pretrained(stored / "plain", quantize="int8")
    assert quantized_kinds(loaded) == names
    storages = type(loaded.head.storage), type(loaded.embedding.storage)
    assert storages == (Packed, FewBits)
    on_mesh = st.from_pretrained(stored / "plain", quantize="int8", mesh=st.make_mesh())
    assert quantized_kinds(on_mesh) == names
    assert type(on_mesh.head.storage) is FewBits
    assert not quantized_kinds(st.from_pretrained(stored / "plain"))
    keep = ["embedding", "*.experts_in"]
    kept = st.from_pretrained(stored / "plain", quantize="int8", keep=keep)
    assert names.keys() - quantized_kinds(kept) == {"embedding", "blocks.3.mixer.experts_in"}


@thorough
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_in_gives_the_same_numbers(kind, stored, tmp_path):
    """In memory, while loading any format, from a checkpoint in 8 bits, packed and not."""
    want = arrays(st.from_pretrained(stored / kind))
    convert(stored / "hf", tmp_path / "from hf", quantize=kind)
    convert(stored / kind, tmp_path / "again")
    for path, options in {
        stored / "plain": dict(quantize=kind),
        stored / "hf": dict(quantize=kind),
        stored / kind: dict(quantize=kind),
        tmp_path / "from hf": {},
        tmp_path / "again": dict(mesh=st.make_mesh()),
    }.items():
        loaded = st.from_pretrained(path, dtype=jnp.float32, **options)
        jax.tree.map(assert_array_equal, arrays(loaded), want)
    assert st.from_pretrained(stored / kind, dtype=None).dtype == jnp.bfloat16
    save_pretrained(st.from_pretrained(stored / kind, dtype=None), tmp_path / "packed")
    small = crcs(stored / kind)
    assert small == crcs(tmp_path / "again") == crcs(tmp_path / "packed")
    assert "embedding.scales" in small
    assert "embedding" in crcs(stored / "plain")


@thorough
def test_the_text_is_that_of_widened_weights(stored):
    """Logits are those of a float32 model with the widened weights, packed but for 8-bit rows."""
    loaded = st.from_pretrained(stored / "int8")
    tokens = jnp.arange(12)[None] % model().config.vocab_size
    plain = loaded.in_first()
    assert plain.activation_dtype == loaded.activation_dtype == jnp.float32
    structure, wanted = st.HybridLM.abstract(loaded.config)
    wide = nnx.merge(structure, unflatten(dict(named_weights(loaded)), wanted))
    want = apply(wide, tokens)
    most = float(jnp.abs(want).max())
    assert_allclose(apply(plain, tokens), want, atol=1e-5 * most)
    assert float(jnp.abs(apply(loaded, tokens) - want).max()) < 0.04 * most
    in_bfloat16 = model().quantized()
    assert in_bfloat16.activation_dtype == jnp.bfloat16
    assert float(jnp.abs(apply(in_bfloat16, tokens) - want).max()) < 0.05 * most


def test_what_int4_makes_of_a_model(stored):
    """Tables have 8 bits unless they are named, and so have inputs that are no groups of 32."""
    kinds = quantized_kinds(model().quantized("int4"))
    sizes = {name: leaf.shape[-2] for name, leaf in named_weights(model()) if name in kinds}
    tables = {"embedding", "head"}
    assert kinds == {
        name: "int8" if name in tables or size % 32 else "int4" for name, size in sizes.items()
    }
    assert {*kinds.values()} == {"int8", "int4"}
    small = st.HybridLM(st.ModelConfig.mamba2_lm(40, 32, 1), rngs=nnx.Rngs(0))
    words = "int4", "int4:embedding"
    of_table = [quantized_kinds(small.quantized(word))["embedding"] for word in words]
    assert of_table == ["int8", "int4"]
    loaded = st.from_pretrained(stored / "int4")
    assert quantized_kinds(loaded) == kinds == quantized_kinds(loaded.in_first())


@thorough
def test_a_head_is_for_its_target_in_8_bits_too(tmp_path):
    target, path = tiny_model("plain"), tmp_path / "heads"
    heads = st.MedusaHeads(target, num_heads=2, rngs=nnx.Rngs(0))
    st.save_medusa(heads, target, path)
    save_pretrained(target, tmp_path / "target")
    small = st.from_pretrained(tmp_path / "target", quantize="int8")
    loaded = st.load_medusa(path, small, quantize="int8")
    assert quantized_kinds(loaded) == {"kernel": "int8"}
    assert not quantized_kinds(st.load_medusa(path, small))
    st.save_medusa(loaded, small, tmp_path / "small heads")
    again = st.load_medusa(tmp_path / "small heads", small)
    jax.tree.map(assert_array_equal, arrays(again), arrays(loaded))
    changed = perturbed(target, 0.1)
    for wrong in (changed, changed.quantized()):
        refusal("trained with another target", st.load_medusa, path, wrong)


@NEEDS_NATIVE
def test_bytes():
    """About a byte a weight; what multiplies holds no copy of all of them, as XLA alone does."""
    whole = st.HybridLM(st.ModelConfig.mamba2_lm(512, 256, 4), rngs=nnx.Rngs(0))
    small = whole.quantized().packed()
    assert temporary_bytes(small) < num_bytes(small) < 0.3 * num_bytes(whole)


def damage(change):
    """A checkpoint without checksums, as older ones are, whose arrays by name were changed."""

    def damaged(path):
        from orbax.checkpoint import v1 as ocp

        shutil.copytree(path / "int8", path / "new", ignore=lambda *_: ["params", "checksums.json"])
        weights: dict = {}
        for name, weight in flatten(nnx.to_pure_dict(nnx.state(model().quantized()))).items():
            parts = {"": weight}
            if isinstance(weight, QuantizedMatrix):
                parts = {".values": weight.values, ".scales": weight.scales}
            weights |= {name + part: np.asarray(array) for part, array in parts.items()}
        change(weights)
        nested: dict = {}
        for name, array in weights.items():
            *folders, last = name.split(".")
            functools.reduce(lambda at, key: at.setdefault(key, {}), folders, nested)[last] = array
        ocp.save(path / "new" / "params", nested)
        try:
            st.from_pretrained(path / "new")
        finally:
            shutil.rmtree(path / "new")

    return damaged


def scales(value):
    """A change of all scales of the embedding."""
    return lambda weights: weights.update(
        {"embedding.scales": np.full_like(weights["embedding.scales"], value)}
    )


def more_scales(weights):
    weights["embedding.scales"] = np.repeat(weights["embedding.scales"], 2, axis=1)


def a_norm(weights):
    scale = weights.pop("final_norm_scale")
    weights |= {
        "final_norm_scale.values": scale.astype(np.int8),
        "final_norm_scale.scales": scale[:1].astype(jnp.bfloat16),
    }


def opened(name="plain", **options):
    return lambda path: st.from_pretrained(path / name, **options)


def converted(name="plain", **options):
    return lambda path: convert(path / name, path / "new", **options)


REFUSED = [
    (
        opened(quantize="int3"),
        'quantize must be "int8", "int4", "int4:NAME,NAME" or None, got .int3',
    ),
    (opened(quantize="int8:head"), "quantize must be .* got 'int8:head'"),
    (opened(quantize="int4:lm_head"), "int4 = 'lm_head' is none of the matrices, such as"),
    (opened("int8", quantize="int4"), r"in 8 bits already; keep it, or choose its bits"),
    (opened("int4", quantize="int8"), r"in 4 bits already; keep it, or choose its bits"),
    (
        lambda path: model().quantized().quantized("int4"),
        "it is int8 already, not int4: start from",
    ),
    (opened(keep=["embedding"]), r"keep = \['embedding'\] goes with quantize"),
    (
        opened(quantize="int8", keep=["lm_head"]),
        "keep = 'lm_head' is none of the matrices, such as blocks.0.mixer.in_proj.kernel and",
    ),
    (opened(quantize="int8", keep="embedding"), "keep must be a list"),
    (opened("int8", quantize="int8", keep=["embedding"]), "has embedding in 8 bits already"),
    (lambda path: st.load_medusa(path, model(), quantize="fp8"), 'quantize must be "int8", "int4"'),
    (converted(to="hf", quantize="int8"), "is for native checkpoints, not for to = 'hf'"),
    (
        converted("int8", to="hf"),
        "int8 has matrices in few bits, .* natively only; convert the ori",
    ),
    (damage(scales(np.nan)), "embedding holds NaN"),
    (damage(scales(3e38)), "embedding holds NaN, infinity"),
    (damage(lambda w: w.pop("embedding.scales")), "embedding .* is missing"),
    (damage(lambda w: w.pop("embedding.values")), "embedding has scales, but no values for them"),
    (damage(more_scales), r"embedding has scales \(\d+, 2\), not \(\d+, 1\)"),
    (damage(a_norm), "final_norm_scale is no matrix, and cannot have few bits"),
    (lambda path: cast(opened("int8")(path), "float32"), "matrices in few bits cannot be trained"),
]


@by_message(("call", "message"), REFUSED)
def test_refused(call, message, stored):
    refusal(message, call, stored)
    assert not (stored / "new").exists()


@thorough
def test_a_mesh_takes_the_type_of_the_model(stored):
    """Packed, an 8-bit matrix has none; on a mesh it is widened to the model's."""
    loaded = st.from_pretrained(stored / "int8", dtype="bfloat16")
    on_mesh = st.shard(loaded, st.make_mesh())
    assert on_mesh.activation_dtype == on_mesh.dtype == jnp.bfloat16
