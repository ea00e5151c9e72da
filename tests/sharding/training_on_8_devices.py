"""A training step on 8 CPU devices. Run by `test_on_8_devices.py`."""

import jax
import numpy as np
from flax import nnx

import stree_jax as st
from stree_jax.training.objective import next_token_loss
from stree_jax.training.recipe import Training
from stree_jax.training.trainer import fit


def test_devices_share_the_rows_of_a_training_step(tmp_path):
    """4 of the 8 divide the batch. The losses are those of the whole batch on one device."""
    training = Training(steps=3, batch_size=4, sequence_length=8, warmup_steps=1, save_every=2)

    def batch(step):
        return np.random.default_rng(step).integers(37, size=(4, 9)).astype(np.int32)

    def loss(model, tokens, _):
        seen.append(tokens.shape)
        return next_token_loss(model, tokens)

    seen, model = [], st.HybridLM(st.ModelConfig.tiny(num_layers=1), rngs=nnx.Rngs(0))
    first = float(jax.jit(next_token_loss)(model, batch(1)))
    reports = [*fit(model, loss, batch, training, tmp_path)]
    assert seen == [(1, 9)]
    np.testing.assert_allclose(reports[0].loss, first, rtol=1e-5)
    assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(model))
    assert reports[2].loss < first
    assert [*fit(model, loss, batch, training, tmp_path)] == []
