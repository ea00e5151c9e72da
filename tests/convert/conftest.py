import pytest

from tests.convert import checkpoints, small


@pytest.fixture
def checkpoint(tmp_path):
    return checkpoints.write_safetensors(tmp_path / "model", small.CONFIG, small.WEIGHTS)
