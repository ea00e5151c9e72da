"""Everything that needs a GPU, in one run under 10 minutes.

1. Correctness: `tree_scan` and `replay` on the device, XLA and Pallas, against the float64
   reference, on shapes of real models.
2. Greedy losslessness in float32: every tree against autoregressive decoding, with both kernels.
3. The time of a verify step of mamba2-2.7b (random bfloat16 weights) against the number of nodes,
   XLA and Pallas interleaved, beside the floor: weights read once, state read and written once.

    python -m benchmarks.gpu_session [--bandwidth 4.3e12]

Results go to `benchmarks/results/<device>.json`. Without a GPU it says so and exits.
"""

import argparse
import concurrent.futures
import functools
import json
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import stree_jax as st
from benchmarks.common import device_name, interleaved, machine, print_table, summary, write_json
from benchmarks.shapes import MIXERS, MixerShape
from benchmarks.steps import run_steps
from pallas_kernels import dispatch, replay, tree_scan
from pallas_kernels.replay.reference import replay as replay_reference
from pallas_kernels.tree_scan.reference import tree_scan as tree_scan_reference

BUDGET_SECONDS = 8 * 60
NODES = (1, 2, 4, 8, 16, 32, 64)


def random_tree(nodes: int, seed: int) -> st.TreeTopology:
    """A tree of this size; each node's parent is one of the nodes before it."""
    rng = np.random.default_rng(seed)
    return st.TreeTopology((-1, *(int(rng.integers(0, i)) for i in range(1, nodes))))


