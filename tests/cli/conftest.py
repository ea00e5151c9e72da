import sys

import pytest

from stree_jax.cli.main import main


@pytest.fixture
def command(monkeypatch, capfd):
    """Runs the command in this process, which has imported jax: exit code, stdout and stderr."""
    monkeypatch.setenv("STREE_JAX_CACHE", "off")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["stree-jax", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capfd.readouterr()
        return exit_.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def output(command):
    """The stdout of a command that succeeds."""

    def output(*arguments):
        code, out, err = command(*arguments)
        assert code == 0, err
        return out

    return output
