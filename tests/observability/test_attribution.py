"""Attribution: by container ID, by the pod's only container on the GPU, else unattributed; what is unknown stays unknown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpushare_agent.agent.observability.attribution import AllocatedContainers, join_usage, unknown_ids
from gpushare_agent.agent.runtime.cgroup_paths import NOBODY, PeerIdentity
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.names import MIB, GpuUuid
from gpushare_agent.core.model.usage import GpuSample, ProcessKind, ProcessSample, UsageRound
from tests.observability.support_usage import UUIDS, driver_sample, gpu_sample, id_of, key_of, owner, process

A, B = key_of(1), key_of(2)


def allocated(
    gpus: dict[ContainerKey, tuple[int, ...]], *, reported: tuple[ContainerKey, ...] | None = None
) -> AllocatedContainers:
    """`reported` are the containers whose IDs are known: all, if not given. A container's ID has its pod's number."""
    known = reported if reported is not None else tuple(gpus)
    return AllocatedContainers(
        gpus={key: tuple(UUIDS[index] for index in indexes) for key, indexes in gpus.items()},
        by_id={id_of(int(key.pod_uid[-4:])): key for key in known},
    )


def joined(owners: Mapping[int, PeerIdentity], known: AllocatedContainers, *gpus: GpuSample, **more: Any) -> UsageRound:
    return join_usage(driver_sample(*gpus), owners, known, sampled_at=3.5, **more)


def pids_of(found: UsageRound, key: ContainerKey, index: int) -> tuple[int, ...]:
    return found.containers[key, UUIDS[index]].pids


def unattributed_of(found: UsageRound, index: int) -> list[int]:
    return [one.pid for one in found.unattributed.get(UUIDS[index], ())]


def test_a_process_counts_for_the_container_whose_id_its_cgroup_names() -> None:
    """Two containers on one GPU each get their own processes, and the sums of what these use."""
    owners = {10: owner(1), 11: owner(1), 20: owner(2)}
    processes = process(10, memory=5, sm=0.2), process(11, memory=7, sm=0.3), process(20, memory=1, sm=0.1)
    found = joined(owners, allocated({A: (0,), B: (0,)}), gpu_sample(0, *processes))
    use = found.containers[A, UUIDS[0]]
    assert (use.pids, use.memory_bytes, use.sm_ratio) == ((10, 11), 12, 0.5)
    assert found.containers[B, UUIDS[0]].memory_bytes == 1
    assert found.sampled_at == 3.5
    assert not found.unattributed


def test_a_container_without_a_process_uses_nothing() -> None:
    """Zero, because that is known; on each of its GPUs."""
    found = joined({}, allocated({A: (0, 1)}), gpu_sample(0), gpu_sample(1))
    for index in (0, 1):
        use = found.containers[A, UUIDS[index]]
        assert (use.pids, use.memory_bytes, use.sm_ratio, use.encoder_ratio) == ((), 0, 0.0, 0.0)


def test_what_a_gpu_does_not_tell_is_not_zero() -> None:
    """A GPU that lists no processes, and processes without sizes, leave None; a GPU that did not answer leaves nothing."""
    gpus = gpu_sample(0, lists=False), gpu_sample(1, process(10, memory=None, sm=None))
    found = joined({10: owner(1)}, allocated({A: (0, 1, 2)}), *gpus)
    silent, unsized = found.containers[A, UUIDS[0]], found.containers[A, UUIDS[1]]
    assert (silent.memory_bytes, silent.sm_ratio, silent.pids) == (None, None, ())
    assert (unsized.memory_bytes, unsized.sm_ratio, unsized.pids) == (None, None, (10,))
    assert (A, UUIDS[2]) not in found.containers


def test_sums_over_processes_are_of_what_is_known_and_of_one_gpu_at_most() -> None:
    """What the known sizes add up to is the least that is used. Ratios of processes that are sampled one by one may add
    up to more than the whole GPU."""
    processes = process(10, memory=MIB, sm=0.7), process(11, memory=None, sm=0.6)
    found = joined({10: owner(1), 11: owner(1)}, allocated({A: (0,)}), gpu_sample(0, *processes))
    use = found.containers[A, UUIDS[0]]
    assert (use.memory_bytes, use.sm_ratio) == (MIB, 1.0)


def test_before_its_id_is_known_a_process_counts_for_the_pods_only_holder_on_the_gpu() -> None:
    """With two containers of the pod on the GPU it stays unattributed."""
    only, first, second = key_of(1), key_of(2, "a"), key_of(2, "b")
    owners = {10: owner(1, "f" * 64), 20: owner(2, "e" * 64), 21: owner(2, "d" * 64)}
    known = allocated({only: (0,), first: (0, 1), second: (0,)}, reported=())
    found = joined(owners, known, gpu_sample(0, process(10), process(20)), gpu_sample(1, process(21)))
    assert pids_of(found, only, 0) == (10,)
    assert unattributed_of(found, 0) == [20]
    assert pids_of(found, first, 1) == (21,)


def test_processes_of_nobody_are_unattributed() -> None:
    """A program of the node, a PID that was not read, a pod without a share, and a sidecar without one."""
    sidecar = key_of(1, "sidecar")
    known = AllocatedContainers(gpus={key_of(1): (UUIDS[0],)}, by_id={id_of(1): key_of(1), id_of(9): sidecar})
    owners = {10: NOBODY, 12: owner(7), 13: owner(1, id_of(9))}
    found = joined(owners, known, gpu_sample(0, *(process(pid) for pid in (10, 11, 12, 13))))
    assert unattributed_of(found, 0) == [10, 11, 12, 13]
    assert pids_of(found, key_of(1), 0) == ()


def test_a_container_is_a_stranger_on_a_gpu_that_it_does_not_hold() -> None:
    """A privileged container may use any GPU; that is seen there and not charged to its share. An ID without a pod in its
    path is enough: so the kernel writes a neighbour's path for a reader with a cgroup namespace of its own."""
    for identity in (owner(1), PeerIdentity(pod_uid=None, container_id=id_of(1))):
        found = joined({10: identity}, allocated({A: (0,)}), gpu_sample(0, process(10)), gpu_sample(1, process(10)))
        assert pids_of(found, A, 0) == (10,)
        assert unattributed_of(found, 1) == [10]
        assert (A, UUIDS[1]) not in found.containers


