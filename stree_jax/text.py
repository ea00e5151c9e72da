"""Text in, text out: a model, its tokenizer and its chat template in one call."""

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from stree_jax.chat import ChatTemplate, checked_variables, load_chat_template, special_tokens
from stree_jax.checkpoint import optional_json, tokenizer_errors
from stree_jax.decoding.drafters import Drafter, ModelDrafter
from stree_jax.decoding.generate import generate
from stree_jax.decoding.options import checked_options
from stree_jax.decoding.token_bytes import as_tokenizer, token_bytes
from stree_jax.decoding.verifiers import Verifier
from stree_jax.models.lm import HybridLM
from stree_jax.pretrained import from_pretrained, load_tokenizer
from stree_jax.tree import TreeTopology

Location = str | os.PathLike[str]
Messages = Sequence[Mapping[str, Any]]


class _Loaded(NamedTuple):
    """A model with its tokenizer; `folder` has their files, if it is known."""

    model: HybridLM
    tokenizer: Any
    folder: Path | None


def complete(
    model: Location | HybridLM,
    prompt: str | Messages,
    *,
    tokenizer: Any = None,
    drafter: Location | Drafter | None = None,
    topology: TreeTopology | None = None,
    verifier: str | Verifier | None = None,
    chat: Mapping[str, Any] | None = None,
    **options: Any,
) -> str:
    """Continues a text, or answers the last message of a conversation.

    A text is encoded as the tokenizer does by default, with a token for its beginning if it has
    one. A conversation is written by the checkpoint's chat template. What is loaded by a path is
    kept: the next call with it loads nothing.

    Args:
        model: a checkpoint directory or the name of a model on the hub, loaded in float32; or a
            model from `from_pretrained`.
        prompt: a text, or messages such as `[{"role": "user", "content": "Hello"}]`.
        tokenizer: None: the checkpoint's. A directory with one, a tokenizer from `load_tokenizer`,
            or a fast tokenizer of transformers; required if `model` is a model.
        drafter: a path or name of a draft model, or a drafter.
        topology, verifier: as in `generate`.
        chat: variables of the chat template, such as `tools` or `enable_thinking`.
        **options: as in `generate`, such as `stop=[". "]`. A text ends with the end tokens of the
            model's config, of `generation_config.json` and of the tokenizer, unless `eos_token` is
            given.

    Returns:
        The new text, without the end token or the stop.

    Raises:
        ValueError: a bad argument, no tokenizer or no chat template, as `from_pretrained` and
            `generate`.
        NonFiniteLogitsError: as in `generate`.
    """
    checked_options("complete", options)
    loaded = _found(model, tokenizer)
    inner = as_tokenizer(loaded.tokenizer)
    is_text = isinstance(prompt, str)
    text = prompt if isinstance(prompt, str) else _written(loaded, prompt, chat)
    if not text:
        raise ValueError("prompt is empty; give at least one character")
    with tokenizer_errors("the tokenizer cannot encode the prompt"):
        tokens = inner.encode(text, add_special_tokens=is_text).ids
    own = options.get("eos_token")
    ends = _end_tokens(loaded, inner) if own is None else np.ravel(np.asarray(own)).tolist()
    options |= {"eos_token": ends, "tokenizer": inner}
    draft: Any = drafter
    out = generate(
        loaded.model,
        [tokens],
        drafter=ModelDrafter(_model_at(draft)) if _is_path(draft) else draft,
        topology=topology,
        verifier=verifier,
        **options,
    )
    if out.finish_reasons[0] == "stop":
        assert out.texts is not None
        return out.texts[0]
    new = out.tokens[0, : out.lengths[0]].tolist()
    if out.finish_reasons[0] == "end_token":
        new.pop()
    if not is_text:
        return inner.decode(new)
    # A decoder may strip a space that begins the new text; its bytes have it.
    texts = token_bytes(inner)
    return b"".join(texts[token] or b"" for token in new).decode(errors="replace")


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def _found(model: Any, tokenizer: Any) -> _Loaded:
    """The model and its tokenizer."""
    folder = _folder(model) if _is_path(model) else None
    if _is_path(tokenizer):
        folder = Path(tokenizer)
    if tokenizer is None and folder is None:
        raise ValueError(
            "a model has no tokenizer: pass tokenizer=..., such as the directory of its checkpoint"
        )
    if tokenizer is None or _is_path(tokenizer):
        assert folder is not None
        tokenizer = _tokenizer(*_stamped(folder, "tokenizer.json"))
    return _Loaded(_model_at(model) if _is_path(model) else model, tokenizer, folder)


def _folder(path: Location) -> Path:
    from stree_jax import convert  # not imported by `import stree_jax`, to keep that light

    return convert.find(path)


def _stamped(folder: Path, name: str) -> tuple[str, int]:
    """A folder and the time that a file in it was written: the cache key of what is loaded."""
    file = folder / name
    return str(folder.resolve()), file.stat().st_mtime_ns if file.is_file() else 0


def _model_at(path: Location) -> HybridLM:
    return _model(*_stamped(_folder(path), "config.json"))


@functools.lru_cache(maxsize=4)
def _model(path: str, written: int) -> HybridLM:
    return from_pretrained(path)


@functools.lru_cache(maxsize=4)
def _tokenizer(path: str, written: int) -> Tokenizer:
    return load_tokenizer(path)


def _written(loaded: _Loaded, messages: Messages, chat: Mapping[str, Any] | None) -> str:
    """A conversation as text."""
    variables = checked_variables(chat)
    tools = variables.get("tools")
    if hasattr(loaded.tokenizer, "get_chat_template"):  # transformers
        source = loaded.tokenizer.get_chat_template(tools=tools)
        template = ChatTemplate(source, loaded.tokenizer.special_tokens_map)
    elif loaded.folder is None:
        raise ValueError(
            "a tokenizer alone has no chat template: pass tokenizer=..., the directory of its"
            " checkpoint"
        )
    else:
        template = load_chat_template(loaded.folder, tools=tools is not None)
    return template.render(messages, **variables)


def _end_tokens(loaded: _Loaded, tokenizer: Tokenizer) -> list[int]:
    """The end tokens of model and files."""
    found = [loaded.model.config.eos_token, getattr(loaded.tokenizer, "eos_token_id", None)]
    if loaded.folder is not None:
        found.append(optional_json(loaded.folder / "generation_config.json").get("eos_token_id"))
        name = special_tokens(loaded.folder).get("eos_token")
        found.append(None if name is None else tokenizer.token_to_id(name))
    vocab_size = loaded.model.config.vocab_size
    listed = [np.ravel(np.asarray(each)).tolist() for each in found if each is not None]
    return sorted({token for tokens in listed for token in tokens if token < vocab_size})
