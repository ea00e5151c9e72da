"""How long does a process's first text take, and how long is the longest wait in a second one?

With the embedded pair; compiling is included, without a cache of programs. The second text begins
with no sentence, so that its drafts fail. Trees are compared by processes in turn:

    for tree in auto parents:-1,0,0,1,3; do python -m benchmarks.first_text --tree $tree; done
"""

import argparse
import time
from collections.abc import Iterator

import numpy as np

import stree_jax as st
from benchmarks.common import Found, main
from benchmarks.models import embedded_pair

OPTIONS = {"--tree": "auto"}


def run(options: argparse.Namespace) -> Iterator[Found]:
    """Both texts."""
    pair, times = embedded_pair(1), []
    for prompt, tokens in (pair.prompts[0], 128), ([0] * 64, 1500):
        how = st.Options(max_new_tokens=tokens, temperature=1.0, key=0, eos_token=())
        began = time.perf_counter()
        text = st.stream(
            pair.target,
            [prompt],
            drafter=st.ModelDrafter(pair.draft),
            topology=options.tree,
            options=how,
        )
        times.append([time.perf_counter() - began for _ in text])
    line = {"first_seconds": times[0][-1], "longest_wait_ms": 1e3 * max(np.diff(times[1]))}
    yield Found(line, [], line=line)


if __name__ == "__main__":
    main(run, OPTIONS)
