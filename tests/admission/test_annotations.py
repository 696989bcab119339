"""The annotations that a pod should have follow from the ledger alone."""

from __future__ import annotations

from dataclasses import replace

from gpushare_agent.admission.decisions.annotations import pod_annotations
from gpushare_agent.model.allocations import Allocation
from gpushare_agent.model.names import DeviceId, GpuUuid
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.model.resources import ResourceNames
from tests.support_core import NAMES, allocation, container, ids, inventory, pod

ASSIGNED = "tencent.com/gpu-assigned"
INDEX = "tencent.com/predicate-gpu-idx-"


def _wanted(one: Pod, *given: Allocation, gpus: int = 4, names: ResourceNames = NAMES) -> dict[str, str]:
    return pod_annotations(one, {a.key: a for a in given}, inventory(gpus), names)


def test_only_main_containers_are_named() -> None:
    """Init containers and sidecars have no position in spec.containers, and who asks for no cores has no GPU."""
    one = pod(
        "p",
        container("init", cores=10, kind=ContainerKind.INIT),
        container("first", cores=10),
        container("none", position=1),
        container("whole", cores=200, position=2),
    )
    given = [
        allocation(one, "init", ids(0, range(10)), [], ContainerKind.INIT),
        allocation(one, "first", ids(0, range(10)), []),
        allocation(one, "whole", ids(3, range(100)) + ids(1, range(100)), []),
    ]
    assert _wanted(one, *given) == {ASSIGNED: "true", f"{INDEX}0": "0", f"{INDEX}2": "1,3"}


def test_nothing_is_written_before_every_main_container_has_its_cores() -> None:
    """And nothing of a pod without allocations."""
    one = pod("p", container("a", cores=10), container("b", cores=10, position=1))
    assert _wanted(one, allocation(one, "a", ids(0, range(10)), [])) == {}
    assert _wanted(one) == {} and _wanted(pod("q", container("a"))) == {}


def test_a_container_whose_gpu_is_lost_keeps_its_annotation() -> None:
    """An unknown index is not replaced by an empty one."""
    one = pod("p", container("a", cores=10), container("b", cores=10, position=1))
    given = [allocation(one, "a", ids(3, range(10)), []), allocation(one, "b", ids(0, range(10)), [])]
    assert _wanted(one, *given, gpus=1) == {ASSIGNED: "true", f"{INDEX}1": "0"}


def test_gpushares_memory_has_gpushares_annotations() -> None:
    """The index of its one GPU; its extender's time is the writer's affair."""
    names = ResourceNames(gpu_mem="aliyun.com/gpu-mem")
    spec = ContainerSpec(name="c", kind=ContainerKind.MAIN, position=0, requests={"aliyun.com/gpu-mem": 4})
    one = pod("p", spec)
    given = replace(
        allocation(one, "c", [], []),
        gpus=(GpuUuid("GPU-1"),),
        gpu_mem_ids=frozenset({DeviceId("GPU-1::0"), DeviceId("GPU-1::1")}),
    )
    assert _wanted(one, given, names=names) == {"ALIYUN_COM_GPU_MEM_ASSIGNED": "true", "ALIYUN_COM_GPU_MEM_IDX": "1"}
