"""`--adapter`, a LoRA adapter merged into the checkpoint of another program."""

import pytest
import tokenizers

from tests.convert.adapter_files import pairs, written
from tests.convert.checkpoints import CONFIG, MIXER, WEIGHTS, write_safetensors

pytestmark = pytest.mark.thorough


def test_a_checkpoint_with_an_adapter(output, refused, tmp_path):
    base = write_safetensors(tmp_path / "base", CONFIG, WEIGHTS)
    words = tokenizers.models.WordLevel({str(i): i for i in range(37)}, unk_token="0")
    tokenizers.Tokenizer(words).save(str(base / "tokenizer.json"))
    tensors = pairs(WEIGHTS, f"{MIXER}.in_proj", f"{MIXER}.out_proj")
    adapter = written(tmp_path / "adapter", tensors, unsloth_fixed=True)
    merged, flag = tmp_path / "merged", ["--adapter", adapter]
    assert "'unsloth_fixed'" in refused("inspect", base, *flag)
    flag += ["--ignore-field", "unsloth_fixed"]
    for arguments in (["inspect", base, "--tensors"], ["convert", base, merged]):
        assert "LoRA of rank 3, 2 tensors; made for 'org/base'" in output(*arguments, *flag)
    prompt = ["-p", "5", "--max-new-tokens", 8]
    texts = {output("generate", *of, *prompt).splitlines()[0] for of in ([base, *flag], [merged])}
    assert len(texts) == 1
    assert f"load its model with adapter='{adapter}', or with --adapter" in refused(
        "inspect", adapter
    )
