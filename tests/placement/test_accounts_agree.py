"""Everyone who counts a node's GPUs counts alike, on random nodes and pods: the agent's admission, the extender that reads
its report, the sandbox's scheduler, the simulated claims, and `inspect`.

The agent's admission is compared with the extender's own plan in tests/extender/test_agreement.py.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpushare_agent.agent.admission.allocation_cache import AllocationCache
from gpushare_agent.agent.admission.decisions.ledger import Policy
from gpushare_agent.agent.cluster.node_facts import gpus_annotation
from gpushare_agent.agent.dra.claims import allocations_of, shortage
from gpushare_agent.agent.dra.decisions.edits import PreparedClaim, PreparedResult
from gpushare_agent.core.model.allocations import NO_CHARGE, Charge, ClaimRef, ContainerKey, add_charges
from gpushare_agent.core.model.errors import Refused
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.names import MIB, NVIDIA_GPU_RESOURCE, PREDICATE_GPU_INDEX_PREFIX, PodUid
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.core.model.resources import NvidiaNames, ResourceNames
from gpushare_agent.core.node_report.annotations import (
    ALLOCATIONS_ANNOTATION,
    GPUS_ANNOTATION,
    allocations_annotation,
    allocations_by_pod,
)
from gpushare_agent.core.placement import GpuAccount
from gpushare_agent.core.placement.gpu_account import account_of
from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.extender.objects import read_node
from gpushare_agent.extender.values import ClusterPolicy
from gpushare_agent.kubectl.cluster_nodes import read_report, report_document
from gpushare_agent.sandbox.pod_manifest import pod_requests
from gpushare_agent.sandbox.scheduler.scheduler import lacking, take
from gpushare_agent.simulation.schedulers import Policy as SimulatedPolicy
from gpushare_agent.simulation.workload import PodMaker, Shape
from tests.placement.support_placement import Node, accounts, leaves_blocks_without_cores, nodes, pods_with_units
from tests.simulation.support_simulation import GPU_MIB, cluster_of, scheduler_of
from tests.support_core import GPU_MEM_NAMES as GPU_MEM
from tests.support_core import NAMES, container, inventory, pod
from tests.support_json import undecoded

SEEDS = st.integers(0, 10_000)


def used(gpus: list[GpuAccount]) -> list[tuple[int, int]]:
    """Cores and MiB of each GPU, by index."""
    return [(gpu.allocated_cores, gpu.allocated_mib) for gpu in gpus]


def free(gpus: Any) -> list[tuple[int, int, int]]:
    return [(gpu.free_cores, gpu.free_blocks, gpu.free_units) for gpu in gpus]


def raw_node(agent: Node, owners: dict[PodUid, Pod], names: ResourceNames) -> dict[str, Any]:
    """The Node object as the agent writes it."""
    found = agent.found
    capacity = {names.name(kind): str(sum(names.units(gpu, kind) for gpu in found.gpus)) for kind in names.kinds}
    by_pod = allocations_by_pod(agent.cache.view().values(), found.gpus, owners.get, names).values()
    text = gpus_annotation(found, cordoned={}, memory_block_mib=names.memory_block_mib)
    return {
        "metadata": {
            "name": "node",
            "annotations": {GPUS_ANNOTATION: text, ALLOCATIONS_ANNOTATION: allocations_annotation(by_pod)},
        },
        "status": {"capacity": capacity, "allocatable": capacity},
    }


def manifest(owner: Pod) -> dict[str, Any]:
    def raw(one: ContainerSpec) -> dict[str, Any]:
        limits = {name: str(count) for name, count in one.requests.items()}
        restarts = {"restartPolicy": "Always"} if one.kind is ContainerKind.SIDECAR else {}
        return {"name": one.name, "resources": {"limits": limits}, **restarts}

    by_kind = {
        is_main: [c for c in owner.containers if (c.kind is ContainerKind.MAIN) is is_main] for is_main in (True, False)
    }
    return {"spec": {"initContainers": [raw(c) for c in by_kind[False]], "containers": [raw(c) for c in by_kind[True]]}}


def pods_of(strategy: Any) -> st.SearchStrategy[tuple[Pod, ...]]:
    return st.integers(1, 6).flatmap(lambda n: st.tuples(*(strategy(f"p{i}") for i in range(n))))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(found=nodes(), owners=pods_of(pods_with_units), seed=SEEDS, ends=st.sets(st.integers(0, 5)))
def test_what_is_used_and_free_is_the_same_for_agent_and_extender(
    found: GpuInventory, owners: tuple[Pod, ...], seed: int, ends: set[int]
) -> None:
    """After every admission and every end of a pod: by the agent's device IDs, and by the agent's report as the extender
    reads it. What the agent admits, kube-scheduler's sums have admitted before."""
    agent = Node(found, Policy(names=GPU_MEM), seed)
    extender = ClusterState(policy=ClusterPolicy(names=GPU_MEM))
    left = {GPU_MEM.name(k): sum(GPU_MEM.units(g, k) for g in found.gpus if g.is_healthy) for k in GPU_MEM.kinds}
    admitted: dict[PodUid, Pod] = {}
    for number, owner in enumerate(one for one in owners if not leaves_blocks_without_cores(one)):
        requests = pod_requests(manifest(owner))
        if not isinstance(agent.admit(owner), Refused):
            assert lacking(left, requests) == []
            take(left, requests)
            admitted[owner.uid] = owner
        if number in ends and admitted:
            ended = admitted.pop(sorted(admitted)[0])
            agent.release(ended)
            take(left, {name: -count for name, count in pod_requests(manifest(ended)).items()})
        read = read_node(undecoded(raw_node(agent, admitted, GPU_MEM)), GPU_MEM, model_label="m", pool_label="p")
        assert read.node is not None and not read.problem
        extender.put_node(read.node, 0.0)
        own = accounts(found, agent.cache, GPU_MEM)
        assert used(list(extender.gpus("node"))) == used(own)
        if any(gpu.is_healthy for gpu in found.gpus):
            assert free(extender.gpus("node")) == free(own)


