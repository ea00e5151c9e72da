"""Small or large files that would take all memory, or forever. Each is refused in 10 s and 1 GB."""

import json
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

import stree_jax as st
from stree_jax.testing import tiny_model
from tests.convert import adapter_files, checkpoints
from tests.convert.checkpoints import CONFIG, WEIGHTS
from tests.convert.torch_files import torch_file
from tests.helpers import python

pytestmark = pytest.mark.thorough

MIB = 1 << 20


def torch_bomb(pickle):
    def make(path):
        torch_file(path / "pytorch_model.bin", pickle)
        (path / "config.json").write_text(json.dumps(CONFIG))

    return make


def one_opcode(opcode, before=b"}"):
    return torch_bomb(b"\x80\x02" + before + opcode * ((32 * MIB - 100) // len(opcode)))


def zip_directory(path):
    """A directory of a million records, all the same."""
    torch_bomb(b"")(path)
    data = (path / "pytorch_model.bin").read_bytes()
    with zipfile.ZipFile(path / "pytorch_model.bin") as archive:
        start = archive.start_dir
    entry = data[start : data.index(b"PK\x01\x02", start + 4)]
    count = MIB
    end = struct.pack(
        "<LQ2H2L4Q", 0x06064B50, 44, 45, 45, 0, 0, *[count] * 2, len(entry) * count, start
    )
    end += struct.pack("<LLQL", 0x07064B50, 0, start + len(entry) * count, 1)
    end += struct.pack("<L4H2LH", 0x06054B50, 0, 0, *[0xFFFF] * 2, *[0xFFFFFFFF] * 2, 0)
    (path / "pytorch_model.bin").write_bytes(data[:start] + entry * count + end)


def safetensors_header(path):
    entries = ",".join(
        f'"{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(MIB)
    )
    header = b"{" + entries.encode() + b"}"
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (path / "config.json").write_text(json.dumps(CONFIG))


def config(values):
    def make(path):
        checkpoints.write_safetensors(path, values, WEIGHTS)

    return make


def large_json(path):
    config(CONFIG)(path)
    (path / "config.json").write_text("[" + "[]," * (6 * MIB) + "1]")


def index(path):
    config(CONFIG)(path)
    (path / "model.safetensors").rename(path / "part.safetensors")
    weight_map = {str(i): "part.safetensors" for i in range(MIB // 2)}
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def native(**changes):
    def make(path):
        st.save_pretrained(tiny_model(), path, overwrite=True)
        values = json.loads((path / "config.json").read_text())
        values["model"] |= changes
        (path / "config.json").write_text(json.dumps(values))

    return make


def adapter(path):
    """As many patterns as fit into a config, and matrices for many modules."""
    (path / "base").mkdir()
    config(CONFIG)(path / "base")
    names = [f"{i}.weight" for i in range(20_000)]
    tensors(path / "base" / "model.safetensors", names)
    patterns = {f"m{i}": 1 for i in range(400_000)}
    adapter_files.written(path / "adapter", {"x": np.ones(1)}, r=1, rank_pattern=patterns)
    halves = [f"{name[:-7]}.lora_{half}.weight" for name in names for half in "AB"]
    tensors(path / "adapter" / "adapter_model.safetensors", halves)


def tensors(file, names):
    """A file of matrices of one number."""
    entries = {
        name: {"dtype": "F32", "shape": [1, 1], "data_offsets": [4 * i, 4 * i + 4]}
        for i, name in enumerate(names)
    }
    header = json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4 * len(names)))


def gguf_header(path):
    """A list that says to have more texts than there are, all of them empty."""
    data = struct.pack("<4sIQQ1QcIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 8, 1 << 60)
    (path / "model.gguf").write_bytes(data + bytes(64 * MIB))


QWEN = {"model_type": "qwen3_5_text", "linear_num_key_heads": 1 << 20}
QWEN |= {"linear_num_value_heads": 1 << 20, "linear_key_head_dim": 1 << 9}
NEMOTRON = {"model_type": "nemotron_h", "hybrid_override_pattern": "ME" * 2048}
WIDE = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 1 << 47, "rotary_dim": 1 << 47}
BOMBS = {
    "dicts on the stack": one_opcode(b"}"),
    "marks": one_opcode(b"("),
    "experts": config(NEMOTRON | {"n_routed_experts": 16_000_000}),
    "layers": config(CONFIG | {"n_layer": 4096}),
    "large config": large_json,
    "gguf header": gguf_header,
    "heads": config(QWEN),
    "heads of attention": config({"model_type": "qwen3_next", "num_attention_heads": 1 << 24}),
    "native layers": native(layers=["mamba2"] * 8192),
    "native rotary dimension": native(attention=WIDE, layers=["attention"] * 2),
}
SLOW_BOMBS = {
    "nested tuples": one_opcode(b"\x85"),
    "memo": torch_bomb(
        b"\x80\x02}" + b"".join(b"}r" + struct.pack("<L", i) + b"b" for i in range(4 * MIB))
    ),
    "ordered dicts": one_opcode(b"h\x00)R\x86", b"ccollections\nOrderedDict\nq\x00"),
    "large integers": one_opcode(b"\x8a\xff" + b"\x7f" * 255 + b"\x86"),
    "strings": one_opcode(b"X\x01\x00\x00\x00xq\x00"),
    "zip directory": zip_directory,
    "safetensors header": safetensors_header,
    "index": index,
    "patterns of an adapter": adapter,
    "native layers of many kinds": native(layers=["mamba2", "mamba2"] * (1 << 20)),
}

CHILD = f"""
import resource, sys
from pathlib import Path
import numpy, jax, stree_jax as st, stree_jax.convert, safetensors, tensorstore
from stree_jax.models.config import ModelConfig
st.HybridLM.abstract(ModelConfig.tiny())
jax.devices()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {1 << 30},) * 2)
for path in sys.argv[1:]:
    try:
        base, adapter = Path(path, "base"), Path(path, "adapter")
        st.from_pretrained(base, adapter=adapter) if base.exists() else st.from_pretrained(path)
        print("loaded", path)
    except ValueError as error:
        print("MemoryError" in str(error), len(str(error)), error)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's limits")
@pytest.mark.parametrize(
    "bombs", [BOMBS, pytest.param(SLOW_BOMBS, marks=pytest.mark.slow)], ids=["some", "larger"]
)
def test_bombs(bombs, tmp_path):
    paths = []
    for name, make in bombs.items():
        paths.append(tmp_path / name.replace(" ", "_"))
        paths[-1].mkdir()
        make(paths[-1])
    lines = python("-c", CHILD, *paths, PYTHONPATH=str(Path(__file__).parents[2])).splitlines()
    assert len(lines) == len(bombs)
    for line in lines:
        memory_error, length, _ = line.split(maxsplit=2)
        assert memory_error == "False", line
        assert int(length) < 700, line
