"""Writing and reading are inverse for random configs."""

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from stree_jax import ModelConfig
from stree_jax.convert import load_model, open_checkpoint
from stree_jax.convert.writing import write_as
from tests.convert import checkpoints
from tests.helpers import assert_same_model

CONFIGS = st.fixed_dictionaries(
    dict(
        vocab_size=st.integers(3, 50),
        num_layers=st.integers(1, 3),
        head_dim=st.sampled_from([2, 4, 8]),
        state_size=st.integers(1, 9),
        num_groups=st.sampled_from([1, 2, 4]),
        conv_width=st.integers(2, 5),
        conv_bias=st.booleans(),
        tie_embeddings=st.booleans(),
        dt_limit=st.sampled_from([(0.0, float("inf")), (0.01, 0.5)]),
        bias=st.booleans(),
    )
)


@settings(max_examples=15)
@given(CONFIGS, st.sampled_from(["float32", "bfloat16"]))
def test_a_model_survives_transformers_format(options, dtype):
    bias = options.pop("bias")
    config = ModelConfig.tiny(**options, in_proj_bias=bias, out_proj_bias=bias)
    model = checkpoints.random_model(config, dtype)
    with tempfile.TemporaryDirectory() as directory:
        write_as(model, Path(directory), "hf")
        checkpoint = open_checkpoint(Path(directory))
        assert checkpoint.description.config == config
        assert checkpoint.dtype == dtype
        loaded = load_model(checkpoint, dtype=dtype)
    assert_same_model(loaded, model)
