"""Tables of block sizes that `benchmarks.tune` writes, and that the kernels read."""

import json

import pytest

from pallas_kernels import tuning
from pallas_kernels.ssd.pallas_triton import DEFAULTS, BlockSizes

SSD = {"positions": 64, "state": 2048, "part": 64, "num_warps": 8, "num_stages": 2}


@pytest.fixture
def tables(monkeypatch, tmp_path):
    """A directory of tables, empty at first."""
    monkeypatch.setattr(tuning, "DIRECTORY", tmp_path)
    tuning.load.cache_clear()
    yield tmp_path
    tuning.load.cache_clear()


def test_a_table_comes_before_the_defaults(tables):
    table = {"device": "cpu", "blocks": {"ssd": {"bfloat16": SSD}}, "note": "not read"}
    (tables / "cpu.json").write_text(json.dumps(table))
    (tables / "nvidia-h200.json").write_text("damaged, but of another device")
    assert tuning.chosen("ssd", "bfloat16", DEFAULTS) == BlockSizes(**SSD)
    assert tuning.chosen("ssd", "float32", DEFAULTS) == DEFAULTS["float32"]
    (tables / "cpu.json").unlink()
    tuning.load.cache_clear()
    assert tuning.chosen("ssd", "bfloat16", DEFAULTS) == DEFAULTS["bfloat16"]


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ("{", "Expecting property name"),
        ("[]", "not a JSON object"),
        ({"device": "NVIDIA H200"}, "'NVIDIA H200', which does not match the file name"),
        ({"blocks": None}, "no object 'blocks'"),
        ({"blocks": {"scan": {}}}, "an op 'scan'"),
        ({"blocks": {"ssd": {"int8": SSD}}}, "a case 'int8'"),
        ({"blocks": {"ssd": {"bfloat16": {"positions": 16}}}}, "fields must be"),
        ({"blocks": {"ssd": {"bfloat16": SSD | {"rows": 1}}}}, "fields must be"),
        ({"blocks": {"ssd": {"bfloat16": SSD | {"positions": 24}}}}, "positions = 24 is not a"),
        ({"blocks": {"ssd": {"bfloat16": SSD | {"positions": "16"}}}}, "positions = '16'"),
        ({"blocks": {"ssd": {"bfloat16": []}}}, "fields must be"),
    ],
)
def test_a_damaged_table_is_an_error_that_names_the_file(tables, table, complaint):
    if isinstance(table, dict):
        table = json.dumps({"device": "cpu", "blocks": {}} | table)
    (tables / "cpu.json").write_text(table)
    with pytest.raises(ValueError, match=rf"{tables}/cpu.json is no table.*{complaint}"):
        tuning.chosen("ssd", "bfloat16", DEFAULTS)
