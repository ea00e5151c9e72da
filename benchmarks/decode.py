"""How fast is tree decoding of a pair on this machine, and how many drafts are accepted?

Decodes the same prompts one at a time with every method, among them a deep tree and dynamic trees
of its size, interleaved prompt by prompt, at temperature 0 and 1; checks that all methods give the
same tokens with the same key, but for traversal verification above temperature 0, which is exact in
distribution. Then measures how the time of a target call grows with the tree, which decides whether
speculation pays off.

    python -m benchmarks.decode [--prompts 16] [--tokens 96] [--rounds 3]
        [--output DIR | --commit] [--target DIR --draft DIR --name NAME]
"""

import argparse
import json
from collections.abc import Iterator

import stree_jax as st
from benchmarks import methods, steps
from benchmarks.common import Found, main
from benchmarks.methods import CHAIN_OF_4, COMPARED, DEEP_TREE, PAPER_TREES, TUNED_TREES, trees
from benchmarks.models import CHECKPOINTS, chosen_pair, random_model
from stree_jax.decoding.programs import free_programs
from stree_jax.measuring.methods import LOOKUP, PLAIN, Method, different
from stree_jax.measuring.report import Table, method_tables

OPTIONS = COMPARED | CHECKPOINTS


def run(options: argparse.Namespace) -> Iterator[Found]:
    """The paper's trees, a deep one, a dynamic one and prompt lookup; costs of target calls."""
    pair = chosen_pair(options, options.prompts)
    drafter = st.ModelDrafter(pair.draft)
    ways = [Method(PLAIN), *trees(drafter, TUNED_TREES)]
    if not options.target:
        ways += [Method("deep tree", drafter, DEEP_TREE), dynamic_tree(pair.draft)]
    ways += [LOOKUP, *trees(drafter, PAPER_TREES)]
    # Exact in distribution, with tokens of its own: drafts are tested by their probabilities.
    iid = st.ModelDrafter(pair.draft, child_sampling="iid")
    tested = Method("chain of 4, traversal", iid, CHAIN_OF_4, "traversal")
    records = []
    for temperature in options.temperatures:
        these = [*ways, tested] if temperature else ways
        records += methods.compare(pair, these, temperature, options)
        free_programs()
    name = options.name or "embedded"
    larger = random_model(st.ModelConfig.preset("mamba2-130m"), "float32")
    calls = [
        steps.time_of_calls(f"{name} target", pair.target, 100),
        steps.time_of_calls(f"{name} draft", pair.draft, 100),
        steps.time_of_calls("mamba2-130m shape", larger, 5),
    ]
    drafting = [record for record in records if record.nodes > 1]
    best = max(drafting, key=lambda record: (-record.temperature, record.speed_up["median"]))
    of_calls = Table("Milliseconds of a call", calls, steps.COLUMNS)
    yield Found(
        pair.settings()
        | {"decoding": [record.to_dict() for record in records], "target_calls": calls},
        [*method_tables(pair.name, records), of_calls],
        wrong=different(records),
        line={"best": best.method, "speed_up": best.speed_up["median"], "tau": best.tau},
    )


def dynamic_tree(draft: st.HybridLM) -> Method:
    """A dynamic tree of the deep tree's size, with the sharpness tuned for the embedded pair."""
    found = json.loads(st.demo_path("target").with_name("tree.json").read_text())
    budget = st.TreeTopology.budget(DEEP_TREE.num_nodes, DEEP_TREE.depth)
    return Method("dynamic tree", st.DynamicDrafter(draft, sharpness=found["sharpness"]), budget)


if __name__ == "__main__":
    main(run, OPTIONS)
