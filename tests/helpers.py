"""What several tests share beyond `stree_jax.testing`."""

import re
import shutil
from pathlib import Path

import jax
from flax import nnx

from stree_jax import (
    MedusaHeads,
    ModelConfig,
    demo_path,
    load_tokenizer,
    save_medusa,
    save_pretrained,
)
from stree_jax.testing import apply, perturbed, random_model

__all__ = ["COMPILED", "DOCS", "apply", "heads_of", "python_blocks", "saved_pair", "with_weight"]

DOCS = Path(__file__).parents[1] / "docs"  # there in a checkout only
_NOT_RUN = r"<!-- not run: (.+?) -->\n"

# An entry for each program that XLA has compiled in this process.
COMPILED: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: (
        COMPILED.append(event) if event == "/jax/core/compile/backend_compile_duration" else None
    )
)


def saved_pair(folder):
    """Saves tiny models and heads with tokenizer, tree and vocabulary of the embedded ones."""
    embedded = demo_path("target")
    tokenizer = load_tokenizer(embedded)
    model = random_model(
        ModelConfig.tiny(vocab_size=tokenizer.get_vocab_size(), num_layers=1, tie_embeddings=False)
    )
    for name, each in (("target", model), ("draft", perturbed(model, 0.1))):
        save_pretrained(each, folder / name, tokenizer=tokenizer)
    save_medusa(MedusaHeads(model, num_heads=3, rngs=nnx.Rngs(0)), model, folder / "medusa")
    shutil.copy(embedded.with_name("tree.json"), folder)
    return folder


def with_weight(model, name, change):
    """A copy of the model with one weight changed. (`nnx.split` shares the variables: writing to
    its state would change the model, which other tests use too.)"""
    copy = nnx.clone(model)
    weight = getattr(copy, name)
    weight[...] = change(weight[...])
    return copy


def heads_of(model, num_heads=4, amount=0.3, seed=0):
    """Heads with random weights."""
    heads = MedusaHeads(model, num_heads=num_heads, rngs=nnx.Rngs(0))
    keys = jax.random.split(jax.random.key(seed))
    for key, weight in zip(keys, (heads.kernel, heads.bias), strict=True):
        weight[...] = amount * jax.random.normal(key, weight.shape)
    return heads


def python_blocks(page):
    """The Python of a page, block by block: why it is not run, if so, and its code."""
    return re.findall(
        rf"(?:^{_NOT_RUN})?^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
    )
