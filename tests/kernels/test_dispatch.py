import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch, replay, triton_backend


def small_replay(implementation=None, state_size=16):
    x, dt = jnp.ones((1, 2, 1, 16)), jnp.ones((1, 2, 1))
    B, state = jnp.ones((1, 2, 1, state_size)), jnp.zeros((1, 1, 16, state_size))
    return replay(
        x, dt, -jnp.ones(1), B, state, jnp.ones((1, 2), bool), implementation=implementation
    )


def test_the_default_on_cpu_is_xla():
    assert dispatch.choose("replay", None, None) == "xla"
    assert "cpu" in dispatch.explain()


def test_unknown_implementations_are_refused():
    with pytest.raises(ValueError, match="'cuda'.*'xla'"):
        small_replay("cuda")


def test_unsupported_shapes_are_refused_only_when_asked_for():
    with pytest.raises(ValueError, match="state_size = 12 is not a power of two.*use 'xla'"):
        small_replay("pallas", state_size=12)
    assert small_replay(state_size=12).shape == (1, 1, 16, 12)


def test_without_triton_everything_but_pallas_works(monkeypatch):
    monkeypatch.setattr(triton_backend, "UNAVAILABLE", "this jax has no Pallas-Triton backend")
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert small_replay().shape == (1, 1, 16, 16)
    assert "no Pallas-Triton" in dispatch.explain()
    with pytest.raises(ValueError, match="no Pallas-Triton backend; use 'xla'"):
        small_replay("pallas")


def test_a_gpu_gets_the_kernel(monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert dispatch.choose("replay", None, None) == "pallas"
    assert dispatch.choose("replay", None, "odd shape") == "xla"
    assert dispatch.explain().startswith("pallas")
