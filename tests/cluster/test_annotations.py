"""The annotations that a pod should have follow from the ledger alone."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.cluster.pod_annotations import pod_annotations
from gpushare_agent.core.model.allocations import Allocation
from gpushare_agent.core.model.pods import ContainerKind, Pod
from gpushare_agent.core.model.resources import ResourceNames
from tests.cluster.support_gpushare_inspect import inspect_pod
from tests.support_core import GPU_MEM_NAMES, NAMES, allocation, container, ids, inventory, pod

ASSIGNED = "tencent.com/gpu-assigned"
INDEX = "tencent.com/predicate-gpu-idx-"
GPU_INDEX, BY_CONTAINER = "ALIYUN_COM_GPU_MEM_IDX", "scheduler.framework.gpushare.allocation"


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


def test_a_gpu_is_named_by_nvmls_index() -> None:
    """gpu-manager names it by its minor number, the N of /dev/nvidiaN, of which there may be gaps."""
    one, given = pod("p", container("a", cores=10)), ids(1, range(10))
    known = inventory(2)
    odd = replace(known, gpus=tuple(replace(gpu, minor=gpu.index + 4) for gpu in known.gpus))
    had = allocation(one, "a", given, [])
    assert pod_annotations(one, {had.key: had}, odd, NAMES) == {ASSIGNED: "true", f"{INDEX}0": "1"}


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


def _asks_memory(*units: int, annotations: dict[str, str] | None = None) -> Pod:
    """A main container for each."""
    specs = [container(f"c{n}", position=n, units=count) for n, count in enumerate(units)]
    return pod("p", *specs, annotations=annotations or {})


def _units(one: Pod, *gpus: int) -> list[Allocation]:
    """What each container of it asks for, on this GPU."""
    return [
        allocation(one, spec.name, [], [], units=ids(gpu, range(spec.requests[GPU_MEM_NAMES.gpu_mem])))
        for spec, gpu in zip(one.containers, gpus, strict=True)
    ]


@pytest.mark.parametrize(
    ("gpus", "own"),
    [
        pytest.param((1, 1), {GPU_INDEX: "1"}, id="one GPU"),
        pytest.param((3, 1), {BY_CONTAINER: '{"0":{"3":2},"1":{"1":4}}'}, id="two, which one index cannot name"),
    ],
)
def test_gpushares_memory_has_gpushares_annotations_and_gpu_managers(
    gpus: tuple[int, int], own: dict[str, str]
) -> None:
    """The extender writes both for it, with gpu-assigned false; GPUShare's time is the writer's affair. Its inspection tool,
    which reads the form by container first, adds up what the ledger has, also where its extender wrote its index before."""
    for written in ({}, {GPU_INDEX: "3"}):
        one = _asks_memory(2, 4, annotations={ASSIGNED: "false", **written})
        given = _units(one, *gpus)
        wanted = _wanted(one, *given, names=GPU_MEM_NAMES)
        both = {f"{INDEX}{position}": str(gpu) for position, gpu in enumerate(gpus)}
        assert wanted == {ASSIGNED: "true", **both, "ALIYUN_COM_GPU_MEM_ASSIGNED": "true", **own}
        assert inspect_pod(written | wanted, 6) == Counter({gpus[0]: 2}) + Counter({gpus[1]: 4})
        assert _wanted(one, given[0], names=GPU_MEM_NAMES) == {}


def test_what_is_longer_than_an_annotation_that_is_read_is_not_written() -> None:
    """It would differ from what is read at each comparison, and be written again without end."""
    one = _asks_memory(*[1] * 100)
    wanted = _wanted(one, *_units(one, *[0, 1] * 50), names=GPU_MEM_NAMES)
    assert wanted["ALIYUN_COM_GPU_MEM_ASSIGNED"] == "true" and BY_CONTAINER not in wanted
