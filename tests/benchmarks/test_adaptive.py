import json

import numpy as np
import pytest

from benchmarks import adaptive
from benchmarks.models import Pair
from stree_jax.testing import perturbed, tiny_model


@pytest.mark.slow
def test_adaptive(tmp_path, monkeypatch):
    prompts = np.random.default_rng(0).integers(37, size=(6, 5)).tolist()
    pair = Pair("tiny", tiny_model(), perturbed(tiny_model(), 0.1), prompts, "random", False)
    monkeypatch.setattr(adaptive, "embedded_pair", lambda count: pair)
    options = ["--requests", "6", "--rows", "2", "--rounds", "1", "--output", str(tmp_path)]
    adaptive.main(options)  # exits if a way changes a text
    (path,) = tmp_path.glob("adaptive-*.json")
    results = json.loads(path.read_text())
    assert len(results["ways"]) == 2 * 4
    for order in ("in turn", "by kind"):
        fixed = [r for r in results["ways"] if r["order"] == order and r["way"] != "adaptive"]
        assert max(r["of_best_fixed"] for r in fixed) == 1
