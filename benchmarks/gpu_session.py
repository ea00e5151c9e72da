"""Everything that needs a GPU, in one run of some minutes that survives crashes and hangs.

`docs/gpu.md` says what each section measures, and has a plan for half an hour.

    python -m benchmarks.gpu_session --minutes 9 --output DIR [--sections gate steps ...]

Each section has its own process and a share of the remaining time. Time that it does not use
goes to the later sections. Each row is written as soon as it is measured. A task that crashes or
hangs is one failed row. The same command with the same DIR resumes.

Results are in `gpu-session.json`; `--commit` copies it to `benchmarks/results`. Times of kernels
that a check found wrong are marked. Without a GPU nothing is measured; `--smoke` does everything
with tiny sizes on any device. Exit code 1 if anything is wrong or fails.
"""

import argparse
import functools
import time
from collections.abc import Sequence

from benchmarks.common import conclude, read_options
from benchmarks.gpu import report
from benchmarks.gpu.runner import DONE, LATEST, NOT_BEGUN, NoGpu, Results, run_section
from benchmarks.gpu.sections import SECTIONS

REPORTING = 5.0  # seconds
LEAST = 10.0  # seconds in which a section can do anything at all


def run(names: Sequence[str], results: Results, end: float, *, smoke: bool) -> None:
    """Runs the sections that are not done.

    Args:
        names: sections to run.
        results: file that rows are added to.
        end: latest `time.monotonic()`.
        smoke: use tiny sizes.
    """
    missing = [name for name in names if results.section(name)["state"] != DONE]
    for i, name in enumerate(missing):
        left = end - time.monotonic()
        if left < LEAST:
            note = results.section(name)
            if note["state"] == NOT_BEGUN:
                note["left_out"] = ["all of it"]
            continue
        weights = [SECTIONS[later].weight for later in missing[i:]]
        share = left * weights[0] / sum(weights)
        print(f"{name}: up to {share:.0f} s", flush=True)
        annotate = functools.partial(report.annotate, results.data)
        limit = min(LATEST * share, left)
        run_section(results, name, share, limit, {"smoke": smoke}, changed=annotate)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the sections and writes the results."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="limit for all sections")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on any device")
    options = read_options(parser, arguments)
    if options.smoke and options.commit:
        parser.error("times of tiny sizes are not results: --smoke goes without --commit")
    head = {"question": __doc__.splitlines()[0], "smoke": options.smoke}
    names = [name for name in SECTIONS if name in options.sections]
    try:
        results = Results.of(options, "gpu-session", head)
        run(names, results, began + 60 * options.minutes - REPORTING, smoke=options.smoke)
    except NoGpu as error:
        print(f"no GPU here: {error}; nothing was measured")
        conclude("gpu_session", right=None, obstacle=str(error))
        return
    except ValueError as error:
        raise SystemExit(str(error)) from None
    path = results.save()
    if options.commit and results.data["machine"]:
        path = results.commit(options.output)
    report.report(results.data)
    right = report.is_right(results.data)
    conclude(
        "gpu_session",
        passed=right,
        right=right,
        left_out=report.left_out(results.data),
        sections={name: results.section(name)["state"] for name in names},
        results=str(path),
    )


if __name__ == "__main__":
    main()
