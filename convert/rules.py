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
    """A pure function of one or several arrays, and its inverse."""

    name: str
    apply: Callable[..., np.ndarray]  # of the sources' arrays
    invert: Callable[[np.ndarray], Sequence[np.ndarray]]
    source_shapes: Callable[[Shape], Sequence[Shape]]  # from the target's


def _swapped(x: np.ndarray) -> np.ndarray:
    """The last two axes exchanged."""
    return np.swapaxes(x, -1, -2)


AS_IS = Transform("as is", lambda x: x, lambda x: [x], lambda shape: [shape])
TRANSPOSED = Transform("transposed", np.transpose, lambda x: [x.T], lambda shape: [shape[::-1]])
# A depthwise convolution of torch is [C, 1, K], ours [K, C].
CONV = Transform(
    "depthwise convolution",
    lambda x: x[:, 0].T,
    lambda x: [x.T[:, None]],
    lambda shape: [(shape[1], 1, shape[0])],
)
# Of a stack of matrices, each.
EACH_TRANSPOSED = Transform(
    "each transposed",
    _swapped,
    lambda x: [_swapped(x)],
    lambda shape: [(*shape[:-2], shape[-1], shape[-2])],
)


def joined(*sizes: int) -> Transform:
    """Matrices (or biases) transposed and side by side; `sizes` are their widths."""
    ends = np.cumsum(sizes)[:-1]
    return Transform(
        "transposed, side by side",
        lambda *parts: np.concatenate([part.T for part in parts], axis=-1),
        lambda x: [part.T for part in np.split(x, ends, axis=-1)],
        lambda shape: [(size, *shape[:-1]) for size in sizes],
    )


def reordered(sizes: Sequence[int], order: Sequence[int]) -> Transform:
    """A fused matrix (or bias) whose rows come in sections, which ours has in another order.

    Args:
        sizes: of the source's sections.
        order: for each of our sections, which of the source's it is.
    """

    def permuted(x: np.ndarray, sizes: Sequence[int], order: Sequence[int]) -> np.ndarray:
        parts = np.split(x, np.cumsum(sizes)[:-1])
        return np.concatenate([parts[i] for i in order])

    ours = [sizes[i] for i in order]
    back = [list(order).index(i) for i in range(len(order))]
    return Transform(
        "sections reordered and transposed",
        lambda x: permuted(x, sizes, order).T,  # of a bias, .T does nothing
        lambda x: [permuted(x.T, ours, back)],
        lambda shape: [shape[::-1]],
    )


def stacked(count: int) -> Transform:
    """Matrices transposed and stacked on a new first axis."""
    return Transform(
        "transposed and stacked",
        lambda *parts: np.stack([part.T for part in parts]),
        lambda x: [part.T for part in x],
        lambda shape: [shape[:0:-1]] * count,
    )


class Rule(NamedTuple):
    """A weight: its name, the tensors it is made of in the source, and how."""

    source: str | tuple[str, ...]
    target: str
    transform: Transform = AS_IS

    @property
    def sources(self) -> tuple[str, ...]:
        """The source tensors, one or several."""
        return (self.source,) if isinstance(self.source, str) else self.source

    def within(self, source: str, target: str) -> "Rule":
        """The rule below a prefix on either side."""
        names = tuple(f"{source}.{name}" for name in self.sources)
        return Rule(names, f"{target}.{self.target}", self.transform)


class Ignored(NamedTuple):
    """A source tensor that is not a weight of its own, and why."""

    source: str
    reason: str
    is_embedding: bool = False  # it must then equal the embedding


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
        shapes = rule.transform.source_shapes(target[rule.target])
        for name, want in zip(rule.sources, shapes, strict=True):
            if name not in source:
                problems.append(f"{name} {want} is missing")
            elif source[name].shape != want:
                problems.append(f"{name} has shape {source[name].shape}, the config says {want}")
            elif source[name].dtype.kind not in "fV":  # V: bfloat16
                problems.append(f"{name} holds {source[name].dtype}, not real numbers")
    known = {name for rule in used for name in rule.sources}
    known |= {entry.source for entry in ignored}
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
