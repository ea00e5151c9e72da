"""`stree-jax tune-tree`: the fastest draft tree for two checkpoints on this device."""

import jax
from rich.console import Console

import stree_jax as st
from stree_jax.cli.options import TuneTree
from stree_jax.cli.prompts import read_questions
from stree_jax.heads import HEADS
from stree_jax.loading import chosen, load_models
from stree_jax.measuring.bench import PROMPTS
from stree_jax.measuring.questions import PLAIN_TURNS
from stree_jax.measuring.report import check_file, progress_bar, write_json

# In addition to those of `bench`. Half of the prompts measure acceptance, the other half speed.
MORE_PROMPTS = (
    "def is_even(number):\n",
    "Question: A shop sells pens for $2 each. Ada buys 7 pens and pays with $20. How much change"
    " does she get?\nAnswer:",
    "Once upon a time there was a fisherman who",
    "The train was late again, so",
)


def run_tune_tree(command: TuneTree) -> None:
    """Tunes, prints the report, and writes a file for `generate --tree @FILE` or `auto@FILE`."""
    console, target = Console(highlight=False), command.target or str(st.demo_path("target"))
    drafter = chosen(command.target, vars(command))
    if drafter.option is None:
        raise ValueError(
            f"give one of --ngram, --draft, {', '.join(f'--{kind}' for kind in HEADS)}: a tree is"
            " tuned for one drafter"
        )
    if command.output is not None:
        check_file(command.output)
    built_in = [*PROMPTS, *MORE_PROMPTS]
    questions = read_questions(target, command.prompts, built_in, command.chat_template)
    if any(question.is_plain for question in questions):
        console.print(PLAIN_TURNS)
    models = load_models(
        target,
        drafter,
        command.ignore_field,
        adapter=command.adapter,
        dtype=command.dtype,
        quantize=command.quantize,
    )
    with progress_bar(console) as show:
        report = st.tune(
            *models,
            [question.prompt for question in questions],
            temperature=command.temperature,
            key=None if command.temperature == 0 else command.seed,
            max_nodes=command.max_nodes,
            max_depth=command.max_depth,
            max_new_tokens=command.max_new_tokens,
            thorough=command.thorough,
            progress=show,
        )
    console.print(str(report), soft_wrap=True, markup=False)
    specs = []
    if report.best is not None:
        specs.append("parents:" + ",".join(map(str, report.best.parents)))
    fastest = report.rows[0]
    if (tree := fastest.topology) is not None and fastest.sharpness is not None:
        specs.append(f"budget:{tree.num_nodes},{tree.depth} --sharpness {fastest.sharpness:g}")
    for spec in specs:
        console.print(f"--tree {spec}", soft_wrap=True)
    if command.output is not None:
        content = {
            "parents": None if report.best is None else report.best.parents,
            "trees": [tree.parents for tree in report.trees],
            "advice": report.advice,
            "sharpness": report.sharpness,
            "temperature": command.temperature,
            "target": target,
            "draft": drafter.path or "n-gram",
            "device": str(jax.devices()[0].device_kind),
            "jax": jax.__version__,
            "decoded": {
                row.name: row.record.to_dict() for row in report.rows if row.record is not None
            },
        }
        write_json(command.output, content)
