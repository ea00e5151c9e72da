"""EAGLE-3 heads: states of inner layers, and files; beside test_heads.py."""

import numpy as np
import pytest

import stree_jax as st
from pallas_kernels import rms_norm
from stree_jax.testing import tiny_model
from tests.extensions import dflash_files
from tests.extensions.eagle3_files import OWN, WIDTH, saved
from tests.extensions.heads import hidden_of
from tests.helpers import by_message, refusal


@pytest.fixture(scope="module")
def target():
    return tiny_model("nemotron_h hybrid")


@pytest.mark.thorough
def test_the_inner_states_are_the_stream_after_so_many_layers(target):
    """The last one, normed, is what the output head takes."""
    text = np.array([[5, 9, 2, 30]], np.int32)
    layers = len(target.config.layers)
    both = hidden_of(target, text, (2, layers))
    last = both[..., 2 * WIDTH :]
    normed = rms_norm(last, target.final_norm_scale[...], epsilon=target.config.norm_eps)
    np.testing.assert_allclose(both[..., :WIDTH], normed, atol=1e-5)
    assert np.abs(both[..., WIDTH : 2 * WIDTH] - last).max() > 0.1


D2T = np.zeros(OWN, np.int64)
REFUSED = [
    (dict(norm_before_fc=True), {}, "norm_before_fc = true is not supported"),
    (dict(target_hidden_size=32), {}, "target_hidden_size = 32, elsewhere 16"),
    (dict(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 9]}), {}, "the target's 4 layers"),
    (dict(vocab_size=40), {}, "d2t|t2d|has width 16 and tokens 40"),
    ({}, {"d2t": None}, "d2t is missing, and the head has 20 of the target's 37 tokens"),
    ({}, {"d2t": D2T - 1}, "d2t maps tokens of the head twice, or outside the vocabulary"),
    ({}, {"d2t": D2T}, "t2d and d2t contradict each other"),
]


@by_message(("changes", "replaced", "message"), REFUSED)
def test_files_that_are_refused(changes, replaced, message, target, tmp_path):
    refusal(message, st.load_eagle3, saved(tmp_path / "head", changes, replaced), target)


@pytest.mark.parametrize(
    ("save", "kind"), [(saved, r"EAGLE-3.*\(.eagle3"), (dflash_files.saved, r"DFlash.*\(.dflash")]
)
def test_a_head_is_no_model(save, kind, target, tmp_path):
    path = save(tmp_path / "head")
    refusal(f"a head of {kind}", st.from_pretrained, path)
    refusal(f"a head of {kind}", st.load_mtp, path, target)
