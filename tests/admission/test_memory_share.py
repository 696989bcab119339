"""GPUShare's resource: placement and checks of memory shares, and which IDs are withheld from the kubelet."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.admission.allocation_cache import AllocationCache
from gpushare_agent.agent.admission.decisions.decide import Decision, check, offer_accounts, plan
from gpushare_agent.agent.admission.decisions.identity import Target
from gpushare_agent.agent.admission.decisions.ledger import Case, Ledger, Policy
from gpushare_agent.agent.admission.device_tables import Missing, offered_ids, withheld
from gpushare_agent.core.model.allocations import Allocation, Charge, ContainerKey
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.names import PREDICATE_GPU_INDEX_PREFIX, DeviceId, GpuUuid, device_id
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.core.model.resources import ResourceKind, ResourceNames
from gpushare_agent.core.placement.gpu_account import account_of
from tests.support_core import allocation, container, ids, inventory, pod

GPU_MEM = "aliyun.com/gpu-mem"
NAMES = ResourceNames(gpu_mem=GPU_MEM)
GPUS = inventory(2, 24 * 1024)
POLICY = Policy(names=NAMES)


def wants(units: int, **more: int) -> ContainerSpec:
    return ContainerSpec(name="main", kind=ContainerKind.MAIN, position=0, requests={GPU_MEM: units, **more})


def units_of(gpu: int, numbers: range) -> frozenset[DeviceId]:
    return frozenset(device_id(GpuUuid(f"GPU-{gpu}"), n) for n in numbers)


def holds(owner: Pod, gpu: int, numbers: range) -> Allocation:
    return Allocation(
        key=ContainerKey(owner.uid, "main"),
        namespace="default",
        pod_name=owner.name,
        kind=ContainerKind.MAIN,
        gpus=(GpuUuid(f"GPU-{gpu}"),),
        ids={ResourceKind.GPU_MEM: units_of(gpu, numbers)},
    )


def ledger_of(*held: Allocation) -> Ledger:
    cache = AllocationCache()
    for one in held:
        cache.put(one)
    return cache.ledger(GPUS)


def planned(owner: Pod, ledger: Ledger, *, hint: tuple[int, ...] = (), policy: Policy = POLICY) -> Decision | Refused:
    annotations = {PREDICATE_GPU_INDEX_PREFIX + "0": ",".join(map(str, hint))}
    target = Target(pod=replace(owner, annotations=annotations), container=owner.containers[0])
    everything = sorted(units_of(0, range(24)) | units_of(1, range(24)))
    case = Case(target, ResourceKind.GPU_MEM, everything, ledger, policy)
    return plan(case, offer_accounts(case))


def test_the_fullest_gpu_that_fits_is_taken_and_its_ids_are_preferred() -> None:
    """The emptiest with spread; another with a hint that fits, not with one that does not."""
    a, b = pod("a", wants(6)), pod("b", wants(10))
    ledger = ledger_of(holds(pod("x", wants(12)), 1, range(12)))
    found = planned(a, ledger)
    assert isinstance(found, Decision) and found.gpus == ("GPU-1",) and set(found.ids) == units_of(1, range(12, 18))
    spread = planned(a, ledger, policy=replace(POLICY, share_policy="spread"))
    assert isinstance(spread, Decision) and spread.gpus == ("GPU-0",)
    hinted = planned(a, ledger, hint=(0,))
    assert isinstance(hinted, Decision) and hinted.gpus == ("GPU-0",)
    full = ledger_of(holds(pod("x", wants(20)), 1, range(20)))
    unfit = planned(b, full, hint=(1,))
    assert isinstance(unfit, Decision) and unfit.gpus == ("GPU-0",)


def test_memory_is_one_account_for_both_resources_and_whole_gpus() -> None:
    """vmemory blocks of shares, gpu-mem units and whole GPUs take from the same GPU."""
    share, whole = pod("share", container(cores=30, blocks=40)), pod("whole", container(cores=100))
    held = (
        allocation(share, "main", ids(0, range(30)), ids(0, range(40))),  # 10 GiB of GPU 0
        allocation(whole, "main", ids(1, range(100)), []),
    )
    ledger = ledger_of(*held)
    found = planned(pod("a", wants(14)), ledger)
    assert isinstance(found, Decision) and found.gpus == ("GPU-0",)
    refused = planned(pod("a", wants(15)), ledger)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.NOT_ENOUGH_MEMORY
    assert f"15 {GPU_MEM} (15 GiB)" in refused.detail and "14 units (14 GiB) free" in refused.detail


@pytest.mark.parametrize(
    ("spec", "reason", "text"),
    [
        (wants(25), RefusalReason.NOT_ENOUGH_MEMORY, "the largest GPU has 24 GiB in all"),
        (wants(2**40), RefusalReason.NOT_ENOUGH_MEMORY, "the largest GPU has 24 GiB in all"),
        (wants(4, **{NAMES.vcore: 30}), RefusalReason.INVALID_REQUEST, "Ask for one or the other"),
        (wants(4, **{NAMES.vmemory: 3}), RefusalReason.INVALID_REQUEST, "Ask for one or the other"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused_with_what_is_valid(
    spec: ContainerSpec, reason: RefusalReason, text: str
) -> None:
    """Whatever is free; by both resources' calls."""
    refused = planned(pod("a", spec), ledger_of())
    assert isinstance(refused, Refused) and refused.reason is reason and text in refused.detail


