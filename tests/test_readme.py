"""The README's code runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_code_block(capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(code, str(README), "exec"), {})
    assert re.match(r"\d\.\d\d tokens per target call\n.", capsys.readouterr().out)
