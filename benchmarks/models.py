"""Models for benchmarks: random weights in the shapes of real models, and the embedded pair."""

import argparse
import dataclasses
from typing import Any, NamedTuple

import jax
from flax import nnx

import stree_jax as st
from benchmarks.prompts import load_prompts

RANDOM_NOTE = "random weights: only time and memory mean anything, acceptance does not"
# As wide as mamba2-130m, with fewer layers and words: a run takes minutes on two CPU cores.
SMALL = st.ModelConfig.mamba2_lm(4096, 768, 8)
SMALL_DRAFT = st.ModelConfig.mamba2_lm(4096, 256, 2)


def on_gpu() -> bool:
    """Whether computations go to a GPU."""
    return jax.default_backend() == "gpu"


def shape(preset: str | None, layers: int | None = None, *, draft: bool = False) -> st.ModelConfig:
    """The config of a preset (None: the default of this device), cut to its first `layers`."""
    if preset is not None:
        config = st.ModelConfig.preset(preset)
    elif on_gpu():
        config = st.ModelConfig.preset("mamba2-130m" if draft else "mamba2-2.7b")
    else:
        config = SMALL_DRAFT if draft else SMALL
    return config if layers is None else dataclasses.replace(config, layers=config.layers[:layers])


def default_dtype() -> str:
    """bfloat16 on a GPU; float32 on a CPU, whose bfloat16 is slow."""
    return "bfloat16" if on_gpu() else "float32"


def random_model(config: st.ModelConfig, dtype: str, seed: int = 0) -> st.HybridLM:
    """A model with random weights, made on the device."""

    @jax.jit
    def weights() -> dict:
        return nnx.to_pure_dict(nnx.state(st.HybridLM(config, dtype=dtype, rngs=nnx.Rngs(seed))))

    return nnx.merge(st.HybridLM.abstract(config, dtype=dtype)[0], weights())


def num_bytes(model: nnx.Module) -> int:
    """Bytes of a model's weights."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))


class Pair(NamedTuple):
    """A target, a draft, and prompts for them."""

    name: str
    target: st.HybridLM
    draft: st.HybridLM
    prompts: list[list[int]]
    source: str
    trained: bool

    def note(self) -> str:
        """Whether its acceptance means anything."""
        return "trained weights: acceptance is real" if self.trained else RANDOM_NOTE

    def settings(self) -> dict[str, Any]:
        """What the results of a benchmark say about it."""
        return {
            "pair": self.name,
            "note": self.note(),
            "dtype": self.target.dtype.name,
            "prompts": self.source,
        }


def embedded_pair(num_prompts: int, prompt_tokens: int = 64) -> Pair:
    """The trained pair of the package; prompts are cut to `prompt_tokens`, for one program."""
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    source, texts = load_prompts(num_prompts)
    return Pair(
        name="embedded pair",
        target=st.from_pretrained(st.demo_path("target")),
        draft=st.from_pretrained(st.demo_path("draft")),
        prompts=[tokenizer.encode(text).ids[:prompt_tokens] for text in texts],
        source=source,
        trained=True,
    )


def random_pair(
    target: st.ModelConfig, draft: st.ModelConfig, dtype: str, num_prompts: int, name: str
) -> Pair:
    """Random weights in the shapes of real models."""
    return Pair(
        name=name,
        target=random_model(target, dtype),
        draft=random_model(draft, dtype, seed=1),
        prompts=[[1 + i % 97] * 16 for i in range(num_prompts)],
        source="repeated tokens",
        trained=False,
    )


def add_pair_options(parser: argparse.ArgumentParser) -> None:
    """Options that `chosen_pair` reads."""
    parser.add_argument(
        "--pair", choices=("embedded", "random"), default="random" if on_gpu() else "embedded"
    )
    parser.add_argument("--target", help="preset of a random pair")
    parser.add_argument("--draft", help="preset of a random pair")


def chosen_pair(options: argparse.Namespace, num_prompts: int) -> Pair:
    """The embedded pair, or random weights in the shapes of two presets."""
    if options.pair == "embedded":
        return embedded_pair(num_prompts)
    small = "small" if not on_gpu() else None
    target, draft = options.target, options.draft
    names = (target or small or "mamba2-2.7b", draft or small or "mamba2-130m")
    return random_pair(
        shape(target),
        shape(draft, draft=True),
        default_dtype(),
        num_prompts,
        f"{names[0]} with {names[1]}, random",
    )
