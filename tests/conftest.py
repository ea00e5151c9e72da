import atexit
import gc
import importlib.metadata
import os
import shutil
import tempfile

# Nearly all the time of the tests is XLA's compilation, so it optimises less here; the older of two
# code generators, which jax 0.10 still has, takes less than half the time. One leg of `.ci/run`
# compiles as users do.
if os.environ.get("STREE_JAX_TESTS") != "as released":
    flags = "--xla_backend_optimization_level=0"
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags += " --xla_cpu_use_fusion_emitters=false"
    os.environ.setdefault("XLA_FLAGS", flags)

# Processes of one run share what they compile: workers, commands, examples, benchmarks.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder = tempfile.mkdtemp(prefix="stree-jax-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    # As in stree_jax/cli/cache.py, which says why.
    os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"
    os.environ["JAX_LOGGING_LEVEL"] = "CRITICAL"

import hypothesis
import jax
import pytest

# Compiling takes longer than hypothesis allows an example, and a failure must come back.
hypothesis.settings.register_profile("repository", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repository")


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """XLA's compiler crashed twice in processes that held the programs of hundreds of tests."""
    yield
    jax.clear_caches()
    gc.collect()


def pytest_collection_modifyitems(items):
    if jax.default_backend() != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU here"))
