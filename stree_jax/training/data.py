"""Text files to token batches.

A batch is a pure function of seed and step, so a resumed run needs no saved data position.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stree_jax.training.recipe import Text

END_OF_TEXT = "<|endoftext|>"
_HELD_OUT = 0.01  # fraction at the end of each file, for evaluation only


class Corpus(NamedTuple):
    """The token streams of one split, one per file."""

    streams: tuple[np.ndarray, ...]  # uint16 or uint32
    weights: tuple[float, ...]


def train_tokenizer(texts: Sequence[Text], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer. Token 0 is `END_OF_TEXT`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces = (piece for text in texts for piece in _documents(text))
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def load_corpus(texts: Sequence[Text], tokenizer: Tokenizer, window: int) -> tuple[Corpus, Corpus]:
    """Tokenizes the files and returns the training split and the held-out split."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    small = tokenizer.get_vocab_size() <= np.iinfo(np.uint16).max + 1
    train, held_out = [], []
    for text in texts:
        pieces = tokenizer.encode_batch_fast(list(_documents(text)), add_special_tokens=False)
        after = [] if text.document_start is None else [end]
        dtype = np.uint16 if small else np.uint32
        stream = np.concatenate([np.asarray(piece.ids + after, dtype) for piece in pieces])
        split = int(len(stream) * (1 - _HELD_OUT))
        if min(split, len(stream) - split) < window:
            raise ValueError(
                f"{text.path} has {len(stream)} tokens; windows of {window} tokens in both splits"
                f" need {math.ceil(window / _HELD_OUT) + 1}: reduce sequence_length or append"
                " another text to the file"
            )
        train.append(stream[:split])
        held_out.append(stream[split:])
    weights = tuple(text.weight for text in texts)
    return Corpus(tuple(train), weights), Corpus(tuple(held_out), weights)


def batch_at(corpus: Corpus, step: int, seed: int, batch_size: int, length: int) -> np.ndarray:
    """The batch of one step, `[batch_size, length]` int32: windows at random offsets."""
    rng = np.random.default_rng((seed, step))
    weights = np.asarray(corpus.weights) / sum(corpus.weights)
    rows = []
    for source in rng.choice(len(corpus.streams), size=batch_size, p=weights):
        stream = corpus.streams[source]
        start = rng.integers(len(stream) - length + 1)
        rows.append(stream[start : start + length])
    return np.stack(rows).astype(np.int32)


def _documents(text: Text) -> Iterator[str]:
    """The documents of a file; without `document_start`, chunks of 4,096 lines."""
    lines: list[str] = []
    try:
        with open(text.path, encoding="utf-8") as file:
            for line in file:
                if text.document_start is None:
                    full = len(lines) >= 4096
                else:
                    full = bool(lines) and line.startswith(text.document_start)
                if full:
                    yield "".join(lines)
                    lines = []
                lines.append(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"{text.path} is not UTF-8 text: {error}") from error
    yield "".join(lines)
