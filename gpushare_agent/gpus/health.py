"""Whether a GPU is offered: from the driver's looks, its events, an operator's cordon, and the time. Pure.

An event or a bad look takes a GPU away at once; it comes back only after it has passed several looks, each some time after
the one before, and later each time that it falls ill again soon. Some errors leave a GPU that answers and yet must not be
used: such a GPU waits until a reset was seen, that is, until a look has found it away and a later one found it well.
Numbers and names of Xid errors: NVIDIA's catalogue of Xid errors (docs/health.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

from gpushare_agent.gpus.events import GpuEvent, GpuEventKind
from gpushare_agent.gpus.health_values import GpuHealth, HealthState
from gpushare_agent.model.gpus import Gpu, Health
from gpushare_agent.model.names import GpuUuid

RELAPSE_WITHIN_S = 3600.0
"""A GPU that falls ill again within this time after its recovery has had a relapse."""
_MAX_DOUBLINGS = 32

STATES = {
    HealthState.HEALTHY: ("Healthy", "the driver shows the GPU well, and nothing is known against it", "—"),
    HealthState.LOST: (
        "Unhealthy",
        "the driver's last look did not find the GPU, or found it not usable",
        "a look that finds it well: then it is `probing`",
    ),
    HealthState.PROBING: (
        "Unhealthy",
        "the GPU was ill and is looked at; a look that fails makes it `lost`, an event starts the count again",
        "`health.recovery_probes` looks in a row that find it well, `health.recovery_period_s` apart",
    ),
    HealthState.NEEDS_RESET: (
        "Unhealthy",
        "an error happened after which the GPU answers and yet must not be used",
        "a reset (a look finds the GPU away: `lost`), a reboot of the node, or `gpushare-agent uncordon`: `probing`",
    ),
}
"""For each state: what the kubelet is told, what it means, and what ends it. docs/health.md shows this table."""

XID_NAMES = {
    13: "graphics engine exception",
    31: "GPU memory page fault",
    43: "GPU stopped processing",
    45: "preemptive cleanup after earlier errors",
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    63: "row remapping or page retirement recorded",
    64: "row remapping or page retirement could not be recorded",
    68: "video decoder exception",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high rate of single-bit ECC errors",
    94: "contained memory error",
    95: "uncontained memory error",
    109: "context switch timeout",
    119: "GSP did not answer in time",
    120: "GSP error",
    136: "NVLink training failed",
    140: "unrecovered ECC error",
    143: "GPU initialisation failed",
    154: "GPU recovery action changed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPolicy:
    """The settings of the same names (`health.…`)."""

    ignored_xids: frozenset[int] = frozenset()
    reset_xids: frozenset[int] = frozenset()
    recovery_probes: int = 1
    recovery_period_s: float = 0.0
    recovery_period_max_s: float = 0.0


class EventMeaning(StrEnum):
    """What an event says about the node's GPUs."""

    IGNORED = "ignored"
    FOREIGN = "foreign"
    """The GPU is none that the agent knows."""
    UNATTRIBUTED = "unattributed"
    """The driver did not say which GPU."""
    ILL = "ill"
    NEEDS_RESET = "needs-reset"


def meaning_of(event: GpuEvent, known: Collection[GpuUuid], policy: HealthPolicy) -> EventMeaning:
    if event.kind is GpuEventKind.XID and event.xid in policy.ignored_xids:
        return EventMeaning.IGNORED
    if event.uuid is None:
        return EventMeaning.UNATTRIBUTED
    if event.uuid not in known:
        return EventMeaning.FOREIGN
    match event.kind:
        case GpuEventKind.XID:
            return EventMeaning.NEEDS_RESET if event.xid in policy.reset_xids else EventMeaning.ILL
        case GpuEventKind.DOUBLE_BIT_ECC:
            return EventMeaning.NEEDS_RESET
    assert_never(event.kind)


def describe_event(event: GpuEvent) -> str:
    """`Xid 79 (GPU has fallen off the bus)`."""
    match event.kind:
        case GpuEventKind.XID:
            name = XID_NAMES.get(event.xid)
            return f"Xid {event.xid}" + (f" ({name})" if name else "")
        case GpuEventKind.DOUBLE_BIT_ECC:
            return "a double-bit ECC error"
    assert_never(event.kind)


def after_event(
    health: GpuHealth, event: GpuEvent, *, needs_reset: bool, policy: HealthPolicy, now: float
) -> GpuHealth:
    """The GPU's health after an event that is held against it. A wait for a reset is not shortened by a lesser error, and
    its cause stays the first one."""
    if health.state is HealthState.NEEDS_RESET:
        return health
    ill = _fallen_ill(health, policy, now)
    if needs_reset:
        return replace(ill, state=HealthState.NEEDS_RESET, cause=describe_event(event), probe_at=None)
    if health.state is HealthState.LOST:
        return ill
    return replace(ill, state=HealthState.PROBING, cause=describe_event(event))


def after_look(health: GpuHealth, seen: Gpu, policy: HealthPolicy, now: float) -> GpuHealth:
    """The GPU's health after the driver was asked about it; `seen` is its answer."""
    if not seen.is_healthy:
        return _after_bad_look(health, seen.unhealthy_reason or "the driver gives no reason", policy, now)
    match health.state:
        case HealthState.HEALTHY | HealthState.NEEDS_RESET:
            return health
        case HealthState.LOST | HealthState.PROBING:
            return _after_good_look(health, policy, now)
    assert_never(health.state)


