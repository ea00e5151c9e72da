"""Methods of decoding, and the comparison of several."""

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
from stree_jax.decoding.results import Generation
from stree_jax.decoding.verifiers import Verifier
from stree_jax.measuring.clock import Progress, memory_of, silent, speeds, summary, timed_rounds
from stree_jax.measuring.costs import drafting
from stree_jax.mesh.partition import ONE_DEVICE
from stree_jax.models.lm import HybridLM
from stree_jax.tree import TreeTopology

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
    topology: TreeTopology | str | Sequence[TreeTopology] | None = None
    verifier: str | Verifier | None = None
    target: HybridLM | None = None  # None: that of the comparison

    def is_comparable(self, asked: Plan) -> bool:
        """True if its tokens are those of the comparison's target with the same key."""
        # Above temperature 0, rules that test drafts have their own random numbers.
        is_exact = asked.sampling.temperature_is_zero or asked.decoder.verifier.follows_target
        return is_exact and self.target is None

    def using(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function with keywords of `generate`, which then decodes in this way."""
        own = functools.partial(function, drafter=self.drafter, topology=self.topology)
        return functools.partial(own, verifier=self.verifier)

    def decode(self, target: HybridLM, batch: Batch) -> Generation:
        """The texts of a batch."""
        return self.using(generate)(self.target or target, batch.prompts, options=batch.options)

    def planned(self, target: HybridLM, batch: Batch) -> Plan:
        """The checked request of `decode`; compiles nothing."""
        target = self.target or target
        return self.using(plan)(target, *batch[:2]).placed(target.partition)

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
        asked = self.planned(target, batch)
        decoder, drafter, limits = asked.decoder, asked.drafter, asked.limits
        with dispatch.on(target):
            state = decoder.start(target, drafter, asked.context, asked.keys, asked.sampling)
        limits = limits._replace(max_new_tokens=jnp.minimum(limits.max_new_tokens, 1))
        return decoder, target, drafter, state, limits, asked.sampling


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
) -> Iterator[list[dict[str, Any]]]:
    """Decodes batches with every method in turns; yields records after each round.

    `PLAIN` is among the methods, and all batches have one temperature. Fields of a record are
    those of docs/bench.md, without `parts` none but those of whole texts.
    """
    plans = {each.name: each.planned(target, batches[0]) for each in methods}
    ways: dict[Any, Callable[[Batch], Any]] = {}
    for each in methods:
        own = each.target or target
        ways[each.name] = functools.partial(each.decode, target)
        if not parts:
            continue
        ways["first", each.name] = functools.partial(each.first_token, target)
        asked = plans[each.name]
        drafts_alone = asked.drafter is not None and not asked.drafter.choices
        if drafts_alone and own.partition == ONE_DEVICE:
            drafts = drafting(own, asked)
            ways["draft", each.name] = functools.partial(_drafted, own, drafts)
    ticks, total = itertools.count(1), len(ways) * len(batches) * (1 + rounds)

    def advance() -> None:
        progress(f"runs at temperature {batches[0].options.temperature:g}", next(ticks), total)

    memory: dict[str, int] = {}
    for outputs, seconds in timed_rounds(ways, batches, rounds, advance):
        if parts and not memory:
            memory = {each.name: each.memory(target, batches[0]) for each in methods}
        rows = _records(methods, plans, outputs, seconds)
        for category in filter(None, dict.fromkeys(each.category for each in batches)):
            places = [i for i, each in enumerate(batches) if each.category == category]
            part = {name: [made[i] for i in places] for name, made in outputs.items()}
            taken = {name: each[:, places] for name, each in seconds.items()}
            found = _records(methods, plans, part, taken)
            for row, record in zip(rows, found, strict=True):
                row.setdefault("by_category", {})[category] = record
                means = [{name: of[name] for name in _MEAN} for of in row["by_category"].values()]
                row["mean_of_categories"] = jax.tree.map(lambda *of: float(np.mean(of)), *means)
        yield [row | {"memory_bytes": memory.get(row["method"])} for row in rows]


def _drafted(target: HybridLM, part: Callable[[int], object], _: Any) -> None:
    """Drafts some trees, whatever the request."""
    with dispatch.on(target):
        jax.block_until_ready(part(_NUM_DRAFTED))


def _records(
    methods: Sequence[Method],
    plans: Mapping[str, Plan],
    outputs: Mapping[Any, list[Any]],
    seconds: Mapping[Any, np.ndarray],
) -> list[dict[str, Any]]:
    """A record of each method, from what `timed_rounds` gives for its name and its first token."""
    of_all = {each.name: seconds[each.name] for each in methods}
    emitted = {name: sum(out.stats.num_tokens for out in outputs[name]) for name in of_all}
    speed = speeds(emitted, of_all, PLAIN)
    plain = [out.tokens for out in outputs[PLAIN]]
    rows = []
    for method in methods:
        name, mine = method.name, outputs[method.name]
        calls = sum(out.stats.num_target_calls for out in mine)
        taus = [out.stats.num_tokens / out.stats.num_target_calls for out in mine]
        accepted = sum(out.stats.accepted_per_depth for out in mine).tolist()
        reached = sum(out.stats.reached_per_depth for out in mine).tolist()
        first, draft = (seconds.get((part, name)) for part in ("first", "draft"))
        call = share = until_first = None
        if first is not None:
            until_first = summary(1e3 * first.mean(axis=1))
            later = sum(int(max(out.stats.target_calls_per_row)) - 1 for out in mine)
            # A difference of two times: where it is not above 0, it is noise.
            rest = (of_all[name] - first).sum(axis=1)
            call = rest / later if later and min(rest) > 0 else None
        if draft is not None and call is not None:
            share = summary(draft.mean(axis=1) / _NUM_DRAFTED / call)
        identical = all(map(np.array_equal, plain, [out.tokens for out in mine]))
        record = {
            "method": name,
            "temperature": plans[name].rows[0].options.temperature,
            "nodes": plans[name].decoder.topology.num_nodes,
            "seconds_by_prompt": np.median(of_all[name], axis=0).tolist(),
            "tau": emitted[name] / calls,
            "tau_by_prompt": taus,
            "accepted_per_call": sum(accepted) / calls,
            "accepted_per_depth": [round(count / calls, 4) for count in accepted],
            "accepted_of_reached": [
                round(count / could, 4) if could else None
                for could, count in zip(reached, accepted, strict=True)
            ],
            "calls_by_tree": _by_tree(mine),
            "milliseconds_of_call": None if call is None else summary(1e3 * call),
            "milliseconds_to_first_token": until_first,
            "draft_share": share,
            "identical": identical if method.is_comparable(plans[name]) else None,
        }
        rows.append(record | speed[name])
    return rows


def _by_tree(made: Sequence[Any]) -> dict[str, int] | None:
    """Calls with each of several trees, by its name; those of one name together."""
    counts: dict[str, int] = {}
    for out in made:
        for tree, calls in (out.stats.calls_by_tree or {}).items():
            counts[tree.name] = counts.get(tree.name, 0) + calls
    return counts or None


def different(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Methods whose tokens should be those of autoregressive decoding, and are not."""
    wrong = [row for row in rows if row["identical"] is False]
    return [f"{row['method']}, temperature {row['temperature']:g}" for row in wrong]
