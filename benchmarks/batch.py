"""At which batch size does speculation stop paying off?

Tokens per second of autoregressive decoding, a chain of 4 and the 13-node tree A, greedy, on
batches of 1 to 64 (8 on a CPU), interleaved; prefill included. Acceptance means something with
trained weights only. With any weights, the time of a step relative to an autoregressive one is the
acceptance length that a method needs to break even at that batch size.

    python -m benchmarks.batch [--pair embedded|random] [--batches 1 2 4 8]
"""

import argparse
from collections.abc import Iterator

import stree_jax as st
from benchmarks.common import SPEED, Found, Table, start
from benchmarks.methods import PLAIN, TWO_TREES, Method, compare, different, trees
from benchmarks.models import chosen_pair, on_gpu


def run(options: argparse.Namespace) -> Iterator[Found]:
    """Autoregressive decoding, a chain of 4 and tree A, greedy, at each batch size."""
    sizes = options.batches or ([1, 2, 4, 8, 16, 32, 64] if on_gpu() else [1, 2, 4, 8])
    pair, rows = chosen_pair(options, max(sizes)), []
    ways = [Method(PLAIN), *trees(st.ModelDrafter(pair.draft), TWO_TREES)]
    for size in sizes:
        # Rows run to their limit, past any end of text, so that the batch stays full.
        batch = {"prompts": pair.prompts[:size], "eos_token": ()}
        for row in compare(pair, ways, [0.0], options, [batch]):
            needed = row["tau"] / row["speed_up"]["median"]
            rows.append({"batch": size, "tau_to_break_even": needed} | row)
    pays = [row["batch"] for row in rows if row["speed_up"]["median"] > 1]  # that of PLAIN is 1
    exact = pair.target.dtype == "float32"
    yield Found(
        pair.settings() | {"rows": rows},
        [
            Table(
                f"{pair.name}, {options.tokens} tokens a row ({pair.note()})",
                rows,
                {"batch": "{batch}", "method": "{method}", "tau": "{tau:.2f}"}
                | SPEED
                | {"tau to break even": "{tau_to_break_even:.2f}"},
            )
        ],
        wrong=different(rows) if exact else [],
        line={"largest_batch_where_drafts_pay": max(pays, default=None)} if pair.trained else {},
    )


start(__name__, __doc__)
