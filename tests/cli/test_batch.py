"""`stree-jax generate --prompts`: texts of lines, bad lines, and runs that go on."""

import json

import jax
import pytest

import stree_jax as st
from stree_jax.cli import batch, generate
from tests.helpers import CtrlC, by_message, disk_is_full

pytestmark = pytest.mark.thorough

OPTIONS = ["--rows", 2, "--max-new-tokens", 5]
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


BAD = [
    (b'{"prompt": ', "not JSON"),
    (b'{"prompt": "caf\xe9"}', "not UTF-8: 'utf-8' codec can't decode byte 0xe9"),
    (b'{"prompt": "\\ud800"}', "cannot encode the prompt"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"text": "x"}, 'not an object with a "prompt"'),
    ({"messages": MESSAGES, "prompt": "x"}, "it has a prompt and messages"),
    ({"messages": [{"content": "no role"}]}, "role"),
    ({"prompt": "x", "chat": {"mood": "glad"}}, "chat is for messages, and the prompt is a text"),
    ({"prompt": "x", "max_new_tokens": 10**9}, "in all 1000000001, and the limit is"),
    ({"prompt": "x", "eos_token": "<|nothing|>"}, "eos_token = '<|nothing|>' is no token"),
    ({"prompt": "x", "number": "7"}, "number must be"),
    ({"prompt": "x", "n": 10**9}, "n = 1000000000: a batch has at most 65536 rows"),
    ({"prompt": "x", "regex": "("}, "pattern '(' cannot be used"),
    ({"prompt": "x", "json_schema": {"maxItems": 10**9, "type": "array"}}, "maxItems"),
]


def test_bad_lines_are_named_and_stop_nothing(chat_target, continued):
    """Also two lines with the same grammar."""
    lines = [{"prompt": "Once"}, *(line for line, _ in BAD), BAD[-1][0], {"prompt": "The"}]
    texts, errors = continued(chat_target, lines, *OPTIONS)
    assert [*texts] == [*range(1, len(lines) + 1)]
    assert [number for number, record in texts.items() if "text" in record] == [1, len(lines)]
    for (number, error), (_, message) in zip(errors.items(), [*BAD, BAD[-1]], strict=True):
        assert message in error
        assert message in texts[number]["error"]


def test_a_chat_template_from_a_file(chat_target, tiny_pair, continued):
    template, lines = chat_target / "chat_template.jinja", [{"messages": MESSAGES}]
    options = [*OPTIONS, "--chat-template", template]
    want = continued(chat_target, lines, *OPTIONS)
    assert continued(tiny_pair / "target", lines, *options) == want
    _, errors = continued(tiny_pair / "target", lines, *OPTIONS)
    assert "pass a text instead (the command takes --chat-template FILE)" in errors[1]


def test_texts_of_lines(chat_target, continued):
    """A byte-order mark is no error; a text is that of the line's key, whatever else is there."""
    lines = [
        b'\xef\xbb\xbf{"prompt": "Question: Tom has 3 apples"}\r',
        {"messages": MESSAGES},
        {"messages": MESSAGES, "chat": {"mood": "glad "}},
        {"prompt": "The", "max_new_tokens": 3, "other": "keys stay unread"},
        {"prompt": "She", "temperature": 0.0},
        {"prompt": "He", "seed": 5},
        {"number": 70_000, "prompt": "The"},
    ]
    texts, _ = continued(chat_target, [*lines, b"", b""], *OPTIONS, "--temperature", 0.8)
    assert len(texts) == len(lines)
    lines[0] = json.loads(lines[0].decode("utf-8-sig"))
    for number, line in enumerate(lines, 1):
        own = {name: line[name] for name in ("chat", "max_new_tokens", "temperature") & line.keys()}
        options = dict(max_new_tokens=5, temperature=0.8) | own
        place = line.get("number", number)
        key = jax.random.fold_in(jax.random.key(line.get("seed", 0)), place)[None]
        prompt = line.get("prompt") or line["messages"]
        assert texts[number]["text"] == st.complete(chat_target, prompt, key=key, **options)
        assert texts[number]["num_tokens"] <= options["max_new_tokens"]
        assert texts[number].get("number") == line.get("number")


