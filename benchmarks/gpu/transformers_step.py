"""Times a token of transformers, with a Mamba-2 of the same shape.

Its greedy `generate`, as users call it: the time of many tokens minus the time of one, divided by
the difference in tokens. Random weights.
"""

import importlib.util
import time
from typing import Any

import stree_jax as st
from benchmarks.common import summary


def obstacle(device: str) -> str | None:
    """Why it cannot be measured here, or None."""
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    return None


def measure(
    config: st.ModelConfig, *, device: str, dtype: str, tokens: int, rounds: int
) -> dict[str, Any]:
    """Milliseconds a token.

    Args:
        config: config of a pure Mamba-2 model.
        device: device of torch.
        dtype: dtype of the weights.
        tokens: number of tokens to time.
        rounds: number of measurements.
    """
    import torch
    import transformers

    mixer = config.mamba2
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
    with torch.device(device):
        model = transformers.Mamba2ForCausalLM(shape).to(getattr(torch, dtype)).eval()
    prompt = torch.ones(1, 1, dtype=torch.long, device=device)

    def seconds(count: int) -> float:
        began = time.perf_counter()
        with torch.no_grad():
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                min_new_tokens=count,
                max_new_tokens=count,
                do_sample=False,
            )
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds(2)
    milliseconds = [1e3 * (seconds(tokens + 1) - seconds(1)) / tokens for _ in range(rounds)]
    missing = [
        name for name in ("mamba_ssm", "causal_conv1d") if importlib.util.find_spec(name) is None
    ]
    return {
        "milliseconds": summary(milliseconds),
        "tokens": tokens,
        "dtype": dtype,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "note": f"slow: without {' and '.join(missing)}" if missing else "with its fast kernels",
    }
