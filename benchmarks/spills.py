"""Do the kernels spill registers on any GPU generation? Compiled without a GPU.

XLA compiles for a described device; `ptxas -v` then tells registers and spills of its PTX. Needs
the plugin wheels of the installed jax (no driver, no CUDA libraries) and a ptxas:

    pip install --no-deps jax-cuda13-plugin==VERSION jax-cuda13-pjrt==VERSION
    JAX_PLATFORMS=cpu python -m benchmarks.spills [--kernels replay] [--capabilities 80 90]

Results go to `benchmarks/results/spills.json`, where a run of some kernels or GPUs replaces those
rows only; exit code 1 if anything spills.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

DUMP = Path(tempfile.mkdtemp(prefix="stree-spills-"))
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0 --xla_dump_to={DUMP}"
    " --xla_gpu_dump_llvmir=true --xla_dump_emitter_re=.*"
)
os.environ["JAX_PLATFORMS"] = "cpu"  # the plugin registers, but must not look for a device
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from benchmarks.common import RESULTS, print_table, write_json  # noqa: E402
from benchmarks.shapes import ATTENTIONS, MIXERS  # noqa: E402
from pallas_kernels import gated_rms_norm, replay, replay_tree_scan, tree_conv1d, tree_scan  # noqa: E402
from pallas_kernels.tree_attention import pallas_triton  # noqa: E402

NODES = (13, 64, 128)
DTYPES = ("bfloat16", "float32")

# Capability: name for Pallas, cores, shared memory of a core and of a block, L2, threads of a core.
# The capability decides about registers; the rest only has to be plausible.
GPUS = {
    80: ("NVIDIA A100", 108, 167936, 166912, 41943040, 2048),
    86: ("NVIDIA A10", 82, 102400, 101376, 6291456, 1536),
    89: ("NVIDIA L4", 128, 102400, 101376, 75497472, 1536),
    90: ("NVIDIA H100", 132, 233472, 232448, 52428800, 2048),
}


def target_config(capability: int) -> str:
    """XLA's text description of a GPU."""
    name, cores, shared_core, shared_block, l2, threads = GPUS[capability]
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared_core} shared_memory_per_block_optin: {shared_block}
  threads_per_core_limit: {threads} core_count: {cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 1500000000000 l2_cache_size: {l2} clock_rate_ghz: 1.5
  device_memory_size: 42000000000
  cuda_compute_capability {{ major: {capability // 10} minor: {capability % 10} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{name}"
"""


@contextlib.contextmanager
def described_gpu(capability: int) -> Iterator[None]:
    """Tells Pallas which GPU to lower for; jax 0.10 need not be told."""
    if jax.__version_info__ < (0, 11):
        yield
        return
    device = jax.sharding.AbstractDevice(
        device_kind=GPUS[capability][0], num_cores=None, platform="gpu"
    )
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        yield


def compile_for(function: Any, arguments: tuple[jax.ShapeDtypeStruct, ...], capability: int) -> Any:
    """Compiles a function for a GPU that is not there."""
    described = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(capability), topology="1x1x1"
    )
    sharding = NamedSharding(Mesh(np.array(described.devices), ("x",)), PartitionSpec())
    placed = [
        jax.ShapeDtypeStruct(argument.shape, argument.dtype, sharding=sharding)
        for argument in arguments
    ]
    with described_gpu(capability):
        return jax.jit(function).trace(*placed).lower(lowering_platforms=("cuda",)).compile()


def resources(kernel: str, capability: int, ptxas: str) -> dict[str, int]:
    """Registers and spilled bytes of one kernel, from the PTX that XLA dumped."""
    for file in DUMP.glob("*.ptx"):
        suffix = "a" if capability >= 90 else ""
        result = subprocess.run(
            [ptxas, "-v", f"--gpu-name=sm_{capability}{suffix}", str(file), "-o", os.devnull],
            capture_output=True,
            text=True,
            check=True,
        )
        report = re.search(
            rf"function '{kernel}'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
            r".*?Used (\d+) registers",
            result.stderr + result.stdout,
            re.DOTALL,
        )
        if report:
            stores, loads, registers = map(int, report.groups())
            return {"registers": registers, "spilled_bytes": stores + loads}
    raise RuntimeError(f"XLA dumped no PTX of {kernel}")


class Spec(NamedTuple):
    """Shapes of abstract arguments."""

    shape: Any  # of the kernel's table
    nodes: int
    dtype: str

    def struct(self, *sizes: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
        """An array in the dtype of the activations, or another."""
        return jax.ShapeDtypeStruct(sizes, dtype or self.dtype)

    def recurrent(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Arguments of the kernels that touch a state."""
        heads, channels, state, groups = self.shape
        f32, nodes = jnp.float32, self.nodes
        return {
            "x": self.struct(1, nodes, heads, channels),
            "dt": self.struct(1, nodes, heads, dtype=f32),
            "A": self.struct(heads, dtype=f32),
            "B": self.struct(1, nodes, groups, state),
            "C": self.struct(1, nodes, groups, state),
            "D": self.struct(heads, channels, dtype=f32),
            "state": self.struct(1, heads, channels, state, dtype=f32),
            "mask": self.struct(1, nodes, nodes, dtype=jnp.bool_),
            "path": self.struct(1, nodes, dtype=jnp.bool_),
        }


def _of_state(*names: str) -> Callable[[Spec], tuple]:
    return lambda spec: tuple(spec.recurrent()[name] for name in names)


class Kernel(NamedTuple):
    """A kernel, and the arguments that it is compiled for."""

    function: Callable[..., Any]
    operands: Callable[[Spec], tuple]
    shapes: Mapping[str, Any] = MIXERS


def _of_norm(spec: Spec) -> tuple:
    size = spec.shape.num_heads * spec.shape.head_dim
    y = spec.struct(1, spec.nodes, size)
    return y, y, spec.struct(size)


def _of_conv(spec: Spec) -> tuple:
    heads, head_dim, state, groups = spec.shape
    channels = heads * head_dim + 2 * groups * state
    return (
        spec.struct(1, spec.nodes, channels),
        spec.struct(1, 3, channels),
        spec.struct(4, channels),
        spec.struct(channels),
        spec.struct(1, spec.nodes, 4, dtype=jnp.int32),
    )


def _of_attention(spec: Spec) -> tuple:
    heads, groups, head_dim = spec.shape
    in_tree = spec.struct(1, spec.nodes, groups, head_dim)
    in_cache = spec.struct(1, groups, 4096, head_dim)
    return (
        spec.struct(1, spec.nodes, heads, head_dim),
        *(in_tree, in_tree, in_cache, in_cache),
        spec.struct(1, dtype=jnp.int32),
        spec.struct(1, spec.nodes, spec.nodes, dtype=jnp.bool_),
    )


def _tree_attention(*arguments: Any, implementation: str) -> jax.Array:
    assert implementation == "pallas"
    return pallas_triton.tree_attention(*arguments, scale=0.1)


KERNELS = {
    "tree_scan": Kernel(tree_scan, _of_state("x", "dt", "A", "B", "C", "D", "state", "mask")),
    "replay": Kernel(replay, _of_state("x", "dt", "A", "B", "state", "path")),
    "replay_tree_scan": Kernel(
        replay_tree_scan,
        _of_state("x", "dt", "B", "path", "x", "dt", "A", "B", "C", "D", "state", "mask"),
    ),
    "tree_conv1d": Kernel(functools.partial(tree_conv1d, activation="silu"), _of_conv),
    "gated_rms_norm": Kernel(gated_rms_norm, _of_norm),
    "tree_attention": Kernel(_tree_attention, _of_attention, ATTENTIONS),
}


def main() -> None:
    """Compiles every kernel for every shape, type and GPU."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--capabilities", nargs="+", type=int, choices=GPUS, default=list(GPUS))
    chosen = parser.parse_args()
    ptxas = shutil.which("ptxas") or "/usr/local/cuda/bin/ptxas"
    if not Path(ptxas).is_file():
        raise SystemExit("no ptxas: put CUDA's or Triton's on PATH")

    rows: list[dict[str, Any]] = []
    for capability, name in itertools.product(chosen.capabilities, chosen.kernels):
        kernel = KERNELS[name]
        for shape, nodes, dtype in itertools.product(kernel.shapes, NODES, DTYPES):
            for file in DUMP.iterdir():
                file.unlink()
            compile_for(
                functools.partial(kernel.function, implementation="pallas"),
                kernel.operands(Spec(kernel.shapes[shape], nodes, dtype)),
                capability,
            )
            key = dict(capability=capability, kernel=name, shape=shape, nodes=nodes, dtype=dtype)
            rows.append({**key, **resources(name, capability, ptxas)})
            print(json.dumps(rows[-1]), flush=True)
    shutil.rmtree(DUMP)

    path = write_json("spills", {"jax": jax.__version__, "rows": _merged(rows)})
    spilled = [row for row in rows if row["spilled_bytes"]]
    most = {
        (name, dtype): max(
            row["registers"] for row in rows if (row["kernel"], row["dtype"]) == (name, dtype)
        )
        for name in chosen.kernels
        for dtype in DTYPES
    }
    print_table(
        f"{len(rows)} kernels compiled, {len(spilled)} spill",
        ("kernel", "type", "most registers"),
        [(name, dtype, str(registers)) for (name, dtype), registers in most.items()],
    )
    print(
        json.dumps({"spills": {"kernels": len(rows), "spill": len(spilled), "results": str(path)}})
    )
    raise SystemExit(1 if spilled else 0)


def _merged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """These rows, and those of the last results that were not measured now."""
    file = RESULTS / "spills.json"
    old = json.loads(file.read_text())["rows"] if file.exists() else []
    measured = {(row["kernel"], row["capability"]) for row in rows}
    kept = [row for row in old if (row["kernel"], row["capability"]) not in measured]
    return sorted(kept + rows, key=lambda row: (row["kernel"], row["capability"]))


if __name__ == "__main__":
    main()
