"""The tables of rules of all families, for reading and writing."""

from collections.abc import Callable, Iterable, Sequence

from stree_jax.convert.rules import (
    AS_IS,
    CONV,
    EACH_TRANSPOSED,
    TRANSPOSED,
    Rule,
    Transform,
    gathered,
    sections,
    stacked,
    stacked_pairs,
)
from stree_jax.models import AttentionConfig, LayerConfig, Mamba2Config, MlpConfig, MoeConfig
from stree_jax.models.config import ModelConfig


def within(rules: Iterable[Rule], source: str, target: str = "") -> list[Rule]:
    """The rules with prefixes on both sides."""
    return [rule.within(source, target) for rule in rules]


def linear(
    source: str | tuple[str, ...], target: str, transform: Transform = TRANSPOSED
) -> list[Rule]:
    """A projection with an optional bias; several of one input are fused by their transform."""
    names = (source,) if isinstance(source, str) else source
    return [
        Rule(tuple(f"{name}.{there}" for name in names), f"{target}.{here}", transform)
        for there, here in (("weight", "kernel"), ("bias", "bias"))
    ]


# The Mamba-2 mixer has the same names in all families.
MIXER = (
    *linear("in_proj", "in_proj"),
    Rule("conv1d.weight", "conv_weight", CONV),
    Rule("conv1d.bias", "conv_bias"),
    Rule("A_log", "A_log"),
    Rule("D", "D"),
    Rule("dt_bias", "dt_bias"),
    Rule("norm.weight", "norm_scale"),
    *linear("out_proj", "out_proj"),
)


def hf_attention(
    config: AttentionConfig, *, out: str = "o_proj", norm: str | None = None
) -> list[Rule]:
    """Attention in the format of transformers; `norm` ends the names of its norms, if it has any.

    A gate is LFM3's.
    """
    names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    sizes: tuple[int, ...] = config.projected_sizes
    if config.output_gate:
        names, sizes = ("gate_proj", *names), (config.gate_size, *sizes)
    norms = [] if norm is None else [Rule(f"{x}_{norm}.weight", f"{x}_norm_scale") for x in "qk"]
    return [*linear(names, "in_proj", gathered(sizes)), *linear(out, "out_proj"), *norms]


def mamba_ssm_attention(config: AttentionConfig) -> list[Rule]:
    """mamba_ssm's MHA has rows q, k, v, up, gate; ours are q, k, v, gate, up."""
    sizes = (sum(config.projected_sizes), config.mlp_dim, config.mlp_dim)
    return [
        *linear("in_proj", "in_proj", gathered([sum(sizes)], sections(sizes, (0, 2, 1)))),
        Rule("conv1d.weight", "conv_weight", CONV),
        Rule("conv1d.bias", "conv_bias"),
        *linear("out_proj", "out_proj"),
    ]


def mamba_ssm_mlp(config: MlpConfig) -> list[Rule]:
    """mamba_ssm's gated MLP: its rows are up, gate; ours are gate, up."""
    halves = sections((config.hidden_size, config.hidden_size), (1, 0))
    return [
        *linear("fc1", "in_proj", gathered([2 * config.hidden_size], halves)),
        *linear("fc2", "out_proj"),
    ]


# Names of gated projections: gate, up and down.
GATED = ("gate_proj", "up_proj", "down_proj")
GATED_BY_NUMBER = ("w1", "w3", "w2")


def split_mlp(config: MlpConfig, names: tuple[str, str, str] = GATED) -> list[Rule]:
    """A gated MLP with separate gate and up projections."""
    halves = gathered((config.hidden_size, config.hidden_size))
    return [*linear(names[:2], "in_proj", halves), *linear(names[2], "out_proj")]


def split_experts(count: int, names: tuple[str, str, str] = GATED) -> list[Rule]:
    """Gated experts, stored one by one."""
    gate, up, down = (tuple(f"experts.{i}.{name}.weight" for i in range(count)) for name in names)
    return [
        Rule((*gate, *up), "experts_in", stacked_pairs(count)),
        Rule(down, "experts_out", stacked(count)),
    ]


GRANITE_MLP = [*linear("input_linear", "in_proj"), *linear("output_linear", "out_proj")]
NEMOTRON_MLP = [*linear("up_proj", "in_proj"), *linear("down_proj", "out_proj")]

