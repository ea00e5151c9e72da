"""Prompts for benchmarks: of public data sets if `../shared/data` exists, else built-in ones."""

import gzip
import json
from pathlib import Path

SHARED = Path(__file__).parents[2] / "shared" / "data"
# In the style of the data sets. The demo has other ones, but its module exists in an installed
# package only.
BUILT_IN = (
    "Question: Ines picks 14 pears from each of 6 trees. She sells 50 of them. How many pears does"
    " she keep?\nAnswer:",
    'def longest_word(text):\n    """Return the longest word of a text."""\n    return max(',
    "Describe the harbour of a small town early in the morning, in three sentences.\n\n",
    "Question: A train leaves every 15 minutes. How many trains leave in 4 hours?\nAnswer:",
)


def load_prompts(count: int) -> tuple[str, list[str]]:
    """Where the prompts come from, and `count` of them: GSM8K, HumanEval, MT-Bench in turn.

    Says so if it is the built-in ones that are used.
    """
    if not SHARED.is_dir():
        print(
            f"prompts: {len(BUILT_IN)} built-in ones in turn, because {SHARED} is absent; tau is"
            " not comparable with docs/results.md",
            flush=True,
        )
        return "built-in", [BUILT_IN[i % len(BUILT_IN)] for i in range(count)]
    problems = _lines((SHARED / "gsm8k" / "test.jsonl").read_text())
    programs = _lines(
        gzip.decompress((SHARED / "humaneval" / "HumanEval.jsonl.gz").read_bytes()).decode()
    )
    questions = _lines((SHARED / "mt_bench" / "question.jsonl").read_text())
    sources = [
        [f"Question: {problem['question']}\nAnswer:" for problem in problems],
        [program["prompt"] for program in programs],
        # From each of its eight categories of ten questions in turn.
        [questions[i * 10 % 80 + i // 8]["turns"][0] + "\n\n" for i in range(80)],
    ]
    picked = [sources[i % 3][i // 3 % len(sources[i % 3])] for i in range(count)]
    return "GSM8K test, HumanEval and MT-Bench, in turn", picked


def examples(count: int) -> list[str]:
    """Questions with answers of GSM8K's training set, or built-in texts in turn."""
    if not SHARED.is_dir():
        return [f"{BUILT_IN[i % len(BUILT_IN)]} {i}.\n\n" for i in range(count)]
    problems = _lines((SHARED / "gsm8k" / "train.jsonl").read_text())[:count]
    return [f"Question: {one['question']}\nAnswer: {one['answer']}\n\n" for one in problems]


def _lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line]
