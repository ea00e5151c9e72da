"""At which batch size does speculation stop paying off?

Tokens per second of autoregressive decoding, a chain of 4 and the 13-node tree A, greedy,
interleaved; prefill included. The time of a step relative to an autoregressive one is the
acceptance length that a method needs to break even at that batch size.

    python -m benchmarks.batch [--batches 1 2 4 8] [--tokens 96] [--rounds 5]
"""

import argparse
from collections.abc import Iterator

import stree_jax as st
from benchmarks.common import Found, main
from benchmarks.methods import TWO_TREES, compare, trees
from benchmarks.models import embedded_pair
from stree_jax.measuring.methods import PLAIN, Method, different
from stree_jax.measuring.report import SPEED, Table

OPTIONS = {"--batches": (1, 2, 4, 8), "--tokens": 96, "--rounds": 5}


def run(options: argparse.Namespace) -> Iterator[Found]:
    """Autoregressive decoding, a chain of 4 and tree A, greedy, at each batch size."""
    pair, rows = embedded_pair(max(options.batches)), []
    ways = [Method(PLAIN), *trees(st.ModelDrafter(pair.draft), TWO_TREES)]
    for size in options.batches:
        # Rows run to their limit, past any end of text, so that the batch stays full.
        batch = {"prompts": pair.prompts[:size], "eos_token": ()}
        for row in compare(pair, ways, 0.0, options, [batch]):
            needed = row["tau"] / row["speed_up"]["median"]
            rows.append({"batch": size, "tau_to_break_even": needed} | row)
    pays = [row["batch"] for row in rows if row["speed_up"]["median"] > 1]  # that of PLAIN is 1
    yield Found(
        pair.settings() | {"rows": rows},
        [
            Table(
                f"{pair.name}, {options.tokens} tokens a row",
                rows,
                {"batch": "{batch}", "method": "{method}", "tau": "{tau:.2f}"}
                | SPEED
                | {"tau to break even": "{tau_to_break_even:.2f}"},
            )
        ],
        wrong=different(rows),
        line={"largest_batch_where_drafts_pay": max(pays, default=None)},
    )


if __name__ == "__main__":
    main(run, OPTIONS)