# Granite's names in files, and those that transformers 5 gives the same tensors in memory.
GRANITE_NAMES = (
    ("input_linear.weight", "output_linear.weight", "router.layer.weight"),
    ("experts.gate_up_proj", "experts.down_proj", "router.weight"),
)


def granite_experts(names: tuple[str, str, str]) -> list[Rule]:
    """Granite's experts, with one of `GRANITE_NAMES`."""
    into, out, router = (f"block_sparse_moe.{name}" for name in names)
    return [
        Rule(into, "experts_in", EACH_TRANSPOSED),
        Rule(out, "experts_out", EACH_TRANSPOSED),
        Rule(router, "router", TRANSPOSED),
        *within(GRANITE_MLP, "shared_mlp", "shared"),
    ]


def nemotron_experts(config: MoeConfig, *, merged: bool) -> list[Rule]:
    """Nemotron-H's experts: one by one as in files, or `merged` as transformers 5 holds them."""

    def experts(name: str, target: str) -> Rule:
        if merged:
            return Rule(f"experts.{name}", target, EACH_TRANSPOSED)
        names = tuple(f"experts.{i}.{name}.weight" for i in range(config.num_experts))
        return Rule(names, target, stacked(config.num_experts))

    return [
        experts("up_proj", "experts_in"),
        experts("down_proj", "experts_out"),
        Rule("gate.weight", "router", TRANSPOSED),
        Rule("gate.e_score_correction_bias", "correction"),
        *linear("fc1_latent_proj", "latent_in"),
        *linear("fc2_latent_proj", "latent_out"),
        *within(NEMOTRON_MLP, "shared_experts", "shared"),
    ]


def outside(
    final_norm: str, embedding: str, norm: Transform = AS_IS, prefix: str = ""
) -> list[Rule]:
    """The weights around the layers, by their names."""
    return [
        Rule(f"{final_norm}.weight", "final_norm_scale", norm),
        Rule(f"{embedding}.weight", "embedding"),
        Rule(f"{prefix}lm_head.weight", "head"),
    ]


def mamba_ssm(config: ModelConfig, *, embedding: str, prefix: str = "") -> list[Rule]:
    """mamba_ssm, transformers' mamba2 and Codestral, which differ in a few names.

    A layer "mlp" belongs to the source layer of the mixer before.
    """
    rules: list[Rule] = []
    layer = -1
    for block, kind in enumerate(config.kinds):
        layer += kind != "mlp"
        source, target = f"{prefix}backbone.layers.{layer}", f"blocks.{block}"
        norm = "norm2" if kind == "mlp" else "norm"
        rules.append(Rule(f"{source}.{norm}.weight", f"{target}.norm_scale", AS_IS))
        if kind == "mlp":
            assert config.mlp is not None
            rules += within(mamba_ssm_mlp(config.mlp), f"{source}.mlp", f"{target}.mixer")
        elif kind == "attention":
            assert config.attention is not None
            table = mamba_ssm_attention(config.attention)
            rules += within(table, f"{source}.mixer", f"{target}.mixer")
        else:
            rules += within(MIXER, f"{source}.mixer", f"{target}.mixer")
    backbone = f"{prefix}backbone"
    return [*rules, *outside(f"{backbone}.norm_f", f"{backbone}.{embedding}", prefix=prefix)]


def in_pairs(
    config: ModelConfig,
    rules_of: Callable[[LayerConfig], Iterable[Rule]],
    *,
    mlp_norm: str,
    final_norm: str,
    mixer_norm: str = "input_layernorm",
    after: tuple[str, str] = ("", ""),
    norm: Transform = AS_IS,
) -> list[Rule]:
    """Models with Llama's names, whose source layers are a mixer and an MLP.

    `rules_of` gives a layer's rules by names within the source layer and the mixer; `after` are the
    names of norms after a mixer and an MLP.
    """
    rules: list[Rule] = []
    for block, layer in enumerate(config.layers):
        source, target = f"model.layers.{block // 2}", f"blocks.{block}"
        name = (after if layer.norm_after else (mixer_norm, mlp_norm))[block % 2]
        rules.append(Rule(f"{source}.{name}.weight", f"{target}.norm_scale", norm))
        if config.sandwich_norms:
            rules.append(Rule(f"{source}.{after[block % 2]}.weight", f"{target}.post_norm_scale"))
        rules += within(rules_of(layer), source, f"{target}.mixer")
    return [*rules, *outside(f"model.{final_norm}", "model.embed_tokens", norm)]


