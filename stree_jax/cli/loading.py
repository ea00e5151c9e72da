"""What `generate` decodes with."""

from stree_jax import loading
from stree_jax.cli.options import Generate
from stree_jax.loading import Loaded

__all__ = ["Loaded", "load"]


def load(command: Generate) -> Loaded:
    """Loads models and tokenizer."""
    words = {name: value for name, value in vars(command).items() if name in loading.WORDS}
    return loading.load(command.checkpoint, **words)
