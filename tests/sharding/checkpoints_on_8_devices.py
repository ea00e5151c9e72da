"""Checkpoints of models on meshes of 8 CPU devices. Run by `test_on_8_devices.py`."""

import gc
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax import convert
from stree_jax.checkpoint import arrays
from stree_jax.mesh.partition import Partition
from tests.helpers import assert_same_model, crcs, refusal, with_weight
from tests.sharding.meshes import mesh_of, model_of, sharded

slow = pytest.mark.slow


def test_a_checkpoint_does_not_know_its_mesh(tmp_path):
    """Saved from 2 x 4 devices and from one; loaded on one, and on other meshes."""
    name = "one layer"
    one = model_of(name)
    st.save_pretrained(one, tmp_path / "one")
    st.save_pretrained(sharded(name, 2, 4), tmp_path / "mesh")
    # (Orbax compresses arrays of a device and of a host to different sizes.)
    assert crcs(tmp_path / "one") == crcs(tmp_path / "mesh")
    assert_same_model(st.from_pretrained(tmp_path / "mesh").in_first(), one)
    for data, model in ((8, 1), (1, 4), (2, 4)):
        mesh = mesh_of(data, model)
        loaded = st.from_pretrained(tmp_path / "mesh", mesh=mesh)
        assert loaded.partition == Partition(mesh, model)
        assert_same_model(loaded, sharded(name, data, model))
    draft = st.from_pretrained(tmp_path / "mesh", mesh=mesh, replicate=True)
    assert_same_model(draft, one)
    refusal(
        "does not fit model = 3", st.from_pretrained, tmp_path / "mesh", mesh=st.make_mesh(model=3)
    )


def test_matrices_in_8_bits_are_cut_between_groups_of_inputs(tmp_path):
    """Both arrays, as the matrix is; the text, the checkpoint and loading do not know the mesh."""
    one = model_of("one layer").quantized()
    on_mesh = st.shard(one, mesh_of(2, 2))
    options = dict(max_new_tokens=6, eos_token=())
    texts = [st.generate(each, [[1, 2, 3], [4]], **options).tokens for each in (one, on_mesh)]
    np.testing.assert_array_equal(*texts)
    for name, model in {"one": one, "mesh": on_mesh}.items():
        st.save_pretrained(model, tmp_path / name)
    assert crcs(tmp_path / "one") == crcs(tmp_path / "mesh")
    assert_same_model(st.from_pretrained(tmp_path / "one", mesh=mesh_of(2, 2)), on_mesh)
    refusal(
        r"out_proj.kernel: 8 times 8 inputs on 8 shards are no mul", st.shard, one, mesh_of(1, 8)
    )


@slow
def test_a_load_holds_one_weight_at_a_time(tmp_path, monkeypatch):
    """Of those that are cut; on a CPU a whole one is its own device memory."""
    name = "bamba"
    st.save_pretrained(model_of(name), tmp_path / "saved")
    alive, most = [], []
    read = arrays._read

    def counted(*store):
        gc.collect()
        most.append(sum(reference() is not None for reference in alive))
        values = read(*store)
        if values.ndim > 1:
            alive.append(weakref.ref(values))
        return values

    monkeypatch.setattr(arrays, "_read", counted)
    st.from_pretrained(tmp_path / "saved", mesh=mesh_of(2, 4))
    assert len(alive) > 8
    assert max(most) <= 1


@slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "target", "mesh"),
    [("mamba2", "mamba_ssm", (2, 4)), ("groups", "nemotron_h", (2, 4)), ("embedded", "hf", (4, 2))],
)
def test_checkpoints_of_other_programs(name, target, mesh, dtype, tmp_path):
    """The embedded target becomes one of Bamba, with attention and an MLP."""
    model = st.from_pretrained(st.demo_path("target")) if name == "embedded" else model_of(name)
    convert.writing.write_as(model, tmp_path, target)
    loaded = st.from_pretrained(tmp_path, mesh=mesh_of(*mesh), dtype=dtype)
    want = st.from_pretrained(tmp_path, dtype=dtype).in_first()
    assert_same_model(st.shard(loaded, None), want)


@slow
def test_numbers_that_are_not_finite_are_found_in_any_shard(tmp_path):
    broken = with_weight(model_of("tied"), "embedding", lambda w: w.at[-1, -1].set(jnp.inf))
    st.save_pretrained(broken, tmp_path / "saved")
    refusal(
        "embedding holds NaN, infinity", st.from_pretrained, tmp_path / "saved", mesh=mesh_of(2, 4)
    )
