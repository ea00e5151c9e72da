"""How does the share of attention layers change acceptance and speed (STree, table 4)?

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

from benchmarks.experiments import main

if __name__ == "__main__":
    main("attention_share", __doc__)
