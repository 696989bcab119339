"""The one description of the node that everything shows: `/api/v1/node`, the dashboard, `top`, `inspect`.

Pure functions from the parts' states to the document, sorted, in base units (bytes, seconds, ratios 0..1, hertz, watts). Its
format is core/node_report/documents.py.

`SnapshotCache` makes it once for all readers: on the first read after a round of sampling or a change, and after `max_age_s`
without either, for what has no notification (whether the agent is ready). State owned: the last snapshot, when it was made.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct, convert, to_builtins

from gpushare_agent.agent.isolation.kept import NOT_KEPT_TEXTS, IsolationFacts, Kept
from gpushare_agent.core.claims.mig_devices import room
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.gpus import Branch, Gpu, GpuInventory, Link, LinkKind
from gpushare_agent.core.model.mig import MigLayout, MigPlacement
from gpushare_agent.core.model.names import MIB, GpuUuid
from gpushare_agent.core.model.pods import ClaimUser, ContainerKind, Pod
from gpushare_agent.core.model.resources import ResourceKind, ResourceNames
from gpushare_agent.core.model.shares import on_gpu
from gpushare_agent.core.model.usage import ContainerUse, GpuUse, ProcessFacts, ProcessSample, UsageRound
from gpushare_agent.core.node_report import documents
from gpushare_agent.core.node_report.reported import NO_REASON

MAX_AGE_S = 1.0
MAX_PROCESSES = 64
"""Of one container on one GPU that are shown one by one."""


class ContainerFacts(Struct, frozen=True, kw_only=True):
    """One container's allocation and its limits. `cores` and `memory_bytes` are its limits, on whole GPUs all of them;
    `core_limit` is the elastic ceiling, 0 without one. `allocated_cores` and `allocated_memory_bytes` are what the
    kubelet allocated, from which a live resize differs. `users` are the containers that use a claim, which has no pod of
    its own. Without a known pod `isolation` is empty and `kept` None. `not_limited` is why the container was found to run
    without a limit, empty where it was not."""

    allocation: Allocation
    pod: Pod | None
    cores: int
    memory_bytes: int
    core_limit: int
    allocated_cores: int
    allocated_memory_bytes: int
    isolation: str
    kept: Kept | None = None
    not_limited: str = ""
    users: Sequence[ClaimUser] = ()

    def requested_mib(self, names: ResourceNames) -> float:
        """As gpu-manager has it (`getPodSpec` in pkg/services/display/display.go): what was asked for, on whole GPUs too;
        all that they have where nothing was."""
        asked_mib = self.allocation.memory_blocks * names.memory_block_mib if self.allocation.is_whole else 0
        return asked_mib or self.allocated_memory_bytes / MIB


class AgentFacts(Struct, frozen=True, kw_only=True):
    """The agent itself. `not_ready` is empty when it is ready; times are seconds since the epoch."""

    version: str
    started_at: float
    not_ready: tuple[str, ...]
    isolation: str
    driver: str
    sample_period_s: float
    isolations: tuple[IsolationFacts, ...] = ()
    isolation_reason: str = ""
    """Why the agent chose it, empty if its setting names it."""


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
    """What is wrong with the GPUs themselves; a cordon does not count."""
    excluded: frozenset[GpuUuid]
    """GPUs that the node does not offer (setting excluded_gpus)."""
    cores_allocated: Mapping[GpuUuid, int]
    memory_allocated_bytes: Mapping[GpuUuid, int]
    containers: Sequence[ContainerFacts]
    usage: UsageRound | None
    mig_made: Collection[GpuUuid] = ()
    """The MIG instances that the agent made."""
    mig_blocked: Mapping[MigPlacement, str] = MappingProxyType({})
    """Places for instances that nobody can have now, and why."""

    def cores(self, gpu: Gpu) -> tuple[int, int]:
        """How many cores of the GPU are allocated, and how many it has: both 0 for a MIG instance that takes no shares,
        because the node offers no cores of it."""
        capacity = self.names.units(gpu, ResourceKind.VCORE)
        return (self.cores_allocated.get(gpu.uuid, 0) if capacity else 0, capacity)

    def containers_by_name(self) -> list[ContainerFacts]:
        """By namespace, pod and container."""
        return sorted(self.containers, key=lambda f: (f.allocation.namespace, f.allocation.pod_name, f.allocation.key))

    def gpus_of(self, allocation: Allocation) -> list[Gpu]:
        """By index. An allocation may name a GPU that was lost before the agent's start: it stays only in the ledger."""
        by_uuid = self.inventory.by_uuid()
        return sorted((by_uuid[uuid] for uuid in allocation.gpus if uuid in by_uuid), key=lambda gpu: gpu.index)

    def use_of(self, key: ContainerKey, uuid: GpuUuid) -> ContainerUse | None:
        """What a container uses of one of its GPUs: zero without a process there; None where the last round has nothing of
        the GPU, or the GPU does not list its processes."""
        sample = self.usage.gpus.get(uuid) if self.usage is not None else None
        if self.usage is None or sample is None or sample.processes is None:
            return None
        if (use := self.usage.containers.get((key, uuid))) is not None:
            return use
        # A container that was admitted after the last round is not in it, and has no process yet.
        return ContainerUse(
            key=key,
            uuid=uuid,
            pids=(),
            memory_bytes=0,
            sm_ratio=0.0,
            memory_ratio=0.0,
            encoder_ratio=0.0,
            decoder_ratio=0.0,
        )

    @property
    def pids(self) -> set[int]:
        """Of all processes of the last round."""
        gpus = self.usage.gpus.values() if self.usage is not None else ()
        return {process.pid for gpu in gpus for process in gpu.processes or ()}

    def processes_of(self, use: ContainerUse) -> list[ProcessSample]:
        """Those that have the most memory."""
        sample = self.usage.gpus.get(use.uuid) if self.usage is not None else None
        listed = (sample.processes if sample is not None else None) or ()
        # Not one look at all of the GPU's for each of its containers.
        found = [listed[bisect_left(listed, pid, key=lambda one: one.pid)] for pid in use.pids] if listed else []
        return sorted(found, key=lambda one: (-(one.memory_bytes or 0), one.pid))[:MAX_PROCESSES]


