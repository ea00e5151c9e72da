import functools
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, native, triton
from tests.helpers import python, refusal


@pytest.mark.parametrize(
    ("platform", "capability", "obstacle"),
    [
        ("cpu", None, "the device is a CPU, the kernels need an NVIDIA GPU"),
        ("gpu", "7.5", "compute capability is 7.5, the kernels need 8.0"),
        ("gpu", "gfx942", "compute capability is gfx942"),
        ("tpu", None, "xla, compiled for TPUs at every change and never run on one: the device is"),
        ("gpu", "8.0", None),
        ("gpu", "12.0", None),
    ],
)
def test_the_default_depends_on_the_device(platform, capability, obstacle, monkeypatch):
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda backend=None: [device])
    monkeypatch.setattr(native, "obstacle", lambda: "no compiler")
    assert dispatch.choose("replay", None) == ("xla" if obstacle else "pallas")
    assert dispatch.choose("replay", None, {"pallas": "odd shape"}) == "xla"
    assert (obstacle or "pallas, and xla") in dispatch.explain()
    assert dispatch.on_tpu() == (platform == "tpu")


FAKE_GPU = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H100")


@pytest.fixture
def default_is_a_gpu(monkeypatch):
    """A machine with a GPU, as far as `dispatch` looks; its CPU is this one."""
    cpu = jax.devices("cpu")
    by_platform = {None: [FAKE_GPU], "gpu": [FAKE_GPU], "cpu": cpu}
    monkeypatch.setattr(jax, "devices", lambda backend=None: by_platform[backend])
    return cpu[0]


def test_committed_arrays_choose_the_device(default_is_a_gpu):
    """Arrays on the CPU of a machine with a GPU."""
    free = jnp.ones(3)
    here = jax.device_put(free, default_is_a_gpu)
    assert dispatch.device_of([free, None, 1.0, np.ones(3)]) is FAKE_GPU
    assert dispatch.device_of({"weight": here, "x": free}) is default_is_a_gpu
    with dispatch.on(free):
        assert dispatch.choose("replay", None) == "pallas"
    with dispatch.on(free, [here]):
        assert dispatch.choose("replay", None) == "xla"
        assert "CPU" in dispatch.explain()
    assert dispatch.default_device() is FAKE_GPU
    assert dispatch.device_obstacle() is None
    assert "is a CPU" in dispatch.device_obstacle(default_is_a_gpu)


