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

import functools
import time
from collections.abc import Sequence

from benchmarks.common import SMOKE, conclude, names, parser_of, read_options
from benchmarks.gpu import checks, kernels, models, report, transformers_step
from benchmarks.gpu.runner import DONE, LATEST, NOT_BEGUN, NoGpu, Results, run_section
from benchmarks.gpu.scale import scale_of
from benchmarks.gpu.tasks import Section

# In the order in which they run: the tasks of a scale, the share of the time, and more.
SECTIONS = {
    name: Section(lambda options, _, tasks=tasks: tasks(scale_of(options)), weight, **more)
    for name, (tasks, weight, more) in {
        "gate": (checks.gate, 2.0, {}),
        "bandwidth": (kernels.bandwidth, 0.5, {}),
        "steps": (functools.partial(models.steps, "mamba2"), 3.0, {"together": 2}),
        "kernels": (kernels.times, 3.0, {"together": 6}),
        "correctness": (checks.correctness, 2.5, {"together": 32}),
        "lossless": (models.lossless_texts, 2.0, {}),
        "hybrid": (functools.partial(models.steps, "hybrid"), 2.5, {"together": 2}),
        "packed": (models.packed_trees, 2.0, {"together": 1, "seconds": 200.0}),
        "batch": (models.batches, 2.5, {"together": 2}),
        "transformers": (transformers_step.tokens, 1.5, {"seconds": 120.0}),
    }.items()
}
REPORTING = 5.0  # seconds
LEAST = 10.0  # seconds in which a section can do anything at all


def run(chosen: Sequence[str], results: Results, end: float, *, smoke: bool) -> None:
    """Runs the sections that are not done.

    Args:
        chosen: sections to run.
        results: file that rows are added to.
        end: latest `time.monotonic()`.
        smoke: use tiny sizes.
    """
    missing = [name for name in chosen if results.section(name)["state"] != DONE]
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
    known = {"--minutes": 9.0, "--sections": names(SECTIONS), "--smoke": SMOKE}
    parser = parser_of(__doc__.splitlines()[0], known)
    options = read_options(parser, arguments)
    if options.smoke and options.commit:
        parser.error("times of tiny sizes are not results: --smoke goes without --commit")
    head = {"question": __doc__.splitlines()[0], "smoke": options.smoke}
    chosen = [name for name in SECTIONS if name in options.sections]
    try:
        results = Results.of(options, "gpu-session", head)
        run(chosen, results, began + 60 * options.minutes - REPORTING, smoke=options.smoke)
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
        sections={name: results.section(name)["state"] for name in chosen},
        results=str(path),
    )


if __name__ == "__main__":
    main()
