"""Planning and checking of one container's devices."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.admission.allocation_cache import AllocationCache
from gpushare_agent.agent.admission.decisions.decide import Decision, check, offer_accounts, plan
from gpushare_agent.agent.admission.decisions.identity import Target
from gpushare_agent.agent.admission.decisions.ledger import Case, Ledger, Policy
from gpushare_agent.core.model.allocations import Allocation
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.model.pods import ContainerKind, Pod
from gpushare_agent.core.model.resources import ResourceKind
from tests.support_core import NAMES, allocation, container, ids, inventory, pod

POLICY = Policy(names=NAMES)
CORES, MEMORY = ResourceKind.VCORE, ResourceKind.VMEMORY


def ledger(target: Target, *held: Allocation, gpus: GpuInventory | None = None) -> Ledger:
    cache = AllocationCache()
    for one in held:
        cache.put(one)
    return cache.ledger(gpus or inventory(), without=target.key)


def serve(owner: Pod, name: str = "main") -> Target:
    found = owner.container(name)
    assert found is not None
    return Target(pod=owner, container=found)


NEW = serve(pod("new", container(cores=10, blocks=4)))


def planned(
    target: Target, kind: ResourceKind, available: list[str], facts: Ledger, must: tuple[str, ...] = ()
) -> Decision | Refused:
    case = Case(target, kind, available, facts, POLICY, must)
    return plan(case, offer_accounts(case))


def all_ids(gpus: int = 2, count: int = 100) -> list[str]:
    return [i for gpu in range(gpus) for i in ids(gpu, range(count))]


def test_a_share_gets_ids_of_one_gpu() -> None:
    """Binpack: the fullest GPU that fits, its lowest free IDs."""
    facts = ledger(NEW, allocation(pod("old"), "main", ids(1, range(30)), ids(1, range(10))))
    result = planned(NEW, CORES, [i for i in all_ids() if i not in ids(1, range(30))], facts)
    assert isinstance(result, Decision)
    assert result.gpus == (GpuUuid("GPU-1"),) and result.ids == tuple(ids(1, range(30, 40)))


def test_a_gpu_has_no_more_free_cores_than_the_kubelet_offers() -> None:
    """Devices of a pod that still ends are free for us but not for the kubelet."""
    target = serve(pod("new", container(cores=50, blocks=4)))
    result = planned(target, CORES, ids(0, range(40)) + ids(1, range(60)), ledger(target))
    assert isinstance(result, Decision) and result.gpus == (GpuUuid("GPU-1"),)


@pytest.mark.parametrize(
    ("owner", "name", "gpu"),
    [("old", "main", 2), ("new", "init", 1), ("new", "init", 0), ("new", "main", 0)],
    ids=["lost", "init", "the same", "own"],
)
def test_cores_that_are_not_offered_are_missed_whatever_else_is_held(owner: str, name: str, gpu: int) -> None:
    """As many as the ledger has of a lost GPU, of an init container's, which are offered again unless they are these, or of
    the container's own: the kubelet still has 60 of GPU 0."""
    first = container("init", cores=60, kind=ContainerKind.INIT)
    target = serve(pod("new", first, container(cores=50, blocks=4)))
    kind = ContainerKind.INIT if name == "init" else ContainerKind.MAIN
    facts = ledger(
        target, allocation(target.pod if owner == "new" else pod(owner), name, ids(gpu, range(60)), [], kind)
    )
    offered = [one for one in all_ids() if one not in ids(0, range(60))]
    accounts = offer_accounts(Case(target, CORES, offered, facts, POLICY))
    assert [account.free_cores for account in accounts] == [40, 100]


def test_memory_ids_are_counters() -> None:
    """When a GPU's own memory IDs are gone, any others do: the memory is charged to the GPU of the cores."""
    result = planned(NEW, MEMORY, ids(1, range(2)) + ids(0, range(1)) + ids(1, range(50, 60)), ledger(NEW))
    assert isinstance(result, Decision) and len(result.ids) == 4 and len(set(result.ids)) == 4


