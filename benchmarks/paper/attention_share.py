"""What does the share of attention layers change (STree, table 4)?

Decodes the same prompts with targets of 0, 25 and 50 % attention layers, each with a draft that was
distilled from it: autoregressively, with a chain and with a tree, at temperature 0 and 1. Sizes and
training are the same, see `benchmarks/recipes`. Train the pairs first (minutes each):

    for share in 0 25 50; do
        stree-jax train benchmarks/recipes/attention-$share.toml DIR/attention-$share
        stree-jax distill benchmarks/recipes/attention-draft.toml \
            DIR/attention-$share DIR/attention-$share-draft
    done
    python -m benchmarks.attention_share DIR [--prompts 12] [--tokens 64] [--rounds 3]
"""

import argparse
from pathlib import Path

import stree_jax as st
from benchmarks.common import (
    conclude,
    machine,
    plotted,
    print_table,
    progress_bar,
    read_options,
    save,
)
from benchmarks.decode import (
    STEP_CALLS,
    Method,
    decoding_calls,
    measure_decoding,
    measure_steps,
    print_methods,
)
from benchmarks.prompts import load_prompts

SHARES = (0, 25, 50)


def plot(rows: list[dict], path: Path) -> None:
    """Tau and speed by share of attention."""
    with plotted(path, 2, 11, 4) as (left, right):
        for method in dict.fromkeys(row["method"] for row in rows):
            for temperature, style in ((0.0, "-"), (1.0, "--")):
                part = [
                    row
                    for row in rows
                    if (row["method"], row["temperature"]) == (method, temperature)
                ]
                shares = [row["attention_percent"] for row in part]
                label = f"{method}, T = {temperature:g}"
                taus = [row["tau"] for row in part]
                speeds = [row["speed_up"]["median"] for row in part]
                left.plot(shares, taus, style, marker="o", label=label)
                right.plot(shares, speeds, style, marker="o", label=label)
        for axes, label in ((left, "tau"), (right, "speed, autoregressive = 1")):
            axes.set(xlabel="attention layers, %", ylabel=label)
            axes.set_xticks(SHARES)
        left.legend(fontsize=8)


def main() -> None:
    """Runs the benchmark and writes `attention-share-<device>.json` and its plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = read_options(parser, plots=True)
    names = [f"attention-{share}{end}" for share in SHARES for end in ("", "-draft")]
    if missing := [name for name in names if not (options.directory / name).is_dir()]:
        parser.error(f"{options.directory} lacks {', '.join(missing)}; train them as above")

    source, texts = load_prompts(options.prompts)
    where = machine()  # before anything loads it
    rows, steps = [], []
    with progress_bar() as progress:
        task = progress.add_task("")
        for share in SHARES:
            path = options.directory / f"attention-{share}"
            target = st.from_pretrained(path)
            drafter = st.ModelDrafter(st.from_pretrained(f"{path}-draft"))
            tokenizer = st.load_tokenizer(path)
            prompts = [tokenizer.encode(text).ids for text in texts]
            ways = [
                Method("autoregressive", None, None),
                Method("chain of 4", drafter, st.TreeTopology.chain(4)),
                Method("tree A", drafter, st.TreeTopology.paper("A")),
            ]
            calls = 2 * decoding_calls(ways, prompts, options.rounds) + STEP_CALLS
            progress.update(task, total=calls * len(SHARES))
            for temperature in (0.0, 1.0):
                rows += [
                    {"attention_percent": share} | row
                    for row in measure_decoding(
                        target,
                        ways,
                        prompts,
                        tokens=options.tokens,
                        temperature=temperature,
                        rounds=options.rounds,
                        progress=progress,
                        task=task,
                    )
                ]
            name = f"{share} % attention"
            steps.append(measure_steps(name, target, count=50, progress=progress, task=task))

    print_methods(
        f"{len(texts)} prompts ({source}), {options.tokens} tokens",
        rows,
        {"attention, %": "attention_percent", "T": "temperature"},
    )
    print_table(
        "Time of a target call by tree nodes, one node = 1",
        ("model", *(str(nodes) for nodes in steps[0]["relative_to_one_node"])),
        [
            (step["model"], *(f"{ratio:.1f}" for ratio in step["relative_to_one_node"].values()))
            for step in steps
        ],
    )
    different = [row["method"] for row in rows if row["identical"] is False]
    results = {
        "machine": where,
        "prompts": source,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "decoding": rows,
        "target_calls": steps,
    }
    path = save("attention-share", __doc__, results, options.output)
    plot(rows, path.with_suffix(".png"))
    tau = {
        f"{row['attention_percent']} %": round(row["tau"], 3)
        for row in rows
        if row["method"] == "tree A" and row["temperature"] == 0
    }
    conclude("attention_share", passed=not different, tau=tau, different=different)
