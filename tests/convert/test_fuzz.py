"""Checkpoints with random damage: each loads, or is refused by one ValueError that names it.

Damage to bytes of native checkpoints and of `.bin` files never goes unnoticed: their arrays and
records have checksums.
"""

import copy
import json
import math
import random
import shutil
import time
import zipfile
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.convert import open_checkpoint
from stree_jax.convert.writing import write_as
from stree_jax.testing import CONFIGS, HYBRIDS
from tests.convert import checkpoints, configs, numpy_mamba_ssm, qwen_files
from tests.convert.checkpoints import sharded, write_index
from tests.convert.torch_files import FLOATS, REBUILD, Call, Storage, pickled

VALUES = (
    *(None, True, False, 0, -1, 1, 2, 3, 65, 1000, 10**6, 1 << 24, (1 << 24) + 1, 1 << 40, 10**30),
    *(0.0, -0.5, 1e-300, 1e39, 1e300, math.inf, -math.inf, math.nan, "inf", {"__float__": "x"}),
    *("", "x", "x" * 5000, "../x", "\0", "\ud800", "mamba2", "attention", "hybrid", "moe", "silu"),
    *([], [[]], [0], [1.0] * 5, {}, {"x": 1}, ["mamba"] * 3, ["moe"] * 4096, [0] * 10**5),
)


