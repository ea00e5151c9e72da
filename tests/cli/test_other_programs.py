"""Commands with checkpoints of other programs: `--ignore-field` and `--adapter`."""

import pytest
import tokenizers

from tests.convert.adapter_files import pairs, written
from tests.convert.checkpoints import CONFIG, MIXER, WEIGHTS, write_safetensors

UNSLOTH = {"unsloth_fixed": True, "unsloth_version": "2025.1"}
FLAGS = [part for name in UNSLOTH for part in ("--ignore-field", name)]


@pytest.fixture
def tuned(tmp_path):
    path = write_safetensors(tmp_path / "tuned", CONFIG | UNSLOTH, WEIGHTS)
    words = tokenizers.models.WordLevel({str(i): i for i in range(37)}, unk_token="0")
    tokenizers.Tokenizer(words).save(str(path / "tokenizer.json"))
    return path


@pytest.mark.thorough
def test_a_checkpoint_with_an_adapter(tuned, output, refused, tmp_path):
    tensors = pairs(WEIGHTS, f"{MIXER}.in_proj", f"{MIXER}.out_proj")
    adapter = written(tmp_path / "adapter", tensors, unsloth_fixed=True)
    merged, flag = tmp_path / "merged", ["--adapter", adapter, *FLAGS]
    ways = "--ignore-field unsloth_fixed --ignore-field unsloth_version"
    assert ways in refused("inspect", tuned)
    assert "--ignore-field unsloth_fixed" in refused("inspect", tuned, "--adapter", adapter)
    for arguments in (["inspect", tuned, "--tensors"], ["convert", tuned, merged]):
        shown = output(*arguments, *flag)
        assert "LoRA of rank 3, 2 tensors; made for 'org/base'" in shown
        assert "unsloth_fixed: ignored on request" in shown
    prompt = ["-p", "5", "--max-new-tokens", 8]
    texts = {output("generate", *of, *prompt).splitlines()[0] for of in ([tuned, *flag], [merged])}
    assert len(texts) == 1
    drafted = output("generate", merged, "--draft", tuned, *prompt, *FLAGS)
    assert drafted.splitlines()[0] in texts
    assert f"load its model with adapter='{adapter}', or with --adapter" in refused(
        "inspect", adapter
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "{native}", "-p", "5"], "'unsloth_fixed': no checkpoint of"),
        (["tune-tree", "{tuned}", "--draft", "{native}"], "'novel': no checkpoint of"),
        (["inspect", "{tuned}"], "cannot ignore ['novel']"),
        (["convert", "{tuned}", "{tuned}/out"], "cannot ignore ['novel']"),
    ],
)
def test_a_field_that_is_not_there_is_refused(arguments, message, tuned, refused, tiny_pair):
    paths = {"tuned": tuned, "native": tiny_pair / "target"}
    arguments = [argument.format(**paths) for argument in arguments]
    assert message in refused(*arguments, *FLAGS, "--ignore-field", "novel")
