import os
import tempfile

# Nearly all the time of the tests is XLA's compilation, so it optimises less here, and what was
# compiled once is kept, in each process for itself. `.ci/run` has a leg without either.
if os.environ.get("STREE_JAX_TESTS") != "as released":
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    _cache = tempfile.TemporaryDirectory(prefix="stree-jax-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.5"

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