def llama_like(
    config: ModelConfig, *, mlp: Sequence[Rule], mlp_norm: str, final_norm: str
) -> list[Rule]:
    """`in_pairs` with Mamba-2, attention, or both in parallel, and this MLP behind."""

    def rules_of(layer: LayerConfig) -> Iterable[Rule]:
        if layer.kind in ("mlp", "moe"):
            return mlp
        mamba = within(MIXER, "mamba")
        if layer.kind == "mamba2":
            return mamba
        assert config.attention is not None
        attention = within(hf_attention(config.attention), "self_attn")
        if layer.kind == "attention":
            return attention
        return within(mamba, "", "mamba2") + within(attention, "", "attention")

    return in_pairs(config, rules_of, mlp_norm=mlp_norm, final_norm=final_norm)


def nemotron_h(
    config: ModelConfig, prefix: str = "backbone", *, merged: bool = False
) -> list[Rule]:
    """Nemotron-H: each layer is one mixer or one MLP, named "mixer" either way.

    The prefix is "backbone" in files, "model" in memory of transformers 5 and in files of Puzzle.
    """
    rules: list[Rule] = []
    for i, layer in enumerate(config.layers):
        source, target = f"{prefix}.layers.{i}", f"blocks.{i}"
        rules.append(Rule(f"{source}.norm.weight", f"{target}.norm_scale"))
        match layer:
            case Mamba2Config():
                table = list(MIXER)
            case AttentionConfig():
                table = hf_attention(layer)
            case MlpConfig():
                table = NEMOTRON_MLP
            case MoeConfig():
                table = nemotron_experts(layer, merged=merged)
            case _:
                raise ValueError(f"Nemotron-H has no layers {layer.kind!r}")
        rules += within(table, f"{source}.mixer", f"{target}.mixer")
    return [*rules, *outside(f"{prefix}.norm_f", f"{prefix}.embeddings")]


def zamba2(config: ModelConfig) -> list[Rule]:
    """Zamba2: each shared block is stored once, in the first layer that uses it."""
    attention, shared = config.attention, config.shared
    assert attention is not None
    assert shared is not None
    rules: list[Rule] = []
    layer = num_uses = 0
    homes: list[str] = []  # where the shared blocks are stored
    for block, kind in enumerate(config.kinds):
        source, target = f"model.layers.{layer}", f"blocks.{block}"
        if kind == "shared":
            if num_uses < shared.num_blocks:
                homes.append(f"{source}.shared_transformer")
            home = homes[num_uses % shared.num_blocks]
            mixer = f"{target}.mixer"
            rules.append(Rule(f"{source}.linear.weight", f"{mixer}.out_proj.kernel", TRANSPOSED))
            adapters = [(f"feed_forward.gate_up_proj_adapter_list.{num_uses}", "mlp_adapter")]
            adapters += [
                (f"self_attn.linear_{name}_adapter_list.{num_uses}", f"qkv_adapters.{i}")
                for i, name in enumerate("qkv")
            ]
            for name, adapter in adapters:
                for i, part in enumerate(("down", "up")):
                    rules += linear(f"{home}.{name}.{i}", f"{mixer}.{adapter}.{part}")
            num_uses += 1
            continue
        if block and config.kinds[block - 1] == "shared":
            source = f"{source}.mamba_decoder"
        rules.append(Rule(f"{source}.input_layernorm.weight", f"{target}.norm_scale"))
        rules += within(MIXER, f"{source}.mamba", f"{target}.mixer")
        layer += 1
    for i, home in enumerate(homes):
        target = f"shared.{i}"
        rules.append(Rule(f"{home}.input_layernorm.weight", f"{target}.norm_scale"))
        rules.append(Rule(f"{home}.pre_ff_layernorm.weight", f"{target}.mlp_norm_scale"))
        rules += within(hf_attention(attention), f"{home}.self_attn", f"{target}.attention")
        feed_forward = [*linear("gate_up_proj", "in_proj"), *linear("down_proj", "out_proj")]
        rules += within(feed_forward, f"{home}.feed_forward", f"{target}.mlp")
    return [*rules, *outside("model.final_layernorm", "model.embed_tokens")]
