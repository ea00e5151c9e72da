"""Config fields that say nothing, and those that the user asks to ignore."""

import functools
import json
import re

import pytest

import stree_jax as st
from stree_jax.convert import Fields, convert, open_checkpoint
from stree_jax.convert.families import describe
from stree_jax.extensions.dflash.conversion import read_config as dflash_config
from stree_jax.extensions.eagle3.conversion import read_config as eagle3_config
from stree_jax.testing import tiny_model
from tests.convert import configs
from tests.convert.checkpoints import CONFIG, WEIGHTS, write_safetensors
from tests.extensions import dflash_files, eagle3_files
from tests.helpers import assert_same_model, by_message, refusal

FAMILIES = {
    "mamba_ssm": configs.MAMBA2ATTN
    | {"attn_cfg": configs.MAMBA2ATTN["attn_cfg"] | {"num_heads": 20, "num_heads_kv": 20}},
    "mamba2": json.loads(configs.CODESTRAL_HF) | {"ssm_cfg": None},
    "bamba": configs.BAMBA_9B,
    "falcon_h1": configs.FALCON_H1_500M | {"mamba_n_heads": 32, "mamba_d_ssm": 2048},
    "granite": configs.GRANITE_350M,
    "nemotron_h": configs.NEMOTRON_3_NANO,
    "puzzle": configs.NEMOTRON_3_NANO
    | {"model_type": "nemotron_h_puzzle"}
    | {"block_configs": [{"block_type": "mamba"}, {"block_type": "attention", "window": None}]},
    "omni": {"model_type": "nemotron_h_omni", "llm_config": configs.NEMOTRON_H_8B}
    | {"text_config": None},
    "qwen3_next": configs.QWEN3_NEXT | {"num_hidden_layers": 4},
    "qwen3_5": configs.QWEN3_5_27B,
    "lfm2": configs.LFM2_2B | {"layer_types": None},
    "lfm2_moe": configs.LFM2_8B,
    "lfm3": configs.LFM3_2B | {"layer_types": None},
    "zamba2": configs.ZAMBA2_2B | {"lora_rank": None},
    "mamba_in_llama": configs.MAMBA_IN_LLAMA_8B[0],
    "codestral": {"dim": 64, "n_layers": 1, "vocab_size": 48, "n_heads": None},
}


def with_novel(part, value):
    """A config with one more field in every table."""
    if isinstance(part, dict):
        novel = {"novel": value} if "__float__" not in part else {}
        return {name: with_novel(each, value) for name, each in part.items()} | novel
    return [with_novel(each, value) for each in part] if isinstance(part, list) else part


@pytest.mark.parametrize("name", FAMILIES)
def test_a_null_field_says_nothing(name, tmp_path):
    """In any table of any family; another value there is refused."""
    path = tmp_path / "config.json"
    files = {path: FAMILIES[name]}
    if name == "mamba_in_llama":
        files[tmp_path / "mamba_config.json"] = configs.MAMBA_IN_LLAMA_8B[1]

    def read(value=..., ignore=()):
        for file, content in files.items():
            file.write_text(json.dumps(content if value is ... else with_novel(content, value)))
        asked = dict.fromkeys(ignore, False)
        return describe(path, json.loads(path.read_text()), {}, (), asked)

    assert read(None).config == read().config
    found = []
    for _ in range(20):  # each table and block refuses its own
        try:
            description = read(1, found)
        except ValueError as error:
            (listed,) = re.findall(r"unknown fields \[(.*?)\]; they might", str(error))
            found += [each.strip("'") for each in listed.split(", ")]
    assert description.config == read().config
    assert {f"{each}: ignored on request" for each in found} <= {*description.notes}


# What null is in transformers, or in mamba_ssm; "=" and a name: the value of that field.
MEANINGS = {
    "mamba_ssm": {"attn_cfg.num_heads_kv": "=attn_cfg.num_heads", "attn_cfg.softmax_scale": ...}
    | {"ssm_cfg.d_ssm": ..., "attn_layer_idx": [], "attn_cfg.head_dim": 128},
    "bamba": {"num_key_value_heads": "=num_attention_heads", "attn_layer_indices": []},
    "falcon_h1": {
        "num_key_value_heads": "=num_attention_heads",
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": False,
        "mamba_proj_bias": False,
        "projectors_bias": False,
        "mamba_d_ssm": 2048,
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0] * 2,
    },
    "granite": {
        "num_key_value_heads": "=num_attention_heads",
        "attention_multiplier": 64**-0.5,
        "layer_types": ["mamba"] * 32,
        "position_embedding_type": "nope",
    },
    "nemotron_h": {"num_key_value_heads": "=num_attention_heads", "moe_latent_size": ...},
    "qwen3_next": {"layer_types": ..., "mlp_only_layers": []},
    "qwen3_5": {"layer_types": ...},
    "lfm2": {"layer_types": ...},
    "lfm3": {"layer_types": ..., "num_key_value_heads": ...},
    "zamba2": {"num_key_value_heads": "=num_attention_heads", "intermediate_size": 4 * 2560}
    | {"time_step_limit": ...},
    "mamba_in_llama": {"num_key_value_heads": "=num_attention_heads", "head_dim": ...},
}
EVERYWHERE = dict.fromkeys(
    (
        "eos_token_id",
        "rope_scaling",
        "rope_parameters",
        "sliding_window",
        "max_position_embeddings",
    ),
    ...,
)


