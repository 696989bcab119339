"""Decides whether a GPU is offered, from polls of the driver, its events, an operator's cordon, and the time. Pure.

An event or a failed poll makes a GPU Unhealthy at once. It is offered again after several polls in a row found it usable,
a period apart; the period doubles with each relapse. Some errors leave a GPU that answers but must not be used: it waits
until a reset is observed, that is, a poll finds the GPU missing and a later one finds it usable. The owner of each GPU's
state is agent/gpus/inventory.py.
Numbers and names of Xid errors: NVIDIA's catalogue of Xid errors (docs/explanation/health.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.core.model.gpus import Gpu, Health
from gpushare_agent.core.model.names import GpuUuid


class GpuEventKind(StrEnum):
    XID = "xid"
    DOUBLE_BIT_ECC = "double-bit-ecc"


class GpuEvent(Struct, frozen=True, kw_only=True):
    """`uuid` is None where the driver does not name the GPU. `xid` is the number in NVIDIA's catalogue of Xid errors, 0
    for events of another kind. `gi` and `ci` are the MIG instance's IDs, None where it is of the whole GPU."""

    kind: GpuEventKind
    uuid: GpuUuid | None
    xid: int = 0
    gi: int | None = None
    ci: int | None = None

    def is_of(self, gpu: Gpu) -> bool:
        """Whether it is of this GPU, or of this MIG instance or the GPU that it is a part of."""
        # The driver names the whole GPU, and an instance by its numbers there.
        if gpu.mig is None or self.uuid != gpu.mig.parent:
            return self.uuid == gpu.uuid
        return self.gi in (None, gpu.mig.gi) and self.ci in (None, gpu.mig.ci)


class HealthState(StrEnum):
    """One GPU's state. A cordon is not a state: a GPU in any state may be cordoned."""

    HEALTHY = "healthy"
    LOST = "lost"
    PROBING = "probing"
    NEEDS_RESET = "needs-reset"


class GpuHealth(Struct, frozen=True, kw_only=True):
    """`cause` is the error that made it unhealthy, empty while healthy. Times are of the monotonic clock, in seconds.

    `passes` counts consecutive polls that found the GPU usable; a poll counts from `probe_at` on. `relapses` counts
    consecutive failures soon after a recovery. `cordon` is the operator's reason, None where the GPU is in service.
    """

    state: HealthState = HealthState.HEALTHY
    cause: str = ""
    passes: int = 0
    probe_at: float | None = None
    relapses: int = 0
    recovered_at: float | None = None
    cordon: str | None = None


class SavedHealth(Struct, frozen=True, kw_only=True):
    """Saved over a restart of the agent: cordons with their reasons, and GPUs that wait for a reset, with the cause."""

    cordons: Mapping[GpuUuid, str]
    waits: Mapping[GpuUuid, str]


NOTHING_SAVED = SavedHealth(cordons={}, waits={})


RELAPSE_WITHIN_S = 3600.0
"""A GPU that becomes unhealthy again within this time after its recovery has had a relapse."""
_MAX_DOUBLINGS = 32

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


class HealthPolicy(Struct, frozen=True, kw_only=True):
    """The rules, as the settings of the same names (`health.…`) have them; the maximum is no setting."""

    ignored_xids: frozenset[int] = frozenset()
    reset_xids: frozenset[int] = frozenset()
    recovery_probes: int = 1
    recovery_period_s: float = 0.0
    recovery_period_max_s: float = 600.0
    control: str = ""
    """What `gpushare-agent uncordon GPU` needs behind it, to reach this agent."""


class EventMeaning(StrEnum):
    """The effect of an event on the node's GPUs."""

    IGNORED = "ignored"
    FOREIGN = "foreign"
    """The agent knows no GPU of this UUID."""
    UNATTRIBUTED = "unattributed"
    """The driver does not name the GPU."""
    UNHEALTHY = "unhealthy"
    NEEDS_RESET = "needs-reset"


def meaning_of(event: GpuEvent, known: Collection[GpuUuid], policy: HealthPolicy) -> EventMeaning:
    # First: an ignored Xid is ignored on every GPU. Programs cause it, and no tenant may take a GPU out of service.
    if event.kind is GpuEventKind.XID and event.xid in policy.ignored_xids:
        return EventMeaning.IGNORED
    # No GPU becomes Unhealthy by a guess: all are polled.
    if event.uuid is None:
        return EventMeaning.UNATTRIBUTED
    if event.uuid not in known:
        return EventMeaning.FOREIGN
    match event.kind:
        case GpuEventKind.XID:
            return EventMeaning.NEEDS_RESET if event.xid in policy.reset_xids else EventMeaning.UNHEALTHY
        # No setting ignores it: the GPU's memory is wrong until a reset.
        case GpuEventKind.DOUBLE_BIT_ECC:
            return EventMeaning.NEEDS_RESET