def node_document(
    snapshot: NodeSnapshot, described: Mapping[int, ProcessFacts] | None = None
) -> documents.NodeDocument:
    """The whole document. With `described`, what is known of processes by PID, the containers' processes are in it."""
    names = snapshot.names
    return {
        "schema": documents.SCHEMA,
        "node": snapshot.node,
        "at": snapshot.at,
        "agent": _agent(snapshot),
        "resources": {
            "vcore": names.vcore,
            "vmemory": names.vmemory,
            "gpu_mem": names.gpu_mem,
            "memory_block_bytes": names.memory_block_mib * MIB,
        },
        "gpus": [_gpu(gpu, snapshot, described) for gpu in sorted(snapshot.inventory.gpus, key=lambda gpu: gpu.index)],
        "mig_gpus": mig_gpus(snapshot),
        "topology": topology_document(snapshot.inventory),
        "containers": [_container(facts, snapshot, described) for facts in snapshot.containers_by_name()],
    }


def _agent(snapshot: NodeSnapshot) -> documents.AgentDocument:
    agent = snapshot.agent
    not_kept = sorted({term for one in agent.isolations for term in one.kept.not_kept})
    return {
        "version": agent.version,
        "started_at": agent.started_at,
        "is_ready": not agent.not_ready,
        "not_ready": agent.not_ready,
        "isolation": agent.isolation,
        "isolation_reason": agent.isolation_reason,
        "isolations": [
            {
                "name": one.name,
                "unavailable_reason": one.unavailable_reason,
                "kept": _kept(one.kept),
                "probe": one.probe,
            }
            for one in sorted(agent.isolations, key=lambda one: one.name)
        ],
        # Once for the node: each text is a sentence, which every container would repeat.
        "not_kept_texts": {term.value: NOT_KEPT_TEXTS[term] for term in not_kept},
        "driver": agent.driver,
        "driver_version": snapshot.inventory.driver_version,
        "sample_period_seconds": agent.sample_period_s,
        "sampled_at": snapshot.usage.sampled_at if snapshot.usage is not None else None,
    }


_Described = Mapping[int, ProcessFacts] | None


def _gpu(gpu: Gpu, snapshot: NodeSnapshot, described: _Described) -> documents.GpuDocument:
    cores, capacity = snapshot.cores(gpu)
    usage, mig = snapshot.usage, gpu.mig
    sample = usage.gpus.get(gpu.uuid) if usage is not None else None
    unattributed = usage.unattributed.get(gpu.uuid, ()) if usage is not None else ()
    document: documents.GpuDocument = {
        **_state(gpu, snapshot),  # type: ignore[typeddict-item]  # it has no further keys
        "minor": gpu.minor,
        "bus_id": gpu.bus_id,
        "numa": gpu.numa_node,
        "cores": {"capacity": capacity, "allocated": cores},
        "memory": {
            "capacity_bytes": gpu.memory_mib * MIB,
            "allocated_bytes": snapshot.memory_allocated_bytes.get(gpu.uuid, 0),
        },
        # Without the sample's processes: they are the containers' and the unattributed.
        "usage": to_builtins(convert(sample, GpuUse, from_attributes=True)) if sample is not None else None,
        "unattributed": [{**_process(one, described), "kind": one.kind.value} for one in unattributed],
    }
    if gpu.host_memory is not None:
        document["host_memory"] = gpu.host_memory
    if mig is not None:
        instance: documents.Mig = {"label": gpu.label, "profile": mig.profile, "parent": mig.parent}
        document["mig"] = {**instance, "gpu_instance": mig.gi, "compute_instance": mig.ci}
    return document


