"""Times a token of transformers, with a Mamba-2 of the same shape.

Its greedy `generate`, as users call it: the time of many tokens minus the time of one, divided by
the difference in tokens. Random weights.
"""

import functools
import importlib.util
import time

from benchmarks.gpu.scale import Scale
from benchmarks.gpu.tasks import Row, Task
from benchmarks.models import on_gpu
from stree_jax.measuring.clock import summary

ROUNDS = 5


def tokens(scale: Scale) -> list[Task]:
    """Time of a token, with the shape of `scale.mamba2`."""
    return [Task("greedy generation", measure=functools.partial(measured, scale))]


def measured(scale: Scale, _: None) -> Row:
    """Milliseconds a token, or why they cannot be measured here."""
    if missing := lacking("torch", "transformers"):
        return {"unavailable": f"{' and '.join(missing)} cannot be imported"}
    import torch
    import transformers

    config, mixer = scale.mamba2, scale.mamba2.mamba2
    assert mixer is not None
    shape = transformers.Mamba2Config(
        vocab_size=config.num_embeddings,
        hidden_size=config.d_model,
        num_hidden_layers=len(config.layers),
        num_heads=mixer.num_heads,
        head_dim=mixer.head_dim,
        state_size=mixer.state_size,
        n_groups=mixer.num_groups,
        conv_kernel=mixer.conv_width,
        expand=mixer.num_heads * mixer.head_dim // config.d_model,
        chunk_size=mixer.chunk_size,
        tie_word_embeddings=config.tie_embeddings,
    )
    with torch.device("cuda" if on_gpu() else "cpu") as device:
        model = transformers.Mamba2ForCausalLM(shape).to(getattr(torch, scale.dtype)).eval()
        prompt = torch.ones(1, 1, dtype=torch.long)
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False}

    def seconds(count: int) -> float:
        began = time.perf_counter()
        with torch.no_grad():
            model.generate(prompt, min_new_tokens=count, max_new_tokens=count, **options)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds(2)
    many = scale.tokens
    taken = [1e3 * (seconds(many + 1) - seconds(1)) / many for _ in range(ROUNDS)]
    missing = lacking("mamba_ssm", "causal_conv1d")
    note = f"slow: without {' and '.join(missing)}" if missing else "with its fast kernels"
    return {"milliseconds": summary(taken), "tokens": many, "dtype": scale.dtype, "note": note}


def lacking(*packages: str) -> list[str]:
    """Those that cannot be imported."""
    return [package for package in packages if importlib.util.find_spec(package) is None]
