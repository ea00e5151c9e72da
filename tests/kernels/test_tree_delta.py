"""The gated delta rule: what its table does not say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import delta_chunks, native, replay_delta, replay_tree_delta, tree_delta
from pallas_kernels.tree_delta import reference, xla
from tests.cases import tree_delta as table
from tests.cases.base import NEEDS_NATIVE, assert_finite, relative_error

CASE = table.CASES["tree"]
PADDED = table.CASES["padded nodes"]
LARGE = table.CASES["64 nodes"]
replayed = jax.jit(replay_delta)
run = jax.jit(functools.partial(tree_delta, implementation="xla"))
run_native = jax.jit(functools.partial(tree_delta, implementation="native"))
run_kernel = jax.jit(functools.partial(tree_delta, implementation="pallas_interpret"))
RUNS = [
    pytest.param(run, id="xla"),
    pytest.param(run_native, id="native", marks=NEEDS_NATIVE),
    pytest.param(run_kernel, id="pallas_interpret"),
]
of_each_version = pytest.mark.parametrize("run", RUNS)


def arguments(case=CASE):
    """Arguments of a tree of which all nodes are queries."""
    given = table.on_device(case, table.inputs(case))
    return [*table.named(given, table.TREE[:-1]), given.mask]


def test_the_reference_is_the_published_recurrence():
    """S <- exp(g) S (I - beta k k^T) + beta v k^T, along each path from the root on."""
    i = table.inputs(CASE)
    y, u, states = table.truth(CASE)
    each = CASE.heads // CASE.groups
    for b, node, h in np.ndindex(CASE.batch, CASE.nodes, CASE.heads):
        S, path = i.state[b, h], np.flatnonzero(i.mask[b, node])
        for j in path:
            k = i.k[b, j, h // each] / np.sqrt((i.k[b, j, h // each] ** 2).sum() + 1e-6)
            kept = np.exp(i.g[b, j, h]) * (np.eye(len(k)) - i.beta[b, j, h] * np.outer(k, k))
            S = S @ kept + i.beta[b, j, h] * np.outer(i.v[b, j, h], k)
        q = i.q[b, node, h // each] / np.sqrt((i.q[b, node, h // each] ** 2).sum() + 1e-6)
        np.testing.assert_allclose(states[b, node, h], S, atol=1e-13)
        np.testing.assert_allclose(y[b, node, h], S @ q / np.sqrt(CASE.state), atol=1e-13)
    after = reference.replay_delta(i.k, u, i.g, i.state, i.mask[:, -1])
    np.testing.assert_allclose(after, states[:, -1], atol=1e-13)


def wrong_ancestors(mask):
    """All pairs of a node and an earlier one that is not above it."""
    return np.argwhere(np.tril(~mask))


@of_each_version
def test_every_wrong_ancestor_is_found(run):
    """A sibling that leaks in changes its own node, those below it, and no other."""
    case = CASE.but(batch=1)
    *given, mask = arguments(case)
    right = np.asarray(mask[0])
    pairs = wrong_ancestors(right)
    assert len(pairs) > 40
    masks = np.repeat(right[None], len(pairs), axis=0)
    masks[np.arange(len(pairs)), pairs[:, 0], pairs[:, 1]] = True
    given = [jnp.broadcast_to(x, (len(pairs), *x.shape[1:])) for x in given]
    y, u = (np.asarray(x) for x in run(*given, jnp.asarray(masks)))
    same_y, same_u = (np.asarray(x) for x in run(*given, jnp.broadcast_to(mask, masks.shape)))
    for pair, (node, _) in enumerate(pairs):
        true_y, true_u, _ = table.truth(case)
        assert relative_error(y[pair, node], true_y[0, node]) > 1e-3
        assert relative_error(u[pair, node], true_u[0, node]) > 1e-3
        others = ~right[:, node]
        np.testing.assert_array_equal(y[pair, others], same_y[pair, others])
        np.testing.assert_array_equal(u[pair, others], same_u[pair, others])


def grown(run, case, sizes, in_slots):
    """Outputs and u of a tree that grows by so many nodes at a time.

    With `in_slots` as deep trees of draft models do: there is a slot for each node of the whole
    tree, empty ones hold NaN, and the nodes of a call come after all slots.
    """
    q, k, v, g, beta, state, mask = arguments(case)
    batch, nodes = mask.shape[:2]
    outputs, u, first = [], jnp.full(v.shape, jnp.nan), 0
    for size in sizes:
        new, old = slice(first, first + size), slice(0, first)
        if in_slots:
            done = jnp.arange(nodes) < first
            above = jnp.concatenate([mask, mask[:, new]], axis=1) & done
            own = jnp.broadcast_to(jnp.eye(size, dtype=bool), (batch, size, size))
            tree = jnp.concatenate([above, jnp.pad(own, ((0, 0), (nodes, 0), (0, 0)))], axis=2)
            keys, decays = (
                jnp.concatenate([jnp.where(done.reshape(-1, *rest), x, jnp.nan), x[:, new]], axis=1)
                for x, rest in ((k, (1, 1)), (g, (1,)))
            )
            prefix = u
        else:
            tree = mask[:, : new.stop, : new.stop]
            keys, decays, prefix = k[:, : new.stop], g[:, : new.stop], u[:, old] if first else None
        y, record = run(
            *(q[:, new], keys, v[:, new], decays, beta[:, new], state, tree), prefix_u=prefix
        )
        outputs.append(y)
        u = u.at[:, new].set(record[:, -size:])
        first += size
    return jnp.concatenate(outputs, axis=1), u


@pytest.mark.thorough
@of_each_version
@pytest.mark.parametrize("in_slots", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_tree_that_grows_is_the_tree(run, in_slots):
    """The nodes of a call are siblings, as those of a level are."""
    sizes = (1, 3, 4, 5)
    case = CASE.but(batch=1, shape="levels")
    y, u = grown(run, case, sizes, in_slots)
    true_y, true_u, states = table.truth(case)
    assert relative_error(y, true_y) < 3e-7
    assert relative_error(u, true_u) < 3e-7
    *_, mask = arguments(case)
    given = table.on_device(case, table.inputs(case))
    state = replayed(given.k, u, given.g, given.state, mask[:, -1])
    assert relative_error(state, states[:, -1]) < 3e-7


@of_each_version
@pytest.mark.parametrize("fill", [np.nan, np.inf, 0.0])
def test_what_nodes_that_do_not_exist_hold_reaches_nothing(run, fill):
    """Nor do their rows of the mask: all nodes, or one whose decay is not theirs. To the bit."""
    *given, mask = arguments(PADDED.but(shape="chain", decays="-100 among 0"))
    first = PADDED.nodes - PADDED.padded
    state = given.pop()
    filled = [x.at[:, first:].set(fill) for x in given]
    rows = mask.at[:, first:].set(jnp.tril(jnp.ones_like(mask[0]), -1)[first:])
    rows = rows.at[:, first + 1 :, : first - 1].set(False)
    y, u = run(*given, state, mask)
    for one, other in zip((y, u), run(*filled, state, rows), strict=True):
        np.testing.assert_array_equal(one, other)
        assert not np.asarray(one[:, first:]).any()
    after = replayed(given[1], u, given[3], state, mask[:, first - 1])
    record = filled[1], u.at[:, first:].set(fill), filled[3]
    np.testing.assert_array_equal(after, replayed(*record, state, mask[:, first - 1]))


@pytest.mark.parametrize(
    ("chunk_size", "implementation"),
    [
        *((size, "xla") for size in (1, 5, 16, 64, 100)),
        pytest.param(64, "native", marks=NEEDS_NATIVE),
    ],
)
def test_positions_that_are_not_valid_may_be_anywhere(chunk_size, implementation):
    """Chunks of any size; a sequence with holes is the sequence without them."""
    case = LARGE.but(padded=0)
    *given, state = table.named(table.on_device(case, table.inputs(case)), table.TREE[:-1])
    valid = np.random.default_rng(2).random((1, case.nodes)) < 0.7
    holed = [jnp.where(valid.reshape(1, -1, *(1,) * (x.ndim - 2)), x, jnp.nan) for x in given]
    options = dict(chunk_size=chunk_size, implementation=implementation)
    run = jax.jit(functools.partial(delta_chunks, **options))
    y, end = run(*holed, state, jnp.asarray(valid))
    kept = [np.asarray(x, np.float64)[:, valid[0]] for x in given]
    want, last = reference.delta_chunks(*kept, np.asarray(state, np.float64), valid[:, valid[0]])
    assert relative_error(np.asarray(y)[:, valid[0]], want) < 3e-7
    assert relative_error(end, last) < 3e-7
    assert not np.asarray(y)[:, ~valid[0]].any()


@pytest.mark.thorough
@of_each_version
def test_many_steps_do_not_drift(run):
    """Replay after replay, each of a tree from the state that the last one left."""
    i = table.inputs(CASE)
    state, true = jnp.asarray(i.state, jnp.float32), i.state
    given = table.on_device(CASE, i)
    for turn in range(20):
        path = i.mask[:, turn % CASE.nodes]
        arrays = table.named(given, table.TREE[:5])
        _, u = run(*arrays, state, given.mask)
        state = replayed(given.k, u, given.g, state, jnp.asarray(path))
        _, u, _ = reference.tree_delta(*table.named(i, table.TREE[:5]), true, i.parents)
        true = reference.replay_delta(i.k, u, i.g, true, path)
    assert relative_error(state, true) < 3e-7


def test_a_shard_has_the_outputs_of_its_heads():
    """Heads and their groups are cut; nothing is shared between shards."""
    *given, mask = arguments()
    q, k, v, g, beta, state = given
    whole = run(*given, mask)
    for half in (slice(0, 2), slice(2, 4)):
        group = slice(half.start // 2, half.stop // 2)
        part = run(
            *(q[:, :, group], k[:, :, group], v[:, :, half], g[:, :, half], beta[:, :, half]),
            *(state[:, half], mask),
        )
        for one, other in zip(part, whole, strict=True):
            assert relative_error(one, other[:, :, half]) < 3e-7


def test_vmap():
    given = arguments(CASE.but(nodes=5))
    record = given[1], jnp.zeros_like(given[2]), given[3], given[-1][:, 2]
    alone = replay_tree_delta(*record, *given)
    both = jax.vmap(replay_tree_delta)(*(jnp.stack([x, x]) for x in (*record, *given)))
    for one, two in zip(alone, both, strict=True):
        for each in two:
            assert relative_error(each, one) < 3e-7


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 17, 33, 64])
def test_the_inverse_of_any_size(count):
    """Of a system whose series of powers has terms of 1e18 at 64 rows: all of it is 1."""
    ones = np.tril(np.ones((1, 2, count, count)), -1)
    ones[:, 1] *= np.random.default_rng(0).uniform(0.9, 1.0, size=ones.shape[2:])
    found = xla.inverse(jnp.asarray(ones, jnp.float32))
    assert relative_error(found, np.linalg.inv(np.eye(count) + ones)) < 3e-7


def one_by_one(q, k, v, g, beta, state):
    """`delta_chunks` as a scan over positions, with the plain recurrence's derivatives."""
    each = v.shape[2] // k.shape[2]
    q, k = (jnp.repeat(xla.normed(x), each, axis=2) for x in (q * 1.0, k * 1.0))

    def step(state, now):
        q, k, v, g, beta = now
        state = jnp.exp(g)[..., None, None] * state
        u = beta[..., None] * (v - jnp.einsum("bhps,bhs->bhp", state, k))
        state = state + u[..., None] * k[..., None, :]
        return state, jnp.einsum("bhps,bhs->bhp", state, q) * q.shape[-1] ** -0.5

    state, y = lax.scan(step, state, [x.swapaxes(0, 1) for x in (q, k, v, g, beta)])
    return y.swapaxes(0, 1), state


