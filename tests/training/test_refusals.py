"""Recipes and texts that training refuses."""

import pytest

from stree_jax.training.recipe import Recipe
from stree_jax.training.run import train
from tests.training.conftest import RECIPE


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("words.txt", "nowhere.txt", r"nowhere\.txt, which does not exist"),
        ("steps = 6", "steps = 6\npaces = 6", "paces"),
        ("steps = 6", "steps = 0", "steps must be an integer, at least 1; got 0"),
        (
            "steps = 6",
            "steps = 6\nlearning_rate = -1.0",
            "learning_rate must be a number >= 0, got -1",
        ),
        ("[[text]]", "[[text]]\nweight = 0.0", "weight of .*words.txt must be a number > 0"),
        (
            "steps = 6",
            "steps = 6\ngenerated = 2.0",
            "generated must be a fraction from 0 to 1, got 2",
        ),
        (
            "steps = 6",
            "steps = 6\ndecay_steps = 5",
            "decay_steps must be at most steps - warmup_steps = 4, got 5",
        ),
        ("[[text]]", "[[book]]", "has no text"),
        ("vocab_size", "vocabulary", "vocabulary"),
        ("[model]", "[model", "is not TOML"),
        ('path = "words.txt"', "", "'path'"),
        ("d_model", "depth", r"the recipe's \[model\] table is invalid"),
        ("280", "100", "at least 257"),
        (
            "sequence_length = 16",
            "sequence_length = 999",
            r"words\.txt has \d+ tokens; windows of 1000 tokens in both splits need",
        ),
    ],
)
def test_recipes_that_are_refused(recipe_file, tmp_path, old, new, message):
    recipe_file.write_text(RECIPE.replace(old, new))
    with pytest.raises(ValueError, match=message):
        list(train(Recipe.load(recipe_file), tmp_path / "out", command=""))
    assert not (tmp_path / "out").exists()


def test_a_recipe_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cannot read the recipe"):
        Recipe.load(tmp_path / "other.toml")


def test_an_output_that_is_no_checkpoint_is_refused(recipe_file, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="is not a stree-jax checkpoint of this kind; choose"):
        list(train(Recipe.load(recipe_file), tmp_path / "notes", command=""))
    assert (tmp_path / "notes" / "thesis.txt").read_text() == "precious"
