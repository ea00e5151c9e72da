"""Checks the arguments of `generate` and makes a `Plan` of them. Nothing is compiled here."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pallas_kernels import dispatch
from stree_jax.array_types import Array
from stree_jax.checks import check_int
from stree_jax.decoding.drafters.base import Drafter
from stree_jax.decoding.filters import MinP, TopK, TopP
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.options import Options, check_not_traced, listed_eos_tokens, options_of_rows
from stree_jax.decoding.prefix.prefix import Prefix, continued_texts
from stree_jax.decoding.prompts import (
    buffer_size,
    check_length,
    check_num_rows,
    checked_prompts,
    in_buffers,
    list_size,
    row_keys,
    typed_key,
)
from stree_jax.decoding.rules import Rule, join_numbers, kind, map_rows, of_batch, of_rows
from stree_jax.decoding.stops import Stopping, stopping_of, stops_of
from stree_jax.decoding.token_rules import MinNewTokens
from stree_jax.decoding.tree_choice import TreeChoice
from stree_jax.decoding.types import Context, Limits, Sampling
from stree_jax.decoding.verifiers import Verifier
from stree_jax.decoding.way import Topology, Way
from stree_jax.mesh.partition import Partition
from stree_jax.messages import shown
from stree_jax.models.lm import HybridLM, check_model
from stree_jax.tree import TreeTopology


class Row(NamedTuple):
    """How a row is continued; the default is of a row that decodes nothing."""

    options: Options = Options()
    end_tokens: Sequence[int] = ()
    stopping: Stopping = Stopping()

    @property
    def is_greedy(self) -> bool:
        """True if its temperature is 0."""
        return self.options.temperature == 0


class Plan(NamedTuple):
    """A checked request: the program to run, and its arguments."""

    decoder: SpeculativeDecoder
    drafter: Drafter | None
    context: Context
    keys: Array
    limits: Limits
    sampling: Sampling
    rows: list[Row]
    trees: tuple[TreeTopology, ...] = ()  # of a choice; the decoder's is then as large as any
    choice: TreeChoice | None = None  # the user's own

    def placed(self, partition: Partition) -> "Plan":
        """The request with its arrays on the mesh, padded to a multiple of its shards.

        Padding repeats the last row; the caller marks these rows as done.
        """
        arrays, sampling = (self.context, self.keys, self.limits), self.sampling
        num_rows = len(self.context.length)
        if added := -num_rows % partition.rows:
            rows = jnp.minimum(jnp.arange(num_rows + added, dtype=jnp.int32), num_rows - 1)
            arrays = jax.tree.map(lambda leaf: leaf[rows], arrays)
            sampling = map_rows(sampling, lambda leaf: leaf[rows])
        context, keys, limits = partition.put(arrays)
        sampling = placed_sampling(sampling, partition, {})
        return self._replace(context=context, keys=keys, limits=limits, sampling=sampling)


@jax.transfer_guard("allow")
def plan(
    model: HybridLM,
    prompts: Sequence[Sequence[int]],
    options: Options | Sequence[Options] | Any | None = None,
    *,
    drafter: Drafter | None = None,
    topology: Topology | None = None,
    verifier: str | Verifier | None = None,
    n: int = 1,
    after: Prefix | None = None,
    lossy: bool = False,
    to_the_bit: bool = False,
    record_calls: bool = False,
    **keywords: Any,
) -> Plan:
    """Checks a request; compiles nothing. As `generate`, which checks whose prefix `after` is."""
    check_not_traced(*keywords.values())
    if options is None:
        options = Options(**keywords)
    elif keywords:
        name = next(iter(keywords))
        raise ValueError(f"{name} and options are given; put {name} into the Options")
    check_model(model)
    vocab_size = model.config.vocab_size
    check_not_traced(prompts, *(prompts if isinstance(prompts, Sequence) else ()))
    check_num_rows("n", n)
    texts = checked_prompts(prompts, vocab_size, may_be_empty=after is not None)
    if after is not None:
        texts = continued_texts(after, texts)
    context = in_buffers([text for text in texts for _ in range(n)])
    batch = len(context.length)
    row_options = options_of_rows(options, batch)
    first = row_options[0]
    some_weight = model.final_norm_scale[...]  # in place of all of them, which takes longer
    check_not_traced(context.length, first.key, some_weight)
    dispatch.explain(dispatch.device_of(some_weight))  # refuses a wrong STREE_JAX_NATIVE
    by_id = {id(settings): _row_of(settings, model) for settings in row_options}
    rows = [by_id[id(settings)] for settings in row_options]  # one object for all that are equal
    most = [row.options.max_new_tokens for row in rows]
    check_length(context, most, first.max_length, model.config.max_length)
    temperature_is_zero = all(row.is_greedy for row in rows)
    if any(row.options.key is None and not row.is_greedy for row in rows):
        raise ValueError("temperature > 0 needs a random key: pass key=jax.random.key(0)")
    seeds = [0 if settings.key is None else settings.key for settings in row_options]
    keys = row_keys(seeds[0] if isinstance(options, Options) else [*map(typed_key, seeds)], batch)
    fitted = Way(drafter, topology, verifier, lossy, to_the_bit).fitted(
        model, temperature_is_zero=temperature_is_zero
    )
    may_differ = len({*map(id, rows)}) > 1
    if may_differ:
        check_together(rows, fitted.verifier, "other rows", "decode these apart")
    longest = max(np.asarray(context.length) + np.array(most))
    has_stops = any(row.stopping for row in rows)
    decoder = SpeculativeDecoder(
        topology=fitted.topology,
        verifier=fitted.verifier,
        max_length=buffer_size(int(longest)),
        # On a GPU a termination check on the host takes long compared with a step.
        steps_per_sync=1 if dispatch.device_obstacle(dispatch.device_of(some_weight)) else 2,
        num_best=first.num_best and min(list_size(first.num_best), vocab_size),
        record_calls=record_calls,
        to_the_bit=to_the_bit,
    )
    is_drafted = fitted.topology.num_nodes > 1  # a root alone is autoregressive decoding
    return Plan(
        decoder,
        fitted.drafter if is_drafted else None,
        context,
        keys,
        limits_of(rows, vocab_size, (1, 1) if has_stops else None),
        sampling_of(rows, may_differ=may_differ),
        rows,
        fitted.trees,
        fitted.choice,
    )


def _row_of(options: Options, model: HybridLM) -> Row:
    vocab_size, ends = model.config.vocab_size, model.config.eos_token
    check_int("top_log_probs", options.top_log_probs, 0, vocab_size)
    eos_token, of_rules = options.eos_token, []
    for processor in options.processors:
        processor.check(vocab_size)
        of_rules += [end for end in processor.end_tokens if end < vocab_size]
    if eos_token is None:
        eos_token = [*np.ravel([] if ends is None else ends).tolist(), *of_rules]
    end_tokens = listed_eos_tokens(eos_token, vocab_size)
    if end_tokens and of_rules and not {*end_tokens} & {*of_rules}:
        raise ValueError(
            f"eos_token = {shown(end_tokens)} does not end the texts of a logits processor,"
            f" which end with {shown(of_rules)}; leave it out, or make the processor with it"
        )
    return Row(options, end_tokens, stopping_of(options.stop, options.tokenizer, vocab_size))


def limits_of(rows: Sequence[Row], vocab_size: int, stop_sizes: tuple[int, int] | None) -> Limits:
    """The limits of a batch; `stop_sizes` are least sizes of automata, None without stops."""
    stops = None
    if stop_sizes is not None:
        machines = tuple(row.stopping.machine(vocab_size) for row in rows)
        stops = stops_of(machines, tuple(row.options.min_new_tokens for row in rows), stop_sizes)
    most = np.array([row.options.max_new_tokens for row in rows], np.int32)
    return Limits(jnp.asarray(most), _end_tokens(rows), stops)


def _end_tokens(rows: Sequence[Row]) -> Any:
    """The end tokens of each row `[B, Y]`, padded with -1."""
    most = max(len(row.end_tokens) for row in rows)
    ends = np.full((len(rows), list_size(most)), -1, np.int32)
    for places, row in zip(ends, rows, strict=True):
        places[: len(row.end_tokens)] = row.end_tokens
    return jnp.asarray(ends)


def sampling_of(rows: Sequence[Row], *, may_differ: bool) -> Sampling:
    """The sampling settings of a batch; `may_differ`: some may have rules and others none."""
    options = [row.options for row in rows]
    processors = of_rows([row.processors for row in options], may_differ=may_differ)
    least = [row.min_new_tokens for row in options]
    if any(least) or (may_differ and processors):  # so that the others keep their places
        processors = MinNewTokens(join_numbers(*least), _end_tokens(rows)), *processors
    sampled = np.array([row.log_probs == "sampled" for row in options])
    # A row at temperature 0 takes the best token, which no filter leaves out: they change only the
    # record of its probability.
    skips = [row.is_greedy and not record for row, record in zip(rows, sampled, strict=True)]
    filtered = [Options() if skip else row for row, skip in zip(options, skips, strict=True)]
    return Sampling(
        jnp.asarray(np.array([row.temperature for row in options], np.float32)),
        filters_of(filtered, may_differ=may_differ),
        processors,
        temperature_is_zero=all(row.is_greedy for row in rows),
        record_sampled=jnp.asarray(sampled) if sampled.any() else None,
    )


def placed_sampling(
    sampling: Sampling, partition: Partition, tables: dict[int, tuple[Any, Any]]
) -> Sampling:
    """The settings of rows, on the mesh.

    `tables` has arrays that rules share and their copies on the mesh, by id; those of these
    settings replace what was there.
    """
    used: dict[int, tuple[Any, Any]] = {}

    def put(leaf: Any) -> Any:
        known = tables.get(id(leaf)) or (leaf, partition.put(leaf, PartitionSpec()))
        return used.setdefault(id(leaf), known)[1]

    placed = map_rows(sampling, partition.put, put)
    tables.clear()
    tables.update(used)
    return placed


def filters_of(rows: Sequence[Options], *, may_differ: bool = False) -> tuple[Rule, ...]:
    """The filters of a batch: top-k and top-p if a row has either, min-p, then the rows' own."""
    filters: list[Any] = []
    if any(row.top_k > 0 or row.top_p < 1 for row in rows):
        filters += [of_batch([TopK(row.top_k) for row in rows])]
        filters += [of_batch([TopP(row.top_p) for row in rows])]
    if any(row.min_p > 0 for row in rows):
        filters += [of_batch([MinP(row.min_p) for row in rows])]
    return (*filters, *of_rows([row.filters for row in rows], may_differ=may_differ))


def check_together(rows: Sequence[Row], rule: Verifier, where: str, apart: str) -> None:
    """Refuses rows that one program cannot decode."""
    same = {
        "processors": "classes, sizes, static fields and shared arrays (the same objects)",
        "filters": "classes and static fields",
    }
    for name, shared in same.items():
        first, *others = [rules for row in rows if (rules := getattr(row.options, name))] or [()]
        for rules in others:
            if kind(first) != kind(rules):
                raise ValueError(
                    f"{name} = {shown(first)}: {where} have {shown(rules)}, and one program decodes"
                    f" all; give {name} of the same {shared} in one order, or none, or {apart}"
                )
    if all(row.is_greedy == rows[0].is_greedy for row in rows):
        return
    if not rule.follows_target:
        raise ValueError(
            f"temperature = {float(rows[0].options.temperature)}: verifier {rule.name!r} cannot"
            f" decode temperature 0 and others together; use 'target_only', or {apart}"
        )
