"""The extender's plan of a pod is what the node's agent does with it, container by container."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare_agent.admission.allocation_cache import AllocationCache
from gpushare_agent.admission.decisions.hints import predicted_gpus
from gpushare_agent.admission.decisions.identity import Target
from gpushare_agent.admission.decisions.ledger import Ledger, Offer, Policy, free_ids
from gpushare_agent.admission.decisions.plan import Plan, check, plan
from gpushare_agent.extender.decisions.pod_plan import plan_annotations, plan_pod
from gpushare_agent.extender.values import Charge, ClusterPolicy, PodPlan
from gpushare_agent.model.allocations import Allocation
from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.gpus import GpuInventory, Health
from gpushare_agent.model.names import (
    CORES_PER_GPU,
    PREDICATE_GPU_INDEX_PREFIX,
    VCORE_RESOURCE,
    VMEMORY_RESOURCE,
    GpuUuid,
    device_id,
)
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.model.topology import Link, LinkKind
from gpushare_agent.placement import GpuAccount
from gpushare_agent.placement.gpu_account import account_of
from gpushare_agent.placement.topology_tree import build_topology
from tests.support_core import NAMES, container, inventory, pod

POLICY = ClusterPolicy(names=NAMES)


def accounts(
    found: GpuInventory, cache: AllocationCache | None = None, names: ResourceNames = NAMES
) -> list[GpuAccount]:
    """The GPUs with what the cache says is allocated."""
    cache = cache or AllocationCache()
    whole = {gpu for one in cache.view().values() if one.is_whole for gpu in one.gpus}
    return [
        replace(
            account_of(gpu, names),
            used_cores=cache.used_cores().get(gpu.uuid, 0),
            used_blocks=cache.used_blocks().get(gpu.uuid, 0),
            used_units=cache.used_gpu_mem().get(gpu.uuid, 0),
            is_whole=gpu.uuid in whole,
        )
        for gpu in found.gpus
    ]


class Node:
    """The agent's real decisions on device IDs, asked as the kubelet asks: in any order of resources, init containers'
    devices handed on, IDs drawn at random from what is preferred."""

    def __init__(self, found: GpuInventory, policy: Policy, seed: int) -> None:
        self.found = found
        self.policy = policy
        self.cache = AllocationCache()
        self._random = random.Random(seed)
        self._taken: dict[ResourceKind, set[str]] = {kind: set() for kind in ResourceKind}

    def admit(self, owner: Pod, hints: dict[str, str] | None = None) -> Refused | dict[str, tuple[int, ...]]:
        """GPU indexes by container, or the first refusal."""
        owner = replace(owner, annotations=dict(hints or {}))
        index = {gpu.uuid: gpu.index for gpu in self.found.gpus}
        reusable: dict[ResourceKind, set[str]] = {}
        for one in owner.containers:
            served = Target(pod=owner, container=one)
            kinds = [kind for kind in self.policy.names.kinds if self.policy.names.wanted(one, kind)]
            self._random.shuffle(kinds)
            for kind in kinds:
                refused = self._allocate(served, kind, reusable.get(kind, set()))
                if refused is not None:
                    self.cache.release_pod(owner.uid)
                    return refused
            held = self.cache.get(served.key)
            for kind in kinds:
                ids = set(held.ids(kind)) if held is not None else set()
                if one.kind is ContainerKind.INIT:
                    reusable.setdefault(kind, set()).update(ids)
                else:
                    reusable.setdefault(kind, set()).difference_update(ids)
        return {
            key.container: tuple(sorted(index[gpu] for gpu in self.cache.view()[key].gpus))
            for key in sorted(self.cache.view())
            if key.pod_uid == owner.uid
        }

    def _allocate(self, served: Target, kind: ResourceKind, reusable: set[str]) -> Refused | None:
        count = self.policy.names.wanted(served.container, kind)
        chosen = self._random.sample(sorted(reusable), min(count, len(reusable)))
        planned: tuple[GpuUuid, ...] = ()
        ledger = self._ledger(served)
        if len(chosen) < count:
            every = [
                device_id(gpu.uuid, n) for gpu in self.found.gpus for n in range(self.policy.names.units(gpu, kind))
            ]
            available = [device for device in every if device not in self._taken[kind]]
            if len(available) < count - len(chosen):
                return Refused(reason=RefusalReason.NOT_ENOUGH_CORES, detail="the kubelet has too few")
            available += chosen  # as the kubelet does
            offer = Offer(kind=kind, available=available, must_include=chosen, size=count)
            free = free_ids(served, kind, available, ledger)
            hint = predicted_gpus(served.pod.annotations, served.container, "node")
            outcome = plan(served, offer, free, ledger, self.policy, hint)
            if isinstance(outcome, Refused):
                return outcome
            assert isinstance(outcome, Plan)
            planned = outcome.gpus
            chosen += [device for device in outcome.ids if device not in chosen]
        else:
            planned = next(
                (a.gpus for a in self.cache.of_pod(served.pod.uid) if a.kind is ContainerKind.INIT and a.gpus), ()
            )
        gpus = check(served, kind, chosen, ledger, self.policy, planned)
        if isinstance(gpus, Refused):
            return gpus
        old = self.cache.get(served.key)
        self._taken[kind].update(chosen)
        self.cache.put(
            Allocation(
                key=served.key,
                namespace=served.pod.namespace,
                pod_name=served.pod.name,
                kind=served.container.kind,
                gpus=gpus,
                vcore_ids=old.vcore_ids if old is not None else frozenset(),
                vmemory_ids=old.vmemory_ids if old is not None else frozenset(),
                is_whole=self.policy.names.wanted(served.container, ResourceKind.VCORE) >= CORES_PER_GPU,
            ).with_ids(kind, frozenset(chosen))  # type: ignore[arg-type]
        )
        return None

    def _ledger(self, served: Target) -> Ledger:
        return Ledger(
            inventory=self.found,
            used_cores=self.cache.used_cores(without=served.key),
            used_blocks=self.cache.used_blocks(without=served.key),
            used_gpu_mem=self.cache.used_gpu_mem(without=served.key),
            holders={kind: self.cache.holders(kind) for kind in ResourceKind},
            allocations=self.cache.view(),
        )


def requests() -> st.SearchStrategy[tuple[int, int]]:
    """Cores and blocks of one container; some ask for nothing."""
    shares = st.tuples(st.sampled_from([5, 10, 25, 40, 50, 60, 90]), st.sampled_from([1, 8, 20, 40, 60]))
    whole = st.tuples(st.sampled_from([100, 100, 200, 300]), st.just(0))
    return st.one_of(shares, shares, shares, whole, st.just((0, 0)))


@st.composite
def pods(draw: st.DrawFn, name: str) -> Pod:
    """Init containers first, then sidecars among them, then main ones."""
    containers: list[ContainerSpec] = []
    inits = draw(st.lists(st.tuples(requests(), st.booleans()), max_size=2))
    for position, ((cores, blocks), is_sidecar) in enumerate(inits):
        kind = ContainerKind.SIDECAR if is_sidecar else ContainerKind.INIT
        containers.append(container(f"init-{position}", cores, blocks, kind, position))
    for position, (cores, blocks) in enumerate(draw(st.lists(requests(), min_size=1, max_size=3))):
        containers.append(container(f"main-{position}", cores, blocks, ContainerKind.MAIN, position))
    return pod(name, *containers)


@st.composite
def nodes(draw: st.DrawFn) -> GpuInventory:
    """One to five GPUs, not all alike, some unhealthy, with some links."""
    count = draw(st.integers(1, 5))
    kinds = [LinkKind.NVLINK, LinkKind.PIX, LinkKind.PHB, LinkKind.SYS]
    links = [[Link(kind=LinkKind.SELF)] * count for _ in range(count)]
    for a in range(count):
        for b in range(a):
            kind = draw(st.sampled_from(kinds))
            links[a][b] = links[b][a] = Link(kind=kind, nvlinks=2 if kind is LinkKind.NVLINK else 0)
    gpus = tuple(
        replace(
            gpu,
            memory_mib=draw(st.sampled_from([8, 16, 24])) * 1024,
            health=draw(st.sampled_from([Health.HEALTHY] * 5 + [Health.UNHEALTHY])),
        )
        for gpu in inventory(count).gpus
    )
    return GpuInventory(gpus=gpus, topology=build_topology(links, [None] * count))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    found=nodes(),
    owners=st.integers(1, 6).flatmap(lambda n: st.tuples(*(pods(f"p{i}") for i in range(n)))),
    share_policy=st.sampled_from(["binpack", "spread"]),
    seed=st.integers(0, 10_000),
    hints=st.booleans(),
)
def test_the_agent_does_what_was_planned(
    found: GpuInventory, owners: tuple[Pod, ...], share_policy: str, seed: int, hints: bool
) -> None:
    """Every container of every pod on the same GPUs, with and without the extender's annotations; and what a pod has
    taken afterwards is what the plan charged."""
    node = Node(found, Policy(names=NAMES, share_policy=share_policy), seed)  # type: ignore[arg-type]
    policy = ClusterPolicy(names=NAMES, share_policy=share_policy)  # type: ignore[arg-type]
    for owner in owners:
        before = accounts(found, node.cache)
        planned = plan_pod(owner, before, found.topology, policy)
        if isinstance(planned, Refused) or _leaves_blocks_without_cores(owner):
            continue
        reported = dict(plan_annotations(planned, PREDICATE_GPU_INDEX_PREFIX)) if hints else {}
        admitted = node.admit(owner, reported)
        assert admitted == {c.name: c.gpus for c in planned.containers if c.gpus}
        charged = {charge.index: charge for charge in planned.charges}
        for gpu, after in zip(before, accounts(found, node.cache), strict=True):
            charge = charged.get(gpu.index, Charge(index=gpu.index))
            assert after.used_cores - gpu.used_cores == charge.cores
            assert after.used_blocks - gpu.used_blocks == charge.blocks


def _leaves_blocks_without_cores(owner: Pod) -> bool:
    """An init container's cores go on to a whole-GPU container, and its memory blocks, of which that one wants none, to a
    share after it. Where the kubelet then hands on the blocks first, the agent looks for the share on the init container's
    GPU, which is full: it refuses, or not, by the kubelet's order (docs/critique.md)."""
    has_share_before = False
    has_whole_between = False
    for one in owner.containers:
        cores = NAMES.wanted(one, ResourceKind.VCORE)
        if cores and has_whole_between:
            return True
        if one.kind is ContainerKind.INIT and 0 < cores < CORES_PER_GPU:
            has_share_before = True
        elif has_share_before and cores >= CORES_PER_GPU:
            has_whole_between = True
    return False


