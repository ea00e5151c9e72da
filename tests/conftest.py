import os

# Nearly all the time of the tests is XLA's compilation, so it optimises less here. One leg of
# `.ci/run` compiles as users do. (A persistent cache saved more; it crashed, once in 800 tests.)
if os.environ.get("STREE_JAX_TESTS") != "as released":
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import hypothesis
import jax
import pytest

# Compiling takes longer than hypothesis allows an example, and a failure must come back.
hypothesis.settings.register_profile("repository", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repository")


def pytest_collection_modifyitems(items):
    if jax.default_backend() != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU here"))
