"""`stree-jax bench`: what drafts bring a target on this machine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import stree_jax as st
from stree_jax import loading
from stree_jax.cli.options import Bench
from stree_jax.cli.prompts import read_questions
from stree_jax.heads import HEADS
from stree_jax.measuring.bench import PROMPTS, check_picture
from stree_jax.measuring.report import check_file, progress_bar, write_json

DEFAULT = ""  # the tree of the drafter's choice, where `--tree` has those of the user's
_NAMES = {"draft": "draft model", "ngram": "prompt lookup"}
_NAMES |= {kind: room.title for kind, room in HEADS.items()}


def run_bench(command: Bench) -> int:
    """Decodes with each method; returns 1 if their outputs differ."""
    if command.json is not None:
        check_file(command.json)
    if command.plot is not None:
        check_picture(command.plot)
    name = command.target or "the embedded target"
    target = command.target or str(st.demo_path("target"))
    drafters, specs = loading.all_chosen(command.target, vars(command)), command.tree or [DEFAULT]
    embedded = st.demo_path("draft")
    if not (command.target or command.tree) and drafters[0].path == str(embedded):
        specs = [DEFAULT, f"@{embedded.with_name('tree.json')}"]  # of `tune-tree`
    if command.tree and not drafters:
        drafters = [loading.Chosen("ngram")]
    for drafter in drafters:
        loading.check_drafter(drafter.option, specs, command.mesh)
    trees = {spec: loading.parse_tree(spec) for spec in specs if spec != DEFAULT}
    prompts = read_questions(target, command.prompts, PROMPTS, command.chat_template)
    model, all_drafts = loading.load_all(
        target,
        drafters,
        command.ignore_field,
        adapter=command.adapter,
        dtype=command.dtype,
        quantize=command.quantize,
        mesh=None if command.mesh is None else loading.parse_mesh(command.mesh),
    )
    ways: dict[str, st.Way] = {}
    for chosen, drafts in zip(drafters, all_drafts, strict=True):
        prefix = f"{_NAMES[chosen.option or '']}, " if len(drafters) > 1 else ""
        for spec in specs:
            loaded: Any = loading.drafter_of(chosen, drafts, loading.kind_of(spec))
            tree = loaded.default_topology() if spec == DEFAULT else trees[spec]
            if tree is not None:  # None: the tuned result is not to draft
                ways[prefix + name_of(spec, tree)] = st.Way(loaded, tree, command.verifier)
    report = measure(
        console_of_tables(),
        model,
        ways,
        prompts,
        name=name,
        file=command.json,
        temperatures=command.temperature,
        max_new_tokens=command.max_new_tokens,
        rows=command.rows,
        rounds=command.rounds,
    )
    if command.plot is not None:
        report.plot(command.plot)
    return 1 if report.different else 0


def name_of(spec: str, tree: Any) -> str:
    """What a table calls a tree."""
    if spec.startswith("auto"):
        return spec.partition("@")[0]
    is_dynamic = loading.kind_of(spec) in ("beam", "budget")
    if not is_dynamic and (spec == DEFAULT or tree.name.startswith("chain")):
        return tree.name
    return f"tuned {tree.name}" if spec.startswith("@") else spec


def console_of_tables() -> Console:
    """A terminal, or a file whose tables are as wide as they need."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    return console


def measure(
    console: Console,
    model: st.HybridLM,
    ways: Mapping[str, Any],
    prompts: Sequence[Any],
    file: Path | None = None,
    **options: Any,
) -> st.BenchReport:
    """Measures and prints. A file is written after each round, so that Ctrl-C loses only one."""

    def keep(report: st.BenchReport) -> None:
        if file is not None:
            write_json(file, report.content())

    with progress_bar(console) as show:
        report = st.bench(model, ways, prompts, progress=show, each_round=keep, **options)
    for line in report.described():
        console.print(line, style="dim", markup=False, soft_wrap=True)
    for table in report.tables():
        console.print(table)
    if report.busy:
        console.print(report.busy, style="yellow", soft_wrap=True)
    for method in report.different:
        console.print(f"{method}: other tokens than without drafts", style="red", soft_wrap=True)
    for line in report.advice:
        console.print(line, markup=False, soft_wrap=True)
    return report
