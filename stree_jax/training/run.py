"""`train` and `distill`: from a recipe to a native checkpoint."""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from stree_jax.checkpoint import save_pretrained
from stree_jax.checkpoint.directories import write_text
from stree_jax.checkpoint.load import load_config
from stree_jax.decoding.generate import generate
from stree_jax.decoding.prompts import typed_key
from stree_jax.models.config import ModelConfig
from stree_jax.models.identity import identity
from stree_jax.models.lm import HybridLM
from stree_jax.models.matrices import in_first
from stree_jax.pretrained import from_pretrained, load_tokenizer
from stree_jax.training import data
from stree_jax.training.objective import distillation_loss, next_token_loss
from stree_jax.training.recipe import Recipe
from stree_jax.training.trainer import Loss, Progress, cast, evaluate, fit

# The target generates the rows of this many steps in one batch: on a CPU 64 rows take little
# longer than 8.
_STEPS_AT_ONCE = 8


def train(recipe: Recipe, output: Path) -> Iterator[Progress]:
    """Trains a tokenizer and a model on text.

    Args:
        recipe: model, optimization and text.
        output: the native checkpoint to write; its README.md has the held-out loss. Checkpoints to
            resume from go to `<output>.run`.

    Yields:
        One `Progress` per step. `output` is written when the iterator is exhausted.

    Raises:
        ValueError: the recipe or the output is invalid.
    """
    if recipe.start is None:
        run = run_directory(output, recipe.fingerprint())
        _config(recipe, recipe.vocab_size, None)  # before the tokenizer, which may take long
        if not (run / "tokenizer.json").is_file():
            new = data.train_tokenizer(recipe.text, recipe.vocab_size)
            write_text(run / "tokenizer.json", new.to_str())
        tokenizer = load_tokenizer(run)
        eos_token = tokenizer.token_to_id(data.END_OF_TEXT)
        model = _new_model(recipe, tokenizer.get_vocab_size(), eos_token)
    else:
        tokenizer, model = open_target(Path(recipe.start), output)
        run = run_directory(output, recipe.fingerprint() | {"start": identity(model)})

    yield from _run(recipe, output, run, model, tokenizer, next_token_loss)


def distill(recipe: Recipe, target_path: Path, output: Path) -> Iterator[Progress]:
    """Distills a target model into a draft model.

    Other arguments, yields and errors are those of `train`. With `recipe.start` a draft goes on,
    for example after its target was trained further.
    """
    tokenizer, target = open_target(target_path, output)
    fingerprint = recipe.fingerprint() | {"target": identity(target)}
    if recipe.start is None:
        run = run_directory(output, fingerprint)
        model = _new_model(recipe, target.config.vocab_size, target.config.eos_token)
    else:
        known, model = open_target(Path(recipe.start), output)
        if known.get_vocab() != tokenizer.get_vocab():
            raise ValueError(
                f"{recipe.start} and {target_path} have different tokenizers; start from a draft of"
                " this target, or leave start out"
            )
        run = run_directory(output, fingerprint | {"start": identity(model)})

    def loss(model: HybridLM, tokens: jax.Array, target: HybridLM) -> jax.Array:
        tokens = tokens[:, :-1]
        return distillation_loss(model, jax.lax.stop_gradient(target(tokens)), tokens)

    yield from _run(recipe, output, run, model, tokenizer, loss, target)


def open_target(target_path: Path, output: Path) -> tuple[Tokenizer, HybridLM]:
    """Returns a target's tokenizer and its model, for training, in float32."""
    tokenizer = load_tokenizer(target_path)
    target = in_first(from_pretrained(target_path))  # it reads many rows at once
    if output.exists() and output.samefile(target_path):
        raise ValueError(f"output {output} is the target itself; choose another output")
    if tokenizer.get_vocab_size() > target.config.vocab_size:
        raise ValueError(
            f"the tokenizer of {target_path} has {tokenizer.get_vocab_size()} tokens, its model"
            f" {target.config.vocab_size}; the model must cover the tokenizer"
        )
    return tokenizer, target


