import pytest

from tests.convert.checkpoints import CONFIG, WEIGHTS, write_safetensors


@pytest.fixture
def checkpoint(tmp_path):
    return write_safetensors(tmp_path / "model", CONFIG, WEIGHTS)
