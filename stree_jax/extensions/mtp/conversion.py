"""Published multi-token-prediction heads: `mtp.*` beside the target's tensors.

The format here is Nemotron-3's; Qwen's is in `qwen`, and Ling 3's with its target's.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stree_jax import AttentionConfig, HybridLM, LayerConfig, MoeConfig
from stree_jax.convert import (
    AS_IS,
    TRANSPOSED,
    Checkpoint,
    Fields,
    HeadDescription,
    Rule,
    Transform,
    head_rules,
    hf_attention,
    load_head_weights,
    nemotron_experts,
    open_checkpoint,
    within,
)
from stree_jax.extensions.mtp.head import MtpConfig, MtpHead
from stree_jax.heads import abstract_head, check_fits

PREFIXES = ("mtp.", "backbone.mtp.", "model.mtp.")
_MERGED = "layers.1.mixer.experts.up_proj"  # all experts in one tensor
_NORMS = ("attention", "feed_forward", "embedding", "hidden", "final")
# Fields of training only.
TRAINING = ("mtp_use_repeated_layer", "keep_mtp_spec_in_bf16", "mtp_loss_scaling_factor")
_OF_PUZZLE = ("mtp_block_configs", "mtp_n_routed_experts")
_KEYS = ("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern")


def load(path: Path, target: HybridLM, ignore: Collection[str]) -> MtpHead:
    """Reads the head of a checkpoint, in the target's dtype."""
    return of_checkpoint(open_checkpoint(path, ignore=ignore), target)


def of_checkpoint(checkpoint: Checkpoint, target: HybridLM) -> MtpHead:
    """Reads the head of an open checkpoint, in the target's dtype."""
    head, path = checkpoint.description.mtp, checkpoint.path
    if head is None:
        raise ValueError(
            f"{path} has no multi-token prediction head: it has no tensors of one, and its config"
            " does not say num_nextn_predict_layers = 1 or mtp_num_hidden_layers = 1; take a"
            " checkpoint with one (copies that transformers saved have lost theirs), or train one:"
            " stree-jax train-mtp RECIPE TARGET OUTPUT"
        )
    if head.config is None:
        raise ValueError(
            f"the multi-token prediction head in {path} cannot be read: {head.problem}"
        )
    model, config = checkpoint.description.config, target.config
    check_fits(
        f"the model of the head in {path}",
        "load the target from the same checkpoint",
        width=(model.d_model, config.d_model),
        tokens=(model.num_embeddings, config.num_embeddings),
    )
    like = abstract_head("mtp", head.config, target)
    return load_head_weights(checkpoint._replace(rules=head.rules), like)


def is_of_head(name: str) -> bool:
    """True if a tensor is one of a head."""
    return name.startswith(PREFIXES)


def read(
    fields: Fields,
    tensors: Mapping[str, Any],
    d_model: int,
    norm_eps: float,
    attention: Callable[[], AttentionConfig],
    experts: Callable[[], MoeConfig],
) -> HeadDescription | None:
    """Describes the head of a checkpoint, of whose config `attention` and `experts` read parts."""
    fields.ignore("of the multi-token prediction head, see load_mtp", *_KEYS, *_OF_PUZZLE)
    fields.ignore("used in training only", *TRAINING)
    head_tensors = {name: tensor for name, tensor in tensors.items() if is_of_head(name)}

    def config_and_rules() -> tuple[MtpConfig, list[Rule]]:
        listed: list[Any] = [["attention", "moe"], ["full_attention", "moe"]]
        for name, known in zip(_KEYS[1:], (listed, ["*E"]), strict=True):
            value = fields.values.get(name)
            fields.check(
                value is None or value in known,
                f"{name} = {value!r:.80}: only a head of attention and experts is supported",
            )
        for name in _OF_PUZZLE:
            fields.check(
                fields.values.get(name) is None,
                f"{name}: heads of Puzzle checkpoints are not supported",
            )
        shared = fields.values.get("n_shared_experts", 1)
        fields.check(shared == 1, f"n_shared_experts = {shared!r:.80} in a head, not 1")
        config = MtpConfig(d_model, attention(), experts(), norm_eps)
        # Of several prefixes one whose rules then do not fit.
        prefix = next(
            (x for x in PREFIXES if any(name.startswith(x) for name in head_tensors)), PREFIXES[0]
        )
        return config, rules_of(config, prefix, merged=f"{prefix}{_MERGED}" in head_tensors)

    number = fields.values.get(_KEYS[0]) or 0
    return described(fields, tensors, head_tensors, _KEYS[0], number, config_and_rules)


def described(
    fields: Fields,
    tensors: Mapping[str, Any],
    head_tensors: Mapping[str, Any],
    key: str,
    number: Any,
    config_and_rules: Callable[[], tuple[MtpConfig, list[Rule]]],
) -> HeadDescription | None:
    """Describes as many heads as a config's key says, by `config_and_rules`; None: there is none.

    What is wrong with a head does not keep the target from being read. Without tensors those of
    the config are not checked.
    """
    if number == 0 and not head_tensors:
        return None
    try:
        fields.check(
            number == 1,
            f"{key} = {number!r:.80} with {len(head_tensors)} tensors of a multi-token prediction"
            " head; only checkpoints with one head are supported",
        )
        fields.check(
            bool(head_tensors) or not tensors,
            f"{key} = 1, but the files have no tensors of one: this copy has no multi-token"
            " prediction head (transformers drops it when it saves); take the original",
        )
        config, rules = config_and_rules()
        if tensors:
            rules = head_rules(rules, head_tensors, abstract_head("mtp", config))
    except ValueError as error:
        return HeadDescription(None, [], str(error))
    return HeadDescription(config, rules)


def layer_rules(
    config: MtpConfig,
    layer: str,
    outside: Sequence[str],
    rules_of: Callable[[LayerConfig], Iterable[Rule]],
    norm: Transform = AS_IS,
) -> list[Rule]:
    """Returns rules for a head that is one more layer of its target, with Llama's names.

    `outside` are the names of the norms of the embedding, of the state and after the layer, and of
    the product before it; `rules_of` gives a part's rules by names within the layer.
    """
    *norms, product = f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", *outside
    rules = [Rule(f"{product}.weight", "in_proj.kernel", TRANSPOSED)]
    for name, part in zip(norms, _NORMS, strict=True):
        rules.append(Rule(f"{name}.weight", f"{part}_norm_scale", norm))
    for part in _NORMS[:2]:
        rules += within(rules_of(getattr(config, part)), layer, part)
    return rules


def rules_of(config: MtpConfig, prefix: str = "mtp.", *, merged: bool = False) -> list[Rule]:
    """Returns rules for a head's attention and experts, by names of `MtpHead`."""
    assert isinstance(config.attention, AttentionConfig)
    assert isinstance(config.feed_forward, MoeConfig)
    first, last = f"{prefix}layers.0", f"{prefix}layers.1"
    experts = nemotron_experts(config.feed_forward, merged=merged)
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