def check_kernels(
    shapes: dict[str, MixerShape], nodes: tuple[int, ...], implementations: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Relative errors against float64, two heads of each shape (the reference is slow)."""
    rows = []
    for name, full in shapes.items():
        shape = full._replace(num_heads=2, num_groups=min(full.num_groups, 2))
        for count in nodes:
            for dtype in ("float32", "bfloat16"):
                errors = _kernel_errors(shape, count, dtype, implementations)
                rows.append({"shape": name, "nodes": count, "dtype": dtype, "errors": errors})
    return rows


def _kernel_errors(
    shape: MixerShape, nodes: int, dtype: str, implementations: tuple[str, ...]
) -> dict[str, dict[str, float]]:
    """Two rows with different trees; the second replays nothing. Verification and one new level."""
    rng = np.random.default_rng(nodes)
    trees = [random_tree(nodes, seed=nodes), random_tree(nodes, seed=nodes + 1)]
    heads, channels, state_size, groups = shape

    def draw(*sizes: int, kind: str = "float32") -> jax.Array:
        return jnp.asarray(rng.normal(size=sizes), kind)

    x = draw(2, nodes, heads, channels, kind=dtype)
    B, C = (draw(2, nodes, groups, state_size, kind=dtype) for _ in range(2))
    dt = jax.nn.softplus(draw(2, nodes, heads))
    A, D = -jnp.exp(draw(heads)), draw(heads, channels)
    state = draw(2, heads, channels, state_size)
    mask = jnp.asarray(np.stack([tree.ancestor_mask for tree in trees]))
    path = mask[:, -1].at[1].set(False)
    newest = -(-nodes // 4)
    exact = [
        np.asarray(value.astype("float32"), np.float64) for value in (x, dt, A, B, C, D, state)
    ]
    truth, _ = tree_scan_reference(*exact, np.asarray([tree.parents for tree in trees]))
    replayed = replay_reference(*exact[:4], exact[6], np.asarray(path))

    def relative(value: jax.Array, reference: np.ndarray) -> float:
        difference = np.asarray(value.astype("float32"), np.float64) - reference
        return float(np.linalg.norm(difference) / np.linalg.norm(reference))

    errors = {}
    for name in implementations:
        scan = jax.jit(functools.partial(tree_scan, implementation=name))
        step = jax.jit(functools.partial(replay, implementation=name))
        try:
            level = scan(x, dt, A, B, C[:, -newest:], D, state, mask)
            errors[name] = {
                "tree_scan": relative(scan(x, dt, A, B, C, D, state, mask), truth),
                "tree_scan of a level": relative(level, truth[:, -newest:]),
                "replay": relative(step(x, dt, A, B, state, path), replayed),
            }
        except Exception as error:  # a kernel that does not compile must not hide the others
            errors[name] = {f"failed: {error!s:.500}": math.inf}
    return errors


def kernels_are_right(rows: list[dict[str, Any]]) -> bool:
    """Within the error budgets of the tests."""
    limits = {
        ("tree_scan", "float32"): 2e-6,
        ("tree_scan", "bfloat16"): 4e-3,
        ("tree_scan of a level", "float32"): 2e-6,
        ("tree_scan of a level", "bfloat16"): 4e-3,
        ("replay", "float32"): 2e-6,
        ("replay", "bfloat16"): 1e-5,
    }
    return all(
        error <= limits.get((op, row["dtype"]), 0.0)
        for row in rows
        for errors in row["errors"].values()
        for op, error in errors.items()
    )


def check_lossless(implementation: str) -> dict[str, Any]:
    """Greedy tokens of several trees against autoregressive decoding, float32, ragged batch."""
    config = st.ModelConfig.mamba2_lm(512, 256, 4, state_size=64, head_dim=64)

    def model(seed: int) -> st.HybridLM:
        return st.HybridLM(config, rngs=nnx.Rngs(seed), implementation=implementation)

    target = model(0)
    graphdef, state = nnx.split(target)
    noise = iter(jax.random.split(jax.random.key(1), 1000))
    near = nnx.merge(
        graphdef,
        jax.tree.map(
            lambda leaf: leaf * (1 + 0.02 * jax.random.normal(next(noise), leaf.shape)), state
        ),
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(512, size=size).tolist() for size in (37, 5, 64, 1)]
    want = st.generate(target, prompts, max_new_tokens=64)
    rows = {}
    for name, topology in {
        "chain of 4": st.TreeTopology.chain(4),
        **{f"paper {name}": st.TreeTopology.paper(name) for name in "ABE"},
        "random tree of 32": random_tree(32, seed=0),
    }.items():
        out = st.generate(
            target,
            prompts,
            max_new_tokens=64,
            drafter=st.ModelDrafter(near),
            topology=topology,
        )
        rows[name] = {
            "identical": bool(np.array_equal(out.tokens, want.tokens)),
            "tau": out.stats.tau,
        }
    return rows


def random_models(
    config: st.ModelConfig, dtype: str, implementations: tuple[str, ...]
) -> dict[str, st.HybridLM]:
    """A model for each implementation, all with the same random weights, made on the device."""

    @jax.jit
    def weights() -> dict:
        return nnx.to_pure_dict(nnx.state(st.HybridLM(config, dtype=dtype, rngs=nnx.Rngs(0))))

    shared = weights()
    return {
        name: nnx.merge(st.HybridLM.abstract(config, dtype=dtype, implementation=name)[0], shared)
        for name in implementations
    }


def measure_steps(
    config: st.ModelConfig,
    *,
    dtype: str,
    implementations: tuple[str, ...],
    nodes: tuple[int, ...],
    count: int,
    rounds: int,
    bandwidth: float | None,
    out_of_time: Callable[[], bool],
) -> dict[str, Any]:
    """Milliseconds of a verify step by implementation and number of nodes."""
    models = random_models(config, dtype, implementations)
    sizes = [(size, name) for size in nodes for name in implementations]

    def compiled(size: int, name: str) -> Any:
        return run_steps.lower(models[name], random_tree(size, size), count).compile()

    # XLA compiles outside of Python's lock, so in threads; timing starts when all are done.
    with concurrent.futures.ThreadPoolExecutor(max_workers=8) as pool:
        programs = dict(zip(sizes, pool.map(lambda key: compiled(*key), sizes), strict=True))
    rows = []
    for size in nodes:
        if out_of_time():
            break
        calls = {
            name: lambda name=name, size=size: programs[size, name](
                models[name]
            ).block_until_ready()
            for name in implementations
        }
        for call in calls.values():
            call()
        seconds = interleaved(calls, rounds, lambda: None)
        milliseconds = {
            name: summary([1e3 * value / count for value in values])
            for name, values in seconds.items()
        }
        rows.append({"nodes": size, "milliseconds": milliseconds})
    model = models[implementations[0]]
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(model.init_cache(1, 0)))
    floor = None if bandwidth is None else 1e3 * (weights + 2 * state) / bandwidth
    return {
        "dtype": dtype,
        "weight_bytes": weights,
        "state_bytes": state,
        "floor_milliseconds": floor,
        "steps": rows,
    }


def main() -> None:
    """Runs all parts and writes the results, whatever of them there was time for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bandwidth", type=float, help="of the memory, bytes a second")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(
            f"no GPU here: the default backend is {jax.default_backend()!r}; nothing was measured"
        )
        return
    began = time.monotonic()
    results: dict[str, Any] = {"machine": machine(), "kernels": dispatch.explain()}
    name = device_name(results["machine"])
    implementations = ("xla", "pallas")

    results["correctness"] = check_kernels(MIXERS, (1, 13, 64, 100), implementations)
    results["kernels_are_right"] = kernels_are_right(results["correctness"])
    write_json(name, results)
    results["lossless"] = {kernel: check_lossless(kernel) for kernel in implementations}
    write_json(name, results)
    results["verify_step"] = measure_steps(
        st.ModelConfig.preset("mamba2-2.7b"),
        dtype="bfloat16",
        implementations=implementations,
        nodes=NODES,
        count=10,
        rounds=10,
        bandwidth=options.bandwidth,
        out_of_time=lambda: time.monotonic() - began > BUDGET_SECONDS,
    )
    results["seconds"] = round(time.monotonic() - began)
    path = write_json(name, results)

    print_table(
        f"Verify step of mamba2-2.7b on {results['machine']['device']}, milliseconds",
        ("nodes", *implementations),
        [
            (row["nodes"], *(row["milliseconds"][kernel]["median"] for kernel in implementations))
            for row in results["verify_step"]["steps"]
        ],
    )
    lossless = all(
        row["identical"] for rows in results["lossless"].values() for row in rows.values()
    )
    right = results["kernels_are_right"]
    print(
        json.dumps(
            {
                "gpu_session": {
                    "kernels_are_right": right,
                    "lossless": lossless,
                    "results": str(path),
                }
            }
        )
    )
    raise SystemExit(0 if right and lossless else 1)


if __name__ == "__main__":
    main()
