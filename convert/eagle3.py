"""EAGLE-3 heads in files: a config and `midlayer.*`, `fc`, `norm`, `lm_head`, `d2t`, `t2d`."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from stree_jax.checkpoint.arrays import Tensor
from stree_jax.checkpoint.files import read_json
from stree_jax.checkpoint.load import is_finite
from stree_jax.checks import check_names
from stree_jax.convert.families import layout
from stree_jax.convert.fields import TRANSFORMERS, Fields
from stree_jax.convert.files import open_tensors
from stree_jax.convert.rules import AS_IS, TRANSPOSED, Rule, check_coverage
from stree_jax.convert.tables import hf_attention, split_mlp, within
from stree_jax.layer_config import AttentionConfig, MlpConfig
from stree_jax.mesh.weights import as_weight
from stree_jax.messages import first_line
from stree_jax.models.eagle3 import Eagle3Config, Eagle3Head
from stree_jax.models.lm import HybridLM, check_on_one_device
from stree_jax.names import flatten, unflatten

_ARCHITECTURE = "Eagle3"  # the end of every name in `architectures`


class _Files(NamedTuple):
    config: Eagle3Config
    rules: list[Rule]
    tensors: dict[str, Tensor]


def load_eagle3_head(
    path: Path, target: HybridLM, ignore: Collection[str] | Any = ()
) -> Eagle3Head:
    """Reads a head for its target, in the target's dtype.

    Args:
        path: directory of the head.
        target: the model that it is for, on one device.
        ignore: names of unknown config fields to ignore.

    Raises:
        ValueError: the checkpoint is damaged, not an EAGLE-3 head, unsupported, or of a model of
            another size.
    """
    check_on_one_device(target, "an EAGLE-3 head")
    files = _open(path, len(target.config.layers), ignore)
    config = files.config
    have, want = ((each.d_model, each.vocab_size) for each in (config, target.config))
    if have != want:
        raise ValueError(
            f"the EAGLE-3 head in {path} is of a model of width {have[0]} with {have[1]} tokens,"
            f" and the target has {want[0]} and {want[1]}; load the target that it was trained for"
        )
    options: dict[str, Any] = dict(dtype=target.dtype, implementation=target.implementation)
    structure, state = nnx.split(
        nnx.eval_shape(lambda: Eagle3Head(config, rngs=nnx.Rngs(0), **options))
    )
    wanted = nnx.to_pure_dict(state)
    dtypes = {name: leaf.dtype for name, leaf in flatten(wanted).items()}
    loaded = {"tokens": jnp.asarray(_tokens(path, files), jnp.float32)}
    for rule in files.rules:
        parts = [_read(path, files.tensors, name) for name in rule.sources]
        loaded[rule.target] = as_weight(rule.transform.apply(*parts), dtypes[rule.target])
        if not is_finite(rule.target, loaded[rule.target]):
            raise ValueError(f"{path}: {' or '.join(rule.sources)} holds NaN or infinity")
    return nnx.merge(structure, unflatten(loaded, wanted))


def _open(path: Path, num_layers: int, ignore: Collection[str]) -> _Files:
    """The config, the rules and the tensors of a head; reads no weights."""
    names = layout(path)
    file = path / names.config
    values = read_json(file)
    known = values.get("architectures")
    listed = known if isinstance(known, list) else []
    if not listed or not all(_ARCHITECTURE in str(name) for name in listed):
        raise ValueError(
            f"{path} is not an EAGLE-3 head: its architectures are {known!r:.80}; a head of"
            " Nemotron-3's own is for load_mtp"
        )
    _, tensors = open_tensors(path, *names)
    asked = dict.fromkeys(check_names("ignore", ignore), False)
    fields = Fields(file, values, asked=asked)
    config = read_eagle3(fields, num_layers, "embed_tokens.weight" in tensors)
    fields.refuse_asked()
    head = nnx.eval_shape(lambda: Eagle3Head(config, rngs=nnx.Rngs(0)))
    weights = flatten(nnx.to_pure_dict(nnx.state(head)))
    del weights["tokens"]
    shapes = {name: tuple(leaf.shape) for name, leaf in weights.items()}
    own = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    try:
        rules = check_coverage(eagle3_rules(config), [], own, shapes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return _Files(config, rules, tensors)


def read_eagle3(fields: Fields, num_layers: int, has_embedding: bool) -> Eagle3Config:
    """The config of a head.

    Args:
        fields: its config.json.
        num_layers: layers of the target, from which the default inner layers follow.
        has_embedding: whether there is an embedding among its tensors.
    """
    eagle = fields.table("eagle_config")
    layers = eagle.take(
        "eagle_aux_hidden_state_layer_ids",
        fields.take("eagle_aux_hidden_state_layer_ids", [2, num_layers // 2, num_layers - 3]),
    )
    fields.check(
        isinstance(layers, list)
        and len(layers) > 0
        and all(type(layer) is int and 1 <= layer <= num_layers for layer in layers)
        and layers == sorted({*layers}),
        "eagle_aux_hidden_state_layer_ids must be ascending numbers of the target's"
        f" {num_layers} layers, got {layers!r:.80}",
    )
    fields.check(
        not eagle.flag("norm_before_fc", fields.flag("norm_before_fc", False)),
        "norm_before_fc = true is not supported",
    )
    before = eagle.flag("norm_before_residual", fields.flag("norm_before_residual", False))
    eagle.flag("use_aux_hidden_state", True)
    width = fields.integer("hidden_size")
    fields.same("target_hidden_size", width)
    fields.same("num_hidden_layers", 1)
    num_heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", max(1, width // num_heads))
    theta, scaling, table = fields.rope()
    table.finish()
    bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    fields.check(not bias and not mlp_bias, "biases in an EAGLE-3 head are not supported")
    vocab_size = fields.integer("vocab_size")
    config = Eagle3Config(
        d_model=width,
        vocab_size=vocab_size,
        draft_vocab_size=fields.integer("draft_vocab_size", vocab_size),
        inner_layers=tuple(layers),
        attention=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            input_multiple=2,
            rotary_dim=head_dim,
            rope_theta=theta,
            rope_scaling=scaling,
        ),
        mlp=MlpConfig(
            fields.integer("intermediate_size"),
            activation=fields.choice("hidden_act", "silu", {"silu": "silu"}),
        ),
        norm_eps=fields.positive("rms_norm_eps", 1e-5),
        norm_before_residual=before,
        has_embedding=has_embedding,
    )
    fields.ignore(
        "of transformers, not of the head",
        *TRANSFORMERS,
        *("model_type", "max_position_embeddings", "initializer_range", "tie_word_embeddings"),
        *("eos_token_id", "eagle_module", "speculators_config"),
    )
    eagle.finish()
    fields.finish()
    return config


def eagle3_rules(config: Eagle3Config) -> list[Rule]:
    """The tensors of a head, by the names of `Eagle3Head`."""
    return [
        Rule("fc.weight", "fc.kernel", TRANSPOSED),
        Rule("embed_tokens.weight", "embedding", AS_IS),
        Rule("midlayer.input_layernorm.weight", "embedding_norm_scale"),
        Rule("midlayer.hidden_norm.weight", "hidden_norm_scale"),
        *within(hf_attention(config.attention), "midlayer.self_attn", "attention"),
        Rule("midlayer.post_attention_layernorm.weight", "mlp_norm_scale"),
        *within(split_mlp(config.mlp), "midlayer.mlp", "mlp"),
        Rule("norm.weight", "final_norm_scale"),
        Rule("lm_head.weight", "output_head"),
    ]


def _tokens(path: Path, files: _Files) -> np.ndarray:
    """The target's token for each of the head's: its own index plus the offset in `d2t`."""
    config, own = files.config, np.arange(files.config.draft_vocab_size)
    if "d2t" in files.tensors:
        offsets = _read(path, files.tensors, "d2t")
        if offsets.shape != own.shape or offsets.dtype.kind != "i":
            raise ValueError(
                f"{path}: d2t must have an integer for each of the {len(own)} tokens of the head,"
                f" got {offsets.dtype} {offsets.shape!s:.80}"
            )
        own = own + offsets
    elif config.draft_vocab_size != config.vocab_size:
        raise ValueError(
            f"{path}: d2t is missing, and the head has {config.draft_vocab_size} of the target's"
            f" {config.vocab_size} tokens"
        )
    inside = (own >= 0) & (own < config.vocab_size)
    if not inside.all() or len({*own.tolist()}) < len(own):
        raise ValueError(f"{path}: d2t maps tokens of the head twice, or outside the vocabulary")
    if "t2d" in files.tensors:
        drafted = np.asarray(_read(path, files.tensors, "t2d"))
        if drafted.shape != (config.vocab_size,) or not np.isin(drafted, (0, 1)).all():
            raise ValueError(
                f"{path}: t2d must be true or false for each of the {config.vocab_size} tokens"
            )
        if {*np.flatnonzero(drafted).tolist()} != {*own.tolist()}:
            raise ValueError(f"{path}: t2d and d2t contradict each other")
    return own


def _read(path: Path, tensors: dict[str, Tensor], name: str) -> np.ndarray:
    try:
        return tensors[name].read()
    except Exception as error:  # for example, a file truncated since it was opened
        raise ValueError(f"{path}: cannot read {name}: {first_line(error)}") from error
