"""The sections of a GPU session, in the order in which they run."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu import checks, kernels, models, transformers_step
from benchmarks.gpu.scale import FULL, SMOKE, Scale
from benchmarks.gpu.tasks import Row, Section, Task


def _scaled(tasks: Any) -> Any:
    """Tasks of a scale as tasks of the options of a run."""

    def of_options(options: Mapping[str, Any], _: Sequence[Row]) -> Sequence[Task]:
        scale: Scale = SMOKE if options["smoke"] else FULL
        return tasks(scale)

    return of_options


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