def after_driver_lost(health: GpuHealth, reason: str, policy: HealthPolicy, now: float) -> GpuHealth:
    """The driver answers nothing at all. That is no sign that a GPU was reset: one that waits for it goes on waiting."""
    if health.state is HealthState.NEEDS_RESET:
        return health
    return _after_bad_look(health, reason, policy, now)


def is_brief_loss_forgiven(last_forgiven_at: float | None, now: float) -> bool:
    """Whether a driver that left one look unanswered, and shows well at the next all that was well, has its GPUs back at
    once. Not often: the GPUs of a driver that fails at every other look must not come and go for ever."""
    return last_forgiven_at is None or now - last_forgiven_at >= RELAPSE_WITHIN_S


def as_before_loss(before: GpuHealth, health: GpuHealth) -> GpuHealth:
    """The GPU as if the driver had not left a look unanswered: it was not the GPU that failed, so this is no illness to
    recover from. What an operator did since stays done."""
    return replace(before, cordon=health.cordon)


def cordoned(health: GpuHealth, reason: str) -> GpuHealth:
    return replace(health, cordon=reason)


def uncordoned(health: GpuHealth, policy: HealthPolicy, now: float) -> GpuHealth:
    """Back in service by an operator's word, which also ends a wait for a reset: the looks decide then."""
    lifted = replace(health, cordon=None)
    if health.state is not HealthState.NEEDS_RESET:
        return lifted
    return replace(lifted, state=HealthState.PROBING, passes=0, probe_at=now + probe_period_s(lifted, policy))


def waiting(cause: str) -> GpuHealth:
    """A GPU that waited for a reset when the agent ended."""
    return GpuHealth(state=HealthState.NEEDS_RESET, cause=cause)


def offered(seen: Gpu, health: GpuHealth, policy: HealthPolicy) -> Gpu:
    """The GPU as the kubelet and people are shown it."""
    reason = why_not_offered(health, policy)
    return replace(seen, health=Health.UNHEALTHY if reason else Health.HEALTHY, unhealthy_reason=reason)


def why_not_offered(health: GpuHealth, policy: HealthPolicy) -> str:
    """What happened and what brings the GPU back; empty where it is offered. The same as long as neither changes."""
    illness = _illness(health, policy)
    if health.cordon is None:
        return illness
    cordon = f"cordoned: {health.cordon}" if health.cordon else "cordoned"
    return f"{cordon}; besides, {illness}" if illness else cordon


def next_probe_at(healths: Iterable[GpuHealth], now: float) -> float | None:
    """When the next look counts for a GPU that is ill; None where no look but the usual one is due."""
    due = [health.probe_at for health in healths if health.probe_at is not None and health.probe_at > now]
    return min(due, default=None)


def probe_period_s(health: GpuHealth, policy: HealthPolicy) -> float:
    """The time between two looks that count; it doubles with each relapse."""
    period_s = policy.recovery_period_s * 2.0 ** min(health.relapses, _MAX_DOUBLINGS)
    return min(period_s, max(policy.recovery_period_max_s, policy.recovery_period_s))


def _illness(health: GpuHealth, policy: HealthPolicy) -> str:
    looks = f"{policy.recovery_probes} look{'s' if policy.recovery_probes > 1 else ''}"
    back = f"comes back after {looks} that find it well, {probe_period_s(health, policy):g} s apart"
    match health.state:
        case HealthState.HEALTHY:
            return ""
        case HealthState.LOST:
            return f"{health.cause.rstrip('. ')}; {back}"
        case HealthState.PROBING:
            return f"after {health.cause.rstrip('. ')}: {back}"
        case HealthState.NEEDS_RESET:
            return f"{health.cause.rstrip('. ')}; waits for a reset of the GPU, or for `gpushare-agent uncordon`"
    assert_never(health.state)


def _after_bad_look(health: GpuHealth, reason: str, policy: HealthPolicy, now: float) -> GpuHealth:
    if health.state is HealthState.LOST:
        return replace(health, cause=reason)
    return replace(_fallen_ill(health, policy, now), state=HealthState.LOST, cause=reason)


def _after_good_look(health: GpuHealth, policy: HealthPolicy, now: float) -> GpuHealth:
    counts = health.probe_at is None or now >= health.probe_at
    passes = health.passes + counts
    if passes >= policy.recovery_probes:
        return GpuHealth(relapses=health.relapses, recovered_at=now, cordon=health.cordon)
    probe_at = now + probe_period_s(health, policy) if counts else health.probe_at
    return replace(health, state=HealthState.PROBING, passes=passes, probe_at=probe_at)


def _fallen_ill(health: GpuHealth, policy: HealthPolicy, now: float) -> GpuHealth:
    """No look counts for one period from now. A GPU that was well before has a relapse, or falls ill afresh."""
    if health.state is HealthState.HEALTHY:
        is_relapse = health.recovered_at is not None and now - health.recovered_at < RELAPSE_WITHIN_S
        health = replace(health, relapses=health.relapses + 1 if is_relapse else 0)
    return replace(health, passes=0, probe_at=now + probe_period_s(health, policy))
