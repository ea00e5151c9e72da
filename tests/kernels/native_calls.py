"""Calls the functions of the native library as XLA does, without XLA: with random shapes.

Each array is an allocation of its own, without room behind it, so that a sanitizer sees a number
too far; results begin as NaN, so that a number that is not written is seen too. The tasks of a call
run on threads of this process, as many as are asked for.

    python -m tests.kernels.native_calls LIBRARY [--calls 10000] [--seed 0] [--threads 4]
"""

import argparse
import collections
import ctypes as c
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np

POINTERS = c.POINTER(c.c_void_p)
NUMBERS = c.POINTER(c.c_int64)
# Numbers that XLA's headers give types, kinds of attributes, and the stage of a call.
TYPES = {"bool": 1, "int8": 2, "int32": 4, "int64": 5, "float32": 11, "bfloat16": 16}
ARRAY, SCALAR, EXECUTE = 1, 3, 3
ERROR_CREATE, SCHEDULE, NUM_THREADS, FUNCTIONS = 0, 11, 12, 18


def structure(name, *fields, begins=True):
    """A struct of XLA's C interface; nearly all begin with their size and a list of extensions."""
    first = [("struct_size", c.c_size_t), ("extensions", c.c_void_p)] if begins else []
    return type(name, (c.Structure,), {"_fields_": [*first, *fields]})


Buffer = structure(
    "Buffer",
    *(("dtype", c.c_int), ("data", c.c_void_p), ("rank", c.c_int64), ("dims", NUMBERS)),
)
Values = structure(
    "Values", ("size", c.c_int64), ("types", c.POINTER(c.c_int)), ("values", POINTERS)
)
Attributes = structure(
    "Attributes",
    *(
        ("size", c.c_int64),
        ("types", c.POINTER(c.c_int)),
        ("names", POINTERS),
        ("values", POINTERS),
    ),
)
Name = structure("Name", ("text", c.c_char_p), ("size", c.c_size_t), begins=False)
Scalar = structure("Scalar", ("dtype", c.c_int), ("value", c.c_void_p), begins=False)
Array = structure(
    "Array", ("dtype", c.c_int), ("size", c.c_size_t), ("data", c.c_void_p), begins=False
)
Version = structure("Version", ("major", c.c_int), ("minor", c.c_int))
Api = structure(
    "Api", ("version", Version), ("internal", c.c_void_p), ("functions", c.c_void_p * FUNCTIONS)
)
Frame = structure(
    "Frame",
    *(("api", c.POINTER(Api)), ("context", c.c_void_p), ("stage", c.c_int)),
    *(("arguments", Values), ("results", Values), ("attributes", Attributes)),
    ("future", c.c_void_p),
)
Error = structure("Error", ("message", c.c_char_p), ("code", c.c_int))
Task = structure("Task", *((name, c.c_void_p) for name in ("context", "task", "data")))
Count = structure("Count", ("context", c.c_void_p), ("number", NUMBERS))
CALLBACK = c.CFUNCTYPE(c.c_void_p, c.c_void_p)


def sized(kind, **fields):
    return kind(struct_size=c.sizeof(kind), **fields)


class Runtime:
    """What a function of the library asks of XLA: errors, and threads for its tasks."""

    def __init__(self, library, threads):
        self.library, self.threads, self.errors = c.CDLL(str(library)), threads, []
        self._callbacks = {
            ERROR_CREATE: CALLBACK(self._error),
            SCHEDULE: CALLBACK(self._schedule),
            NUM_THREADS: CALLBACK(self._num_threads),
        }
        functions = (c.c_void_p * FUNCTIONS)()
        for place, function in self._callbacks.items():
            functions[place] = c.cast(function, c.c_void_p).value
        self.api = sized(Api, version=sized(Version), functions=functions)

    def _error(self, given):
        self.errors.append(Error.from_address(given).message.decode())
        return 1

    def _schedule(self, given):
        task = Task.from_address(given)
        run = c.CFUNCTYPE(None, c.c_void_p)(task.task)
        threading.Thread(target=run, args=(task.data,)).start()

    def _num_threads(self, given):
        Count.from_address(given).number[0] = self.threads

    def call(self, name, arguments, results, attributes):
        """Calls a function; returns why it refuses, or None."""
        kept = []

        def pointers(objects):
            kept.extend(objects)
            return (c.c_void_p * len(objects))(*map(c.addressof, objects))

        def values(arrays):
            kinds = (c.c_int * len(arrays))(*[1] * len(arrays))
            buffers = [
                sized(
                    Buffer,
                    dtype=TYPES[array.dtype.name],
                    data=array.ctypes.data,
                    rank=array.ndim,
                    dims=(c.c_int64 * array.ndim)(*array.shape),
                )
                for array in arrays
            ]
            return sized(Values, size=len(arrays), types=kinds, values=pointers(buffers))

        def attribute(value):
            dtype = TYPES[value.dtype.name]
            if value.ndim:
                return Array(dtype, value.size, value.ctypes.data)
            return Scalar(dtype, value.ctypes.data)

        given = [np.asarray(attributes[key]) for key in sorted(attributes)]
        names = [Name(key.encode(), len(key)) for key in sorted(attributes)]
        frame = sized(
            Frame,
            api=c.pointer(self.api),
            stage=EXECUTE,
            arguments=values(arguments),
            results=values(results),
            attributes=sized(
                Attributes,
                size=len(given),
                types=(c.c_int * len(given))(*[ARRAY if v.ndim else SCALAR for v in given]),
                names=pointers(names),
                values=pointers([attribute(value) for value in given]),
            ),
        )
        frame.struct_size = Frame.future.offset  # which no function of ours has
        function = getattr(self.library, f"stree_jax_{name}")
        function.restype = c.c_void_p
        failed = function(c.byref(frame))
        return self.errors.pop() if failed else None


