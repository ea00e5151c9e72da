"""Models for benchmarks: trained pairs, and random weights in the shapes of real models."""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

import stree_jax as st
from benchmarks.prompts import load_prompts
from stree_jax.models.matrices import pack

RANDOM_NOTE = "random weights: only time and memory mean anything, acceptance does not"

CHECKPOINTS = {"--target": None, "--draft": None, "--name": None}


def on_gpu() -> bool:
    """True if computations go to a GPU."""
    return jax.default_backend() == "gpu"


def default_dtype() -> str:
    """bfloat16 on a GPU; float32 on a CPU, where bfloat16 gains little."""
    return "bfloat16" if on_gpu() else "float32"


def random_model(config: st.ModelConfig, dtype: str, seed: int = 0) -> st.HybridLM:
    """A model with random weights, made on the device."""

    @jax.jit
    def weights() -> dict:
        return nnx.to_pure_dict(nnx.state(st.HybridLM(config, dtype=dtype, rngs=nnx.Rngs(seed))))

    model = nnx.merge(st.HybridLM.abstract(config, dtype=dtype)[0], weights())
    if not on_gpu():
        pack(model)  # as a loaded model has its matrices
    return model


class Pair(NamedTuple):
    """A trained target, its draft, and prompts for them."""

    name: str
    target: st.HybridLM
    draft: st.HybridLM
    prompts: list[list[int]]
    source: str  # of the prompts

    def settings(self) -> dict[str, Any]:
        """Name, dtype and prompts, for the results of a benchmark."""
        return {"pair": self.name, "dtype": self.target.dtype.name, "prompts": self.source}


def embedded_pair(
    num_prompts: int, prompt_tokens: int | None = 64, dtype: str = "float32", **quantize: str | None
) -> Pair:
    """The trained pair of the package; prompts are cut to `prompt_tokens`, for one program."""
    paths = st.demo_path("target"), st.demo_path("draft")
    return loaded_pair(*paths, "embedded pair", num_prompts, prompt_tokens, dtype, **quantize)


def loaded_pair(
    target: str | Path,
    draft: str | Path,
    name: str,
    num_prompts: int,
    prompt_tokens: int | None = None,
    dtype: str = "float32",
    quantize: str | None = None,
    draft_quantize: str | None = None,
) -> Pair:
    """A pair of checkpoints, and prompts cut to `prompt_tokens` if that is not None.

    The dtype is the target's; the draft is loaded as users load it.
    """
    from stree_jax.convert import find  # GPU sessions run in a checkout without it

    target = find(target)
    tokenizer = st.load_tokenizer(target)
    model = st.from_pretrained(target, dtype=dtype, quantize=quantize)
    source, texts = load_prompts(num_prompts)
    prompts = [tokenizer.encode(text).ids[:prompt_tokens] for text in texts]
    return Pair(name, model, st.load_draft(draft, model, quantize=draft_quantize), prompts, source)


def chosen_pair(options: argparse.Namespace, num_prompts: int) -> Pair:
    """The pair that the options `CHECKPOINTS` name; the embedded one by default."""
    if len({options.target is None, options.draft is None, options.name is None}) > 1:
        raise SystemExit("--target, --draft and --name come together")
    if options.target is None:
        return embedded_pair(num_prompts, None)
    return loaded_pair(options.target, options.draft, options.name, num_prompts)
