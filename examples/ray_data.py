"""Prompts of a JSONL file through Ray Data: as many workers as there are devices.

    python examples/ray_data.py TARGET DRAFT prompts.jsonl output.jsonl --workers 8 --gpus 1

Each worker holds the target and its draft, on a device of its own. A worker that dies is replaced,
and its lines are decoded again, by any worker: a line's key is that of its number in the whole
file, so the text is the same. Lines are written as they are done, one for each, with their numbers.
What is there is not decoded again: rerun to resume.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import ray

import stree_jax as st
from stree_jax.text import Texts


class Decoder:
    """A worker: continues batches of prompts."""

    def __init__(self, target: str, draft: str, rows: int, **options: Any):
        self._model = st.from_pretrained(target)
        self._drafter = st.ModelDrafter(st.load_draft(draft, self._model))
        self._texts, self._rows, self._options = Texts.at(target), rows, options

    def __call__(self, batch: dict[str, Any]) -> dict[str, list]:
        """Returns the texts of a batch, with their numbers."""
        requests = [
            st.Request(
                self._texts.tokens(prompt),
                key=jax.random.fold_in(jax.random.key(0), number),
                tokenizer=self._texts.tokenizer(""),
                **self._options,
            )
            for number, prompt in zip(batch["number"].tolist(), batch["prompt"], strict=True)
        ]
        scheduler = st.Scheduler(
            self._model,
            rows=self._rows,
            max_length=max(len(each.prompt) + each.max_new_tokens for each in requests),
            drafter=self._drafter,
        )
        numbers = {
            scheduler.submit(request): number
            for request, number in zip(requests, batch["number"].tolist(), strict=True)
        }
        done = [*scheduler.completions()]
        return {
            "number": [numbers[each.request_id] for each in done],
            "text": [each.text or "" for each in done],
            "tokens": [len(each.tokens) for each in done],
            "calls": [each.stats.num_target_calls for each in done],
        }


def decode(
    lines: Iterable[dict[str, Any]],
    output: Path,
    *models: str,
    workers: int = 2,
    gpus: int = 0,
    batch: int = 64,
    worker: type = Decoder,
    **options: Any,
) -> None:
    """Writes a line of output for each line that the file does not have yet."""
    with output.open("a+b") as file:
        file.seek(0)
        whole, newline, _ = file.read().rpartition(b"\n")
        file.truncate(len(whole + newline))  # an interrupted run may have left part of a line
        there = {json.loads(line)["number"] for line in whole.splitlines()}
        waiting = [line for line in lines if line["number"] not in there]
        if not waiting:
            return
        context = ray.data.DataContext.get_current()
        context.max_consecutive_actor_init_deaths = 3  # a worker that cannot start is replaced
        decoded = ray.data.from_items(waiting).map_batches(
            worker,
            fn_constructor_args=models,
            fn_constructor_kwargs=options,
            batch_size=batch,
            compute=ray.data.ActorPoolStrategy(size=workers),
            num_gpus=gpus,
        )
        for row in decoded.iter_rows():
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            file.flush()


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser()
    for name in ("target", "draft", "prompts", "output"):
        parser.add_argument(name)
    parser.add_argument("--workers", type=int, default=2, help="as many as devices")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of a worker: 1, or 0 on CPUs")
    given = parser.parse_args()
    lines = enumerate(Path(given.prompts).read_text().splitlines(), 1)
    prompts = [{"number": number, "prompt": json.loads(line)["prompt"]} for number, line in lines]
    models = given.target, given.draft
    how = dict(rows=8, max_new_tokens=64, temperature=0.8)
    decode(prompts, Path(given.output), *models, workers=given.workers, gpus=given.gpus, **how)


if __name__ == "__main__":
    main()
