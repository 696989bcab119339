"""A node's GPUs by its object and its pods: correct sums, whatever a tenant or an old agent wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_agent.cluster.decisions.node_annotations import GPUS_ANNOTATION, MAX_GPUS
from gpushare_agent.cluster.decisions.node_facts import gpus_annotation
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod, PodPhase
from gpushare_agent.model.resources import ResourceNames
from gpushare_agent.observability.gpu_summaries import GpuSummaries, GpuSummary, gpus_of_node
from gpushare_agent.observability.inspection import NodeSums, node_sums
from tests.support_usage import UUIDS, inventory

MIB = 1024 * 1024
NAMES = ResourceNames(gpu_mem="aliyun.com/gpu-mem")
GPUS = GpuSummaries(
    gpus=tuple(GpuSummary(index=n, uuid=f"GPU-{n}", name="H100", memory_bytes=24576 * MIB) for n in range(4)),
    memory_block_mib=256,
)
PREFIX = "tencent.com/predicate-gpu-idx-"
CAPACITY = {"tencent.com/vcuda-core": 400, "tencent.com/vcuda-memory": 384}


def container(
    name: str = "main", cores: int = 40, blocks: int = 16, *, position: int = 0, units: int = 0, **fields: Any
) -> ContainerSpec:
    limits = {NAMES.vcore: cores, NAMES.vmemory: blocks, NAMES.gpu_mem: units}
    return ContainerSpec(
        name=name, position=position, requests={k: v for k, v in limits.items() if v},
        **({"kind": ContainerKind.MAIN} | fields),
    )  # fmt: skip


def pod(*containers: ContainerSpec, annotations: dict[str, str] | None = None, **fields: Any) -> Pod:
    return Pod(
        uid=PodUid("u"), namespace="default", name="p", containers=containers or (container(),),
        annotations=annotations or {}, **({"phase": PodPhase.RUNNING} | fields),
    )  # fmt: skip


def sums(*pods: Pod) -> NodeSums:
    return node_sums("n", GPUS, pods, NAMES)


def allocated(found: NodeSums) -> list[tuple[int, int]]:
    """Cores and MiB of each GPU."""
    return [(gpu.cores_allocated, gpu.memory_allocated_bytes // MIB) for gpu in found.gpus]


def test_a_share_is_charged_to_the_gpu_that_the_annotation_names() -> None:
    """Its cores, and its blocks in the node's block size."""
    found = sums(pod(annotations={PREFIX + "0": "2", "tencent.com/gpu-assigned": "true"}))
    assert allocated(found) == [(0, 0), (0, 0), (40, 4096), (0, 0)]
    assert (found.containers[0].gpus, found.containers[0].remark) == ((2,), "")


def test_whole_gpus_are_charged_with_all_their_memory() -> None:
    """Whatever memory the container asks for."""
    found = sums(pod(container(cores=200, blocks=0), annotations={PREFIX + "0": "1,3"}))
    assert allocated(found) == [(0, 0), (100, 24576), (0, 0), (100, 24576)]
    assert found.containers[0].memory_bytes == 2 * 24576 * MIB


def test_each_container_has_its_own_annotation() -> None:
    """By its position in spec.containers."""
    both = (container("a"), container("b", cores=20, blocks=4, position=1))
    found = sums(pod(*both, annotations={PREFIX + "0": "0", PREFIX + "1": "1"}))
    assert allocated(found)[:2] == [(40, 4096), (20, 1024)]


def test_gpushares_memory_is_charged_by_gpushares_annotation() -> None:
    """It takes no cores."""
    asks = container(cores=0, blocks=0, units=3)
    found = sums(pod(asks, annotations={"ALIYUN_COM_GPU_MEM_IDX": "1"}))
    assert allocated(found) == [(0, 0), (0, 3072), (0, 0), (0, 0)]


