"""The ledger of resized shares: whatever comes, grows, shrinks, restarts and ends, no GPU is promised beyond what it has."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from msgspec.structs import replace

from gpushare_agent.agent.admission.allocation_cache import AllocationCache
from gpushare_agent.agent.admission.decisions.resize import DesiredSize, ResizePolicy, decide_resize, enforced
from gpushare_agent.agent.admission.device_tables import offered_ids, withheld
from gpushare_agent.agent.admission.resizing import GrowthAccounts
from gpushare_agent.agent.isolation import ISOLATIONS
from gpushare_agent.agent.isolation.request import Follows
from gpushare_agent.core.model.allocations import NO_CHARGE, Allocation, Charge, ContainerKey, ResizedShare, ShareSize
from gpushare_agent.core.model.isolation import ResizeMode
from gpushare_agent.core.model.names import CORES_PER_GPU, GpuUuid
from gpushare_agent.core.model.pods import ContainerKind
from gpushare_agent.core.model.resources import ResourceKind
from gpushare_agent.core.node_report.annotations import allocations_by_pod
from gpushare_agent.core.placement import GpuAccount
from tests.support_core import NAMES, allocation, container, ids, inventory, pod, used_blocks, used_cores
from tests.support_node import node_of

MEMORY_LIVE = replace(ISOLATIONS["vcuda"], memory_follows=Follows.RUNNING_PROCESSES)
"""Whose memory binds running processes, its cores those that start later."""
BLOCKS = 16
GPUS = inventory(2, BLOCKS * NAMES.memory_block_mib)
FREE = ResizePolicy(names=NAMES, mode=ResizeMode.FREE_CAPACITY)
KINDS = (ResourceKind.VCORE, ResourceKind.VMEMORY)


def accounts(cache: AllocationCache) -> list[GpuAccount]:
    """As new containers see them."""
    return cache.ledger(GPUS).accounts(NAMES)


def charged(cache: AllocationCache) -> GrowthAccounts:
    return GrowthAccounts(node_of(GPUS, cache=cache))


def charged_for_others(cache: AllocationCache, key: ContainerKey) -> tuple[int, int]:
    """Cores and blocks of the share's GPU, counted in a cache that never had the share."""
    other, gpu = AllocationCache(), next(one.gpus[0] for one in cache if one.key == key)
    for one in cache:
        if one.key != key:
            other.put(one)
    for share in cache.resized.values():
        if share.key != key:
            other.charge(share)
    charge = other.charges_for_growth().get(gpu, NO_CHARGE)
    return charge.cores, charge.blocks