class Shapes:
    """Random sizes of one call, and arrays of random numbers."""

    def __init__(self, rng):
        self.rng = rng

    def of(self, *sizes):
        return int(self.rng.choice(sizes))

    def f(self, *shape):
        return self.rng.standard_normal(shape, np.float32)

    def b(self, *shape):
        return self.rng.random(shape) < 0.6

    def i(self, low, high, *shape):
        return self.rng.integers(low, high, shape).astype(np.int32)

    def after(self, state):
        """Where the new state goes: to a place of its own, or to that of the old one."""
        return state if self.of(0, 1) else out(*state.shape)


def out(*shape):
    return np.full(shape, np.nan, np.float32)


NONE = np.zeros(0, np.float32)
f32, i64 = np.float32, np.int64


def weights(s, *shape):
    """Blocks of a matrix, `[..., inputs, 32]`, and their scales if they have some."""
    kind = s.of(0, 1, 2)
    if kind == 2:
        groups = -(-shape[-2] // 32)
        return s.i(-127, 128, *shape).astype(np.int8), s.f(*shape[:-2], groups, 32)
    return s.f(*shape).astype((np.float32, ml_dtypes.bfloat16)[kind]), NONE


def matmul(s):
    rows, inputs, columns = s.of(0, 1, 2, 3, 6, 7, 14, 27, 300), s.of(0, 1, 31, 32, 33, 257, 600), 0
    columns, first = s.of(0, 1, 31, 32, 33, 100, 129, 300), s.of(0, 1, 2)
    matrices = s.of(1, 1, 2, 5)
    blocks, scales = weights(s, matrices, first + -(-columns // 32) + s.of(0, 1), inputs, 32)
    which = s.i(0, matrices, rows if matrices > 1 or s.of(0, 1) else 0)
    x = s.f(rows, inputs)
    x[s.b(rows)] *= s.of(0, 1)  # rows of zeros
    return [x, blocks, scales, which], [out(rows, columns)], dict(first_block=i64(first))


def rows(s):
    inputs, blocks, count = s.of(0, 1, 31, 33, 70), s.of(1, 2, 5), s.of(0, 1, 2, 9)
    first = s.of(0, 1, 31, blocks * 32 - 1)
    columns = s.of(1, blocks * 32 - first)
    index = s.i(-3, columns + 3, count)
    found = [*weights(s, blocks, inputs, 32), index], [out(count, inputs)]
    return *found, dict(first=i64(first), columns=i64(columns))


def rms_norm(s):
    rows, size = s.of(0, 1, 3, 700), 16 * s.of(0, 1, 2, 3, 9)
    return [s.f(rows, size), s.f(size)], [out(rows, size)], dict(epsilon=f32(1e-5))


def add_rms_norm(s):
    rows, size = s.of(0, 1, 3, 700), 16 * s.of(0, 1, 2, 3, 9)
    squares = abs(s.f(rows, s.of(0, 1, 5))) if s.of(0, 1) else NONE
    given = [s.f(rows, size), s.f(rows, size), squares, s.f(size)]
    settings = dict(multiplier=f32(0.7), epsilon=f32(1e-5), deferred_epsilon=f32(1e-5))
    return given, [out(rows, size), out(rows, size)], settings


def gated_rms_norm(s):
    rows, groups, start = s.of(0, 1, 3, 300), s.of(1, 2, 5), s.of(0, 1, 17)
    size = groups * 16 * s.of(0, 1, 2, 5)
    weight = s.f(size) if s.of(0, 1) else NONE
    given = [s.f(rows, size), s.f(rows, start + size + s.of(0, 3)), weight]
    settings = dict(epsilon=f32(1e-5), groups=i64(groups), gate_start=i64(start))
    return given, [out(rows, size)], settings | dict(gate_first=i64(s.of(0, 1)))


def ssd(s):
    b, t, g, n = s.of(0, 1, 2), s.of(0, 1, 2, 9), s.of(1, 2), s.of(0, 1, 3, 16, 17)
    h, p = g * s.of(0, 1, 3), 16 * s.of(0, 1, 2, 4, 5)
    state = s.f(b, h, p, n)
    inner = s.f(b, t, h, p), abs(s.f(b, t, h)), -abs(s.f(h)), s.f(b, t, g, n), s.f(b, t, g, n)
    return [*inner, s.f(h, p), state], [out(b, t, h, p), s.after(state)], {}


def largest_threshold(s):
    rows, size = s.of(0, 1, 5, 40), s.of(0, 1, 63, 64, 65, 500)
    values = abs(s.f(rows, size))
    if s.of(0, 1):
        values[s.b(rows, size)] = s.rng.choice([np.inf, np.nan, -1.0, 0.0])
    summands = abs(s.f(rows if s.of(0, 1) else 0, size))
    return [values, summands, s.f(rows) + 1], [out(rows)], {}


def tree(s, b, n):
    """Who sees whom, now and then nonsense."""
    mask = s.b(b, n, n)
    return mask if s.of(0, 1) else np.tril(mask) | np.eye(n, dtype=bool)


def tree_scan(s, replays=False):
    b, g, n, states = s.of(0, 1, 2, 3), s.of(1, 2), s.of(0, 1, 2, 7, 20), 16 * s.of(0, 1, 2, 8)
    h, p, before = g * s.of(0, 1, 3), 16 * s.of(0, 1, 2, 4), s.of(0, 1, 6) if replays else 0
    q = s.of(0, n // 2, n)
    # A mean of no numbers is none.
    gate, start, channels = s.of(0, 1, 2, 3) if p else s.of(0, 1), s.of(0, 5), h * p
    state = s.f(b, h, p, states)
    given = [
        *(s.f(b, before, h, p), abs(s.f(b, before, h)), s.f(b, before, g, states), s.b(b, before)),
        *(s.f(b, n, h, p), abs(s.f(b, n, h)), -abs(s.f(h)), s.f(b, n, g, states)),
        *(s.f(b, q, g, states), s.f(*[h, p][: s.of(1, 2)]), state, tree(s, b, n)),
        s.f(b, q, start + channels + s.of(0, 3)) if gate else NONE,
        s.f(channels) if gate > 1 else NONE,
    ]
    results = [out(b, q, h, p), out(b, q, h) if gate == 2 else out(0)]
    if replays:
        results.append(s.after(state))
    settings = dict(a_is_log=i64(s.of(0, 1)), gate=i64(gate), start=i64(start))
    return given, results, settings | dict(multiplier=f32(1.1), epsilon=f32(1e-5))


def tree_attention(s):
    b, q, g, size = s.of(0, 1, 3), s.of(0, 1, 5, 40), s.of(1, 2), 16 * s.of(0, 1, 2, 4)
    h, n, places = g * s.of(0, 1, 3), s.of(0, 1, 7, 64, 65), s.of(0, 1, 63, 64, 200)
    given = [s.f(b, q, h, size), s.f(b, n, g, size), s.f(b, n, g, size)]
    given += [s.f(b, g, places, size), s.f(b, g, places, size)]
    given += [s.i(-2, places + 3, b), s.b(b, q, n)]
    return given, [out(b, q, h, size)], dict(scale=f32(0.3))


def tree_conv1d_layer(s):
    b, q, prefix, before = s.of(0, 1, 3), s.of(0, 1, 4, 9), s.of(0, 2), s.of(0, 3)
    h, p, g, n, taps = (
        s.of(1, 2),
        16 * s.of(0, 1, 3),
        s.of(1, 2),
        16 * s.of(0, 1),
        s.of(1, 2, 4, 16),
    )
    channels, first, nodes = h * p + 2 * g * n, s.of(0, 7), prefix + q
    state = s.f(b, taps - 1, channels)
    replay = s.i(-2, taps + before + 1, b, taps - 1) if before or s.of(0, 1) else s.i(0, 1, 0)
    given = [s.f(b, q, first + channels + h + s.of(0, 2)), s.f(taps, channels)]
    given += [s.f(channels) if s.of(0, 1) else NONE, s.f(h), state]
    given += [s.i(-3, taps + nodes + 2, b, q, taps), s.f(b, prefix, h, p), s.f(b, prefix, h)]
    given += [s.f(b, prefix, g, n), s.f(b, prefix, channels), s.f(b, before, channels), replay]
    results = [out(b, nodes, h, p), out(b, nodes, h), out(b, nodes, g, n)]
    results += [out(b, nodes, channels), out(b, q, g, n)]
    results += [s.after(state)]
    settings = dict(first_column=i64(first), multipliers=np.array([1, 0.5, 2, 1.5], np.float32))
    return given, results, settings | dict(dt_low=f32(0), dt_high=f32(9))


def tree_delta(s, replays=False):
    b, g, n, states = s.of(0, 1, 2, 3), s.of(1, 2), s.of(0, 1, 2, 7, 20), 16 * s.of(0, 1, 2)
    h, p, before = g * s.of(0, 1, 3), 16 * s.of(0, 1, 2, 4), s.of(0, 1, 6) if replays else 0
    q = n if replays else s.of(0, n // 2, n)
    state = s.f(b, h, p, states)
    given = [
        *(s.f(b, before, g, states), s.f(b, before, h, p), -abs(s.f(b, before, h)), s.b(b, before)),
        *(s.f(b, q, g, states), s.f(b, n, g, states), s.f(b, q, h, p), -abs(s.f(b, n, h))),
        *(abs(s.f(b, q, h)), state, tree(s, b, n), s.f(b, n - q, h, p)),
    ]
    results = [out(b, q, h, p), out(b, q, h, p)]
    if replays:
        results.append(s.after(state))
    return given, results, {}


def delta_chunks(s):
    b, t, g, n = s.of(0, 1, 2), s.of(0, 1, 2, 9), s.of(1, 2), 16 * s.of(0, 1, 2)
    h, p = g * s.of(0, 1, 3), 16 * s.of(0, 1, 4, 5)
    state = s.f(b, h, p, n)
    given = [s.f(b, t, g, n), s.f(b, t, g, n), s.f(b, t, h, p), -abs(s.f(b, t, h))]
    given += [abs(s.f(b, t, h)), state, s.b(b, t)]
    return given, [out(b, t, h, p), s.after(state)], {}


CALLS = {
    **{f.__name__: f for f in (matmul, rows, rms_norm, add_rms_norm, gated_rms_norm, ssd)},
    **{f.__name__: f for f in (largest_threshold, tree_scan, tree_attention, tree_conv1d_layer)},
    **{f.__name__: f for f in (tree_delta, delta_chunks)},
    "replay_tree_scan": lambda s: tree_scan(s, replays=True),
    "replay_tree_delta": lambda s: tree_delta(s, replays=True),
}


def damaged(rng, arrays):
    """The arrays, one of which has another number of elements along an axis, or another rank."""
    arrays, at = [*arrays], int(rng.integers(len(arrays)))
    shape = [*arrays[at].shape]
    if not shape or rng.random() < 0.1:
        shape = shape[:-1] if shape and rng.random() < 0.5 else [*shape, 1]
    else:
        axis = int(rng.integers(len(shape)))
        shape[axis] = max(0, shape[axis] + int(rng.choice([-16, -1, 1, 16, -shape[axis]])))
    arrays[at] = np.zeros(shape, arrays[at].dtype)
    return arrays


def check(library, *, calls, seed, threads):
    """Asserts that calls write all numbers, the same ones with one thread, or refuse their shapes.

    Returns how many calls each function took, and how many were refused.
    """
    rng, counts = np.random.default_rng(seed), collections.Counter()
    several, alone = (Runtime(library, count) for count in (threads, 1))
    for call in range(calls):
        name, is_damaged = [*CALLS][call % len(CALLS)], call // len(CALLS) % 4 == 3
        given, results, settings = CALLS[name](Shapes(rng))
        if is_damaged:  # refused, or right all the same, as where an axis is 0
            both = damaged(rng, [*given, *results])
            given, results = both[: len(given)], both[len(given) :]
            counts["refused"] += several.call(name, given, results, settings) is not None
            continue
        copies = {id(array): array.copy() for array in (*given, *results)}  # some are both
        assert several.call(name, given, results, settings) is None, name
        again = [[copies[id(array)] for array in arrays] for arrays in (given, results)]
        assert alone.call(name, *again, settings) is None
        for result, other in zip(results, again[1], strict=True):
            np.testing.assert_array_equal(result, other, name)
            assert name == "largest_threshold" or not np.isnan(result).any(), name
        counts[name] += 1
    return counts


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library", type=Path)
    for name, value in dict(calls=10_000, seed=0, threads=4).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    sys.stdout.write(f"{dict(check(**vars(parser.parse_args())))}\n")


if __name__ == "__main__":
    main()
