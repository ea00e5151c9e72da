"""A file of prompts through Ray Data, on as many workers as there are devices.

    python examples/ray_data.py prompts.jsonl output.jsonl --workers 8 --gpus 1

Each worker holds the target and its draft, on a device of its own. One that dies is replaced, and
its batch is decoded again, by any. The key of a line is that of its number in the whole file, so
its text is always the same, and that of `stree-jax generate --prompts`. There is a line of output
for each line, in the order in which they are done. Rerun to resume: what is there stays.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import ray

import stree_jax as st
from stree_jax.text import Texts


class Decoder:
    """A worker."""

    def __init__(self, target: str, draft: str, rows: int, seed: int, **options: Any):
        self._model, self._texts = st.from_pretrained(target), Texts.at(target)
        self._drafter = st.ModelDrafter(st.load_draft(draft, self._model))
        self._options = options | {"eos_token": self._texts.end_tokens(self._model.config)}
        self._rows, self._key = rows, jax.random.key(seed)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list]:
        """Continues a batch of prompts."""
        requests = [
            st.Request(
                self._texts.tokens(prompt),
                key=jax.random.fold_in(self._key, number),
                tokenizer=self._texts.tokenizer(prompt),
                **self._options,
            )
            for number, prompt in zip(batch["number"], batch["prompt"], strict=True)
        ]
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        scheduler = st.Scheduler(
            self._model, rows=self._rows, max_length=longest, drafter=self._drafter
        )
        place = {scheduler.submit(request): i for i, request in enumerate(requests)}
        done = sorted(scheduler.completions(), key=lambda each: place[each.request_id])
        return batch | {
            "text": [self._texts.without_end(e.text, e.tokens, e.finish_reason) for e in done],
            "num_tokens": [each.stats.num_tokens for each in done],
            "num_target_calls": [each.stats.num_target_calls for each in done],
        }


def decode(
    prompts: Path,
    output: Path,
    *,
    workers: int = 2,
    gpus: int = 0,
    batch_size: int = 64,
    worker: type = Decoder,
    **arguments: Any,
) -> None:
    """Decodes the prompts that the output does not have yet; `arguments` are those of a worker."""
    with output.open("a+b") as file:
        file.seek(0)
        whole, newline, _ = file.read().rpartition(b"\n")
        file.truncate(len(whole + newline))  # without the part of a line of an interrupted run
        there = {json.loads(line)["number"] for line in whole.splitlines()}
        lines = enumerate(prompts.read_bytes().splitlines(), 1)
        waiting = [
            {"number": number, "prompt": json.loads(line)["prompt"]}
            for number, line in lines
            if line.strip() and number not in there
        ]
        if not waiting:
            return
        # A worker that does not start is replaced too, but not for ever.
        ray.data.DataContext.get_current().max_consecutive_actor_init_deaths = 2 * workers
        decoded = ray.data.from_items(waiting).map_batches(
            worker,
            fn_constructor_kwargs=arguments,
            batch_size=batch_size,
            compute=ray.data.ActorPoolStrategy(size=workers),
            num_gpus=gpus,
        )
        for row in decoded.iter_rows():
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            file.flush()


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("prompts", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--target", default=str(st.demo_path("target")))
    parser.add_argument("--draft", default=str(st.demo_path("draft")))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=0, help="of each worker")
    given = vars(parser.parse_args())
    decode(**given, rows=8, seed=0, max_new_tokens=64, temperature=0.8)


if __name__ == "__main__":
    main()