class Node(RuleBasedStateMachine):
    """The kubelet's IDs, the file on the disk, and what each container's processes may use by their isolation."""

    containers = Bundle("containers")

    def __init__(self) -> None:
        super().__init__()
        self.cache = AllocationCache()
        self.saved: dict[ContainerKey, ResizedShare] = {}
        self.kubelet: dict[ContainerKey, Allocation] = {}
        self.may_use: dict[ContainerKey, ShareSize] = {}
        self.instances: dict[ContainerKey, int] = {}
        self.made = 0

    def healthy_ids(self, kind: ResourceKind) -> list[str]:
        """Those that ListAndWatch offers and the kubelet has not handed out."""
        holders = {kind: self.cache.holders(kind) for kind in NAMES.table}
        offered = {gpu.uuid: offered_ids(gpu.uuid, NAMES.units(gpu, kind)) for gpu in GPUS.gpus}
        borrowed = {gpu: charge.count(kind) for gpu, charge in self.cache.borrowed().items()}
        kept_back = withheld(kind, accounts(self.cache), offered, holders[kind], NAMES, borrowed=borrowed)
        return [
            device
            for devices in offered.values()
            for device in devices
            if device not in kept_back and device not in self.cache.holders(kind)
        ]

    @rule(target=containers, gpu=st.integers(0, 1), cores=st.integers(1, 60), blocks=st.integers(1, 10))
    def admit(self, gpu: int, cores: int, blocks: int) -> object:
        """Where the GPU's account has it free, and the kubelet has healthy IDs."""
        account = accounts(self.cache)[gpu]
        offered = [device for device in self.healthy_ids(ResourceKind.VCORE) if device.startswith(f"GPU-{gpu}::")]
        counters = self.healthy_ids(ResourceKind.VMEMORY)
        if account.free_cores < cores or account.free_blocks < blocks or len(offered) < cores or len(counters) < blocks:
            return multiple()
        self.made += 1
        name = f"pod-{self.made}"
        made = allocation(pod(name, container()), "main", offered[:cores], counters[-blocks:])
        self.cache.put(made)
        self.kubelet[made.key] = made
        self.may_use[made.key] = made.allocated_size
        self.instances[made.key] = 1
        return made.key

    @rule(
        keys=st.lists(containers, min_size=1, max_size=4, unique=True),
        cores=st.none() | st.integers(1, 110),
        memory=st.none() | st.integers(1, 20),
    )
    def charge(self, keys: list[ContainerKey], cores: int | None, memory: int | None) -> None:
        """As the annotations ask, one share after the other; nothing is granted yet."""
        decided = charged(self.cache)
        for key in keys:
            own, known = self.cache.get(key), self.cache.resized.get(key)
            if own is None:
                continue
            account = decided.without(own)
            assert account is not None
            assert (account.used.cores, account.used.blocks) == charged_for_others(self.cache, key)
            wanted = DesiredSize(cores=cores, memory=memory)
            outcome = decide_resize(own, wanted, known, account, MEMORY_LIVE, FREE)
            if isinstance(outcome, ResizedShare):
                decided.charge(outcome)

    @rule()
    def save_and_grant(self) -> None:
        self.saved = dict(self.cache.resized)
        for key in self.saved:
            if self.cache.get(key) is not None:
                self.cache.resize(key)

    @rule(key=containers, uses_no_more=st.booleans())
    def enforce(self, key: ContainerKey, uses_no_more: bool) -> None:
        """What is granted is enforced: its memory binds running processes, its cores those that start later. Memory that
        they have by then stays theirs."""
        own, share = self.cache.get(key), self.cache.resized.get(key)
        if own is None:
            return
        before = self.may_use[key]
        memory = own.size.memory if uses_no_more else max(before.memory, own.size.memory)
        self.may_use[key] = ShareSize(cores=max(before.cores, own.size.cores), memory=memory)
        if share is None or own.resized_to != share.target:
            return
        instance = str(self.instances[key])
        new = enforced(share, MEMORY_LIVE, instance, uses_no_more=uses_no_more)
        if new.is_over:
            self.cache.forget_resized(key)
        else:
            self.cache.charge(new)

    @rule(key=containers)
    def restart_container(self, key: ContainerKey) -> None:
        """Every process is new, and begins with what the isolation has by now."""
        own = self.cache.get(key)
        if own is not None:
            self.instances[key] += 1
            self.may_use[key] = own.size

    @rule(key=consumes(containers))
    def end(self, key: ContainerKey) -> None:
        for of_key in (self.kubelet, self.may_use, self.instances):
            of_key.pop(key, None)  # type: ignore[attr-defined]
        self.cache.release(key)

    @rule(is_listed=st.booleans())
    def restart_agent(self, is_listed: bool) -> None:
        """Between any two steps, also before the kubelet's records show any pod under its UID."""
        self.cache = AllocationCache()
        unnamed = {
            key: replace(one, key=ContainerKey(f"unnamed:{key.pod_uid}", "main")) for key, one in self.kubelet.items()
        }  # type: ignore[arg-type]
        for key, one in self.kubelet.items():
            self.cache.put(one if is_listed else unnamed[key])
        self.cache.restore_resized(self.saved.values())
        self.check()
        for key, one in self.kubelet.items():
            self.cache.release(unnamed[key].key)
            self.cache.put(one)
        for key in self.saved:
            if key not in self.kubelet:
                self.cache.forget_resized(key)

    @invariant()
    def check(self) -> None:
        for gpu in GPUS.gpus:
            here = [key for key, one in self.kubelet.items() if one.gpus == (gpu.uuid,)]
            assert sum(self.may_use[key].cores for key in here) <= CORES_PER_GPU
            assert sum(self.may_use[key].memory for key in here) <= BLOCKS
        for kind, total in zip(KINDS, (CORES_PER_GPU, BLOCKS), strict=True):
            used = used_cores(self.cache) if kind is ResourceKind.VCORE else used_blocks(self.cache)
            # A share in the file whose pod has ended counts until the pods are listed: too much, never too little.
            is_known = self.cache.resized.keys() <= self.kubelet.keys()
            assert not is_known or all(count <= total for count in used.values())
            assert len(self.healthy_ids(kind)) <= sum(max(0, total - used.get(gpu.uuid, 0)) for gpu in GPUS.gpus)

    @invariant()
    def check_reported(self) -> None:
        """What the node's object says of the pods adds up to what new containers see as used."""
        if not self.kubelet or any(self.cache.get(key) is None for key in self.kubelet):
            return
        differences, charged = self.cache.charge_differences(), self.cache.charges_of_pod
        pods = allocations_by_pod(self.cache, GPUS.gpus, lambda uid: None, NAMES, differences)
        assert pods == allocations_by_pod(self.cache, GPUS.gpus, lambda uid: None, NAMES, differences, charged)
        for position, used in enumerate((used_cores(self.cache), used_blocks(self.cache))):
            for gpu in GPUS.gpus:
                shown = sum((*one.gpus.get(gpu.index, ()), 0, 0)[position] for one in pods.values())
                assert shown == used.get(gpu.uuid, 0)


