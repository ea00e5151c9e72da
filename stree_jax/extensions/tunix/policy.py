"""A `HybridLM` with the interface of Tunix's models."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from stree_jax import HybridLM
from stree_jax.array_types import Array, Bool, Float, Int


class Policy(nnx.Module):
    """A model that Tunix trains: actor, reference and rollout actor of an `RLCluster`.

    Tunix pads prompts on the left, and a state-space model must not read padding: rows are moved to
    the left, run, and moved back.

    Args:
        model: the model, on one device.

    Attributes:
        model: the model.
    """

    def __init__(self, model: HybridLM):
        self.model = model.in_first()  # names and shapes as Tunix has them

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        cache: Any = None,
        attention_mask: Bool[Array, "B T T"] | None = None,
        **_: Any,
    ) -> tuple[Float[Array, "B T V"], None]:
        """Next-token logits, without vocabulary padding.

        Args:
            tokens: token ids; padding on the left and on the right.
            positions: not needed.
            cache: must be None.
            attention_mask: which tokens each one sees; a token that does not see itself is padding.
                None: there is no padding on the left.

        Returns:
            The logits, unspecified on the padding, and no cache.

        Raises:
            ValueError: there is a cache.
        """
        if cache is not None:
            raise ValueError("Policy has no cache; texts are sampled by TreeRollout")
        first = jnp.zeros(len(tokens), jnp.int32)
        if attention_mask is not None:
            first = jnp.argmax(jnp.diagonal(attention_mask, axis1=1, axis2=2), axis=1)
        logits = self.model(rolled(tokens, -first))[..., : self.model.config.vocab_size]
        return rolled(logits, first), None


def rolled(rows: Array, by: Int[Array, " B"]) -> Array:
    """Rotates each row to the right by its shift."""
    places = (jnp.arange(rows.shape[1]) - by[:, None]) % rows.shape[1]
    return jnp.take_along_axis(rows, places.reshape(*places.shape, *(1,) * (rows.ndim - 2)), axis=1)
