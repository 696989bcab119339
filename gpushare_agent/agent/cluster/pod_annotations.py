"""Writes onto pods which GPUs they got: annotations, patched in the background.

Level, not edge: what a pod should have follows from the ledger (`pod_annotations`), and is compared with what it has when
the pod or its allocations change, and every COMPARE_S. So a patch that was lost with the agent, or with the API server, is
repeated at the next start: the ledger is rebuilt from the kubelet's records, and the first list of pods is a change of each.

Never in the admission path. The annotations are for people, for the scheduler extender and for gpu-manager's tools; the
agent itself never relies on them. `predicate-node` and `predicate-time` are the extender's and are not written here. State
owned: the pods to compare, the resize status of each, and what each was last given. Format: docs/reference/formats.md,
section 1.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NoReturn

import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.agent.cluster.pod_store import PodStore
from gpushare_agent.core.kit.backoff import Backoff
from gpushare_agent.core.kit.supervision import wait_for
from gpushare_agent.core.kube.client import KubeApi
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.errors import AgentError, Conflict, NotFound, Unavailable
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.names import (
    GPU_ASSIGNED_ANNOTATION,
    GPUSHARE_ALLOCATION_ANNOTATION,
    GPUSHARE_ASSIGNED_ANNOTATION,
    GPUSHARE_ASSUME_TIME_ANNOTATION,
    GPUSHARE_INDEX_ANNOTATION,
    MAX_ANNOTATION_CHARS,
    PREDICATE_GPU_INDEX_PREFIX,
    RESIZE_STATUS_ANNOTATION,
    GpuUuid,
    PodUid,
)
from gpushare_agent.core.model.pods import ContainerKind, Pod
from gpushare_agent.core.model.resources import ResourceKind, ResourceNames, request_of

if TYPE_CHECKING:
    from gpushare_agent.agent.observability.metrics.agent import AgentMetrics


def pod_annotations(
    pod: Pod, allocations: Mapping[ContainerKey, Allocation], inventory: GpuInventory, names: ResourceNames
) -> dict[str, str]:
    """gpu-manager's annotations once every main container that asks for cores or for GPUShare's memory has them, and
    GPUShare's for its memory; empty where the pod has neither. A container whose GPU is lost keeps the annotation that it
    has."""
    index = {gpu.uuid: gpu.index for gpu in inventory.gpus}
    asking = [
        container
        for container in pod.containers
        # gpu-manager numbers main containers alone; its tools know no others.
        if container.kind is ContainerKind.MAIN and ((asked := request_of(container, names)).cores or asked.units)
    ]
    found = {c.position: a for c in asking if (a := allocations.get(ContainerKey(pod.uid, c.name))) is not None}
    # `true` says that the whole pod has its GPUs; a container that is still to be admitted may be refused.
    # What another program wrote onto its pods stays: its numbers are others, and say after a restart what they have.
    if not asking or len(found) < len(asking) or not all(a.bound_ids and not a.started_by for a in found.values()):
        return {}
    desired = {GPU_ASSIGNED_ANNOTATION: "true"}
    for position, allocation in found.items():
        # The index of a lost GPU is not known, and a part of the list would name a wrong one.
        if all(gpu in index for gpu in allocation.gpus):
            numbers = sorted(index[gpu] for gpu in allocation.gpus)
            desired[f"{PREDICATE_GPU_INDEX_PREFIX}{position}"] = ",".join(map(str, numbers))
    return desired | _gpushare_annotations({n: a for n, a in found.items() if ResourceKind.GPU_MEM in a.ids}, index)


def _gpushare_annotations(found: Mapping[int, Allocation], index: Mapping[GpuUuid, int]) -> dict[str, str]:
    """GPUShare's index is of one GPU for the whole pod. Where the pod's memory is on several, it is left as it is, and the
    form by container says where, which GPUShare's inspection tool reads first."""
    if not found:
        return {}
    desired = {GPUSHARE_ASSIGNED_ANNOTATION: "true"}
    gpus = {allocation.gpus[0] for allocation in found.values()}
    # As above: what the pod has stays as it is.
    if not gpus <= index.keys():
        return desired
    if len(gpus) == 1:
        return desired | {GPUSHARE_INDEX_ANNOTATION: str(index[gpus.pop()])}
    units = {str(n): {str(index[a.gpus[0]]): len(a.ids_of(ResourceKind.GPU_MEM))} for n, a in sorted(found.items())}
    text = json.dumps(units, separators=(",", ":"))
    return desired | ({GPUSHARE_ALLOCATION_ANNOTATION: text} if len(text) <= MAX_ANNOTATION_CHARS else {})


log = structlog.get_logger(__name__)

COMPARE_S = 30.0
"""The time between two comparisons of all pods: another writer of these annotations is corrected once in this time, not
each time."""


MOST_REFUSALS = 3
"""The refusals in a row after which one is final. An API server that has just started refuses with 403 what it allows
once it has read its roles (seen on Kubernetes 1.36)."""


class _Given(Struct, frozen=True):
    """What a pod was last given, or refused: not sent again before the next comparison of all, then where it `is_due`."""

    annotations: Mapping[str, str | None]
    refusals: int = 0
    is_due: bool = False


