"""The sections of a GPU session, in the order in which they run."""

import functools
from typing import Any

from benchmarks.gpu import checks, kernels, models, transformers_step
from benchmarks.gpu.scale import FULL, SMOKE
from benchmarks.gpu.tasks import Section


def _scaled(tasks: Any) -> Any:
    """Tasks of a scale as tasks of the options of a run."""
    return lambda options, _: tasks(SMOKE if options["smoke"] else FULL)


SECTIONS = {
    "gate": Section(_scaled(checks.gate), 2.0),
    "bandwidth": Section(_scaled(kernels.bandwidth), 0.5),
    "steps": Section(_scaled(functools.partial(models.steps, "mamba2")), 3.0, together=2),
    "kernels": Section(_scaled(kernels.times), 3.0, together=6),
    "correctness": Section(_scaled(checks.correctness), 2.5, together=32),
    "lossless": Section(_scaled(models.lossless_texts), 2.0),
    "hybrid": Section(_scaled(functools.partial(models.steps, "hybrid")), 2.5, together=2),
    "packed": Section(_scaled(models.packed_trees), 2.0, together=1, seconds=200.0),
    "batch": Section(_scaled(models.batches), 2.5, together=2),
    "transformers": Section(_scaled(transformers_step.tokens), 1.5, seconds=120.0),
}