SHAPES = st.sampled_from([Shape(10, 8), Shape(50, 16), Shape(70, 40), Shape(100, 0), Shape(200, 0), Shape(30, 64)])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(gpus=st.integers(1, 4), shapes=st.lists(SHAPES, max_size=12), ends=st.sets(st.integers(0, 11)), seed=SEEDS)
def test_simulated_claims_and_simulated_binds_leave_free_what_the_agent_has_free(
    gpus: int, shapes: list[Shape], ends: set[int], seed: int
) -> None:
    """Each pod goes to the agent with the GPUs that the simulation took: it fits there, and both have as much free then."""
    maker = PodMaker(NAMES)
    for policy in (SimulatedPolicy.BINPACK, SimulatedPolicy.DRA):
        cluster = cluster_of(gpus)
        scheduler = scheduler_of(cluster, policy)
        node, machines = cluster.nodes[0], inventory(gpus, memory_mib=GPU_MIB).gpus
        found = GpuInventory(
            gpus=tuple(replace(gpu, uuid=other.uuid) for gpu, other in zip(machines, node.gpus, strict=True)),
            topology=node.topology,
        )
        agent = Node(found, Policy(names=NAMES), seed)
        placed: list[tuple[Pod, Shape]] = []
        for number, shape in enumerate(shapes):
            owner = maker.pod(f"p{number}", shape)
            before = free(scheduler.gpus(node.name))
            if isinstance(scheduler.place([(owner, shape)], 0.0), list):
                after = free(scheduler.gpus(node.name))
                took = [index for index, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
                hints = {
                    f"{PREDICATE_GPU_INDEX_PREFIX}0": ",".join(map(str, took)),
                    "tencent.com/predicate-node": "node",
                }
                assert agent.admit(owner, hints) == {"main": tuple(took)}
                placed.append((owner, shape))
            if number in ends and placed:
                ended, its_shape = placed.pop(0)
                scheduler.end(ended.uid, its_shape, node.name)
                agent.release(ended)
            now = [(cores, blocks) for cores, blocks, _ in free(scheduler.gpus(node.name))]
            assert now == [(cores, blocks) for cores, blocks, _ in free(accounts(found, agent.cache))]


REPLICAS = NvidiaNames(replicas=(("*", 3),), mig_strategy="mixed")


def pods_with_replicas(name: str) -> st.SearchStrategy[Pod]:
    """Shares, gpu-mem units, and units under NVIDIA's names: replicas of GPUs and of MIG instances."""
    asked = st.sampled_from(
        [
            {GPU_MEM.vcore: 25, GPU_MEM.vmemory: 13},
            {GPU_MEM.vcore: 100},
            {GPU_MEM.gpu_mem: 5},
            {NVIDIA_GPU_RESOURCE: 1},
            {NVIDIA_GPU_RESOURCE: 2},
            {REPLICAS.mig_resource("1g.10gb"): 1},
        ]
    )
    main = asked.map(lambda requests: replace(container(), requests=requests))
    return st.lists(main, min_size=1, max_size=2).map(
        lambda found: pod(name, *(replace(one, name=f"main-{n}", position=n) for n, one in enumerate(found)))
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    found=nodes(with_instances=True),
    owners=pods_of(pods_with_replicas),
    shares_in_mig=st.booleans(),
    seed=SEEDS,
    ends=st.sets(st.integers(0, 5)),
)
def test_replicas_and_instances_are_counted_alike_by_agent_extender_and_inspect(
    found: GpuInventory, owners: tuple[Pod, ...], shares_in_mig: bool, seed: int, ends: set[int]
) -> None:
    """The report has a part of a core or of a block as one, for each pod: the extender believes no more to be free than the
    agent, and at most that much less. `inspect` shows what the extender counts."""
    names = replace(GPU_MEM, shares_in_mig=shares_in_mig)
    own_names = replace(names, gpu=REPLICAS.resources(["1g.10gb"]), nvidia=REPLICAS)
    agent = Node(found, Policy(names=own_names), seed)
    admitted: dict[PodUid, Pod] = {}
    for number, owner in enumerate(owners):
        if not isinstance(agent.admit(owner), Refused):
            admitted[owner.uid] = owner
        if number in ends and admitted:
            agent.release(admitted.pop(sorted(admitted)[0]))
        by_pod = allocations_by_pod(agent.cache.view().values(), found.gpus, admitted.get, own_names).values()
        raw = raw_node(agent, admitted, names)
        raw["metadata"]["annotations"][ALLOCATIONS_ANNOTATION] = allocations_annotation(by_pod)
        raw["metadata"]["annotations"][GPUS_ANNOTATION] = gpus_annotation(
            found, cordoned={}, memory_block_mib=names.memory_block_mib, shares_in_mig=shares_in_mig
        )
        own = accounts(found, agent.cache, own_names)
        read = read_node(undecoded(raw), names, model_label="m", pool_label="p")
        if read.node is not None:
            extender = ClusterState(policy=ClusterPolicy(names=names))
            extender.put_node(read.node, 0.0)
            for mine, its in zip(own, extender.gpus("node"), strict=True):
                assert mine.allocated_cores <= its.allocated_cores < mine.allocated_cores + len(admitted) + 1
                assert mine.allocated_mib <= its.allocated_mib < mine.allocated_mib + 256 * (len(admitted) + 1)
                assert (its.free_cores <= mine.free_cores and its.free_blocks <= mine.free_blocks) or not its.is_healthy
        summaries = read_report(raw["metadata"]["annotations"], {}, names)
        assert summaries is not None
        sums = report_document("node", summaries, list(admitted.values()))
        charged: dict[int, Charge] = {}
        for one in by_pod:
            add_charges(charged, {index: Charge(*counts) for index, counts in one.gpus.items()})
        for gpu, shown in zip(found.gpus, sums["gpus"], strict=True):
            account = account_of(gpu, names, charged.get(gpu.index, NO_CHARGE))
            assert shown["memory"]["allocated_bytes"] == account.allocated_mib * MIB
            assert shown["cores"]["allocated"] == min(account.allocated_cores, shown["cores"]["capacity"])


CLAIMS = st.tuples(st.integers(0, 2), st.integers(0, 99), st.integers(1, 40), st.booleans(), st.booleans())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(claims=st.lists(CLAIMS, max_size=8))
def test_claims_are_charged_what_the_scheduler_has_counted(claims: list[tuple[int, int, int, bool, bool]]) -> None:
    """Those that have room; of admin access nothing."""
    found, cache = inventory(3), AllocationCache()
    counted = [[0, 0] for _ in found.gpus]
    for number, (index, cores, blocks, is_whole, is_admin) in enumerate(claims):
        gpu = found.gpus[index]
        result = PreparedResult(
            key=ContainerKey(PodUid(f"uid-{number}"), "gpu"), request="gpu", device=f"gpu-{index}", share_id="",
            gpu=gpu.uuid, cores=100 if is_whole else cores, memory_mib=gpu.memory_mib if is_whole else blocks * 256,
            is_whole=is_whole, view="gpu", isolation="vcuda", is_admin=is_admin,
        )  # fmt: skip
        claim = PreparedClaim(
            ref=ClaimRef("default", f"claim-{number}", f"uid-{number}"), shown_as="gpu", pod="p",
            results=(result,),
        )  # fmt: skip
        ledger = cache.ledger(found)
        if not shortage(claim, ledger, NAMES):
            for allocation in allocations_of(claim, NAMES, 0.0):
                cache.put(allocation)
                counted[index][0] += result.cores
                counted[index][1] += result.memory_mib
    assert used(accounts(found, cache)) == [tuple(one) for one in counted]