def test_only_ids_that_may_be_of_containers_with_gpus_are_looked_up() -> None:
    """New containers of pods with shares, not the node's other containers again and again."""
    sample = driver_sample(gpu_sample(0, *(process(pid) for pid in (10, 11, 12, 13))))
    owners = {10: owner(1), 11: owner(1, "f" * 64), 12: owner(7, "e" * 64), 13: NOBODY}
    assert unknown_ids(sample, owners, allocated({key_of(1): (0,)})) == {"f" * 64}


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(0, 5)), unique_by=lambda row: row[:2]),
    st.dictionaries(st.integers(1, 40), st.integers(1, 6)),
)
def test_every_process_is_counted_once(rows: list[tuple[int, int, int]], pods: dict[int, int]) -> None:
    """On each GPU the containers' processes and the unattributed ones are together the GPU's processes."""
    gpus: dict[int, list[ProcessSample]] = {index: [] for index in range(3)}
    for index, pid, memory in sorted(rows):
        gpus[index].append(process(pid, memory=memory))
    owners = {pid: owner(number) for pid, number in pods.items()}
    known = allocated({A: (0,), B: (0, 1), key_of(3): (2,)})
    found = joined(owners, known, *(gpu_sample(index, *processes) for index, processes in gpus.items()))
    for index, processes in gpus.items():
        uuid: GpuUuid = UUIDS[index]
        counted = [pid for (_, gpu), use in found.containers.items() if gpu == uuid for pid in use.pids]
        assert sorted([*counted, *unattributed_of(found, index)]) == [one.pid for one in processes]
        memory = sum(use.memory_bytes or 0 for (_, gpu), use in found.containers.items() if gpu == uuid)
        memory += sum(one.memory_bytes or 0 for one in found.unattributed.get(uuid, ()))
        assert memory == sum(one.memory_bytes or 0 for one in processes)