def torch_file_of(path, config, weights):
    """A `.bin` with one storage for each tensor, as torch writes it."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    state = {}
    with zipfile.ZipFile(path / "pytorch_model.bin", "w") as archive:
        for i, (name, value) in enumerate(weights.items()):
            strides = tuple(stride // 4 for stride in value.strides)
            storage = Storage("storage", FLOATS, str(i), "cpu", value.size)
            state[name] = Call(REBUILD, storage, 0, value.shape, strides, False, ())
            archive.writestr(f"archive/data/{i}", value.tobytes())
        archive.writestr("archive/data.pkl", pickled(state))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A checkpoint of each family and of each kind of file."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, config in (("mamba2", CONFIGS["plain"]), *HYBRIDS.items()):
        if name in ("bamba", "granite_moe"):  # transformers has no size of a head
            attention = replace(
                config.attention, head_dim=4, rotary_dim=config.attention.rotary_dim // 2
            )
            config = replace(config, attention=attention)
        if name == "zamba2":
            config = replace(config, max_length=4096)
        if name not in ("mamba2attn", "mixed"):  # no family of transformers
            (folder / name).mkdir()
            target = "mamba_in_llama" if name == "mamba_in_llama" else "hf"
            write_as(checkpoints.random_model(config), folder / name, target)
    qwen_files.wrapped(folder / "qwen3_5_moe", "qwen3_5_moe")
    shutil.rmtree(folder / "qwen3_5_moe-text")
    config = configs.mamba_ssm_config(tie_embeddings=False)
    weights = checkpoints.described_checkpoint(folder / "mamba_ssm", numpy_mamba_ssm, config)
    torch_file_of(folder / "bin", config, weights)
    write_index(
        folder / "shards", sharded(shutil.copytree(folder / "mamba_ssm", folder / "shards"))
    )
    module, files, _ = checkpoints.DESCRIBED["as mamba2attn-2.7b"]
    checkpoints.described_checkpoint(folder / "mamba2attn", module, *files)
    st.save_pretrained(checkpoints.random_model(CONFIGS["groups"]), folder / "native")
    st.save_pretrained(checkpoints.random_model(HYBRIDS["zamba2"]), folder / "native_hybrid")
    return {path.name: path for path in sorted(folder.iterdir())}


def changed_values(rng, values):
    """A JSON object with one or two changes anywhere in it."""
    values = copy.deepcopy(values)
    for _ in range(rng.choice((1, 1, 2))):
        table = values
        while True:
            keys = list(table) if isinstance(table, dict) else list(range(len(table)))
            if not keys:
                break
            key = rng.choice(keys)
            if not isinstance(table[key], dict | list) or rng.random() < 0.2:
                match rng.randrange(6):
                    case 0 if isinstance(table, dict):
                        del table[key]
                    case 1 if isinstance(table[key], int | float):
                        table[key] = table[key] * rng.choice((-1, 0.5, 2, 3)) + rng.choice((0, 1))
                    case 2 if isinstance(table, dict):
                        table[rng.choice(("novel", *keys))] = table[key]
                    case 3:
                        depth = rng.choice((2, 20, 40, 600))
                        table[key] = json.loads("[" * depth + "1" + "]" * depth)
                    case _:
                        table[key] = rng.choice(VALUES)
                break
            table = table[key]
    return values


def changed_bytes(rng, data):
    """Bytes with a bit flipped, a byte set, a piece cut, moved, cleared or put in."""
    if not data:
        return b"x"
    # Headers and directories are at the ends.
    at = rng.choice((rng.randrange(len(data)), rng.randrange(min(len(data), 200)), len(data) - 1))
    at = max(0, at - rng.randrange(80) * (rng.random() < 0.3))
    size = rng.choice((1, 1, 2, 4, 8, 64, 1000))
    piece = data[at : at + size]
    match rng.randrange(7):
        case 0 | 1:
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        case 2:
            return data[:at] + bytes([rng.choice((0, 1, 127, 128, 255))]) + data[at + 1 :]
        case 3:
            return data[:at]
        case 4:
            return data[:at] + data[at + size :]
        case 5:
            return data[:at] + piece + data[at:]
        case _:
            return data[:at] + bytes(len(piece)) + data[at + size :]


def leaves_of(path):
    return jax.tree.leaves(nnx.state(st.from_pretrained(path)))


def fuzz(corpus, scratch, monkeypatch, num_cases, seed):
    """Damages `num_cases` files, one at a time; returns how many of the checkpoints still load."""
    made = {}
    abstract = st.HybridLM.abstract

    def remembered(config, **options):  # most damage leaves the shapes as they are
        key = (config, *sorted((name, str(value)) for name, value in options.items()))
        if key not in made:
            made[key] = abstract(config, **options)
        return made[key]

    monkeypatch.setattr(st.HybridLM, "abstract", remembered)
    rng = random.Random(seed)
    paths = {name: shutil.copytree(path, scratch / name) for name, path in corpus.items()}
    files = {
        name: sorted(file for file in path.rglob("*") if file.is_file())
        for name, path in paths.items()
    }
    want = {name: leaves_of(path) for name, path in paths.items()}
    num_loaded = 0
    for case in range(num_cases):
        name = rng.choice(list(paths))
        if name.startswith("native") and rng.random() < 0.5:
            name = "bin"
        file = rng.choice(files[name])
        before = file.read_bytes()
        if file.suffix == ".json" and rng.random() < 0.8:
            after = json.dumps(changed_values(rng, json.loads(before))).encode()
        else:
            after = changed_bytes(rng, before)
        where = f"case {case} of seed {seed}: {name}, {file.name}"
        began = time.process_time()
        file.write_bytes(after)
        try:
            if name.startswith("native") or case % 4 == 0:
                leaves = leaves_of(paths[name])
                if file.suffix not in (".json", ".safetensors"):
                    for leaf, same in zip(leaves, want[name], strict=True):
                        np.testing.assert_array_equal(leaf, same, where)
            else:
                open_checkpoint(paths[name])
            num_loaded += 1
        except ValueError as error:
            message = str(error).replace(str(scratch), "")
            assert name in message, (where, message)
            assert len(message) < 800, (where, message)
            assert " at 0x" not in message, (where, message)
            assert "RecursionError" not in message, (where, message)
        except AssertionError:
            raise
        except BaseException as error:
            raise AssertionError(where) from error
        finally:
            file.write_bytes(before)
        assert time.process_time() - began < 10, where
    return num_loaded


def test_damaged_files(corpus, tmp_path, monkeypatch, capfd):
    num_loaded = fuzz(corpus, tmp_path, monkeypatch, 120, seed=0)
    assert 5 < num_loaded < 100
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_more_damaged_files(corpus, tmp_path, monkeypatch, capfd, seed):
    fuzz(corpus, tmp_path, monkeypatch, 1000, seed=seed)
    assert capfd.readouterr() == ("", "")