def describe_event(event: GpuEvent) -> str:
    """The event in words, such as `Xid 79 (GPU has fallen off the bus)`."""
    match event.kind:
        case GpuEventKind.XID:
            name = XID_NAMES.get(event.xid)
            return f"Xid {event.xid}" + (f" ({name})" if name else "")
        case GpuEventKind.DOUBLE_BIT_ECC:
            return "a double-bit ECC error"


def after_event(
    health: GpuHealth, event: GpuEvent, *, needs_reset: bool, policy: HealthPolicy, now: float
) -> GpuHealth:
    """The GPU's health after an error event. A lesser error does not end a wait for a reset, whose cause stays the
    first."""
    if health.state is HealthState.NEEDS_RESET:
        return health
    # Also for an unhealthy GPU: its probes begin again.
    failed = _failed(health, policy, now)
    if needs_reset:
        return replace(failed, state=HealthState.NEEDS_RESET, cause=describe_event(event), probe_at=None)
    # A lost GPU stays lost: only a poll can find it again.
    if health.state is HealthState.LOST:
        return failed
    return replace(failed, state=HealthState.PROBING, cause=describe_event(event))


def after_poll(health: GpuHealth, seen: Gpu, policy: HealthPolicy, now: float) -> GpuHealth:
    """The GPU's health after a poll; `seen` is the driver's answer.

    | the answer | state before | state after |
    |---|---|---|
    | not usable | `lost` | `lost`, with the new cause |
    | not usable | any other, `needs-reset` too: the reset is under way | `lost`; the count of passes starts again |
    | withheld | `needs-reset` | the same |
    | usable | `healthy`, `needs-reset` | the same |
    | usable | `lost`, `probing` | `probing`, or `healthy` after the last pass |
    """
    # MIG mode that is switched on, or a fabric that is not joined, ends no wait.
    if seen.is_withheld and health.state is HealthState.NEEDS_RESET:
        return health
    # In any state, needs-reset too: during a reset the driver does not find the GPU, and that is how one is observed.
    if not seen.is_healthy:
        return _after_failed_poll(health, seen.unhealthy_reason or "the driver gives no reason", policy, now)
    match health.state:
        case HealthState.HEALTHY | HealthState.NEEDS_RESET:
            return health
        case HealthState.LOST | HealthState.PROBING:
            return _after_passed_poll(health, policy, now)


def after_driver_lost(health: GpuHealth, reason: str, policy: HealthPolicy, now: float) -> GpuHealth:
    """The driver does not answer at all. That does not show a reset: a GPU that waits for one goes on waiting."""
    if health.state is HealthState.NEEDS_RESET:
        return health
    return _after_failed_poll(health, reason, policy, now)


def after_brief_loss(
    before: Mapping[GpuUuid, GpuHealth], healths: Mapping[GpuUuid, GpuHealth], seen: Mapping[GpuUuid, Gpu]
) -> dict[GpuUuid, GpuHealth]:
    """The healths to restore after exactly one unanswered poll; empty where the GPUs have to pass their probes.

    `before` are the GPUs that were healthy before the loss. Only those count that the loss made `lost` (an Xid since then
    stands), and all of them must be usable again: one that is not shows that more happened than a missed answer.
    """
    # An Xid since then has made it probing or needs-reset, which stands.
    lost = {uuid: health for uuid, health in before.items() if healths[uuid].state is HealthState.LOST}
    # One that did not come back shows a fault of more than a busy driver: then all prove themselves.
    if not all(uuid in seen and seen[uuid].is_healthy for uuid in lost):
        return {}
    # From before the unanswered poll, because the GPU itself did not fail. A cordon since then stays.
    return {uuid: replace(health, cordon=healths[uuid].cordon) for uuid, health in lost.items()}


def is_brief_loss_forgiven(last_forgiven_at: float | None, now: float) -> bool:
    """Whether one unanswered poll may be ignored now. At most once an hour: the GPUs of a driver that fails every other
    poll must not flap."""
    return last_forgiven_at is None or now - last_forgiven_at >= RELAPSE_WITHIN_S


def uncordoned(health: GpuHealth, policy: HealthPolicy, now: float) -> GpuHealth:
    """Back in service by an operator's request, which also ends a wait for a reset: the following polls decide."""
    lifted = replace(health, cordon=None)
    if health.state is not HealthState.NEEDS_RESET:
        return lifted
    return replace(lifted, state=HealthState.PROBING, passes=0, probe_at=now + probe_period_s(lifted, policy))


