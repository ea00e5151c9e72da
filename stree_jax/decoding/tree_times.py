"""Times of a step with each tree that `topology="auto"` chooses from, measured once.

They are kept for a machine, a target, a drafter and a number of rows, in memory and beside jax's
compilation cache.
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
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from stree_jax.checkpoint.directories import write_text
from stree_jax.decoding.auto import AutoDrafter, Choosing
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.types import DecodeState
from stree_jax.mesh.hosts import on_host
from stree_jax.messages import shown
from stree_jax.models.lm import HybridLM

ROUNDS = 5  # of which the medians count
SECONDS = 0.1  # of the longer of two runs, whose difference counts
MOST_STEPS = 24  # of it
KNOWN = 16.0  # drafts of a depth and rank, of texts before, that count
_times: dict[str, list[float]] = {}
_taught: dict[str, dict[str, Any]] = {}
_names: Any = weakref.WeakKeyDictionary()  # of models, drafters, numbers of rows and settings


def prepared(
    decoder: SpeculativeDecoder, model: HybridLM, auto: Any, state: DecodeState, request: Any
) -> tuple[DecodeState, str]:
    """The state with what texts before taught, and a name for `teach`.

    The request's drafter, which is its own, gets the times of its trees. The state is one before
    the first step of rows.
    """
    name, number = _name(model, auto, state, request.sampling), len(auto.choices)
    times = _times.get(name) or _stored(name, number)
    if times is None and (times := _measured(decoder, model, auto, state, request)) is not None:
        _store(name, times)
    if times is not None:
        _times[name] = times
        auto.costs = np.array(times, np.float32)
    choosing = state.drafter.choosing
    rows = {
        field: np.broadcast_to(value, getattr(choosing, field).shape)
        for field, value in _taught.get(name, {}).items()
    }
    choosing = choosing._replace(**rows)
    return state._replace(drafter=state.drafter._replace(choosing=choosing)), name


def teach(name: str, choosing: Choosing) -> np.ndarray:
    """Keeps for the next texts what those that have ended taught; returns calls with each tree."""
    choosing = on_host(choosing)
    tried, accepted = choosing.tried.mean(axis=0), choosing.accepted.mean(axis=0)
    kept = np.minimum(1, KNOWN / np.maximum(tried, 1e-9))
    _taught[name] = {"tried": kept * tried, "accepted": kept * accepted}
    _taught[name] |= {each: getattr(choosing, each).max() for each in ("pause", "rest", "trial")}
    return np.asarray(choosing.counts).sum(axis=0)


def _measured(
    decoder: SpeculativeDecoder, model: HybridLM, auto: Any, state: DecodeState, request: Any
) -> list[float] | None:
    """Seconds of a step with each tree; None if there is no room for three steps."""
    longest = int(on_host(state.context.length).max())
    room = (decoder.max_length - longest) // (decoder.topology.depth + 1)
    if room < 3:
        return None
    limits = request.limits
    never = jnp.full_like(limits.max_new_tokens, 2**30), jnp.full_like(limits.eos_tokens, -1)
    limits = limits._replace(max_new_tokens=never[0], eos_tokens=never[1])

    def seconds(number: int, steps: int) -> tuple[float, int]:
        own: Any = jax.tree.map(jnp.copy, state)
        forced = jnp.full_like(own.step, number)
        choosing = own.drafter.choosing._replace(forced=forced)
        own = own._replace(drafter=own.drafter._replace(choosing=choosing))
        jax.block_until_ready(own)
        began = time.perf_counter()
        end = decoder.run(model, auto, own, limits, request.sampling, steps)
        done = int(end.step[0])
        return time.perf_counter() - began, done

    for _ in range(2):  # the first compiles
        one, _ = seconds(len(auto.choices) - 1, 1)
    most = min(int(np.clip(SECONDS / one, 3, MOST_STEPS)), room)
    found: list[list[float]] = []
    for _ in range(ROUNDS):
        times = []
        for number in range(len(auto.choices)):
            (short, few), (long, more) = seconds(number, 1), seconds(number, most)
            if more < most:  # a stop has ended all rows: the guess stays
                return auto.costs.tolist()
            times.append((long - short) / (more - few))
        found.append(times)
        if one > SECONDS:
            break
    return [max(float(each), 1e-9) for each in np.median(found, axis=0)]


def _name(model: HybridLM, auto: AutoDrafter, state: DecodeState, sampling: Any) -> str:
    """A fingerprint of what the times depend on; made once, it takes longer than a step."""
    names = _names.setdefault(model, weakref.WeakKeyDictionary()).setdefault(auto.drafter, {})
    key = auto.choices, len(state.done), jax.tree.structure(sampling)
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
        if found := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()):
            return found[1]
    return platform.processor()


def _file(name: str) -> Path | None:
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir
    return Path(folder) / f"tree-times-{name}.json" if folder else None


def _stored(name: str, number: int) -> list[float] | None:
    """What an earlier process measured; a damaged file is measured again."""
    if (path := _file(name)) is None or not path.exists():
        return None
    try:
        times = [float(each) for each in json.loads(path.read_text())["seconds"]]
        if len(times) == number and all(0 < each < 1e6 for each in times):
            return times
    except (OSError, ValueError, KeyError, TypeError):
        pass
    warnings.warn(f"{shown(str(path))} is damaged: the trees are timed again", stacklevel=2)
    return None


def _store(name: str, times: list[float]) -> None:
    if (path := _file(name)) is not None:
        with contextlib.suppress(OSError):  # as jax does: the next process measures again
            write_text(path, json.dumps({"seconds": times}))
