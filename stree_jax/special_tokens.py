"""What the files of a checkpoint say about special tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from stree_jax.checkpoint import read_json
from stree_jax.checks import check_int
from stree_jax.config import ModelConfig

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


def special_tokens(folder: Path) -> dict[str, str]:
    """The text of each special token that the files of a tokenizer name."""
    config = _table(folder / "special_tokens_map.json") | _table(folder / "tokenizer_config.json")
    found = {}
    for name in _NAMES:
        token = config.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str):
            found[name] = token
    return found


def end_tokens(config: ModelConfig, folder: Path | None, tokenizer: Tokenizer | None) -> list[int]:
    """The tokens that end a text of a model: the one place where they are found.

    They are those of its config, of `generation_config.json`, and the `eos_token` of the tokenizer.
    A model may be padded, and a tokenizer may have more tokens than its model: tokens outside the
    model's vocabulary never come, and are left out.

    Args:
        config: the model's config.
        folder: the directory of its checkpoint, or of its tokenizer; None: unknown.
        tokenizer: the tokenizer; None: there is none.

    Raises:
        ValueError: a file is damaged, or does not give token ids.
    """
    ends = [] if config.eos_token is None else np.ravel(config.eos_token).tolist()
    if folder is not None:
        file = folder / "generation_config.json"
        given = _table(file).get("eos_token_id")
        for token in given if isinstance(given, list) else [] if given is None else [given]:
            ends.append(check_int(f"{file}: eos_token_id", token, -(2**31), 2**31 - 1))
        name = None if tokenizer is None else special_tokens(folder).get("eos_token")
        if tokenizer is not None and name is not None:
            ends += [token for token in [tokenizer.token_to_id(name)] if token is not None]
    return [*dict.fromkeys(token for token in ends if 0 <= token < config.vocab_size)]


def _table(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
