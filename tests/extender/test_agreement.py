"""The agent and the extender agree on random clusters: on what fits, on which GPUs, and on what is then free."""

from __future__ import annotations

from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.ledger import Policy
from gpushare_agent.core.model.errors import Refused
from gpushare_agent.core.model.gpus import GpuInventory, GpuReport, MigReport
from gpushare_agent.core.model.names import NVIDIA_GPU_RESOURCE, PREDICATE_GPU_INDEX_PREFIX
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.model.resources import NvidiaNames, ResourceNames
from gpushare_agent.core.placement import GpuAccount
from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.extender.decisions.pod_plan import plan_annotations
from gpushare_agent.extender.values import ClusterNode, ClusterPolicy, Reservation
from tests.placement.support_placement import Node, accounts, leaves_blocks_without_cores, nodes, pods_with_units
from tests.support_core import GPU_MEM_NAMES

AS_WHOLE = {"is_healthy": True, "instance": "", "takes_shares": True}


def cluster_node(name: str, found: GpuInventory, names: ResourceNames) -> ClusterNode:
    """The node as its agent reports it."""
    gpus = tuple(
        GpuReport(
            index=gpu.index,
            uuid=gpu.uuid,
            memory_mib=gpu.memory_mib,
            is_healthy=gpu.is_healthy,
            serves_parts=names.serves_parts(gpu),
            mig=gpu.mig and MigReport(label=gpu.label, profile=gpu.mig.profile, takes_shares=names.shares_in_mig),
        )
        for gpu in found.gpus
    )
    return ClusterNode(name=name, gpus=gpus, topology=found.topology)


def free(gpus: list[GpuAccount]) -> list[tuple[int, int, int]]:
    return [(gpu.free_cores, gpu.free_blocks, gpu.free_units) for gpu in gpus]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    machines=st.lists(nodes(with_instances=True), min_size=1, max_size=3),
    owners=st.integers(1, 7).flatmap(lambda n: st.tuples(*(pods_with_units(f"p{i}") for i in range(n)))),
    share_policy=st.sampled_from(["binpack", "spread"]),
    seed=st.integers(0, 10_000),
    ends=st.sets(st.integers(0, 6)),
    shares_in_mig=st.booleans(),
    served=st.sampled_from([(), ("0",), ("0", "2")]),
)
def test_what_the_extender_decides_the_agent_decides_too(
    machines: list[GpuInventory],
    owners: tuple[Pod, ...],
    share_policy: Literal["binpack", "spread"],
    seed: int,
    ends: set[int],
    shares_in_mig: bool,
    served: tuple[str, ...],
) -> None:
    """On every node, for every pod: where filter says that it fits, the agent admits it on the planned GPUs, with or without
    the annotations; where filter refuses, the agent refuses. Both have the same capacity free after every bind and every
    end of a pod, and all of it once every pod has ended."""
    names = replace(
        GPU_MEM_NAMES,
        shares_in_mig=shares_in_mig,
        gpu=(NVIDIA_GPU_RESOURCE,) if served else (),
        nvidia=NvidiaNames(gpus=served),
    )
    agents = {
        f"n{number}": Node(found, Policy(names=names, share_policy=share_policy), seed + number)
        for number, found in enumerate(machines)
    }
    state = ClusterState(policy=ClusterPolicy(names=names, share_policy=share_policy))
    for name, agent in agents.items():
        state.put_node(cluster_node(name, agent.found, names), 0.0)
    bound: dict[str, tuple[Pod, Node]] = {}
    for number, owner in enumerate(owners):
        if leaves_blocks_without_cores(owner):
            continue
        fitting = state.filter(owner, None).fitting
        for name in sorted(agents.keys() - set(fitting)):
            assert isinstance(agents[name].admit(owner), Refused), f"{owner} on {name}"
        if fitting:
            name = fitting[seed % len(fitting)]
            reserved = state.reserve(owner, name, 0.0)
            assert isinstance(reserved, Reservation)
            hints = dict(plan_annotations(reserved.plan, PREDICATE_GPU_INDEX_PREFIX)) if seed % 2 else {}
            assert agents[name].admit(owner, hints) == {c.name: c.gpus for c in reserved.plan.containers if c.gpus}
            bound[owner.uid] = owner, agents[name]
        if number in ends and bound:
            ended, agent = bound.pop(sorted(bound)[0])
            agent.release(ended)
            state.remove_pod(ended.uid)
        for name, agent in agents.items():
            assert free(list(state.gpus(name))) == free(accounts(agent.found, agent.cache, names))
    for ended, agent in bound.values():
        agent.release(ended)
        state.remove_pod(ended.uid)
    for name, agent in agents.items():
        assert [replace(gpu, **AS_WHOLE).is_free for gpu in state.gpus(name)] == [True] * len(agent.found.gpus)
