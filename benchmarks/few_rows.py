"""Which form of a product with few rows is the fastest on this CPU?

A target call of a hybrid with 12 million random weights on chains of some nodes:

    together   all rows in one product, as the library does
    rows       a product for each row
    out by in  weights stored transposed, the rows padded to a multiple of 8

    python -m benchmarks.few_rows [--nodes 1 2 3 5 8 13] [--dtype float32] [--seconds 60]
"""

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import stree_jax as st
from benchmarks.common import conclude, interleaved, print_table, read_options, save, summary
from benchmarks.steps import run_steps

CONFIG = st.ModelConfig.mamba2_lm(
    *(4096, 384, 5),
    head_dim=64,
    state_size=64,
    chunk_size=64,
    residual_float32=False,
    attention_layers=[2],
    attention=dict(num_heads=6, num_kv_heads=2, head_dim=64, rotary_dim=32),
    mlp=dict(hidden_size=1024),
)
CALLS = 4  # of the target in one program
together = nnx.Linear.__call__


def one_by_one(self: nnx.Linear, inputs: jax.Array) -> jax.Array:
    """A product for each row."""
    rows = inputs.reshape(-1, 1, inputs.shape[-1])
    products = [together(self, row) for row in rows]
    return jnp.concatenate(products).reshape(*inputs.shape[:-1], -1)


def out_by_in(self: nnx.Linear, inputs: jax.Array) -> jax.Array:
    """`W x^T` with rows padded to a multiple of 8; a single row stays alone."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    count = len(rows)
    padded = jnp.pad(rows, ((0, -count % 8 if count > 1 else 0), (0, 0)))
    product = lax.dot_general(
        self.kernel[...], padded, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST
    )
    return product.T[:count].reshape(*inputs.shape[:-1], -1)


FORMS: dict[str, Callable] = {
    "together": together,
    "rows": one_by_one,
    "out by in": out_by_in,
}


def compiled(model: st.HybridLM, form: str, nodes: int) -> Callable[[], np.ndarray]:
    """Some target calls on a chain; returns the best token of each node after the last."""
    with mock.patch.object(nnx.Linear, "__call__", FORMS[form]):
        topology = st.TreeTopology.chain(nodes - 1)
        # jax keeps traces by function, and the forms must not share one.
        steps = functools.partial(run_steps.__wrapped__, topology=topology, count=CALLS)
        program = jax.jit(steps).lower(model).compile()
    return lambda: np.asarray(program(model))


def transposed(model: st.HybridLM) -> st.HybridLM:
    """A copy with the weights of all projections out by in."""
    copy = nnx.clone(model)
    for _, module in nnx.iter_graph(copy):
        if isinstance(module, nnx.Linear):
            module.kernel.set_value(jnp.array(module.kernel[...].T))
    return copy


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes `few-rows-<device>.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 2, 3, 5, 8, 13])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seconds", type=float, default=60.0, help="of timing, for all nodes")
    options = read_options(parser, arguments)
    model = st.HybridLM(CONFIG, dtype=options.dtype, rngs=nnx.Rngs(0))
    models = dict.fromkeys(FORMS, model) | {"out by in": transposed(model)}
    calls = {
        (nodes, form): compiled(models[form], form, nodes)
        for nodes in options.nodes
        for form in FORMS
    }
    tokens = {key: call() for key, call in calls.items()}
    seconds: dict[Any, list[float]] = {key: [] for key in calls}
    end = time.monotonic() + options.seconds
    while time.monotonic() < end:
        for key, values in interleaved(calls, 1, lambda: None).items():
            seconds[key] += values
    rows = []
    for nodes in options.nodes:
        times = {form: 1e3 / CALLS * np.array(seconds[nodes, form]) for form in FORMS}
        rows.append(
            {
                "nodes": nodes,
                "milliseconds": {
                    form: summary(of) | {"least": float(of.min())} for form, of in times.items()
                },
                "together_over_it": {
                    form: summary(times["together"] / of) for form, of in times.items()
                },
                # In bfloat16 two tokens are often equally good.
                "same_tokens": {
                    form: np.array_equal(tokens[nodes, form], tokens[nodes, "together"])
                    for form in FORMS
                },
            }
        )
    print_table(
        f"A target call, {options.dtype}: least milliseconds (median speed against together)",
        ("nodes", *FORMS),
        [
            (
                row["nodes"],
                *(
                    f"{row['milliseconds'][form]['least']:.2f}"
                    f" ({row['together_over_it'][form]['median']:.2f})"
                    for form in FORMS
                ),
            )
            for row in rows
        ],
    )
    results = {"dtype": options.dtype, "rounds": len(seconds[rows[0]["nodes"], "together"])}
    path = save("few-rows", __doc__, results | {"rows": rows}, options.output)
    conclude("few_rows", dtype=options.dtype, results=str(path))


if __name__ == "__main__":
    main()
