"""Recipes and texts that training refuses."""

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stree_jax import ModelConfig, load_tokenizer
from stree_jax.training.recipe import Recipe, Text, Training
from stree_jax.training.run import train
from tests.training.conftest import RECIPE


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "words.txt",
            "nowhere.txt",
            r"\[\[text\]\] 1: path = .*nowhere\.txt.*, which does not exist",
        ),
        ("words.txt", "w" * 5000, r"\[\[text\]\] 1: path = .*, which does not exist"),
        (
            "steps = 6",
            "steps = 6\npaces = 6",
            r"\[training\] has no field 'paces'; known: batch_size,",
        ),
        ("steps = 6", "", r"\[training\] lacks 'steps'"),
        ("steps = 6", "steps = 0", r"steps must be an integer, from 1 to \d+; got 0"),
        ("steps = 6", f"steps = {10**20}", r"\[training\]: steps must be .*; got 10{20}$"),
        ("steps = 6", f"steps = {'9' * 5000}", "is not TOML: Exceeds the limit"),
        ("batch_size = 2", f"batch_size = {10**20}", "batch_size must be .*; got 10{20}$"),
        (
            "steps = 6",
            "steps = 6\nlearning_rate = -1.0",
            "learning_rate must be a number >= 0, got -1",
        ),
        ("[[text]]", "[[text]]\nweight = 0.0", "weight of words.txt must be a number > 0"),
        ("[[text]]", "[[text]]\ncolour = 5", r"\[\[text\]\] 1 has no field 'colour'; known: doc"),
        (
            "steps = 6",
            "steps = 6\ngenerated = 2.0",
            "generated must be a fraction from 0 to 1, got 2",
        ),
        (
            "steps = 6",
            'steps = 6\nproducts = "int8"',
            r"products must be one of \('float32', 'bfloat16'\), got 'int8'",
        ),
        (
            "steps = 6",
            "steps = 6\ndecay_steps = 5",
            "decay_steps must be at most steps - warmup_steps = 4, got 5",
        ),
        ("[[text]]", "[[book]]", "has no text"),
        ("[[text]]", "[text]", "has no text"),
        (
            "vocab_size",
            "source = 5\nvocab_size",
            "recipe.toml has no field 'source'; known: model,",
        ),
        ("vocab_size", "vocabulary", "recipe.toml has no field 'vocabulary'; known: model, seed,"),
        ("vocab_size = 280", "seed = -1", "recipe.toml: seed must be .* from 0 to .* got -1"),
        ("[model]", "[model", "is not TOML"),
        ("vocab_size = 280", f"x = {'[' * 5000}{']' * 5000}", "is not TOML: maximum recursion"),
        ('path = "words.txt"', "", r"\[\[text\]\] 1 lacks 'path'"),
        ("d_model", "depth", r"recipe.toml, \[model\]: .*'d"),
        ("d_model = 16", "d_model = 16\ndepth = 3", r"recipe.toml, \[model\]: .*'depth'"),
        ("num_layers = 2", f"num_layers = {10**20}", r"recipe.toml, \[model\]: num_layers must be"),
        ("280", "100", "vocab_size must be an integer, from 257 to"),
        (
            "sequence_length = 16",
            "sequence_length = 999",
            r"words\.txt has \d+ tokens; windows of 1000 tokens in both splits need",
        ),
    ],
)
def test_recipes_that_are_refused(recipe_file, tmp_path, old, new, message):
    recipe_file.write_text(RECIPE.replace(old, new, 1))
    with pytest.raises(ValueError, match=message) as refused:
        list(train(Recipe.load(recipe_file), tmp_path / "out", command=""))
    assert len(str(refused.value)) < 500
    assert not (tmp_path / "out").exists()