def changed(values, name, value):
    """A config with another value of a field, perhaps in a table; `...`: without it."""
    outer, _, inner = name.rpartition(".")
    table = dict(values[outer] if outer else values)
    table.pop(inner, None)
    table |= {} if value is ... else {inner: value}
    return values | {outer: table} if outer else table


def path_of(name, folder):
    """The path of a config, with what lies beside it."""
    if name == "mamba_in_llama":
        (folder / "mamba_config.json").write_text(json.dumps(configs.MAMBA_IN_LLAMA_8B[1]))
    return folder / "config.json"


@pytest.mark.parametrize("name", [each for each in FAMILIES if each not in ("puzzle", "omni")])
def test_null_is_what_a_family_says_or_refused(name, tmp_path):
    """Each field of each family."""
    path, values = path_of(name, tmp_path), json.loads(json.dumps(FAMILIES[name]))

    def read(values):
        return describe(path, values, {}).config

    inner = [
        f"{key}.{name}"
        for key, table in values.items()
        if isinstance(table, dict)
        for name in table
    ]
    refused = {}
    meanings = MEANINGS.get(name, {})
    for field in sorted({*values, *inner, *meanings}):
        null = changed(values, field, None)
        is_refused = (name, field) == ("lfm3", "sliding_window")  # transformers fails later
        leaf = field.rpartition(".")[2]
        if not is_refused and (leaf in EVERYWHERE or field in meanings):
            meaning = meanings.get(field, EVERYWHERE.get(leaf))
            if isinstance(meaning, str) and meaning[0] == "=":
                outer, _, key = meaning[1:].rpartition(".")
                meaning = (values[outer] if outer else values)[key]
            assert read(null) == read(changed(values, field, meaning)), field
            continue
        try:
            assert read(null) == read(values), field  # nothing reads it
        except ValueError as error:
            refused[field] = str(error)
    assert len(refused) >= 3
    for field, message in refused.items():
        null = f"{field.rpartition('.')[2]} is null, which says nothing here"
        is_table = isinstance(values.get(field), dict)
        assert is_table or null in message or "is of no known family" in message


OF_HEADS = {
    "eagle3": (
        eagle3_config,
        eagle3_files.CONFIG
        | {"vocab_size": 37, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}},
    ),
    "dflash": (dflash_config, dflash_files.files()[0]),
}
NAMED_TWICE = FAMILIES | {name: values for name, (_, values) in OF_HEADS.items()}
NAMED_TWICE |= {"qwen3_5": configs.QWEN3_5_27B["text_config"]}
for family in ("olmo_hybrid", "lara_mini"):
    of_family = {"model_type": family, "rope_parameters": {"rope_theta": 5}}
    NAMED_TWICE[family] = configs.TRANSFORMERS[family] | of_family


@pytest.mark.parametrize("name", NAMED_TWICE)
def test_two_names_of_one_thing_agree_or_are_refused(name, tmp_path, monkeypatch):
    """All aliases that a reader has, by its own word."""
    values, path = json.loads(json.dumps(NAMED_TWICE[name])), path_of(name, tmp_path)
    pairs, alias = set(), Fields.alias
    if name == "mamba_in_llama":
        values["rope_parameters"] = values.pop("rope_scaling")

    def noted(self, *table, **names):
        (holder,) = table or (self,)
        pairs.update((self._prefix + new, holder._prefix + old) for new, old in names.items())
        alias(self, *table, **names)

    def read(*said):
        config = values
        for field, value in said:
            outer = field.rpartition(".")[0]
            config = changed({outer: {}} | config if outer else config, field, value)
        if name not in OF_HEADS:
            return describe(path, config, {}).config
        return OF_HEADS[name][0](Fields(path, config), tiny_model("nemotron_h hybrid"), False)

    monkeypatch.setattr(Fields, "alias", noted)
    plain = read()
    if name == "omni":  # the reader names it where both are there
        pairs.add(("text_config", "llm_config"))
    assert pairs or name in ("mamba_ssm", "mamba2", "codestral")
    for pair in sorted(pairs):
        both = {"rope_theta": 5}, {"rope_theta": 5, "more": 1}
        with pytest.raises(ValueError, match="are two names of one thing") as error:
            read(*zip(pair, both, strict=True))
        assert all(str(word) in str(error.value) for word in (*pair, *both)), pair
        for field in pair:
            outer, _, inner = field.rpartition(".")
            known = (values.get(outer) or {} if outer else values).get(inner)
            if known is not None:
                assert read(*((each, known) for each in pair)) == plain, pair


