"""A small mamba_ssm checkpoint, for tests that damage it."""

import pytest

import stree_jax as st
from stree_jax.convert import convert, open_checkpoint
from tests.convert import checkpoints

CONFIG = checkpoints.mamba_ssm_config(tie_embeddings=False)
WEIGHTS = checkpoints.mamba_ssm_weights(CONFIG)
MIXER = "backbone.layers.1.mixer"


def refused(path, message):
    """Every reader refuses the checkpoint, and `convert` leaves nothing behind."""
    for use in (open_checkpoint, st.from_pretrained, lambda p: convert(p, path.parent / "out")):
        with pytest.raises(ValueError, match=message) as error:
            use(path)
        # The path, and at most 300 characters of the value that is wrong.
        assert len(str(error.value).replace(str(path), "")) < 700
    assert not [entry for entry in path.parent.iterdir() if "out" in entry.name]


def rewritten(checkpoint, **changes):
    """The checkpoint with other tensors; None removes one."""
    weights = {name: value for name, value in (WEIGHTS | changes).items() if value is not None}
    return checkpoints.write_safetensors(checkpoint, CONFIG, weights)
