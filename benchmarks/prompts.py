"""Prompts for benchmarks: real ones where `../shared/data` is, built-in ones otherwise."""

import gzip
import json
from pathlib import Path

from stree_jax.cli.demo import PROMPTS as BUILT_IN

SHARED = Path(__file__).parents[2] / "shared" / "data"


def load_prompts(count: int) -> tuple[str, list[str]]:
    """`count` prompts and where they come from: GSM8K, HumanEval and MT-Bench in turn."""
    if not SHARED.is_dir():
        return "built-in", [BUILT_IN[i % len(BUILT_IN)] for i in range(count)]
    problems = _lines((SHARED / "gsm8k" / "test.jsonl").read_text())
    programs = _lines(
        gzip.decompress((SHARED / "humaneval" / "HumanEval.jsonl.gz").read_bytes()).decode()
    )
    questions = _lines((SHARED / "mt_bench" / "question.jsonl").read_text())
    sources = [
        [f"Question: {problem['question']}\nAnswer:" for problem in problems],
        [program["prompt"] for program in programs],
        # Spread over its eight categories of ten questions.
        [questions[i * 10 % 80 + i // 8]["turns"][0] + "\n\n" for i in range(80)],
    ]
    picked = [sources[i % 3][i // 3 % len(sources[i % 3])] for i in range(count)]
    return "GSM8K test, HumanEval and MT-Bench, in turn", picked


def _lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line]
