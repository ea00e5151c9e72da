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
        hidden: normed, in the type of the head, float32 or bfloat16.
        head: a row for each word; those from `vocab_size` on are padding.
        vocab_size: number of words, 1 to W.
        multiplier: of the logits.
        implementation: one of `dispatch.IMPLEMENTATIONS`; None: the best that works here.

    Returns:
        Token and logit `[*rows]`. Products accumulate in float32. The kernel has no gradient.

    Raises:
        ValueError: widths or a number of words that do not fit, or an implementation that does not
            exist, or cannot run these shapes.
    """
    if head.shape[1] != hidden.shape[-1]:
        raise ValueError(f"rows of {hidden.shape[-1]} and a head for {head.shape[1]}")
    if not 1 <= vocab_size <= head.shape[0]:
        raise ValueError(f"vocab_size = {vocab_size} is not 1 to {head.shape[0]}, the head's rows")
    with jax.named_scope("best_token"):
        arguments = (hidden, head, vocab_size, multiplier)
        reason = pallas_triton.unsupported(hidden.shape)
        match dispatch.choose("best_token", implementation, reason):
            case "xla":
                return xla.best_token(*arguments)
            case chosen:
                interpret = chosen == "pallas_interpret"
                return pallas_triton.best_token(*arguments, interpret=interpret)
