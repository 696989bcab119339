"""A pod is read from the API server's JSON exactly, or refused as Corrupt; nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_agent.agent.dra.wake_pods import ANNOTATION as CLAIMS_RETRY_ANNOTATION
from gpushare_agent.core.kube.objects import whole_number
from gpushare_agent.core.kube.pods import MAX_COMPARED, mistyped_annotations, parse_pod, read_pod_json
from gpushare_agent.core.model.errors import Corrupt
from gpushare_agent.core.model.names import VCORE_RESOURCE, VMEMORY_RESOURCE
from gpushare_agent.core.model.pods import ContainerKind, Pod, PodPhase, version_number
from tests.cluster.support_kube import raw_pod
from tests.support_core import NAMES
from tests.support_json import any_json, undecoded


def read(raw: Any, *others: str) -> Pod:
    return parse_pod(read_pod_json(undecoded(raw)), (*NAMES.names, *others))


FULL: dict[str, Any] = raw_pod(
    "web-7d9f-abcde",
    version="17",
    metadata={
        "annotations": {"tencent.com/gpu-assigned": "false", "number": 3},
        "labels": {"app": "web"},
        "ownerReferences": [
            {"kind": "Other", "name": "o"},
            {"kind": "ReplicaSet", "name": "web-7d9f", "controller": True},
        ],
        "deletionTimestamp": "2026-01-01T00:00:00Z",
    },
    spec={
        "initContainers": [
            {"name": "load", "resources": {"limits": {VCORE_RESOURCE: "1k"}}},
            {"name": "proxy", "restartPolicy": "Always"},
        ],
        "containers": [
            {
                "name": "main",
                "resources": {
                    "limits": {VCORE_RESOURCE: "30", VMEMORY_RESOURCE: 4, "cpu": "500m", "example.com/foo": "2"}
                },
                "env": [
                    {"name": "compat32", "value": "false"},
                    {"name": "SUBMITTER", "valueFrom": {"fieldRef": {}}},
                    {"name": "OTHER", "value": "1"},
                    {"name": "compat32", "value": "true"},
                ],
            }
        ],
    },
    status={"phase": "Running", "reason": "r", "message": "m", "containerStatuses": [{"state": {"running": {}}}]},
)


def test_every_part_that_the_agent_needs_is_read() -> None:
    """A pod with init container, sidecar, owner and statuses comes out with all of them."""
    found = read(FULL)
    assert [(c.name, c.kind, c.position) for c in found.containers] == [
        ("load", ContainerKind.INIT, 0),
        ("proxy", ContainerKind.SIDECAR, 1),
        ("main", ContainerKind.MAIN, 0),
    ]
    assert found.containers[0].requests == {VCORE_RESOURCE: 1000}
    assert found.containers[2].requests == {VCORE_RESOURCE: 30, VMEMORY_RESOURCE: 4}
    assert found.containers[2].env == {"compat32": "true"}
    assert (found.phase, found.reason, found.message) == (PodPhase.RUNNING, "r", "m")
    assert found.controller_kind == "ReplicaSet"
    assert found.annotations == {"tencent.com/gpu-assigned": "false"}
    assert found.is_deleting and found.has_started and found.resource_version == "17" and found.node_name == "node-1"


def test_a_limit_of_memory_that_is_not_literal_is_known_to_be_set() -> None:
    """Its value is not, but the agent must refuse the pod all the same."""
    raw = copy.deepcopy(FULL)
    raw["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_GPU_MEMORY_LIMIT", "valueFrom": {"configMapKeyRef": {}}}]
    assert read(raw).containers[2].env == {"NVIDIA_GPU_MEMORY_LIMIT": ""}


def test_of_the_mounts_those_are_kept_that_could_lift_a_limit() -> None:
    """As paths without detours; of containers that ask for something. As many as a tenant likes at other libraries' paths,
    which sort before the one that matters, crowd it not out."""
    raw = copy.deepcopy(FULL)
    paths = ["/data", "/etc/../etc//vcuda/", "/etc/vcuda/usage", "/usr/./local", "/", "/etc/vcuda2", 7, None]
    for one in (raw["spec"]["containers"][0], raw["spec"]["initContainers"][1]):
        one["volumeMounts"] = [{"name": "v", "mountPath": path} for path in paths]
    found = read(raw)
    assert found.containers[2].mounts == ("/", "/etc/vcuda", "/etc/vcuda/usage", "/usr/local")
    assert found.containers[1].mounts == ()
    paths = [f"{path}/{n}" for path in ("/etc/vcuda", "/usr/local/nvidia") for n in range(50)]
    paths.append("/usr/local/gpushare/cache")
    raw["spec"]["containers"][0]["volumeMounts"] = [{"name": "v", "mountPath": path} for path in paths]
    kept = read(raw).containers[2].mounts
    assert "/usr/local/gpushare/cache" in kept and len(kept) < 20


def test_only_the_named_resources_are_read() -> None:
    """Garbage in another plugin's limit does not matter where only ours are asked for."""
    raw = copy.deepcopy(FULL)
    raw["spec"]["containers"][0]["resources"]["limits"]["example.com/foo"] = "garbage"
    assert read(raw).containers[2].requests == {VCORE_RESOURCE: 30, VMEMORY_RESOURCE: 4}
    with pytest.raises(Corrupt, match=r"default/web-7d9f-abcde, container main, limit example.com/foo: 'garbage'"):
        read(raw, "example.com/foo")


