"""Text in, text out: a model, its tokenizer and its chat template in one call."""

import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tokenizers import Tokenizer

from stree_jax.chat import ChatTemplate, checked_variables, load_chat_template
from stree_jax.checkpoint.files import folder_of, read_text
from stree_jax.checks import check_int, require
from stree_jax.decoding.drafters import Drafter, ModelDrafter
from stree_jax.decoding.generate import generate
from stree_jax.decoding.options import Options, spelled_out
from stree_jax.decoding.text_stream import decoder_of
from stree_jax.decoding.token_bytes import as_tokenizer
from stree_jax.decoding.verifiers import Verifier
from stree_jax.decoding.way import Topology
from stree_jax.messages import shown, shown_path
from stree_jax.models.config import ModelConfig
from stree_jax.models.lm import HybridLM, check_model
from stree_jax.pretrained import draft_dtype, from_pretrained, load_tokenizer, tokenizer_errors
from stree_jax.special_tokens import end_tokens, special_tokens

Location = str | os.PathLike[str]
Messages = Sequence[Mapping[str, Any]]


class Texts:
    """A checkpoint's way from prompts to tokens, and from tokens to text.

    `tokenizer` may be a fast one of transformers; `folder` has its chat template, unless
    `chat_template` is the source of another.
    """

    def __init__(
        self, tokenizer: Any, folder: Path | None = None, chat_template: str | None = None
    ):
        self._source, self._folder, self._template = tokenizer, folder, chat_template
        self._name = "the tokenizer" + (f" of {shown_path(folder)}" if folder else "")
        self._tokenizer = as_tokenizer(tokenizer)
        if self._tokenizer.truncation or self._tokenizer.padding:
            self._tokenizer = _of_whole_texts(self._tokenizer)

    @classmethod
    def at(cls, path: Location, chat_template: Path | None = None) -> "Texts":
        """Loads those of a directory or a tokenizer.json, which are kept.

        `chat_template` is a file with one, in the place of the directory's own.
        """
        source = Path(path)
        template = None if chat_template is None else read_text(Path(chat_template))
        folder = source.parent if source.suffix == ".json" else folder_of(source)
        file = source if source.suffix == ".json" else folder / "tokenizer.json"
        return cls(_tokenizer(os.path.realpath(source), _stamps([file])), folder, template)

    def tokenizer(self, prompt: str | Messages | Any) -> Tokenizer:
        """The tokenizer that decodes what follows a prompt.

        Decoders of sentencepiece strip a text's first space: what continues a text keeps it.
        """
        return _continuing(self._tokenizer) if isinstance(prompt, str) else self._tokenizer

    def tokens(
        self,
        prompt: str | Messages | Any,
        *,
        special: bool = True,
        chat: Mapping[str, Any] | None = None,
        name: str = "prompt",
    ) -> list[int]:
        """Returns the tokens of a text, or of a conversation.

        A text gets the `special` tokens that the tokenizer adds, but none at its end.
        """
        is_text = isinstance(prompt, str)
        require(not (is_text and chat), f"chat is for messages, and {name} is a text")
        text = prompt if isinstance(prompt, str) else self._written(prompt, chat)
        require(bool(text), f"{name} is empty; give at least one character")
        with tokenizer_errors(f"{self._name} cannot encode {name}"):
            encoding = self._tokenizer.encode(text, add_special_tokens=is_text and special)
        tokens, added = encoding.ids, encoding.special_tokens_mask
        while added and added[-1]:
            del tokens[-1], added[-1]
        if added[:2] == [1, 0] and tokens[0] == tokens[1]:  # the text has its first token already
            tokens = tokens[1:]
        require(bool(tokens), f"{self._name} gives no tokens for {name}")
        return tokens

    def end_tokens(self, config: ModelConfig, eos_token: Any = None) -> list[int]:
        """Returns the tokens that end a text: ids or texts in `eos_token`, unless it is None."""
        if eos_token is None:
            ends = end_tokens(config, self._folder, self._tokenizer)
            extra = getattr(self._source, "eos_token_id", None)  # of transformers
            return ends if extra is None or extra in ends else [*ends, extra]
        if not isinstance(eos_token, list | tuple):
            eos_token = np.ravel(eos_token).tolist()
        ids = []
        for token in eos_token:
            token_id = self._tokenizer.token_to_id(token) if isinstance(token, str) else token
            if token_id is None:
                raise ValueError(
                    f"eos_token = {shown(token)} is no token of {self._name}; give its id"
                )
            ids.append(check_int("eos_token", token_id, 0, config.vocab_size - 1))
        return ids

    def without_end(self, text: str, tokens: Sequence[int], finish_reason: str) -> str:
        """Returns a text without the token that ended it."""
        if finish_reason != "end_token":
            return text
        return text.removesuffix(_continuing(self._tokenizer).decode([tokens[-1]]))

    def special_token(self, name: str) -> int | None:
        """Returns the token that the files of the checkpoint give a name, such as "bos_token"."""
        token = None if self._folder is None else special_tokens(self._folder).get(name)
        return None if token is None else self._tokenizer.token_to_id(token)

    def template(self, *, tools: Any = None) -> ChatTemplate:
        """Returns the chat template, for conversations with or without tools."""
        if self._template is not None:
            return ChatTemplate(self._template, special_tokens(self._folder or Path()))
        if hasattr(self._source, "get_chat_template"):  # of transformers
            template = self._source.get_chat_template(tools=tools)
            return ChatTemplate(template, self._source.special_tokens_map)
        if self._folder is None:
            raise ValueError(
                "a tokenizer alone has no chat template: pass tokenizer=..., the directory of its"
                " checkpoint"
            )
        return load_chat_template(self._folder, tools=tools is not None)

    def _written(self, messages: Messages | Any, chat: Mapping[str, Any] | None) -> str:
        """A conversation as text."""
        variables = checked_variables(chat)
        return self.template(tools=variables.get("tools")).render(messages, **variables)