@pytest.mark.parametrize(
    ("cores", "blocks", "word"), [(150, 10, "150"), (250, 0, "250"), (0, 10, "vcuda-core"), (30, 0, "vcuda-memory")]
)
def test_requests_that_cannot_be_are_refused_with_what_is_valid(cores: int, blocks: int, word: str) -> None:
    """The text names the number or the resource that is wrong."""
    target = serve(pod("bad", container(cores=cores, blocks=blocks)))
    kind = CORES if cores else MEMORY
    result = planned(target, kind, all_ids(), ledger(target))
    assert isinstance(result, Refused) and result.reason is RefusalReason.INVALID_REQUEST
    assert word in result.detail


def test_allocated_ids_bind_the_gpu() -> None:
    """What the kubelet allocated counts, not what was planned."""
    result = check(Case(NEW, CORES, ids(1, range(10)), ledger(NEW), POLICY), (GpuUuid("GPU-0"),))
    assert result == (GpuUuid("GPU-1"),)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (ids(0, range(9)), RefusalReason.INVALID_REQUEST),
        (ids(0, range(9)) + ids(0, range(1)), RefusalReason.INVALID_REQUEST),
        ([*ids(0, range(9)), "GPU-9::1"], RefusalReason.UNKNOWN_DEVICE),
        ([*ids(0, range(9)), "GPU-0::100"], RefusalReason.UNKNOWN_DEVICE),
        ([*ids(0, range(9)), "nonsense"], RefusalReason.UNKNOWN_DEVICE),
        (ids(0, range(5)) + ids(1, range(5)), RefusalReason.WRONG_GPUS),
    ],
)
def test_wrong_ids_are_refused(given: list[str], reason: RefusalReason) -> None:
    """Too few, twice, of no GPU, beyond the GPU, of two GPUs."""
    result = check(Case(NEW, CORES, given, ledger(NEW), POLICY), ())
    assert isinstance(result, Refused) and result.reason is reason
    assert "default/new" in result.detail


def test_ids_of_a_live_container_are_refused() -> None:
    """Whatever the kubelet believes, no ID is given twice."""
    facts = ledger(NEW, allocation(pod("old"), "main", ids(0, range(5)), []))
    result = check(Case(NEW, CORES, ids(0, range(10)), facts, POLICY), ())
    assert isinstance(result, Refused) and result.reason is RefusalReason.DEVICE_IN_USE


def test_memory_is_charged_to_the_gpu_of_the_cores() -> None:
    """Memory IDs of the other GPU do not help a full GPU."""
    target = serve(pod("new", container(cores=10, blocks=60)))
    old = allocation(pod("old"), "main", ids(0, range(5)), ids(1, range(50)))
    mine = allocation(target.pod, "main", ids(0, range(10, 20)), [])
    result = check(
        Case(target, MEMORY, ids(1, range(50, 96)) + ids(0, range(14)), ledger(target, old, mine), POLICY), ()
    )
    assert isinstance(result, Refused) and result.reason is RefusalReason.NOT_ENOUGH_MEMORY
    assert "46 memory blocks (11.5 GiB) free" in result.detail


def test_a_whole_gpu_must_be_free() -> None:
    """All hundred IDs do not help while its memory is charged."""
    target = serve(pod("new", container(cores=100)))
    whole = ids(0, range(100))
    assert check(Case(target, CORES, whole, ledger(target), POLICY), ()) == (GpuUuid("GPU-0"),)
    waiting = replace(allocation(pod("old"), "main", [], ids(0, range(3))), gpus=(GpuUuid("GPU-0"),))
    result = check(Case(target, CORES, whole, ledger(target, waiting), POLICY), ())
    assert isinstance(result, Refused) and result.reason is RefusalReason.NOT_ENOUGH_CORES