def planned(owner: Pod, found: GpuInventory | None = None, policy: ClusterPolicy = POLICY) -> PodPlan | Refused:
    found = found or inventory()
    return plan_pod(owner, accounts(found), found.topology, policy)


def test_containers_that_fit_alone_may_not_fit_together() -> None:
    """Three shares of 60 cores need three GPUs."""
    owner = pod("p", *(container(f"c{i}", 60, 10, position=i) for i in range(3)))
    outcome = planned(owner)
    assert isinstance(outcome, Refused) and outcome.reason is RefusalReason.FRAGMENTED
    assert outcome.detail.startswith("container c2: ")
    three = planned(owner, inventory(3))
    assert isinstance(three, PodPlan) and [c.gpus for c in three.containers] == [(0,), (1,), (2,)]


def test_what_an_init_container_holds_is_charged_once() -> None:
    """The main container takes it over and adds what it needs more."""
    owner = pod("p", container("init", 30, 10, ContainerKind.INIT), container("main", 50, 4))
    outcome = planned(owner)
    assert isinstance(outcome, PodPlan)
    assert outcome.charges == (Charge(index=0, cores=50, blocks=10),)


def test_only_main_containers_with_gpus_are_reported_to_the_agent() -> None:
    """The names are gpu-admission's: by position in spec.containers."""
    owner = pod(
        "p",
        container("init", 30, 10, ContainerKind.INIT),
        container("plain", position=0),
        container("pair", 200, 0, position=1),
    )
    outcome = planned(pod("q", *owner.containers[1:]))
    assert isinstance(outcome, PodPlan)
    assert plan_annotations(outcome, "x-") == {"x-1": "0,1"}