_STATE_TEXTS = {
    "in-use": "in use",
    "idle": "idle, to be used again or replaced",
    "foreign": "not made by this agent, offered as it is",
    "broken": "half made or half destroyed",
}


def mig_gpus(snapshot: NodeSnapshot) -> list[documents.MigGpu]:
    """The GPUs on which MIG instances are made on demand, also those without any."""
    layouts = {layout.parent: layout for layout in snapshot.inventory.mig_layouts}
    return [_mig_gpu(gpu, layouts[gpu.uuid], snapshot) for gpu in snapshot.inventory.on_demand]


def _mig_gpu(gpu: Gpu, layout: MigLayout, snapshot: NodeSnapshot) -> documents.MigGpu:
    # By its place: not every driver tells the UUID next to the instance.
    shown = {
        one.mig.gi: one.uuid for one in snapshot.inventory.gpus if one.mig is not None and one.mig.parent == gpu.uuid
    }
    uuids = {one.gi: shown.get(one.gi, one.compute[0].uuid) if one.compute else "" for one in layout.instances}
    states = {gi: _mig_state(GpuUuid(uuid), snapshot) for gi, uuid in uuids.items()}
    # One that is idle is destroyed where another needs its slices.
    taken = tuple(one for one in layout.instances if states[one.gi] != "idle")
    blocked = {place: why for place, why in snapshot.mig_blocked.items() if place.parent == gpu.uuid}
    fits = room(layout, taken, frozenset(blocked))
    instances: list[documents.MigInstance] = []
    places: dict[str, list[str]] = {}
    for one in sorted(layout.instances, key=lambda one: one.start):
        known, state = layout.profile(one.profile), states[one.gi]
        profile = known.name if known is not None else f"profile {one.profile}"
        instances.append(
            {"profile": profile, "start": one.start, "size": one.size, "uuid": uuids[one.gi], "state": state}
        )
        places.setdefault(state, []).append(f"{profile} at {one.start}")
    has_room = ", or ".join(f"{count} of {name}" for name, count in fits.items() if count) or "no further instance"
    return {
        **_state(gpu, snapshot),
        "slices": layout.slices,
        "instances": instances,
        "fits": fits,
        "texts": [
            layout.problem or f"MIG on demand, with room for {has_room}",
            *(f"{text}: {', '.join(places[state])}" for state, text in _STATE_TEXTS.items() if state in places),
            *(f"blocked: {why}" for why in sorted({*blocked.values()} - {layout.problem})),
        ],
    }


def _mig_state(uuid: GpuUuid, snapshot: NodeSnapshot) -> str:
    if snapshot.cores_allocated.get(uuid) or snapshot.memory_allocated_bytes.get(uuid):
        return "in-use"
    return "broken" if not uuid else "idle" if uuid in snapshot.mig_made else "foreign"


def _state(gpu: Gpu, snapshot: NodeSnapshot) -> documents.GpuState:
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "is_healthy": gpu.is_healthy,
        "health_reason": snapshot.unhealthy_reasons.get(gpu.uuid, ""),
        "cordoned": (snapshot.cordoned[gpu.uuid] or NO_REASON) if gpu.uuid in snapshot.cordoned else None,
    }


def _container(facts: ContainerFacts, snapshot: NodeSnapshot, described: _Described) -> documents.ContainerDocument:
    allocation, share = facts.allocation, facts.allocation.claim
    return {
        "namespace": allocation.namespace,
        "pod": allocation.pod_name,
        "pod_uid": allocation.key.pod_uid,
        "container": allocation.container_name,
        "kind": allocation.kind.value,
        "claim": {"name": share.ref.name, "uid": share.ref.uid, "request": share.request}
        if share is not None
        else None,
        "phase": _phase(facts),
        "isolation": facts.isolation,
        "kept": _kept(facts.kept) if facts.kept is not None else None,
        "not_limited": facts.not_limited,
        "is_whole": allocation.is_whole,
        "units": _units(allocation),
        "cores": facts.cores,
        "core_limit": facts.core_limit or None,
        "memory_bytes": facts.memory_bytes,
        # Of GPUShare's memory no cores: what comes with it is denied to nobody else.
        "allocated": {"cores": allocation.cores, "memory_bytes": facts.allocated_memory_bytes},
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "cores": cores,
                "memory_bytes": memory_bytes,
                "usage": _usage(snapshot.use_of(allocation.key, gpu.uuid), snapshot, described),
            }
            for gpu in snapshot.gpus_of(allocation)
            for cores, memory_bytes in (on_gpu(allocation, facts.cores, facts.memory_bytes, gpu),)
        ],
    }


