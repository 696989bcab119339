"""The agent's admission on device IDs, for comparison with the extender's planning on counts; random nodes and pods."""

from __future__ import annotations

import random
from itertools import combinations

from hypothesis import strategies as st
from msgspec.structs import replace

from gpushare_agent.agent.admission.allocation_cache import AllocationCache
from gpushare_agent.agent.admission.decisions.decide import Decision, check, offer_accounts, plan
from gpushare_agent.agent.admission.decisions.identity import Target
from gpushare_agent.agent.admission.decisions.ledger import Case, Policy
from gpushare_agent.agent.admission.device_tables import unit_ids
from gpushare_agent.core.model.allocations import NO_CHARGE, Allocation
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.gpus import GpuInventory, Health, Link, LinkKind, Topology
from gpushare_agent.core.model.names import CORES_PER_GPU, DeviceId, GpuUuid, device_id
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.core.model.resources import KINDS, ResourceKind, ResourceNames, replica_layout
from gpushare_agent.core.placement import GpuAccount
from gpushare_agent.core.placement.gpu_account import account_of
from gpushare_agent.core.placement.topology import build_topology
from tests.gpus.support_gpus import read_topology
from tests.support_core import GPU_MEM_NAMES, NAMES, container, inventory, mig_instance, pod

Machine = tuple[Topology, list[GpuAccount]]
"""What the GPUs of a node have free, and their links."""


def accounts(
    found: GpuInventory, cache: AllocationCache | None = None, names: ResourceNames = NAMES
) -> list[GpuAccount]:
    """The GPUs with what the cache says is allocated."""
    charges = {} if cache is None else cache.charges()
    return [account_of(gpu, names, charges.get(gpu.uuid, NO_CHARGE)) for gpu in found.gpus]


class Node:
    """The agent's real decisions on device IDs, asked as the kubelet asks: in any order of resources, init containers'
    devices handed on, IDs drawn at random from what is preferred."""

    def __init__(self, found: GpuInventory, policy: Policy, seed: int) -> None:
        self.found = found
        self.policy = policy
        self.cache = AllocationCache()
        self._random = random.Random(seed)
        self._taken: dict[ResourceKind, set[str]] = {kind: set() for kind in KINDS}

    def admit(self, owner: Pod, hints: dict[str, str] | None = None) -> Refused | dict[str, tuple[int, ...]]:
        """GPU indexes by container, or the first refusal."""
        owner = replace(owner, annotations={**owner.annotations, **(hints or {})})
        index = {gpu.uuid: gpu.index for gpu in self.found.gpus}
        reusable: dict[ResourceKind, set[str]] = {}
        for one in owner.containers:
            target = Target(pod=owner, container=one)
            kinds = list(self.policy.names.asked(one))
            self._random.shuffle(kinds)
            for kind in kinds:
                refused = self._allocate(target, kind, reusable.get(kind, set()))
                if refused is not None:
                    self.release(owner)
                    return refused
            allocation = self.cache.get(target.key)
            for kind in kinds:
                ids = set(allocation.ids_of(kind)) if allocation is not None else set()
                if one.kind is ContainerKind.INIT:
                    reusable.setdefault(kind, set()).update(ids)
                else:
                    reusable.setdefault(kind, set()).difference_update(ids)
        return {
            key.container: tuple(sorted(index[gpu] for gpu in self.cache.view()[key].gpus))
            for key in sorted(self.cache.view())
            if key.pod_uid == owner.uid
        }

    def release(self, owner: Pod) -> None:
        """The pod has ended, for the kubelet and for the agent."""
        for allocation in self.cache.release_pod(owner.uid):
            for kind, ids in self._taken.items():
                ids -= allocation.ids_of(kind)

    def _every(self, target: Target, kind: ResourceKind) -> list[DeviceId]:
        names = self.policy.names
        if kind is not ResourceKind.GPU:
            return [device_id(gpu.uuid, n) for gpu in self.found.gpus for n in range(names.units(gpu, kind))]
        by_gpu = unit_ids(self.found.gpus, names.name_in(target.container, kind), names.nvidia, ())
        return [device for ids in by_gpu.values() for device in ids]

    def _allocate(self, target: Target, kind: ResourceKind, reusable: set[str]) -> Refused | None:
        count = self.policy.names.asked(target.container)[kind]
        chosen = self._random.sample(sorted(reusable), min(count, len(reusable)))
        planned: tuple[GpuUuid, ...] = ()
        ledger = self.cache.ledger(self.found, without=target.key)
        if len(chosen) < count:
            every = self._every(target, kind)
            available = [device for device in every if device not in self._taken[kind]]
            if len(available) < count - len(chosen):
                return Refused(reason=RefusalReason.NOT_ENOUGH_CORES, detail="the kubelet has too few")
            available += chosen  # as the kubelet does
            case = Case(target, kind, available, ledger, replace(self.policy, node_name="node"), chosen)
            outcome = plan(case, offer_accounts(case))
            if isinstance(outcome, Refused):
                return outcome
            assert isinstance(outcome, Decision)
            planned = outcome.gpus
            chosen += [device for device in outcome.ids if device not in chosen]
        else:
            planned = next(
                (a.gpus for a in self.cache.of_pod(target.pod.uid) if a.kind is ContainerKind.INIT and a.gpus), ()
            )
        gpus = check(Case(target, kind, chosen, ledger, self.policy), planned)
        if isinstance(gpus, Refused):
            return gpus
        old = self.cache.get(target.key)
        self._taken[kind].update(chosen)
        self.cache.put(
            Allocation(
                key=target.key,
                namespace=target.pod.namespace,
                pod_name=target.pod.name,
                kind=target.container.kind,
                gpus=gpus,
                ids={**(old.ids if old is not None else {}), kind: frozenset(chosen)},  # type: ignore[arg-type]
                is_whole=self.policy.names.asked(target.container).get(ResourceKind.VCORE, 0) >= CORES_PER_GPU
                if kind is not ResourceKind.GPU
                else all(replica_layout(device).is_whole for device in chosen),
                gpu_resource=self.policy.names.name_in(target.container, kind),
            )
        )
        return None


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
def pods_with_units(draw: st.DrawFn, name: str) -> Pod:
    """As `pods`; some of the containers ask for gpu-mem units in place of cores, and some pods leave GPUs out."""
    owner = draw(pods(name))
    containers = []
    for one in owner.containers:
        units = draw(st.sampled_from([0, 0, 1, 3, 6, 8, 17]))
        containers.append(replace(one, requests={GPU_MEM_NAMES.gpu_mem: units}) if units else one)
    left_out = draw(st.sampled_from(["", "", "", "GPU-0", "GPU-1,GPU-2"]))
    return replace(owner, containers=tuple(containers), annotations={"nvidia.com/nouse-gpuuuid": left_out})


