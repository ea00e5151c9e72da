"""Plugin of pytest: native functions run in another program, as in an emulator of a processor.

`STREE_JAX_EMULATED` is the command of `kernels/driver.cc`. At the end the calls are counted.
"""

import collections
import json
import os
import shlex
import subprocess
import threading

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native

# XLA_FFI_DataType
TYPES = {"bool": 1, "int8": 2, "int32": 4, "uint8": 6, "float16": 10, "float32": 11, "bfloat16": 16}
COUNTS = collections.Counter()
COMMAND = shlex.split(os.environ["STREE_JAX_EMULATED"])
LOCK = threading.Lock()  # XLA may call several functions at once
DRIVER = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def send(*values):
    """Numbers as int64, or bytes."""
    for value in values:
        DRIVER.stdin.write(value if isinstance(value, bytes) else np.int64(value).tobytes())


def call(name, results, *arrays, aliases=None, **settings):
    """See `native.call`."""
    wanted, structure = jax.tree.flatten(results)
    same = {result: given for given, result in (aliases or {}).items()}

    def run(*given):
        with LOCK:
            return answer(*given)

    def answer(*given):
        COUNTS[name] += 1
        send(name.encode().ljust(32, b"\0"), len(given), len(wanted), len(settings))
        for array in map(np.asarray, given):
            send(TYPES[array.dtype.name], -1, array.ndim, *array.shape, array.tobytes())
        for i, result in enumerate(wanted):
            send(TYPES[result.dtype.name], same.get(i, -1), result.ndim, *result.shape)
        for key, value in settings.items():
            kind = ("i", "f").index(np.asarray(value).dtype.kind) + np.ndim(value)
            send(key.encode().ljust(32, b"\0"), kind, np.size(value), np.float32(value).tobytes())
        DRIVER.stdin.flush()
        if size := int.from_bytes(DRIVER.stdout.read(8), "little"):
            raise ValueError(DRIVER.stdout.read(size).decode())
        sizes = (4 * int(np.prod(result.shape)) for result in wanted)
        got = [np.frombuffer(DRIVER.stdout.read(size), np.float32) for size in sizes]
        return structure.unflatten([y.reshape(r.shape) for y, r in zip(got, wanted, strict=True)])

    given = (jnp.zeros(0, jnp.float32) if array is None else array for array in arrays)
    return jax.pure_callback(run, results, *given, vmap_method="sequential")


native.call, native.obstacle = call, lambda: None


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(json.dumps(COUNTS))
    DRIVER.communicate()
