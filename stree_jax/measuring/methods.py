"""Methods of decoding, and the comparison of several."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from stree_jax.decoding.drafters import Drafter, NgramDrafter
from stree_jax.decoding.generate import generate
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.options import Options
from stree_jax.decoding.plan import Plan, plan
from stree_jax.decoding.results import DecodeStatistics, Generation
from stree_jax.decoding.verifiers import Verifier
from stree_jax.decoding.way import Topology, Way
from stree_jax.measuring.clock import Progress, memory_of, silent, speeds, summary, timed_rounds
from stree_jax.measuring.costs import drafting
from stree_jax.measuring.record import Record
from stree_jax.mesh.partition import ONE_DEVICE
from stree_jax.models.lm import HybridLM

PLAIN = "no drafts"
_NUM_DRAFTED = 16  # trees in a timed call
_MEAN = "tau", "accepted_per_call", "tokens_per_second", "speed_up"  # of categories


class Batch(NamedTuple):
    """Texts of one category that are continued together, in one way."""

    prompts: Sequence[Sequence[int]]
    options: Options
    category: str | None = None


class Method(NamedTuple):
    """A way of decoding; autoregressive without a drafter, whose own tree is the default."""

    name: str
    drafter: Drafter | None = None
    topology: Topology | None = None
    verifier: str | Verifier | None = None
    target: HybridLM | None = None  # None: that of the comparison

    def is_comparable(self, request: Plan) -> bool:
        """True if its tokens are those of the comparison's target with the same key."""
        # Above temperature 0, rules that test drafts have their own random numbers.
        is_exact = request.sampling.temperature_is_zero or request.decoder.verifier.follows_target
        return is_exact and self.target is None

    @property
    def way(self) -> Way:
        """Its drafter, tree and verifier."""
        return Way(self.drafter, self.topology, self.verifier)

    def decode(self, target: HybridLM, batch: Batch) -> Generation:
        """The texts of a batch."""
        target = self.target or target
        return generate(target, batch.prompts, options=batch.options, **self.way)

    def planned(self, target: HybridLM, batch: Batch) -> Plan:
        """The checked request of `decode`; compiles nothing."""
        target = self.target or target
        return plan(target, batch.prompts, batch.options, **self.way).placed(target.partition)

    def first_token(self, target: HybridLM, batch: Batch) -> None:
        """Reads the prompts and makes one step of the same program; blocks."""
        arguments = self._first_step(self.target or target, batch)
        with dispatch.on(arguments[1]):
            jax.block_until_ready(SpeculativeDecoder.run(*arguments))

    def memory(self, target: HybridLM, batch: Batch) -> int:
        """Bytes of its loop: weights, caches and temporary memory; jax has compiled it before."""
        arguments = self._first_step(self.target or target, batch)
        with dispatch.on(arguments[1]):
            return sum(memory_of(SpeculativeDecoder.run.lower(*arguments).compile()).values())

    def _first_step(self, target: HybridLM, batch: Batch) -> tuple[Any, ...]:
        """The decoder and the arguments of its loop: a row ends with its first new token."""
        request = self.planned(target, batch)
        decoder, drafter, context, keys, limits, sampling, *_ = request
        with dispatch.on(target):
            state = decoder.start(target, drafter, context, keys, sampling)
        if request.trees:  # the decoder has the sizes of all of them
            largest = max(request.trees, key=lambda tree: tree.num_nodes)
            decoder = dataclasses.replace(decoder, topology=largest)
        limits = limits._replace(max_new_tokens=jnp.minimum(limits.max_new_tokens, 1))
        return decoder, target, drafter, state, limits, sampling


# Drafts that are copied from the text so far.
LOOKUP = Method("prompt lookup, chain of 4", NgramDrafter())


def compare(
    target: HybridLM,
    methods: Sequence[Method],
    batches: Sequence[Batch],
    rounds: int,
    progress: Progress = silent,
    *,
    parts: bool = True,
) -> Iterator[list[Record]]:
    """Decodes batches with every method in turns; yields records after each round.

    `PLAIN` is among the methods, and all batches have one temperature. Without `parts` only whole
    texts are timed.
    """
    plans = {method.name: method.planned(target, batches[0]) for method in methods}
    calls: dict[Any, Callable[[Batch], Any]] = {}
    for method in methods:
        calls[method.name] = functools.partial(method.decode, target)
        if not parts:
            continue
        calls["first", method.name] = functools.partial(method.first_token, target)
        model, request = method.target or target, plans[method.name]
        drafts_alone = request.drafter is not None and not request.trees
        if drafts_alone and model.partition == ONE_DEVICE:
            draft = drafting(model, request)
            calls["draft", method.name] = functools.partial(_drafted, model, draft)
    ticks, total = itertools.count(1), len(calls) * len(batches) * (1 + rounds)

    def advance() -> None:
        progress(f"runs at temperature {batches[0].options.temperature:g}", next(ticks), total)

    categories = [*filter(None, dict.fromkeys(batch.category for batch in batches))]
    memory: dict[str, int] = {}
    for outputs, seconds in timed_rounds(calls, batches, rounds, advance):
        if parts and not memory:
            memory = {method.name: method.memory(target, batches[0]) for method in methods}
        records = _records(methods, plans, outputs, seconds, memory)
        by_category: dict[str, list[Record]] = {}
        for category in categories:
            columns = [i for i, batch in enumerate(batches) if batch.category == category]
            some_outputs = {name: [texts[i] for i in columns] for name, texts in outputs.items()}
            some_seconds = {name: taken[:, columns] for name, taken in seconds.items()}
            by_category[category] = _records(methods, plans, some_outputs, some_seconds, memory)
        for i, record in enumerate(records if by_category else ()):
            of_method = {category: some[i] for category, some in by_category.items()}
            mean = _mean([*of_method.values()])
            records[i] = dataclasses.replace(record, by_category=of_method, mean_of_categories=mean)
        yield records


