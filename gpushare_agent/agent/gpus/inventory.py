"""The GPUs as they are offered: the last poll of the driver joined with the health of each GPU; and the report of each
change of a GPU's health and of each cordon, in the log, as a metric, and as an Event on the Node.

A GPU that the driver no longer reports stays, Unhealthy with the reason: its device IDs are known to the kubelet and may
be allocated. A MIG instance is then gone: gpus/nvml/reader.py keeps those that containers have. State owned, by
`GpuInventoryState`: the last poll, the health of each GPU, and the two joined; after one unanswered poll also the healths
from before it, until the next poll. Changed by gpus/watch.py, gpus/control_server.py and the start of the agent; the rules
are in core/model/gpu_health.py. Also the GPUs that are held back for containers that may have them (`hold`). By
`GpuHealthObserver`: the GPUs and the cordons of the last change, to compare with.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import structlog
from msgspec.structs import replace

from gpushare_agent.agent.node import Node
from gpushare_agent.core.model.errors import NodeEventReason
from gpushare_agent.core.model.gpu_health import (
    NOTHING_SAVED,
    EventMeaning,
    GpuEvent,
    GpuHealth,
    HealthPolicy,
    HealthState,
    SavedHealth,
    after_brief_loss,
    after_driver_lost,
    after_event,
    after_poll,
    is_brief_loss_forgiven,
    meaning_of,
    next_probe_at,
    offered,
    saved_of,
    uncordoned,
)
from gpushare_agent.core.model.gpus import Gpu, GpuInventory, Health
from gpushare_agent.core.model.names import ANY_GPU, GpuUuid
from gpushare_agent.core.placement.topology import build_topology

if TYPE_CHECKING:
    from gpushare_agent.core.kube.events import NodeEvents

log = structlog.get_logger(__name__)

NOT_SHOWN = "the driver does not show this GPU any more"


class GpuInventoryState:
    """One inventory. Subscribers are called after each change, once for all GPUs that changed together."""

    def __init__(self, policy: HealthPolicy | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.policy = policy or HealthPolicy()
        self._clock = clock
        self._seen = GpuInventory(gpus=(), topology=build_topology((), ()))
        self._healths: dict[GpuUuid, GpuHealth] = {}
        self._is_driver_lost = False
        self._refused_since: float | None = None
        self._has_served = False
        self._before_loss: dict[GpuUuid, GpuHealth] = {}
        self._forgiven_at: float | None = None
        self.held: Mapping[GpuUuid, str] = {}
        """The GPUs of `hold`."""
        self.is_restored = False
        """What an earlier agent saved last is taken over."""
        self.is_read = False
        """The driver has listed the GPUs since the start; an empty list counts."""
        self.current = self._seen
        """The GPUs with the health that they are offered with."""
        self.saved = NOTHING_SAVED
        """What is to be saved over a restart."""
        self._on_change: list[Callable[[GpuInventory], None]] = []
        self.on_event: Callable[[GpuEvent, int], None] = lambda event, count: None
        """Called with each kind of event of a GPU that is known, before the change that it makes."""

    @property
    def healths(self) -> Mapping[GpuUuid, GpuHealth]:
        """The health of each GPU, also of those that were restored from the file and not seen since the start."""
        return self._healths

    @property
    def cordoned(self) -> dict[GpuUuid, str]:
        """GPUs that an operator took out of service, with the reason; and the MIG instances of such GPUs."""
        cordons = self.saved.cordons
        parents = {gpu.uuid: gpu.mig.parent for gpu in self._seen.gpus if gpu.mig is not None}
        return {uuid: cordons[parent] for uuid, parent in parents.items() if parent in cordons} | dict(cordons)

    @property
    def unhealthy_reasons(self) -> dict[GpuUuid, str]:
        """What makes each GPU unhealthy in itself, cordoned or not: the cause, and what makes it healthy again."""
        healths = {uuid: replace(health, cordon=None) for uuid, health in self._healths.items()}
        reasons = {gpu.uuid: self._as_offered(gpu, healths).unhealthy_reason for gpu in self._seen.known}
        return {uuid: reason for uuid, reason in reasons.items() if reason}

    @property
    def in_order(self) -> set[GpuUuid]:
        """The GPUs that have no fault, nor has an instance's GPU: cordoned or not, and held or not."""
        faulty = {uuid for uuid, health in self._healths.items() if health.state is not HealthState.HEALTHY}
        found = ((gpu.uuid, gpu.mig.parent if gpu.mig is not None else gpu.uuid) for gpu in self.current.gpus)
        return {uuid for uuid, parent in found if faulty.isdisjoint((uuid, parent))}

    @property
    def refused_for_s(self) -> float:
        """How long the driver has refused this process, which had GPUs before; 0 where it does not."""
        return 0.0 if self._refused_since is None else self._clock() - self._refused_since

    def next_probe_at(self) -> float | None:
        return next_probe_at((self._healths[gpu.uuid] for gpu in self._seen.known), self._clock())

    def subscribe(self, callback: Callable[[GpuInventory], None]) -> None:
        self._on_change.append(callback)

    def restore(self, saved: SavedHealth, *, is_newest: bool = False) -> None:
        """Takes over what an earlier agent saved, for GPUs without a known health. The first time also for GPUs whose health
        is known by polls alone, because the file may not have been readable before they were read. `is_newest`: that agent
        served until now, so it counts for all."""
        if is_newest:
            now = self._clock()
            self._healths = {uuid: uncordoned(health, self.policy, now) for uuid, health in self._healths.items()}
        healths = {uuid: GpuHealth(state=HealthState.NEEDS_RESET, cause=cause) for uuid, cause in saved.waits.items()}
        for uuid, reason in saved.cordons.items():
            healths[uuid] = replace(healths.get(uuid, self._healths.get(uuid, GpuHealth())), cordon=reason)
        # What this process knows is newer than the file.
        known = set(self._healths) if self.is_restored else {*self.saved.cordons, *self.saved.waits}
        self._healths |= {uuid: health for uuid, health in healths.items() if is_newest or uuid not in known}
        self.is_restored = True
        self._publish()

    def take_over(self, earlier: GpuInventoryState) -> None:
        """Continues with the healths of `earlier`, of the same process: newer than the saved ones, and complete. The GPUs
        themselves come with the first `read`. Before `restore`."""
        self._healths, self.is_restored = dict(earlier._healths), earlier.is_restored
        self._is_driver_lost = earlier._is_driver_lost
        self._refused_since, self._has_served = earlier._refused_since, earlier._has_served
        self._before_loss = dict(earlier._before_loss)
        self._forgiven_at = earlier._forgiven_at
        self.held = earlier.held
        self._publish()

    def read(self, found: GpuInventory) -> bool:
        """Takes over a successful poll; True where anything changed that is offered or saved. In this order:

        1. A GPU that was seen before and is missing in `found` stays in its place, Unhealthy (`_with_missing`).
        2. The poll before was unanswered, and only that one, and no such loss was forgiven within the last hour, and all
           GPUs that were healthy before are usable: they have their health of before again (`_end_loss`). In every other
           case they stay `lost` and have to pass their probes.
        3. Each GPU goes from its state to the next by the table at `after_poll` (core/model/gpu_health.py).
        4. Subscribers are called if the offered inventory or the saved part differs (`_publish`).
        """
        now = self._clock()
        self._seen = self._with_missing(found)
        # A driver that lists GPUs and can read none of them has not said what there is.
        self.is_read = self.is_read or bool(found.known) or not found.unreadable
        self._has_served = self._has_served or any(gpu.is_healthy for gpu in found.known)
        self._note_refusal(now, is_refused=found.is_refused)
        # Before the polls: `after_poll` would make `probing` of what is to be healthy again.
        self._end_loss(now)
        for gpu in self._seen.known:
            before = self._healths.get(gpu.uuid, GpuHealth())
            self._healths[gpu.uuid] = after_poll(before, gpu, self.policy, now)
        return self._publish()

    def lost(self, reason: str, *, is_refused: bool = False) -> bool:
        """Takes over an unanswered poll: every GPU is Unhealthy until the driver answers and its probes have passed. After
        the first one in a row the healths of before are remembered, for `read` to restore. `is_refused`: the driver
        refused this process, and does not hang."""
        now = self._clock()
        self._note_refusal(now, is_refused=is_refused)
        # Only those: one that was unhealthy before has to pass its probes in any case.
        healthy = {u: h for u, h in self._healths.items() if h.state is HealthState.HEALTHY}
        # A second one in a row is no missed answer: after it the GPUs have to pass their probes.
        self._before_loss = {} if self._is_driver_lost else healthy
        self._is_driver_lost = True
        for gpu in self._seen.known:
            self._healths[gpu.uuid] = after_driver_lost(self._healths[gpu.uuid], reason, self.policy, now)
        return self._publish()

    def note_events(self, events: Sequence[GpuEvent]) -> Counter[tuple[GpuEvent, EventMeaning]]:
        """Applies the driver's events as one change; returns each event with its meaning, and how often it came."""
        now, known = self._clock(), {gpu.uuid for gpu in self._seen.known}
        noted: Counter[tuple[GpuEvent, EventMeaning]] = Counter()
        # One by one, in the driver's order: the first error that needs a reset is the cause that people read.
        for event in self._of_instances(events):
            meaning = meaning_of(event, known, self.policy)
            noted[event, meaning] += 1
            if event.uuid is not None and meaning in (EventMeaning.UNHEALTHY, EventMeaning.NEEDS_RESET):
                # An error since then: the GPU is not given its health of before.
                self._before_loss.pop(event.uuid, None)
                self._healths[event.uuid] = after_event(
                    self._healths[event.uuid],
                    event,
                    needs_reset=meaning is EventMeaning.NEEDS_RESET,
                    policy=self.policy,
                    now=now,
                )
        for (event, meaning), count in noted.items():
            if event.uuid is not None and meaning is not EventMeaning.FOREIGN:
                self.on_event(event, count)
        self._publish()
        return noted

    def _of_instances(self, events: Sequence[GpuEvent]) -> Iterator[GpuEvent]:
        """An event of an instance that the driver names, of each that has its GPU instance; else of the GPU, whose state
        holds for all of its instances."""
        for event in events:
            of = [gpu for gpu in self._seen.gpus if gpu.mig is not None and event.gi is not None and event.is_of(gpu)]
            yield from (replace(event, uuid=gpu.uuid, gi=None, ci=None) for gpu in of)
            if not of:
                yield event

    def hold(self, held: Mapping[GpuUuid, str]) -> None:
        """Takes these out of service, and no others for this cause: a container may have them that is not accounted for."""
        self.held = held
        self._publish()

    def cordon(self, uuid: GpuUuid, reason: str) -> bool:
        """Takes a GPU out of service; False where it was, for the same reason. Raises KeyError for an unknown GPU."""
        self._healths[uuid] = replace(self._healths[uuid], cordon=reason)
        return self._publish()

    def uncordon(self, uuid: GpuUuid) -> bool:
        """Ends a cordon and a wait for a reset; False where there was neither. Raises KeyError for an unknown GPU."""
        self._healths[uuid] = uncordoned(self._healths[uuid], self.policy, self._clock())
        return self._publish()

    def _note_refusal(self, now: float, *, is_refused: bool) -> None:
        # A process that has seen no usable GPU waits for a driver: a new container would find the same.
        since = now if self._refused_since is None and self._has_served else self._refused_since
        self._refused_since = since if is_refused else None

    def _end_loss(self, now: float) -> None:
        # Emptied in any case: only the poll straight after the loss may forgive it.
        before, self._before_loss, self._is_driver_lost = self._before_loss, {}, False
        for uuid in before.keys() - self._healths.keys():
            del before[uuid]  # an instance that was removed meanwhile
        restored = after_brief_loss(before, self._healths, {gpu.uuid: gpu for gpu in self._seen.known})
        if restored and is_brief_loss_forgiven(self._forgiven_at, now):
            self._forgiven_at = now
            self._healths |= restored

    def _with_missing(self, found: GpuInventory) -> GpuInventory:
        known = found.by_uuid()
        partitioned = {gpu.uuid for gpu in found.mig_partitioned}
        self._hand_on_waits(known)
        # Instances that no container has, and GPUs that became instances: the reader has dropped them on purpose.
        gone = {gpu.uuid for gpu in self._seen.gpus if gpu.mig is not None or gpu.uuid in partitioned} - known.keys()
        # A cordon outlives the instance: one made again with this UUID stays out of service. The state of a GPU stays, too:
        # it is that of its instances, and of the GPU when MIG is switched off.
        self._healths = {
            u: health
            for u, health in self._healths.items()
            if u not in gone or u in partitioned or health.cordon is not None
        }
        if all(gpu.uuid in known for gpu in self._seen.gpus if gpu.uuid not in gone):
            return found
        # Without the missing GPUs the rows of the topology would no longer be the GPUs' indexes.
        gpus = tuple(
            replace(known[gpu.uuid], index=gpu.index)
            if gpu.uuid in known
            else replace(gpu, health=Health.UNHEALTHY, unhealthy_reason=NOT_SHOWN)
            for gpu in self._seen.gpus
            if gpu.uuid not in gone
        )
        return replace(found, gpus=gpus, topology=self._seen.topology)

    def _hand_on_waits(self, found: Mapping[GpuUuid, Gpu]) -> None:
        """An instance that waits for a reset and is removed leaves that to its GPU: another one may lie in its place."""
        for gpu in self._seen.gpus:
            now, health = found.get(gpu.uuid), self._healths[gpu.uuid]
            is_gone = now is None or now.is_gone
            if gpu.mig is None or not is_gone or health.state is not HealthState.NEEDS_RESET:
                continue
            of_gpu = self._healths.get(gpu.mig.parent, GpuHealth())
            if of_gpu.state is not HealthState.NEEDS_RESET:
                waits = replace(health, cordon=of_gpu.cordon, relapses=of_gpu.relapses)
                self._healths[gpu.mig.parent] = waits

    def _as_offered(self, gpu: Gpu, healths: Mapping[GpuUuid, GpuHealth]) -> Gpu:
        of_gpu = healths.get(gpu.mig.parent) if gpu.mig is not None else None
        held = self.held.get(gpu.uuid) or self.held.get(ANY_GPU, "")
        return offered(gpu, healths[gpu.uuid], self.policy, of_gpu, held)

    def _publish(self) -> bool:
        gpus = tuple(self._as_offered(gpu, self._healths) for gpu in self._seen.gpus)
        partitioned = tuple(self._as_offered(gpu, self._healths) for gpu in self._seen.mig_partitioned)
        inventory = replace(self._seen, gpus=gpus, mig_partitioned=partitioned)
        saved = saved_of(self._healths)
        # Polls find the same as a rule: subscribers compare lists of thousands of IDs.
        if inventory == self.current and saved == self.saved:
            return False
        # Before the callbacks, which read the inventory.
        self.current, self.saved = inventory, saved
        for callback in self._on_change:
            callback(inventory)
        return True