WRONG_TYPES = [
    ("steps = 6", "steps = 2024-01-01", r"steps must be .*; got datetime.date\(2024, 1, 1\)"),
    ("steps = 6", "steps = []", r"steps must be .*; got \[\]"),
    ("steps = 6", "steps = 6\nlearning_rate = nan", "learning_rate must be .* finite, got nan"),
    ("steps = 6", "steps = 6\nclip_norm = true", "clip_norm must be .* finite, got True"),
    (
        "steps = 6",
        f"steps = 6\nlearning_rate = {10**40}",
        r"\[training\]: learning_rate must be float and finite, got 10{40}$",
    ),
    ("[[text]]", "[[text]]\nweight = 'much'", "weight must be float and finite, got 'much'"),
    ("[[text]]", "[[text]]\nlicence = 5", r"recipe.toml, \[\[text\]\] 1: licence must be str"),
    ("vocab_size = 280", "vocab_size = []", r"recipe.toml: vocab_size must be .* got \[\]"),
    (
        "d_model = 16",
        f"d_model = {10**20}",
        r"recipe.toml, \[model\]: d_model must be .*; got 10{20}$",
    ),
    ("num_layers = 2", "num_layers = nan", r"\[model\]: num_layers must be .*; got nan"),
    ("[1]", "1", r"\[model\]: attention_layers must be a list of layers, got 1"),
    ("[1]", "[2024-01-01]", r"\[model\]: attention_layers has \[datetime.date\(2024, 1, 1\)\]"),
    ("num_heads = 2", "num_heads = 2.5", r"\[model\]: num_heads must be .*got 2.5"),
    ("[model.mlp]", "[[model.mlp]]", r"\[model\]: MlpConfig needs a table of fields"),
]
IN_A_PROCESS = """
import json, pathlib, re, sys
from stree_jax.training import Recipe, train

file = pathlib.Path(sys.argv[1])
recipe = file.read_text()
for old, new, message in json.load(sys.stdin):
    file.write_text(recipe.replace(old, new, 1))
    try:
        list(train(Recipe.load(file), file.with_name("out"), command=""))
    except ValueError as error:
        assert re.search(message, str(error)), (new, str(error))
    else:
        raise AssertionError(new)
"""


def test_wrong_types_are_refused(recipe_file):
    """In a process without the shape checker, which would raise first."""
    command = [sys.executable, "-c", IN_A_PROCESS, recipe_file]
    subprocess.run(command, input=json.dumps(WRONG_TYPES).encode(), check=True)


def test_a_recipe_that_is_not_utf_8(recipe_file):
    recipe_file.write_bytes(b"# caf\xe9")
    with pytest.raises(ValueError, match="recipe.toml is not TOML: 'utf-8' codec can't decode"):
        Recipe.load(recipe_file)


def test_a_refused_run_does_not_block_the_corrected_one(recipe_file, tmp_path):
    """Its tokenizer is not used either: the corrected recipe may have another vocabulary."""
    recipe_file.write_text(RECIPE.replace("sequence_length = 16", "sequence_length = 999"))
    with pytest.raises(ValueError, match="windows of 1000 tokens"):
        list(train(Recipe.load(recipe_file), tmp_path / "out", command=""))
    recipe_file.write_text(RECIPE.replace("280", "270").replace("steps = 6", "steps = 1"))
    assert len(list(train(Recipe.load(recipe_file), tmp_path / "out", command=""))) == 1
    assert load_tokenizer(tmp_path / "out").get_vocab_size() == 270


def test_a_recipe_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cannot read the recipe"):
        Recipe.load(tmp_path / "other.toml")


def test_an_output_that_is_no_checkpoint_is_refused(recipe_file, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="is not a stree-jax checkpoint of this kind; choose"):
        list(train(Recipe.load(recipe_file), tmp_path / "notes", command=""))
    assert (tmp_path / "notes" / "thesis.txt").read_text() == "precious"


def test_the_page_has_all_fields():
    """And no others; the model's are those of `mamba2_lm`."""
    page = (Path(__file__).parents[2] / "docs/recipe.md").read_text()
    cells = re.findall(r"^\| (`.+?) \|", page, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`\[*([\w.]+)\]*`", cell)}
    fields = {f.name for cls in (Recipe, Training, Text) for f in dataclasses.fields(cls)}
    model = set(inspect.signature(ModelConfig.mamba2_lm).parameters)
    model = model - {"mixer", "eos_token", "attention", "mlp"} | {"model.attention", "model.mlp"}
    assert named == (fields - {"source"}) | model
