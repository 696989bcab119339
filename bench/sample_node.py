"""A node made up in memory: GPUs, containers and a use that differs at each step, for what shows or sends the node.

Nothing runs behind it. For the stream's cost, and for trying the dashboard at a size that the embedded node takes
minutes to reach.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from gpushare_agent import __version__
from gpushare_agent.agent.observability.node_snapshot import AgentFacts, ContainerFacts, NodeSnapshot
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.decision_records import Asked, Candidate, DecisionRecord, Outcome
from gpushare_agent.core.model.gpus import Gpu, GpuInventory, Health, Link, LinkKind, Topology
from gpushare_agent.core.model.names import MIB, DeviceId, GpuUuid, PodUid
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec, Pod, PodPhase
from gpushare_agent.core.model.resources import ResourceKind, ResourceNames
from gpushare_agent.core.model.usage import ContainerUse, GpuSample, ProcessSample, UsageRound
from gpushare_agent.core.placement.topology import build_topology

GPU_MIB = 81920
SHARE_CORES = 5
SHARE_BLOCKS = 16
MOST_PER_GPU = 100 // SHARE_CORES


def uuid_of(index: int) -> GpuUuid:
    return GpuUuid(f"GPU-{index:08x}-8f3c-4d1e-9a77-0123456789ab")


def uid_of(number: int) -> PodUid:
    return PodUid(f"{number:08x}-5b1f-4c55-8d3e-fedcba987654")


@dataclass
class SampleNode:
    """`step` makes time pass: every GPU and container then uses something else."""

    gpus: int = 16
    containers: int = 200
    moment: int = 0
    started_at: float = field(default_factory=lambda: time.time() - 3600)
    unhealthy: dict[int, str] = field(default_factory=dict)
    cordoned: dict[int, str] = field(default_factory=dict)
    unattributed: dict[int, int] = field(default_factory=dict)
    """Processes of nobody, by GPU."""
    excess: dict[int, float] = field(default_factory=dict)
    """Use of single containers, by number, as a part of their share, instead of the wave."""

    def __post_init__(self) -> None:
        if self.containers > self.gpus * MOST_PER_GPU:
            raise ValueError(f"{self.gpus} GPUs have room for {self.gpus * MOST_PER_GPU} containers at most")
        self.topology = _topology(self.gpus)

    def step(self) -> None:
        self.moment += 1

    def snapshot(self) -> NodeSnapshot:
        facts = [self._container(number) for number in range(self.containers)]
        per_gpu = [0] * self.gpus
        for number in range(self.containers):
            per_gpu[number % self.gpus] += 1
        uuids = [uuid_of(index) for index in range(self.gpus)]
        return NodeSnapshot(
            node="node-of-" + str(self.gpus),
            at=time.time(),
            agent=AgentFacts(
                version=__version__,
                started_at=self.started_at,
                not_ready=(),
                isolation="vcuda",
                driver="simulated",
                sample_period_s=1.0,
            ),
            names=ResourceNames(),
            inventory=GpuInventory(
                gpus=tuple(self._gpu(index) for index in range(self.gpus)),
                topology=self.topology,
                driver_version="580.65.06",
            ),
            cordoned={uuid_of(index): why for index, why in self.cordoned.items()},
            unhealthy_reasons={uuid_of(index): why for index, why in self.unhealthy.items()},
            excluded=frozenset(),
            cores_allocated={uuid: count * SHARE_CORES for uuid, count in zip(uuids, per_gpu, strict=True)},
            memory_allocated_bytes={
                uuid: count * SHARE_BLOCKS * 256 * MIB for uuid, count in zip(uuids, per_gpu, strict=True)
            },
            containers=facts,
            usage=self._usage(facts),
        )

    def decision(self, number: int, *, refused: bool = False) -> DecisionRecord:
        """Of one container: placed on GPU 0, or refused for want of a GPU."""
        candidates = tuple(
            Candidate(
                index=index,
                label=str(index),
                uuid=uuid_of(index),
                is_healthy=index not in self.unhealthy,
                free_cores=40,
                free_memory_bytes=20000 * MIB,
                total_memory_bytes=GPU_MIB * MIB,
                is_chosen=not refused and index == 0,
                verdict="lacks 60 cores" if refused else "chosen" if index == 0 else "fits",
            )
            for index in range(self.gpus)
        )
        return DecisionRecord(
            number=number,
            at=time.time(),
            namespace="team-a",
            pod=f"trainer-{number}",
            pod_uid=uid_of(number),
            container="main",
            resource="tencent.com/vcuda-core",
            outcome=Outcome.REFUSED if refused else Outcome.ALLOCATED,
            reason="Fragmented" if refused else "",
            explanation="no GPU has 100 cores free at once" if refused else "the fullest GPU that fits",
            policy="" if refused else "share",
            gpus=() if refused else (0,),
            labels=() if refused else ("0",),
            asked=Asked(cores=100 if refused else 5, memory_bytes=4096 * MIB),
            candidates=candidates,
        )

    def _gpu(self, index: int) -> Gpu:
        illness, cordon = self.unhealthy.get(index, ""), self.cordoned.get(index)
        reason = illness if cordon is None else f"cordoned: {cordon}; {illness}"
        return Gpu(
            index=index,
            minor=index,
            uuid=uuid_of(index),
            bus_id=f"00000000:{index + 1:02X}:00.0",
            name="NVIDIA H100 80GB HBM3",
            memory_mib=GPU_MIB,
            numa_node=index * 2 // self.gpus,
            health=Health.UNHEALTHY if reason else Health.HEALTHY,
            unhealthy_reason=reason,
        )

    def _container(self, number: int) -> ContainerFacts:
        uid, gpu = uid_of(number), uuid_of(number % self.gpus)
        key = ContainerKey(uid, "main")
        name, namespace = f"inference-{number:03d}", f"team-{'abcde'[number % 5]}"
        first = number // self.gpus * SHARE_CORES
        return ContainerFacts(
            allocation=Allocation(
                key=key,
                namespace=namespace,
                pod_name=name,
                kind=ContainerKind.MAIN,
                gpus=(gpu,),
                ids={ResourceKind.VCORE: frozenset(DeviceId(f"{gpu}::{first + n}") for n in range(SHARE_CORES))},
            ),
            pod=Pod(
                uid=uid,
                namespace=namespace,
                name=name,
                phase=PodPhase.RUNNING,
                containers=(ContainerSpec(name="main", kind=ContainerKind.MAIN, position=0),),
                running=frozenset({"main"}),
            ),
            cores=SHARE_CORES,
            memory_bytes=SHARE_BLOCKS * 256 * MIB,
            allocated_cores=SHARE_CORES,
            allocated_memory_bytes=SHARE_BLOCKS * 256 * MIB,
            core_limit=0,
            isolation="vcuda",
        )

    def _wave(self, phase: int) -> float:
        """0.2 .. 0.95, another value at each step."""
        return 0.575 + 0.375 * math.sin(self.moment / 7.3 + phase * 1.7)

    def _usage(self, facts: list[ContainerFacts]) -> UsageRound:
        uses: dict[tuple[ContainerKey, GpuUuid], ContainerUse] = {}
        for number, one in enumerate(facts):
            gpu, wave = one.allocation.gpus[0], self.excess.get(number, self._wave(number))
            uses[one.allocation.key, gpu] = ContainerUse(
                key=one.allocation.key,
                uuid=gpu,
                pids=(10_000 + number,),
                memory_bytes=int(one.memory_bytes * wave * 0.9),
                sm_ratio=one.cores / 100 * wave,
                encoder_ratio=0.0,
                decoder_ratio=0.0,
            )
        gpus = {uuid_of(index): self._sample(index, uses) for index in range(self.gpus)}
        unattributed = {
            uuid_of(index): tuple(
                ProcessSample(pid=900 + n, memory_bytes=(350 + 100 * n) * MIB, sm_ratio=0.01) for n in range(count)
            )
            for index, count in self.unattributed.items()
        }
        return UsageRound(sampled_at=time.time(), gpus=gpus, containers=uses, unattributed=unattributed)

    def _sample(self, index: int, uses: dict[tuple[ContainerKey, GpuUuid], ContainerUse]) -> GpuSample:
        own = [use for (_, gpu), use in uses.items() if gpu == uuid_of(index)]
        sm, wave = sum(use.sm_ratio or 0.0 for use in own), self._wave(index)
        return GpuSample(
            uuid=uuid_of(index),
            sm_ratio=sm,
            memory_ratio=sm * 0.6,
            encoder_ratio=0.0,
            decoder_ratio=0.0,
            memory_used_bytes=600 * MIB + sum(use.memory_bytes or 0 for use in own),
            memory_total_bytes=GPU_MIB * MIB,
            temperature_celsius=34 + 40 * sm,
            power_watts=90 + 500 * sm,
            power_limit_watts=700,
            sm_clock_hertz=(900 + 1000 * wave) * 1e6,
            memory_clock_hertz=2.6e9,
            ecc_corrected_total=0,
            ecc_uncorrected_total=0,
            throttle_reasons=(),
            pcie_received_bytes_per_second=wave * 2e10,
            pcie_sent_bytes_per_second=wave * 1e10,
            nvlink_received_bytes_total=int((self.moment + 1) * (1e11 + index)),
            nvlink_sent_bytes_total=int((self.moment + 1) * (0.9e11 + index)),
            processes=tuple(ProcessSample(pid=pid) for use in own for pid in use.pids),
        )


def _topology(gpus: int) -> Topology:
    """Two sockets with pairs behind a switch; within a socket every GPU has NVLink to every other."""
    half = max(1, gpus // 2)

    def link(a: int, b: int) -> Link:
        if a == b:
            return Link(kind=LinkKind.SELF)
        if a // half == b // half:
            return Link(kind=LinkKind.NVLINK, nvlinks=4)
        return Link(kind=LinkKind.SYS)

    def pcie(a: int, b: int) -> LinkKind:
        if a == b:
            return LinkKind.SELF
        if a // half != b // half:
            return LinkKind.SYS
        return LinkKind.PIX if a // 2 == b // 2 else LinkKind.NODE

    size = range(gpus)
    return build_topology(
        [[link(a, b) for b in size] for a in size],
        [min(1, a // half) for a in size],
        pcie=[[pcie(a, b) for b in size] for a in size],
    )
