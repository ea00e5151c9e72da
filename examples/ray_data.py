"""A file of prompts through Ray Data, on as many workers as there are devices.

    python examples/ray_data.py prompts.jsonl output.jsonl --workers 8 --gpus 1

Each worker holds the target and its draft, on a device of its own. One that dies is replaced, and
its batch is decoded again, by any. Lines of prompts and of output are those of `stree-jax generate
--prompts`, and so are the texts; lines of output come in the order in which they are done. Rerun to
resume: what is there stays, and either program goes on with the output of the other. The exit code
is 1 if lines could not be used; their output has an "error".
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import ray

import stree_jax as st
from stree_jax.cli.batch import opened, prepared, records, write_record
from stree_jax.cli.generate import load
from stree_jax.cli.options import Generate
from stree_jax.cli.prompts import read_lines

# Options of the command that are options here too: a line of the file may have its own instead.
OPTIONS = {
    "max_new_tokens": 64,
    "min_new_tokens": 0,
    "max_length": None,
    "temperature": 0.8,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": 0,
    "rows": 8,
}


class Decoder:
    """A worker."""

    def __init__(self, target: str, draft: str, rows: int, **options: Any):
        self._command, self._rows = Generate.of(target, draft=draft, **options), rows
        self._loaded = load(self._command)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list]:
        """Continues a batch of lines."""
        numbered = zip(batch["number"].tolist(), batch["line"], strict=True)
        settings = self._command.settings()
        lines = prepared(self._loaded, self._command, settings, numbered)
        found = records(self._loaded, self._command, lines, self._rows)
        return {"record": [json.dumps(record) for record in found]}


def decode(
    prompts: Path,
    output: Path,
    *,
    workers: int = 2,
    gpus: int = 0,
    batch_size: int = 64,
    worker: type = Decoder,
    **arguments: Any,
) -> int:
    """Decodes the lines that the output does not have yet; `arguments` are those of a worker.

    Returns how many have errors.
    """
    numbered = read_lines(prompts)
    with opened(output, numbered) as (file, there):
        waiting = [
            {"number": number, "line": line} for number, line in numbered if number not in there
        ]
        if not waiting:
            return 0
        # A worker that does not start is replaced too, but not for ever.
        ray.data.DataContext.get_current().max_consecutive_actor_init_deaths = 2 * workers
        decoded = ray.data.from_items(waiting).map_batches(
            worker,
            fn_constructor_kwargs=arguments,
            batch_size=batch_size,
            compute=ray.data.ActorPoolStrategy(size=workers),
            num_gpus=gpus,
        )
        bad = 0
        for row in decoded.iter_rows():
            record = json.loads(row["record"])
            write_record(file, record)
            bad += "error" in record
        return bad


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("prompts", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--target", default=str(st.demo_path("target")))
    parser.add_argument("--draft", default=str(st.demo_path("draft")))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=0, help="of each worker")
    for name, default in OPTIONS.items():
        kind = float if isinstance(default, float) else int
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    sys.exit(1 if decode(**vars(parser.parse_args())) else 0)


if __name__ == "__main__":
    main()
