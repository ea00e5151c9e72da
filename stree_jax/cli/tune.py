"""`stree-jax tune-tree`: the fastest draft tree for two checkpoints on this device."""

import json
import time
import warnings
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import stree_jax as st
from stree_jax.cli.demo import PROMPTS
from stree_jax.cli.drafters import Chosen, ignored_fields, load_drafter
from stree_jax.cli.prompts import prompt_of, read_lines, record_of
from stree_jax.compilation_cache import enable_compilation_cache
from stree_jax.convert import find
from stree_jax.text import Texts

# In addition to the demo's. Half of the prompts measure acceptance, the other half speed.
MORE_PROMPTS = (
    "def is_even(number):\n",
    "Question: A shop sells pens for $2 each. Ada buys 7 pens and pays with $20. How much change"
    " does she get?\nAnswer:",
    "Once upon a time there was a fisherman who",
    "The train was late again, so",
)


def run_tune_tree(
    console: Console,
    *,
    target: str,
    drafter: Chosen,
    temperature: float,
    prompts: Path | None,
    max_nodes: int,
    max_depth: int,
    max_new_tokens: int,
    seed: int,
    dtype: str,
    thorough: bool,
    output: Path | None,
) -> None:
    """Tunes, prints the report, and writes the tree to a file for `generate --tree @FILE`.

    Raises:
        ValueError: an argument is invalid.
    """
    if drafter.option is None:
        raise ValueError(
            "give either --draft DRAFT, --ngram, --medusa HEADS, --mtp or --eagle3 HEAD: a tree is"
            " tuned for one drafter"
        )
    if output is not None and not output.parent.is_dir():
        raise ValueError(f"--output {output}: the folder {output.parent} does not exist")
    texts = [*PROMPTS, *MORE_PROMPTS] if prompts is None else _read(prompts)
    folder = find(target)
    encode = Texts.at(folder).tokens
    prompt_tokens = [encode(text, name=f"prompt {i + 1}") for i, text in enumerate(texts)]
    enable_compilation_cache()
    ignore, of_drafter = ignored_fields(drafter.ignore, target, drafter.path)
    drafter = drafter._replace(ignore=of_drafter)
    model = st.from_pretrained(folder, dtype=dtype, ignore=ignore)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with (
        Progress(*columns, console=console, transient=True) as progress,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always", UserWarning)
        task = progress.add_task("", total=1)
        phase, began = "", time.perf_counter()

        def show(what: str, done: int, total: int) -> None:
            nonlocal phase
            progress.update(task, description=what, completed=done, total=total)
            if what != phase and not console.is_terminal:  # a bar cannot be drawn into a file
                console.print(f"{time.perf_counter() - began:4.0f} s  {what}", highlight=False)
            phase = what

        report = st.tune(
            model,
            load_drafter(drafter, model),
            prompt_tokens,
            temperature=temperature,
            key=None if temperature == 0 else jax.random.key(seed),
            max_nodes=max_nodes,
            max_depth=max_depth,
            max_new_tokens=max_new_tokens,
            thorough=thorough,
            progress=show,
        )
    console.print(str(report), soft_wrap=True, markup=False)
    for warning in caught:
        if warning.category is UserWarning:
            console.print(f"warning: {warning.message}", style="yellow", soft_wrap=True)
    spec = None
    if report.best is not None:
        spec = "parents:" + ",".join(map(str, report.best.parents))
        console.print(f"--tree {spec}", soft_wrap=True, highlight=False)
    fastest = report.rows[0]
    if fastest.topology is not None and fastest.sharpness is not None:
        size = f"{fastest.topology.num_nodes},{fastest.topology.depth}"
        console.print(
            f"--tree budget:{size} --sharpness {fastest.sharpness:g}",
            soft_wrap=True,
            highlight=False,
        )
    if output is not None:
        rows = [row for row in report.rows if row.measured is not None]
        content = {
            "parents": None if report.best is None else report.best.parents,
            "advice": report.advice,
            "sharpness": report.sharpness,
            "temperature": temperature,
            "target": target,
            "draft": drafter.path or "n-gram",
            "device": str(jax.devices()[0].device_kind),
            "jax": jax.__version__,
            "decoded": {
                row.name: {
                    "tau": row.tau,
                    "tokens_per_second": row.measured,
                    "speed_up": row.speed_up,
                }
                for row in rows
            },
        }
        output.write_text(json.dumps(content, indent=1) + "\n")


def _read(path: Path) -> list[Any]:
    """The prompts of a file: objects in a .jsonl file, otherwise a text in each line."""
    found: list[Any] = []
    for number, line in read_lines(path):
        try:
            is_text = path.suffix != ".jsonl"
            found.append(line.decode().rstrip("\r") if is_text else prompt_of(record_of(line)))
        except ValueError as error:
            raise ValueError(f"--prompts {path}, line {number}: {error}") from None
    return found
