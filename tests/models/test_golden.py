"""Texts of the embedded target that must not change: by native code, by XLA, in bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st

# Prompt and text. The best logit is at least 0.03 above the second at each of these tokens, and an
# error of float32 is below 1e-4: there is no near tie.
GOLDEN = {
    "Question: Ann has 3 pens. She buys 4 more.": (
        "996 741 771 260 291 1137 334 568 18 14 1113 294 260 291 1137 334 568 18 14 1113 14 961 789"
        " 1625 874 445 455 1100 31 199 876 26 442 291 1137 334 568 18 14 1113"
    ),
    "def add(a, b):": (
        "337 698 2512 260 2074 297 260 1465 260 2074 297 260 1465 337 2074 297 260 2074 297 260"
        " 1465 2074 297 260 1465 337 2074 297 260 2074 297 260 1465 2074 297 260 1465 337 2074 297"
    ),
    "Write a short story about the sea.": (
        "199 199 2 41 455 364 1633 266 258 262 89 12 477 322 455 364 1633 340 558 498 266 258 262"
        " 89 12 366 41 455 560 2827 336 340 325 260 1071 2686 297 260 516 617"
    ),
}
GAP = 0.03


@pytest.mark.parametrize(
    ("dtype", "is_packed"),
    [
        ("float32", True),
        pytest.param("float32", False, marks=pytest.mark.thorough),
        pytest.param("bfloat16", True, marks=pytest.mark.thorough),
    ],
)
def test_texts_stay(dtype, is_packed):
    target = st.from_pretrained(st.demo_path("target"), dtype=dtype)
    if not is_packed:
        target = target.in_first()
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    prompts = [tokenizer.encode(prompt).ids for prompt in GOLDEN]
    texts = [[int(token) for token in text.split()] for text in GOLDEN.values()]
    out = st.generate(target, prompts, max_new_tokens=len(texts[0]), eos_token=())
    np.testing.assert_array_equal(out.tokens, texts)
    if dtype == "float32":
        rows = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
        most = max(map(len, rows))
        logits = jax.jit(target)(jnp.array([row + [0] * (most - len(row)) for row in rows]))
        for prompt, row, own in zip(prompts, rows, logits, strict=True):
            best = np.sort(own[len(prompt) - 1 : len(row) - 1], axis=-1)
            assert (best[:, -1] - best[:, -2]).min() > GAP
