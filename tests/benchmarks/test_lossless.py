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


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A family, two methods and a few tokens; runs the command in its own directory."""
    ways = lossless.methods
    few = ("chain of 4", "prompt lookup")
    monkeypatch.setitem(lossless.FAMILIES, "Mamba-2", TINY)
    monkeypatch.setattr(lossless, "NUM_METHODS", len(few))
    monkeypatch.setattr(lossless, "ROWS", 4)
    monkeypatch.setattr(lossless, "NEW_TOKENS", 6)
    monkeypatch.setattr(
        lossless, "methods", lambda *models: [way for way in ways(*models) if way.name in few]
    )

    def run(tokens=150):
        arguments = ["--families", "Mamba-2", "--tokens", str(tokens), "--output", str(tmp_path)]
        experiments.main("lossless", lossless.__doc__, arguments)
        (path,) = tmp_path.glob("lossless-*.json")
        return json.loads(path.read_text())

    return run


@pytest.mark.slow
def test_every_family_method_and_temperature_has_a_row(small):
    found = small()
    assert found["rounds"] == 2
    assert [(row["method"], row["temperature"]) for row in found["work"]] == [
        (method, temperature)
        for temperature in (0.0, 1.0)
        for method in ("chain of 4", "prompt lookup")
    ]
    assert found["tokens"] == sum(row["tokens"] for row in found["work"]) == 2 * 2 * 2 * 4 * 6
    assert all(row["right"] and row["distinct"] > 3 for row in found["work"])
    assert found["work"][0]["tau"] > 1


def test_a_token_that_is_not_the_targets_is_found(small, monkeypatch, capsys):
    decode = lossless.decode

    def wrong(model, given, **way):
        out = decode(model, given, **way)
        if not way:
            return out
        tokens = np.array(out.tokens)
        tokens[2, 3] = (tokens[2, 3] + 1) % model.config.vocab_size
        return dataclasses.replace(out, tokens=tokens)

    monkeypatch.setattr(lossless, "decode", wrong)
    monkeypatch.setattr(lossless, "TEMPERATURES", (1.0,))
    with pytest.raises(SystemExit) as exit_:
        small(tokens=1)
    assert exit_.value.code == 1
    line = json.loads(capsys.readouterr().out.splitlines()[-1])["lossless"]
    assert line["differences"] == 2
    assert [(each["row"], each["place"]) for each in line["different"]] == [(2, 3)] * 2
    assert all(each["gap"] > 1e-3 for each in line["different"])


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