def test_an_old_jax_is_warned_of_once(default_is_a_gpu, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    dispatch._warn_of_old_jax.cache_clear()
    with pytest.warns(UserWarning, match="jax 0.11.1 launches .* jax 0.11.2 captures"):
        dispatch.choose("replay", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch.choose("replay", None)
        monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
        dispatch.choose("replay", None)


def test_traced_arrays_are_on_the_default_device_or_on_their_mesh(default_is_a_gpu):
    chosen = []

    @jax.jit
    def run(x):
        chosen.append(dispatch.device_of(x))
        with dispatch.on(x):
            chosen.append(dispatch.choose("replay", None))
        return x

    here = jax.device_put(jnp.ones(2), default_is_a_gpu)
    run(here)  # what `on` is for
    assert chosen == [FAKE_GPU, "pallas"]
    chosen.clear()
    with dispatch.on(here):
        run(here)
    assert chosen == [default_is_a_gpu, "xla"]
    chosen.clear()
    mesh = jax.sharding.Mesh(np.array([default_is_a_gpu]), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    run(jax.device_put(here, jax.sharding.NamedSharding(mesh, spec)))
    assert chosen == [default_is_a_gpu, "xla"]


@pytest.fixture
def native_runs(monkeypatch):
    monkeypatch.setattr(native, "obstacle", lambda: None)
    monkeypatch.setattr(native, "library", lambda: ("v3", None))


# Each adds another number, so that a result tells what has run.
VERSIONS = {
    "xla": lambda x, factor: factor * x**3,
    "native": lambda x, factor: factor * x**3 + 1.0,
    "pallas": lambda x, factor, interpret: factor * x**3 + (2.0 if interpret else 3.0),
    "own": lambda x, factor: factor * x**3 + 4.0,
}


def run(requested=None, *, versions=VERSIONS, x=1.0, **options):
    return dispatch.run("op", versions, (x,), requested=requested, factor=2.0, **options)


def without(name):
    return {key: version for key, version in VERSIONS.items() if key != name}


def test_run_calls_the_version_that_is_asked_for(native_runs):
    results = {"xla": 2.0, "native": 3.0, "pallas_interpret": 4.0, "pallas": 5.0, "own": 6.0}
    assert {name: run(name) for name in results} == results


def test_the_default_is_native_on_a_cpu(native_runs, monkeypatch):
    assert run() == 3.0
    assert run(unsupported={"pallas": "odd shape"}) == 3.0
    assert run(unsupported={"native": "odd shape"}) == run(versions=without("native")) == 2.0
    assert dispatch.explain() == "CPU code for AVX2; texts exact"
    monkeypatch.setattr(native, "obstacle", lambda: "no compiler")
    assert run() == 2.0
    assert dispatch.explain().startswith("xla: the device is a CPU")
    assert dispatch.explain().endswith("; no compiler")


def test_the_default_is_pallas_on_a_gpu(native_runs, default_is_a_gpu):
    assert run() == 5.0
    assert run(unsupported={"native": "odd shape"}) == 5.0
    assert run(unsupported={"pallas": "odd shape"}) == run(versions=without("pallas")) == 2.0
    assert run(x=jax.device_put(1.0, default_is_a_gpu)) == 3.0


@pytest.mark.parametrize("name", ["native", "pallas", "pallas_interpret"])
def test_an_op_without_the_version_runs_xlas(name, native_runs, monkeypatch):
    """Unless nothing on this machine could run it."""
    versions = without(name.removesuffix("_interpret"))
    assert run(name, versions=versions) == 2.0
    monkeypatch.setattr(native, "obstacle", lambda: "no such backend")
    monkeypatch.setattr(triton, "UNAVAILABLE", "no such backend")
    refusal(f"op cannot run as '{name}': no such backend; use 'xla'", run, name, versions=versions)


@pytest.mark.parametrize("name", ["native", "pallas", "pallas_interpret", "own"])
def test_what_is_asked_for_and_cannot_run_is_refused(name, native_runs):
    unsupported = {name.removesuffix("_interpret"): "odd shape"}
    refusal(f"op cannot run as '{name}': odd shape; use 'xla'", run, name, unsupported=unsupported)
    assert run("xla", unsupported=unsupported) == 2.0
    refusal("unknown implementation 'cuda' of op; known: .*'own'", run, "cuda")


@pytest.mark.parametrize("name", ["native", "pallas_interpret", "own"])
def test_versions_may_have_the_derivatives_of_xla(name, native_runs):
    """Of any order, and the value beside one; otherwise the version's own."""
    with_derivatives = functools.partial(run, name, xla_derivatives=True)
    assert with_derivatives() == run(name) != run("xla")
    assert jax.value_and_grad(lambda x: with_derivatives(x=x))(1.0) == (2.0, 6.0)
    assert jax.grad(jax.grad(lambda x: with_derivatives(x=x)))(1.0) == 12.0
    assert jax.value_and_grad(lambda x: run(name, x=x))(1.0) == (run(name), 6.0)


def test_an_op_has_its_name_in_profiles():
    lowered = jax.jit(lambda x: run("xla", x=x)).lower(1.0)
    assert "op/mul" in lowered.as_text(debug_info=True)


def test_a_jax_without_triton():
    """In its own process."""
    without = "import sys; sys.modules['jax.experimental.pallas.triton'] = None; import stree_jax"
    explain = "from pallas_kernels import dispatch; print(dispatch.explain())"
    shown = python("-c", f"{without}; {explain}", JAX_PLATFORMS="cpu", STREE_JAX_NATIVE="off")
    assert "has no Pallas-Triton backend" in shown