def test_a_choice_that_the_agent_has_not_carried_out_is_remarked() -> None:
    """It counts, for the scheduler has promised it."""
    found = sums(pod(annotations={PREFIX + "0": "2", "tencent.com/gpu-assigned": "false"}))
    assert allocated(found)[2] == (40, 4096)
    assert "not yet allocated by the agent" in found.containers[0].remark


@pytest.mark.parametrize(
    ("reported", "remark"),
    [
        (None, "no GPU is known yet"),
        ("9", "names GPU 9, which the node does not have"),
        ("0,1", "names 2 GPUs where it asks for 1"),
        ("", "'' is no list of GPU indexes"),
        ("-1", "'-1' is no list of GPU indexes"),
        ("0,", "'0,' is no list of GPU indexes"),
        ("٣", "is no list of GPU indexes"),
        ("99999999999", "is no list of GPU indexes"),
        (",".join(["0"] * 1000), "is no list of GPU indexes"),
    ],
)
def test_an_annotation_that_does_not_fit_is_reported_and_charged_to_no_gpu(reported: str | None, remark: str) -> None:
    """Any tenant can write it."""
    found = sums(pod(annotations={} if reported is None else {PREFIX + "0": reported}))
    assert allocated(found) == [(0, 0)] * 4
    assert remark in found.containers[0].remark
    assert found.unplaced == found.containers
    assert (found.containers[0].cores, found.containers[0].memory_bytes) == (40, 4096 * MIB)


@pytest.mark.parametrize("phase", [PodPhase.SUCCEEDED, PodPhase.FAILED])
def test_a_pod_that_has_ended_holds_nothing(phase: PodPhase) -> None:
    """Its annotations stay until it is deleted."""
    assert sums(pod(annotations={PREFIX + "0": "0"}, phase=phase)).containers == ()


def test_an_init_container_is_not_counted_beside_the_main_one() -> None:
    """The kubelet hands its devices on; a sidecar has some of its own, whose GPU no annotation names."""
    init, sidecar = container("i", kind=ContainerKind.INIT), container("s", kind=ContainerKind.SIDECAR)
    found = sums(pod(init, sidecar, container(), annotations={PREFIX + "0": "0"}))
    assert [(c.container, c.gpus) for c in found.containers] == [("s", ()), ("main", (0,))]


def test_pods_come_sorted_whatever_the_order_of_the_list() -> None:
    """What leaves the process does not depend on the API server's order."""
    first, second = pod(), replace(pod(), name="q", uid=PodUid("v"))
    assert [c.pod for c in sums(second, first).containers] == ["p", "q"]
    assert sums(first, second) == sums(second, first)


