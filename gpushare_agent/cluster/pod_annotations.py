"""Writes onto pods which GPUs they got: annotations, patched in the background.

Never in the admission path: `assigned` only queues what is wanted, `run` patches. The annotations are for people, for
the scheduler extender and for gpu-manager's tools; the agent itself never relies on them. `predicate-node` and
`predicate-time` are the extender's and are not written here. The mutable state is the queue: the newest request per pod.
Format: docs/formats.md, section 1.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from typing import NoReturn, Protocol

import structlog

from gpushare_agent.cluster.kube.client import KubeApi
from gpushare_agent.cluster.pod_store import PodStore
from gpushare_agent.kit.backoff import Backoff
from gpushare_agent.model.errors import AgentError, Conflict, NotFound, Unavailable
from gpushare_agent.model.names import (
    GPU_ASSIGNED_ANNOTATION,
    GPUSHARE_ASSIGNED_ANNOTATION,
    GPUSHARE_ASSUME_TIME_ANNOTATION,
    GPUSHARE_INDEX_ANNOTATION,
    PREDICATE_GPU_INDEX_PREFIX,
    RESIZE_STATUS_ANNOTATION,
    PodUid,
)
from gpushare_agent.model.pods import ContainerKind, Pod

log = structlog.get_logger(__name__)

QUEUE_LIMIT = 1024
"""More pods than a node can hold; beyond it the oldest request is dropped."""


class CountsPatches(Protocol):
    def pod_annotated(self, outcome: str) -> None: ...


class PodAnnotations:
    """`assigned` at any time, also before the API server can be reached; `run` once."""

    def __init__(
        self,
        *,
        pods: PodStore,
        metrics: CountsPatches,
        backoff: Backoff | None = None,
    ) -> None:
        self._pods = pods
        self._metrics = metrics
        self._backoff = backoff or Backoff(base_s=0.5, cap_s=30.0)
        self._requests: OrderedDict[PodUid, tuple[Pod, dict[str, str | None]]] = OrderedDict()
        self._is_wanted = asyncio.Event()

    def assigned(self, pod: Pod, gpu_indexes: Mapping[int, tuple[int, ...]]) -> None:
        """Queue the GPU indexes of main containers, by position in spec.containers. What was queued for other positions
        of the pod and is not yet sent stays."""
        self._request(pod, wanted_annotations(pod, gpu_indexes))

    def memory_assigned(self, pod: Pod, gpu_index: int, now_ns: int) -> None:
        """Queue the GPU of a pod's GPUShare memory, as GPUShare's device plugin and inspection tool do. `now_ns`, since the
        epoch, counts where no extender has written its own time."""
        wanted = {GPUSHARE_ASSIGNED_ANNOTATION: "true", GPUSHARE_INDEX_ANNOTATION: str(gpu_index)}
        if GPUSHARE_ASSUME_TIME_ANNOTATION not in pod.annotations:
            wanted[GPUSHARE_ASSUME_TIME_ANNOTATION] = str(now_ns)
        self._request(pod, wanted)

    def resize_status(self, pod: Pod, status: str | None) -> None:
        """Queue what is in force of the pod's annotation `gpushare-agent/resize`; None removes it."""
        self._request(pod, {RESIZE_STATUS_ANNOTATION: status})

    def _request(self, pod: Pod, wanted: Mapping[str, str | None]) -> None:
        _, earlier = self._requests.get(pod.uid, (pod, {}))
        self._requests[pod.uid] = (pod, {**earlier, **wanted})
        if len(self._requests) > QUEUE_LIMIT:
            _, (dropped, _) = self._requests.popitem(last=False)
            self._metrics.pod_annotated("dropped")
            log.warning("pod_annotations_dropped", pod=f"{dropped.namespace}/{dropped.name}", reason="queue is full")
        self._is_wanted.set()

    async def run(self, api: KubeApi) -> NoReturn:
        """Patch the pods, the oldest request first, until cancelled."""
        failures = 0
        while True:
            while not self._requests:
                self._is_wanted.clear()
                await self._is_wanted.wait()
            uid = next(iter(self._requests))
            pod, wanted = self._requests[uid]
            if await self._send(api, pod, wanted):
                failures = 0
                if uid in self._requests and self._requests[uid][1] == wanted:
                    del self._requests[uid]
            else:
                failures += 1
                await asyncio.sleep(self._backoff.delay_s(failures))

    async def _send(self, api: KubeApi, pod: Pod, wanted: Mapping[str, str | None]) -> bool:
        """Whether the request is done with: sent, needless, or refused for good."""
        present = (self._pods.get(pod.uid) or pod).annotations
        different = {name: value for name, value in wanted.items() if present.get(name) != value}
        if not different:
            return True
        try:
            await api.patch_pod_annotations(pod.namespace, pod.name, pod.uid, different)
        except Unavailable as e:
            self._metrics.pod_annotated("unavailable")
            log.warning("pod_annotations_delayed", pod=f"{pod.namespace}/{pod.name}", error=str(e))
            return False
        except (NotFound, Conflict) as e:
            self._metrics.pod_annotated("gone")
            log.info("pod_annotations_needless", pod=f"{pod.namespace}/{pod.name}", error=str(e))
            return True
        except AgentError as e:
            self._metrics.pod_annotated("refused")
            log.error("pod_annotations_refused", pod=f"{pod.namespace}/{pod.name}", error=str(e))
            return True
        self._metrics.pod_annotated("patched")
        log.debug("pod_annotated", pod=f"{pod.namespace}/{pod.name}", annotations=sorted(different))
        return True


def wanted_annotations(pod: Pod, gpu_indexes: Mapping[int, tuple[int, ...]]) -> dict[str, str]:
    """Assigned, and the GPU indexes of each main container that the pod has at a given position."""
    positions = {container.position for container in pod.containers if container.kind is ContainerKind.MAIN}
    wanted = {GPU_ASSIGNED_ANNOTATION: "true"}
    for position in sorted(positions & gpu_indexes.keys()):
        wanted[f"{PREDICATE_GPU_INDEX_PREFIX}{position}"] = ",".join(map(str, sorted(gpu_indexes[position])))
    return wanted
