"""Chooses the fastest way of drafting by measurements of past runs."""

import dataclasses

_WEIGHT = 0.3  # weight of the newest run
_HYSTERESIS = 1.05  # speed-up that makes another way the choice
_FIRST_WAIT, _LONGEST_WAIT = 4, 64  # runs until a slower way is re-probed


@dataclasses.dataclass
class _Measured:
    """Decayed sums over the runs of one way, and its re-probing interval."""

    tokens: float = 0.0
    calls: float = 0.0
    seconds: float = 0.0
    steps: float = 0.0
    wait: int = _FIRST_WAIT
    unused: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second of a row; 0 if it was never measured."""
        if not self.calls:
            return 0.0
        return (self.tokens / self.calls) / (self.seconds / self.steps)


class DraftPolicy:
    """Chooses between ways of drafting, from run to run.

    A way's rate is its tokens per target call over its seconds per step, both averages in which a
    run counts 0.7 times as much as the one after it. Another way is chosen if it is 5 % faster. A
    way that is not in use is re-probed after 4 runs, then 8, up to 64, as texts change.

    The choice depends on the past only, so it does not change any text.

    Args:
        num_ways: number of ways.
    """

    def __init__(self, num_ways: int):
        self._measured = [_Measured() for _ in range(num_ways)]
        self._best = 0

    def choose(self) -> int:
        """The way of the next run."""
        for way, measured in enumerate(self._measured):
            if not measured.calls:
                return way
        for way, measured in enumerate(self._measured):
            if way != self._best and measured.unused >= measured.wait:
                return way
        return self._best

    def record(self, way: int, *, tokens: int, calls: int, seconds: float, steps: int) -> None:
        """Records a run.

        Args:
            way: index of the way that was used.
            tokens: tokens emitted by all rows.
            calls: target calls, counted once per unfinished row.
            seconds: duration of the run.
            steps: number of loop steps.
        """
        if not (calls and steps):
            return
        now = self._measured[way]
        was_known = now.calls > 0
        for name, value in (
            ("tokens", tokens),
            ("calls", calls),
            ("seconds", seconds),
            ("steps", steps),
        ):
            setattr(now, name, (1 - _WEIGHT) * getattr(now, name) + _WEIGHT * value)
        for measured in self._measured:
            measured.unused += 1
        now.unused = 0
        rates = [measured.rate for measured in self._measured]
        fastest = max(range(len(rates)), key=rates.__getitem__)
        if fastest != self._best and rates[fastest] > _HYSTERESIS * rates[self._best]:
            self._best = fastest
            self._measured[fastest].wait = _FIRST_WAIT
        elif way != self._best and was_known:  # re-probed, still slower
            now.wait = min(2 * now.wait, _LONGEST_WAIT)
