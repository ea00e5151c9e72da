"""PyTorch's zip files, written by hand: these tests need no torch."""

import pickle
import struct
import zipfile

import numpy as np
import pytest

from stree_jax.convert.torch_file import open_torch_file
from tests.convert.torch_files import REBUILD, Call, Named, Storage, tensor, torch_file
from tests.helpers import by_message, refusal


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
        ("torch", "load"),
        ("torch._utils", "_rebuild_qtensor"),
        ("collections", "defaultdict"),
    ],
)
def test_pickles_that_ask_for_anything_else(tmp_path, module, name):
    """Nothing is run: the call would create a file."""
    marker = tmp_path / "ran"
    state = {"w": Call(Named(module, name), f"touch {marker}")}
    refusal(
        rf"refused: its pickle asks for {module}\.{name}",
        open_torch_file,
        torch_file(tmp_path / "x.bin", state),
    )
    assert not marker.exists()


@by_message(
    ("state", "message"),
    [
        ({"w": tensor(size=7)}, "should have 7 numbers of type float32, its record has 24 bytes"),
        ({"w": tensor(key="1")}, "storage '1' should have 6 numbers .* 0 bytes"),
        ({"w": tensor(key="../0")}, "storage '../0' should have"),
        ({"w": tensor(offset=1)}, r"a tensor of shape \(2, 3\) is larger than its storage"),
        ({"w": tensor(offset=-1)}, "make no sense"),
        ({"w": tensor(shape=(10**9, 10**9), strides=(0, 0))}, "is larger than its storage"),
        ({"w": tensor(shape=(2, -3))}, "make no sense"),
        ({"w": tensor(shape=(1,) * 9, strides=(1,) * 9)}, "make no sense"),
        ({"w": tensor(strides=(1,))}, "make no sense"),
        ({"w": tensor(shape=(True, 3))}, "make no sense"),
        ({"w": tensor(strides=(0, 1))}, "shows elements of its storage twice"),
        ({"w": tensor(size=True)}, "an unknown kind of storage"),
        ({"w": Call(REBUILD, 1, 0, (2,), (1,))}, "a tensor without a storage"),
        ({"w": Storage("module", "x")}, "an unknown kind of storage"),
        ({"w": 3}, "is not a state dict: entry 'w' is a int"),
        ({"model": {"w": tensor()}}, "has one as its entry 'model', .* Save that entry alone"),
        ((1,), "holds a tuple, not a state dict"),
        ([1], "opcodes that no state dict needs"),
        ({3: tensor()}, "not a dict with names as keys"),
        (Call(REBUILD), "a call that builds no tensor"),
        (b"", "is damaged"),
        (b"\x80\x02" + b"(" * 10_000, "is damaged"),
        (b"\x80\x02}X\x01\x00\x00\x00\xffK\x01s.", "is damaged: UnicodeDecodeError: 'utf-8' codec"),
        (
            {"w": Call(Named("torch._utils", "_rebuild_tensor_v3"), 1)},
            "a type such as float8, which are read from safetensors only",
        ),
        # Small pickles that would fill the memory; other readers crash on them or never return.
        (b"\x80\x02}" + b")" + b"\x85" * 3_000 + b"K\x01s.", ""),
        # Nested pairs of one shared tuple: 2^100 leaves to print or hash.
        (b"\x80\x02}" + b")q\x00" + b"h\x00\x86q\x00" * 100 + b"K\x01s.", ""),
        (b"\x80\x02}" + b"K\x01r\xff\xff\xff\x7f" + b".", ""),  # a memo of 2^31 entries
    ],
)
def test_torch_files_that_lie(tmp_path, state, message):
    refusal(rf"x\.bin.*{message}", open_torch_file, torch_file(tmp_path / "x.bin", state))


def record_of(path):
    """Where the first record's local header starts, and its data."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("archive/data/0")
    header = path.read_bytes()[info.header_offset :][:30]
    sizes = struct.unpack("<HH", header[26:30])
    return info.header_offset, info.header_offset + 30 + sum(sizes)


@pytest.mark.parametrize("field", [6, 8, 26, 28, 31])
def test_local_headers_that_disagree_with_the_directory(tmp_path, field):
    """Flags, method, length of the name, length of the extra field, name. A changed length of the
    extra field would shift all weights of the record."""
    path = torch_file(tmp_path / "x.bin", {"w": tensor()}, extra=[("data/1", bytes(16))])
    data = bytearray(path.read_bytes())
    data[record_of(path)[0] + field] += 4
    path.write_bytes(data)
    refusal(r"x\.bin is damaged: the header of record 'archive/data/0'", open_torch_file, path)


def test_every_changed_byte_of_a_record_is_found(tmp_path):
    path = torch_file(
        tmp_path / "x.bin", {"w": tensor(), "v": tensor(offset=3, shape=(3,), strides=(1,))}
    )
    data = path.read_bytes()
    start = record_of(path)[1]
    for at in range(start, start + 24):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        for value in open_torch_file(path).values():
            for _ in range(2):
                refusal("record 'data/0' has another CRC", value.read)


def test_files_that_torch_wrote_without_crcs(tmp_path):
    """`torch.serialization.set_crc32_options(False)` writes 0 for all."""
    path = torch_file(tmp_path / "x.bin", {"w": tensor()})
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            data = data.replace(struct.pack("<L", info.CRC), bytes(4))
    path.write_bytes(data)
    assert open_torch_file(path)["w"].read().shape == (2, 3)


def test_a_parameter_with_attributes(tmp_path):
    """As mamba_ssm's A_log and dt_bias have them."""
    rebuild = Named("torch._utils", "_rebuild_parameter_with_state")
    hooks = Call(Named("collections", "OrderedDict"))
    state = {"w": Call(rebuild, tensor(), True, hooks, {"_no_weight_decay": True})}
    assert open_torch_file(torch_file(tmp_path / "x.bin", state))["w"].shape == (2, 3)


def test_other_torch_files(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(pickle.dumps({"w": 1}))
    refusal("is not a zip archive: files of torch before 1.6", open_torch_file, path)
    torch_file(path, {"w": tensor()}, compression=zipfile.ZIP_DEFLATED)
    refusal("is compressed or encrypted", open_torch_file, path)
    torch_file(path, {"w": tensor()}, extra=[("byteorder", b"big")])
    refusal("big-endian", open_torch_file, path)
    with pytest.warns(UserWarning, match="Duplicate name"):
        torch_file(path, {"w": tensor()}, extra=[("data/0", b"")])
    refusal("record 'data/0' occurs twice", open_torch_file, path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/other", b"")
    refusal(r"has no record 'data\.pkl'", open_torch_file, path)
    path.write_bytes(path.read_bytes() + b"PK\x05\x06" + bytes(18))  # a directory of nothing
    refusal(r"x\.bin has no records", open_torch_file, path)
