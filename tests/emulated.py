"""Plugin of pytest: native functions run in another program, as in an emulator of a processor.

`STREE_JAX_EMULATED` is the command of `kernels/driver.cc`. At the end the calls are counted.
"""

import collections
import json
import os
import shlex
import struct
import subprocess

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native

TYPES = {"bool": 1, "int8": 2, "int32": 4, "float32": 11, "bfloat16": 16}  # XLA_FFI_DataType
COUNTS = collections.Counter()
COMMAND = shlex.split(os.environ["STREE_JAX_EMULATED"])
DRIVER = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def integers(*values):
    return struct.pack(f"<{len(values)}q", *values)


def text(name):
    return name.encode().ljust(32, b"\0")


def shape(array, same=-1):
    return integers(TYPES[array.dtype.name], same, array.ndim, *array.shape)


def setting(value):
    if isinstance(value, int):
        return integers(0, value)
    numbers = np.atleast_1d(np.float32(value))
    return integers(1 + isinstance(value, np.ndarray), len(numbers)) + numbers.tobytes()


def call(name, results, *arrays, aliases=None, **settings):
    """See `native.call`."""
    wanted, structure = jax.tree.flatten(results)
    same = {result: given for given, result in (aliases or {}).items()}

    def run(*given):
        COUNTS[name] += 1
        parts = [text(name), integers(len(given), len(wanted), len(settings))]
        for array in map(np.asarray, given):
            parts += shape(array), array.tobytes()
        parts += [shape(result, same.get(i, -1)) for i, result in enumerate(wanted)]
        for key, value in settings.items():
            parts += text(key), setting(value)
        DRIVER.stdin.write(b"".join(parts))
        DRIVER.stdin.flush()
        (size,) = struct.unpack("<q", DRIVER.stdout.read(8))
        if size:
            raise ValueError(DRIVER.stdout.read(size).decode())
        sizes = (int(np.prod(result.shape)) for result in wanted)
        got = [np.frombuffer(DRIVER.stdout.read(4 * size), np.float32) for size in sizes]
        return structure.unflatten([y.reshape(r.shape) for y, r in zip(got, wanted, strict=True)])

    given = (jnp.zeros(0, jnp.float32) if array is None else array for array in arrays)
    return jax.pure_callback(run, results, *given, vmap_method="sequential")


native.call, native.obstacle = call, lambda: None


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(json.dumps(COUNTS))
    DRIVER.communicate()
