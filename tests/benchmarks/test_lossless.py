"""The comparison at scale: what it runs, and that it finds wrong tokens."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from benchmarks import experiments, lossless
from stree_jax.decoding.sampling import position_noise

TINY = st.ModelConfig.tiny(num_layers=1, tie_embeddings=False)


def test_a_token_that_is_not_the_targets_is_found(monkeypatch, tmp_path, capsys):
    generate, ways = st.generate, lossless.methods

    def wrong(model, **options):
        out = generate(model, **options)
        if "drafter" not in options:
            return out
        tokens = np.array(out.tokens)
        tokens[2, 3] = (tokens[2, 3] + 1) % model.config.vocab_size
        return dataclasses.replace(out, tokens=tokens)

    monkeypatch.setattr(st, "generate", wrong)
    monkeypatch.setitem(lossless.FAMILIES, "Mamba-2", TINY)
    for name, value in (
        ("NUM_METHODS", 1),
        ("ROWS", 4),
        ("NEW_TOKENS", 6),
        ("TEMPERATURES", (1.0,)),
    ):
        monkeypatch.setattr(lossless, name, value)
    monkeypatch.setattr(lossless, "methods", lambda *models: ways(*models)[:1])
    arguments = ["--families", "Mamba-2", "--tokens", "1", "--output", str(tmp_path)]
    with pytest.raises(SystemExit, match="^1$"):
        experiments.main("lossless", lossless.__doc__, arguments)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])["lossless"]
    (difference,) = line["different"]
    assert (line["differences"], difference["row"], difference["place"]) == (1, 2, 3)
    assert difference["gap"] > 1e-3


@pytest.mark.parametrize(
    ("temperature", "gap", "tie"),
    [(0, 0, True), (0, 5e-5, True), (0, 2e-4, False), (0.5, 5e-4, True), (0.5, 2e-3, False)],
)
def test_a_first_difference_is_a_tie_if_scores_are_that_close(temperature, gap, tie):
    """Of logits relative to the largest; above temperature 0, of logits and noise at the index."""
    key = jax.random.key(3)

    class Model:
        config = st.ModelConfig.tiny(vocab_size=4)

        def __call__(self, tokens):
            scores = jnp.array([-200, 100, 100 + 200 * gap, 0])
            if temperature:
                noise = position_noise(key[None], jnp.array([2]), 0, 4)[0, 0]
                scores = temperature * (jnp.array([0, 2, 2 + gap, -9]) - noise)
            right = (tokens == jnp.array([[9, 8, 1, 1]])).all()  # the prompt and the common text
            last = jnp.append(jnp.where(right, scores, jnp.nan), 999)  # padding of the vocabulary
            return jnp.zeros((1, 4, 5)).at[0, -1].set(last)

    texts = [1, 1, 2, 0], [1, 1, 1, 3]
    found = lossless.first_difference(Model(), [9, 8], *texts, temperature, key)
    assert (found["place"], found["tokens"], found["tie"]) == (2, [2, 1], tie)
    assert found["gap"] == pytest.approx(gap, rel=1e-2)
    assert lossless.first_difference(Model(), [9, 8], [1, 1], [1, 1]) is None


def test_ten_families_and_ten_ways():
    assert len(lossless.FAMILIES) == lossless.NUM_METHODS == 10
