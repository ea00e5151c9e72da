"""Writers of directories that are killed at every step."""

import os
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import stree_jax as st
from stree_jax.checkpoint.directories import (
    named_errors,
    new_directory,
    new_file,
    recover,
    write_text,
)
from stree_jax.testing import tiny_model
from tests.helpers import disk_is_full, python

# What changes the file system, except for the writing of the files themselves.
EVENTS = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree")


def write(path, text):
    with new_directory(path, overwrite=True) as new:
        (new / "file").write_text(text)


def killed_writer(write, path, step):
    """Writes anew in a process that dies before its n-th change; False if it lives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # forks of a process with threads, which this one lacks
        child = os.fork()
    if not child:
        count = 0

        def kill(event, _arguments):
            nonlocal count
            count += event in EVENTS
            if count == step:
                os._exit(9)

        sys.addaudithook(kill)
        write(path, "new")
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


def every_kill(folder, write, file):
    """Kills at all steps; returns the number of kills."""
    for step in range(1, 100):
        path = folder / f"{step}" / "model"
        path.parent.mkdir()
        write(path, "old")
        if not killed_writer(write, path, step):
            break
        for use in (recover, lambda path: write(path, "newest")):
            use(path)
            text = (path / file).read_text()
            assert text in (("old", "new") if use is recover else ("newest",)), (step, text)
        assert [entry.name for entry in path.parent.iterdir()] == ["model"], step
    assert (path / file).read_text() == "new"
    return step - 1


@pytest.mark.parametrize("new", [new_directory, new_file, named_errors])
def test_an_error_that_names_no_file_gets_the_destinations_name(new, tmp_path):
    """That of a full disk, for example."""
    full = pytest.raises(OSError, match="No space left on device: '.*there'")
    with full, new(tmp_path / "there"):
        disk_is_full()
    assert not [*tmp_path.iterdir()]


def test_a_tokenizer_on_a_full_disk(tmp_path, monkeypatch):
    """Of the tokenizers package the error would be a bare Exception."""

    def full(path, *_, **__):
        if path.name == "tokenizer.json":
            disk_is_full()

    monkeypatch.setattr(Path, "write_text", full)
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    with pytest.raises(OSError, match="No space left on device: '.*there'"):
        st.save_pretrained(tiny_model(), tmp_path / "there", tokenizer=tokenizer)


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("writer", "file", "least"), [("write", "file", 8), ("write_text", "", 4)])
def test_a_writer_may_be_killed_at_any_step(writer, file, least, tmp_path):
    """In its own process, where no other thread runs that a fork would lose."""
    code = (
        "import sys, pathlib; from tests.models import test_directories as tests;"
        "print(tests.every_kill(pathlib.Path(sys.argv[1]), getattr(tests, sys.argv[2]),"
        " sys.argv[3]))"
    )
    assert int(python("-c", code, tmp_path, writer, file)) >= least


def leftovers(folder):
    return [entry for entry in folder.iterdir() if entry.name.startswith(".")]


def test_a_second_writer_waits_for_the_first(tmp_path):
    """The temporary directory of the living stays, and each reads what is whole."""
    path, wrote = tmp_path / "model", []
    second = threading.Thread(target=lambda: (write(path, "second"), wrote.append("second")))
    with new_directory(path) as first:
        (first / "file").write_text("first")
        second.start()
        second.join(timeout=0.3)
        assert not path.exists()
        wrote.append("first")
    second.join()
    assert wrote == ["first", "second"]
    assert (path / "file").read_text() == "second"
    assert not leftovers(tmp_path)


def test_what_appears_in_the_meantime_stays(tmp_path):
    path = tmp_path / "model"
    with pytest.raises(ValueError, match="appeared in the meantime"), new_directory(path):
        path.mkdir()
    assert not [*path.iterdir()]
    assert not leftovers(tmp_path)


def test_other_directories_stay(tmp_path):
    names = (".model.partial-x.partial-12345678", ".models.partial-12345678", ".model.partial")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    write(tmp_path / "model", "text")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([*names, "model"])


@pytest.mark.thorough
def test_a_directory_that_is_being_replaced_is_waited_for(tmp_path):
    """Between two renames there is nothing at the destination; the lock says who will act."""
    path = tmp_path / "model"
    write(path, "old")
    code = f"""
import os, pathlib, time
from stree_jax.checkpoint.directories import new_directory
rename = os.rename
def slow(source, to):
    rename(source, to)
    if pathlib.Path(to).name == "old":
        print("moved", flush=True)
        time.sleep(0.5)
os.rename = slow
with new_directory(pathlib.Path({str(path)!r}), overwrite=True) as new:
    (new / "file").write_text("new")
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "moved\n"
        assert not path.exists()
        began = time.monotonic()
        recover(path)
        assert (path / "file").read_text() == "new"
        assert time.monotonic() - began < 30
    assert not leftovers(tmp_path)


def test_a_file_is_whole_or_as_it_was(tmp_path):
    """As of a kill or a full disk, of a text that cannot be written to its end."""
    file = write_text(tmp_path / "file", "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(file, "x" * 100_000 + "\ud800")
    assert file.read_text() == "old"


def test_several_writers_of_a_file(tmp_path):
    """No write fails and no read sees a part."""
    path, lengths = tmp_path / "file", set()

    def write_and_read(letter):
        for _ in range(10):
            write_text(path, letter * 300_000)
            text = path.read_text()
            lengths.add(text.count(text[0]))

    with ThreadPoolExecutor() as pool:
        assert not any(pool.map(write_and_read, "abcd"))
    assert lengths == {300_000}
    assert [*tmp_path.iterdir()] == [path]


def test_a_link_and_a_file_are_replaced(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "text").write_text("text")
    for name in ("link", "text"):
        write(tmp_path / name, "new")
        assert (Path(tmp_path / name) / "file").read_text() == "new"
    assert not leftovers(tmp_path)
    assert (tmp_path / "elsewhere").is_dir()
