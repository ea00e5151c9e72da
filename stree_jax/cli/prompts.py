"""Files of prompts: a text or a conversation in each line."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stree_jax.checks import require
from stree_jax.convert import find
from stree_jax.measuring import Question
from stree_jax.messages import shown
from stree_jax.text import Texts

SOURCE = "number", "prompt", "messages"  # of a line: what its output has too
_BOM = b"\xef\xbb\xbf"  # some editors begin a file with it


def read_lines(path: Path) -> list[tuple[int, bytes]]:
    """The lines that are not blank, and their numbers, from 1."""
    try:
        content = path.read_bytes().removeprefix(_BOM)
    except OSError as error:
        raise ValueError(f"--prompts {path} cannot be read: {error.strerror}") from None
    return [(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]


def prompt_of(line: bytes, *more: str) -> tuple[Any, dict[str, Any]]:
    """The text or the messages of a line, or what `more` names; and the object in it."""
    try:
        content = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    names = "prompt", "messages", *more
    present = [name for name in names if name in content] if isinstance(content, dict) else []
    if not present or not isinstance(content.get("prompt", ""), str):
        alternatives = " or ".join(f'"{name}"' for name in names[1:])
        raise ValueError(f'not an object with a "prompt" that is a text, or with {alternatives}')
    require(len(present) == 1, f"it has a {' and '.join(present)}; give one of them")
    prompt = content[present[0]]
    return _messages(prompt) if present == ["turns"] else prompt, content


def source_of(line: bytes) -> dict[str, Any]:
    """What the output of a line has of it: nothing of a bad one."""
    with contextlib.suppress(ValueError):
        content = prompt_of(line)[1]
        return {name: content[name] for name in SOURCE if name in content}
    return {}


def _messages(turns: Any) -> list[dict[str, str]]:
    """Texts of a user as messages."""
    texts = turns if isinstance(turns, list) and turns else [""]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError(f'"turns" must be texts, none of them empty, got {shown(turns)}')
    if any(text.startswith("FULL BENCHMARK DATA SHOULD BE FETCHED") for text in texts):
        raise ValueError("its turns are not in this file: make it with SPEED-Bench's own script")
    return [{"role": "user", "content": text} for text in texts]


def read_questions(
    target: str | Path,
    path: Path | None,
    built_in: Sequence[str],
    chat_template: Path | None = None,
) -> list[Question]:
    """The questions of a file: objects in a .jsonl file, otherwise a text in each line."""
    require(path is not None or chat_template is None, "--chat-template goes with --prompts")
    texts = Texts.at(find(target), chat_template)
    if path is None:
        return [Question.of(texts, prompt) for prompt in built_in]
    questions: list[Question] = []
    for number, line in read_lines(path):
        try:
            content: dict[str, Any] = {}
            prompt: Any = line.decode().rstrip("\r")
            if path.suffix == ".jsonl":
                prompt, content = prompt_of(line, "turns")
            question = Question.of(texts, prompt, content.get("category"))
            questions.append(question._replace(name=f"--prompts {path}, line {number}"))
            if (questions[0].category is None) != (question.category is None):
                raise ValueError('some lines have a "category": give one to each line or to none')
        except ValueError as error:
            raise ValueError(f"--prompts {path}, line {number}: {error}") from None
    require(bool(questions), f"--prompts {path} has no prompts")
    return questions