def _units(allocation: Allocation) -> dict[str, object] | None:
    """GPUs by NVIDIA's resources; None for a container that has its GPUs by another one."""
    if not allocation.unit_ids:
        return None
    return {"resource": allocation.gpu_resource, "count": len(allocation.unit_ids), "sharing": allocation.sharing}


def _kept(kept: Kept) -> dict[str, object]:
    return {"memory_by": kept.memory_by, "compute_by": kept.compute_by, "not_kept": kept.not_kept}


def _usage(use: ContainerUse | None, snapshot: NodeSnapshot, described: _Described) -> documents.ContainerUsage | None:
    if use is None:
        return None
    usage: documents.ContainerUsage = {
        "sm_ratio": use.sm_ratio,
        "sm_source": use.sm_source.value,
        "memory_bytes": use.memory_bytes,
        "encoder_ratio": use.encoder_ratio,
        "decoder_ratio": use.decoder_ratio,
        "pids": use.pids,
    }
    if described is not None:
        usage["processes"] = [_process(one, described) for one in snapshot.processes_of(use)]
    return usage


def _process(one: ProcessSample, described: _Described) -> documents.ContainerProcess:
    document: documents.ContainerProcess = {
        "pid": one.pid,
        "memory_bytes": one.memory_bytes,
        "sm_ratio": one.sm_ratio,
    }
    if described is not None:
        facts = described.get(one.pid, ProcessFacts())
        document["pid_in_container"], document["command"] = facts.pid_in_container, facts.command
    return document


def topology_document(inventory: GpuInventory) -> dict[str, object]:
    """`links` is the matrix by GPU index in nvidia-smi's words, `tree` the branches with their GPUs."""
    links = [[link_word(link) for link in row] for row in inventory.topology.links]
    return {"links": links, "tree": _branch(inventory.tree)}


def link_word(link: Link) -> str:
    """`NV4`, `PIX`, …, and `X` for a GPU and itself."""
    if link.kind is LinkKind.SELF:
        return "X"
    return f"NV{link.nvlinks}" if link.kind is LinkKind.NVLINK else link.kind.name


def _branch(branch: Branch) -> dict[str, object]:
    # A branch joins GPUs with different numbers of NVLinks: NV, not NV0.
    kind = link_word(Link(kind=branch.kind)).rstrip("0")
    return {"kind": kind, "gpus": branch.gpus, "children": [_branch(child) for child in branch.children]}


def _phase(facts: ContainerFacts) -> str:
    """The container's own where it is known, else the pod's: in a Running pod a container may crash time and again."""
    if facts.allocation.claim is not None:
        return _phase_of_claim(facts.users)
    if facts.pod is None:
        return "Unknown"
    # First: containers of a deleted pod run until their grace period is over, and use their GPUs.
    if facts.allocation.key.container in facts.pod.running:
        return "Running"
    if facts.pod.is_deleting:
        return "Terminating"
    if reason := facts.pod.not_running.get(facts.allocation.key.container):
        return reason
    if facts.allocation.kind is ContainerKind.INIT:
        return "Init"
    return facts.pod.phase.value


def _phase_of_claim(users: Sequence[ClaimUser]) -> str:
    if any(container.name in pod.running for pod, container in users):
        return "Running"
    return "Terminating" if users and all(pod.is_deleting for pod, _ in users) else "Pending"


class SnapshotCache(Struct, eq=False):
    """Its values are shared between readers: do not change them."""

    make: Callable[[], NodeSnapshot]
    max_age_s: float = MAX_AGE_S
    clock: Callable[[], float] = time.monotonic
    _made_at: float = float("-inf")
    _snapshot: NodeSnapshot | None = None

    def expire(self) -> None:
        """Something has changed: the next reader gets a new snapshot."""
        self._made_at = float("-inf")

    def current(self) -> NodeSnapshot:
        if self._snapshot is None or self.clock() - self._made_at >= self.max_age_s:
            self._snapshot = self.make()
            self._made_at = self.clock()
        return self._snapshot
