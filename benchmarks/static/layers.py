"""Launches of a layer of each kind: those of one more of them in a program."""

import dataclasses
from collections.abc import Callable
from typing import Any

import stree_jax as st
from benchmarks.static.programs import Program

COUNTS = ("launches", "copies")


def with_layers(config: st.ModelConfig, layers: tuple[str, ...]) -> st.ModelConfig:
    """The same model with other layers; each use of a shared block has its own weights."""
    parts, shared = {}, config.shared
    if shared is not None:
        parts["shared"] = dataclasses.replace(shared, num_blocks=layers.count("shared"))
    return config.with_layers(layers, **parts)


def one_of_each(config: st.ModelConfig) -> tuple[str, ...]:
    """A layer of each kind; a shared block is followed by a Mamba-2 layer, as in the model."""
    kinds = dict.fromkeys(config.kinds)
    if "shared" not in kinds:
        return tuple(kinds)
    assert {*kinds} == {"shared", "mamba2"}
    return ("shared", "mamba2", "mamba2")


def shortened(config: st.ModelConfig) -> st.ModelConfig:
    """The model with one layer of each kind."""
    return with_layers(config, one_of_each(config))


def by_layer(config: st.ModelConfig, build: Callable[[st.ModelConfig], Program]) -> dict[str, Any]:
    """Launches of a layer of each kind in a program, and of the whole model as their sum.

    For steps with our kernels the sum is what `--whole` finds.
    """
    # Twice, since a first layer fuses with the embedding.
    few = one_of_each(config) * 2
    base = build(with_layers(config, few))
    layers: dict[str, dict[str, Any]] = {}
    longer: dict[str, Program] = {}
    for kind in sorted({*few}, key=lambda kind: (kind == "shared", few.index(kind))):
        # Inserted before the last layer of its kind, so that it has the usual neighbours.
        new, without = (kind,), base
        if kind == "shared":  # with the layer after it, which the program without it has, too
            new, without = ("shared", "mamba2"), longer["mamba2"]
        last = len(few) - 1 - few[::-1].index(kind)
        longer[kind] = build(with_layers(config, (*few[:last], *new, *few[last:])))
        layers[kind] = {
            name: getattr(longer[kind], name) - getattr(without, name) for name in COUNTS
        }
        layers[kind]["kernels"] = dict(sorted((longer[kind].kernels - without.kernels).items()))
    more = {kind: config.kinds.count(kind) - few.count(kind) for kind in layers}
    programs = (base, *longer.values())
    return {
        "layers": layers,
        "step": {
            name: getattr(base, name) + sum(more[kind] * layers[kind][name] for kind in layers)
            for name in COUNTS
        },
        "shared_memory_bytes": max(program.shared_memory for program in programs),
        "spills": any(program.spills for program in programs),
    }
