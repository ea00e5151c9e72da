"""What several tests share beyond `stree_jax.testing`."""

import shutil

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

__all__ = ["apply", "saved_pair", "with_weight"]


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
