import json
import re
import shutil
import sys

import pytest

from stree_jax.cli.main import main
from stree_jax.measuring import Costs

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ mood }}assistant:"


@pytest.fixture(scope="session")
def chat_target(tiny_pair, tmp_path_factory):
    """A checkpoint with a chat template."""
    folder = shutil.copytree(tiny_pair / "target", tmp_path_factory.mktemp("chat") / "target")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


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


@pytest.fixture
def refused(command):
    """The one line of stderr of a command that is refused."""

    def refused(*arguments):
        code, _, error = command(*arguments)
        assert code == 2
        assert error.startswith("stree-jax: error: ")
        assert len(error.splitlines()) == 1
        return error

    return refused


@pytest.fixture
def continued(command, tmp_path):
    """Continues the lines of a file: the records and the errors, by line."""

    def continued(target, lines, *options):
        file = tmp_path / "in.jsonl"
        texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        file.write_bytes(b"\n".join(texts))
        code, out, err = command("generate", target, "--prompts", file, *options)
        errors = {int(at): what for at, what in re.findall(r"in\.jsonl, line (\d+): (.*)", err)}
        assert code == (1 if errors else 0), err
        return {record["line"]: record for record in map(json.loads, out.splitlines())}, errors

    return continued


@pytest.fixture
def quick_tuning(monkeypatch):
    """Timing parts of a step compiles most of what `tune` does, and has its own tests."""
    costs = Costs({1: 1.0, 2: 1.1}, 0.1, {1: 0.1})
    monkeypatch.setattr("stree_jax.tuning.tuner.measure_costs", lambda *_, **__: costs)
    return "--max-nodes", 2, "--max-depth", 1, "--max-new-tokens", 12
