import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch, replay, triton


def small_replay(implementation=None, state_size=16):
    x, dt = jnp.ones((1, 2, 1, 16)), jnp.ones((1, 2, 1))
    B, state = jnp.ones((1, 2, 1, state_size)), jnp.zeros((1, 1, 16, state_size))
    return replay(
        x, dt, -jnp.ones(1), B, state, jnp.ones((1, 2), bool), implementation=implementation
    )


@pytest.mark.parametrize(
    ("platform", "capability", "obstacle"),
    [
        ("cpu", None, "the device is a CPU, the kernels need an NVIDIA GPU"),
        ("gpu", "7.5", "compute capability is 7.5, the kernels need 8.0"),
        ("gpu", "gfx942", "compute capability is gfx942"),
        ("gpu", "8.0", None),
        ("gpu", "12.0", None),
    ],
)
def test_the_default_depends_on_the_device(platform, capability, obstacle, monkeypatch):
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda backend=None: [device])
    assert dispatch.choose("replay", None, None) == ("xla" if obstacle else "pallas")
    assert dispatch.choose("replay", None, "odd shape") == "xla"
    assert (obstacle or "pallas, and xla") in dispatch.explain()


def test_a_default_device_is_respected():
    with jax.default_device(jax.devices("cpu")[0]):
        assert dispatch.choose("replay", None, None) == "xla"


def test_unknown_implementations_are_refused():
    with pytest.raises(ValueError, match="'cuda'.*'xla'"):
        small_replay("cuda")


def test_unsupported_shapes_are_refused_only_when_asked_for():
    with pytest.raises(ValueError, match="state_size = 12 is not a power of two.*use 'xla'"):
        small_replay("pallas", state_size=12)
    assert small_replay(state_size=12).shape == (1, 1, 16, 12)


def test_without_triton_everything_but_pallas_works(monkeypatch):
    monkeypatch.setattr(triton, "UNAVAILABLE", "this jax has no Pallas-Triton backend")
    monkeypatch.setattr(dispatch, "device_obstacle", lambda: None)
    assert small_replay().shape == (1, 1, 16, 16)
    assert "no Pallas-Triton" in dispatch.explain()
    with pytest.raises(ValueError, match="no Pallas-Triton backend; use 'xla'"):
        small_replay("pallas")


def test_a_jax_without_triton_imports():
    code = (
        "import sys; sys.modules['jax.experimental.pallas.triton'] = None\n"
        "import stree_jax\n"
        "from pallas_kernels import dispatch\n"
        "print(dispatch.explain())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "has no Pallas-Triton backend" in result.stdout
