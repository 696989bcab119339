"""Simulates the GPU use of the embedded node's containers, and writes it into the agent's usage file each second.

It is simulated, as a process that sleeps uses nothing: each running container's use is a slow wave within its share, the
same for the same name at the same time, and memory that fills up after its start; its annotation may set a constant load
instead. Which GPUs a container has is read from the kubelet's records: the IDs of the Allocate calls that were answered.
State owned: the file.
"""

from __future__ import annotations

import asyncio
import math
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.core.formats.simulated_gpus import SimulatedProcess, encode_usage
from gpushare_agent.core.kit.regular_file import replace_whole
from gpushare_agent.core.kit.supervision import ReportOnce
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.isolation import NO_ISOLATION, choose_isolation
from gpushare_agent.core.model.names import CORES_PER_GPU, MIB
from gpushare_agent.core.model.pods import ContainerSpec
from gpushare_agent.core.model.resources import request_of
from gpushare_agent.sandbox.pod_manifest import LOAD_ANNOTATION, RawObject, annotation_number, containers_of
from gpushare_agent.sandbox.report import (
    ClaimRow,
    ReportedNode,
    gpus_of,
    ids_of,
    parts_of_gpus,
    shares_of_container,
)
from gpushare_agent.sandbox.runtime.containers import Container

log = structlog.get_logger(__name__)

INTERVAL_S = 1.0
PERIOD_S = 120.0
_LOW, _HIGH, _WHOLE_HIGH = 0.2, 0.95, 0.9
_OVER = 1.2
"""The peak of every third wave of a container that nothing limits."""
_MEMORY_AT_START, _MEMORY_FILLED = 0.1, 0.7
_FILLED_AFTER_S = 180.0
_MOST_PIDS = 256


class SimulatedContainer(Struct, frozen=True, kw_only=True):
    """One running container with GPUs.

    `share` is the part of each GPU that it may use, 1 for whole ones; `memory_bytes` is its limit on each GPU. `load` is
    the constant part of both that it uses, None for the wave.
    """

    name: str
    """With namespace and pod: the wave's phase follows from it."""
    gpus: tuple[int, ...]
    pids: tuple[int, ...]
    share: float
    memory_bytes: int
    age_s: float
    is_limited: bool = True
    load: float | None = None


def simulated_usage(containers: Sequence[SimulatedContainer], now_s: float) -> list[SimulatedProcess]:
    """Each container's use, its processes having equal parts. A GPU on which more is demanded than it has gives each its
    part of what there is, as its time is shared."""
    found = [process for container in containers for process in _processes(container, now_s)]
    demand: dict[int, float] = {}
    for process in found:
        demand[process.gpu] = demand.get(process.gpu, 0.0) + (process.sm or 0.0)
    shared = []
    for process in found:
        # Time is shared: no GPU is busy for more than all of its time.
        part = round((process.sm or 0.0) / max(1.0, demand[process.gpu]), 6)
        shared.append(replace(process, sm=part))
    return shared


def _processes(container: SimulatedContainer, now_s: float) -> list[SimulatedProcess]:
    pids = container.pids[:_MOST_PIDS]
    if not pids:
        return []
    sm = min(1.0, container.share * sm_load(container, now_s))
    each_bytes, rest_bytes = divmod(int(container.memory_bytes * memory_load(container)), len(pids))
    return [
        SimulatedProcess(
            gpu=gpu,
            pid=pid,
            sm=sm / len(pids),
            # The remainder goes to one: the sum is the container's memory to the byte.
            memory_bytes=each_bytes + (rest_bytes if position == 0 else 0),
        )
        for gpu in container.gpus
        for position, pid in enumerate(pids)
    ]


def sm_load(container: SimulatedContainer, now_s: float) -> float:
    """The part of its share that it uses, above 1 at some peaks where nothing limits it."""
    if container.load is not None:
        return container.load
    # Each container has its own phase, the same at each start. hash() would differ between processes.
    turns = now_s / PERIOD_S + zlib.crc32(container.name.encode()) / 2**32
    high = _WHOLE_HIGH if container.share >= 1 else _HIGH
    # Every third wave goes beyond the share, so that the views show what no isolation means.
    if not container.is_limited and container.share < 1 and int(turns) % 3 == 0:
        high = _OVER
    return _LOW + (high - _LOW) * (0.5 - 0.5 * math.cos(2 * math.pi * turns))


def memory_load(container: SimulatedContainer) -> float:
    """The part of its memory that it uses."""
    if container.load is not None:
        return min(1.0, container.load)
    filled = min(1.0, max(0.0, container.age_s) / _FILLED_AFTER_S)
    return _MEMORY_AT_START + (_MEMORY_FILLED - _MEMORY_AT_START) * filled


