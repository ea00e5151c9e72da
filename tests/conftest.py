import collections
import gc
import importlib.metadata
import itertools
import os
import signal

# Nearly all the time of the tests is XLA's compilation, so it optimises less here; the older of two
# code generators, which jax 0.10 still has, takes less than half the time. Programs are not split
# for several threads to compile: each core has a process already, and it costs an eighth of the
# time. `make test-all` compiles a file of most folders as users do; so does a leg of `.ci/run`.
# (A persistent cache of all processes saved 8 %, but jax writes entries in place: a process may
# read half of one.)
if os.environ.get("STREE_JAX_TESTS") != "as released":
    flags = "--xla_backend_optimization_level=0"
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ.setdefault("XLA_FLAGS", flags)

import hypothesis
import jax
import pytest

# Modules and traced programs live long: looking through them for garbage took a tenth of the time.
gc.set_threshold(50_000, 20, 100)

# Compiling takes longer than hypothesis allows an example, and a failure must come back.
hypothesis.settings.register_profile("repository", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repository")


# Most programs are small, so what jax does around each takes as long as compiling it. Nobody reads
# the lines of Python in a program, or its key in a cache that is not there.
jax.config.update("jax_traceback_in_locations_limit", 0)
jax.config.update("jax_enable_compilation_cache", False)


def pytest_collection_finish():
    gc.freeze()  # modules stay


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Modules in a row share programs until there are many."""
    from stree_jax.decoding.programs import free_programs

    yield
    free_programs(25_000)


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory):
    """Checkpoints of tiny models in the place of the embedded pair, with its tokenizer and tree."""
    from tests.helpers import saved_pair

    return saved_pair(tmp_path_factory.mktemp("demo"))


@pytest.fixture
def _ctrl_c_raises():
    """As in a program; a test's process may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_terminal_summary(terminalreporter):
    """The files that took longest, if there were many."""
    seconds = collections.Counter()
    for report in itertools.chain(*terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    if len(seconds) > 10:
        terminalreporter.section("the slowest files, in seconds")
        for file, taken in seconds.most_common(10):
            terminalreporter.write_line(f"{taken:7.1f}  {file}")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name != "test_on_8_devices.py")  # it takes the longest
    if jax.default_backend() != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU here"))