class GpuHealthObserver:
    """Subscribe `inventory_changed` to the inventory. A GPU that is healthy when it is first seen is not reported, and one
    that is held back not before the pods, which may tell more, were compared (`reconciled`)."""

    def __init__(
        self,
        node: Node,
        events: NodeEvents,
        record: Callable[[GpuUuid, NodeEventReason, str], None] = lambda uuid, what, reason: None,
    ) -> None:
        self._node = node
        self._events = events
        self._record = record
        self._gpus: Mapping[GpuUuid, Gpu] = {}
        self._cordoned: Mapping[GpuUuid, str] = node.inventory.cordoned
        self._is_settled = False

    def reconciled(self) -> None:
        """The ledger was compared with the kubelet's records, and with the pods if they are listed."""
        self._is_settled = self._is_settled or self._node.pods.is_synced
        self.inventory_changed(self._node.gpus())

    def inventory_changed(self, inventory: GpuInventory) -> None:
        gpus, was_cordoned = self._gpus, self._cordoned
        why = () if self._is_settled else self._node.inventory.held.values()
        divided = {gpu.mig.parent for gpu in inventory.gpus if gpu.mig is not None}
        # One on demand without instances: it is in no other list.
        alone = [gpu for gpu in inventory.mig_partitioned if gpu.uuid not in divided]
        gpus_now = (*inventory.gpus, *alone)
        shown = [replace(gpu, health=Health.HEALTHY) if gpu.unhealthy_reason in why else gpu for gpu in gpus_now]
        self._gpus, self._cordoned = {gpu.uuid: gpu for gpu in shown}, self._node.inventory.cordoned
        # By index: Events of one change come in the order in which people count GPUs.
        for gpu in sorted(shown, key=lambda gpu: gpu.index):
            # An agent that starts must not report every GPU as recovered.
            was_healthy = gpu.uuid not in gpus or gpus[gpu.uuid].is_healthy
            self._report_cordon(gpu, was_cordoned.get(gpu.uuid), self._cordoned.get(gpu.uuid))
            if was_healthy and not gpu.is_healthy:
                self._report_unhealthy(gpu)
            elif gpu.is_healthy and not was_healthy:
                self._report_healthy(gpu, was_cordoned=gpu.uuid in was_cordoned)

    def _report_cordon(self, gpu: Gpu, before: str | None, now: str | None) -> None:
        if before == now:
            return
        if now is not None:
            log.warning("gpu_cordoned", index=gpu.index, uuid=gpu.uuid, reason=now)
            because = f": {now}" if now else ""
            self._note(NodeEventReason.GPU_CORDONED, gpu, f"taken out of service by an operator{because}")
        else:
            log.warning("gpu_uncordoned", index=gpu.index, uuid=gpu.uuid, reason=before)
            still = "" if gpu.is_healthy else f", and still Unhealthy: {gpu.unhealthy_reason}"
            self._note(NodeEventReason.GPU_UNCORDONED, gpu, f"put back in service by an operator{still}")

    def _report_unhealthy(self, gpu: Gpu) -> None:
        self._node.metrics.gpu_health_changed(gpu.uuid, healthy=False)
        if gpu.uuid in self._cordoned:
            return  # the cordon's own Event has the reason
        log.error("gpu_unhealthy", index=gpu.index, uuid=gpu.uuid, reason=gpu.unhealthy_reason)
        self._note(NodeEventReason.GPU_UNHEALTHY, gpu, gpu.unhealthy_reason)

    def _report_healthy(self, gpu: Gpu, *, was_cordoned: bool) -> None:
        self._node.metrics.gpu_health_changed(gpu.uuid, healthy=True)
        # Put back by a person, whose Event says so: it has not recovered from anything.
        if was_cordoned:
            return
        log.info("gpu_recovered", index=gpu.index, uuid=gpu.uuid)
        self._note(NodeEventReason.GPU_RECOVERED, gpu, "healthy again, and offered to pods")

    def _note(self, reason: NodeEventReason, gpu: Gpu, text: str) -> None:
        self._record(gpu.uuid, reason, text)
        profile = f"{gpu.mig.profile}, " if gpu.mig is not None else ""
        self._events.note(reason, gpu.uuid, f"GPU {gpu.label} ({profile}{gpu.uuid}): {text}")