def _mean(records: Sequence[Record]) -> dict[str, Any]:
    """The means of some numbers over categories."""
    numbers = [{name: record[name] for name in _MEAN} for record in records]
    return jax.tree.map(lambda *values: float(np.mean(values)), *numbers)


def _drafted(target: HybridLM, draft: Callable[[int], object], _: Batch) -> None:
    """Drafts some trees, whatever the request."""
    with dispatch.on(target):
        jax.block_until_ready(draft(_NUM_DRAFTED))


def _records(
    methods: Sequence[Method],
    plans: Mapping[str, Plan],
    outputs: Mapping[Any, list[Any]],
    seconds: Mapping[Any, np.ndarray],
    memory: Mapping[str, int],
) -> list[Record]:
    """A record of each method, from what `timed_rounds` gives for its name and its parts."""
    of_texts = {method.name: seconds[method.name] for method in methods}
    num_tokens = {name: sum(out.stats.num_tokens for out in outputs[name]) for name in of_texts}
    speed = speeds(num_tokens, of_texts, PLAIN)
    records = []
    for method in methods:
        name, request = method.name, plans[method.name]
        batch_stats = [out.stats for out in outputs[name]]
        num_calls = sum(stats.num_target_calls for stats in batch_stats)
        accepted = sum(stats.accepted_per_depth for stats in batch_stats).tolist()
        reached = sum(stats.reached_per_depth for stats in batch_stats).tolist()
        first, draft = (seconds.get((part, name)) for part in ("first", "draft"))
        call = None if first is None else _seconds_of_call(of_texts[name] - first, batch_stats)
        is_identical = all(
            np.array_equal(plain.tokens, out.tokens)
            for plain, out in zip(outputs[PLAIN], outputs[name], strict=True)
        )
        record = Record(
            method=name,
            temperature=request.rows[0].options.temperature,
            rows=len(request.rows),
            nodes=request.decoder.topology.num_nodes,
            tau=num_tokens[name] / num_calls,
            tau_by_prompt=[stats.num_tokens / stats.num_target_calls for stats in batch_stats],
            accepted_per_call=sum(accepted) / num_calls,
            accepted_per_depth=[round(count / num_calls, 4) for count in accepted],
            accepted_of_reached=[
                round(count / could, 4) if could else None
                for could, count in zip(reached, accepted, strict=True)
            ],
            calls_by_tree=_by_tree(batch_stats),
            identical=is_identical if method.is_comparable(request) else None,
            seconds_by_prompt=np.median(of_texts[name], axis=0).tolist(),
            milliseconds_of_call=None if call is None else summary(1e3 * call),
            milliseconds_to_first_token=None
            if first is None
            else summary(1e3 * first.mean(axis=1)),
            draft_share=None
            if draft is None or call is None
            else summary(draft.mean(axis=1) / _NUM_DRAFTED / call),
            memory_bytes=memory.get(name),
            **speed[name],
        )
        records.append(record)
    return records


def _seconds_of_call(after_first: np.ndarray, batch_stats: Sequence[DecodeStatistics]) -> Any:
    """Seconds of a call after the first of a text, `[rounds]`; None if they are noise.

    `after_first` are the seconds of texts less those to their first tokens, `[rounds, items]`: a
    difference of two times, which noise can make negative.
    """
    num_calls = sum(int(max(stats.target_calls_per_row)) - 1 for stats in batch_stats)
    seconds = after_first.sum(axis=1)
    return seconds / num_calls if num_calls and min(seconds) > 0 else None


def _by_tree(batch_stats: Sequence[DecodeStatistics]) -> dict[str, int] | None:
    """Calls with each of several trees, by its name; trees of one name are counted together."""
    counts: dict[str, int] = {}
    for stats in batch_stats:
        for tree, calls in (stats.calls_by_tree or {}).items():
            counts[tree.name] = counts.get(tree.name, 0) + calls
    return counts or None


def different(records: Iterable[Record]) -> list[str]:
    """Methods whose tokens should be those of autoregressive decoding, and are not."""
    return [
        f"{record.method}, temperature {record.temperature:g}"
        for record in records
        if record.identical is False
    ]
