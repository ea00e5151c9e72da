"""`--ignore-field`, with checkpoints of other programs and native ones."""

import pytest
import tokenizers

from tests.convert.checkpoints import CONFIG, WEIGHTS, write_safetensors

UNSLOTH = {"unsloth_fixed": True, "unsloth_version": "2025.1"}
FLAGS = [part for name in UNSLOTH for part in ("--ignore-field", name)]


@pytest.fixture
def tuned(tmp_path):
    path = write_safetensors(tmp_path / "tuned", CONFIG | UNSLOTH, WEIGHTS)
    words = tokenizers.models.WordLevel({str(i): i for i in range(37)}, unk_token="0")
    tokenizers.Tokenizer(words).save(str(path / "tokenizer.json"))
    return path


@pytest.mark.thorough
def test_a_field_is_ignored_in_each_checkpoint_that_has_it(tuned, output, refused, tmp_path):
    flags = "--ignore-field unsloth_fixed --ignore-field unsloth_version"
    assert flags in refused("inspect", tuned)
    native = tmp_path / "native"
    for arguments in (["inspect", tuned, "--tensors"], ["convert", tuned, native]):
        assert "unsloth_fixed: ignored on request" in output(*arguments, *FLAGS)
    prompt = ["-p", "5", "--max-new-tokens", 3, *FLAGS]
    texts = {
        output("generate", target, "--draft", draft, *prompt).splitlines()[0]
        for target, draft in ((tuned, native), (native, tuned), (tuned, tuned))
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "{native}", "-p", "5"], "'unsloth_fixed': no checkpoint of"),
        (["tune-tree", "{tuned}", "--draft", "{native}"], "'novel': no checkpoint of"),
        (["demo", "--target", "{tuned}", "--draft", "{tuned}"], "'novel': no checkpoint of"),
        (["inspect", "{tuned}"], "cannot ignore ['novel']"),
        (["inspect", "{native}"], "ignored fields are for checkpoints of other programs"),
        (["convert", "{tuned}", "{tuned}/out"], "cannot ignore ['novel']"),
    ],
)
def test_a_field_that_is_not_there_is_refused(arguments, message, tuned, refused, tiny_pair):
    paths = {"tuned": tuned, "native": tiny_pair / "target"}
    arguments = [argument.format(**paths) for argument in arguments]
    assert message in refused(*arguments, *FLAGS, "--ignore-field", "novel")
