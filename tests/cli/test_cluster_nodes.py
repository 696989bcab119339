"""A node's GPUs by its object: correct sums, whatever a tenant or an old agent wrote."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_agent.agent.cluster.node_facts import gpus_annotation
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec, Pod, PodPhase
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.node_report.annotations import (
    ALLOCATIONS_ANNOTATION,
    GPUS_ANNOTATION,
    MAX_GPUS,
    AllocatedTo,
    allocations_annotation,
)
from gpushare_agent.kubectl.cluster_nodes import NodeReport, read_report, report_document
from gpushare_agent.kubectl.inspect import inspection_document
from tests.observability.support_usage import UUIDS, inventory

MIB = 1024 * 1024
NAMES = ResourceNames(gpu_mem="aliyun.com/gpu-mem")
GPUS_TEXT = gpus_annotation(inventory(4), cordoned={}, memory_block_mib=256)
CAPACITY = {"tencent.com/vcuda-core": 400, "tencent.com/vcuda-memory": 384}


def container(
    name: str = "main", cores: int = 40, blocks: int = 16, *, position: int = 0, units: int = 0, **fields: Any
) -> ContainerSpec:
    limits = {NAMES.vcore: cores, NAMES.vmemory: blocks, NAMES.gpu_mem: units}
    return ContainerSpec(
        name=name, position=position, requests={k: v for k, v in limits.items() if v},
        **({"kind": ContainerKind.MAIN} | fields),
    )  # fmt: skip


def pod(*containers: ContainerSpec, name: str = "p", **fields: Any) -> Pod:
    return Pod(
        uid=PodUid(f"uid-{name}"), namespace="default", name=name, containers=containers or (container(),),
        **({"phase": PodPhase.RUNNING} | fields),
    )  # fmt: skip


def sums(*pods: Pod, held: dict[str, dict[str, list[int]]] | None = None) -> dict[str, Any]:
    """`held` is the annotation's; None leaves it out."""
    annotations = {GPUS_ANNOTATION: GPUS_TEXT}
    if held is not None:
        annotations[ALLOCATIONS_ANNOTATION] = json.dumps({"schema": 1, "allocations": held})
    found = read_report(annotations, CAPACITY, NAMES)
    assert found is not None
    return report_document("n", found, pods)


