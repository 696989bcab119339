"""A token bucket. Not thread-safe; the clock is the caller's. State owned: one level."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

LOG_PERIOD_S = 60.0


class TokenBucket:
    """Has `burst` tokens at most and regains `rate` a second."""

    def __init__(self, *, rate: float, burst: float, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._level = burst
        self._at = clock()

    def take(self, tokens: float = 1.0) -> bool:
        """Takes the tokens if they are there."""
        self._refill()
        # Nothing is taken where not all is there: a caller that is refused pays nothing.
        if self._level < tokens:
            return False
        self._level -= tokens
        return True

    def owe(self, tokens: float) -> float:
        """Takes them in any case; the seconds after which none is owed any more."""
        self._refill()
        self._level -= tokens
        # The level may go below zero: a reading that was done has cost its time, whatever the budget was.
        return max(0.0, -self._level / self._rate)

    @property
    def level(self) -> float:
        """Tokens that are there; below zero what is owed."""
        self._refill()
        return self._level

    def _refill(self) -> None:
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now


def lines_by_event(clock: Callable[[], float]) -> defaultdict[str, TokenBucket]:
    """One line in LOG_PERIOD_S of each event, for what others may cause as often as they like."""
    return defaultdict(lambda: TokenBucket(rate=1 / LOG_PERIOD_S, burst=1, clock=clock))
