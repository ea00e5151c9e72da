"""Runs `*_on_8_devices.py` where jax has 8 CPU devices: a flag says so before its import."""

import os
from pathlib import Path

import pytest

from tests.helpers import python

pytestmark = pytest.mark.thorough


def run(*options, limit):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    files = {*Path(__file__).parent.glob("*_on_8_devices.py")} - {Path(__file__)}
    pytest_ = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0")
    environment = dict(XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    assert " passed" in python(*pytest_, *sorted(files), *options, timeout=limit, **environment)


def test_on_8_devices():
    run(limit=3600)


@pytest.mark.slow
def test_on_8_devices_whole():
    run("-m", "slow", limit=7200)
