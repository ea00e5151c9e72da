"""How does decoding compare with transformers, on the same weights, in the same run?

Exports the embedded pair to transformers' format, decodes the same prompts greedily with
`transformers.generate` and with stree-jax, autoregressively and with drafts, interleaved prompt by
prompt, and checks that the tokens are the same. transformers does not support assisted decoding of
these models, so the baseline is its autoregressive decoding.

    python -m benchmarks.peer [--prompts 16] [--tokens 96] [--rounds 3] [--threads 2]
"""

from benchmarks.experiments import main

if __name__ == "__main__":
    main("peer", __doc__)