@pytest.mark.parametrize(("cores", "blocks"), [(150, 0), (0, 5), (30, 0)])
def test_a_request_that_no_node_can_serve_is_invalid(cores: int, blocks: int) -> None:
    """The agent would refuse it with the same reason."""
    outcome = planned(pod("p", container(cores=cores, blocks=blocks)))
    assert isinstance(outcome, Refused) and outcome.reason is RefusalReason.INVALID_REQUEST


def test_memory_alone_is_one_account_with_blocks() -> None:
    """GPUShare's units and memory blocks come from the same GPU's memory."""
    names = ResourceNames(gpu_mem="aliyun.com/gpu-mem")
    policy = ClusterPolicy(names=names)
    asks = ContainerSpec(name="units", kind=ContainerKind.MAIN, position=1, requests={"aliyun.com/gpu-mem": 20})
    share = ContainerSpec(
        name="share", kind=ContainerKind.MAIN, position=0, requests={VCORE_RESOURCE: 10, VMEMORY_RESOURCE: 40}
    )
    outcome = planned(pod("p", share, asks), policy=policy)
    assert isinstance(outcome, PodPlan)
    assert outcome.charges == (Charge(index=0, cores=10, blocks=40), Charge(index=1, units=20))
    alone = planned(pod("p", share, asks), inventory(1), policy=policy)
    assert isinstance(alone, Refused) and alone.reason is RefusalReason.NOT_ENOUGH_MEMORY
