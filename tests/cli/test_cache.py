"""The persistent compilation cache of the command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from stree_jax import compilation_cache as cache

OPTIONS = {
    "jax_compilation_cache_dir": None,
    "jax_compilation_cache_max_size": -1,
    "jax_persistent_cache_min_compile_time_secs": 1.0,
    "jax_persistent_cache_enable_xla_caches": "xla_gpu_per_fusion_autotune_cache_dir",
    "jax_enable_compilation_cache": True,
    "jax_logging_level": "NOTSET",
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder, and a process in which no command has switched the cache on."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CACHE_HOME", "STREE_JAX_CACHE"):
        monkeypatch.delenv(name, raising=False)
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    for name, value in OPTIONS.items():
        jax.config.update(name, value)
    yield home
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "home/.cache/stree-jax/xla"),
        ({"XDG_CACHE_HOME": "{tmp}/xdg"}, "xdg/stree-jax/xla"),
        ({"STREE_JAX_CACHE": "{tmp}/a/b", "XDG_CACHE_HOME": "{tmp}/xdg"}, "a/b"),
        ({"STREE_JAX_CACHE": "~/programs"}, "home/programs"),
        ({"STREE_JAX_CACHE": "off"}, None),
        ({"STREE_JAX_CACHE": "{tmp}/file"}, None),
    ],
)
def test_the_folder(variables, folder, home, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    before = set(tmp_path.rglob("*"))
    cache.enable_compilation_cache()
    got = jax.config.jax_compilation_cache_dir
    if folder is None:
        assert got is None
        assert set(tmp_path.rglob("*")) == before
    else:
        assert Path(got) == tmp_path / folder
        assert Path(got).stat().st_mode & 0o777 == 0o700
        assert jax.config.jax_compilation_cache_max_size == cache.MAX_BYTES
        for name in ("a-cache", "a-atime", "b-cache"):  # a writer of b was killed
            (Path(got) / name).touch()
        jax.config.update("jax_compilation_cache_dir", None)
        cache.enable_compilation_cache()
        assert {each.name for each in Path(got).iterdir()} == {"a-cache", "a-atime"}


@pytest.mark.parametrize(
    ("option", "value"),
    [("jax_compilation_cache_dir", "/somewhere"), ("jax_enable_compilation_cache", False)],
)
def test_what_the_user_configured_stays(option, value, home):
    jax.config.update(option, value)
    cache.enable_compilation_cache()
    assert getattr(jax.config, option) == value
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 1
    assert list(home.iterdir()) == []


# Runs the command, then prints what jax compiled and what it read from the cache.
PROGRAM = """
import collections, json, sys, jax
from stree_jax.cli.main import main
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.split("/")[-1]]))
try:
    main()
finally:
    print(json.dumps(counts | {"log": jax.config.jax_logging_level}))
"""


def generate(pair, folder):
    """The text, how many programs were requested and how many were cached, and the log level."""
    command = [sys.executable, "-c", PROGRAM, "generate", pair / "target", "-p", "The cat"]
    result = subprocess.run(
        [*command, "--max-new-tokens", "4", "--draft", pair / "draft", "--tree", "chain:2"],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"STREE_JAX_CACHE": str(folder)},
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    counts = json.loads(result.stdout.splitlines()[-1])
    found = counts.get("compile_requests_use_cache", 0), counts.get("cache_hits", 0)
    return result.stdout.splitlines()[0], *found, counts["log"]


@pytest.mark.slow
def test_a_second_command_compiles_nothing(tiny_pair, tmp_path):
    text, asked, hits, _ = generate(tiny_pair, tmp_path)
    assert asked - hits > 10
    level = "CRITICAL" if jax.default_backend() == "cpu" else "NOTSET"  # XLA logs false alarms
    assert generate(tiny_pair, tmp_path) == (text, asked, asked, level)