class WorkloadPlayer(Struct, eq=False):
    """`path` is the usage file; `isolation` and `allowed` are the agent's settings of these names; `clock` gives seconds
    since the epoch."""

    shown: ReportedNode
    path: Path
    isolation: str = "gpushare"
    allowed: Collection[str] = ()
    clock: Callable[[], float] = time.time
    _unwritable: ReportOnce = field(default_factory=ReportOnce)

    async def run(self) -> None:
        """Writes the use of each second, without an end."""
        while True:
            self.play()
            await asyncio.sleep(INTERVAL_S)

    def play(self) -> None:
        """One moment. A file that cannot be written is one line of log; the GPUs show their last use then, and so they do
        while the kubelet is down, because only it knows who has which."""
        # Only the kubelet knows which container has a GPU: without it the last use stays.
        if not self.shown.node.kubelet.is_running:
            return
        now_s = self.clock()
        running = [run for run in self.shown.node.kubelet.runtime.containers() if run.is_running]
        containers = [container for run in running if (container := self._simulated(run, now_s)) is not None]
        try:
            replace_whole(self.path, encode_usage(simulated_usage(containers, now_s)).encode())
        except OSError as error:
            if self._unwritable.is_new(str(error)):
                log.warning("usage_file_not_written", path=str(self.path), reason=str(error))

    def _simulated(self, run: Container, now_s: float) -> SimulatedContainer | None:
        """The container to simulate; None if it has no GPUs or its pod has gone."""
        shown = self.shown
        ids = ids_of(shown, run.pod_uid, run.name)
        gpus = gpus_of(ids, shown.gpus)
        pod = shown.node.api.find_pod(run.pod_namespace, run.pod_name)
        # The process of a pod that was deleted by force may live on. Nobody can say which share it has.
        if pod is None or pod["metadata"]["uid"] != run.pod_uid:
            return None
        claims = shares_of_container(shown, pod, run.name)
        gpus += [shown.gpus[index] for index in sorted({one["gpu"] for one in claims})]
        # At a place for a MIG instance the agent knows which one lies there.
        reported = [one for one in shown.agent_document.get("containers", ()) if one.get("claim")]
        places = {(one["claim"]["name"], one["claim"]["request"]): one["gpus"] for one in reported}
        indexes = {gpu["index"] for one in claims for gpu in places.get((one["claim"], one["request"]), ())}
        spec = next((spec for spec in containers_of(pod) if spec.name == run.name), None)
        if not gpus or spec is None:
            return None
        share, memory_bytes = self._claimed(pod, claims) if claims else self._share(spec, gpus, ids)
        chosen = choose_isolation(pod["metadata"].get("annotations") or {}, self.isolation, self.allowed)
        return SimulatedContainer(
            name=f"{run.pod_namespace}/{run.pod_name}/{run.name}",
            gpus=tuple(sorted(indexes or {gpu.index for gpu in gpus})),
            pids=tuple(shown.node.kubelet.runtime.pids(run)),
            share=share,
            memory_bytes=memory_bytes,
            age_s=now_s - run.created_at,
            is_limited=chosen != NO_ISOLATION,
            load=annotation_number(pod, LOAD_ANNOTATION),
        )

    def _claimed(self, pod: RawObject, claims: Sequence[ClaimRow]) -> tuple[float, int]:
        """What `_share` returns, of the smallest of its claims' shares. One that asks for no cores has the part of its
        memory. The containers of the pod that use a claim have equal parts of it."""
        all_shares = [shares_of_container(self.shown, pod, spec.name) for spec in containers_of(pod)]
        # Containers of a claim share what it has.
        users = sum(any(one in shares for one in claims) for shares in all_shares)
        least_mib = min(one["memory_mib"] for one in claims)
        parts = [
            one["cores"] / CORES_PER_GPU or one["memory_mib"] / self.shown.gpus[one["gpu"]].memory_mib for one in claims
        ]
        return min(parts) / users, least_mib * MIB // users

    def _share(self, spec: ContainerSpec, gpus: list[Gpu], ids: Sequence[str]) -> tuple[float, int]:
        """The part and the bytes of memory of each of its GPUs."""
        names, whole_mib = self.shown.names, min(gpu.memory_mib for gpu in gpus)
        asked = request_of(spec, names)
        if asked.whole_gpus:
            return 1.0, whole_mib * MIB
        if names.part_kind(spec) is not None:
            part = min(parts_of_gpus(ids, gpus).values())
            return float(part), int(part * whole_mib) * MIB
        memory_mib = min(whole_mib, names.memory_mib(spec))
        return asked.cores / CORES_PER_GPU or memory_mib / whole_mib, memory_mib * MIB