def gradients(function, given):
    def total(given):
        y, state = function(*given)
        return jnp.sum(y**3) + jnp.sum(state**3)

    return jax.jit(jax.grad(total))(tuple(given))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["tree", "betas to 2", "decays of -100 among 0", "equal keys"])
def test_gradients_are_those_of_the_recurrence(name):
    case = table.CASES[name].but(nodes=21, batch=1, shape="random")
    given = table.named(table.on_device(case, table.inputs(case)), table.TREE[:-1])
    valid = jnp.ones((1, case.nodes), bool)
    run = functools.partial(delta_chunks, valid=valid, chunk_size=8)
    for one, other in zip(gradients(run, given), gradients(one_by_one, given), strict=True):
        assert relative_error(one, other) < 5e-6


def test_gradients_are_finite_where_positions_hold_nan():
    given = table.on_device(PADDED, table.inputs(PADDED))
    arrays = table.named(given, table.TREE[:-1])
    of_sequence = gradients(
        functools.partial(delta_chunks, valid=given.valid, chunk_size=8), arrays
    )
    of_tree = gradients(lambda *arrays: tree_delta(*arrays, given.mask), arrays)
    for gradient in (*of_sequence, *of_tree):
        assert_finite(gradient)


def fused_arguments():
    before = table.on_device(CASE, table.previous(CASE), table.truth_before(CASE)[1])
    return [*table.named(before, table.RECORD), before.path, *arguments()]


