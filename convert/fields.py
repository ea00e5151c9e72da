"""Typed access to a config file that accounts for every field.

Each field is used, ignored for a stated reason, or refused.
"""

import math
import shlex
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from stree_jax.checks import check_int
from stree_jax.models import RopeScaling

# Fields that any transformers config may have and that do not change what is computed.
TRANSFORMERS = (
    *("_name_or_path", "attn_implementation", "gradient_checkpointing"),
    *("keys_to_ignore_at_inference", "add_cross_attention", "architectures", "auto_map"),
    *("bad_words_ids", "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward"),
    *("cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample"),
    *("dtype", "early_stopping", "encoder_no_repeat_ngram_size"),
    *("exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id"),
    *("forced_eos_token_id", "id2label", "is_decoder", "is_encoder_decoder", "label2id"),
    *("length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups"),
    *("num_beams", "num_return_sequences", "output_attentions", "output_hidden_states"),
    *("output_scores", "pad_token_id", "prefix", "problem_type", "pruned_heads"),
    *("remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate"),
    *("sep_token_id", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss"),
    *("tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript"),
    *("transformers_version", "typical_p", "use_bfloat16", "use_cache", "attention_dropout"),
    "initializer_range",
    *("num_logits_to_keep", "router_aux_loss_coef", "output_router_logits", "pretraining_tp"),
)

_MISSING = object()
MAX_LAYERS = 4096

# Fields by the names of the config here: a field's name, and its default if it has one.
Table = dict[str, tuple[Any, ...]]


def values_of(config: Any, table: Table) -> dict[str, Any]:
    """The inverse of `Fields.read`."""
    return {field: getattr(config, name) for name, (field, *_) in table.items()}


class Fields:
    """A table of config fields. `finish` refuses fields that were neither taken nor ignored.

    A field that is null is refused when it is taken, unless `null` says what it means. All methods
    raise a ValueError that names the file and the field if a value is invalid.

    Args:
        path: path of the file, for messages.
        values: content of the table.
        prefix: prefix of field names in messages, for a table within the file.
        asked: names of unknown fields, with prefix, that the user wants ignored, and whether one
            was found. The tables of a checkpoint share it.
    """

    def __init__(
        self,
        path: Path,
        values: Mapping[str, Any],
        prefix: str = "",
        asked: dict[str, bool] | None = None,
    ):
        self.path = path
        self.values = {name: value for name, value in values.items() if value is not None}
        self._nulls = values.keys() - self.values.keys()
        self._prefix = prefix
        self._asked = {} if asked is None else asked
        self._left = {*self.values}
        self._notes: list[str] = []

    def null(self, *absent: str, **values: Any) -> None:
        """Says of which fields null means that they are absent, or these values."""
        self.values |= {name: value for name, value in values.items() if name in self._nulls}
        self._nulls = self._nulls - {*absent, *values}

    def take(self, name: str, default: Any = _MISSING) -> Any:
        """The value of a field, or the default if it is absent."""
        self._left.discard(name)
        self._refuse_null(name)
        value = self.values.get(name, default)
        self.check(value is not _MISSING, f"{self._prefix}{name} is missing")
        return value

    def _refuse_null(self, name: str) -> None:
        self.check(
            name not in self._nulls or name in self.values,
            f"{self._prefix}{name} is null, which says nothing here: give its value, or leave the"
            " field out",
        )

    def alias(self, table: "Fields | None" = None, /, **names: str) -> None:
        """Reads `new` from `old` where only that is present: `alias(new="old")`.

        `old` is a field of the table, or of this one. Where both are present, they must agree:
        programs differ in which one they take.
        """
        table = self if table is None else table
        for name, old in names.items():
            if old in table._nulls and name not in self.values:
                self._nulls = self._nulls | {name}
            if old in table.values:
                table._left.discard(old)
                again = table.values[old]
                value = self.values.setdefault(name, again)
                self.check(
                    value == again,
                    f"{self._prefix}{name} = {value!r:.200} and {table._prefix}{old} ="
                    f" {again!r:.200} are two names of one thing: leave the wrong one out",
                )

    def integer(
        self, name: str, default: Any = _MISSING, *, least: int = 1, most: int = 1 << 24
    ) -> int:
        """An integer from `least` to `most`."""
        return check_int(
            f"{self.path}: {self._prefix}{name}", self.take(name, default), least, most
        )

    def read(self, table: Table) -> dict[str, Any]:
        """What fields say of a config here: flags, numbers and integers, by their defaults.

        An integer is at least 1, or 0 where 0 is its default.
        """

        def value(name: str, default: Any = _MISSING) -> Any:
            if isinstance(default, bool):
                return self.flag(name, default)
            if isinstance(default, float):
                return self.number(name, default)
            return self.integer(name, default, least=int(default != 0))

        return {name: value(*row) for name, row in table.items()}

    def num_layers(self, *default: int) -> int:
        """`num_hidden_layers`, of which there are not too many to be real."""
        return self.integer("num_hidden_layers", *default, most=MAX_LAYERS)

    def positive(self, name: str, default: float) -> float:
        """A finite number above 0."""
        value = self.number(name, default)
        self._must(value > 0, name, "be a number above 0", value)
        return value

    def number(self, name: str, default: Any = _MISSING) -> float:
        """A finite number."""
        value = _number(self.take(name, default))
        is_good = value is not None and -math.inf < value < math.inf
        self._must(is_good, name, "be a number", self.values.get(name))
        assert value is not None
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of `count` finite numbers; if absent, ones."""
        value = self.take(name, [1.0] * count)
        numbers = [_number(part) for part in value] if isinstance(value, list | tuple) else []
        are_good = len(numbers) == count and not {None, math.inf} & set(numbers)
        self._must(are_good, name, f"be {count} numbers", value)
        return tuple(numbers)  # type: ignore[arg-type]

    def choice(self, name: str, default: str, known: Mapping[str, str]) -> str:
        """A string from `known`, mapped to the library's name."""
        value = self.take(name, default)
        self.check(
            isinstance(value, str) and value in known,
            f"{self._prefix}{name} is {value!r:.80}, not one of {sorted(known)}",
        )
        return known[value]

    def layer_kinds(
        self,
        name: str,
        known: Mapping[str, str],
        num_layers: int | None = None,
        default: Any = _MISSING,
    ) -> tuple[str, ...]:
        """A list with the kind of each layer, mapped to the library's names."""
        value = self.take(name, default)
        is_good = isinstance(value, list) and 0 < len(value) <= MAX_LAYERS
        self._must(is_good, name, "be a list with a kind for each layer", value)
        unknown = sorted(
            {repr(kind)[:40] for kind in value if not isinstance(kind, str) or kind not in known}
        )
        self.check(not unknown, f"{self._prefix}{name} has unknown kinds {unknown!s:.200}")
        self.check(
            num_layers in (None, len(value)),
            f"{name} has {len(value)} entries for num_hidden_layers = {num_layers}",
        )
        return tuple(known[kind] for kind in value)

    def indices(self, name: str, num_layers: int) -> tuple[int, ...]:
        """A list of layer indices; if absent, empty."""
        value = self.take(name, [])
        is_good = isinstance(value, list) and len(value) <= num_layers
        is_good = is_good and all(type(i) is int and 0 <= i < num_layers for i in value)
        self._must(is_good, name, f"be a list of layers below {num_layers}", value)
        return tuple(value)

    def rope(
        self, theta: float = 10000.0, *, plain: bool = False
    ) -> tuple[float, RopeScaling | None, "Fields"]:
        """The base and, unless `plain`, the scaling of RoPE; and the rest of its table."""
        self.null("rope_parameters", "rope_scaling")
        self.alias(rope_parameters="rope_scaling")
        table = self.table("rope_parameters")
        self.alias(table, rope_theta="rope_theta")
        theta = self.number("rope_theta", theta)
        table.alias(rope_type="type")
        kind = table.choice("rope_type", "default", {"default": "default", "llama3": "llama3"})
        self.check(theta > 0, f"rope_theta must be above 0, got {theta}")
        if kind == "default":
            return theta, None, table
        scaling = RopeScaling(
            factor=table.number("factor"),
            low_freq_factor=table.number("low_freq_factor"),
            high_freq_factor=table.number("high_freq_factor"),
            original_length=table.integer("original_max_position_embeddings"),
        )
        return theta, None if plain else scaling, table

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.take(name, default)
        self._must(isinstance(value, bool), name, "be true or false", value)
        return value

    def limits(self, name: str) -> tuple[float, float]:
        """A lower and an upper limit, which may be infinite; absent: 0 and infinity."""
        value = self.take(name, [0.0, math.inf])
        pair = [_number(part) for part in value] if isinstance(value, list | tuple) else []
        self._must(len(pair) == 2 and None not in pair, name, "be two numbers", value)
        return pair[0], pair[1]  # type: ignore[return-value]

    def has(self, name: str) -> bool:
        """True if a field is present."""
        self._refuse_null(name)
        return name in self.values

    def same(self, name: str, value: int | float) -> None:
        """Checks that a redundant field, if present, agrees with `value`."""
        self.null(name)
        if self.has(name):
            again = self.number(name)
            self.check(again == value, f"{self._prefix}{name} = {again:g}, elsewhere {value:g}")

    def tokens(self, name: str, vocab_size: int) -> int | tuple[int, ...] | None:
        """A token id, or several. Ids outside the vocabulary are dropped and noted."""
        self.null(name)
        value = self.take(name, None)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        for token in listed:
            check_int(f"{self.path}: {self._prefix}{name}", token, -(2**31), 2**31 - 1)
        usable = tuple(token for token in listed if 0 <= token < vocab_size)
        if len(usable) < len(listed):
            self._notes.append(f"{name}: {value!r:.80}, only {list(usable)} are in the vocabulary")
        return usable if len(usable) > 1 else (usable[0] if usable else None)

    def table(self, name: str) -> "Fields":
        """A nested table, with its own `finish` and the same notes; if absent, empty."""
        value = self.take(name, {})
        self.check(
            isinstance(value, Mapping), f"{self._prefix}{name} must be a table, got {value!r:.80}"
        )
        table = Fields(self.path, value, f"{self._prefix}{name}.", self._asked)
        table._notes = self._notes
        return table

    def with_own(self, values: Mapping[str, Any], prefix: str) -> "Fields":
        """This table with the fields of a part of the model, such as a layer, before its own.

        `absorb` takes the part back when it has been read.
        """
        every = dict.fromkeys(self._nulls) | self.values | dict(values)
        return Fields(self.path, every, prefix, self._asked)

    def absorb(self, part: "Fields", names: Collection[str]) -> None:
        """Counts what a part has used as used; all its own fields, these names, must be."""
        part._refuse_unknown(part._left & {*names})
        self._left &= part._left
        self._notes += [note for note in part._notes if note not in self._notes]

    def ignore(self, reason: str, *names: str) -> None:
        """Ignores fields. `finish` returns a note for those that are present."""
        found = sorted(self._left & {*names})
        self._left -= {*found}
        self._find(self._prefix + name for name in found)
        if found:
            self._notes.append(f"{', '.join(self._prefix + name for name in found)}: {reason}")

    def finish(self) -> list[str]:
        """Notes on ignored fields; ValueError: there are unknown ones."""
        # transformers' private fields begin with an underscore.
        private = {name for name in self._left if name[:1] == "_"}
        asked = {name for name in private if self._prefix + name in self._asked}
        self._refuse_unknown(self._left - private | asked)
        return self._notes

    def _refuse_unknown(self, left: Collection[str]) -> None:
        """Refuses fields that nothing has used, but those that the user asked to ignore."""
        names = {self._prefix + name for name in left}
        self._notes += [f"{name}: ignored on request" for name in self._find(names)]
        unknown = sorted(names - self._asked.keys())
        options = " ".join(f"--ignore-field {shlex.quote(ascii(name)[1:-1])}" for name in unknown)
        self.check(
            not unknown,
            f"unknown fields {unknown!s:.200}; they might change what is computed. If they do not,"
            f" load it with ignore={tuple(unknown)!s:.100}, on the command line {options:.100}",
        )

    def _find(self, names: Iterable[str]) -> list[str]:
        """The names, with prefix, that the user asked to ignore; they count as found."""
        found = sorted(self._asked.keys() & {*names})
        self._asked.update(dict.fromkeys(found, True))
        return found

    def refuse_asked(self) -> None:
        """Refuses names that the user asked to ignore, and that no table had left."""
        missed = sorted(name for name, found in self._asked.items() if not found)
        self.check(
            not missed,
            f"cannot ignore {missed!s:.200}: only a field that is there, and that nothing reads,"
            " can be ignored",
        )

    def _must(self, condition: bool, name: str, what: str, value: Any) -> None:
        self.check(condition, f"{self._prefix}{name} must {what}, got {value!r:.80}")

    def check(self, condition: bool, message: str) -> None:
        """Raises a ValueError that names the file unless the condition holds."""
        if not condition:
            raise ValueError(f"{self.path}: {message}")


def _number(value: Any) -> float | None:
    """A number; infinity is `Infinity` or transformers 5's `{"__float__": "Infinity"}`."""
    if isinstance(value, Mapping) and set(value) == {"__float__"}:
        return math.inf if value["__float__"] == "Infinity" else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # JSON integers have any size; float() overflows on huge ones.
    return float(value) if is_number and (-1e300 < value < 1e300 or value == math.inf) else None