@pytest.mark.parametrize(
    ("quantity", "number"),
    [
        ("30", 30),
        ("1k", 1000),
        ("1Ki", 1024),
        ("2000m", 2),
        ("3e2", 300),
        ("1.5k", 1500),
        ("+7", 7),
        (8.0, 8),
        ("0", 0),
    ],
)
def test_whole_quantities_are_numbers(quantity: Any, number: int) -> None:
    """Every suffix of a quantity is understood as long as the number is whole."""
    assert whole_number(quantity, "x") == number


@pytest.mark.parametrize(
    "quantity",
    [
        "",
        "-1",
        "1500m",
        "30%",
        " 30",
        "1e999",
        "9" * 50,
        "1.2.3",
        "0x10",
        "∞",
        "٣",
        None,
        True,
        [],
        float("nan"),
        -5,
        2**70,
    ],
)
def test_what_is_no_whole_quantity_is_corrupt(quantity: Any) -> None:
    """Garbage, fractions, negative and huge numbers are refused with their text."""
    with pytest.raises(Corrupt, match=r"^pod a/b, container c:"):
        whole_number(quantity, "pod a/b, container c")


@pytest.mark.parametrize(
    ("status", "has_started"),
    [
        ({}, False),
        ({"containerStatuses": [{"state": {"waiting": {"reason": "PodInitializing"}}, "restartCount": 0}]}, False),
        ({"containerStatuses": [{"state": {"waiting": {}}, "restartCount": 2}]}, True),
        ({"initContainerStatuses": [{"state": {"terminated": {"exitCode": 0}}}]}, True),
        ({"containerStatuses": [{"state": {"waiting": {}}, "lastState": {"terminated": {"exitCode": 1}}}]}, True),
    ],
)
def test_a_pod_has_started_once_a_container_ran(status: dict[str, Any], has_started: bool) -> None:
    """Running, restarted or ended containers mean that the admission is long past; waiting ones do not."""
    assert read(raw_pod(status=status)).has_started is has_started


