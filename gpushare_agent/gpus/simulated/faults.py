"""The faults file of simulated GPUs: what fails, what the driver reports, which GPU was reset. Pure.

`{"lost": {"<index>": "<reason>"}, "all_lost": "<reason>", "xids": [{"id": 1, "card": 3, "xid": 79}],
"resets": [{"id": 2, "card": 3}], "mig": {"<index>": ["1g.10gb", "3g.40gb"]}}`, each key optional
(docs/reference/sandbox.md). IDs grow; those that a driver finds at its first poll are history to it. An entry of `xids` may
have `"kind": "double-bit-ecc"` instead of an xid, and no GPU, as where a driver does not name it.
"""

from __future__ import annotations

import json
from typing import Any

from msgspec import Struct, field

from gpushare_agent.gpus.decisions.values import GpuEventKind
from gpushare_agent.gpus.simulated.input import entries, whole_number
from gpushare_agent.gpus.simulated.mig import MAX_INSTANCES, PROFILE
from gpushare_agent.placement.topology_text import MAX_GPUS

MAX_EVENTS = 100_000
_MAX_XID = 100_000
_MAX_ID = 2**53


class RehearsedEvent(Struct, frozen=True, kw_only=True):
    """`gpu` is None where the driver is not to name it."""

    id: int
    gpu: int | None
    kind: GpuEventKind = GpuEventKind.XID
    xid: int = 0


class RehearsedReset(Struct, frozen=True, kw_only=True):
    """The GPU is lost at the next poll, and back at the one after it."""

    id: int
    gpu: int


class Faults(Struct, frozen=True, kw_only=True):
    """`lost` maps GPU index to reason; an empty `all_lost` means the driver answers. Events and resets by ID."""

    lost: dict[int, str] = field(default_factory=dict)
    all_lost: str = ""
    events: tuple[RehearsedEvent, ...] = ()
    resets: tuple[RehearsedReset, ...] = ()
    mig: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Profiles of the instances of each GPU in MIG mode, by its index."""

    @property
    def last_id(self) -> int:
        """Of both kinds, 0 where there is none."""
        return max((0, *(event.id for event in self.events), *(reset.id for reset in self.resets)))


def parse_faults(text: str) -> Faults:
    """Raises ValueError."""
    raw_faults = json.loads(text)
    if not isinstance(raw_faults, dict) or not isinstance(raw_faults.get("lost", {}), dict):
        raise ValueError(
            'expected {"lost": {"<index>": "<reason>"}, "all_lost": "<reason>", "xids": […], "resets": […]}'
        )
    events = [_event(entry) for entry in entries(raw_faults, "xids", MAX_EVENTS)]
    resets = [
        RehearsedReset(id=whole_number(entry, "id", 1, _MAX_ID), gpu=whole_number(entry, "card", 0, MAX_GPUS - 1))
        for entry in entries(raw_faults, "resets", MAX_EVENTS)
    ]
    return Faults(
        lost={int(index): str(reason) for index, reason in raw_faults.get("lost", {}).items()},
        all_lost=str(raw_faults.get("all_lost") or ""),
        events=tuple(sorted(events, key=lambda event: event.id)),
        resets=tuple(sorted(resets, key=lambda reset: reset.id)),
        mig=_mig(raw_faults.get("mig", {})),
    )


def encode_faults(faults: Faults) -> str:
    """What parse_faults reads."""
    raw: dict[str, Any] = {"lost": {str(index): reason for index, reason in sorted(faults.lost.items())}}
    if faults.all_lost:
        raw["all_lost"] = faults.all_lost
    raw["xids"] = [
        {"id": event.id, "card": event.gpu}
        | ({"xid": event.xid} if event.kind is GpuEventKind.XID else {"kind": event.kind.value})
        for event in faults.events
    ]
    raw["resets"] = [{"id": reset.id, "card": reset.gpu} for reset in faults.resets]
    if faults.mig:
        raw["mig"] = {str(index): list(profiles) for index, profiles in sorted(faults.mig.items())}
    return json.dumps(raw)


def _mig(raw: Any) -> dict[int, tuple[str, ...]]:
    if not isinstance(raw, dict) or len(raw) > MAX_GPUS:
        raise ValueError('expected "mig": {"<index>": ["1g.10gb"]}')
    for profiles in raw.values():
        if not isinstance(profiles, list) or len(profiles) > MAX_INSTANCES:
            raise ValueError(f"expected lists of at most {MAX_INSTANCES} profiles in `mig`")
        if not all(isinstance(profile, str) and PROFILE.fullmatch(profile) for profile in profiles):
            raise ValueError("a profile in `mig` is not of the form 1g.10gb")
    return {int(index): tuple(profiles) for index, profiles in raw.items()}


def _event(entry: dict[str, Any]) -> RehearsedEvent:
    kind = GpuEventKind(entry.get("kind", GpuEventKind.XID.value))
    return RehearsedEvent(
        id=whole_number(entry, "id", 1, _MAX_ID),
        gpu=None if entry.get("card") is None else whole_number(entry, "card", 0, MAX_GPUS - 1),
        kind=kind,
        xid=whole_number(entry, "xid", 1, _MAX_XID) if kind is GpuEventKind.XID else 0,
    )