TestNode = Node.TestCase
TestNode.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


# --- single cases ---


def share(of: Allocation, target: tuple[int, int], charged: tuple[int, int]) -> ResizedShare:
    return ResizedShare(
        key=of.key,
        gpu=of.gpus[0],
        kind=ResourceKind.VMEMORY,
        allocated=of.allocated_size,
        target=ShareSize(cores=target[0], memory=target[1]),
        charged=ShareSize(cores=charged[0], memory=charged[1]),
    )


ONE = pod("one", container())
FIRST = allocation(ONE, "main", ids(0, range(60)), ids(0, range(8)))
GPU = GpuUuid("GPU-0")


def test_an_init_container_keeps_its_ids_booked() -> None:
    """It runs again with its whole share when the pod's sandbox is made again."""
    cache = AllocationCache()
    cache.put(FIRST)
    cache.put(allocation(ONE, "init", ids(0, range(40)), ids(0, range(8)), ContainerKind.INIT))
    cache.charge(share(FIRST, (20, 2), (20, 2)))
    assert cache.charges_for_growth() == {GPU: Charge(cores=40, blocks=8, shares=1)}
    assert (account := charged(cache).without(FIRST)) is not None
    assert (account.used.cores, account.used.blocks) == charged_for_others(cache, FIRST.key) == (40, 8)


def test_a_size_is_lost_with_its_gpu_and_its_container() -> None:
    """The kubelet's records are the truth: what they show on another GPU is another share."""
    cache = AllocationCache()
    cache.put(FIRST)
    cache.charge(share(FIRST, (20, 2), (60, 8)))
    cache.resize(FIRST.key)
    cache.put(FIRST)
    assert (known := cache.get(FIRST.key)) is not None and known.size == ShareSize(cores=20, memory=2)
    on_other = {**FIRST.ids, ResourceKind.VCORE: frozenset(ids(1, range(60)))}
    moved = replace(FIRST, ids=on_other, gpus=(GpuUuid("GPU-1"),))  # type: ignore[arg-type]
    cache.put(moved)
    assert not cache.resized and (known := cache.get(FIRST.key)) is not None and known.resized_to is None
    cache.charge(replace(share(moved, (20, 2), (60, 8)), gpu=GpuUuid("GPU-1")))
    cache.release(FIRST.key)
    assert not cache.resized