@spelled_out
def complete(
    model: Location | HybridLM,
    prompt: str | Messages,
    *,
    tokenizer: Any = None,
    drafter: Location | Drafter | None = None,
    topology: Topology | None = None,
    verifier: str | Verifier | None = None,
    lossy: bool = False,
    to_the_bit: bool = False,
    chat: Mapping[str, Any] | None = None,
    eos_token: int | str | Sequence[int | str] | Any = None,
    **options: Any,
) -> str:
    """Continues a text, or answers the last message of a conversation.

    A text is encoded as the tokenizer does by default, with a token for its beginning if it has
    one. A conversation is written by the checkpoint's chat template. What is loaded by a path is
    kept: the next call with it loads nothing, unless a file there has been replaced.

    Args:
        model: a checkpoint directory or the name of a model on the hub, loaded in float32; or a
            model from `from_pretrained`.
        prompt: a text, or messages such as `[{"role": "user", "content": "Hello"}]`.
        tokenizer: None: the checkpoint's. A directory with one, a tokenizer from `load_tokenizer`,
            or a fast tokenizer of transformers; required if `model` is a model.
        drafter: a path or name of a draft model, or a drafter.
        topology, verifier, lossy, to_the_bit: as in `generate`.
        chat: variables of the chat template, such as `tools` or `enable_thinking`.
        eos_token: ids or texts of tokens. None: the end tokens of the model's config, of
            `generation_config.json` and of the tokenizer.
        **options: as in `generate`, such as `stop=[". "]`.

    Returns:
        The new text, without the end token or the stop.

    Raises:
        ValueError: a bad argument, no tokenizer or no chat template, as `from_pretrained` and
            `generate`.
        NonFiniteLogitsError: as in `generate`.
    """
    Options(**options)
    at: Any = model
    source = tokenizer if _is_path(tokenizer) else None
    if tokenizer is None and _is_path(model):
        source = _folder(at)
    if source is None and tokenizer is None:
        raise ValueError(
            "a model has no tokenizer: pass tokenizer=..., such as the directory of its checkpoint"
        )
    loaded: Any = _model_at(at) if _is_path(model) else model
    check_model(loaded)
    texts = Texts(tokenizer) if source is None else Texts.at(source)
    tokens = texts.tokens(prompt, chat=chat)
    draft: Any = drafter
    if _is_path(draft):
        draft = ModelDrafter(_model_at(draft, draft_dtype(loaded), loaded.partition.mesh))
    out = generate(
        loaded,
        [tokens],
        drafter=draft,
        topology=topology,
        verifier=verifier,
        lossy=lossy,
        to_the_bit=to_the_bit,
        eos_token=texts.end_tokens(loaded.config, eos_token),
        tokenizer=texts.tokenizer(prompt),
        **options,
    )
    assert out.texts is not None
    new = out.tokens[0, : out.lengths[0]].tolist()
    return texts.without_end(out.texts[0], new, out.finish_reasons[0])


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def _folder(path: Location) -> Path:
    import stree_jax.convert as convert  # not imported by `import stree_jax`, to keep that light

    return convert.find(path)


# Of a model's files, those that `from_pretrained` may read.
_READ = ("*.json", "*.safetensors", "*.bin", "*.gguf", "params/**/*")


def _stamps(files: Iterable[Path]) -> tuple[tuple[str, int, int, int], ...]:
    """Returns names, times, sizes and inodes: a file that replaces another one has other ones."""
    stats = [(str(file), file.stat()) for file in sorted(files) if file.is_file()]
    return tuple((name, stat.st_mtime_ns, stat.st_size, stat.st_ino) for name, stat in stats)


def _model_at(path: Location, dtype: Any = jnp.float32, mesh: Mesh | None = None) -> HybridLM:
    path = _folder(path)
    files = [file for pattern in _READ for file in folder_of(path).glob(pattern)]
    return _model(os.path.realpath(path), _stamps(files), dtype, mesh)


@functools.lru_cache(maxsize=4)
def _model(path: str, written: Any, dtype: Any, mesh: Mesh | None) -> HybridLM:
    return from_pretrained(path, dtype=dtype, mesh=mesh, replicate=mesh is not None)


@functools.lru_cache(maxsize=4)
def _tokenizer(path: str, written: Any) -> Tokenizer:
    return load_tokenizer(path)


@functools.lru_cache(maxsize=4)
def _of_whole_texts(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a copy of a tokenizer that neither cuts nor pads."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


@functools.lru_cache(maxsize=4)
def _continuing(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer whose decoder keeps the space that begins a text."""
    if tokenizer.decoder is None:
        return tokenizer
    state = json.loads(tokenizer.decoder.__getstate__())
    wanted = _keeping_spaces(state)
    if wanted == state:
        return tokenizer
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.decoder = decoder_of(wanted)
    return copy


def _keeping_spaces(step: dict[str, Any]) -> dict[str, Any]:
    match step["type"]:
        case "Sequence":
            return step | {"decoders": [_keeping_spaces(part) for part in step["decoders"]]}
        case "Strip":
            return step | {"start": 0}
        case "Metaspace":
            return step | {"prepend_scheme": "never"}
    return step