def test_only_what_the_agent_reads_is_kept_and_bounded() -> None:
    """Of a fat pod stay our annotations, cut visibly, and two variables; no labels, and nobody else's words. A tenant's
    sixty-four names do not push out those that the extender writes, which come after them."""
    ours = {f"tencent.com/a{number:03}": "1," * 100_000 for number in range(100)}
    written = {"tencent.com/predicate-node": "n", "tencent.com/predicate-gpu-idx-0": "1"}
    theirs = {f"example.com/{number}": "x" * 5000 for number in range(100)}
    raw = raw_pod(metadata={"annotations": ours | theirs | written | {"clusterName": "c"}, "labels": {"app": "x"}})
    raw["spec"]["containers"][0]["env"] = [
        *({"name": f"E{number}", "value": "x" * 100} for number in range(5000)),
        {"name": "SUBMITTER", "value": "s" * 5000},
    ]
    found = read(raw)
    assert len(found.annotations) == 64 and found.annotations["clusterName"] == "c"
    assert {name.partition("/")[0] for name in found.annotations} == {"clusterName", "tencent.com"}
    assert written.items() <= found.annotations.items()
    assert len(found.annotations["tencent.com/a000"]) == 1024 and found.annotations["tencent.com/a000"].endswith("…")
    assert dict(found.containers[0].env) == {"SUBMITTER": "s" * 1023 + "…"}
    assert found.labels == {}


MANY = [{"x": 1}] * 5000


@pytest.mark.parametrize(
    "parts",
    [
        {"metadata": {"ownerReferences": MANY}},
        {"metadata": {"ownerReferences": "mine", "annotations": 7, "labels": []}},
        {"metadata": {"ownerReferences": [3, {"controller": True, "kind": []}], "resourceVersion": 5}},
        {"status": {"containerStatuses": MANY, "initContainerStatuses": [None, 3]}},
        {"status": {"containerStatuses": "running", "phase": ["Failed"], "reason": 3, "message": {}}},
        {"status": {"phase": "Rebooting"}},
    ],
)
def test_a_pod_is_known_whatever_stands_where_nobody_reads(parts: dict[str, Any]) -> None:
    """Long lists and garbage outside of identity and resources leave a pod with its resources."""
    assert read(raw_pod(**parts)).requests_any(VCORE_RESOURCE)


@pytest.mark.parametrize("env", [MANY, "garbage", [None, 3, {"name": [], "value": {}}]])
def test_a_pod_is_known_whatever_its_environment(env: Any) -> None:
    """More than a thousand variables, or none that is one, do not hide the pod."""
    raw = raw_pod(cores=None)
    raw["spec"]["containers"][0]["env"] = env
    found = read(raw)
    assert not found.requests_any(VCORE_RESOURCE) and [c.name for c in found.containers] == ["main"]


def test_of_very_many_containers_those_that_ask_are_kept() -> None:
    """Thousands of containers are cut, but none that asks for our resources, and positions stay true."""
    raw = raw_pod(cores=None)
    asking = {"name": "asks", "resources": {"limits": {VCORE_RESOURCE: "10"}}}
    raw["spec"]["containers"] = [*({"name": f"c{number}"} for number in range(3000)), asking]
    found = read(raw)
    assert len(found.containers) == 1001
    assert (found.containers[-1].name, found.containers[-1].position) == ("asks", 3000)


@pytest.mark.parametrize(
    "container",
    [
        None,
        {"name": "main", "resources": "many"},
        {"name": "main", "resources": {"limits": [1]}},
        {"resources": {"limits": {VCORE_RESOURCE: "1"}}},
    ],
)
def test_a_pod_whose_resources_are_unreadable_is_corrupt(container: Any) -> None:
    """What a pod asks for is never guessed."""
    with pytest.raises(Corrupt, match="pod default/p"):
        read(raw_pod(spec={"containers": [container]}))


