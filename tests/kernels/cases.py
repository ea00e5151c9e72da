"""The one table of cases that every implementation of every tree op is tested on."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes, and what is special about the numbers."""

    name: str
    batch: int = 2
    nodes: int = 13
    replayed: int = 6  # nodes of the tree before
    queries: int | None = None  # None: all nodes
    heads: int = 4
    head_dim: int = 16
    state: int = 16
    groups: int = 1
    width: int = 4
    dt_scale: float = 1.0
    padded: int = 0  # nodes at the end that do not exist
    bf16: bool = False

    def __str__(self):
        return self.name


CASES = (
    Case("root only", nodes=1, replayed=1),
    Case("two nodes", nodes=2, groups=2, width=3),
    Case("tree"),
    Case("newest level", queries=3),
    Case("newest node of many", nodes=40, queries=1, heads=2),
    Case("groups", groups=2, head_dim=32),
    Case("a group a head", groups=4, width=2),
    Case("padded nodes", padded=5, replayed=17),
    Case("blocks of nodes", nodes=70, batch=1, heads=2),
    Case("one row", batch=1, state=32),
    Case("three rows, one with an empty path", batch=3, nodes=5),
    Case("large time steps", dt_scale=100.0),
    Case("tiny time steps", dt_scale=1e-4),
    Case("bf16", bf16=True),
    Case("bf16, many nodes", nodes=70, replayed=70, batch=1, heads=2, bf16=True),
)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Float64 inputs that are exact in the case's type, and the trees they live on."""

    x: np.ndarray
    dt: np.ndarray
    A: np.ndarray
    B: np.ndarray
    C: np.ndarray
    D: np.ndarray
    state: np.ndarray
    conv_input: np.ndarray
    conv_state: np.ndarray
    conv_weight: np.ndarray
    conv_bias: np.ndarray
    parents: np.ndarray
    mask: np.ndarray
    last: np.ndarray  # of a path in each row


def random_parents(rng, batch, nodes):
    """A different random tree for each row."""
    return np.array(
        [[-1, *(int(rng.integers(0, i)) for i in range(1, nodes))] for _ in range(batch)]
    )


def ancestor_mask(parents):
    """`[B, N, N]`, ancestors-or-self."""
    batch, nodes = parents.shape
    mask = np.zeros((batch, nodes, nodes), bool)
    for b in range(batch):
        for node in range(nodes):
            if parents[b, node] >= 0:
                mask[b, node] = mask[b, parents[b, node]]
            mask[b, node, node] = True
    return mask


def make_inputs(case, seed=0):
    """Random inputs of a case."""
    import ml_dtypes

    rng = np.random.default_rng(seed)
    small = ml_dtypes.bfloat16 if case.bf16 else np.float32

    def draw(*shape, dtype=np.float32):
        return rng.normal(size=shape).astype(dtype).astype(np.float64)

    b, n, h, p, s, g = (
        case.batch,
        case.nodes,
        case.heads,
        case.head_dim,
        case.state,
        case.groups,
    )
    parents = random_parents(rng, b, n)
    mask = ancestor_mask(parents)
    exists = np.arange(n) < n - case.padded
    mask &= exists
    softplus = np.log1p(np.exp(draw(b, n, h))) * case.dt_scale
    channels = h * p + 2 * g * s
    return Inputs(
        x=draw(b, n, h, p, dtype=small),
        dt=softplus.astype(np.float32).astype(np.float64),
        A=-np.exp(draw(h)).astype(np.float32).astype(np.float64),
        B=draw(b, n, g, s, dtype=small),
        C=draw(b, n, g, s, dtype=small),
        D=draw(h, p),
        state=draw(b, h, p, s),
        conv_input=draw(b, n, channels, dtype=small),
        conv_state=draw(b, case.width - 1, channels, dtype=small),
        conv_weight=draw(case.width, channels, dtype=small),
        conv_bias=draw(channels, dtype=small),
        parents=parents,
        mask=mask,
        # The deepest existing node of row 0, the root of row 1, the empty path of further rows.
        last=np.array([mask[0, : n - case.padded].sum(-1).argmax(), 0, -1])[:b],
    )


def previous_inputs(case):
    """Inputs of the tree before `make_inputs`'s, and the path that was accepted in it."""
    inputs = make_inputs(dataclasses.replace(case, nodes=case.replayed, padded=0), seed=1)
    return inputs, accepted_path(inputs)


def accepted_path(inputs):
    """`[B, N]`, the path that ends in each row's `last`."""
    rows = np.arange(len(inputs.last))
    path = inputs.mask[rows, np.maximum(inputs.last, 0)]
    return path & (inputs.last >= 0)[:, None]


def relative_error(value, truth):
    """Frobenius norm of the difference, relative to the truth's."""
    difference = np.asarray(value, np.float64) - truth
    return np.linalg.norm(difference) / np.linalg.norm(truth)
