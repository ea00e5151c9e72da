"""Checks that all processes of a mesh make the same calls of their schedulers."""

import hashlib
from typing import Any

from stree_jax.decoding.placement import digest_of
from stree_jax.decoding.plan import Plan
from stree_jax.mesh.hosts import is_same_everywhere
from stree_jax.models.lm import HybridLM


class InStep:
    """Compares the calls of all processes before the devices run.

    Without it a process with other calls would wait for the others for ever.

    Args:
        model: the target. On one device, or in one process, nothing is compared.
    """

    def __init__(self, model: HybridLM):
        self._compares = model.partition.processes > 1
        self._asked = hashlib.sha256()

    def note(self, *asked: Any, plan: Plan | None = None) -> None:
        """Remembers a call: its name, its numbers, and the request."""
        if self._compares:
            self._asked.update(repr(asked).encode())
            self._asked.update(b"" if plan is None else digest_of(plan))

    def check(self, *asked: Any) -> None:
        """Remembers a call that all processes make, and compares all calls so far.

        Raises:
            ValueError: they differ; in all processes.
        """
        self.note(*asked)
        if self._compares and not is_same_everywhere(self._asked.digest()):
            raise ValueError(
                "the processes called their Schedulers with different requests, or in another"
                " order; all of them must make the same calls with the same contents. These"
                " Schedulers cannot continue: make new ones"
            )
