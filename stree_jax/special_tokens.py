"""Special tokens, as the files of a checkpoint name them."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from stree_jax.checkpoint.files import optional_json
from stree_jax.checks import check_int
from stree_jax.messages import shown, shown_path
from stree_jax.models.config import ModelConfig

_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that the files of a tokenizer name."""
    file = folder / "tokenizer_config.json"
    config, older = optional_json(file), optional_json(folder / "special_tokens_map.json")
    # As transformers: where the config has all tokens, its word is the last one.
    config = older | config if "added_tokens_decoder" in config else config | older
    more = config.get("extra_special_tokens")
    special = {}
    for name, value in [*config.items(), *(more.items() if isinstance(more, dict) else ())]:
        token = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(token, str):
            special[name] = token
        elif name in _NAMES and value is not None:
            raise ValueError(
                f"{shown_path(file)} is damaged: {name} must be a text, got {shown(value)}"
            )
    return special


def end_tokens(config: ModelConfig, folder: Path | None, tokenizer: Tokenizer | None) -> list[int]:
    """The tokens that end a text, by config, `generation_config.json` and tokenizer.

    A tokenizer may have more tokens than its model; tokens outside the vocabulary are left out.
    """
    ends = [] if config.eos_token is None else np.ravel(config.eos_token).tolist()
    if folder is not None:
        file = folder / "generation_config.json"
        listed = optional_json(file).get("eos_token_id")
        if not isinstance(listed, list):
            listed = [] if listed is None else [listed]
        for token in listed:
            ends.append(check_int(f"{file}: eos_token_id", token, -(2**31), 2**31 - 1))
        name = None if tokenizer is None else special_tokens(folder).get("eos_token")
        if tokenizer is not None and name is not None:
            ends += [token for token in [tokenizer.token_to_id(name)] if token is not None]
    return [*dict.fromkeys(token for token in ends if 0 <= token < config.vocab_size)]
