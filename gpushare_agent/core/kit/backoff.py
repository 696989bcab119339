"""The wait before the next try. A value without state: the caller counts its failures."""

from __future__ import annotations

import random
from collections.abc import Callable

from msgspec import Struct


class Backoff(Struct, frozen=True, kw_only=True):
    """Doubling delays with jitter, so that many nodes do not come back to one server in step.

    `random` gives numbers from 0 up to 1; it is a field so that a test can fix it.
    """

    base_s: float
    cap_s: float
    random: Callable[[], float] = random.random

    def delay_s(self, failures: int) -> float:
        """The delay after so many failures in a row (from 1): half to all of base, twice base, …, at most the cap."""
        doublings = min(max(failures, 1) - 1, 32)  # 2**32 is past every cap, and no float overflows
        # Half at least: a delay near zero would be no back-off, however the dice fall.
        full = min(self.base_s * 2.0**doublings, self.cap_s)
        return full * (0.5 + 0.5 * self.random())
