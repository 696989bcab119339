"""The one description of the node that everything shows: `/api/v1/node`, the dashboard, `top`, `inspect`.

Pure functions from the parts' states to JSON values, sorted, in base units (bytes, seconds, ratios 0..1, hertz, watts).
The format is docs/reference/api.md; SCHEMA grows when a reader of an older one would be misled.

`SnapshotCache` makes it once for all readers: on the first read after a round of sampling or a change, and after `max_age_s`
without either, for what has no notification (whether the agent is ready). State owned: the last snapshot, when it was made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct, to_builtins

from gpushare_agent.isolation.kept import NOT_KEPT_TEXTS, IsolationFacts, Kept
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.gpus import Gpu, GpuInventory, GpuReport, MigPlace
from gpushare_agent.model.names import CORES_PER_GPU, MIB, GpuUuid
from gpushare_agent.model.pods import ContainerKind, Pod
from gpushare_agent.model.resources import ResourceKind, ResourceNames, cores_of_part
from gpushare_agent.model.topology import Branch, Link, LinkKind, Topology
from gpushare_agent.model.usage import ContainerUse, GpuSample, ProcessSample, UsageRound
from gpushare_agent.placement.gpu_account import GpuAccount

MAX_AGE_S = 1.0


SCHEMA = 2
NO_REASON = "no reason given"
"""Of a cordon without one: an empty text would read as "not cordoned" in many languages."""
_USAGE_FIELDS = tuple(
    name for name in GpuSample.__struct_fields__ if name not in ("uuid", "memory_total_bytes", "processes")
)


class ContainerFacts(Struct, frozen=True, kw_only=True):
    """One container's allocation and its limits. `cores` and `memory_bytes` are its limits, on whole GPUs all of
    them; `core_limit` is the elastic ceiling, 0 without one. `allocated_cores` and `allocated_memory_bytes` are what the
    kubelet allocated, from which a live resize differs. Without a known pod `isolation` is empty and `kept` None."""

    allocation: Allocation
    pod: Pod | None
    cores: int
    memory_bytes: int
    core_limit: int
    allocated_cores: int
    allocated_memory_bytes: int
    isolation: str
    kept: Kept | None = None

    def cores_on(self, gpu: Gpu) -> int:
        """The limit on one of its GPUs: of replicas on several each has its part."""
        if self.allocation.is_whole:
            return CORES_PER_GPU
        part = self.allocation.parts.get(gpu.uuid)
        return self.cores if part is None else cores_of_part(part)

    def memory_bytes_on(self, gpu: Gpu) -> int:
        if self.allocation.is_whole:
            return gpu.memory_mib * MIB
        part = self.allocation.parts.get(gpu.uuid)
        return self.memory_bytes if part is None else int(part * gpu.memory_mib) * MIB


class AgentFacts(Struct, frozen=True, kw_only=True):
    """About the agent itself. `not_ready` is empty when it is ready; times are seconds since the epoch."""

    version: str
    started_at: float
    not_ready: tuple[str, ...]
    isolation: str
    driver: str
    sample_period_s: float
    isolations: tuple[IsolationFacts, ...] = ()
    isolation_reason: str = ""
    """Why the agent chose it, empty where its setting names it."""


class NodeSnapshot(Struct, frozen=True, kw_only=True):
    """Everything that is shown, at one moment. `containers` are those that count (no init container that has run)."""

    node: str
    at: float
    agent: AgentFacts
    names: ResourceNames
    inventory: GpuInventory
    cordoned: Mapping[GpuUuid, str]
    """GPUs that an operator took out of service, and why."""
    unhealthy_reasons: Mapping[GpuUuid, str]
    """What is wrong with GPUs themselves; a cordon is none."""
    cores_allocated: Mapping[GpuUuid, int]
    memory_allocated_bytes: Mapping[GpuUuid, int]
    containers: Sequence[ContainerFacts]
    usage: UsageRound | None

    def cores(self, gpu: Gpu) -> tuple[int, int]:
        """How many cores of the GPU are allocated, and how many it has: none of either in a MIG instance that takes no
        shares, of which the node offers none."""
        capacity = self.names.units(gpu, ResourceKind.VCORE)
        return (self.cores_allocated.get(gpu.uuid, 0) if capacity else 0, capacity)


def node_document(snapshot: NodeSnapshot) -> dict[str, Any]:
    """The whole document."""
    return {
        "schema": SCHEMA,
        "node": snapshot.node,
        "at": snapshot.at,
        "agent": agent_document(snapshot),
        "resources": {
            "vcore": snapshot.names.vcore,
            "vmemory": snapshot.names.vmemory,
            "gpu_mem": snapshot.names.gpu_mem,
            "memory_block_bytes": snapshot.names.memory_block_mib * MIB,
        },
        "gpus": [gpu_document(gpu, snapshot) for gpu in sorted(snapshot.inventory.gpus, key=lambda gpu: gpu.index)],
        "topology": topology_document(snapshot.inventory.topology),
        "containers": [
            container_document(facts, snapshot)
            for facts in sorted(
                snapshot.containers, key=lambda f: (f.allocation.namespace, f.allocation.pod_name, f.allocation.key)
            )
        ],
    }


def agent_document(snapshot: NodeSnapshot) -> dict[str, Any]:
    agent = snapshot.agent
    return {
        "version": agent.version,
        "started_at": agent.started_at,
        "is_ready": not agent.not_ready,
        "not_ready": list(agent.not_ready),
        "isolation": agent.isolation,
        "isolation_reason": agent.isolation_reason,
        "isolations": [
            {
                "name": one.name,
                "unavailable_reason": one.unavailable_reason,
                "kept": _kept(one.kept),
                "probe": to_builtins(one.probe),
            }
            for one in sorted(agent.isolations, key=lambda one: one.name)
        ],
        "not_kept_texts": {
            term.value: NOT_KEPT_TEXTS[term] for term in sorted({t for i in agent.isolations for t in i.kept.not_kept})
        },
        "driver": agent.driver,
        "driver_version": snapshot.inventory.driver_version,
        "sample_period_seconds": agent.sample_period_s,
        "sampled_at": snapshot.usage.sampled_at if snapshot.usage is not None else None,
    }


def _mig(gpu: Gpu, place: MigPlace) -> dict[str, Any]:
    ids = {"gpu_instance": place.gi, "compute_instance": place.ci}
    return {"label": gpu.label, "profile": place.profile, "parent": place.parent, **ids}


def gpu_document(gpu: Gpu, snapshot: NodeSnapshot) -> dict[str, Any]:
    cores, capacity = snapshot.cores(gpu)
    sample = snapshot.usage.gpus.get(gpu.uuid) if snapshot.usage is not None else None
    unattributed = snapshot.usage.unattributed.get(gpu.uuid, ()) if snapshot.usage is not None else ()
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "minor": gpu.minor,
        "bus_id": gpu.bus_id,
        "name": gpu.name,
        **({"mig": _mig(gpu, gpu.mig)} if gpu.mig is not None else {}),
        "numa": gpu.numa_node,
        "is_healthy": gpu.is_healthy,
        "health_reason": snapshot.unhealthy_reasons.get(gpu.uuid, ""),
        "cordoned": (snapshot.cordoned[gpu.uuid] or NO_REASON) if gpu.uuid in snapshot.cordoned else None,
        "cores": {"capacity": capacity, "allocated": cores},
        "memory": {
            "capacity_bytes": gpu.memory_mib * MIB,
            "allocated_bytes": snapshot.memory_allocated_bytes.get(gpu.uuid, 0),
        },
        "usage": _gpu_usage(sample) if sample is not None else None,
        "unattributed": [_process(process) for process in unattributed],
    }


def reported_gpu_document(gpu: GpuReport, account: GpuAccount) -> dict[str, Any]:
    """One GPU as its node reports it to the cluster, in the form of `gpu_document`. What is wrong with it is not reported:
    `health_reason` is None where something is."""
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        **({"mig": {"label": gpu.mig.label, "profile": gpu.mig.profile}} if gpu.mig is not None else {}),
        "is_healthy": gpu.is_healthy,
        "health_reason": "" if gpu.is_healthy else None,
        "cordoned": gpu.cordoned or None,
        "cores": {"capacity": gpu.cores, "allocated": min(account.allocated_cores, gpu.cores)},
        "memory": {"capacity_bytes": gpu.memory_bytes, "allocated_bytes": account.allocated_mib * MIB},
    }


def container_document(facts: ContainerFacts, snapshot: NodeSnapshot) -> dict[str, Any]:
    allocation = facts.allocation
    by_uuid = snapshot.inventory.by_uuid()
    gpus = [by_uuid[uuid] for uuid in allocation.gpus if uuid in by_uuid]
    return {
        "namespace": allocation.namespace,
        "pod": allocation.pod_name,
        "pod_uid": allocation.key.pod_uid,
        "container": allocation.container_name,
        "kind": allocation.kind.value,
        "claim": _claim(allocation),
        "phase": _phase(facts),
        "isolation": facts.isolation,
        "kept": _kept(facts.kept) if facts.kept is not None else None,
        "is_whole": allocation.is_whole,
        "units": _units(allocation),
        "cores": facts.cores,
        "core_limit": facts.core_limit or None,
        "memory_bytes": facts.memory_bytes,
        "allocated": {"cores": facts.allocated_cores, "memory_bytes": facts.allocated_memory_bytes},
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "cores": facts.cores_on(gpu),
                "memory_bytes": facts.memory_bytes_on(gpu),
                "usage": _container_usage(allocation.key, gpu.uuid, snapshot.usage),
            }
            for gpu in sorted(gpus, key=lambda gpu: gpu.index)
        ],
    }


def _claim(allocation: Allocation) -> dict[str, str] | None:
    """None for a container that has its GPU by a device plugin. Of a claim `pod` is the first of its pods, and `container`
    the claim with its result."""
    share = allocation.claim
    return None if share is None else {"name": share.ref.name, "uid": share.ref.uid, "request": share.request}


def _units(allocation: Allocation) -> dict[str, Any] | None:
    """None for a container that has its GPUs by another resource than NVIDIA's."""
    if not allocation.unit_ids:
        return None
    sharing = allocation.sharing
    return {
        "resource": allocation.gpu_resource,
        "count": len(allocation.unit_ids),
        "sharing": sharing.value if sharing is not None else None,
    }


