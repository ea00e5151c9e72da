"""Cost of compiled programs, and of layers as differences of programs."""

import contextlib
import dataclasses
import math
import re
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of a program or a layer; the difference of two programs is the cost of a layer."""

    launches: float  # kernels, library calls, copies and fills in one run
    copies: float  # copies and fills among them
    # By XLA's cost model; one of our kernels counts its arguments and results once.
    bytes_moved: float
    floor_bytes: int  # weights read once, caches read once and written once
    record_bytes: int  # of the pending record of a tree

    def __sub__(self, other: "Cost") -> "Cost":
        return self.plus(other, -1)

    def plus(self, other: "Cost", times: int) -> "Cost":
        """This cost and `times` another."""
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Cost(*(a + times * b for a, b in zip(mine, theirs, strict=True)))


def bytes_moved(compiled: Any) -> float:
    """XLA's estimate for the optimised program, plus arguments and results of our kernels.

    NaN if this version of jax does not say.
    """
    text = None
    with contextlib.suppress(Exception):
        from jax._src.lib import _jax

        (module,) = compiled.runtime_executable().hlo_modules()
        client = jax.devices("cpu")[0].client
        estimate = float(_jax.hlo_module_cost_analysis(client, module)["bytes accessed"])
        text = module.to_string()
    if text is None:
        return float("nan")
    kernels = kernel_bytes(text)
    return estimate + sum(kernels) + len(kernels)  # XLA's estimate of each is -1


def kernel_bytes(module: str) -> list[int]:
    """Bytes of arguments and results of each Triton kernel in the text of a program."""
    shapes = dict(re.findall(r"(%[\w.-]+) = (\([^()]*\)|\S+) [\w-]+\(", module))
    calls = re.findall(
        r'(%[\w.-]+) = [^\n]*? custom-call\(([^)]*)\),[^\n]*"__gpu\$xla\.gpu\.triton"', module
    )
    return [
        sum(
            _shape_bytes(shapes[name])
            # An argument may be passed twice, for two parts of it.
            for name in {result, *re.findall(r"%[\w.-]+", operands)}
        )
        for result, operands in calls
    ]


def _shape_bytes(shape: str) -> int:
    """Of an array or a tuple, such as `(f32[2,3]{1,0}, pred[])`."""
    total = 0
    for bits, sizes in re.findall(r"(?:[a-z]*?(\d+)|pred)\[([\d,]*)\]", shape):
        count = math.prod(int(size) for size in sizes.split(",") if size)
        total += count * (int(bits) // 8 if bits else 1)
    return total
