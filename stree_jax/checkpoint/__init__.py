"""Native checkpoints: one module saves them, one loads them.

    config.json      format version and `ModelConfig`
    params/          Orbax checkpoint of the weights
    checksums.json   CRC-32 of each array; checkpoints without it load too
    tokenizer.json   optional, in the format of the `tokenizers` library
    README.md        optional model card

Other modules, such as heads of a model, are stored in the same way: config.json then has a `kind`,
and `write_checkpoint`, `load_header` and `load_module` are the building blocks.

A checkpoint is either complete or absent, see `directories`. Loading a checkpoint of any format is
`stree_jax.pretrained`.
"""

from stree_jax.checkpoint.load import is_native, load_header, load_module
from stree_jax.checkpoint.save import save_pretrained, write_checkpoint

# What an extension may use.
__all__ = ["is_native", "load_header", "load_module", "save_pretrained", "write_checkpoint"]
