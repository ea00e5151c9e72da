"""A target trained on text, a draft distilled from it, and the two decoding together.

    python examples/train_a_pair.py

So small that it takes seconds: the text is made up, and what is learned is its order of words.
`stree-jax train` and `stree-jax distill` do the same with recipes such as `stree_jax/demo/*.toml`.
"""

import random
import tempfile
from pathlib import Path

import stree_jax as st
from stree_jax.training.recipe import Recipe
from stree_jax.training.run import distill, train

RECIPE = """
vocab_size = 300

[model]
d_model = {width}
num_layers = {layers}
head_dim = 16
state_size = 16

[training]
steps = {steps}
batch_size = 8
sequence_length = 32
learning_rate = 1e-2
warmup_steps = 5

[[text]]
path = "text.txt"
document_start = "the "
"""
NEXT = {
    "the": ("cat", "dog", "sun"),
    "cat": ("sat", "ran"),
    "dog": ("ran",),
    "sun": ("rose",),
    "sat": ("on",),
    "ran": ("to",),
    "rose": ("on",),
    "on": ("the", "a"),
    "to": ("the", "a"),
    "a": ("mat", "hill"),
}


def sentences(count: int) -> str:
    """Lines of words that follow each other as `NEXT` says."""
    draw, lines = random.Random(0), []
    for _ in range(count):
        words = ["the"]
        while words[-1] in NEXT and len(words) < 40:
            words.append(draw.choice(NEXT[words[-1]]))
        lines.append(" ".join(words) + ".\n")
    return "".join(lines)


def main(steps: int = 60, num_layers: int = 3) -> None:
    """Trains, distills and decodes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text(sentences(600))
        paths = {}
        for kind, width, layers in (("target", 64, num_layers), ("draft", 32, 1)):
            recipe = folder / f"{kind}.toml"
            recipe.write_text(RECIPE.format(width=width, layers=layers, steps=steps))
            paths[kind] = folder / kind
            if kind == "target":
                run = train(Recipe.load(recipe), paths[kind])
            else:
                run = distill(Recipe.load(recipe), paths["target"], paths[kind])
            losses = [step.loss for step in run]
            print(f"{kind}: loss {losses[0]:.2f} to {losses[-1]:.2f} nats in {steps} steps")

        target, draft = (st.from_pretrained(path) for path in paths.values())
        tokenizer = st.load_tokenizer(paths["target"])
    prompts = [tokenizer.encode("the cat").ids]
    plain = st.generate(target, prompts, max_new_tokens=48)
    out = st.generate(target, prompts, max_new_tokens=48, drafter=st.ModelDrafter(draft))
    print("the cat" + tokenizer.decode(out.tokens[0, : out.lengths[0]].tolist()).split("\n")[0])
    same = (out.tokens == plain.tokens).all()
    print(f"{out.stats.tau:.2f} tokens per target call, same text: {same}")


if __name__ == "__main__":
    main()
