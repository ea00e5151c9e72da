"""Times of a step with each tree that `topology="auto"` chooses from, measured once.

They are kept for a machine, a target, a drafter and a number of rows, in memory and beside jax's
compilation cache. What texts taught about acceptance is kept in memory, for these weights alone.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from stree_jax.checkpoint.directories import write_text
from stree_jax.decoding.auto import AutoDrafter, AutoState, Choosing
from stree_jax.decoding.plan import Plan
from stree_jax.decoding.types import DecodeState, Limits
from stree_jax.mesh.hosts import on_host
from stree_jax.messages import shown
from stree_jax.models.identity import identity
from stree_jax.models.lm import HybridLM

ROUNDS = 15  # at most
MOST_SECONDS = 4.0  # after which no round begins
SECONDS = 0.1  # of the longer of two runs, whose difference counts
MOST_STEPS = 24  # of it
KNOWN = 16.0  # drafts of a depth and rank, of texts before, that count
OF_ALL = "pause", "pause_left", "trial"  # what rows have in common
_times: dict[str, np.ndarray] = {}
_taught: dict[tuple[str, ...], dict[str, Any]] = {}
_names: Any = weakref.WeakKeyDictionary()  # of models, drafters, numbers of rows and settings
Run = Callable[[DecodeState, Limits, int], DecodeState]


class DraftHistory:
    """What earlier texts of such rows taught; sets `is_paused` and `costs` of `auto`."""

    def __init__(self, model: HybridLM, auto: AutoDrafter | Any, num_rows: int, sampling: Any):
        self._auto = auto
        self._name = _name(model, auto, num_rows, sampling)
        weights = identity(model), identity(auto.drafter)
        self._taught = _taught.setdefault((self._name, *weights), {})
        auto.is_paused = np.array(self._taught.get("pause_left", 0) > 0)

    def decoded(self, request: Plan) -> Plan:
        """The request, without drafts if none would be tried before its end: that takes less."""
        most = max(row.options.max_new_tokens for row in request.rows)
        is_paused = self._taught.get("pause_left", 0) >= most
        return request.without_drafts() if is_paused else request

    def end(self, state: AutoState | None, calls: Any) -> None:
        """Keeps what texts of such a request taught, which took so many calls of each row."""
        if state is None:
            self._taught["pause_left"] = max(0, self._taught["pause_left"] - calls.max())
        else:
            self.teach(on_host(state.choosing))

    def set_times(self, state: DecodeState, limits: Limits, run: Run) -> None:
        """Gives the drafter the times of its trees, which are measured if nobody knows them.

        `run` is the loop from a state that it may overwrite.
        """
        times = _times.get(self._name)
        if times is None:
            times = _stored(self._name, len(self._auto.choices))
        if times is None:
            times = _measured(self._auto, state, limits, run)
            if times is not None and times is not self._auto.costs:
                _store(self._name, times)
        if times is not None:
            _times[self._name] = times
            self._auto.costs = times.astype(np.float32)

    def begun(self, state: AutoState, *, alone: bool) -> AutoState:
        """The state of new rows, with what texts before taught; `alone`: no others run."""
        choosing = state.choosing
        taught: dict[str, Any] = {
            field: np.broadcast_to(value, getattr(choosing, field).shape)
            for field, value in self._taught.items()
            if alone or field not in OF_ALL
        }
        counts: Any = np.zeros(choosing.counts.shape, np.int32)
        return state._replace(choosing=choosing._replace(**taught, counts=counts))

    def teach(self, choosing: Choosing) -> None:
        """Keeps for the next texts what those that have ended taught, arrays on the host."""
        tried, accepted = choosing.tried.mean(axis=0), choosing.accepted.mean(axis=0)
        kept = np.minimum(1, KNOWN / np.maximum(tried, 1e-9))
        self._taught.update(tried=kept * tried, accepted=kept * accepted)
        self._taught.update({field: getattr(choosing, field).max() for field in OF_ALL})
        self._auto.is_paused = np.array(self._taught["pause_left"] > 0)


def _measured(auto: AutoDrafter, state: DecodeState, limits: Limits, run: Run) -> np.ndarray | None:
    """Seconds of a step with each tree, of one row and of all; None without room for 3 steps."""
    num_rows, capacity = state.context.tokens.shape
    longest = int(on_host(state.context.length).max())
    room = (capacity - longest) // (auto.default_topology().depth + 1) - 1
    if room < 3:
        return None
    never = jnp.full_like(limits.max_new_tokens, 2**30), jnp.full_like(limits.eos_tokens, -1)
    limits = limits._replace(max_new_tokens=never[0], eos_tokens=never[1])

    def seconds(rows: int, number: int, steps: int) -> tuple[float, int]:
        start: Any = jax.tree.map(jnp.copy, state)
        drafter = start.drafter._replace(choosing=start.drafter.choosing.of_all(forced=number))
        start = start._replace(drafter=drafter, done=jnp.arange(num_rows) >= rows)
        jax.block_until_ready(start)
        began = time.perf_counter()
        first_step = int(on_host(start.step)[0])
        done_steps = int(on_host(run(start, limits, steps).step)[0]) - first_step
        return time.perf_counter() - began, done_steps

    for _ in range(2):  # the first compiles
        one, _ = seconds(num_rows, len(auto.choices) - 1, 1)
    most = min(int(np.clip(SECONDS / one, 3, MOST_STEPS)), room)
    loads = [1, num_rows] if num_rows > 1 else [1]
    runs = [(rows, number) for rows in loads for number in range(len(auto.choices))]
    rounds: list[list[float]] = []
    began = time.perf_counter()
    while len(rounds) < ROUNDS and time.perf_counter() - began < MOST_SECONDS:
        rounds.append([])
        for rows, number in runs:
            (short, _), (long, done) = (seconds(rows, number, steps) for steps in (1, most))
            if done < most:  # a stop has ended all rows: this process keeps the guess
                return auto.costs
            rounds[-1] += [short, long]
    # Other work takes its part of all runs of a round, so their ratios hardly change.
    taken = np.diff(np.reshape(rounds, (-1, len(loads), len(auto.choices), 2)))[..., 0]
    taken = np.maximum(taken[:, [0, -1]] / (most - 1), 1e-9)
    parts = taken[..., :1], taken / taken[..., :1]
    without, ratios = (np.quantile(part, 0.5, axis=0, method="lower") for part in parts)
    return without * ratios


def _name(model: HybridLM, auto: AutoDrafter, num_rows: int, sampling: Any) -> str:
    """A digest of what the times depend on; made once, it takes longer than a step."""
    names = _names.setdefault(model, weakref.WeakKeyDictionary()).setdefault(auto.drafter, {})
    key = auto.choices, num_rows, jax.tree.structure(sampling)
    if key not in names:
        leaves, structure = jax.tree.flatten((model, auto.drafter))
        shapes = [(jnp.shape(leaf), str(jnp.result_type(leaf))) for leaf in leaves]
        device = dispatch.device_of(model)
        machine = jax.__version__, device.device_kind, dispatch.explain(device), os.cpu_count()
        what = repr((machine, processor(), key, str(structure), shapes))
        names[key] = hashlib.sha256(what.encode()).hexdigest()[:32]
    return names[key]


def processor() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        if match := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()):
            return match[1]
    return platform.processor()


def _file(name: str) -> Path | None:
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir
    return Path(folder) / f"tree-times-{name}.json" if folder else None


def _stored(name: str, number: int) -> np.ndarray | None:
    """What an earlier process measured; a damaged file is measured again."""
    if (path := _file(name)) is None or not path.exists():
        return None
    try:
        times = np.array(json.loads(path.read_text())["seconds"], float)
        if times.shape == (2, number) and (times > 0).all() and (times < 1e6).all():
            return times
    except (OSError, ValueError, KeyError, TypeError):
        pass
    warnings.warn(f"{shown(str(path))} is damaged: the trees are timed again", stacklevel=2)
    return None


def _store(name: str, times: np.ndarray) -> None:
    if (path := _file(name)) is not None:
        with contextlib.suppress(OSError):  # as jax does: the next process measures again
            write_text(path, json.dumps({"seconds": times.tolist()}))
