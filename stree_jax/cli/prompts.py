"""Files of prompts: a text or a conversation in each line."""

import json
from pathlib import Path
from typing import Any

_BOM = b"\xef\xbb\xbf"  # some editors begin a file with it


def read_lines(path: Path) -> list[tuple[int, bytes]]:
    """The lines that are not blank, and their numbers, from 1."""
    try:
        content = path.read_bytes().removeprefix(_BOM)
    except OSError as error:
        raise ValueError(f"--prompts {path} cannot be read: {error.strerror}") from None
    return [(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]


def prompt_of(line: bytes) -> tuple[Any, dict[str, Any]]:
    """The text or the messages of a line, and the object in it."""
    try:
        content = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    given = {"prompt", "messages"} & content.keys() if isinstance(content, dict) else {}
    if not given or not isinstance(content.get("prompt", ""), str):
        raise ValueError('not an object with a "prompt" that is a text, or with "messages"')
    if len(given) > 1:
        raise ValueError("it has a prompt and messages; give one of them")
    return content.get("prompt", content.get("messages")), content


def read_prompts(path: Path) -> list[Any]:
    """The prompts of a file: objects in a .jsonl file, otherwise a text in each line."""
    found: list[Any] = []
    for number, line in read_lines(path):
        try:
            is_text = path.suffix != ".jsonl"
            found.append(line.decode().rstrip("\r") if is_text else prompt_of(line)[0])
        except ValueError as error:
            raise ValueError(f"--prompts {path}, line {number}: {error}") from None
    return found