class PodAnnotations(Struct, kw_only=True, eq=False):
    """`pod_changed` and `compare` at any time, also before the API server can be reached; `run` once. `desired` returns the
    annotations that a pod should have by its allocations, none where it has no allocation."""

    pods: PodStore
    desired: Callable[[Pod], Mapping[str, str]]
    metrics: AgentMetrics
    backoff: Backoff = Backoff(base_s=0.5, cap_s=30.0)
    compare_s: float = COMPARE_S
    wall_clock_ns: Callable[[], int] = time.time_ns
    _queue: dict[PodUid, None] = field(default_factory=dict)
    _resize_statuses: dict[PodUid, str | None] = field(default_factory=dict)
    _given: dict[PodUid, _Given] = field(default_factory=dict)
    _compared_version: int = -1
    _has_queued: asyncio.Event = field(default_factory=asyncio.Event)

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        """Compares a pod that changed, forgets one that is gone; for PodStore.subscribe."""
        if new is not None:
            # Of a pod's own fields what it should have follows from none but these; the kubelet changes its status often.
            if old is None or (old.annotations, old.object_uid) != (new.annotations, new.object_uid):
                self.compare(new.uid)
        elif old is not None:
            # Everything by this UID: pods come and go for months.
            for of_pod in (self._queue, self._resize_statuses, self._given):
                of_pod.pop(old.uid, None)

    def compare(self, uid: PodUid) -> None:
        """The pod or its allocations changed."""
        if self.pods.get(uid) is not None:
            # A pod that waits already keeps its place.
            self._queue.setdefault(uid, None)
            self._has_queued.set()

    def compare_all(self) -> None:
        """The GPUs changed, or time has passed."""
        # What was patched is forgotten, so that another writer is corrected; refusals stay counted, or they would be
        # repeated for ever.
        self._given = {
            uid: replace(given, is_due=given.refusals < MOST_REFUSALS)
            for uid, given in self._given.items()
            if given.refusals
        }
        for pod in self.pods.pods():
            self.compare(pod.uid)

    def resize_status(self, pod: Pod, status: str | None) -> None:
        """Says what is in force of the pod's annotation `gpushare-agent/resize`; None removes the status annotation."""
        # A resize may end after its pod.
        if self.pods.get(pod.uid) is not None:
            self._resize_statuses[pod.uid] = status
            self.compare(pod.uid)

    async def run(self, api: KubeApi) -> NoReturn:
        """Patch the pods that differ, the one that has waited longest first, until cancelled."""
        failures = 0
        while True:
            while not self._queue:
                self._has_queued.clear()
                if not await wait_for(self._has_queued, self.compare_s) and self._is_comparison_due():
                    self._compared_version = self.pods.changes.count
                    self.compare_all()
            uid = next(iter(self._queue))
            if await self._send(api, uid):
                failures = 0
            else:
                failures += 1
                # At the end of the queue: a pod that cannot be patched now must not hold up the others.
                self._queue.setdefault(uid, None)
                await asyncio.sleep(self.backoff.delay_s(failures))

    def _is_comparison_due(self) -> bool:
        # Without a change of any pod a comparison finds nothing but what is to be tried again.
        refusals = (given.refusals for given in self._given.values())
        return self.pods.changes.count != self._compared_version or any(0 < count < MOST_REFUSALS for count in refusals)

    async def _send(self, api: KubeApi, uid: PodUid) -> bool:
        """Whether the pod is done with: it has what it should, or cannot be given it."""
        del self._queue[uid]  # a change from here on puts it back
        pod = self.pods.get(uid)
        object_uid = pod.object_uid if pod is not None else None
        if pod is None or object_uid is None:  # of a static pod: its mirror pod's arrival is a change
            return True
        desired: dict[str, str | None] = dict(self.desired(pod))
        if uid in self._resize_statuses:
            desired[RESIZE_STATUS_ANNOTATION] = self._resize_statuses[uid]
        # Only what differs is sent; annotations that are not the agent's stay as they are.
        different = {name: value for name, value in desired.items() if pod.annotations.get(name) != value}
        given = self._given.get(uid)
        is_same = given is not None and given.annotations == desired
        # The watch may not have shown our own patch yet, or the API server has refused it.
        if not different or (given is not None and is_same and not given.is_due):
            return True
        if GPUSHARE_ASSIGNED_ANNOTATION in desired and GPUSHARE_ASSUME_TIME_ANNOTATION not in pod.annotations:
            different[GPUSHARE_ASSUME_TIME_ANNOTATION] = str(self.wall_clock_ns())  # no extender has written its own
        refusals = 0
        try:
            await api.patch_pod_annotations(pod.namespace, pod.name, object_uid, different)
        except Unavailable as e:
            self.metrics.pod_annotated("unavailable")
            log.warning("pod_annotations_delayed", pod=f"{pod.namespace}/{pod.name}", error=str(e))
            return False
        except (NotFound, Conflict) as e:
            self.metrics.pod_annotated("gone")
            # The pod is gone, or another has its name: the watch will say so.
            log.info("pod_annotations_needless", pod=f"{pod.namespace}/{pod.name}", error=str(e))
        except AgentError as e:
            refusals = 1 + (given.refusals if given is not None and is_same else 0)
            self.metrics.pod_annotated("refused")
            log.error("pod_annotations_refused", pod=f"{pod.namespace}/{pod.name}", error=str(e))
        else:
            self.metrics.pod_annotated("patched")
            log.debug("pod_annotated", pod=f"{pod.namespace}/{pod.name}", annotations=sorted(different))
        # During the patch the pod may have gone: what is stored for it would never be removed.
        if self.pods.get(uid) is not None:
            self._given[uid] = _Given(desired, refusals)
        return True