@given(
    st.lists(
        st.tuples(
            st.integers(min_value=0, max_value=1000),
            st.integers(min_value=0, max_value=200),
            st.one_of(st.none(), st.text(max_size=8), st.from_regex(r"[0-9](,[0-9]){0,3}", fullmatch=True)),
        ),
        max_size=8,
    )
)
def test_what_is_asked_is_charged_once_or_unplaced(pods: list[tuple[int, int, str | None]]) -> None:
    """Over any pods: the GPUs' cores are those of the placed containers, and no sum is negative."""
    found = sums(
        *(
            pod(container(cores=cores, blocks=blocks), annotations={} if reported is None else {PREFIX + "0": reported})
            for cores, blocks, reported in pods
        )
    )
    placed = [c for c in found.containers if c.gpus]
    exact = sum(c.cores // len(c.gpus) * len(c.gpus) for c in placed)
    assert sum(gpu.cores_allocated for gpu in found.gpus) == exact
    assert all(gpu.cores_allocated >= 0 and gpu.memory_allocated_bytes >= 0 for gpu in found.gpus)
    assert len(found.containers) == sum(1 for cores, blocks, _ in pods if cores or blocks)


# --- the GPUs ---


def read(text: object, capacity: dict[str, int] | None = None) -> GpuSummaries | None:
    return gpus_of_node({GPUS_ANNOTATION: text}, CAPACITY if capacity is None else capacity, NAMES)


def test_what_the_agent_writes_is_read_back() -> None:
    """Writer and reader agree on the format."""
    text = gpus_annotation(inventory(3, sick={1: "lost"}), cordoned={UUIDS[2]}, memory_block_mib=512)
    found = read(text)
    assert found is not None
    assert (found.memory_block_mib, found.remark) == (512, "")
    assert [(c.index, c.uuid, c.memory_bytes // MIB, c.is_healthy) for c in found.gpus] == [
        (0, "GPU-0", 24576, True), (1, "GPU-1", 24576, False), (2, "GPU-2", 24576, found.gpus[2].is_healthy),
    ]  # fmt: skip
    assert [bool(gpu.cordoned) for gpu in found.gpus] == [False, False, True]


@pytest.mark.parametrize(
    "text",
    [
        None,
        7,
        "",
        "[]",
        "{",
        "[" * 100_000,
        '{"schema": 2, "cards": []}',
        '{"schema": 1, "cards": {}}',
        '{"schema": 1, "cards": [7]}',
        '{"schema": 1, "memory_block_mib": 0, "cards": []}',
        " " * 300_000,
    ],
    ids=range(11),
)
def test_an_annotation_that_cannot_be_read_leaves_the_capacity(text: object) -> None:
    """Equal GPUs, with a remark."""
    found = read(text)
    assert found is not None
    assert [gpu.memory_bytes // MIB for gpu in found.gpus] == [24576] * 4
    assert "assumed from the node's capacity" in found.remark


@pytest.mark.parametrize(
    "change",
    [
        {"index": -1},
        {"index": True},
        {"index": 1.5},
        {"index": 10**9},
        {"memory_mib": "1"},
        {"memory_mib": -1},
        {"memory_mib": 10**12},
        {"is_healthy": 1},
        {"uuid": None},
        {"name": ["x"]},
        {"index": 1},
    ],
)
def test_one_bad_gpu_makes_the_whole_annotation_unreadable(change: dict[str, Any]) -> None:
    """Half a list would show a smaller node than there is. The last case is an index given twice."""
    gpus = [{"index": n, "uuid": f"GPU-{n}", "name": "x", "memory_mib": 1024, "is_healthy": True} for n in range(2)]
    good = read(json.dumps({"schema": 1, "cards": gpus}))
    assert good is not None and good.remark == ""
    gpus[0] |= change
    found = read(json.dumps({"schema": 1, "cards": gpus}))
    assert found is not None and "cannot be read" in found.remark


def test_too_many_gpus_are_not_believed() -> None:
    """No machine has them."""
    gpus = [{"index": n, "uuid": "u", "name": "x", "memory_mib": 1, "is_healthy": True} for n in range(MAX_GPUS + 1)]
    found = read(json.dumps({"schema": 1, "cards": gpus}))
    assert found is not None and found.remark


def test_a_node_without_annotation_and_capacity_has_no_gpus() -> None:
    """It is left out of the list."""
    assert gpus_of_node({}, {}, NAMES) is None
    assert gpus_of_node({}, {"tencent.com/vcuda-core": 50}, NAMES) is None


def test_a_huge_capacity_is_bounded() -> None:
    """Whoever may patch a node's status could make any number of GPUs."""
    found = gpus_of_node({}, {"tencent.com/vcuda-core": 2**62}, NAMES)
    assert found is not None and len(found.gpus) == MAX_GPUS


@given(st.text(max_size=200))
def test_no_text_is_too_odd(text: str) -> None:
    """It is read, or the capacity counts."""
    assert read(text) is not None


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
            st.sampled_from(["schema", "cards", "index", "uuid", "name", "memory_mib", "is_healthy", "memory_block_mib"]),
            inner, max_size=6,
        ),
        max_leaves=12,
    )
)  # fmt: skip
def test_no_json_is_too_odd(value: Any) -> None:
    """As above, for what parses."""
    assert read(json.dumps(value)) is not None
    assert read(json.dumps({"schema": 1, "cards": value})) is not None
