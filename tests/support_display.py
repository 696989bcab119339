"""A node's snapshot for the tests of what shows it: two cards, a share, a whole card, a stranger, with and without use."""

from __future__ import annotations

from dataclasses import replace

from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.model.pods import ContainerKind, Pod
from gpushare_agent.model.usage import CardSample, ContainerUse, ProcessSample, UsageRound
from gpushare_agent.observability.node_snapshot import MIB, AgentFacts, ContainerFacts, NodeSnapshot
from tests.support_core import NAMES, allocation, container, ids, inventory, pod

CARD_MIB = 24 * 1024
CARD_0, CARD_1 = GpuUuid("GPU-0"), GpuUuid("GPU-1")
SECRET = "s3cr3t-value-of-a-tenant"


def train_pod() -> Pod:
    """A pod of one sharing container that tells its user, and one that asks for nothing."""
    main = replace(container("train", cores=30, blocks=8), env={"SUBMITTER": "ann", "PASSWORD": SECRET})
    return pod("train", main, container("log", position=1), annotations={"clusterName": "blue", "note": SECRET})


def train_allocation() -> Allocation:
    return allocation(train_pod(), "train", ids(0, range(30)), ids(0, range(8)))


def whole_allocation() -> Allocation:
    """Both cards' second one, whole, of a pod that the API server has not told of."""
    held = allocation(pod("big"), "main", ids(1, range(100)), [])
    return replace(held, is_whole=True, kind=ContainerKind.MAIN)


def usage_round() -> UsageRound:
    key = ContainerKey(train_pod().uid, "train")
    processes = (ProcessSample(pid=41), ProcessSample(pid=42), ProcessSample(pid=77))
    return UsageRound(
        sampled_at=1000.0,
        cards={
            CARD_0: CardSample(uuid=CARD_0, memory_used_bytes=3 * 1024 * MIB, processes=processes),
            CARD_1: CardSample(uuid=CARD_1, memory_used_bytes=0, processes=()),
        },
        containers={
            (key, CARD_0): ContainerUse(key=key, uuid=CARD_0, pids=(41, 42), memory_bytes=1536 * MIB, sm_ratio=0.07)
        },
        strangers={CARD_0: (ProcessSample(pid=77),)},
    )


def snapshot(*, usage: UsageRound | None = None) -> NodeSnapshot:
    facts = [
        ContainerFacts(
            held=train_allocation(), pod=train_pod(), cores=30, memory_bytes=2048 * MIB, core_limit=0, isolation="vcuda"
        ),
        ContainerFacts(
            held=whole_allocation(), pod=None, cores=100, memory_bytes=CARD_MIB * MIB, core_limit=0, isolation=""
        ),
    ]
    return NodeSnapshot(
        node="n1",
        at=1001.0,
        agent=AgentFacts(
            version="1.2.3", started_at=1.0, not_ready=(), isolation="vcuda", driver="simulated", sample_period_s=1.0
        ),
        names=NAMES,
        inventory=inventory(2, CARD_MIB),
        cordoned={},
        illnesses={},
        cores_allocated={CARD_0: 30, CARD_1: 100},
        memory_allocated_bytes={CARD_0: 2048 * MIB, CARD_1: CARD_MIB * MIB},
        containers=facts,
        usage=usage,
    )
