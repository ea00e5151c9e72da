"""Recipes and texts that training refuses."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from stree_jax import ModelConfig, load_tokenizer
from stree_jax.heads import part_of
from stree_jax.testing import tiny_model
from stree_jax.training import train
from stree_jax.training.recipe import Recipe, Text, Training
from tests.helpers import by_message, refusal
from tests.training.conftest import RECIPE

# What is replaced, what by (a line that begins with "+" is added after it), and the message.
REFUSED = [
    ("words.txt", "nowhere.txt", r"\[\[text\]\] 1: path = .*nowhere\.txt.*, which does not exist"),
    ("[training]", "+paces = 6", r"\[training\] has no field 'paces'; known: batch_size,"),
    ("steps = 6", "", r"\[training\] lacks 'steps'"),
    ("steps = 6", "steps = 0", r"steps must be an integer, from 1 to \d+; got 0"),
    ("steps = 6", f"steps = {'9' * 5000}", "is not TOML: Exceeds the limit"),
    ("[training]", "+learning_rate = -1.0", "learning_rate must be a number >= 0, got -1"),
    ("[training]", '+products = "int8"', r"products must be one of \('float32', 'bfloat16'\), got"),
    ("[training]", "+decay_steps = 5", "decay_steps must be at most steps - warmup.* = 4, got 5"),
    ("[[text]]", "[[book]]", "has no text"),
    ("vocab_size = 280", "seed = -1", "recipe.toml: seed must be .* from 0 to .* got -1"),
    ('path = "words.txt"', "", r"\[\[text\]\] 1 lacks 'path'"),
    ("d_model", "depth", r"recipe.toml, \[model\]: .*'d"),
    ("d_model = 16", "num_heads = 2", r"recipe.toml, \[model\]: .*'d_model'"),
    ("280", "100", "vocab_size must be an integer, from 257 to"),
]


def changed(old, new):
    """The recipe with a line replaced or added."""
    return RECIPE.replace(old, f"{old}\n{new[1:]}" if new.startswith("+") else new, 1)


@by_message(("old", "new", "message"), REFUSED)
def test_recipes_that_are_refused(recipe_file, tmp_path, old, new, message):
    recipe_file.write_text(changed(old, new))
    with pytest.raises(ValueError, match=message) as refused:
        list(train(Recipe.load(recipe_file), tmp_path / "out"))
    assert len(str(refused.value)) < 500
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["medusa", "mtp", "dflash"])
def test_recipes_of_models_are_not_of_heads(recipe_file, kind):
    with pytest.raises(ValueError, match=r"\[model\] has (num_heads alone|steps|layers).*d_model"):
        part_of(kind, "training").plan(Recipe.load(recipe_file), tiny_model())


def test_a_block_is_shorter_than_a_row_of_training(recipe_file):
    table = "inner_layers = [1]\nblock_size = 17\nshifted = true\nmlp = {hidden_size = 8}\n"
    table += "attention = {num_heads = 2, num_kv_heads = 1, head_dim = 8}\n"
    text = "[model]\n" + table + RECIPE[RECIPE.index("[training]") :]
    recipe_file.write_text(text)
    with pytest.raises(ValueError, match="a block has 17 drafts, and a row 16 tokens"):
        part_of("dflash", "training").plan(Recipe.load(recipe_file), tiny_model())


@pytest.mark.thorough
def test_a_refused_run_does_not_block_the_corrected_one(recipe_file, tmp_path):
    """Its tokenizer is not used either: the corrected recipe may have another vocabulary."""
    recipe_file.write_text(RECIPE.replace("sequence_length = 16", "sequence_length = 999"))
    refusal(
        r"words\.txt has \d+ tokens; windows of 1000 tokens in both",
        list,
        train(Recipe.load(recipe_file), tmp_path / "out"),
    )
    recipe_file.write_text(RECIPE.replace("280", "270").replace("steps = 6", "steps = 1"))
    assert len(list(train(Recipe.load(recipe_file), tmp_path / "out"))) == 1
    assert load_tokenizer(tmp_path / "out").get_vocab_size() == 270


@by_message(
    ("content", "message"),
    [(b"# caf\xe9", "is not TOML: 'utf-8' codec can't decode"), (None, "cannot read the recipe")],
)
def test_files_that_are_no_recipes(content, message, tmp_path):
    if content is not None:
        (tmp_path / "recipe.toml").write_bytes(content)
    refusal(message, Recipe.load, tmp_path / "recipe.toml")


def test_an_output_that_is_no_checkpoint_is_refused(recipe_file, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("precious")
    refusal(
        "is not a stree-jax checkpoint of this kind; choose",
        list,
        train(Recipe.load(recipe_file), tmp_path / "notes"),
    )
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
