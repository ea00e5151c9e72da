"""A byte-level target and its draft, trained for some minutes: tau needs trained weights.

A token is a byte. The target of 50 million parameters learns text, the draft of 2 layers learns the
target's predictions. Each trains for a given time, with a learning rate that falls to 0 in it.
"""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

import stree_jax as st
from benchmarks.models import Pair
from benchmarks.prompts import SHARED, load_prompts
from stree_jax.training.data import Corpus, batch_at
from stree_jax.training.objective import distillation_loss, next_token_loss
from stree_jax.training.recipe import Training
from stree_jax.training.trainer import Loss, cast, evaluate, make_optimizer

TARGET = st.ModelConfig.mamba2_lm(256, 768, 13, chunk_size=64)
DRAFT = st.ModelConfig.mamba2_lm(256, 384, 2, chunk_size=64)
# The learning rate falls with time, not with steps: there is no last step.
TRAINING = Training(
    steps=10**9, batch_size=16, sequence_length=512, learning_rate=1.5e-3, warmup_steps=100
)
TEXTS = {  # and their shares, as in the recipe of the embedded pair
    "gsm8k_train.txt": 30.0,
    "python_stdlib.txt": 28.0,
    "gutenberg_fiction.txt": 28.0,
    "python_peps.txt": 8.0,
    "jax_docs.txt": 6.0,
}
HELD_OUT = 0.01  # the last part of each text
TARGET_SHARE = 0.7  # of the time
PROMPT_BYTES = 128


class Trained(NamedTuple):
    """A pair in float32, and how its training went."""

    pair: Pair
    report: dict[str, Any]

    def as_type(self, dtype: str) -> Pair:
        """The pair with weights of another type."""
        pair = self.pair
        return pair._replace(target=cast(pair.target, dtype), draft=cast(pair.draft, dtype))


def text_directory() -> Path:
    """The directory of the texts: beside the repository, or in it.

    Raises:
        SystemExit: there is none.
    """
    places = [data / "text" for data in (SHARED, Path(__file__).parents[2] / "shared" / "data")]
    for place in places:
        if all((place / name).is_file() for name in TEXTS):
            return place
    raise SystemExit(
        f"nothing to train on: neither {' nor '.join(map(str, places))} has all of {list(TEXTS)}"
    )


def load(directory: Path) -> tuple[Corpus, Corpus]:
    """Bytes for training, and held-out bytes."""
    streams = [np.frombuffer((directory / name).read_bytes(), np.uint8) for name in TEXTS]
    ends = [int(len(stream) * (1 - HELD_OUT)) for stream in streams]
    weights = tuple(TEXTS.values())
    return (
        Corpus(tuple(s[:end] for s, end in zip(streams, ends, strict=True)), weights),
        Corpus(tuple(s[end:] for s, end in zip(streams, ends, strict=True)), weights),
    )


def fit_for(
    seconds: float,
    model: st.HybridLM,
    loss: Loss,
    batch: Callable[[int], np.ndarray],
    training: Training,
    extra: Any = None,
) -> int:
    """Trains a model in place for some time without compilation; returns the number of steps.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    graphdef, weights = nnx.split(model)
    params = nnx.to_pure_dict(weights)
    optimizer = make_optimizer(training)
    state = {"params": params, "optimizer": optimizer.init(params)}

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state: Any, tokens: jax.Array, extra: Any, scale: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(
            lambda params: loss(nnx.merge(graphdef, params), tokens, extra)
        )(state["params"])
        updates, inner = optimizer.update(gradient, state["optimizer"], state["params"])
        updates = jax.tree.map(lambda leaf: scale * leaf, updates)
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": inner}, value

    step, used, began = 0, 0.0, time.monotonic()
    while used < seconds:
        state, value = update(state, batch(step), extra, np.float32(1 - used / seconds))
        if not np.isfinite(value):
            raise FloatingPointError(f"the loss is not finite at step {step}")
        step += 1
        if step == 1:
            began = time.monotonic()
        used = time.monotonic() - began
    nnx.update(model, state["params"])
    return step


def train(
    seconds: float,
    *,
    target: st.ModelConfig = TARGET,
    draft: st.ModelConfig = DRAFT,
    training: Training = TRAINING,
    num_prompts: int = 8,
) -> Trained:
    """Trains both models in float32 in this time, not counting compilation."""
    corpus, held_out = load(text_directory())
    length = training.sequence_length + 1

    def read(corpus: Corpus, seed: int, step: int) -> np.ndarray:
        return batch_at(corpus, step, seed, training.batch_size, length)

    def text_loss(model: st.HybridLM, tokens: jax.Array, _: Any) -> jax.Array:
        return next_token_loss(model, tokens)

    def draft_loss(model: st.HybridLM, tokens: jax.Array, target: st.HybridLM) -> jax.Array:
        tokens = tokens[:, :-1]
        return distillation_loss(model, jax.lax.stop_gradient(target(tokens)), tokens)

    report: dict[str, Any] = {"texts": list(TEXTS), "batch": [training.batch_size, length - 1]}
    models: list[st.HybridLM] = []
    tests = [read(held_out, 2, step) for step in range(4)]
    for name, config, loss, share in (
        ("target", target, text_loss, TARGET_SHARE),
        ("draft", draft, draft_loss, 1 - TARGET_SHARE),
    ):
        model = st.HybridLM(config, rngs=nnx.Rngs(len(models)))
        extra = models[0] if models else None
        batch = functools.partial(read, corpus, len(models))
        steps = fit_for(share * seconds, model, loss, batch, training, extra)
        report[name] = {
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))),
            "steps": steps,
            "bytes_seen": steps * training.batch_size * training.sequence_length,
            "held_out_nats": evaluate(model, loss, tests, extra),
        }
        models.append(model)
    source, texts = load_prompts(num_prompts)
    pair = Pair(
        "byte-level pair, trained in this run",
        *models,
        prompts=[list(text.encode()[:PROMPT_BYTES]) for text in texts],
        source=source,
        trained=True,
    )
    return Trained(pair, report)