def _kept(kept: Kept) -> dict[str, Any]:
    return {
        "memory_by": kept.memory_by,
        "compute_by": kept.compute_by,
        "not_kept": [term.value for term in kept.not_kept],
    }


def topology_document(topology: Topology) -> dict[str, Any]:
    """`links` is the matrix by GPU index in nvidia-smi's words, `tree` the branches with their GPUs."""
    return {
        "links": [[link_word(link) for link in row] for row in topology.links],
        "tree": _branch(topology.root),
    }


def link_word(link: Link) -> str:
    """`NV4`, `PIX`, …, and `X` for a GPU and itself."""
    if link.kind is LinkKind.SELF:
        return "X"
    return f"NV{link.nvlinks}" if link.kind is LinkKind.NVLINK else link.kind.name


def _branch(branch: Branch) -> dict[str, Any]:
    return {
        "kind": link_word(Link(kind=branch.kind)).rstrip("0"),
        "gpus": list(branch.gpus),
        "children": [_branch(child) for child in branch.children],
    }


def _phase(facts: ContainerFacts) -> str:
    """The container's own where it is known to run, else the pod's."""
    if facts.pod is None:
        return "Unknown"
    if facts.allocation.key.container in facts.pod.running:
        return "Running"
    if facts.pod.is_deleting:
        return "Terminating"
    if facts.allocation.kind is ContainerKind.INIT:
        return "Init"
    return facts.pod.phase.value


