"""Rules that carry tensors of a foreign checkpoint to the weights of a `HybridLM`, and back.

A family of checkpoints is a table of rules: which source tensor is which weight, and by which
transform. Every transform has an inverse, so the same table reads and writes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from stree_jax.convert.tensors import Tensor

Shape = tuple[int, ...]


class Transform(NamedTuple):
    """A pure function of one array and its inverse."""

    name: str
    apply: Callable[[np.ndarray], np.ndarray]
    invert: Callable[[np.ndarray], np.ndarray]
    source_shape: Callable[[Shape], Shape]  # from the target's


def _swap_halves(x: np.ndarray) -> np.ndarray:
    """The second half of the rows, then the first."""
    first, second = np.split(x, 2)
    return np.concatenate([second, first])


AS_IS = Transform("as is", lambda x: x, lambda x: x, lambda shape: shape)
TRANSPOSED = Transform("transposed", np.transpose, np.transpose, lambda shape: shape[::-1])
# A depthwise convolution of torch is [C, 1, K], ours [K, C].
CONV = Transform(
    "depthwise convolution",
    lambda x: x[:, 0].T,
    lambda x: x.T[:, None],
    lambda shape: (shape[1], 1, shape[0]),
)
# A fused gated projection whose rows are [up, gate]; ours are [gate, up].
SWAPPED = Transform(
    "halves swapped and transposed",
    lambda x: _swap_halves(x).T,
    lambda x: _swap_halves(x.T),
    lambda shape: shape[::-1],
)


class Rule(NamedTuple):
    """One tensor: its name in the source, the name of the weight, and how it is carried over."""

    source: str
    target: str
    transform: Transform = AS_IS

    def within(self, source: str, target: str) -> "Rule":
        """The rule below a prefix on either side."""
        return Rule(f"{source}.{self.source}", f"{target}.{self.target}", self.transform)


class Ignored(NamedTuple):
    """A source tensor that is not a weight of its own, and why."""

    source: str
    reason: str


def check_coverage(
    rules: Sequence[Rule],
    ignored: Sequence[Ignored],
    source: Mapping[str, Tensor],
    target: Mapping[str, Shape],
) -> list[Rule]:
    """The rules for the weights that the model has.

    Every weight must have exactly one rule and every source tensor one use. A rule whose weight
    the model does not have (a bias, say) is left out, and its tensor must then be absent.

    Raises:
        ValueError: everything that does not fit, with names and shapes.
    """
    used = [rule for rule in rules if rule.target in target]
    by_target = {rule.target: rule for rule in used}
    assert len(by_target) == len(used), "a table with two rules for a weight"
    problems = [f"no rule gives {name} {target[name]}" for name in target if name not in by_target]
    for rule in used:
        want = rule.transform.source_shape(target[rule.target])
        if rule.source not in source:
            problems.append(f"{rule.source} {want} is missing")
        elif source[rule.source].shape != want:
            problems.append(
                f"{rule.source} has shape {source[rule.source].shape}, the config says {want}"
            )
        elif source[rule.source].dtype.kind not in "fV":  # V: bfloat16
            problems.append(f"{rule.source} holds {source[rule.source].dtype}, not real numbers")
    known = {rule.source for rule in used} | {entry.source for entry in ignored}
    problems += [
        f"{name!r:.120} {source[name].shape} is not expected"
        for name in source
        if name not in known
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:8])
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(f"the tensors do not fit the config: {shown}{more}")
    return used