@pytest.mark.parametrize(
    ("statuses", "running"),
    [
        ([{"name": "main", "state": {"running": {"startedAt": "x"}}}], {"main"}),
        ([{"name": "main", "state": {"running": {}}}, {"name": "gone", "state": {"running": {}}}], {"main"}),
        ([{"name": "main", "state": {"waiting": {}}, "lastState": {"running": {}}}], set()),
        ([{"name": "main", "state": {"running": None, "terminated": {}}}], set()),
        ([{"name": ["main"], "state": {"running": {}}}, None, {"name": "main", "state": "running"}], set()),
        ([{"name": "main", "state": {"running": 1}}], set()),
        ({"main": {"running": {}}}, set()),
    ],
)
def test_the_containers_that_run_are_reported(statuses: Any, running: set[str]) -> None:
    """A container of the pod runs when its present state says so; garbage says nothing."""
    assert read(raw_pod(status={"containerStatuses": statuses})).running == running


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"waiting": {"reason": "CrashLoopBackOff"}}, "CrashLoopBackOff"),
        ({"terminated": {"reason": "OOMKilled", "exitCode": 137}}, "OOMKilled"),
        ({"running": {}}, None),
        ({"waiting": {}}, None),
        ({"waiting": {"reason": "<b>x</b>"}}, None),
        ({"waiting": {"reason": "A" * 41}}, None),
        ({"waiting": "CrashLoopBackOff"}, None),
    ],
)
def test_why_a_container_does_not_run_is_the_kubelets_word(state: Any, reason: str | None) -> None:
    """Of a container of the pod; a tenant's own text is none."""
    statuses = [{"name": "main", "state": state}, {"name": "gone", "state": {"waiting": {"reason": "Error"}}}]
    found = read(raw_pod(status={"containerStatuses": statuses})).not_running
    assert found == ({"main": reason} if reason else {})


def test_init_containers_run_too() -> None:
    """A sidecar's status stands among those of init containers."""
    spec = {"initContainers": [{"name": "proxy", "restartPolicy": "Always"}]}
    statuses = {"initContainerStatuses": [{"name": "proxy", "state": {"running": {}}}]}
    assert read(raw_pod(spec=spec, status=statuses)).running == {"proxy"}


@pytest.mark.parametrize(
    ("text", "number"),
    [("", 0), ("17", 17), ("0", 0), ("9" * 5000, 0), ("²", 0), ("٣", 0), ("-5", 0), ("1.5", 0), (" 7", 0), ("abc", 0)],
)
def test_a_garbage_version_counts_as_none(text: str, number: int) -> None:
    """Only plain digits of at most 64 bits are a version to compare by; nothing raises."""
    assert version_number(text) == number


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [path, *(p for key, item in value.items() for p in _paths(item, (*path, key)))]
    if isinstance(value, list):
        return [path, *(p for index, item in enumerate(value) for p in _paths(item, (*path, index)))]
    return [path]


JUNK = any_json()


@given(path=st.sampled_from(_paths(FULL)), junk=JUNK)
def test_junk_anywhere_is_read_or_corrupt(path: tuple[Any, ...], junk: Any) -> None:
    """Whatever stands in whatever place, the outcome is a Pod or Corrupt."""
    raw: Any = copy.deepcopy(FULL)
    if not path:
        raw = junk
    else:
        parent = raw
        for step in path[:-1]:
            parent = parent[step]
        parent[path[-1]] = junk
    try:
        assert isinstance(read(raw), Pod)
    except Corrupt as e:
        assert len(str(e)) < 2000


def test_the_ids_of_running_containers_are_kept_without_the_runtimes_name() -> None:
    """Only of containers that want something, and only what is 64 hexadecimal digits: it is searched below the cgroups."""
    limits = {"limits": {"tencent.com/vcuda-core": "10"}}
    names = ("main", "other", "ended", "odd", "long")
    raw = {
        "metadata": {"namespace": "n", "name": "p", "uid": "u"},
        "spec": {"containers": [{"name": name, "resources": {} if name == "other" else limits} for name in names]},
        "status": {
            "containerStatuses": [
                {"name": "main", "containerID": "containerd://" + "ab" * 32, "state": {"running": {}}},
                {"name": "other", "containerID": "containerd://" + "cd" * 32, "state": {"running": {}}},
                {"name": "ended", "containerID": "containerd://" + "ef" * 32, "state": {"terminated": {}}},
                {"name": "odd", "containerID": "containerd://../../" + "ab" * 32, "state": {"running": {}}},
                {"name": "long", "containerID": 7, "state": {"running": {}}},
                {"name": "unknown", "containerID": "cri-o://" + "ab" * 32, "state": {"running": {}}},
            ]
        },
    }
    assert read(raw).container_ids == {"main": "ab" * 32}


