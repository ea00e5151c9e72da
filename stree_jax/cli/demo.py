"""`stree-jax demo`: `bench` of the embedded pair, then a text and one of its steps."""

import json

import jax.numpy as jnp
import numpy as np
from rich.text import Text
from tokenizers import Tokenizer

import stree_jax as st
from stree_jax.cli.bench import console_of_tables, measure
from stree_jax.cli.options import Demo
from stree_jax.convert import find
from stree_jax.decoding.plan import plan
from stree_jax.loading import Chosen, load_models
from stree_jax.measuring.bench import PROMPTS

_TREE = st.TreeTopology.default()


def run_demo(command: Demo) -> int:
    """Decodes with each method; returns 1 if their outputs differ."""
    if (command.target is None) != (command.draft is None):
        raise ValueError(
            "--target and --draft must be given together: a draft model is trained for one target"
        )
    console = console_of_tables()
    folder = find(command.target or st.demo_path("target"))
    draft = find(command.draft or st.demo_path("draft"))
    target, drafter = load_models(folder, Chosen("draft", str(draft), command.ignore_field, "int8"))
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
    first = st.generate(target, [prompts[0]], max_new_tokens=command.max_new_tokens)
    console.print("\nThe first output:", style="bold")
    text = tokenizer.decode(first.tokens[0, : first.lengths[0]].tolist())
    console.print(Text(PROMPTS[0], style="dim") + Text(text))
    console.print("\nOne of its steps, with the accepted path marked:", style="bold")
    console.print(_one_step(target, drafter, prompts[0], tokenizer))
    return 1 if report.different else 0


def _one_step(
    target: st.HybridLM, drafter: st.Drafter | None, prompt: list[int], tokenizer: Tokenizer
) -> Text:
    """A drawing of the first draft tree with at least two accepted drafts."""
    request = plan(target, [prompt], max_new_tokens=32, drafter=drafter, topology=_TREE)
    state = request.decoder.start(target, drafter, request.context, request.keys)
    while True:
        state, draft, verdict = request.decoder.step(
            target, drafter, state, request.limits, request.sampling
        )
        if int(verdict.num_accepted[0]) >= 2 or bool(jnp.all(state.done | (state.failed > 0))):
            break
    topology = request.decoder.topology
    labels = [json.dumps(tokenizer.decode([token])) for token in np.asarray(draft.tokens[0])]
    path = [n for n in range(topology.num_nodes) if topology.ancestor_mask[int(verdict.last[0]), n]]
    drawing = Text()
    for line in topology.draw(labels, path).splitlines():
        drawing.append(line + "\n", style="bold green" if line.endswith(" *") else "")
    drawing.append(f"next token: {json.dumps(tokenizer.decode([int(verdict.next_token[0])]))}")
    return drawing
