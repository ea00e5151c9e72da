"""How long does a decode step take in torch, with the kernels that others publish, on this GPU?

Steps of shapes with random weights in bfloat16, each captured as a CUDA graph:

- Mamba-2 with states in float32. Products are torch's; norms and the state update are mamba_ssm's,
  the convolution is flash-linear-attention's. Each of these is one Triton kernel.
- Qwen3.5 as transformers runs it, with the gated delta rule and the convolution of
  flash-linear-attention and causal_conv1d, after a prompt of 32 tokens.

`benchmarks.gpu` times the same steps here, in its rows of 1 node.

    python -m benchmarks.peer_gpu [--models mamba2-2.7b ...] [--rows 1 8 32] [--rounds 7]

Exit code 2 if a package or a GPU is missing.
"""

import argparse
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import stree_jax as st
from benchmarks.common import Found, main, names
from benchmarks.models import RANDOM_NOTE
from stree_jax.measuring.clock import summary
from stree_jax.measuring.report import Table

try:
    import causal_conv1d  # noqa: F401 - for transformers, which does without in silence
    import torch
    from fla.modules.causal_conv1d import causal_conv1d_update
    from mamba_ssm.ops.triton.layer_norm import rms_norm_fn
    from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update
    from torch.nn.functional import linear
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    OBSTACLE = None if torch.cuda.is_available() else "torch finds no CUDA GPU"
except ImportError as error:
    OBSTACLE = str(error)

PACKAGES = "torch 'transformers>=5.24' flash-linear-attention mamba_ssm causal_conv1d"
OPTIONS = {
    "--models": names(("mamba2-2.7b", "Qwen3.5-0.8B", "mamba2-130m")),
    "--rows": (1, 8, 32),
    "--rounds": 7,
}
DEVICE = "cuda"
STEPS = 20  # in a timed run

Step = Callable[[Any], Any]  # from tokens [rows] to the next ones, or of a layer


def new(*shape: int, dtype: Any = None) -> Any:
    """Small random numbers on the GPU."""
    return 0.02 * torch.randn(shape, dtype=dtype or torch.bfloat16, device=DEVICE)


def layer_of(layer: st.Mamba2Config, width: int, rows: int) -> Step:
    """A Mamba-2 layer after its norm."""
    shape, inputs = (layer.num_heads, layer.head_dim), layer.num_groups * layer.state_size
    inner = math.prod(shape)
    sizes = inner, inner + 2 * inputs, layer.num_heads
    in_proj, out_proj, norm = new(sum(sizes), width), new(width, inner), new(inner)
    taps, bias = new(sizes[1], layer.conv_width), new(sizes[1])
    window = new(rows, *taps.shape)
    state = new(rows, *shape, layer.state_size, dtype=torch.float32)
    # A number a head: their strides are 0, which the kernel knows.
    decay = (-new(shape[0], 1, 1, dtype=torch.float32).exp()).expand(state.shape[1:])
    skip, shift = (new(shape[0], 1).expand(shape) for _ in range(2))

    def step(x: Any) -> Any:
        gate, xbc, dt = linear(x, in_proj).split(sizes, -1)
        xbc, _ = causal_conv1d_update(xbc, window, weight=taps, bias=bias, activation="silu")
        x, *bc = xbc.split((inner, inputs, inputs), -1)
        bc = [value.reshape(rows, layer.num_groups, -1) for value in bc]
        x, dt = x.reshape(rows, *shape), dt[..., None].expand(rows, *shape)
        options = {"dt_bias": shift, "dt_softplus": True}
        y = selective_state_update(state, x, dt, decay, *bc, skip, **options).reshape(rows, inner)
        return linear(rmsnorm_fn(y, norm, None, z=gate, norm_before_gate=False), out_proj)

    return step


def mamba2(config: st.ModelConfig, rows: int) -> Step:
    """A step of a Mamba-2 model."""
    width = config.d_model
    layers = [layer_of(layer, width, rows) for layer in config.layers]
    norm, table = new(width), new(config.num_embeddings, width)  # the output head, too
    options = {"prenorm": True, "residual_in_fp32": True}

    def step(tokens: Any) -> Any:
        x, stream = table[tokens], None
        for layer in layers:
            x, stream = rms_norm_fn(x, norm, None, residual=stream, **options)
            x = layer(x)
        return linear(rms_norm_fn(x, norm, None, residual=stream), table).argmax(-1)

    return step


def qwen(config: st.ModelConfig, rows: int) -> Step:
    """A step of Qwen3.5, of the text model alone."""
    layers: dict[str, Any] = {layer.kind: layer for layer in config.layers}
    delta, attention = layers["gated_delta"], layers["attention"]
    model = Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            num_hidden_layers=len(config.layers) // 2,
            intermediate_size=layers["mlp"].hidden_size,
            num_attention_heads=attention.num_heads,
            num_key_value_heads=attention.num_kv_heads,
            linear_num_key_heads=delta.num_groups,
            linear_num_value_heads=delta.num_heads,
            tie_word_embeddings=True,
        )
    ).to(DEVICE, torch.bfloat16)
    prompt = torch.zeros(rows, 32, dtype=torch.long, device=DEVICE)
    cache = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
    return lambda tokens: model(tokens[:, None], cache=cache).logits[:, -1].argmax(-1)


def milliseconds(step: Step, rows: int, rounds: int) -> list[float]:
    """Of a step in a CUDA graph, by round."""
    tokens = torch.zeros(rows, dtype=torch.long, device=DEVICE)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):  # kernels are compiled
            step(tokens)
    torch.cuda.synchronize()
    graph, taken = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        tokens.copy_(step(tokens))
    for _ in range(1 + rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(STEPS):
            graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / STEPS)
    return taken[1:]


def run(options: argparse.Namespace) -> Iterator[Found]:
    """Each model and number of rows."""
    records, settings = [], {"note": RANDOM_NOTE, "torch": torch.__version__}
    columns = {"model": "{model}", "rows": "{rows}", "ms": "{milliseconds[median]:.3f}"}
    for name, rows in itertools.product(options.models, options.rows):
        with torch.inference_mode():
            make = qwen if name.startswith("Qwen") else mamba2
            step = make(st.ModelConfig.preset(name), rows)
            times = summary(milliseconds(step, rows, options.rounds))
        records.append({"model": name, "rows": rows, "milliseconds": times})
        table = Table("A decode step of torch in a CUDA graph", records, columns)
        yield Found(settings | {"steps": records}, [table])


if __name__ == "__main__":
    if OBSTACLE:
        print(
            f"nothing was measured: {OBSTACLE}; pip install {PACKAGES}, on an NVIDIA GPU",
            file=sys.stderr,
        )
        raise SystemExit(2)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # jax names the machine
    main(run, OPTIONS)
