"""A checkpoint with the draft tree that `stree-jax tune-tree` chose for it, and without drafts.

    python examples/tuned_tree.py [TARGET DRAFT TREE.json]

Without arguments the embedded models and their tree. A tree of your own pair, for this device:

    stree-jax tune-tree TARGET --draft DRAFT --output tree.json
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import stree_jax as st

PROMPT = "Question: Tom has 5 apples and buys 7 more. How many apples does Tom have?\nAnswer:"


def main(arguments: Sequence[str] = ()) -> None:
    """Decodes with the tree and without, twice each: the first time compiles."""
    embedded = [st.demo_path(name) for name in ("target", "draft")]
    target_path, draft_path, tree_path = arguments or (
        *embedded,
        embedded[0].with_name("tree.json"),
    )
    parents = json.loads(Path(tree_path).read_text())["parents"]
    if parents is None:
        sys.exit("the tuner says not to draft for this pair on its device")
    tree = st.TreeTopology.from_parents(parents)
    print(tree.draw())

    target = st.from_pretrained(target_path)
    tokenizer = st.load_tokenizer(target_path)
    prompts = [tokenizer.encode(PROMPT).ids]
    drafter = st.ModelDrafter(st.from_pretrained(draft_path))
    texts = []
    for name, way in (("no drafts", {}), ("tree", {"drafter": drafter, "topology": tree})):
        for _ in range(2):
            began = time.perf_counter()
            out = st.generate(target, prompts, max_new_tokens=96, **way)
            seconds = time.perf_counter() - began
        texts.append(tokenizer.decode(out.tokens[0, : out.lengths[0]].tolist()))
        speed = out.stats.num_tokens / seconds
        print(f"{name}: {out.stats.tau:.2f} tokens per target call, {speed:.0f} tokens a second")
    print(f"{texts[1]}\nsame text: {texts[0] == texts[1]}")


if __name__ == "__main__":
    main(sys.argv[1:])