def allocated(found: dict[str, Any]) -> list[tuple[int, int]]:
    """Cores and MiB of each GPU."""
    return [(gpu["cores"]["allocated"], gpu["memory"]["allocated_bytes"] // MIB) for gpu in found["gpus"]]


def test_a_share_is_charged_to_the_gpu_that_the_nodes_agent_reports() -> None:
    """With the size of the report, which a resize changes, in the node's block size."""
    found = sums(pod(), held={"uid-p": {"2": [50, 20]}})
    assert allocated(found) == [(0, 0), (0, 0), (50, 5120), (0, 0)]
    (shown,) = found["containers"]
    assert (found["remark"], shown) == (
        "",
        {
            "namespace": "default", "pod": "p", "container": "main", "gpus": [2], "cores": 50, "memory_bytes": 5120 * MIB,
            "remark": "",
        },
    )  # fmt: skip


LIES = {
    "tencent.com/predicate-gpu-idx-0": "0", "tencent.com/gpu-assigned": "true", "ALIYUN_COM_GPU_MEM_IDX": "0",
    "scheduler.framework.gpushare.allocation": '{"0":{"0":16}}', "tencent.com/vcuda-core-limit": "100",
}  # fmt: skip


@pytest.mark.parametrize("held", [None, {}, {"uid-p": {"1": [40, 16]}}])
def test_no_annotation_of_a_pod_changes_a_sum(held: dict[str, dict[str, list[int]]] | None) -> None:
    """A tenant writes them: the node is shown as if the pod had none."""
    assert sums(pod(annotations=LIES), held=held) == sums(pod(), held=held)
    assert allocated(sums(pod(annotations=LIES), held=held))[0] == (0, 0)


def test_whole_gpus_are_charged_with_all_their_memory() -> None:
    """Whatever memory the container asks for."""
    found = sums(pod(container(cores=200, blocks=0)), held={"uid-p": {"1": [100, 0, 0, 1], "3": [100, 0, 0, 1]}})
    assert allocated(found) == [(0, 0), (100, 24576), (0, 0), (100, 24576)]
    assert found["containers"][0]["memory_bytes"] == 2 * 24576 * MIB


def test_gpushares_units_are_charged_in_their_size() -> None:
    """They take no cores."""
    found = sums(pod(container(cores=0, blocks=0, units=3)), held={"uid-p": {"1": [0, 0, 3]}})
    assert allocated(found) == [(0, 0), (0, 3072), (0, 0), (0, 0)]


def test_several_containers_are_shown_with_the_gpus_of_their_pod() -> None:
    """The report is by pod: each has its request, and a remark where the pod has several GPUs."""
    both = (container("a"), container("b", cores=20, blocks=4, position=1))
    found = sums(pod(*both), held={"uid-p": {"0": [40, 16], "1": [20, 4]}})
    assert allocated(found)[:2] == [(40, 4096), (20, 1024)]
    assert [(c["container"], c["gpus"], c["cores"]) for c in found["containers"]] == [
        ("a", [0, 1], 40),
        ("b", [0, 1], 20),
    ]
    assert {c["remark"] for c in found["containers"]} == {"the node's agent reports the GPUs of the whole pod"}
    (first, second) = sums(pod(*both), held={"uid-p": {"0": [60, 20]}})["containers"]
    assert (first["gpus"], second["gpus"], first["remark"]) == ([0], [0], "")


def test_a_pod_that_the_report_does_not_have_is_charged_to_no_gpu() -> None:
    """It waits for its admission, or the report is older."""
    found = sums(pod(), held={})
    assert allocated(found) == [(0, 0)] * 4
    assert inspection_document([found])["nodes"][0]["unplaced"]["containers"] == len(found["containers"])
    (shown,) = found["containers"]
    assert (shown["cores"], shown["memory_bytes"]) == (40, 4096 * MIB)
    assert shown["remark"] == "the node's agent has not reported it"


def test_what_is_reported_of_a_pod_that_the_api_server_has_not_is_charged() -> None:
    """One deleted by force may run on; its UID is shown."""
    found = sums(held={"uid-q": {"1": [30, 4]}})
    assert allocated(found)[1] == (30, 1024)
    assert [(c["pod"], c["gpus"], c["cores"]) for c in found["containers"]] == [("uid-q", [1], 30)]
    assert "lists no such pod" in found["containers"][0]["remark"]


@pytest.mark.parametrize("phase", [PodPhase.SUCCEEDED, PodPhase.FAILED])
def test_a_pod_that_has_ended_is_shown_only_while_it_is_reported(phase: PodPhase) -> None:
    """As one that the API server has not: the agent frees it."""
    assert sums(pod(phase=phase), held={})["containers"] == []
    assert allocated(sums(pod(phase=phase), held={"uid-p": {"0": [40, 16]}}))[0] == (40, 4096)


def test_a_pod_by_nvidias_names_is_shown_with_what_is_reported() -> None:
    """Its resources are not among the names here."""
    found = sums(pod(container(cores=0, blocks=0)), held={"uid-p": {"0": [100, 0, 0, 1]}})
    assert [(c["pod"], c["container"], c["gpus"], c["cores"]) for c in found["containers"]] == [("p", "", [0], 100)]


def test_an_init_container_is_not_listed_beside_the_main_one() -> None:
    """The kubelet hands its devices on; a sidecar has some of its own."""
    init, sidecar = container("i", kind=ContainerKind.INIT), container("s", kind=ContainerKind.SIDECAR)
    found = sums(pod(init, sidecar, container()), held={"uid-p": {"0": [80, 32]}})
    assert [(c["container"], c["gpus"]) for c in found["containers"]] == [("s", [0]), ("main", [0])]


def test_pods_come_sorted_whatever_the_order_of_the_list() -> None:
    """What leaves the process does not depend on the API server's order."""
    assert [c["pod"] for c in sums(pod(name="q"), pod())["containers"]] == ["p", "q"]
    assert sums(pod(), pod(name="q")) == sums(pod(name="q"), pod())


@pytest.mark.parametrize("held", [7, [], {"u": {"9": [1]}}, {"u": {"0": [101]}}, {"": {}}, {"u": [1]}, None])
def test_a_report_that_cannot_be_read_charges_nothing_and_says_so(held: object) -> None:
    """A part of it would show too much as free."""
    text = json.dumps({"schema": 1, "allocations": held})
    found = read_report({GPUS_ANNOTATION: GPUS_TEXT, ALLOCATIONS_ANNOTATION: text}, CAPACITY, NAMES)
    assert found is not None
    assert found.allocated is None
    assert (
        "gpushare-agent/allocations cannot be read" in found.remark and "what is allocated is not known" in found.remark
    )
    assert (
        sums(pod())["remark"]
        == "no gpushare-agent/allocations: what is allocated is not known; see the agent's log there"
    )


def test_a_truncated_report_is_remarked() -> None:
    """The writer leaves pods out where they do not fit."""
    text = allocations_annotation(
        [AllocatedTo(pod_uid=PodUid(uid), gpus={0: (10, 1)}, since=0) for uid in "ab"], max_pods=1
    )
    found = read_report({GPUS_ANNOTATION: GPUS_TEXT, ALLOCATIONS_ANNOTATION: text}, CAPACITY, NAMES)
    assert found is not None and found.allocated is not None
    assert (len(found.allocated), "more is allocated than is shown" in found.remark) == (1, True)


@given(
    st.dictionaries(
        st.sampled_from(["uid-p", "uid-q", "uid-r"]),
        st.dictionaries(
            st.sampled_from("0123"),
            st.tuples(st.integers(0, 100), st.integers(0, 2**30), st.integers(0, 2**30), st.integers(0, 1)).map(list),
        ),
    )
)
def test_no_gpu_is_shown_with_more_than_it_has(held: dict[str, dict[str, list[int]]]) -> None:
    """Who may patch a node can write any counts."""
    found = sums(pod(), pod(name="q"), held=held)
    assert all(0 <= cores <= 100 and 0 <= mib <= 24576 for cores, mib in allocated(found))
    for index, (cores, _) in enumerate(allocated(found)):
        assert cores == min(100, sum(of_pod[str(index)][0] for of_pod in held.values() if str(index) in of_pod))


# --- the GPUs ---


def read(text: object, capacity: dict[str, int] | None = None) -> NodeReport | None:
    return read_report({GPUS_ANNOTATION: text}, CAPACITY if capacity is None else capacity, NAMES)


def test_what_the_agent_writes_is_read_back() -> None:
    """Writer and reader agree on the format."""
    text = gpus_annotation(inventory(3, sick={1: "lost"}), cordoned={UUIDS[2]: False}, memory_block_mib=512)
    found = read(text)
    assert found is not None
    assert found.names.memory_block_mib == 512 and "agent/gpus" not in found.remark
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
        '{"schema": 2, "gpus": []}',
        '{"schema": 1, "gpus": {}}',
        '{"schema": 1, "gpus": [7]}',
        '{"schema": 1, "memory_block_mib": 0, "gpus": []}',
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
    """Half a list would show a smaller node than there is. The last case is an index given twice. Nor are more GPUs believed
    than a machine has."""
    many = [
        {"index": n, "uuid": f"GPU-{n}", "name": "x", "memory_mib": 1024, "is_healthy": True}
        for n in range(MAX_GPUS + 1)
    ]
    found = read(json.dumps({"schema": 1, "gpus": many}))
    assert found is not None and "agent/gpus cannot be read" in found.remark
    gpus = many[:2]
    good = read(json.dumps({"schema": 1, "gpus": gpus}))
    assert good is not None and "agent/gpus" not in good.remark
    gpus[0] |= change
    found = read(json.dumps({"schema": 1, "gpus": gpus}))
    assert found is not None and "agent/gpus cannot be read" in found.remark


def test_a_node_without_annotation_and_capacity_has_no_gpus() -> None:
    """It is left out of the list."""
    assert read_report({}, {}, NAMES) is None
    assert read_report({}, {"tencent.com/vcuda-core": 50}, NAMES) is None


def test_a_huge_capacity_is_bounded() -> None:
    """Whoever may patch a node's status could make any number of GPUs."""
    found = read_report({}, {"tencent.com/vcuda-core": 2**62}, NAMES)
    assert found is not None and len(found.gpus) == MAX_GPUS


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
            st.sampled_from(["schema", "gpus", "index", "uuid", "name", "memory_mib", "is_healthy", "memory_block_mib"]),
            inner, max_size=6,
        ),
        max_leaves=12,
    )
)  # fmt: skip
def test_no_json_is_too_odd(value: Any) -> None:
    """As above, for what parses."""
    assert read(json.dumps(value)) is not None
    assert read(json.dumps({"schema": 1, "gpus": value})) is not None
