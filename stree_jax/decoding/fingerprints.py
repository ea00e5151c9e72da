"""Which model and drafter a prefix was read with."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.decoding.drafters import Drafter
from stree_jax.decoding.types import Origin, Prefix
from stree_jax.messages import shown
from stree_jax.models.lm import HybridLM

_NUMBERS = 64  # of an array
_ARRAYS = 16  # of weights on an accelerator, where each is a transfer


def origin_of(model: HybridLM, drafter: Drafter | None) -> Origin:
    """Fingerprints of the shapes of all weights and of some of their numbers: few are read.

    On a mesh the numbers are those of the first shard of this process.
    """
    return Origin(_fingerprint(model), _fingerprint(drafter))


def check_origin(
    after: Prefix, model: HybridLM, drafter: Drafter | None = None, *, any_drafter: bool = False
) -> None:
    """Refuses a prefix of another model or drafter; one without an origin is taken.

    Raises:
        ValueError: it was read with another model or, without `any_drafter`, with another drafter.
    """
    if not isinstance(after, Prefix):
        raise ValueError(
            "after must be a Prefix: Generation.prefix, Completion.prefix or what Scheduler.read"
            f" returned; got {shown(after)}"
        )
    if after.origin is None:
        return
    own = origin_of(model, drafter)
    for name in ("model",) if any_drafter else ("model", "drafter"):
        if getattr(after.origin, name) != getattr(own, name):
            raise ValueError(
                f"after was read with another {name}, or its weights have changed; read the text"
                " again with this one"
            )


def _fingerprint(part: Any) -> str:
    leaves = jax.tree.leaves(part)
    kinds = [(np.shape(leaf), str(jnp.result_type(leaf))) for leaf in leaves]
    leaves = [_first_shard(leaf) for leaf in leaves]
    digest = hashlib.sha256(f"{type(part).__name__} {kinds}".encode())
    near = [leaf for leaf in leaves if _is_on_host(leaf)]
    far = [leaf for leaf in leaves if not _is_on_host(leaf)]
    for leaf in near:
        numbers = np.ravel(_numbers(leaf))
        digest.update(numbers[:: max(1, numbers.size // _NUMBERS)].tobytes())
    for leaf in far[:: max(1, len(far) // _ARRAYS)]:
        digest.update(np.asarray(_numbers(leaf)[(0,) * (leaf.ndim - 1)][:_NUMBERS]).tobytes())
    return digest.hexdigest()


def _first_shard(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
        return leaf.addressable_data(0)
    return leaf


def _is_on_host(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array) or not leaf.ndim:
        return True
    return all(device.platform == "cpu" for device in leaf.devices())


def _numbers(leaf: Any) -> Any:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf
