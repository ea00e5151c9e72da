"""The best next token of each position, without the logits of all others."""

import jax
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.best_token import pallas_triton, xla
from pallas_kernels.best_token.xla import Best


def best_token(
    hidden: Float[Array, "*rows M"],
    head: Float[Array, "W M"],
    *,
    vocab_size: int,
    multiplier: float = 1.0,
    implementation: str | None = None,
) -> Best:
    """The token with the largest of the logits `multiplier * hidden @ head.T`, and that logit.

    All that greedy decoding asks of an output head. The logits of 64 nodes over 128,256 words are
    33 MB, which the kernel neither writes nor reads.

    Args:
        hidden: normed, in the type of the head.
        head: a row for each word; those from `vocab_size` on are padding.
        vocab_size: number of words, at most W.
        multiplier: of the logits.
        implementation: one of `dispatch.IMPLEMENTATIONS`; None: the best that works here.

    Returns:
        Token and logit of each row. Products accumulate in float32.

    Raises:
        ValueError: an implementation that does not exist, or cannot run these shapes.
    """
    with jax.named_scope("best_token"):
        arguments = (hidden, head, vocab_size, multiplier)
        reason = pallas_triton.unsupported(hidden.shape[-1])
        match dispatch.choose("best_token", implementation, reason):
            case "xla":
                return xla.best_token(*arguments)
            case chosen:
                interpret = chosen == "pallas_interpret"
                return pallas_triton.best_token(*arguments, interpret=interpret)