def _gpu_usage(sample: GpuSample) -> dict[str, Any]:
    values = {name: getattr(sample, name) for name in _USAGE_FIELDS}
    reasons = sample.throttle_reasons
    return {**values, "throttle_reasons": list(reasons) if reasons is not None else None}


def _container_usage(key: ContainerKey, uuid: GpuUuid, usage: UsageRound | None) -> dict[str, Any] | None:
    """None before the first sample, and where the GPU does not list its processes; without one of it there, zero."""
    sample = usage.gpus.get(uuid) if usage is not None else None
    if usage is None or sample is None or sample.processes is None:
        return None
    use = usage.containers.get((key, uuid), ContainerUse(key=key, uuid=uuid, pids=(), memory_bytes=0, sm_ratio=0.0))
    return {
        "sm_ratio": use.sm_ratio,
        "memory_bytes": use.memory_bytes,
        "encoder_ratio": use.encoder_ratio,
        "decoder_ratio": use.decoder_ratio,
        "pids": list(use.pids),
    }


def _process(process: ProcessSample) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "kind": process.kind.value,
        "memory_bytes": process.memory_bytes,
        "sm_ratio": process.sm_ratio,
    }


class SnapshotCache:
    """Its values are shared between readers: do not change them."""

    def __init__(
        self,
        make: Callable[[], NodeSnapshot],
        *,
        max_age_s: float = MAX_AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._max_age_s = max_age_s
        self._clock = clock
        self._made_at = float("-inf")
        self._snapshot: NodeSnapshot | None = None

    def expire(self) -> None:
        """Something has changed: the next reader gets a new snapshot."""
        self._made_at = float("-inf")

    def current(self) -> NodeSnapshot:
        if self._snapshot is None or self._clock() - self._made_at >= self._max_age_s:
            self._snapshot = self._make()
            self._made_at = self._clock()
        return self._snapshot