@NEEDS_NATIVE
def test_native_code_is_the_same_to_the_bit_in_any_tree():
    """A path of a tree as a chain, and its last nodes alone: nothing depends on other nodes."""
    q, k, v, g, beta, state, mask = arguments()
    whole = run_native(q, k, v, g, beta, state, mask)
    path = np.flatnonzero(np.asarray(mask)[0, -1])
    nodes = (x[:1, path] for x in (q, k, v, g, beta))
    chain = jnp.tril(jnp.ones((1, len(path), len(path)), bool))
    for one, other in zip(run_native(*nodes, state[:1], chain), whole, strict=True):
        np.testing.assert_array_equal(one[0], other[0, path])
    newest = (x[:, -3:] for x in (v, beta))
    v, beta = newest
    y, u = run_native(q[:, -3:], k, v, g, beta, state, mask, prefix_u=whole[1][:, :-3])
    np.testing.assert_array_equal(y, whole[0][:, -3:])
    np.testing.assert_array_equal(u, whole[1])


@NEEDS_NATIVE
@pytest.mark.parametrize("op", [replay_tree_delta, delta_chunks])
def test_native_code_updates_a_state_in_place_only_if_it_is_donated(op):
    given = fused_arguments() if op is replay_tree_delta else [*arguments()[:-1], None]
    if op is delta_chunks:
        given[-1] = jnp.ones(given[0].shape[:2], bool)
    at = len(given) - 2
    kept = np.asarray(given[at]).copy()
    native = functools.partial(op, implementation="native")
    want = jax.jit(native)(*given)[-1]
    np.testing.assert_array_equal(given[at], kept)
    donated = jax.jit(native, donate_argnums=at)(*given[:at], jnp.array(kept), given[-1])[-1]
    np.testing.assert_array_equal(donated, want)


