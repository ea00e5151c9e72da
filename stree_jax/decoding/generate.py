"""`generate` and `stream`: checks first, then one compiled program."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from stree_jax.decoding.drafters import Drafter
from stree_jax.decoding.options import Options, spelled_out
from stree_jax.decoding.plan import Plan, plan
from stree_jax.decoding.prefix.prefill import tokens_from
from stree_jax.decoding.prefix.prefix import Prefix, check_origin, for_rows, origin_of, repeated
from stree_jax.decoding.prompts import buffer_size, checked_places
from stree_jax.decoding.quanta import Quanta
from stree_jax.decoding.results import Ended, Generation, Piece, Pieces, generation_of
from stree_jax.decoding.types import Context, DecodeState
from stree_jax.decoding.verifiers import Verifier
from stree_jax.decoding.way import Topology
from stree_jax.mesh.hosts import on_host
from stree_jax.models.lm import HybridLM, check_on_one_device


@spelled_out
@jax.transfer_guard("allow")
def generate(
    model: HybridLM,
    prompts: Sequence[Sequence[int]],
    *,
    drafter: Drafter | None = None,
    topology: Topology | None = None,
    verifier: str | Verifier | None = None,
    n: int = 1,
    after: Prefix | None = None,
    return_cache: bool = False,
    return_prefix: bool = False,
    keep: Sequence[int] | Any = (),
    lossy: bool = False,
    to_the_bit: bool = False,
    record_calls: bool = False,
    options: Options | Sequence[Options] | Any | None = None,
    **keywords: Any,
) -> Generation:
    """Continues prompts by speculative decoding; the output is the target's for every drafter.

    The tokens equal autoregressive decoding with the same key, at any temperature, with any drafter
    and tree: on a CPU with native code in every type, log-probabilities to the bit
    (docs/exactness.md); elsewhere in float32, where the order of sums may swap near ties. Verifiers
    that test drafts by their probabilities keep the distribution, not the tokens. A row's output
    depends on its prompt and its key alone.

    A model on a mesh (`make_mesh`) decodes there: each shard of the rows on its own. If the mesh
    has devices of several processes, all of them call this with the same arguments, which is not
    checked, and all get the result.

    Args:
        model: the target.
        prompts: a list of token ids per row; lengths may differ.
        drafter: proposes the draft tokens; None: autoregressive decoding.
        topology: the draft tree; None: the drafter's default; several: for some steps none or one
            of them, whichever promises to be the fastest (`TreeChoice`), "auto": of a few small
            ones that the drafter can fill; other words as in `stree-jax generate --tree`:
            "chain:4", "branching:3,2,1", "@tree.json".
        verifier: a name from `VERIFIERS` ("greedy", "target_only", "multi_step",
            "without_replacement", "traversal") or any `Verifier`; None: the one that fits drafter
            and temperature.
        n: texts of each prompt, which is prefilled once (`n` times where a mesh cuts the rows):
            rows and keys are as if each prompt had been repeated `n` times in place.
        after: the prefix of an earlier generation, `Generation.prefix`: each prompt continues a row
            of it, or all continue its only row, and may be empty. The text is that of the joined
            prompts.
        return_cache: return the target's cache too; its memory is held as long as the result.
        return_prefix: return a prefix to continue from; it holds the caches.
        keep: positions in the texts before the output, such as the ends of a chat's turns:
            `Generation.kept` has the prefix of so many first tokens of each prompt.
        lossy: allow a lossy verifier, such as "typical". Then the guarantees above do not hold, and
            the result says `lossless = False`.
        to_the_bit: ask for log-probabilities with drafts that equal those without to the bit;
            refused where they would not. A GPU then runs large trees by slower algorithms. False
            asks for speed: small trees have equal bits even so (docs/exactness.md).
        record_calls: record which call of the target emitted each token, and whether it was a
            draft: `Generation.calls`, and what `Generation.show` shows.
        options: how the texts are continued, or how each row is, instead of keywords.
        **keywords: how the texts are continued, see `Options`: `max_new_tokens`, `min_new_tokens`,
            `temperature`, `top_k`, `top_p`, `min_p`, `filters`, `processors`, `eos_token`,
            `max_length`, `key`, `log_probs`, `top_log_probs`, `stop`, `tokenizer`.

    Returns:
        On the host: tokens `[B, max_new_tokens]` with `PAD` after the end of a row, lengths `[B]`,
        why each row ended, statistics, and what was asked for.

    Raises:
        ValueError: a bad argument, or a drafter and a verifier that are not exact together. Raised
            before anything is compiled.
        NonFiniteLogitsError: logits of a row were not finite, or its processors or filters left no
            token. Only that row ended early; the error names it and holds the output of all
            rows.
    """
    if after is not None or return_prefix or keep:
        check_on_one_device(model, "keep or return_prefix" if after is None else "after")
    if after is not None:
        check_origin(after, model, any_drafter=True)
    request = plan(
        model,
        prompts,
        options,
        drafter=drafter,
        topology=topology,
        verifier=verifier,
        n=n,
        after=after,
        lossy=lossy,
        to_the_bit=to_the_bit,
        record_calls=record_calls,
        **keywords,
    )
    places = checked_places(keep, 1, int(np.asarray(request.context.length).min()))
    request = request.placed(model.partition)
    decoder, drafter, kept = request.decoder, request.drafter, {}
    quanta = Quanta(request, model, len(request.context.length), ends=True)
    with dispatch.on(model):
        for place in places:
            tokens, length = (part[::n] for part in request.context)
            short = dataclasses.replace(decoder, max_length=buffer_size(place))
            part = Context(tokens[:, : short.max_length], jnp.full_like(length, place))
            before = after and for_rows(after, len(length), model, drafter)
            after = short.read(model, drafter, part, before)
            after = kept[place] = after._replace(origin=origin_of(model, drafter))
        state = _started(request, model, quanta, n, after)
        state = quanta.run(decoder, state, request.limits, request.sampling)
        if return_prefix:
            state = quanta.caught_up(state)
    ended = Ended.of(state, request.limits, quanta.by_tree, len(request.rows))
    cache = state.cache if return_cache else None
    prefix = None
    if return_prefix:
        tokens, length = state.context
        length = jnp.where(state.failed > 0, 0, length).astype(jnp.int32)  # a failed row has none
        context = Context(tokens[:, : decoder.max_length], length)
        prefix = Prefix(context, state.cache, state.drafter, origin_of(model, drafter))
    return generation_of(ended, request, cache, prefix, kept)


@spelled_out
@jax.transfer_guard("allow")
def stream(
    model: HybridLM,
    prompts: Sequence[Sequence[int]],
    *,
    drafter: Drafter | None = None,
    topology: Topology | None = None,
    verifier: str | Verifier | None = None,
    lossy: bool = False,
    to_the_bit: bool = False,
    options: Options | Sequence[Options] | Any | None = None,
    **keywords: Any,
) -> Iterator[list[Piece]]:
    """As `generate`, but yields tokens as they are accepted.

    Arguments and errors as in `generate`; log-probabilities are refused. Bad arguments raise at the
    call, not at the first iteration; `NonFiniteLogitsError` is raised when all rows have ended.

    On a mesh of several processes all of them call this, and then `next`, equally often.

    Yields:
        After each target call, the new tokens of each row, a `Piece`; an empty one for rows that
        have ended. Tokens that a stop may still cut come later. With `tokenizer` pieces have a
        text, which may come later than its tokens.
    """
    request = plan(
        model,
        prompts,
        options,
        drafter=drafter,
        topology=topology,
        verifier=verifier,
        lossy=lossy,
        to_the_bit=to_the_bit,
        **keywords,
    )
    first = request.rows[0].options
    if first.num_best is not None:
        raise ValueError(
            f"log_probs = {first.log_probs!r}, top_log_probs = {first.top_log_probs}: stream yields"
            " tokens alone; use generate"
        )
    num_rows = len(request.rows)
    request = request.placed(model.partition)

    def steps() -> Iterator[list[Piece]]:
        decoder, drafter = request.decoder, request.drafter
        settings = request.limits, request.sampling
        quanta = Quanta(request, model, len(request.context.length), ends=True)
        with dispatch.on(model):
            state = _started(request, model, quanta)
        start, done = on_host((request.context.length, state.done))
        pieces = [Pieces(row.stopping) for row in request.rows]
        while not done.all():
            had_ended = done
            most = decoder.topology.depth + 1
            with dispatch.on(model):  # not around `yield`: it must not affect the caller
                if not request.trees:
                    state, _, _ = decoder.step(model, drafter, state, *settings)
                else:
                    state = quanta.run(decoder, state, *settings, 1)
                new = tokens_from(state.context.tokens, start, most)
            tokens, length = on_host((new, state.context.length))
            done = on_host(state.done)
            end = done & ~had_ended
            results = state, request.limits, quanta.by_tree, num_rows
            ended = Ended.of(*results) if end.any() else None
            new_pieces = []
            for i in range(num_rows):
                if end[i] and ended is not None:
                    text = ended.new(i, request.rows[i].stopping)
                    new_pieces.append(pieces[i].last(text.tokens.tolist(), text.text))
                else:
                    new_pieces.append(pieces[i].take(tokens[i, : length[i] - start[i]].tolist()))
            yield new_pieces
            start = length
        ended = Ended.of(state, request.limits, quanta.by_tree, num_rows)
        generation_of(ended, request)  # raises if a row failed

    return steps()


def _started(
    request: Plan, model: HybridLM, quanta: Quanta, n: int = 1, after: Prefix | None = None
) -> DecodeState:
    """Every prompt is read once, and its row repeated; where a mesh cuts the rows, each is read."""
    decoder, num_rows, context = request.decoder, len(request.rows), request.context
    drafter = request.drafter if after is not None else quanta.reader(context.length)
    times = n if model.partition.rows == 1 else 1
    if times > 1:
        context = Context(*(part[::times] for part in context))
    before = after and for_rows(after, num_rows // times, model, request.drafter)
    prefix = decoder.read(model, drafter, context, before)
    if times > 1:
        prefix = repeated(prefix, times)
    callers = (model, drafter, request.context, request.keys, request.sampling, after)
    state = decoder.start_from(model, prefix, request.keys, request.sampling, callers)
    if len(state.done) > num_rows:  # those that pad the batch have ended
        added = np.arange(len(state.done)) >= num_rows
        state = state._replace(done=model.partition.put(added))
    return state
