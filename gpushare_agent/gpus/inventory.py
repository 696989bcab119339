"""The GPUs as they are offered: what the driver showed last, and what is known against each. Changed only by
gpus/watch.py, and by the start of the agent.

A GPU that the driver no longer shows stays, Unhealthy with the reason: its device IDs are known to the kubelet and may
be held by containers. The mutable state is the last look, the health of each GPU, and the two joined; after a look that the
driver left unanswered also the healths from before it, until the next look.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gpushare_agent.gpus.events import GpuEvent
from gpushare_agent.gpus.health import (
    EventMeaning,
    HealthPolicy,
    after_driver_lost,
    after_event,
    after_look,
    as_before_loss,
    cordoned,
    is_brief_loss_forgiven,
    meaning_of,
    next_probe_at,
    offered,
    uncordoned,
    waiting,
    why_not_offered,
)
from gpushare_agent.gpus.health_values import NOTHING_KEPT, GpuHealth, HealthState, KeptHealth
from gpushare_agent.model.gpus import GpuInventory, Health
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.placement.topology_tree import build_topology

NOT_SHOWN = "the driver does not show this GPU any more"


class GpuInventoryState:
    """Holds one inventory; `subscribe` is told after each change, once for all GPUs that changed together."""

    def __init__(self, policy: HealthPolicy | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy or HealthPolicy()
        self._clock = clock
        self._seen = GpuInventory(gpus=(), topology=build_topology((), ()))
        self._healths: dict[GpuUuid, GpuHealth] = {}
        self._is_driver_lost = False
        self._before_loss: dict[GpuUuid, GpuHealth] = {}
        self._forgiven_at: float | None = None
        self._is_read = False
        self._offered = self._seen
        self._kept = NOTHING_KEPT
        self._on_change: list[Callable[[GpuInventory], None]] = []

    @property
    def current(self) -> GpuInventory:
        """The GPUs with the health that they are offered with."""
        return self._offered

    @property
    def is_read(self) -> bool:
        """The driver has told since the start which GPUs there are, if only that there are none."""
        return self._is_read

    @property
    def healths(self) -> Mapping[GpuUuid, GpuHealth]:
        """Also of GPUs that were never seen since the start, where something is remembered of them."""
        return self._healths

    @property
    def cordoned(self) -> dict[GpuUuid, str]:
        """GPUs that an operator took out of service, and why."""
        return dict(self._kept.cordons)

    @property
    def illnesses(self) -> dict[GpuUuid, str]:
        """What is wrong with GPUs themselves, whether they are cordoned besides or not, and what brings them back."""
        alone = {gpu.uuid: replace(self._healths[gpu.uuid], cordon=None) for gpu in self._seen.gpus}
        whys = {uuid: why_not_offered(health, self._policy) for uuid, health in alone.items()}
        return {uuid: why for uuid, why in whys.items() if why}

    @property
    def kept(self) -> KeptHealth:
        """What is to outlive the agent."""
        return self._kept

    @property
    def policy(self) -> HealthPolicy:
        return self._policy

    def next_probe_at(self) -> float | None:
        return next_probe_at((self._healths[gpu.uuid] for gpu in self._seen.gpus), self._clock())

    def subscribe(self, callback: Callable[[GpuInventory], None]) -> None:
        self._on_change.append(callback)

    def restore(self, kept: KeptHealth) -> None:
        """Take over what an earlier agent remembered, of GPUs of which nothing is known yet. Before the first `read`."""
        healths = {uuid: waiting(cause) for uuid, cause in kept.waits.items()}
        for uuid, reason in kept.cordons.items():
            healths[uuid] = cordoned(healths.get(uuid, GpuHealth()), reason)
        self._healths = healths | self._healths
        self._publish()

    def take_over(self, earlier: GpuInventoryState) -> None:
        """Go on with all that `earlier`, of the same process, knew of the GPUs' health: it is newer than what was kept, and
        more. Which GPUs there are the first `read` tells. Before `restore`."""
        self._healths = dict(earlier._healths)
        self._is_driver_lost = earlier._is_driver_lost
        self._before_loss = dict(earlier._before_loss)
        self._forgiven_at = earlier._forgiven_at
        self._publish()

    def read(self, found: GpuInventory) -> bool:
        """Take over what the driver shows now; True where anything changed that is offered or kept."""
        now = self._clock()
        self._seen = self._with_vanished(found)
        self._is_read = self._is_read or bool(found.gpus) or not found.unreadable
        self._end_loss(now)
        for gpu in self._seen.gpus:
            before = self._healths.get(gpu.uuid, GpuHealth())
            self._healths[gpu.uuid] = after_look(before, gpu, self._policy, now)
        return self._publish()

    def lost(self, reason: str) -> bool:
        """The driver cannot be read at all: every GPU is Unhealthy until it can, and has passed its probes. Only after one
        such look alone are those back at once that were well (gpus/health.py)."""
        now = self._clock()
        well = {u: h for u, h in self._healths.items() if h.state is HealthState.HEALTHY}
        self._before_loss = {} if self._is_driver_lost else well
        self._is_driver_lost = True
        for gpu in self._seen.gpus:
            self._healths[gpu.uuid] = after_driver_lost(self._healths[gpu.uuid], reason, self._policy, now)
        return self._publish()

    def note_events(self, events: Sequence[GpuEvent]) -> Counter[tuple[GpuEvent, EventMeaning]]:
        """Hold against the GPUs what happened to them, all of it as one change; what each event was taken for."""
        now, known = self._clock(), {gpu.uuid for gpu in self._seen.gpus}
        noted: Counter[tuple[GpuEvent, EventMeaning]] = Counter()
        for event in events:
            meaning = meaning_of(event, known, self._policy)
            noted[event, meaning] += 1
            if event.uuid is not None and meaning in (EventMeaning.ILL, EventMeaning.NEEDS_RESET):
                self._before_loss.pop(event.uuid, None)
                self._healths[event.uuid] = after_event(
                    self._healths[event.uuid],
                    event,
                    needs_reset=meaning is EventMeaning.NEEDS_RESET,
                    policy=self._policy,
                    now=now,
                )
        self._publish()
        return noted

    def cordon(self, uuid: GpuUuid, reason: str) -> bool:
        """Take a GPU out of service; False where it was, for the same reason. Raises KeyError for an unknown GPU."""
        self._healths[uuid] = cordoned(self._healths[uuid], reason)
        return self._publish()

    def uncordon(self, uuid: GpuUuid) -> bool:
        """Put it back and end a wait for a reset; False where there was neither. Raises KeyError for an unknown GPU."""
        self._healths[uuid] = uncordoned(self._healths[uuid], self._policy, self._clock())
        return self._publish()

    def _end_loss(self, now: float) -> None:
        """The driver answers. One look that it did not answer is forgiven where this one finds well what was well."""
        before, self._before_loss, self._is_driver_lost = self._before_loss, {}, False
        seen = self._seen.by_uuid()
        lost = {uuid: health for uuid, health in before.items() if self._healths[uuid].state is HealthState.LOST}
        are_all_well = all(uuid in seen and seen[uuid].is_healthy for uuid in lost)
        if not lost or not are_all_well or not is_brief_loss_forgiven(self._forgiven_at, now):
            return
        self._forgiven_at = now
        for uuid, health in lost.items():
            self._healths[uuid] = as_before_loss(health, self._healths[uuid])

    def _with_vanished(self, found: GpuInventory) -> GpuInventory:
        known = found.by_uuid()
        if all(gpu.uuid in known for gpu in self._seen.gpus):
            return found
        # Without the missing GPUs the rows of the topology would no longer be the GPUs' indexes.
        gpus = tuple(
            replace(known[gpu.uuid], index=gpu.index)
            if gpu.uuid in known
            else replace(gpu, health=Health.UNHEALTHY, unhealthy_reason=NOT_SHOWN)
            for gpu in self._seen.gpus
        )
        return replace(found, gpus=gpus, topology=self._seen.topology)

    def _publish(self) -> bool:
        gpus = tuple(offered(gpu, self._healths[gpu.uuid], self._policy) for gpu in self._seen.gpus)
        inventory, kept = replace(self._seen, gpus=gpus), kept_of(self._healths)
        if inventory == self._offered and kept == self._kept:
            return False
        self._offered, self._kept = inventory, kept
        for callback in self._on_change:
            callback(inventory)
        return True


def kept_of(healths: Mapping[GpuUuid, GpuHealth]) -> KeptHealth:
    return KeptHealth(
        cordons={uuid: health.cordon for uuid, health in sorted(healths.items()) if health.cordon is not None},
        waits={
            uuid: health.cause for uuid, health in sorted(healths.items()) if health.state is HealthState.NEEDS_RESET
        },
    )
