"""How does decoding compare with transformers, on the same weights, in the same run?

Exports the embedded pair to transformers' format, decodes the same prompts greedily with
`transformers.generate` and with stree-jax, autoregressively and with drafts, interleaved prompt by
prompt, and checks that the tokens are the same. transformers does not support assisted decoding of
these models, so the baseline is its autoregressive decoding.

    python -m benchmarks.peer [--prompts 16] [--tokens 96] [--rounds 3] [--threads 2]
"""

import argparse
import functools
import tempfile
from pathlib import Path

import numpy as np

import stree_jax as st
from benchmarks.common import (
    conclude,
    interleaved,
    machine,
    plotted,
    print_table,
    progress_bar,
    read_options,
    save,
    summary,
)
from benchmarks.prompts import load_prompts
from stree_jax.convert import convert

PEER = "transformers"
AIMS = {"autoregressive": 2.5, "drafts": 3.0}  # times transformers


def main() -> None:
    """Measures, prints the table, and writes JSON and plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    options = read_options(parser, plots=True)
    try:
        import torch
        import transformers
    except ImportError as error:
        raise SystemExit(f"{error}: install stree-jax[peers] on Python 3.11") from None
    torch.set_num_threads(options.threads)

    target = st.from_pretrained(st.demo_path("target"))
    drafter = st.ModelDrafter(st.from_pretrained(st.demo_path("draft")))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "target"
        convert(st.demo_path("target"), path, dtype="float32", to="hf")
        peer = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    source, texts = load_prompts(options.prompts)
    prompts = [tokenizer.encode(text).ids for text in texts]

    def with_peer(prompt: list[int]) -> np.ndarray:
        with torch.no_grad():
            out = peer.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=options.tokens,
                do_sample=False,
            )
        return out[0, len(prompt) :].numpy()

    def with_ours(topology: st.TreeTopology | None, prompt: list[int]) -> np.ndarray:
        out = st.generate(
            target,
            [prompt],
            max_new_tokens=options.tokens,
            drafter=None if topology is None else drafter,
            topology=topology,
        )
        return out.tokens[0, : out.lengths[0]]

    trees = {
        "chain of 2": st.TreeTopology.chain(2),
        "chain of 4": st.TreeTopology.chain(4),
        "tree of 4": st.TreeTopology.from_parents([-1, 0, 0, 1]),
        "tree A": st.TreeTopology.paper("A"),
    }
    ways = {PEER: with_peer, "autoregressive": functools.partial(with_ours, None)}
    ways |= {name: functools.partial(with_ours, tree) for name, tree in trees.items()}

    with progress_bar() as progress:
        task = progress.add_task("compiling", total=len(ways) * (1 + options.rounds))
        outputs = {}
        for name, decode in ways.items():
            outputs[name] = [decode(prompt) for prompt in prompts]
            progress.advance(task)
        progress.update(task, description="decoding")
        seconds = np.zeros((options.rounds, len(ways)))
        for i in range(options.rounds):
            for turn, prompt in enumerate(prompts):
                # In rotating order: the threads of torch spin on, and slow down what runs next.
                order = np.roll(list(ways), turn)
                calls = {name: functools.partial(ways[name], prompt) for name in order}
                taken = interleaved(calls, 1, lambda: None)
                seconds[i] += [taken[name][0] for name in ways]
            progress.advance(task, len(ways))

    emitted = np.array([sum(map(len, outputs[name])) for name in ways])
    speeds = emitted / seconds
    rows = []
    for j, name in enumerate(ways):
        same = [np.array_equal(a, b) for a, b in zip(outputs[name], outputs[PEER], strict=True)]
        rows.append(
            {
                "method": name,
                "tokens_per_second": summary(speeds[:, j]),
                "times_transformers": summary(speeds[:, j] / speeds[:, 0]),
                "identical_prompts": sum(same),
            }
        )
    print_table(
        f"{len(prompts)} prompts ({source}), {options.tokens} tokens, float32, greedy",
        ("method", "tokens/s", "times transformers", "identical"),
        [
            (
                row["method"],
                f"{row['tokens_per_second']['median']:,.0f}",
                f"{row['times_transformers']['median']:.2f}x",
                f"{row['identical_prompts']} of {len(prompts)}",
            )
            for row in rows
        ],
    )
    where = machine() | {"torch": torch.__version__, "transformers": transformers.__version__}
    where["torch_threads"] = options.threads
    results = {
        "machine": where,
        "prompts": source,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "methods": rows,
        "aims": AIMS,
    }
    written = save("peer", __doc__, results, options.output)
    plot(rows, written.with_suffix(".png"))
    different = [row["method"] for row in rows if row["identical_prompts"] < len(prompts)]
    for row in rows[1:]:
        aim = AIMS["autoregressive" if row["method"] == "autoregressive" else "drafts"]
        have = row["times_transformers"]["median"]
        print(f"{row['method']}: {have:.2f}x, aim {aim}x {'met' if have >= aim else 'missed'}")
    ratios = {row["method"]: round(row["times_transformers"]["median"], 2) for row in rows}
    conclude("peer", passed=not different, different=different, results=str(written), **ratios)


def plot(rows: list[dict], path: Path) -> None:
    """Bars of the speed of each method."""
    with plotted(path, 1, 6, 3) as axes:
        names = [row["method"] for row in rows]
        axes.barh(names, [row["tokens_per_second"]["median"] for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel("tokens per second (one sequence, float32, greedy)")


if __name__ == "__main__":
    main()
