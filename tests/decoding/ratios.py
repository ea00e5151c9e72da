"""Importance ratios of sampled texts in a gradient: all are 1, to the bit.

`python -m tests.decoding.ratios LOG` takes 10^5 tokens of each family; LOG has a line for each
batch, and a run that was stopped goes on after its last line.
"""

import functools
import itertools
import sys
from pathlib import Path

import jax
import numpy as np

import stree_jax as st
from stree_jax.testing import CONFIGS, perturbed, random_model
from tests.decoding.rules import GRAMMAR
from tests.decoding.texts import in_native_sizes

FAMILIES = ["granite_moe hybrid", "qwen3_next hybrid", "falcon_h1 hybrid"]
TREE = st.TreeTopology.from_branching((3, 2, 1))
# Rows without rules, with a grammar, and with a penalty too.
RULES = [(), (), *((st.RepetitionPenalty(penalty), GRAMMAR) for penalty in (1.0, 1.0, 1.3, 0.8))]
NEW_TOKENS = 40
BATCHES = -(-100_000 // (NEW_TOKENS * len(RULES)))


@jax.jit
@functools.partial(jax.grad, has_aux=True)
def slope(model, texts):
    scores = st.text_log_probs(model, texts)
    return scores.sum(), scores


def ratios(family, start=0):
    """Yields those of each batch of texts `[B, T]`, and tokens per call."""
    model = random_model(in_native_sizes(CONFIGS[family])).packed()
    way = st.Way(st.ModelDrafter(perturbed(model, 0.05)), TREE)
    common = dict(max_new_tokens=NEW_TOKENS, temperature=1.0, eos_token=(), log_probs=True)
    for batch in itertools.count(start):
        prompts = np.random.default_rng(batch).integers(37, size=(len(RULES), 5))
        rows = [
            st.Options(**common, processors=rule, key=batch * len(RULES) + row)
            for row, rule in enumerate(RULES)
        ]
        out = st.generate(model, prompts.tolist(), options=rows, **way)
        _, scores = slope(model, np.hstack([prompts, out.tokens]))
        yield np.exp(scores[:, -NEW_TOKENS:] - out.log_probs), out.stats.tau


if __name__ == "__main__":
    log = Path(sys.argv[1])
    for family in FAMILIES:
        log.touch()
        start = log.read_text().count(family)
        for batch, (ratio, tau) in zip(range(start, BATCHES), ratios(family, start), strict=False):
            with log.open("a") as file:
                others = (ratio != 1).sum()
                print(family, batch, f"{others} of {ratio.size} differ, tau {tau:.2f}", file=file)
