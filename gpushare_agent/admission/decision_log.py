"""The last decisions, newest last. In memory only: those from before a restart are in the agent's log and the Events.
After new settings (SIGHUP) the records and their numbers continue.

State owned: the records, in a ring. Written by admission/outcomes.py alone; readers copy.
"""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace

from gpushare_agent.model.decision_records import DecisionRecord


class DecisionLog:
    """Keeps the last `kept` records."""

    def __init__(self, kept: int) -> None:
        self._records: deque[DecisionRecord] = deque(maxlen=kept)
        self._number = 0

    @property
    def number(self) -> int:
        """Of the newest record, 0 before the first."""
        return self._number

    def add(self, record: DecisionRecord) -> DecisionRecord:
        """Numbers the record and keeps it."""
        self._number += 1
        numbered = replace(record, number=self._number)
        self._records.append(numbered)
        return numbered

    def take_over(self, earlier: DecisionLog) -> None:
        """Continue the log of the agent before it read its settings again; call it before the first `add`."""
        self._number = earlier._number
        self._records.extend(earlier._records)

    def newest(self, limit: int, *, namespace: str = "", pod: str = "", after: int = 0) -> tuple[DecisionRecord, ...]:
        """At most `limit`, newest first: of one pod where it is named, and only those numbered above `after`."""
        found = (
            record
            for record in reversed(self._records)
            if record.number > after
            and (not pod or record.pod == pod)
            and (not namespace or record.namespace == namespace)
        )
        return tuple(record for record, _ in zip(found, range(limit), strict=False))
