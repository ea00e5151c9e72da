"""Which collectives does a decode step have on several devices? Compiled for some not attached.

XLA compiles the decode loop for a mesh of described devices, from abstract weights, for models with
one layer of each kind; and the collectives of a step are counted.

    python -m benchmarks.static.mesh [--presets mamba2-2.7b ...] [--device H100] [--data 2]
        [--model 2]

Exit code 1 unless a step has one all-reduce for each layer (two for a shared block), one for the
embedding and one broadcast from shard 0; one all-gather for the logits; no other collective, none
in the loop's condition, and none larger than a layer's output or the logits: neither weights nor
states are communicated. `benchmarks/static/deviceless.py` says what to install.
"""

import dataclasses
import json
from collections import Counter
from typing import Any

from benchmarks.static.deviceless import (
    GPUS,
    TPUS,
    described_mesh,
    lowered,
    placed,
)  # first: XLA's flags

import jax  # isort: skip
import jax.numpy as jnp
from flax import nnx

import stree_jax as st
from benchmarks.common import parser_of
from benchmarks.static import gates
from benchmarks.static.collectives import collectives, problems
from benchmarks.static.layers import shortened
from benchmarks.static.programs import STEPS, abstract_requests
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.prefix.prefill import prefill
from stree_jax.decoding.types import Context, state_specs
from stree_jax.mesh.partition import ROWS, Partition
from stree_jax.mesh.programs import weight_specs
from stree_jax.names import flatten, unflatten

MAX_LENGTH = 256


def abstract_model(config: st.ModelConfig, partition: Partition, implementation: str) -> Any:
    """A model of abstract weights on a mesh."""
    options: dict[str, Any] = dict(dtype=jnp.bfloat16, implementation=implementation)
    structure, local = st.HybridLM.abstract(config, partition=partition, **options)
    table = config.cuts(partition.shards)

    def whole(name: str, leaf: Any) -> Any:
        shape = list(leaf.shape)
        if name in table:
            shape[table[name].axis] *= partition.shards
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    weights = {name: whole(name, leaf) for name, leaf in flatten(local).items()}
    return nnx.merge(structure, unflatten(weights, local))


def decode_loop(
    device: str, config: st.ModelConfig, draft: st.ModelConfig, data: int, model: int
) -> Any:
    """Compiles the loop with a draft model and the paper's tree A, at temperature 0."""
    mesh = described_mesh(device, data, model)
    fastest = "pallas" if device in GPUS else "xla"
    target = abstract_model(config, Partition(mesh, model), fastest)
    drafter = st.ModelDrafter(abstract_model(draft, Partition(mesh, 1), fastest))
    topology = st.TreeTopology.paper("A").level_order()
    verifier = st.VERIFIERS["greedy"]
    decoder = SpeculativeDecoder(topology, verifier, MAX_LENGTH, steps_per_sync=STEPS)
    prompts, keys, limits, sampling = abstract_requests(2 * data, sampled=False)

    def start(target: Any, drafter: Any, prompts: Context, keys: Any) -> Any:
        state = decoder.begin(target, prompts, keys)
        cache = prefill(target, prompts.tokens, prompts.length - 1, MAX_LENGTH)
        own = drafter.init(len(prompts.length), topology, MAX_LENGTH)
        return state._replace(cache=cache, drafter=own)

    state = jax.eval_shape(start, target, drafter, prompts, keys)
    modules = (target, drafter)
    weights = jax.tree.structure(modules).unflatten(weight_specs(modules))
    arguments = (
        placed(modules, weights, mesh),
        placed(state, state_specs(target), mesh),
        placed((limits, sampling), ROWS, mesh),
    )

    def run(modules: Any, state: Any, settings: Any) -> Any:
        return decoder.run(*modules, state, *settings)

    return lowered(device, jax.jit(run, donate_argnums=1), *arguments).compile()


def main() -> None:
    """Compiles, prints a line of JSON for each program; exit code 1 if there is a problem."""
    known = {"--presets": ("mamba2-2.7b", "MambaInLlama-8B"), "--data": 2, "--model": 2}
    known |= {"--device": {"default": "H100", "choices": [*GPUS, *TPUS]}}
    options = parser_of(__doc__.splitlines()[0], known).parse_args()
    failures = []
    for preset in options.presets:
        config = shortened(st.ModelConfig.preset(preset))
        draft = dataclasses.replace(config, layers=config.layers[-1:])
        program = decode_loop(options.device, config, draft, options.data, options.model)
        found = collectives(program.as_text())
        wrong = problems(config, found, steps=STEPS, nodes=13, rows=2)
        counts = Counter(f"{each.name} {each.where}" for each in found)
        row = {
            "preset": preset,
            "device": options.device,
            "mesh": {"data": options.data, "model": options.model},
            "layers": config.kinds,
            "collectives": counts,
            "largest": max(each.numbers for each in found),
            "problems": wrong,
        }
        print(json.dumps(row), flush=True)
        failures += [f"{preset}: {problem}" for problem in wrong]
    gates.conclude(failures)


if __name__ == "__main__":
    main()
