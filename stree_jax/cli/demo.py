"""`stree-jax demo`: `bench` of a pair, and a text with its accepted drafts."""

import stree_jax as st
from stree_jax.cli.bench import console_of_tables, measure
from stree_jax.cli.options import Demo
from stree_jax.convert import find
from stree_jax.loading import Chosen, load_models
from stree_jax.measuring.bench import PROMPTS

_TREE = st.TreeTopology.default()


def run_demo(command: Demo) -> int:
    """Decodes with each method; returns 1 if their outputs differ."""
    if (command.target is None) != (command.draft is None):
        raise ValueError(
            "--target and --draft must be given together: a draft model is trained for one target"
        )
    console, folder = console_of_tables(), find(command.target or st.demo_path("target"))
    draft = Chosen("draft", command.draft or str(st.demo_path("draft")), quantize="int8")
    target, drafter = load_models(folder, draft, command.ignore_field)
    tokenizer = st.load_tokenizer(folder)
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    trees = {"chain of 4": st.TreeTopology.chain(4), f"tree of {_TREE.num_nodes}": _TREE}
    report = measure(
        console,
        target,
        {name: st.Way(drafter, tree) for name, tree in trees.items()},
        prompts,
        name=command.target or "the embedded target",
        max_new_tokens=command.max_new_tokens,
    )
    console.print("\nThe first output, with accepted drafts marked:", style="bold")
    console.print(PROMPTS[0], style="dim", markup=False, soft_wrap=True)
    st.generate(
        target,
        [prompts[0]],
        drafter=drafter,
        topology=_TREE,
        max_new_tokens=command.max_new_tokens,
        tokenizer=tokenizer,
        record_calls=True,
    ).show(console)
    return 1 if report.different else 0
