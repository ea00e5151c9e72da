"""Which instructions of this processor are the fastest for native code, and how near is memory?

Steps of 8 layers in the shape of mamba2-370m, with one node and with the default tree, in each
type, at every level that the processor has, and by XLA ("off"). Each level has a process of its
own; their steps are timed in turns. Bytes a second are those of the weights, at one node. Beside
them is the speed at which XLA adds up a large array.

    python -m benchmarks.native_levels [--rounds 9] [--types float32 ...] [--output DIR | --commit]
"""

import argparse
import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import stree_jax as st
from benchmarks.common import Found, Worker, main, names, timed_calls
from benchmarks.models import random_model
from benchmarks.steps import run_steps
from pallas_kernels import native
from pallas_kernels.native import build_backend
from stree_jax.measuring.clock import num_bytes, summary
from stree_jax.measuring.report import Table

OPTIONS = {"--rounds": 9, "--types": names(("float32", "bfloat16", "int8", "int4"))}
SHAPE, LAYERS = "mamba2-370m", 8
TREES = {1: st.TreeTopology.chain(0), 5: st.TreeTopology.default()}
STEPS = 16  # of a timed call, so that the call itself takes little of it
COLUMNS = {
    "type": "{type}",
    "level": "{level}",
    "ms, 1 node": "{milliseconds[1][median]:.2f}",
    "ms, 5 nodes": "{milliseconds[5][median]:.2f}",
    "GB/s": "{gigabytes_per_second:.1f}",
}


def model_of(type_name: str) -> st.HybridLM:
    """The model in a type, packed for native code."""
    config = st.ModelConfig.preset(SHAPE)
    config = dataclasses.replace(config, layers=config.layers[:LAYERS])
    is_few = type_name.startswith("int")
    model = random_model(config, "float32" if is_few else type_name)
    return model.quantized(type_name) if is_few else model


def models_at(level: str, types: Sequence[str]) -> list[dict[str, st.HybridLM]]:
    """The models by type, in a process that takes this level."""
    os.environ["STREE_JAX_NATIVE"] = level
    return [{name: model_of(name) for name in types}]


def sizes_of(models: dict[str, st.HybridLM]) -> dict[str, int]:
    """Bytes of weights by type."""
    return {name: num_bytes(nnx.state(model)) for name, model in models.items()}


def step(models: dict[str, st.HybridLM], name: str, nodes: int) -> None:
    """Steps of a model."""
    run_steps(models[name], TREES[nodes], STEPS).block_until_ready()


def levels() -> list[str]:
    """What `STREE_JAX_NATIVE` may be on this machine."""
    built = (name for name in build_backend.levels() if build_backend.library(name).is_file())
    return ["off", *(name for name in built if not build_backend.lacks(name))]


def run(options: argparse.Namespace) -> Iterator[Found]:
    """All levels in all types."""
    workers = {level: Worker(models_at, level, options.types) for level in levels()}
    sizes = {level: worker.run(sizes_of) for level, worker in workers.items()}
    calls: dict[Any, Any] = {
        (name, level, nodes): functools.partial(worker.run, step, name, nodes)
        for name in options.types
        for level, worker in workers.items()
        for nodes in TREES
    }
    array, add_up = jnp.ones((1 << 27,), jnp.float32), jax.jit(jnp.sum)
    calls["read"] = lambda: [add_up(array) for _ in range(STEPS)]
    taken = timed_calls("steps", calls, options.rounds, 1e3 / STEPS)
    times = {key: summary(milliseconds) for key, milliseconds in taken.items()}
    rows = [
        {
            "type": name,
            "level": level,
            "milliseconds": {nodes: times[name, level, nodes] for nodes in TREES},
            "gigabytes_per_second": sizes[level][name] / times[name, level, 1]["median"] / 1e6,
        }
        for name in options.types
        for level in workers
    ]
    read = array.nbytes / times["read"]["median"] / 1e6
    best = {
        name: min(workers, key=lambda level: times[name, level, 1]["median"])
        for name in options.types
    }
    line = {"by_default": native.level(), "fastest": best, "read_gigabytes_per_second": read}
    table = Table(f"A step of {LAYERS} layers of {SHAPE}; memory {read:.1f} GB/s", rows, COLUMNS)
    yield Found({"levels": rows} | line, [table], line=line)


if __name__ == "__main__":
    main(run, OPTIONS)