def chain(init_cores: int, main_cores: int, init_blocks: int = 2, main_blocks: int = 4) -> Pod:
    return pod(
        "chain",
        container("i", cores=init_cores, blocks=init_blocks, kind=ContainerKind.INIT),
        container("m", cores=main_cores, blocks=main_blocks),
    )


def test_an_init_container_goes_where_its_heir_fits() -> None:
    """Its IDs are handed on, so the main container's share must fit the same GPU."""
    target = serve(chain(10, 60), "i")
    facts = ledger(target, allocation(pod("old"), "main", ids(0, range(50)), ids(0, range(4))))
    result = planned(target, CORES, [i for i in all_ids() if i not in ids(0, range(50))], facts)
    assert isinstance(result, Decision) and result.gpus == (GpuUuid("GPU-1"),)


def test_the_heir_stays_on_the_init_containers_gpu() -> None:
    """The kubelet includes the init container's IDs; the rest comes from the same GPU."""
    owner = chain(10, 60)
    target = serve(owner, "m")
    init = allocation(owner, "i", ids(1, range(10)), ids(1, range(2)), ContainerKind.INIT)
    facts = ledger(target, init, allocation(pod("old"), "main", ids(0, range(40)), ids(0, range(4))))
    must = tuple(ids(1, range(10)))
    result = planned(target, CORES, [i for i in all_ids() if i not in ids(0, range(40))], facts, must)
    assert isinstance(result, Decision) and result.gpus == (GpuUuid("GPU-1"),)
    assert set(result.ids) == set(ids(1, range(60)))
    memory_first = planned(target, MEMORY, all_ids(count=96), facts, tuple(ids(1, range(2))))
    assert isinstance(memory_first, Decision) and memory_first.gpus == (GpuUuid("GPU-1"),)


def test_an_init_container_with_more_gpus_than_its_heir_is_refused() -> None:
    """The kubelet would hand on IDs of both GPUs at random."""
    target = serve(chain(200, 100, 0, 0), "i")
    result = planned(target, CORES, all_ids(), ledger(target))
    assert isinstance(result, Refused) and result.reason is RefusalReason.INVALID_REQUEST
    assert "init container i" in result.detail


def test_offers_that_are_mostly_taken_are_refused_with_the_numbers() -> None:
    """Memory IDs run out when the kubelet offers what others hold."""
    facts = ledger(NEW, allocation(pod("old"), "main", ids(1, range(5)), ids(0, range(10))))
    result = planned(NEW, MEMORY, ids(0, range(12)), facts)
    assert (
        isinstance(result, Refused) and result.reason is RefusalReason.DEVICE_IN_USE and "2 of the 12" in result.detail
    )


def test_a_gpu_with_as_many_shares_as_one_can_serve_takes_no_more() -> None:
    """MPS has a bound on its clients: the next share goes to another GPU, and where there is none the text says why. Init
    containers are over before the others start, and whole GPUs go on."""
    policy = replace(POLICY, max_shares_of_gpu=2)
    held = [allocation(pod(f"p{n}"), "main", ids(0, range(n, n + 1)), ids(0, range(n, n + 1))) for n in range(2)]
    init = allocation(pod("i"), "init", ids(1, range(1)), ids(1, range(1)), ContainerKind.INIT)

    def place(facts: Ledger, which: Target = NEW) -> Decision | Refused:
        case = Case(which, CORES, all_ids(), facts, policy)
        return plan(case, offer_accounts(case))

    found = place(ledger(NEW, *held, init))
    assert isinstance(found, Decision) and found.gpus == (GpuUuid("GPU-1"),)
    more = [allocation(pod(f"q{n}"), "main", ids(1, range(n, n + 1)), ids(1, range(n, n + 1))) for n in range(2)]
    refused = place(ledger(NEW, *held, *more))
    assert isinstance(refused, Refused)
    assert "2 GPUs count as full" in refused.detail and "mps.max_clients" in refused.detail
    whole = serve(pod("whole", container(cores=100)))
    assert isinstance(place(ledger(whole, *held), whole), Decision)