def test_a_node_that_does_not_share_gives_no_memory_shares() -> None:
    """share_mode off."""
    refused = planned(pod("a", wants(4)), ledger_of(), policy=replace(POLICY, share_mode=False))
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.SHARING_DISABLED


def test_units_that_are_free_by_number_but_not_by_memory_are_refused() -> None:
    """The kubelet counts IDs; the account counts MiB."""
    share = pod("share", container(cores=30, blocks=80))
    ledger = ledger_of(allocation(share, "main", ids(0, range(30)), ids(0, range(80))))
    spec = wants(5)
    target = Target(pod=pod("a", spec), container=spec)
    refused = check(Case(target, ResourceKind.GPU_MEM, sorted(units_of(0, range(5))), ledger, POLICY), ())
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.NOT_ENOUGH_MEMORY
    fits = wants(4)
    target = Target(pod=pod("a", fits), container=fits)
    assert check(Case(target, ResourceKind.GPU_MEM, sorted(units_of(0, range(4))), ledger, POLICY), ()) == ("GPU-0",)


def test_a_block_taken_in_part_is_taken() -> None:
    """Sizes that do not divide each other."""
    names = ResourceNames(gpu_mem=GPU_MEM, memory_block_mib=300, gpu_mem_unit_mib=1024)
    empty = account_of(GPUS.gpus[0], names)
    assert [replace(empty, used=Charge(units=units)).blocks_of_units for units in (0, 1, 3)] == [0, 4, 11]
    assert replace(empty, used=Charge(blocks=1, units=2)).free_units == (24 * 1024 - 300) // 1024 - 2


def kept_back(kind: ResourceKind, *held: Allocation, no_shares: bool = False) -> Mapping[str, int]:
    """How many IDs of each GPU are withheld."""
    ledger = ledger_of(*held)
    gpus = ledger.accounts(POLICY.names)
    offered = {gpu.uuid: offered_ids(gpu.uuid, NAMES.units(gpu, kind)) for gpu in GPUS.gpus}
    found = withheld(kind, gpus, offered, ledger.holders[kind], NAMES, borrowed={}, missing=Missing(shares=no_shares))
    assert no_shares or not any(found & one.ids_of(kind) for one in held)
    counts: dict[str, int] = {}
    for device in found:
        counts[device.partition("::")[0]] = counts.get(device.partition("::")[0], 0) + 1
    return counts


def test_the_kubelet_is_reported_what_the_account_cannot_pay_for() -> None:
    """Each resource by what the others have taken; what is held stays; a whole GPU has no units."""
    share = allocation(pod("s", container(cores=30, blocks=40)), "main", ids(0, range(30)), ids(0, range(40)))
    whole = allocation(pod("w", container(cores=100)), "main", ids(1, range(100)), [])
    memory = holds(pod("m", wants(6)), 0, range(6))
    assert kept_back(ResourceKind.GPU_MEM, share, whole, memory) == {"GPU-0": 10, "GPU-1": 24}
    assert kept_back(ResourceKind.VMEMORY, share, memory) == {"GPU-0": 24}
    assert kept_back(ResourceKind.VCORE, share, whole, memory) == {}
    assert kept_back(ResourceKind.GPU_MEM) == kept_back(ResourceKind.VMEMORY) == {}


def test_without_the_daemon_of_the_isolation_no_memory_is_offered_but_cores_for_whole_gpus() -> None:
    """A share needs memory, a whole GPU does not."""
    assert kept_back(ResourceKind.VMEMORY, no_shares=True) == {"GPU-0": 96, "GPU-1": 96}
    assert kept_back(ResourceKind.GPU_MEM, no_shares=True) == {"GPU-0": 24, "GPU-1": 24}
    assert kept_back(ResourceKind.VCORE, no_shares=True) == {}
