"""Runs `FILES` where jax has 8 CPU devices, which must be said before it is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

FILES = ("eight_devices.py", "serving_on_8_devices.py", "matmul_on_8_devices.py")


def run(*options, limit):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
    outer = {name for name in os.environ if name.startswith("PYTEST_")}
    inner = {name: value for name, value in os.environ.items() if name not in outer}
    result = subprocess.run(
        [*command, *(str(Path(__file__).parent / file) for file in FILES), *options],
        env=inner | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=limit,
    )
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-5_000:]
    assert " passed" in result.stdout


def test_on_8_devices():
    run(limit=3600)


@pytest.mark.slow
def test_on_8_devices_whole():
    run("-m", "slow", limit=7200)
