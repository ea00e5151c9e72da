"""`stree-jax generate --prompts`: bad lines, memory, and outputs of other runs."""

import json

import pytest

import stree_jax as st
from stree_jax.checkpoint.directories import try_lock
from stree_jax.cli.memory import row_bytes

LINES = [b'{"prompt": "Once"}', b'{"prompt": "caf\xe9"}', b'{"prompt": "The"}']


@pytest.fixture
def decode(tmp_path, tiny_pair, command, monkeypatch):
    """Decodes in.jsonl, which has `LINES`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(LINES))

    def decode(*more):
        common = "--prompts", "in.jsonl", "--rows", 2, "--max-new-tokens", 3
        return command("generate", tiny_pair / "target", *common, *more)

    return decode


def test_an_invalid_byte_refuses_its_line_alone(decode, tmp_path):
    """And without --output the texts are the standard output, as they would be in a file."""
    code, shown, error = decode()
    assert code == 1
    assert [json.loads(line)["line"] for line in shown.splitlines()] == [1, 3]
    assert "in.jsonl, line 2: not UTF-8: 'utf-8' codec can't decode byte 0xe9" in error
    assert "in.jsonl: 2 texts of 6 tokens" in error
    code, _, _ = decode("--output", "out.jsonl")
    assert code == 1
    assert (tmp_path / "out.jsonl").read_text() == shown
    assert decode("--mesh", "auto")[:2] == (1, shown)


def test_a_number_is_no_flag(decode, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "Once", "log_probs": 1}\n{"prompt": "The"}\n')
    code, shown, error = decode()
    assert code == 1
    assert [json.loads(line)["line"] for line in shown.splitlines()] == [2]
    assert "in.jsonl, line 1: log_probs must be False, True or 'sampled', got 1" in error


def test_a_line_that_does_not_fit_into_memory_ends_alone(decode, tiny_pair, tmp_path, monkeypatch):
    model = st.from_pretrained(tiny_pair / "target")
    free = 2 * row_bytes([model], 64)
    monkeypatch.setattr("stree_jax.cli.batch.free_memory", lambda _: free)
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write('\n{"prompt": "She", "max_new_tokens": 9000000}\n')
    code, shown, error = decode()
    assert code == 1
    assert [json.loads(line)["line"] for line in shown.splitlines()] == [1, 3]
    assert "in.jsonl, line 4: 2 rows of 9000001 tokens take" in error

    monkeypatch.setattr("stree_jax.cli.batch.free_memory", lambda _: free - 1)
    code, shown, error = decode()
    assert code == 2
    assert shown == ""
    assert error.startswith("stree-jax: error: --rows 2 is too many: rows of 4 tokens take")


def test_an_output_has_one_writer(decode, tmp_path):
    with (tmp_path / "out.jsonl").open("a") as file:
        assert try_lock(file.fileno())
        code, _, error = decode("--output", "out.jsonl")
    assert code == 2
    assert "--output out.jsonl: another run is writing it; wait, or" in error
    code, _, _ = decode("--output", "out.jsonl")
    assert code == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"line": []}, "line 1 is no output of this command"),
        ({"line": "1"}, "line 1 is no output of this command"),
        ({"line": 1.0}, "line 1 is no output of this command"),
        ({"text": "edited"}, "line 1 is not as it was written; delete that line"),
        ({"text": None}, "line 1 is not as it was written; delete that line"),
        ({"digest": None}, "line 1 is not as it was written; delete that line"),
    ],
)
def test_an_output_that_was_edited_is_refused(decode, tmp_path, changes, message):
    output = tmp_path / "out.jsonl"
    decode("--output", output)
    first, rest = output.read_text().split("\n", 1)
    record = {
        name: value for name, value in (json.loads(first) | changes).items() if value is not None
    }
    edited = json.dumps(record) + "\n" + rest
    output.write_text(edited)
    code, _, error = decode("--output", output)
    assert code == 2
    assert message in error
    assert len(error.splitlines()) == 1
    assert output.read_text() == edited
