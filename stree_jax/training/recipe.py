"""A recipe: everything that a training run depends on, in one TOML file.

seed = 0
vocab_size = 4096                     # of the byte-level BPE tokenizer that is trained first

[model]                               # arguments of ModelConfig.mamba2_lm but vocab_size
d_model = 256
num_layers = 6
attention_layers = [2, 5]             # none, for pure Mamba-2

[model.attention]                     # fields of AttentionConfig, for these layers
num_heads = 4
num_kv_heads = 2
head_dim = 64
rotary_dim = 64

[training]                            # fields of Training
steps = 3000
batch_size = 16

[[text]]                              # fields of Text, one table a file
path = "gsm8k_train.txt"              # relative to the recipe
weight = 2.0
document_start = "Question: "
licence = "MIT"
"""

import dataclasses
import hashlib
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Text:
    """One text file.

    Attributes:
        path: the file.
        weight: share of the batches, relative to the other files.
        document_start: a line that starts with this begins a new document; None: one document.
        licence: of the text, for the model card.
    """

    path: str
    weight: float = 1.0
    document_start: str | None = None
    licence: str = "not stated"

    def __post_init__(self) -> None:
        if not (isinstance(self.weight, int | float) and 0 < self.weight < math.inf):
            raise ValueError(f"weight of {self.path} must be a number above 0, got {self.weight!r}")


@dataclasses.dataclass(frozen=True)
class Training:
    """The optimisation.

    Attributes:
        steps: updates of the weights.
        batch_size, sequence_length: tokens of a step are their product.
        learning_rate: peak of a cosine schedule that starts with `warmup_steps` of linear rise.
        warmup_steps, weight_decay, clip_norm: AdamW's, with the gradient clipped to `clip_norm`.
        save_every: steps between checkpoints; an interruption loses at most these.
        generated: distillation only: the share of each batch whose second half the target writes
            itself, at temperature 1 in even steps and 0 in odd ones. A draft is used on such text.
    """

    steps: int
    batch_size: int = 16
    sequence_length: int = 256
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    save_every: int = 100
    generated: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (
            ("steps", 1),
            ("batch_size", 1),
            ("sequence_length", 2),
            ("save_every", 1),
            ("warmup_steps", 0),
        ):
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= least):
                raise ValueError(f"{name} must be an integer from {least} on, got {value!r}")
        for name in ("learning_rate", "weight_decay", "clip_norm", "generated"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise ValueError(f"{name} must be a number from 0 on, got {value!r}")
        if self.generated > 1:
            raise ValueError(f"generated is a share from 0 to 1, got {self.generated}")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """See the module."""

    model: Mapping[str, Any]
    training: Training
    text: tuple[Text, ...]
    vocab_size: int = 4096
    seed: int = 0

    @classmethod
    def load(cls, path: Path) -> "Recipe":
        """Reads a recipe file.

        Raises:
            ValueError: the file is missing, is not TOML, or has fields that are unknown or missing.
        """
        try:
            values = tomllib.loads(path.read_text())
        except OSError as error:
            raise ValueError(f"cannot read the recipe {path}: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path} is not TOML: {error}") from error
        texts = values.get("text")
        if not isinstance(texts, list) or not texts:
            raise ValueError(f"{path} names no text: add a [[text]] table with a path")
        try:
            recipe = cls(
                **values
                | {
                    "training": Training(**values.get("training", {})),
                    "text": tuple(
                        Text(**text | {"path": str(path.parent / text["path"])}) for text in texts
                    ),
                }
            )
        except (TypeError, KeyError) as error:
            raise ValueError(f"{path}: {error}") from error
        for text in recipe.text:
            if not Path(text.path).is_file():
                raise ValueError(f"{path} names the text {text.path}, which does not exist")
        return recipe

    def fingerprint(self) -> dict[str, Any]:
        """What a run depends on, as JSON values: two runs with the same do the same."""
        values = dataclasses.asdict(self)
        for text, source in zip(values["text"], self.text, strict=True):
            text["path"] = Path(source.path).name
            with open(source.path, "rb") as file:
                text["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
        return values
