"""A new family is one entry of the table."""

from pathlib import Path

import pytest

import stree_jax as st
from stree_jax import testing
from stree_jax.convert import FAMILIES, convert, formats, open_checkpoint
from tests.helpers import assert_same_model


def random_model(**changes):
    return testing.random_model(st.ModelConfig.tiny(**changes))


def assert_goes_there_and_back(model, folder, family):
    """Through a native checkpoint, one of the new family, and a native one again."""
    paths = [folder / name for name in ("native", "other", "back")]
    st.save_pretrained(model, paths[0])
    convert(paths[0], paths[1], to="example")
    convert(paths[1], paths[2])
    assert open_checkpoint(paths[1]).description.family == family
    for path in paths:
        assert_same_model(st.from_pretrained(path).in_first(), model)


def test_the_family_of_the_docs(tmp_path, monkeypatch):
    """Recognised by its model_type, and by nothing once its entry is gone."""
    monkeypatch.setitem(FAMILIES, "example", None)  # restores the table at the end
    docs = Path(__file__).parents[2] / "docs" / "checkpoints.md"
    exec(docs.read_text().split("```python")[1].split("```")[0], {})
    assert formats()[-1] == "example"
    model = random_model(d_model=32, head_dim=64, state_size=128, chunk_size=64)
    assert_goes_there_and_back(model, tmp_path, "example")
    st.save_pretrained(random_model(d_model=32, head_dim=64), tmp_path / "small")
    with pytest.raises(ValueError, match="example has no place for mamba2.state_size = 8"):
        convert(tmp_path / "small", tmp_path / "out", to="example")
    monkeypatch.delitem(FAMILIES, "example")
    with pytest.raises(ValueError, match="of no known family .*'example'"):
        open_checkpoint(tmp_path / "other")
    with pytest.raises(ValueError, match="to must be one of .*got 'example'"):
        convert(tmp_path / "small", tmp_path / "out", to="example")