def _run(
    recipe: Recipe,
    output: Path,
    run: Path,
    model: HybridLM,
    tokenizer: Tokenizer,
    loss: Loss,
    target: HybridLM | None = None,
) -> Iterator[Progress]:
    batch, held_out = run_text(recipe, tokenizer, target)
    yield from fit(model, loss, batch, recipe.training, run / "steps", target)
    stored = cast(model, jnp.bfloat16)
    final = evaluate(cast(stored, jnp.float32), loss, held_out, target)
    save_pretrained(stored, output, tokenizer=tokenizer, model_card=card(final), overwrite=True)


def card(loss: float) -> str:
    """Returns the README.md of a checkpoint."""
    return f"Held-out loss: {loss:.4f} nats a token, with the stored weights.\n"


def run_text(
    recipe: Recipe, tokenizer: Tokenizer, target: HybridLM | None
) -> tuple[Callable[[int], np.ndarray], list[np.ndarray]]:
    """Returns the batch of a step, partly written by the target, and held-out batches."""
    training = recipe.training
    length = training.sequence_length + 1
    corpus, held_out = data.load_corpus(recipe.text, tokenizer, length)

    def read(corpus: data.Corpus, step: int) -> np.ndarray:
        return data.batch_at(corpus, step, recipe.seed, training.batch_size, length)

    num_generated = round(training.generated * training.batch_size)

    @functools.lru_cache(maxsize=2)  # one entry each for even and odd steps
    def generated(first: int) -> np.ndarray:
        steps = range(first, first + 2 * _STEPS_AT_ONCE, 2)
        rows = np.concatenate([read(corpus, step)[:num_generated] for step in steps])
        assert target is not None
        return continued(target, rows, recipe.seed, first).reshape(len(steps), num_generated, -1)

    def batch(step: int) -> np.ndarray:
        tokens = read(corpus, step)
        if target is not None and num_generated:
            place = step % (2 * _STEPS_AT_ONCE)
            tokens[:num_generated] = generated(step - place + place % 2)[place // 2]
        return tokens

    return batch, [read(held_out, step) for step in range(16)]


def continued(target: HybridLM, tokens: np.ndarray, seed: int, step: int) -> np.ndarray:
    """Returns the rows with their second half written by the target."""
    half = tokens.shape[1] // 2
    out = generate(
        target,
        tokens[:, :half].tolist(),
        max_new_tokens=tokens.shape[1] - half,
        temperature=float(step % 2 == 0),
        eos_token=(),  # rows keep their length
        key=jax.random.fold_in(typed_key(seed), step),
    )
    return np.concatenate([tokens[:, :half], out.tokens], axis=1)


def _new_model(recipe: Recipe, vocab_size: int, eos_token: Any) -> HybridLM:
    return HybridLM(_config(recipe, vocab_size, eos_token), rngs=nnx.Rngs(typed_key(recipe.seed)))


def _config(recipe: Recipe, vocab_size: int, eos_token: Any) -> ModelConfig:
    try:
        return ModelConfig.mamba2_lm(vocab_size, eos_token=eos_token, **recipe.model)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{recipe.source}, [model]: {error}") from error


def run_directory(
    output: Path, fingerprint: dict[str, Any], check: Callable[[Path], object] = load_config
) -> Path:
    """Returns the directory with this run's checkpoints, made at its start.

    One without checkpoints starts again. `check` refuses an `output` of another kind.
    """
    output = output.absolute()
    if output.exists():
        try:
            check(output)
        except ValueError as error:
            raise ValueError(
                f"{output} exists and is not a stree-jax checkpoint of this kind; choose another"
                " output"
            ) from error
    run = output.with_name(output.name + ".run")
    run.mkdir(parents=True, exist_ok=True)
    file = run / "run.json"
    now = json.dumps(fingerprint, indent=2, default=str)  # dates, which the model refuses
    if file.is_file() and file.read_text() == now:
        return run
    if any(path.name.isdecimal() for path in run.glob("steps/*")):
        raise ValueError(
            f"{run} belongs to a run with another recipe, text or target; remove it to start over,"
            " or choose another output"
        )
    for part in ("tokenizer.json", "run.json"):  # run.json last: it is what they belong to
        (run / part).unlink(missing_ok=True)
    write_text(file, now)
    return run
