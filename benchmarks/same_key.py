"""Is sampled text the same with drafts and without, and how close were the tokens where it is not?

The embedded pair, float32. Rows with keys of their own are decoded autoregressively and with a
chain, tree A, beams and prompt lookup, at several temperatures and filters. Texts are compared up
to their first difference. The gap of a difference is how far the two tokens' `log p + noise` are
apart, by the logits of a sequence; tokens that top-p leaves out have an infinite one. Exit code 1
if a gap is finite and above 1e-3, which would be no near tie.

    python -m benchmarks.same_key [--compared 100000] [--rows 32] [--tokens 96]
"""

import argparse
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import stree_jax as st
from benchmarks.common import conclude, print_table, progress_bar, read_options, save
from benchmarks.models import Pair, embedded_pair
from stree_jax.decoding.options import buffer_size
from stree_jax.decoding.sampling import filtered_logits, position_noise
from stree_jax.decoding.types import Sampling

NEAR = 1e-3
SETTINGS: tuple[dict[str, Any], ...] = (
    *({"temperature": t} for t in (0.3, 0.7, 1.0, 1.3)),
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 8},
)


def methods(draft: st.HybridLM) -> dict[str, dict[str, Any]]:
    """Options of `generate` for each way to draft."""
    drafter = st.ModelDrafter(draft)
    return {
        "chain of 4": {"drafter": drafter, "topology": st.TreeTopology.chain(4)},
        "tree A": {"drafter": drafter, "topology": st.TreeTopology.paper("A")},
        "3 beams of 4": {
            "drafter": st.BeamDrafter(draft),
            "topology": st.TreeTopology.beam(3, 4),
        },
        "prompt lookup": {"drafter": st.NgramDrafter()},
    }


def gap(
    target: st.HybridLM,
    text: list[int],
    emitted: int,
    key: jax.Array,
    setting: dict[str, Any],
    tokens: tuple[int, int],
) -> float:
    """How far two tokens are apart in `log p + noise` after a text with so many emitted tokens."""
    padded = np.zeros((1, buffer_size(len(text))), np.int32)
    padded[0, : len(text)] = text
    logits, _ = _read(target, jnp.asarray(padded), jnp.array([len(text)], jnp.int32))
    vocab_size = target.config.vocab_size
    sampling = Sampling(
        jnp.array([setting["temperature"]]),
        jnp.array([setting.get("top_k", 0)]),
        jnp.array([setting.get("top_p", 1.0)]),
    )
    noise = position_noise(key[None], jnp.array([emitted]), 0, vocab_size)[0]
    scores = np.asarray(filtered_logits(logits[:, :vocab_size], sampling) + noise)[0]
    return float(abs(scores[tokens[0]] - scores[tokens[1]]))


@jax.jit
def _read(model: st.HybridLM, tokens: jax.Array, lengths: jax.Array) -> Any:
    return model.prefill(tokens, lengths)


def measure(pair: Pair, *, compared: int, rows: int, tokens: int, progress: Any) -> dict[str, Any]:
    """Compares texts until so many tokens were compared.

    Args:
        pair: target, draft and prompts.
        compared: tokens to compare, over all methods and settings.
        rows: of a batch; prompts repeat, with other keys.
        tokens: to generate in each row.
        progress: a bar for it.
    """
    ways = methods(pair.draft)
    counts = {name: {"compared": 0, "target_calls": 0, "emitted": 0} for name in ways}
    differences = []
    prompts = [pair.prompts[i % len(pair.prompts)] for i in range(rows)]
    task = progress.add_task("tokens compared", total=compared)
    for round_, setting in zip(itertools.count(), itertools.cycle(SETTINGS)):
        keys = jax.random.split(jax.random.key(round_), rows)
        common = {"max_new_tokens": tokens, "eos_token": (), "key": keys, **setting}
        want = st.generate(pair.target, prompts, **common).tokens
        for name, way in ways.items():
            out = st.generate(pair.target, prompts, **common, **way)
            same = np.cumprod(out.tokens == want, axis=1).sum(axis=1)  # up to the first difference
            for row in np.flatnonzero(same < tokens):
                at = int(same[row])
                both = (int(want[row, at]), int(out.tokens[row, at]))
                text = [*prompts[row], *want[row, :at].tolist()]
                difference = {"method": name, "round": round_, **setting, "row": int(row)}
                difference |= {"position": at, "tokens": both}
                difference["gap"] = gap(pair.target, text, at, keys[row], setting, both)
                differences.append(difference)
            counts[name]["compared"] += int(np.minimum(same + 1, tokens).sum())
            counts[name]["target_calls"] += out.stats.num_target_calls
            counts[name]["emitted"] += out.stats.num_tokens
        done = sum(count["compared"] for count in counts.values())
        progress.update(task, completed=done)
        # Whole cycles, so that every setting weighs the same.
        if done >= compared and (round_ + 1) % len(SETTINGS) == 0:
            return {"compared": done, "methods": counts, "differences": differences}
    raise AssertionError("the rounds do not end")


def main() -> None:
    """Compares, prints a table and the differences, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compared", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    options = read_options(parser)
    pair = embedded_pair(options.rows)
    with progress_bar() as progress:
        found = measure(
            pair,
            compared=options.compared,
            rows=options.rows,
            tokens=options.tokens,
            progress=progress,
        )
    by_method = {
        name: [each["gap"] for each in found["differences"] if each["method"] == name]
        for name in found["methods"]
    }
    print_table(
        f"Sampled text with drafts against without, {pair.name}, float32",
        ("method", "tau", "tokens compared", "differences", "largest gap"),
        [
            (
                name,
                counts["emitted"] / counts["target_calls"],
                counts["compared"],
                len(by_method[name]),
                max(by_method[name], default=0.0),
            )
            for name, counts in found["methods"].items()
        ],
    )
    for each in found["differences"]:
        print(each)
    path = save("same_key", __doc__, pair.settings() | found, options.output)
    gaps = [each["gap"] for each in found["differences"]]
    conclude(
        "same_key",
        passed=all(value < NEAR or np.isinf(value) for value in gaps),
        compared=found["compared"],
        differences=len(gaps),
        gaps=gaps,
        results=str(path),
    )


if __name__ == "__main__":
    main()
