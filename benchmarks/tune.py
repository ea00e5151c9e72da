"""Which block sizes are the fastest for each Pallas kernel on this GPU?

One pass of coordinate descent from the defaults, the fields that matter most first. The values of a
field are checked against the result of XLA, and timed interleaved on every shape and number of
nodes of a case (mostly the dtype of the inputs). A value is kept if it is faster by at least 2 %
(geometric mean over shapes). One that fails to compile, or is wrong anywhere, is skipped and
counted. The time of a call is averaged over many calls in one program.

    python -m benchmarks.tune --minutes 8.5 --output DIR --dtypes bfloat16 \
        --kernels tree_scan tree_conv1d tree_attention_layer --shapes mamba2-2.7b MambaInLlama-8B

Writes `<device>.json`, the table of the best block sizes so far, after every field, by default to
`pallas_kernels/tuned`, where the kernels read it; its entries for other kernels stay. All timings
are in `tune.json` in the same DIR; `--commit` copies them to `benchmarks/results`. The search runs
in its own process: one that crashes or hangs loses the field in progress. The same command
with the same DIR resumes. `--smoke` runs everything on any device with tiny shapes;
its times mean nothing, so it needs an `--output`.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES
from benchmarks.common import OUTPUT, SMOKE, conclude, names, parser_of, read_options
from benchmarks.gpu.runner import NoGpu, Results, run_section
from benchmarks.gpu.search import DTYPES
from benchmarks.gpu.spaces import SPACES
from benchmarks.gpu.tasks import Row
from pallas_kernels import tuning
from stree_jax.measuring.report import Table, write_json

LAST = 0.85  # of the time in which fields may begin
SECTION = "tune"
SHAPES = sorted({shape for space in SPACES.values() for shape in CASES[space.timed].shapes})
OPTIONS = {
    "--kernels": names(SPACES),
    "--shapes": names(SHAPES) | {"default": None},
    "--dtypes": names(DTYPES),
    "--minutes": 60.0,
    "--nodes": {"nargs": "+", "type": int, "default": [64, 1]},  # a list, as in the results
    "--count": 49,
    "--rounds": 7,
    "--smoke": SMOKE,
}
HELP = {"--shapes": "default: all", "--minutes": "time limit for the search"}
HELP |= {"--count": "calls in one timed program"}
SAME = ("nodes", "count", "smoke", "shapes", "dtypes")  # of runs that may be resumed


def blocks_of(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The best block sizes so far by kernel and case."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "so_far" in row:
            found.setdefault(row["kernel"], {})[row["case"]] = row["so_far"]
    return found


def write_table(directory: Path, where: Mapping[str, Any], blocks: dict[str, Any]) -> Path:
    """Writes the block sizes of some cases of kernels; the table keeps the others."""
    path = directory / tuning.path_of(where["device"]).name
    kept: dict[str, dict[str, Any]] = {}
    if path.exists():
        tuning.load.cache_clear()
        tuning.load(path)  # a damaged table is an error, and is not overwritten
        kept = json.loads(path.read_text())["blocks"]
    merged = kept | {op: kept.get(op, {}) | cases for op, cases in blocks.items()}
    table = {
        "device": where["device"],
        "written_by": "python -m benchmarks.tune",
        **{key: where[key] for key in ("jax", "date", "commit")},
        "blocks": dict(sorted(merged.items())),
    }
    write_json(path, table)
    tuning.load.cache_clear()
    tuning.load(path)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Tunes the chosen kernels, and writes the table after each field."""
    began = time.monotonic()
    parser = parser_of(__doc__.splitlines()[0], OPTIONS, HELP)
    options = read_options(parser, arguments)
    own_folder = not options.commit and options.output != OUTPUT
    if options.smoke and not own_folder:
        parser.error("times of the interpreter mean nothing: --smoke needs an --output")
    directory = options.output if own_folder else tuning.DIRECTORY
    head = {"question": __doc__.splitlines()[0]} | {name: vars(options)[name] for name in SAME}
    chosen = {name: vars(options)[name] for name in (*SAME, "kernels", "rounds")}
    try:
        results = Results.of(options, "tune", head)
        note = results.section(SECTION)

        def write() -> Path | None:
            """The table, if there is anything to write in it."""
            blocks = blocks_of(note["rows"])
            return write_table(directory, results.data["machine"], blocks) if blocks else None

        left = began + 60 * options.minutes - time.monotonic()
        module = "benchmarks.gpu.search"
        run_section(results, SECTION, LAST * left, left, chosen, module=module, changed=write)
    except NoGpu as error:
        raise SystemExit(f"nothing to tune: {error}; --smoke tries it with tiny shapes") from None
    except ValueError as error:
        raise SystemExit(str(error)) from None
    table = write()
    file = results.commit(options.output) if options.commit else results.path
    best = [
        {"kernel": kernel, "case": case, "blocks": blocks}
        for kernel, cases in blocks_of(note["rows"]).items()
        for case, blocks in cases.items()
    ]
    columns = {name: f"{{{name}}}" for name in ("kernel", "case", "blocks")}
    Table(f"Block sizes on {results.data['machine']['device']}", best, columns).show()
    timed = [one for row in note["rows"] for one in row.get("timed", ())]
    failed = [one["out"] for one in timed if "out" in one]
    failed += [f"{row['task']}: {row['failed']}" for row in note["rows"] if "failed" in row]
    for why in failed:
        print(f"skipped: {why}"[:300])
    conclude(
        "tune",
        passed=table is not None,
        state=note["state"],
        timed=sum("out" not in one for one in timed),
        failed_or_wrong=len(failed),
        left_out=len(note.get("left_out", [])),
        table=table and str(table),
        results=str(file),
    )


if __name__ == "__main__":
    main()