@pytest.mark.parametrize("options", [[], ["--mesh", "auto"]])
def test_standard_output_is_that_file(options, chat_target, command, out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "Once"}\nbad\n{"prompt": "The"}')
    common = ["generate", chat_target, "--prompts", "in.jsonl", *OPTIONS]
    code, shown, error = command(*common, *options)
    assert code == 1
    assert "in.jsonl: 2 texts of 10 tokens, tau 1.00, 1 lines could not be used" in error
    code, summary, _ = command(*common, "--output", "out.jsonl")
    assert code == 1
    assert "out.jsonl: 2 texts of 10 tokens" in summary
    assert out.read_text() == shown


@pytest.fixture
def run(chat_target, tmp_path, out):
    """The arguments of a run that has ended, with its output."""
    lines = [{"prompt": prompt} for prompt in ("Once", "The", "She")]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    sampled = ["--temperature", 0.8, "--output", out]
    return ["generate", chat_target, "--prompts", tmp_path / "in.jsonl", *OPTIONS, *sampled]


def test_a_run_goes_on_with_the_lines_that_are_not_there(run, output, out):
    """Behind the last whole line, or after a line was taken out; and the same."""
    assert "3 texts of 15 tokens" in output(*run)
    whole = out.read_text()
    assert [json.loads(line)["line"] for line in whole.splitlines()] == [1, 2, 3]
    second = whole.index("\n") + 1
    for cut, summary in {
        0: "3 texts of 15 tokens",
        5: "3 texts of 15 tokens",
        second: "2 texts of 10 tokens, tau 1.00, 1 lines were there before",
        second + 30: "2 texts of 10 tokens, tau 1.00, 1 lines were there before",
        len(whole): "0 texts of 0 tokens, 3 lines were there before",
    }.items():
        out.write_text(whole[:cut])
        assert summary in output(*run)
        assert out.read_text() == whole
    out.write_text(whole[second:])
    assert "1 texts of 5 tokens, tau 1.00, 2 lines were there before" in output(*run)
    assert out.read_text() == whole[second:] + whole[:second]


# Ctrl-C at a `with` comes before the file is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_goes_on_after_ctrl_c_at_every_line(run, output, out, monkeypatch):
    output(*run)
    whole, calls = out.read_text(), []
    monkeypatch.setattr(generate, "run_batch", lambda *arguments: calls.append(arguments))
    output(*run)
    out.unlink()
    ctrl_c = CtrlC("cli/batch")
    ctrl_c.again(lambda: batch.run_batch(*calls[0]))
    assert len(ctrl_c.left) > 90
    assert out.read_text() == whole


NO_OUTPUT = "is no output of this command; name another file, or delete it"


@by_message(
    ("content", "message"),
    [
        (
            '{"line": 1, "prompt": "x"}\n{"line": 3, "prompt": "She"}\n',
            "another prompt than line 1",
        ),
        ('{"line": 4, "error": "x"}\n', "another prompt than line 4"),
        ('{"prompt": "Once"}\n', NO_OUTPUT),
        ("my notes", NO_OUTPUT),
    ],
)
def test_an_output_of_something_else_is_refused(content, message, run, refused, out):
    """And stays as it is."""
    out.write_text(content)
    assert message in refused(*run)
    assert out.read_text() == content


def test_an_output_in_no_folder(run, refused, tmp_path):
    file = tmp_path / "nowhere" / "out.jsonl"
    assert f"{file}: No such file or directory" in refused(*run, "--output", file)


def test_a_full_disk_is_named(run, refused, out, monkeypatch):
    monkeypatch.setattr(batch, "write_record", disk_is_full)
    assert f"error: {out}: No space left on device" in refused(*run)
