"""Log-probabilities of given texts."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import dispatch, log_softmax
from stree_jax.array_types import Array, Bool, Float, Float32, Int, Lengths, Tokens
from stree_jax.checks import check_ids, check_int
from stree_jax.decoding.prefix.prefill import PREFILL_CHUNK, in_chunks
from stree_jax.decoding.prompts import buffer_size, checked_prompts, in_buffers
from stree_jax.decoding.types import Context
from stree_jax.mesh.hosts import on_host
from stree_jax.mesh.partition import ROWS
from stree_jax.mesh.programs import on_mesh
from stree_jax.messages import shown
from stree_jax.models.lm import HybridLM, check_model
from stree_jax.models.matrices import in_first

_MOST_LOGITS = 2**24  # some places at a time: 64 MiB


@jax.transfer_guard("allow")
def score(
    model: HybridLM, texts: Sequence[Sequence[int]] | Any, *, rows: int = 8
) -> list[Float32[np.ndarray, " _"]]:
    """The log-probability of each token of each text after the tokens before it.

    They are the model's own: at temperature 1, without filters. Texts are read as prompts are, in
    chunks, and logits exist for a few places at a time: only attention caches grow with the length.
    `text_log_probs` is the differentiable form.

    Args:
        model: the model.
        texts: a list of token ids per text; lengths may differ.
        rows: texts that are read together, those of similar lengths.

    Returns:
        For each text of T tokens the log-probabilities `[T - 1]` of tokens 1 to T - 1.

    Raises:
        ValueError: not token ids, or a text whose last token comes after the model's context.
    """
    by_row = {row: log_probs for row, log_probs, _ in scored(model, texts, rows)}
    return [by_row[row] for row in range(len(by_row))]


def scored(
    model: HybridLM, texts: Sequence[Sequence[int]] | Any, rows: int
) -> Iterator[tuple[int, Float32[np.ndarray, " _"], Bool[np.ndarray, " _"]]]:
    """Yields the number of each text, its scores, and which of its tokens the model likes best."""
    check_model(model)
    check_int("rows", rows, 1)
    context = in_buffers(checked_prompts(texts, model.config.vocab_size, "texts"))
    lengths = np.asarray(context.length)
    limit = model.config.max_length
    if limit is not None and lengths.max() > limit + 1:  # nothing reads the last token
        raise ValueError(
            f"texts[{lengths.argmax()}] has {lengths.max()} tokens, and the model's context is"
            f" {limit}; cut it"
        )
    size = min(rows, len(lengths))
    group = size + -size % model.partition.rows
    order = np.argsort(lengths, kind="stable")
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        # Rows that are missing in a group repeat others, so that all groups share a program.
        width = buffer_size(int(lengths[chosen].max()))
        some = Context(*(values[np.resize(chosen, group)] for values in context))
        some = some._replace(tokens=some.tokens[:, :width])
        with dispatch.on(model):
            scores = on_host(_scores(model, *model.partition.put(some)))
        for row, log_probs, is_best in zip(chosen.tolist(), *scores, strict=False):
            yield row, log_probs[: lengths[row] - 1], is_best[: lengths[row] - 1]


@jax.transfer_guard("allow")
def text_log_probs(model: HybridLM, tokens: Tokens | Any) -> Float32[Array, "B _"]:
    """The log-probability of each token but the first, after the tokens before it; differentiable.

    For losses inside a program of your own, such as a policy gradient. Padding on the right changes
    nothing before it. No `[B, T, V]` array exists, not even in the backward pass. For a model on
    one device, or replicated.

    For a packed model on a CPU a gradient changes no bit of these numbers, although XLA
    differentiates its own versions of the ops: the texts are read once more. So the importance
    ratio of a text to its sampling is 1 in the first pass of a policy gradient.

    Args:
        model: the model.
        tokens: whole texts, ids of the vocabulary on the padding too. Those of a traced array are
            not checked: with one outside the vocabulary (such as -100, a label that losses leave
            out) a row's numbers are unspecified from there on.

    Returns:
        `[B, T - 1]`, and `[B, 0]` of texts without tokens.

    Raises:
        ValueError: not an array of token ids `[B, T]`, or an id outside the vocabulary.
    """
    check_model(model)
    is_array = isinstance(tokens, jax.Array | np.ndarray)
    if not (is_array and tokens.ndim == 2 and jnp.issubdtype(tokens.dtype, jnp.integer)):
        kind = f"{tokens.dtype}{[*tokens.shape]}" if is_array else shown(tokens)
        raise ValueError(
            f"tokens must be an array of token ids [B, T], such as jnp.array([[1, 2, 3]]), got"
            f" {kind}; st.score takes lists of any lengths"
        )
    check_ids("tokens", tokens, model.config.vocab_size)
    tokens = jnp.asarray(tokens)
    batch, length = tokens.shape
    if batch == 0 or length < 2:
        return jnp.zeros((batch, max(0, length - 1)), jnp.float32)
    if model.output_head.storage.sums_in_one_order:
        return _with_equal_bits(model, tokens)
    return _log_probs_after(model, tokens)


def _log_probs_after(model: HybridLM, tokens: Tokens) -> Float32[Array, "B _"]:
    return _chosen(model, model.hidden(tokens)[:, :-1], tokens[:, 1:])[0]


_with_equal_bits = jax.custom_jvp(_log_probs_after)


@_with_equal_bits.defjvp
def _slope(arguments: Any, tangents: Any) -> tuple[Array, Array]:
    """XLA differentiates its own ops, and fastest in matrices that are not packed."""

    def unpacked(model: HybridLM, tokens: Tokens) -> Array:
        return _log_probs_after(in_first(model), tokens)

    return _with_equal_bits(*arguments), jax.jvp(unpacked, arguments, tangents)[1]


@jax.jit
@on_mesh(lambda model: ((ROWS, ROWS), ROWS), modules=1)
def _scores(
    model: HybridLM, tokens: Tokens, lengths: Lengths
) -> tuple[Float32[Array, "B T"], Bool[Array, "B T"]]:
    """Entry t is of token t + 1; unspecified from a row's last token on."""
    following = jnp.pad(tokens, ((0, 0), (0, PREFILL_CHUNK)))[:, 1:]

    def read(chunk: Array, lengths: Array, carry: Any) -> Any:
        start, cache, scores = carry
        hidden, cache = model.prefill_hidden(chunk, lengths, cache)
        size = chunk.shape[1]
        chosen = _chosen(model, hidden, lax.dynamic_slice_in_dim(following, start, size, axis=1))
        put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=1)
        return start + size, cache, jax.tree.map(put, scores, chosen)

    cache = model.init_cache(*tokens.shape)
    # The last chunk may reach beyond the texts.
    shape = len(tokens), tokens.shape[1] + PREFILL_CHUNK
    scores = jnp.zeros(shape, jnp.float32), jnp.zeros(shape, bool)
    scores = in_chunks(read, tokens, lengths - 1, (0, cache, scores))[2]
    return jax.tree.map(lambda values: values[:, : tokens.shape[1]], scores)


def _chosen(
    model: HybridLM, hidden: Float[Array, "B T M"], tokens: Int[Array, "B T"]
) -> tuple[Float32[Array, "B T"], Bool[Array, "B T"]]:
    """Log-probabilities of tokens by the hidden states before them, and if each is the best."""
    batch, length = tokens.shape
    most = max(1, _MOST_LOGITS // (batch * model.config.vocab_size))
    size = max(n for n in range(1, min(most, length) + 1) if length % n == 0)

    @jax.checkpoint
    def some(piece: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden, tokens = piece
        logits = model.logits(hidden)[..., : model.config.vocab_size]
        log_probs = log_softmax(logits)
        chosen = jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]
        return chosen, logits.argmax(axis=-1).astype(tokens.dtype) == tokens

    def cut(values: Array) -> Array:
        return jnp.moveaxis(values.reshape(batch, -1, size, *values.shape[2:]), 1, 0)

    pieces = lax.map(some, (cut(hidden), cut(tokens)))
    return jax.tree.map(lambda values: jnp.moveaxis(values, 0, 1).reshape(batch, length), pieces)
