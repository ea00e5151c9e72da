"""Rules that map tensors of a checkpoint to weights of a `HybridLM`.

A family has a table of rules: the source tensors of each weight, and the transform. Every
transform has an inverse, so one table both reads and writes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from stree_jax.checkpoint.arrays import Tensor

Shape = tuple[int, ...]


class Transform(NamedTuple):
    """An invertible function from one or more source arrays to one weight."""

    name: str
    apply: Callable[..., np.ndarray]  # source arrays -> weight
    invert: Callable[[np.ndarray], Sequence[np.ndarray]]
    source_shapes: Callable[[Shape], Sequence[Shape]]  # weight's shape -> source shapes
    keeps_groups: bool = True  # of numbers in a source's last axis, as inputs of a matrix


def _swapped(x: np.ndarray) -> np.ndarray:
    """Swaps the last two axes."""
    return np.swapaxes(x, -1, -2)


AS_IS = Transform("as is", lambda x: x, lambda x: [x], lambda shape: [shape])
TRANSPOSED = Transform("transposed", np.transpose, lambda x: [x.T], lambda shape: [shape[::-1]])
# Depthwise convolutions are [C, 1, K] in torch and [K, C] here.
CONV = Transform(
    "depthwise convolution",
    lambda x: x[:, 0].T,
    lambda x: [x.T[:, None]],
    lambda shape: [(shape[1], 1, shape[0])],
)
# A stack of matrices.
EACH_TRANSPOSED = Transform(
    "each transposed",
    _swapped,
    lambda x: [_swapped(x)],
    lambda shape: [(*shape[:-2], shape[-1], shape[-2])],
)


# A norm that multiplies by `1 + w`, whose scale is held as such: in float32, for bfloat16 would
# round it.
PLUS_ONE = Transform(
    "1 + w",
    lambda w: w.astype(np.float32) + 1,
    lambda scale: [scale.astype(np.float32) - 1],
    lambda shape: [shape],
)


def gathered(sizes: Sequence[int], order: Callable[[], np.ndarray] | None = None) -> Transform:
    """Concatenates matrices (or biases) of `sizes` rows, and transposes.

    `order` gives for each column of the weight its row in the sources; None: it is the same. It is
    called when tensors are read, since a config alone may say any size.
    """
    ends = np.cumsum(sizes)[:-1]

    def apply(*parts: np.ndarray) -> np.ndarray:
        rows = np.concatenate(parts)
        return (rows if order is None else rows[order()]).T

    def invert(x: np.ndarray) -> list[np.ndarray]:
        return np.split(x.T if order is None else x.T[np.argsort(order())], ends)

    return Transform(
        "rows gathered and transposed",
        apply,
        invert,
        lambda shape: [(size, *shape[:-1]) for size in sizes],
    )


def sections(sizes: Sequence[int], order: Sequence[int]) -> Callable[[], np.ndarray]:
    """The order of rows, for `gathered`, that puts sections of these sizes in an order."""

    def rows() -> np.ndarray:
        parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
        return np.concatenate([parts[i] for i in order])

    return rows


def conv_gathered(sizes: Sequence[int], order: Callable[[], np.ndarray] | None = None) -> Transform:
    """`CONV` of sources of `sizes` channels, see `gathered`."""
    matrix = gathered(sizes, order)
    return Transform(
        "depthwise convolutions, channels gathered",
        lambda *parts: matrix.apply(*(part[:, 0] for part in parts)),
        lambda x: [channels[:, None] for channels in matrix.invert(x)],
        lambda shape: [(size, 1, shape[0]) for size in sizes],
    )


def stacked_pairs(count: int) -> Transform:
    """Stacks pairs of matrices, transposed and side by side; all left ones come first."""

    def halves(shape: Shape) -> Sequence[Shape]:
        return [(shape[2] // 2, shape[1])] * (2 * count)

    return Transform(
        "pairs transposed, side by side and stacked",
        lambda *parts: np.stack(
            [np.concatenate(pair).T for pair in zip(parts[:count], parts[count:], strict=True)]
        ),
        lambda x: [half.T for side in np.split(x, 2, axis=2) for half in side],
        halves,
    )


def stacked(count: int) -> Transform:
    """Transposes matrices and stacks them along a new first axis."""
    return Transform(
        "transposed and stacked",
        lambda *parts: np.stack([part.T for part in parts]),
        lambda x: [part.T for part in x],
        lambda shape: [shape[:0:-1]] * count,
    )


def of_heads(before: int, size: int, behind: int, *, transposed: bool) -> Transform:
    """`[H, size, I]` of a matrix whose rows have more channels of each head before and behind.

    The inverse has zeros there, for the sum with what the rules of those channels give.
    """
    channels, turned = before + size + behind, _swapped if transposed else np.asarray

    def part(x: np.ndarray) -> np.ndarray:
        return turned(x.reshape(-1, channels, x.shape[1])[:, before : before + size])

    def whole(x: np.ndarray) -> list[np.ndarray]:
        return [np.concatenate(np.pad(turned(x), ((0, 0), (before, behind), (0, 0))))]

    return Transform(
        "some rows of each head",
        part,
        whole,
        lambda shape: [(shape[0] * channels, shape[1 if transposed else 2])],
        keeps_groups=transposed,
    )


def reshaped(shape: Shape) -> Transform:
    """Of a tensor with more axes of size 1, or fewer."""
    return Transform("reshaped", np.ravel, lambda x: [x.reshape(shape)], lambda _: [shape])


class Rule(NamedTuple):
    """A weight, the source tensors that make it, and the transform."""

    source: str | tuple[str, ...]
    target: str
    transform: Transform = AS_IS

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the source tensors."""
        return (self.source,) if isinstance(self.source, str) else self.source

    def within(self, source: str, target: str) -> "Rule":
        """The rule with prefixes on both sides; an empty one is none."""
        before, inside = (f"{prefix}." if prefix else "" for prefix in (source, target))
        names = tuple(before + name for name in self.sources)
        return Rule(names, inside + self.target, self.transform)


def renamed(rules: Sequence[Rule], name: Callable[[str], str]) -> list[Rule]:
    """The rules with other names of the source tensors."""
    return [rule._replace(source=tuple(map(name, rule.sources))) for rule in rules]


class Ignored(NamedTuple):
    """A source tensor that is not a weight, and why."""

    source: str
    reason: str
    is_embedding: bool = False  # must equal the embedding


def check_coverage(
    rules: Sequence[Rule],
    ignored: Sequence[Ignored],
    source: Mapping[str, Tensor],
    target: Mapping[str, Shape],
) -> list[Rule]:
    """Checks that rules, source tensors and weights match one to one; returns those that apply.

    Rules for weights that the model does not have (such as a bias) are dropped; their tensors must
    be absent.
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
                have = f"{source[name].shape!s:.80}"
                problems.append(f"{name} has shape {have}, the config says {want}")
            elif source[name].dtype.kind not in "fV":  # V: bfloat16
                problems.append(f"{name} holds {source[name].dtype}, not real numbers")
    known = {name for rule in used for name in rule.sources}
    known |= {entry.source for entry in ignored}
    problems += [
        f"{name!r:.80} {source[name].shape!s:.80} is not expected"
        for name in source
        if name not in known
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:5])
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"the tensors do not fit the config: {shown}{more}")
    return used
