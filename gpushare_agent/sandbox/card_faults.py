"""Failing cards of the embedded node: what `sandbox fail-card` and `heal-card` write into the agent's faults file.

The file is read before each change, so that what a person has written there stays. State owned: the last ID given, for those
in the file go when their card is healed. Format: adapters/simulated_faults.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpushare_agent.adapters.simulated_faults import (
    Faults,
    RehearsedEvent,
    RehearsedReset,
    encode_faults,
    parse_faults,
)
from gpushare_agent.adapters.simulated_input import read_regular
from gpushare_agent.model.errors import Rejected, Unavailable
from gpushare_agent.model.gpu_events import GpuEventKind

LOST_REASON = "GPU is lost"
"""NVML's words."""
_MAX_XID = 100_000
_KEPT = 1000
"""Events and resets in the file; the agent has read older ones long ago."""


class CardFaults:
    """`path` is None where the agent looks at no faults file; `cards` is how many there are."""

    def __init__(self, path: Path | None, cards: int) -> None:
        self._path = path
        self._cards = cards
        self._last_id = 0

    def lose(self, index: int, reason: str = LOST_REASON) -> None:
        """The driver no longer finds the card, until it is healed. Raises Rejected, Unavailable (as all of these do)."""
        faults = self._checked(index)
        self._write(replace(faults, lost={**faults.lost, index: reason or LOST_REASON}))

    def report_xid(self, index: int, xid: int) -> None:
        """The driver reports an Xid error of the card, once."""
        if not 1 <= xid <= _MAX_XID:
            raise Rejected(
                f"Xid {xid} cannot be reported: there are 1 to {_MAX_XID}; 79 says that a card fell off the bus"
            )
        faults = self._checked(index)
        event = RehearsedEvent(id=self._next_id(faults), card=index, xid=xid)
        self._write(replace(faults, events=(*faults.events, event)[-_KEPT:]))

    def heal(self, index: int) -> str:
        """Takes everything back that was done to the card: a loss ends; after Xid errors the driver sees it reset. Returns
        what was done, empty where nothing was wrong."""
        faults = self._checked(index)
        xids = [event for event in faults.events if event.card == index]
        done = [f"is no longer lost ({faults.lost[index]})"] if index in faults.lost else []
        resets = faults.resets
        if xids:
            done.append(f"was reset after {_event_words(xids)}")
            resets = (*resets, RehearsedReset(id=self._next_id(faults), card=index))[-_KEPT:]
        if done:
            lost = {card: reason for card, reason in faults.lost.items() if card != index}
            events = tuple(event for event in faults.events if event.card != index)
            self._write(replace(faults, lost=lost, events=events, resets=resets))
        return " and ".join(done)

    def by_card(self) -> dict[int, str]:
        """What is wrong with each card that something is wrong with; nothing where the file cannot be read."""
        try:
            faults = self._read()
        except (Rejected, Unavailable):
            return {}
        words = {index: _event_words([e for e in faults.events if e.card == index]) for index in range(self._cards)}
        words |= {index: ", ".join(filter(None, (faults.lost[index], words.get(index)))) for index in faults.lost}
        return {index: text for index, text in sorted(words.items()) if text}

    def _checked(self, index: int) -> Faults:
        if not 0 <= index < self._cards:
            raise Rejected(f"there is no card {index}: this node has the cards 0 to {self._cards - 1}")
        return self._read()

    def _next_id(self, faults: Faults) -> int:
        self._last_id = max(self._last_id, faults.last_id) + 1
        return self._last_id

    def _read(self) -> Faults:
        try:
            return parse_faults(read_regular(self._file()))
        except FileNotFoundError:
            return Faults()
        except (OSError, ValueError, RecursionError) as error:
            raise Rejected(
                f"the faults file {self._file()} cannot be read: {error}. Mend it, or remove it: then nothing fails."
            ) from error

    def _write(self, faults: Faults) -> None:
        path = self._file()
        new = path.with_name(f".{path.name}")
        try:
            new.write_text(encode_faults(faults))
            new.replace(path)
        except OSError as error:
            raise Unavailable(f"the faults file {path} cannot be written: {error.strerror or error}") from error

    def _file(self) -> Path:
        if self._path is None:
            raise Rejected("cards cannot fail here: the sandbox was started with an empty --simulated.faults")
        return self._path


def _event_words(events: list[RehearsedEvent]) -> str:
    """`Xid 79, Xid 48`: each once, in order of the first report."""
    names = [f"Xid {event.xid}" if event.kind is GpuEventKind.XID else event.kind.value for event in events]
    return ", ".join(dict.fromkeys(names))
