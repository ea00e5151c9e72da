"""Log-probabilities of new tokens, recorded inside the decode loop beside the text."""

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.array_types import Array, Float, Int
from stree_jax.decoding.sampling import token_log_probs
from stree_jax.decoding.types import Sampling, TokenLogProbs


def empty(batch: int, places: int, num_best: int) -> TokenLogProbs:
    """Buffers of rows that have no new token.

    Args:
        batch: number of rows.
        places: size of the token buffer, L.
        num_best: how many of the best tokens are recorded for each new token.
    """
    best = (batch, places, num_best)
    return TokenLogProbs(
        chosen=jnp.zeros((batch, places)),
        best=jnp.zeros(best),
        best_tokens=jnp.zeros(best, jnp.int32),
    )


def recorded(
    so_far: TokenLogProbs,
    logits: Float[Array, "B N V"],
    processed: Float[Array, "B N V"],
    nodes: Int[Array, "B _"],
    new_tokens: Int[Array, "B _"],
    at: Int[Array, " B"],
    sampling: Sampling,
) -> TokenLogProbs:
    """Appends one step's log-probabilities to the records.

    As tokens are appended, records of a whole path are written; those of tokens that were cut are
    overwritten by the next step, or never read.

    Args:
        so_far: the records before the step.
        logits: the target's logits at the nodes of the draft tree.
        processed: the logits from which the verifier drew.
        nodes: the verifier's path, a node for each of the new tokens: that at which it was drawn.
        new_tokens: drafts on the path, then the next token: `[B, depth + 1]`.
        at: position of the first of them.
        sampling: sampling settings of each row.
    """
    nodes = nodes[..., None]
    log_probs = jax.nn.log_softmax(jnp.take_along_axis(logits, nodes, axis=1))
    if sampling.record_sampled is not None:
        sampled = token_log_probs(jnp.take_along_axis(processed, nodes, axis=1), sampling)
        log_probs = jnp.where(sampling.record_sampled[:, None, None], sampled, log_probs)
    chosen = jnp.take_along_axis(log_probs, new_tokens[..., None], axis=-1)[..., 0]
    new = TokenLogProbs(chosen, *lax.top_k(log_probs, so_far.best.shape[-1]))
    return jax.tree.map(lambda records, these: _written(records, these, at), so_far, new)


def _written(buffer: Array, new: Array, at: Array) -> Array:
    """Each row of the buffer with its row of `new` from position `at` on."""

    def write(row: Array, new: Array, at: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(row, new, at, axis=0)

    return jax.vmap(write)(buffer, new, at)
