"""How fast is tree decoding of a pair on this machine, and how many drafts are accepted?

Decodes the same prompts one at a time with every method, among them a deep tree and dynamic trees
of its size, interleaved prompt by prompt, at temperature 0 and 1; checks that all methods give the
same tokens with the same key, but for traversal verification above temperature 0, which is exact in
distribution. Then measures how the time of a target call grows with the tree, which decides whether
speculation pays off.

    python -m benchmarks.decode [--prompts 16] [--tokens 96] [--rounds 3]
        [--output DIR | --commit] [--target DIR --draft DIR --name NAME]
"""

from benchmarks.common import start

start(__name__, __doc__)
