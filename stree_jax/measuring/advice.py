"""Which way to decode, from the records of `compare` at one temperature."""

from collections.abc import Sequence

from stree_jax.measuring.record import Record


def spread(record: Record) -> float:
    """Half the range between the quartiles of the rounds, in tokens a second."""
    return (record.tokens_per_second["high"] - record.tokens_per_second["low"]) / 2


def is_beaten(record: Record, rival: Record) -> bool:
    """True if another way is faster by more than the spread of both."""
    gain = _speed(rival) - _speed(record)
    return gain > max(spread(record), spread(rival))


def choice(records: Sequence[Record]) -> Record:
    """The simplest way that none beats: no drafts, else a chain, else the fastest."""
    ranked = _ranked(records)
    chains = [record for record in ranked if record.nodes == 1 + len(record.accepted_per_depth)]
    without_drafts = [record for record in chains if record.nodes == 1]
    simplest = *without_drafts, *chains, ranked[0]
    return next(record for record in simplest if not is_beaten(record, ranked[0]))


def advice(records: Sequence[Record]) -> str:
    """What to draft with and why, in a sentence."""
    best, ranked = choice(records), _ranked(records)
    if best.nodes > 1:
        sentence = f"Draft with {best.method}: {_gain(best)} without (tau {best.tau:.2f})."
        if best is ranked[0]:
            return sentence
        return f"{sentence} {ranked[0].method} is no faster beyond the spread."
    tree = next((record for record in ranked if record.nodes > 1), None)
    if tree is None:
        return "Do not draft: no way with drafts gives the text."
    if not is_beaten(tree, best):
        return f"Do not draft: {tree.method} is {_gain(tree)} without, within the spread."
    needed = tree.tau * _speed(best) / _speed(tree)
    return f"Do not draft: {tree.method} needs tau {needed:.1f} here, and reaches {tree.tau:.1f}."


def _ranked(records: Sequence[Record]) -> list[Record]:
    """The fastest first, without those whose texts are wrong."""
    right = [record for record in records if record.identical is not False]
    return sorted(right, key=_speed, reverse=True)


def _speed(record: Record) -> float:
    return record.tokens_per_second["median"]


def _gain(record: Record) -> str:
    return f"{record.speed_up['median']:.2f} times as fast as"
