"""Compiles for GPUs and TPUs that are not attached.

XLA compiles for a described device. For GPUs it needs the plugin wheels of the installed jax (no
driver, no CUDA libraries), and ptxas and libdevice, from a CUDA toolkit or from two more wheels:

    pip install --no-deps jax-cuda13-plugin==VERSION jax-cuda13-pjrt==VERSION
    pip install --no-deps nvidia-cuda-nvcc nvidia-nvvm

For TPUs it needs one, `pip install libtpu`.

Import this before anything that imports jax: it sets XLA's flags.
"""

import atexit
import contextlib
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

DUMP = Path(tempfile.mkdtemp(prefix="stree-deviceless-"))
_FLAGS = [os.environ.get("XLA_FLAGS", ""), "--xla_gpu_autotune_level=0", f"--xla_dump_to={DUMP}"]
_WHEELS = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13"
if (_WHEELS / "bin" / "ptxas").is_file():
    _FLAGS.append(f"--xla_gpu_cuda_data_dir={_WHEELS}")
os.environ["XLA_FLAGS"] = " ".join(_FLAGS)
os.environ["JAX_PLATFORMS"] = "cpu"  # the plugin registers without looking for a device
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # by several processes: no TPU is used

atexit.register(shutil.rmtree, DUMP, ignore_errors=True)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

PLUGIN = "jax-cuda13-plugin and jax-cuda13-pjrt"

ON_SPILL = "xla_gpu_fail_ptx_compilation_on_register_spilling"
# Whether XLA may split matrix products.
PRODUCTS = {"split": {}, "whole": {"xla_gpu_experimental_force_split_k": 1}}
# Types of matrices, and what XLA is told: it widens 8 bits inside of the product only if asked to.
WEIGHTS = {
    "bfloat16": {},
    "int8": {"xla_gpu_experimental_enable_subchannel_dequantisation_fusion": True},
    "int8, widened first": {},
}


class Gpu(NamedTuple):
    """XLA's description of a GPU; the capability determines the code, the rest is plausible."""

    capability: int
    kind: str  # a name that Pallas knows, of the same capability
    cores: int
    shared_memory: int  # bytes per multiprocessor
    largest_block: int  # most bytes of shared memory per block
    l2: int
    threads: int  # per multiprocessor


GPUS = {
    "A100": Gpu(80, "NVIDIA A100", 108, 167936, 166912, 41943040, 2048),
    "RTX 3090": Gpu(86, "NVIDIA A10", 82, 102400, 101376, 6291456, 1536),
    "RTX 4090": Gpu(89, "NVIDIA L4", 128, 102400, 101376, 75497472, 1536),
    "H100": Gpu(90, "NVIDIA H100", 132, 233472, 232448, 52428800, 2048),
}

# Topologies of 4 and of 8 chips.
TPUS = {
    "v5e": ("v5e:2x2", "v5e:2x4"),
    "v6e": ("v6e:2x2", "v6e:2x4"),
    "v5p": ("v5p:2x2x1", "v5p:2x2x2"),
}


def target_config(gpu: Gpu) -> str:
    """XLA's text description of a GPU."""
    major, minor = divmod(gpu.capability, 10)
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory} shared_memory_per_block_optin: {gpu.largest_block}
  threads_per_core_limit: {gpu.threads} core_count: {gpu.cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 1500000000000 l2_cache_size: {gpu.l2} clock_rate_ghz: 1.5
  device_memory_size: 42000000000
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{gpu.kind}"
"""


def lowered(device: str, jitted: Any, *arguments: Any) -> Any:
    """A jitted function of abstract arguments, traced and lowered for a described device."""
    chosen_for = jax.default_device(_devices(device, 1)[0])  # by `dispatch`, and block sizes
    if device in TPUS:
        with chosen_for:
            return jitted.trace(*arguments).lower()
    mesh = contextlib.nullcontext()
    if jax.__version_info__ >= (0, 11):  # Pallas must know the GPU; jax 0.10 does not need it
        kind = GPUS[device].kind
        described = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
        empty = jax.sharding.AbstractMesh((), (), abstract_device=described)
        mesh = jax.sharding.use_abstract_mesh(empty)
    with mesh, chosen_for:
        return jitted.trace(*arguments).lower(lowering_platforms=("cuda",))


def described_mesh(device: str, data: int, model: int) -> Mesh:
    """A mesh of described devices of one host."""
    return Mesh(np.array(_devices(device, data * model)).reshape(data, model), ("data", "model"))


def _devices(name: str, count: int) -> list[Any]:
    if name in TPUS:
        described = dict(platform="tpu", topology_name=TPUS[name][count > 4])
    else:
        described = dict(
            platform="cuda",
            target_config=target_config(GPUS[name]),
            topology=f"1x{count}x1",
        )
    try:
        return topologies.get_topology_desc(**described).devices[:count]
    except Exception as error:  # jax has no exception type for a missing platform
        needed = "libtpu" if name in TPUS else f"{PLUGIN} in the version of jax, {jax.__version__}"
        raise SystemExit(
            f"cannot compile for {name} here ({error!s:.200}): install {needed}"
        ) from None


def placed(tree: Any, specs: Any, mesh: Any) -> Any:
    """Abstract arrays with shardings; `specs` is a prefix of the tree."""
    return jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
        ),
        tree,
        jax.tree.broadcast(specs, tree),
    )


class Compiled(NamedTuple):
    """A program, and how it was compiled."""

    program: Any
    thunks: str  # XLA's dump of what it puts on the device
    captured: str  # the same, in the graphs that it captures; empty if this XLA does not say it
    spills: bool  # a kernel spills registers


class Compiler:
    """Compiles for one of `GPUS`, with one of `PRODUCTS` and of `WEIGHTS`."""

    def __init__(self, gpu: str, products: str = "split", weights: str = "bfloat16"):
        self.gpu, self.products, self.weights = gpu, products, weights
        self._mesh = Mesh(np.array(_devices(gpu, 1)), ("x",))

    def __call__(self, jitted: Any, *arguments: Any) -> Compiled:
        """Traces, lowers and compiles a jitted function of abstract arguments."""
        program = lowered(self.gpu, jitted, *placed(arguments, PartitionSpec(), self._mesh))
        options = PRODUCTS[self.products] | WEIGHTS[self.weights]
        spills = False
        for file in DUMP.iterdir():
            file.unlink()
        try:
            compiled = program.compile(compiler_options=options | {ON_SPILL: True})
        except jax.errors.JaxRuntimeError as error:
            if "register spilling" not in str(error):
                raise
            spills = True
            compiled = program.compile(compiler_options=options)
        dumps = [DUMP.glob(f"*.thunk_sequence{which}.txt") for which in ("", "_after_thunk_passes")]
        texts = ["".join(file.read_text() for file in files) for files in dumps]
        return Compiled(compiled, *texts, spills)


def compiled_for_tpu(tpu: str, jitted: Any, *arguments: Any) -> Any:
    """A jitted function of abstract arguments, compiled for one described TPU."""
    mesh = Mesh(np.array(_devices(tpu, 1)), ("x",))
    return lowered(tpu, jitted, *placed(arguments, PartitionSpec(), mesh)).compile()