@pytest.mark.parametrize(
    ("name", "taken", "left"),
    [
        (
            "lfm2",
            {"block_ff_dim": 512, "tie_embedding": False, "layer_types": ["conv"] * 30},
            {"intermediate_size": 1024, "tie_word_embeddings": True, "full_attn_idxs": [1]},
        ),
        ("nemotron_h", {"layers_block_type": ["mamba"]}, {"hybrid_override_pattern": "M-" * 26}),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 4}, {"full_attention_interval": 2}),
    ],
)
def test_of_two_fields_transformers_one_is_taken(name, taken, left, tmp_path):
    values = {k: v for k, v in FAMILIES[name].items() if k not in taken | left}
    one, two, both = (
        describe(tmp_path / "config.json", values | said, {}).config
        for said in (taken, left, taken | left)
    )
    assert both == one != two


UNSLOTH = {"unsloth_fixed": True, "unsloth_version": "2025.1"}


@pytest.fixture
def tuned(tmp_path):
    """A checkpoint with fields of a fine-tuning program."""
    return write_safetensors(tmp_path / "tuned", CONFIG | UNSLOTH, WEIGHTS)


def test_a_refused_field_may_be_ignored_by_its_name(tuned, tmp_path):
    ways = r"ignore=\('unsloth_fixed', 'unsloth_version'\), .* --ignore-field unsloth_fixed --ig"
    refusal(ways, st.from_pretrained, tuned)
    plain = st.from_pretrained(write_safetensors(tmp_path / "plain", CONFIG, WEIGHTS))
    assert_same_model(st.from_pretrained(tuned, ignore=[*UNSLOTH]), plain)
    convert(tuned, tmp_path / "native", ignore={*UNSLOTH})
    assert_same_model(st.from_pretrained(tmp_path / "native"), plain)
    notes = open_checkpoint(tuned, ignore=(*UNSLOTH,)).ignored
    assert "unsloth_fixed: ignored on request" in notes


@by_message(
    ("ignore", "message"),
    [
        ("unsloth_fixed", "ignore must be a list of names, got 'unsloth_fixed'"),
        ([1], r"ignore must be a list of names, got \[1\]"),
        ({"unsloth_fixed": 1}, "ignore must be a list of names, got {"),
        (["unsloth_fixed"], r"unknown fields \['unsloth_version'\]"),
        ([*UNSLOTH, "d_model"], r"cannot ignore \['d_model'\]: only a field that is there, and"),
        ([*UNSLOTH, "ssm_cfg.headdim"], r"cannot ignore \['ssm_cfg.headdim'\]"),
        ([*UNSLOTH, "ssm_cfg.unsloth_fixed"], "cannot ignore"),
    ],
)
def test_what_cannot_be_ignored(ignore, message, tuned, tmp_path):
    for load in (st.from_pretrained, functools.partial(convert, destination=tmp_path / "out")):
        refusal(message, load, tuned, ignore=ignore)
    assert not (tmp_path / "out").exists()


def test_native_checkpoints_have_no_field_to_ignore(tuned, tmp_path):
    native = tmp_path / "native"
    convert(tuned, native, ignore=[*UNSLOTH])
    target = st.from_pretrained(native)
    for load in (
        st.from_pretrained,
        functools.partial(convert, destination=tmp_path / "out"),
        functools.partial(st.load_mtp, target=target),
    ):
        refusal(
            "is native; ignored fields are for checkpoints of",
            load,
            native,
            ignore=["unsloth_fixed"],
        )
    refusal(
        "quirks must be a list of names, got 'hf_dt_floor'",
        st.from_pretrained,
        tuned,
        quirks="hf_dt_floor",
    )


def test_heads(tmp_path):
    """EAGLE-3 heads have a config of their own; that of a target's own head is the target's."""
    target = tiny_model("nemotron_h hybrid")
    null = {"novel": None, "rope_scaling": {"rope_type": "default", "novel": None}}
    st.load_eagle3(eagle3_files.saved(tmp_path / "null", null), target)
    head = eagle3_files.saved(tmp_path / "head", UNSLOTH)
    refusal("unknown fields .*unsloth_fixed", st.load_eagle3, head, target)
    st.load_eagle3(head, target, ignore=[*UNSLOTH])
    refusal(
        r"cannot ignore \['hidden_size'\]",
        st.load_eagle3,
        head,
        target,
        ignore=[*UNSLOTH, "hidden_size"],
    )
    scaled = eagle3_files.saved(tmp_path / "scaled", {"rope_scaling": {"mscale": 2.0}})
    refusal(r"unknown fields \['rope_parameters.mscale'\]", st.load_eagle3, scaled, target)