WRONG = {
    "fewer decays": (7, lambda array: array[:, :-1]),
    "a state of fewer channels": (9, lambda array: array[:, :, :-1]),
    "another mask": (10, lambda array: array[:, :-1]),
    "more groups than heads": (4, lambda array: jnp.concatenate([array] * 3, axis=2)),
    "a path of another tree": (3, lambda array: array[:, :-1]),
    "15 states": (5, lambda array: array[..., :-1]),
    "a prefix": (11, lambda array: jnp.zeros((2, 1, 4, 16))),
}


@NEEDS_NATIVE
@pytest.mark.parametrize("name", WRONG)
def test_wrong_sizes_are_errors(name):
    """The function refuses what the op's own checks let pass, and reads nothing."""
    which, change = WRONG[name]
    given = [*fused_arguments(), jnp.zeros((2, 0, 4, 16))]
    sizes = given[6].shape, given[6].shape, given[9].shape
    results = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]
    given[which] = change(given[which])
    with pytest.raises(Exception, match="shapes do not fit|another shape"):
        jax.block_until_ready(native.call("replay_tree_delta", results, *given))


def call(op=tree_delta, groups=None, newest=0, prefix=None, **options):
    """With so many groups, without the first nodes as queries, or with u of a prefix."""
    q, k, v, g, beta, state, mask = arguments()
    k = k if groups is None else jnp.repeat(k[:, :, :1], groups, axis=2)
    q = q if groups is None else k
    if op is replay_delta:
        return op(k, v, g, state, mask[:, -1], **options)
    if op is delta_chunks:
        return op(q, k, v, g, beta, state, mask[:, -1], **options)
    if op is replay_tree_delta:
        return op(k, v, g, mask[:, -1], q, k, v, g, beta, state, mask, **options)
    q, v, beta = (x[:, newest:] for x in (q, v, beta))
    return op(q, k, v, g, beta, state, mask, prefix_u=prefix, **options)


OPS = (tree_delta, replay_delta, replay_tree_delta, delta_chunks)
REFUSED = [
    (dict(newest=1), "0 prefix and 12 query nodes are not 13 nodes"),
    (dict(prefix=jnp.zeros((2, 13, 4, 16))), "13 prefix and 13 query nodes are not 13 nodes"),
    (dict(op=delta_chunks, chunk_size=0), "chunk_size = 0 is not positive"),
    *((dict(op=op, groups=3), "3 groups do not divide 4 heads") for op in OPS),
    *((dict(op=op, implementation="cuda"), f"'cuda' of {op.__name__}; known") for op in OPS),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        call(**changes)