@pytest.mark.parametrize("has_own", [False, True])
def test_the_claim_for_extended_resources_is_in_the_status_alone(has_own: bool) -> None:
    """Each container uses the requests that the status maps to it, also next to a claim of that name in the spec: else no
    pod would be known to use it, and it would never be prepared."""
    own = [{"name": "extended-resources", "resourceClaimName": "mine"}] if has_own else []
    raw = {
        "metadata": {"namespace": "n", "name": "p", "uid": "u"},
        "spec": {"containers": [{"name": "a"}, {"name": "b"}, {"name": "c"}], "resourceClaims": own},
        "status": {
            "extendedResourceClaimStatus": {
                "resourceClaimName": "p-extended-resources-x",
                "requestMappings": [
                    {"containerName": "a", "requestName": "container-0-request-0", "resourceName": "nvidia.com/gpu"},
                    {"containerName": "b", "requestName": "container-1-request-0", "resourceName": "nvidia.com/gpu"},
                    {"containerName": "c", "requestName": 7},
                ],
            }
        },
    }
    found = read(raw)
    name = "extended-resources." if has_own else "extended-resources"
    assert found.claims == {one["name"]: one["resourceClaimName"] for one in own} | {name: "p-extended-resources-x"}
    used = {container.name: container.claims for container in found.containers}
    assert used == {"a": ((name, "container-0-request-0"),), "b": ((name, "container-1-request-0"),), "c": ()}


# --- mistyped annotations ---


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("tencent.com/vcuda-core-limits", "tencent.com/vcuda-core-limit"),
        ("tencent.com/vcuda_core_limit", "tencent.com/vcuda-core-limit"),
        ("tencent.com/VCUDA-Core-Limit", "tencent.com/vcuda-core-limit"),
        ("tencent.com/gpu-isolaton", "tencent.com/gpu-isolation"),
        ("gpushare-agent/isolaton", "tencent.com/gpu-isolation"),
        ("gpushare-agent/gpu-isolation", "tencent.com/gpu-isolation"),
        ("gpushare-agent/resise", "gpushare-agent/resize"),
    ],
)
def test_an_annotation_that_is_like_a_known_one_is_named_with_it(name: str, meant: str) -> None:
    """As it stands in the pod that the agent stores."""
    stored = read(raw_pod(metadata={"annotations": {name: "1", "a.test/other": "2"}})).annotations
    assert mistyped_annotations(stored) == f"annotation {name} is unknown and has no effect: did you mean {meant}?"


@pytest.mark.parametrize(
    "name",
    [
        *("tencent.com/vcuda-core-limit", "tencent.com/gpu-isolation", "gpushare-agent/resize"),
        *("gpushare-agent/resize-status", "gpushare-agent/retry-at", CLAIMS_RETRY_ANNOTATION),
        *("tencent.com/gpu-assigned", "tencent.com/predicate-node", "tencent.com/predicate-time"),
        *("tencent.com/predicate-gpu-idx-0", "tencent.com/vcuda-device", "tencent.com/vcuda-core"),
        *("tencent.com/vcuda-memory-limit", "tencent.com/gpu-location", "tencent.com/resize", "tencent.com/gpu-model"),
        *("a.test/vcuda-core-limits", "gpushare-agent.test/resise", "gpushare-agent/x", "tencent.com/"),
    ],
)
def test_known_annotations_and_other_programs_are_none(name: str) -> None:
    """A warning about what is right would be worse than none about what is wrong."""
    assert not mistyped_annotations({name: "1"})


def test_many_annotations_are_compared_with_a_bound() -> None:
    """Long names not at all; of hundreds the first few."""
    assert not mistyped_annotations({f"gpushare-agent/{'resize' * 50}": "1"})
    text = mistyped_annotations({f"gpushare-agent/resize{number:03}": "1" for number in range(500)})
    assert text.count("did you mean") == MAX_COMPARED
