"""`--mesh` and `--distributed`: which devices a command runs on."""

import os
import re

import jax
from jax.sharding import Mesh

import stree_jax as st
from stree_jax.messages import first_line


def parse_mesh(spec: str) -> Mesh:
    """The mesh of "data=2,model=4", "model=4" or "auto", which puts all devices on "data".

    Raises:
        ValueError: malformed, or more devices than there are.
    """
    if spec == "auto":
        return st.make_mesh(data=jax.device_count())
    sizes: dict[str, int] = {}
    for part in spec.split(","):
        match = re.fullmatch(r"(data|model)=([1-9][0-9]{0,5})", part.strip(), re.ASCII)
        if match is None or match[1] in sizes:
            raise ValueError(
                f"--mesh {spec:.80} is not a mesh: use data=2,model=4, one of the two, or auto"
            )
        sizes[match[1]] = int(match[2])
    return st.make_mesh(**sizes)


def join_processes() -> None:
    """Joins the other processes of this command; must be the first use of jax.

    jax finds them on Slurm, Open MPI and TPUs. Elsewhere each process sets the address of process
    0, the number of processes and its own index: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID.

    Raises:
        ValueError: jax does not find them, or cannot reach them.
    """
    numbers: list[int | None] = []
    for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        value = os.environ.get(name)
        if value is not None and not re.fullmatch("[0-9]{1,6}", value, re.ASCII):
            raise ValueError(f"{name} must be a number, got {value:.80}")
        numbers.append(None if value is None else int(value))
    try:
        jax.distributed.initialize(num_processes=numbers[0], process_id=numbers[1])
    except Exception as error:  # jax raises many types
        raise ValueError(
            f"--distributed found no other processes ({first_line(error)}); start one on each host"
            " with Slurm or Open MPI, or set JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES"
            " and JAX_PROCESS_ID"
        ) from None
