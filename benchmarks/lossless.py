"""Does greedy tree decoding give the tokens of autoregressive decoding? A small model per family.

Float32, with random weights in sizes that the Pallas kernels accept. The draft is the target with
noise on its weights, so that it is often right, but not always. The implementations are XLA and,
where they run, the kernels. A product of another number of rows may be rounded differently, as GPUs
choose its algorithm by its shape: a first difference between tokens whose logits differ by less
than 1e-4 of the largest one is a tie. Exit code 1 if any other token differs.

    python -m benchmarks.lossless [--families Mamba-2 ...] [--tokens 48]
"""

import argparse
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import stree_jax as st
from benchmarks.cases.base import random_tree
from benchmarks.common import conclude, print_table
from pallas_kernels import dispatch
from stree_jax.layer_config import (
    AttentionConfig,
    Mamba2Config,
    MlpConfig,
    MoeConfig,
    RopeScaling,
    SharedConfig,
)

PROMPT_LENGTHS = (37, 5, 64, 1)
NOISE = 0.02  # relative, on the draft's weights
TIE = 1e-4  # of the largest logit
_WIDTH = 64
_mixer = functools.partial(Mamba2Config, num_heads=4, head_dim=32, state_size=16, chunk_size=16)
_attention = functools.partial(AttentionConfig, num_heads=4, num_kv_heads=2, head_dim=16)


def _hybrid(*layers: str, **parts: Any) -> st.ModelConfig:
    """Not tied: with tied embeddings a random model repeats itself."""
    shape: dict[str, Any] = dict(
        vocab_size=512,
        d_model=_WIDTH,
        layers=layers,
        mamba2=_mixer(),
        mlp=MlpConfig(96),
        tie_embeddings=False,
        residual_float32=False,
    )
    return st.ModelConfig(**(shape | parts))


FAMILIES = {
    "Mamba-2": st.ModelConfig.mamba2_lm(
        512, 128, 4, head_dim=64, state_size=64, tie_embeddings=False
    ),
    "MambaInLlama": _hybrid(
        *("mamba2", "mlp", "attention", "mlp"),
        mamba2=_mixer(head_dim=16, num_groups=4, num_x_heads=2, num_b_groups=2),
        attention=_attention(
            rotary_dim=16, rope_theta=100.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 24)
        ),
    ),
    "mamba2attn": _hybrid(
        *("mamba2", "attention", "mamba2"),
        attention=_attention(rotary_dim=8, conv_width=3, mlp_dim=16),
        residual_float32=True,
    ),
    "Falcon-H1": _hybrid(
        *("parallel", "mlp", "parallel", "mlp"),
        mamba2=_mixer(norm="none", input_multiplier=1.25, output_multiplier=0.8),
        attention=_attention(rotary_dim=16, key_multiplier=0.7),
    ),
    "Bamba": _hybrid(
        *("mamba2", "mlp", "attention", "mlp"),
        attention=_attention(rotary_dim=8, qkv_bias=True, out_bias=True),
    ),
    "Nemotron-H": _hybrid(
        *("mamba2", "mlp", "attention", "moe"),
        attention=_attention(),
        mlp=MlpConfig(96, activation="relu2", gated=False),
        moe=MoeConfig(6, 2, 32, router="sigmoid", activation="relu2", gated=False),
    ),
    "Granite-4-H": _hybrid(
        *("mamba2", "moe", "attention", "moe"),
        attention=_attention(scale=0.2),
        moe=MoeConfig(4, 2, 32, shared_size=32),
        mlp=None,
    ),
    "Zamba2": _hybrid(
        *("mamba2", "shared", "mamba2", "shared", "mamba2"),
        attention=_attention(num_kv_heads=4, input_multiple=2, scale=0.5, rotary_dim=16),
        shared=SharedConfig(1, adapter_rank=4, attention_adapters=True),
    ),
}
TREES = {
    "chain of 4": st.TreeTopology.chain(4),
    "tree A": st.TreeTopology.paper("A"),
    "random tree of 32": random_tree(32, seed=0),
}


def noisy(model: st.HybridLM) -> st.HybridLM:
    """The model with relative noise on its weights."""
    graphdef, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [
        leaf * (1 + NOISE * jax.random.normal(key, leaf.shape))
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))


def check(
    config: st.ModelConfig,
    implementation: str,
    trees: Mapping[str, st.TreeTopology],
    *,
    tokens: int,
) -> dict[str, dict[str, Any]]:
    """Whether each tree gives the tokens of autoregressive decoding, on a ragged batch.

    `distinct` counts different tokens, to show that the model does not repeat itself. `differences`
    are the first ones of rows that differ, and `right` is whether all of them are ties.
    """
    model = st.HybridLM(config, rngs=nnx.Rngs(0), implementation=implementation)
    drafter = st.ModelDrafter(noisy(model))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(config.vocab_size, size=size).tolist() for size in PROMPT_LENGTHS]
    decode = functools.partial(st.generate, model, prompts, max_new_tokens=tokens)
    want = decode().tokens
    rows = {}
    for name, topology in trees.items():
        out = decode(drafter=drafter, topology=topology)
        found = (
            first_difference(model, *texts) for texts in zip(prompts, want, out.tokens, strict=True)
        )
        differences = [
            {"row": row} | difference for row, difference in enumerate(found) if difference
        ]
        rows[name] = {
            "identical": not differences,
            "differences": differences,
            "right": all(difference["tie"] for difference in differences),
            "tau": out.stats.tau,
            "distinct": len(np.unique(want)),
        }
    return rows


def first_difference(
    model: st.HybridLM, prompt: Sequence[int], want: Sequence[int], got: Sequence[int]
) -> dict[str, Any] | None:
    """Where two greedy texts after a prompt differ first; None if they do not.

    The place, both tokens, and the gap of their logits relative to the largest one, from the model
    run on prompt and common text as a sequence. Below `TIE` the gap is a tie.
    """
    place = next(
        (i for i, pair in enumerate(zip(want, got, strict=True)) if len({*pair}) > 1), None
    )
    if place is None:
        return None
    tokens = [int(want[place]), int(got[place])]
    text = [*prompt, *map(int, want[:place])]
    last = jax.jit(model)(jnp.asarray([text]))[0, -1, : model.config.vocab_size]
    logits = np.asarray(last, np.float64)
    gap = float(abs(np.subtract(*logits[tokens])) / np.max(np.abs(logits)))
    return {"place": place, "tokens": tokens, "gap": gap, "tie": gap < TIE}


def main() -> None:
    """Checks the families and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    implementations = ("xla",) if dispatch.device_obstacle() else ("xla", "pallas")
    rows = [
        (family, implementation, tree, found)
        for family in options.families
        for implementation in implementations
        for tree, found in check(
            FAMILIES[family], implementation, TREES, tokens=options.tokens
        ).items()
    ]
    print_table(
        f"Greedy decoding of {options.tokens} tokens against autoregressive decoding, float32",
        ("family", "implementation", "tree", "identical", "tau", "distinct tokens"),
        [(*names, _verdict(found), found["tau"], found["distinct"]) for *names, found in rows],
    )
    different = [[*names, found["differences"]] for *names, found in rows if not found["identical"]]
    wrong = [names for *names, found in rows if not found["right"]]
    conclude("lossless", passed=not wrong, checked=len(rows), different=different)


def _verdict(found: Mapping[str, Any]) -> str:
    if found["identical"]:
        return "yes"
    return "but for ties" if found["right"] else "no"


if __name__ == "__main__":
    main()