# ---- what containers pay ----


def computing(
    a: float | None, b: float | None, *, nobodys: float = 0.0, **paid: float
) -> dict[ContainerKey, tuple[float | None, str]]:
    """What is shown of two containers with a process each, as the driver and, by name, the library say; `nobodys` is a
    process on the node itself."""
    sample = gpu_sample(0, process(10, sm=a), process(20, sm=b), process(30, sm=nobodys))
    pays, known = {A: paid.get("pays_a"), B: paid.get("pays_b")}, allocated({A: (0,), B: (0,)})
    found = joined({10: owner(1), 20: owner(2)}, known, sample, paid=lambda key, _: pays[key])
    return {key: (use.sm_ratio, use.sm_source.value) for (key, _), use in found.containers.items()}


def test_of_containers_that_compute_at_once_each_has_what_it_paid() -> None:
    """The driver's samples name one process, whichever, with the percents of the whole GPU."""
    shown = computing(0.99, 0.99, pays_a=0.3, pays_b=0.6)
    assert shown == {A: (0.3, "library"), B: (0.6, "library")}
    assert computing(0.99, 0.0, pays_a=0.3, pays_b=0.6) == shown  # no sample has named it of late
    assert computing(None, None, pays_a=0.3, pays_b=0.6) == shown


def test_a_container_that_computes_alone_has_what_the_driver_says() -> None:
    """Which sees copies, too."""
    assert computing(0.4, 0.0, pays_a=0.3) == {A: (0.4, "driver"), B: (0.0, "driver")}


def test_a_neighbour_whose_launches_nobody_counts_computes_by_the_driver_alone() -> None:
    assert computing(0.99, 0.99, pays_a=0.3) == {A: (0.3, "library"), B: (0.99, "driver")}
    assert computing(0.99, 0.0, nobodys=0.1, pays_a=0.3)[A] == (0.3, "library")
    assert computing(0.99, 0.99) == {A: (0.99, "driver"), B: (0.99, "driver")}


def test_of_a_client_of_mps_without_a_sample_it_is_said_why() -> None:
    """An H200's samples name the server alone; a driver that samples the clients is believed, and so is a payment."""

    def shown(client: ProcessSample, **pays: float) -> tuple[float | None, str, int | None]:
        server = process(30, memory=66, sm=0.4)
        sample = gpu_sample(0, replace(client, kind=ProcessKind.MPS), server)
        found = joined({10: owner(1)}, allocated({A: (0,)}), sample, paid=lambda key, _: pays.get("pays"))
        use = found.containers[A, UUIDS[0]]
        return use.sm_ratio, use.sm_source.value, use.memory_bytes

    assert shown(process(10, memory=1342, sm=None)) == (None, "mps", 1342)
    assert shown(process(10, memory=1342, sm=0.1)) == (0.1, "driver", 1342)
    assert shown(process(10, memory=1342, sm=None), pays=0.3) == (0.3, "library", 1342)
    found = joined({10: owner(1)}, allocated({A: (0,)}), gpu_sample(0, process(10, sm=None)))
    assert found.containers[A, UUIDS[0]].sm_source.value == "driver"


def test_more_than_the_whole_gpu_is_not_believed() -> None:
    assert computing(0.5, 0.5, pays_a=7.0, pays_b=0.1)[A] == (1.0, "library")


def test_a_share_of_two_allocations_pays_once() -> None:
    """A claim's container may use several results, under one share; its processes are in the first."""
    sample = gpu_sample(0, process(10, sm=0.5), process(20, sm=0.5))
    known = allocated({A: (0,), key_of(1, "other"): (0,), B: (0,)}, reported=(A, B))
    found = joined({10: owner(1), 20: owner(2)}, known, sample, paid=lambda key, _: 0.3)
    assert [use.sm_ratio for use in found.containers.values()] == [0.3, 0.0, 0.3]
