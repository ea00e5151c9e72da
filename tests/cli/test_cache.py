"""The persistent compilation cache of the command."""

import grp
import json
import os
import pwd
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import pytest

from stree_jax import compilation_cache as cache

OPTIONS = {
    "jax_compilation_cache_dir": None,
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
    with warnings.catch_warnings():
        yield home
    for name, value in before.items():
        jax.config.update(name, value)


def enabled():
    """The folder of the cache after it is switched on; None: there is none."""
    jax.config.update("jax_compilation_cache_dir", None)
    cache.enable_compilation_cache()
    folder = jax.config.jax_compilation_cache_dir
    return None if folder is None else Path(folder)


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "home/.cache/stree-jax/xla"),
        ({"XDG_CACHE_HOME": "{tmp}/xdg"}, "xdg/stree-jax/xla"),
        ({"XDG_CACHE_HOME": "xdg"}, "home/.cache/stree-jax/xla"),
        ({"STREE_JAX_CACHE": "{tmp}/a/b", "XDG_CACHE_HOME": "{tmp}/xdg"}, "a/b"),
        ({"STREE_JAX_CACHE": "~/programs"}, "home/programs"),
        ({"STREE_JAX_CACHE": "programs"}, "programs"),
        ({"STREE_JAX_CACHE": "off"}, None),
        ({"HOME": "{tmp}/nowhere"}, None),
        ({"STREE_JAX_CACHE": "{tmp}/file"}, None),
        ({"STREE_JAX_CACHE": "{tmp}/file/below"}, None),
        ({"STREE_JAX_CACHE": "{tmp}/loop/below"}, None),
        ({"STREE_JAX_CACHE": "~nobody-of-this-name/x"}, None),
    ],
)
def test_the_folder(variables, folder, home, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    before = set(tmp_path.rglob("*"))
    got = enabled()
    if folder is None:
        assert got is None
        assert set(tmp_path.rglob("*")) == before
    else:
        assert got == tmp_path / folder
        assert got.is_dir()
        assert got.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("chmod 777 xla", "others may write to .*xla"),
        ("chmod 1777 xla", "others may write to .*xla"),
        ("chgrp 12345 xla; chmod 770 xla", "others may write to .*xla"),
        ("chmod 757 .", "others may write to .*stree-jax, and"),
        ("chmod 777 ..", r"others may write to .*\.cache, and"),
        ("rm -r xla; mkdir -m 777 open; ln -s open xla", "others may write to .*open"),
        ("chown 12345 xla", "xla belongs to user 12345"),
        ("chown 12345 ..", r"\.cache belongs to user 12345"),
        ("chown 12345 xla/entry", "xla/entry belongs to user 12345"),
    ],
)
def test_a_folder_that_others_may_change_is_refused(change, message, home):
    """What lies there runs as the user."""
    if change.startswith(("chown", "chgrp")) and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    folder = enabled()
    (folder / "entry").touch()
    subprocess.run(["sh", "-c", change], cwd=folder.parent, check=True)
    with pytest.warns(UserWarning, match=f"not cached: .*{message}.* run as you"):
        assert enabled() is None


def test_a_sticky_folder_above_is_safe(home):
    """Such as /tmp; and all folders that are made are private."""
    before = os.umask(0)
    try:
        folder = enabled()
    finally:
        os.umask(before)
    folder.parents[1].chmod(0o1777)
    assert enabled() == folder
    assert {part.stat().st_mode & 0o077 for part in (folder, folder.parent)} == {0}


def test_the_group_of_a_user_alone_is_the_user(home):
    """With such groups the usual mask is 002, and folders are writable for the group."""
    if grp.getgrgid(os.getgid()).gr_name != pwd.getpwuid(os.geteuid()).pw_name:
        pytest.skip("this user has no group alone")
    folder = enabled()
    for part in (folder, *folder.parents[:2]):
        part.chmod(0o775)
    assert enabled() == folder


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


@pytest.fixture
def folder(home, monkeypatch):
    """The folder of a cache that is to be switched on."""
    monkeypatch.setenv("STREE_JAX_CACHE", str(home))
    return home


def test_the_least_recently_read_entries_are_evicted(folder, monkeypatch):
    monkeypatch.setattr(cache, "MAX_BYTES", 250)
    names = [f"jit_step-{i:064x}-cache" for i in range(4)]
    for i, name in enumerate(names):
        (folder / name).write_bytes(bytes(100))
        os.utime(folder / name, (1000 + i, 1000))
    os.utime(folder / names[0], (2000, 1000))  # written first, read last
    (folder / "notes").write_bytes(bytes(1000))
    (folder / f"jit_step-{9:064x}-cache").mkdir()
    enabled()
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    assert files == [names[0], names[3], "notes"]


def test_warnings_about_entries_are_hidden_and_what_cannot_be_read_is_deleted(folder):
    names = ("jit_step", "jit_steps", "jit_run", "jit_odd")
    *entries, directory = (folder / f"{name}-{0:064x}-cache" for name in names)
    for entry in entries:
        entry.touch()
    directory.mkdir()
    failure = "Error {} persistent compilation cache entry for '{}': error: -5"
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("error")
        enabled()
        for _ in range(2):  # also when it is repeated
            entries[0].touch()
            warnings.warn(failure.format("reading", "jit_step"), stacklevel=1)
            assert not entries[0].exists()
        warnings.warn(failure.format("writing", "jit_run"), stacklevel=1)
        warnings.warn(failure.format("reading", "jit_odd"), stacklevel=1)
        assert all(path.exists() for path in (*entries[1:], directory))
        assert shown == []
        with pytest.raises(UserWarning, match="another"):
            warnings.warn("another", stacklevel=1)


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
def test_a_second_command_compiles_what_was_damaged(tiny_pair, tmp_path):
    text, asked, hits, _ = generate(tiny_pair, tmp_path)
    entries = sorted(tmp_path.iterdir())
    assert len(entries) == asked - hits > 10
    assert sum(entry.name.startswith("jit_step-") for entry in entries) == 1
    programs = [entry.name.rpartition("-cache")[0].rpartition("-")[0] for entry in entries]
    places = {program: place for place, program in enumerate(dict.fromkeys(programs))}
    kinds = [places[program] % 3 for program in programs]  # a program has entries of some shapes
    for entry, kind in zip(entries, kinds, strict=True):
        if kind == 0:  # cut short, as by a full disk
            entry.write_bytes(entry.read_bytes()[:100])
        elif kind == 1:
            entry.write_bytes(b"no program")
    again, asked_again, hits_again, log = generate(tiny_pair, tmp_path)
    assert (again, asked_again) == (text, asked)
    assert hits_again == hits + kinds.count(2)
    assert sorted(tmp_path.iterdir()) == entries
    assert min(entry.stat().st_size for entry in entries) > 100  # written again
    # XLA's false alarms are errors in its log.
    assert log == ("CRITICAL" if jax.default_backend() == "cpu" else "NOTSET")
