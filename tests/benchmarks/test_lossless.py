"""The comparison at scale: it resumes after an interruption, and finds wrong tokens."""

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
def test_an_interrupted_run_is_resumed(small, monkeypatch, tmp_path):
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

    state = tmp_path / "lossless.jsonl"
    lines = state.read_text().splitlines(keepends=True)
    state.write_text("".join(lines[:-1]) + lines[-1][:20])  # killed while it wrote the last row
    compared, calls = lossless.compared, []
    monkeypatch.setattr(lossless, "compared", lambda *a: calls.append(1) or compared(*a))
    again = small()
    assert len(calls) == 1
    for before, after in zip(found["work"], again["work"], strict=True):
        assert before | {"seconds": 0} == after | {"seconds": 0}

    with pytest.raises(SystemExit, match="lossless.jsonl is of a run with"):
        small(tokens=1000)


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


@pytest.mark.parametrize(("gap", "tie"), [(5e-4, True), (2e-3, False)])
def test_a_sampled_difference_is_a_tie_if_scores_are_that_close(gap, tie):
    """The scores of both tokens with their noise, at the index of the difference."""
    key, temperature = jax.random.key(3), 0.5
    noise = position_noise(key[None], jnp.array([1]), 0, 4)[0, 0]

    class Model:
        config = st.ModelConfig.tiny(vocab_size=4)

        def __call__(self, tokens):
            logits = temperature * (jnp.array([0.0, 2.0, 2.0 + gap, -9.0]) - noise)
            return jnp.zeros((1, 2, 4)).at[0, -1].set(logits)

    texts = np.array([7, 1, 0]), np.array([7, 2, 3])
    found = lossless.first_difference(Model(), [5], *texts, temperature, key)
    assert (found["place"], found["tokens"], found["tie"]) == (1, [1, 2], tie)
    assert found["gap"] == pytest.approx(gap, rel=0.01)


def test_ten_families_and_ten_ways():
    assert len(lossless.FAMILIES) == lossless.NUM_METHODS == 10
