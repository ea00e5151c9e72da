"""Checkpoints with random damage: each loads, or is refused by one ValueError that names it.

Damage to bytes of native checkpoints and of `.bin` files never goes unnoticed: their arrays and
records have checksums. Damage to the header of another file changes no weight of the same config.
"""

import copy
import json
import math
import random
import re
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.convert import convert
from stree_jax.convert.writing import write_as
from stree_jax.testing import CONFIGS, HYBRIDS
from tests.convert import (
    adapter_files,
    checkpoints,
    configs,
    gguf_files,
    numpy_mamba_ssm,
    quantised_files,
)
from tests.convert.checkpoints import sharded, write_index
from tests.convert.torch_files import torch_file_of
from tests.extensions import qwen_files

pytestmark = pytest.mark.thorough

VALUES = (
    *(None, True, False, 0, -1, 1, 2, 3, 65, 1000, 10**6, 1 << 24, (1 << 24) + 1, 1 << 40, 10**30),
    *(0.0, -0.5, 1e-300, 1e39, 1e300, math.inf, -math.inf, math.nan, "inf", {"__float__": "x"}),
    *("", "x", "x" * 5000, "../x", "\0", "\ud800", "mamba2", "attention", "hybrid", "moe", "silu"),
    *([], [[]], [0], [1.0] * 5, {}, {"x": 1}, ["mamba"] * 3, ["moe"] * 4096, [0] * 10**5),
)


def gguf_file(folder, made, name, kind):
    """A file of llama.cpp of this family, in numbers of a kind."""
    _, values, tensors = gguf_files.original(made / name, name)
    (folder / f"gguf {name}").mkdir()
    kind = gguf_files.gguf.GGMLQuantizationType[kind]
    gguf_files.write(folder / f"gguf {name}" / "model.gguf", values, tensors, kind)


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
    qwen_files.wrapped(folder / "qwen3_5_moe", experts=True)
    config = configs.mamba_ssm_config(tie_embeddings=False)
    weights = checkpoints.described_checkpoint(folder / "mamba_ssm", numpy_mamba_ssm, config)
    (folder / "bin").mkdir()
    (folder / "bin" / "config.json").write_text(json.dumps(config))
    torch_file_of(folder / "bin" / "pytorch_model.bin", weights)
    write_index(
        folder / "shards", sharded(shutil.copytree(folder / "mamba_ssm", folder / "shards"))
    )
    module, files, _ = checkpoints.DESCRIBED["as mamba2attn-2.7b"]
    checkpoints.described_checkpoint(folder / "mamba2attn", module, *files)
    st.save_pretrained(checkpoints.random_model(CONFIGS["groups"]), folder / "native")
    st.save_pretrained(checkpoints.random_model(HYBRIDS["zamba2"]), folder / "native_hybrid")
    return {path.name: path for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def newer(tmp_path_factory):
    """The same in fewer bits, of llama.cpp, with heads, with adapters, and natively."""
    folder, made = tmp_path_factory.mktemp("newer"), tmp_path_factory.mktemp("made")
    for i, (save, *how, _) in enumerate(quantised_files.CHECKPOINTS.values()):
        (made / str(i)).mkdir()
        path, _ = quantised_files.both(made / str(i), save(made / f"{i} original"), *how)
        path.rename(folder / f"head quantised {i}")
    qwen_files.wrapped(folder / "head of qwen3_5")
    convert(folder / "head of qwen3_5", folder / "native head")
    convert(folder / "head of qwen3_5", folder / "native head 8 bits", quantize="int8")
    convert(folder / "head quantised 2", folder / "native 8 bits", quantize="int8", keep=["head"])
    for name, kind in GGUF.items():
        gguf_file(folder, made, name, kind)
    path, modules = folder / "adapter", [f"{checkpoints.MIXER}.{end}_proj" for end in ("in", "out")]
    path.mkdir()
    checkpoints.write_safetensors(path / "base", checkpoints.CONFIG, checkpoints.WEIGHTS)
    pairs = adapter_files.pairs(checkpoints.WEIGHTS, *modules)
    pairs["base_model.model.lm_head.weight"] = checkpoints.WEIGHTS["lm_head.weight"] + 1
    adapter_files.written(path / "adapter", pairs, rank_pattern={"in_proj": 3})
    return {path.name: path for path in sorted(folder.iterdir())}


GGUF = {
    "mamba2": "Q8_0",
    "granitemoehybrid": "Q4_0",
    "nemotron_h": "F16",
    "qwen3_next": "F32",
    "qwen3_5_text": "Q8_0",
    "falcon_h1": "F16",
}


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


def loaded(path):
    """The config and the weights, with those of a head."""
    base, adapter = path / "base", path / "adapter"
    model = st.from_pretrained(base, adapter=adapter) if base.is_dir() else st.from_pretrained(path)
    parts = [model, st.load_mtp(path, model)] if "head" in path.name else [model]
    return model.config, [leaf for part in parts for leaf in jax.tree.leaves(nnx.state(part))]


def noticed_until(file):
    """How many bytes of a file no damage can change so that other weights load."""
    match file.suffix:
        case ".json":
            return 0
        case ".safetensors":
            return 8 + int.from_bytes(file.read_bytes()[:8], "little")
        case ".gguf":
            return gguf_files.gguf.GGUFReader(file).data_offset
    return 1 << 60  # there are checksums


def attack(where, path, want):
    """True if a damaged checkpoint loads; else one line names it."""
    try:
        config, leaves = loaded(path)
        if want is not None and config == want[0]:
            for leaf, same in zip(leaves, want[1], strict=True):
                np.testing.assert_array_equal(leaf, same, where)
    except ValueError as error:
        message = str(error).replace(str(path.parent), "")
        assert path.name in message, (where, message)
        assert len(message) < 800, (where, message)
        assert not re.search(r"\n| at 0x|RecursionError|MemoryError", message), (where, message)
        return False
    except AssertionError:
        raise
    except BaseException as error:
        raise AssertionError(where) from error
    return True


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
    want = {name: loaded(path) for name, path in paths.items()}
    ends = {file: noticed_until(file) for each in files.values() for file in each}
    num_loaded = 0
    for case in range(num_cases):
        name = rng.choice(list(paths))
        if "bin" in paths and name.startswith("native") and rng.random() < 0.5:
            name = "bin"
        file = rng.choice(files[name])
        before = file.read_bytes()
        if file.suffix == ".json" and rng.random() < 0.8:
            after = json.dumps(changed_values(rng, json.loads(before))).encode()
        else:
            after = changed_bytes(rng, before)
        where = f"case {case} of seed {seed}: {name}, {file.name}"
        is_noticed = after[ends[file] :] == before[ends[file] :]
        file.write_bytes(after)
        try:
            num_loaded += attack(where, paths[name], want[name] if is_noticed else None)
        finally:
            file.write_bytes(before)
    return num_loaded


def test_damaged_files(corpus, tmp_path, monkeypatch, capfd):
    num_loaded = fuzz(corpus, tmp_path, monkeypatch, 120, seed=0)
    assert 5 < num_loaded < 100
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def two_gigabytes():
    """More memory than 2 GB is an error."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * 10**9, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's limits")
@pytest.mark.parametrize("seed", range(1, 21))
def test_more_damaged_files(corpus, newer, tmp_path, monkeypatch, capfd, two_gigabytes, seed):
    fuzz(corpus | newer, tmp_path, monkeypatch, 1000, seed=seed)
    assert capfd.readouterr() == ("", "")
