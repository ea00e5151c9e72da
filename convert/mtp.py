"""Multi-token-prediction heads of Nemotron-3 checkpoints: `mtp.*` beside the target's tensors."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax import nnx

from stree_jax.checkpoint.arrays import Tensor
from stree_jax.convert.fields import Fields
from stree_jax.convert.rules import TRANSPOSED, Rule, check_coverage
from stree_jax.convert.tables import hf_attention, nemotron_experts, within
from stree_jax.heads import abstract_head
from stree_jax.layer_config import AttentionConfig, MoeConfig
from stree_jax.models.mtp import MtpConfig
from stree_jax.names import flatten

PREFIXES = ("mtp.", "backbone.mtp.", "model.mtp.")
_PATTERN = ("attention", "moe")
_LETTERS = {"*": "attention", "E": "moe"}
# Fields of training only.
TRAINING = ("mtp_use_repeated_layer", "keep_mtp_spec_in_bf16", "mtp_loss_scaling_factor")
_OF_PUZZLE = ("mtp_block_configs", "mtp_n_routed_experts")
_KEYS = ("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern")


class MtpDescription(NamedTuple):
    """The head of a checkpoint, according to its config.

    Attributes:
        config: its config; None: it cannot be read.
        rules: the tensors of its weights.
        problem: why it cannot be read; None: it can.
    """

    config: MtpConfig | None
    rules: list[Rule]
    problem: str | None = None

    def prefixed(self, prefix: str) -> "MtpDescription":
        """The head in a checkpoint whose names begin with `prefix`."""
        rules = [
            rule._replace(source=tuple(prefix + name for name in rule.sources))
            for rule in self.rules
        ]
        return self._replace(rules=rules)


def is_of_head(name: str) -> bool:
    """Whether a tensor is one of a head."""
    return name.startswith(PREFIXES)


def read_mtp(
    fields: Fields,
    tensors: Mapping[str, Tensor],
    d_model: int,
    norm_eps: float,
    attention: Callable[[], AttentionConfig],
    experts: Callable[[], MoeConfig],
) -> MtpDescription | None:
    """Describes the head of a checkpoint; None: it neither has one nor says so.

    What is wrong with a head does not keep the target from being read.

    Args:
        fields: the config.
        tensors: all tensors by name; empty: those of the config are not checked.
        d_model, norm_eps: of the target.
        attention, experts: functions that read these parts of the config, the target's own.
    """
    fields.ignore("of the multi-token prediction head, see load_mtp", *_KEYS, *_OF_PUZZLE)
    fields.ignore("used in training only", *TRAINING)
    own = {name: tensor for name, tensor in tensors.items() if is_of_head(name)}
    try:
        number = _number(fields)
        if not number and not own:
            return None
        fields.check(
            number == 1,
            f"num_nextn_predict_layers = {number} with {len(own)} tensors of a multi-token"
            " prediction head; only checkpoints with one head are supported",
        )
        _check_pattern(fields)
        for name in _OF_PUZZLE:
            fields.check(
                fields.values.get(name) is None,
                f"{name}: heads of Puzzle checkpoints are not supported",
            )
        shared = fields.values.get("n_shared_experts", 1)
        fields.check(shared == 1, f"n_shared_experts = {shared!r:.80} in a head, not 1")
        fields.check(
            bool(own) or not tensors,
            "num_nextn_predict_layers = 1, but the files have no tensors mtp.*: this copy has no"
            " multi-token prediction head (transformers drops it when it saves); take the original",
        )
        config = MtpConfig(d_model, attention(), experts(), norm_eps)
        rules = mtp_rules(config, _prefix(own))
        if tensors:
            weights = nnx.to_pure_dict(nnx.state(abstract_head(config)))
            shapes = {name: tuple(leaf.shape) for name, leaf in flatten(weights).items()}
            rules = check_coverage(rules, [], own, shapes)
    except ValueError as error:
        return MtpDescription(None, [], str(error))
    return MtpDescription(config, rules)


def mtp_rules(config: MtpConfig, prefix: str = "mtp.") -> list[Rule]:
    """The tensors of a head of the pattern attention, experts, by the names of `MtpHead`.

    Raises:
        ValueError: another head, which the format has no place for.
    """
    if not isinstance(config.feed_forward, MoeConfig):
        raise ValueError(
            f"a head with {config.feed_forward.kind!r} after its attention has no place in"
            " Nemotron's format, which has experts there"
        )
    first, last = f"{prefix}layers.0", f"{prefix}layers.1"
    experts = nemotron_experts(config.feed_forward, merged=False)
    return [
        Rule(f"{first}.enorm.weight", "embedding_norm_scale"),
        Rule(f"{first}.hnorm.weight", "hidden_norm_scale"),
        Rule(f"{first}.eh_proj.weight", "in_proj.kernel", TRANSPOSED),
        Rule(f"{first}.norm.weight", "attention_norm_scale"),
        *within(hf_attention(config.attention), f"{first}.mixer", "attention"),
        Rule(f"{last}.norm.weight", "feed_forward_norm_scale"),
        *within(experts, f"{last}.mixer", "feed_forward"),
        Rule(f"{last}.final_layernorm.weight", "final_norm_scale"),
    ]


def written_mtp() -> dict[str, Any]:
    """The fields that say that a checkpoint has a head."""
    return {"num_nextn_predict_layers": 1, "mtp_layers_block_type": list(_PATTERN)}


def _number(fields: Fields) -> int:
    number = fields.values.get("num_nextn_predict_layers") or 0
    fields.check(
        type(number) is int and number >= 0,
        f"num_nextn_predict_layers must be a number of heads, got {number!r:.80}",
    )
    return number


def _check_pattern(fields: Fields) -> None:
    """Either key, or both if they agree; attention and experts are the only pattern."""
    listed = fields.values.get("mtp_layers_block_type")
    letters = fields.values.get("mtp_hybrid_override_pattern")
    found = {}
    if listed is not None:
        names = listed if isinstance(listed, list) else [listed]
        found["mtp_layers_block_type"] = tuple(
            "attention" if name == "full_attention" else name for name in names
        )
    if letters is not None:
        found["mtp_hybrid_override_pattern"] = tuple(_LETTERS.get(x, x) for x in str(letters))
    fields.check(
        len(found) < 2 or len({*found.values()}) == 1,
        f"mtp_layers_block_type = {listed!r:.80} and mtp_hybrid_override_pattern ="
        f" {letters!r:.80} contradict each other; keep the one that is right",
    )
    for name, pattern in found.items():
        fields.check(
            pattern == _PATTERN,
            f"{name} = {fields.values[name]!r:.80}: only a head of attention and experts is"
            " supported",
        )


def _prefix(tensors: Mapping[str, Tensor]) -> str:
    """The prefix of the tensors of a head; of several, one whose rules then do not fit."""
    found = [prefix for prefix in PREFIXES if any(name.startswith(prefix) for name in tensors)]
    return found[0] if found else PREFIXES[0]