def offered(seen: Gpu, health: GpuHealth, policy: HealthPolicy, of_gpu: GpuHealth | None = None, held: str = "") -> Gpu:
    """The GPU as it is offered to the kubelet and shown to people. A MIG instance, for which `of_gpu` is the health of its
    GPU, is not offered while that would not be. `held` is why a GPU in order is given to nobody."""
    # The driver's answer does not count here: `after_poll` has made a state of it. But no poll finds a gone instance again.
    reason = seen.unhealthy_reason if seen.is_gone else why_not_offered(health, policy, seen.label)
    if not reason and seen.mig is not None and of_gpu is not None:
        parent = str(seen.mig.parent_index)
        reason = f"its GPU {parent}: {why}" if (why := why_not_offered(of_gpu, policy, parent)) else ""
    reason = reason or held
    return replace(seen, health=Health.UNHEALTHY if reason else Health.HEALTHY, unhealthy_reason=reason)


def why_not_offered(health: GpuHealth, policy: HealthPolicy, label: str = "GPU") -> str:
    """The cause and what makes the GPU of this label healthy again; empty where it is offered. Constant while neither
    changes."""
    reason = _unhealthy_reason(health, policy, label)
    if health.cordon is None:
        return reason
    cordon = f"cordoned: {health.cordon}" if health.cordon else "cordoned"
    return f"{cordon}; also, {reason}" if reason else cordon


def next_probe_at(healths: Iterable[GpuHealth], now: float) -> float | None:
    """The time from which the next poll counts for an unhealthy GPU, perhaps in the past; None where only the periodic
    poll is due, as for one that the last poll, when it would have counted, found still lost."""
    due = [
        health.probe_at
        for health in healths
        if health.probe_at is not None and (health.probe_at > now or health.state is HealthState.PROBING)
    ]
    return min(due, default=None)


def probe_period_s(health: GpuHealth, policy: HealthPolicy) -> float:
    """The time between two polls that count; it doubles with each relapse."""
    # Bounded before the power: a float overflows beyond 1,023 doublings.
    period_s = policy.recovery_period_s * 2.0 ** min(health.relapses, _MAX_DOUBLINGS)
    # A maximum below the period, which settings allow, counts as the period.
    return min(period_s, max(policy.recovery_period_max_s, policy.recovery_period_s))


def _unhealthy_reason(health: GpuHealth, policy: HealthPolicy, label: str) -> str:
    polls = "1 poll that finds" if policy.recovery_probes == 1 else f"{policy.recovery_probes} polls that find"
    back = f"recovers after {polls} it usable, {probe_period_s(health, policy):g} s apart"
    match health.state:
        case HealthState.HEALTHY:
            return ""
        case HealthState.LOST:
            return f"{health.cause.rstrip('. ')}; {back}"
        case HealthState.PROBING:
            return f"after {health.cause.rstrip('. ')}: {back}"
        case HealthState.NEEDS_RESET:
            command = f"gpushare-agent uncordon {label}{policy.control}"
            return f"{health.cause.rstrip('. ')}; waits for a reset of the GPU, or for `{command}`"


def _after_failed_poll(health: GpuHealth, reason: str, policy: HealthPolicy, now: float) -> GpuHealth:
    if health.state is HealthState.LOST:
        # Lost already: neither a relapse nor a new start of the count, but people should read the newest reason.
        return replace(health, cause=reason)
    return replace(_failed(health, policy, now), state=HealthState.LOST, cause=reason)


def _after_passed_poll(health: GpuHealth, policy: HealthPolicy, now: float) -> GpuHealth:
    # Polls come more often than probes: those between find the GPU usable and count nothing.
    counts = health.probe_at is None or now >= health.probe_at
    passes = health.passes + counts
    if passes >= policy.recovery_probes:
        # The relapses stay: the next failure within the hour doubles the period again.
        return GpuHealth(relapses=health.relapses, recovered_at=now, cordon=health.cordon)
    probe_at = now + probe_period_s(health, policy) if counts else health.probe_at
    return replace(health, state=HealthState.PROBING, passes=passes, probe_at=probe_at)


def _failed(health: GpuHealth, policy: HealthPolicy, now: float) -> GpuHealth:
    """No poll counts for one period from now. For a GPU that was healthy this is a relapse, or the first failure."""
    if health.state is HealthState.HEALTHY:
        # Long after its recovery a failure is a first one.
        is_relapse = health.recovered_at is not None and now - health.recovered_at < RELAPSE_WITHIN_S
        health = replace(health, relapses=health.relapses + 1 if is_relapse else 0)
    return replace(health, passes=0, probe_at=now + probe_period_s(health, policy))


def saved_of(healths: Mapping[GpuUuid, GpuHealth]) -> SavedHealth:
    """The part that is saved over a restart, sorted by UUID."""
    return SavedHealth(
        cordons={uuid: health.cordon for uuid, health in sorted(healths.items()) if health.cordon is not None},
        waits={
            uuid: health.cause for uuid, health in sorted(healths.items()) if health.state is HealthState.NEEDS_RESET
        },
    )
