import numpy as np
import pytest

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "while", "sun", "rose"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text file whose documents start with '# '."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(
        "".join(f"# {i}\n" + " ".join(rng.choice(WORDS, size=30)) + ".\n\n" for i in range(200))
    )
    return path


RECIPE = """
vocab_size = 280
[model]
d_model = 16
num_layers = 2
head_dim = 8
state_size = 8
attention_layers = [1]
[model.attention]
num_heads = 2
num_kv_heads = 1
head_dim = 8
rotary_dim = 4
[model.mlp]
hidden_size = 16
[training]
steps = 6
batch_size = 2
sequence_length = 16
save_every = 2
warmup_steps = 2
[[text]]
path = "words.txt"
document_start = "# "
"""


@pytest.fixture
def recipe_file(text):
    file = text.with_name("recipe.toml")
    file.write_text(RECIPE)
    return file
