"""How much memory does a conversion need beside the model itself?

Writes a synthetic mamba_ssm checkpoint of about 1 GB, as safetensors and, if torch is installed, as
`.bin`, and loads each in a process of its own while sampling its anonymous memory (mapped files do
not count: the system drops them when memory is short).

    python -m benchmarks.conversion [--layers 12] [--width 1792]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks.common import machine, print_table, read_options, write_json


def main() -> None:
    """Measures, prints the table, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1792)
    parser.add_argument("--watch", type=Path, help=argparse.SUPPRESS)
    options = read_options(parser)
    if options.watch is not None:
        print(json.dumps(watch(options.watch)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for name in ("model.safetensors", "pytorch_model.bin"):
            path = Path(directory) / name.partition(".")[2]
            if not write_checkpoint(path, name, options.layers, options.width):
                print(f"{name} is left out: writing it needs torch")
                continue
            out = subprocess.run(
                [sys.executable, "-m", "benchmarks.conversion", "--watch", str(path)],
                check=True,
                capture_output=True,
                text=True,
            )
            rows.append({"file": name, **json.loads(out.stdout)})
    print_table(
        "Loading a synthetic checkpoint, MiB",
        ("file", "size", "largest tensor", "model", "peak", "peak - model", "seconds"),
        [
            (
                Path(row["file"]).suffix,
                *(f"{row[key] / 2**20:,.0f}" for key in ("size", "largest", "model", "peak")),
                f"{(row['peak'] - row['model']) / 2**20:,.0f}",
                f"{row['seconds']:.1f}",
            )
            for row in rows
        ],
    )
    print(write_json("conversion", {"machine": machine(), "files": rows}, options.output))


def write_checkpoint(path: Path, name: str, layers: int, width: int) -> bool:
    """Writes a random float32 checkpoint; False if torch, which this format needs, is missing."""
    heads, groups_state = 2 * width // 64, 2 * 128
    shapes = {"backbone.embedding.weight": (50288, width), "backbone.norm_f.weight": (width,)}
    for i in range(layers):
        shapes |= {
            f"backbone.layers.{i}.{tensor}": shape
            for tensor, shape in {
                "norm.weight": (width,),
                "mixer.in_proj.weight": (4 * width + groups_state + heads, width),
                "mixer.conv1d.weight": (2 * width + groups_state, 1, 4),
                "mixer.conv1d.bias": (2 * width + groups_state,),
                "mixer.A_log": (heads,),
                "mixer.D": (heads,),
                "mixer.dt_bias": (heads,),
                "mixer.norm.weight": (2 * width,),
                "mixer.out_proj.weight": (width, 2 * width),
            }.items()
        }
    rng = np.random.default_rng(0)
    weights = {key: rng.random(shape, np.float32) for key, shape in shapes.items()}
    weights["lm_head.weight"] = weights["backbone.embedding.weight"]  # tied, and stored twice
    path.mkdir()
    config = dict(d_model=width, n_layer=layers, vocab_size=50277, pad_vocab_size_multiple=16)
    (path / "config.json").write_text(json.dumps(config | {"ssm_cfg": {"layer": "Mamba2"}}))
    if name.endswith(".safetensors"):
        from safetensors.numpy import save_file

        save_file(weights, path / name)
        return True
    try:
        import torch
    except ImportError:
        return False
    torch.save({key: torch.from_numpy(value) for key, value in weights.items()}, path / name)
    return True


def watch(path: Path) -> dict[str, float]:
    """Loads a checkpoint while a thread samples this process's anonymous memory."""
    import jax
    from flax import nnx

    from stree_jax.convert import load_model, open_checkpoint

    checkpoint = open_checkpoint(path)
    jax.block_until_ready(jax.numpy.isfinite(jax.numpy.zeros((2, 2))).all())  # starts the runtime
    before, peak, finished = anonymous(), [0], threading.Event()

    def look() -> None:
        while not finished.is_set():
            peak[0] = max(peak[0], anonymous())
            time.sleep(0.002)

    watcher = threading.Thread(target=look)
    watcher.start()
    began = time.perf_counter()
    model = load_model(checkpoint, dtype="float32")
    jax.block_until_ready(nnx.state(model))
    seconds = time.perf_counter() - began
    finished.set()
    watcher.join()
    return {
        "size": (path / checkpoint.file).stat().st_size,
        "largest": max(
            int(np.prod(tensor.shape)) * tensor.dtype.itemsize
            for tensor in checkpoint.tensors.values()
        ),
        "model": sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model))),
        "peak": peak[0] - before,
        "seconds": seconds,
    }


def anonymous() -> int:
    """Resident bytes of this process's anonymous memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