LINKS = st.sampled_from(
    [Link(kind=kind) for kind in LinkKind if kind > LinkKind.NVLINK]
    + [Link(kind=LinkKind.NVLINK, nvlinks=count) for count in (1, 2, 12)]
)
KNOWN = st.sampled_from(["p40-x7-two-switches", "v100-x8-cube-mesh", "a100-pcie-x8-nvlink-pairs", "t4-x4-two-sockets"])


@st.composite
def random_topologies(draw: st.DrawFn, most: int = 7) -> Topology:
    """Also such that no machine has."""
    size = draw(st.integers(1, most))
    links = [[Link(kind=LinkKind.SELF)] * size for _ in range(size)]
    for a, b in combinations(range(size), 2):
        links[a][b] = links[b][a] = draw(LINKS)
    return build_topology(links, draw(st.lists(st.sampled_from([None, 0, 1]), min_size=size, max_size=size)))


topologies = KNOWN.map(read_topology) | random_topologies()


@st.composite
def nodes(draw: st.DrawFn, *, with_instances: bool = False) -> GpuInventory:
    """One to five GPUs, not all alike, some unhealthy, with some links; on request some are MIG instances."""
    topology = draw(random_topologies(5))
    gpus = tuple(
        replace(
            gpu,
            memory_mib=draw(st.sampled_from([8, 16, 24])) * 1024,
            health=draw(st.sampled_from([Health.HEALTHY] * 5 + [Health.UNHEALTHY])),
            mig=mig_instance(gpu.index, 9, gpu.index).mig if with_instances and draw(st.booleans()) else None,
        )
        for gpu in inventory(len(topology.links)).gpus
    )
    return GpuInventory(gpus=gpus, topology=topology)


def leaves_blocks_without_cores(owner: Pod) -> bool:
    """An init container's cores go on to another container, and its memory blocks, of which that one wants none or fewer, to
    a share after it. Where the kubelet then hands on the blocks first, the agent looks for the share on the init container's
    GPU, which is full: it refuses, or not, by the kubelet's order (docs/explanation/critique.md)."""
    cores_left = blocks_left = 0
    has_share_before = False
    has_whole_between = False
    for one in owner.containers:
        cores, blocks = (NAMES.asked(one).get(kind, 0) for kind in (ResourceKind.VCORE, ResourceKind.VMEMORY))
        if cores and (has_whole_between or (blocks_left and not cores_left)):
            return True
        if one.kind is ContainerKind.INIT and 0 < cores < CORES_PER_GPU:
            has_share_before = True
            cores_left, blocks_left = max(cores, cores_left), max(blocks, blocks_left)
        elif has_share_before and cores >= CORES_PER_GPU:
            has_whole_between = True
        elif one.kind is not ContainerKind.INIT:
            cores_left, blocks_left = max(0, cores_left - cores), max(0, blocks_left - blocks)
    return False
