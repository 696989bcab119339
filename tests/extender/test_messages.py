"""The scheduler's JSON: read with bounds, written with exact names; whatever else comes is refused and never raises."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_agent.core.kube.pods import read_pod_json
from gpushare_agent.core.model.errors import Corrupt
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.extender.cluster_state import Filtered
from gpushare_agent.extender.messages import (
    MAX_NODES,
    MAX_POD_BYTES,
    MAX_VICTIMS,
    VICTIMS_OF_A_STEP,
    binding_result,
    filter_result,
    host_priorities,
    parse_bind_args,
    parse_nodes_args,
    parse_preempt_args,
    preemption_result,
)
from gpushare_agent.extender.objects import asks_for_ours, host_request, lean_pod
from gpushare_agent.extender.steps import at_once
from tests.extender.support_extender import NAMES, pod_of, raw_pod
from tests.support_json import any_json, undecoded

DATA = Path(__file__).parent.parent / "data" / "extender"


def read(name: str) -> bytes:
    return (DATA / name).read_bytes()


def test_args_with_names_are_read() -> None:
    """The pod with what it asks for, and the names in their order."""
    args = parse_nodes_args(read("filter_args_names.json"), NAMES)
    assert (args.pod.namespace, args.pod.name) == ("team-a", "train")
    assert args.pod.containers[0].requests == {"tencent.com/vcuda-core": 60, "tencent.com/vcuda-memory": 8}
    assert args.names == ["node-a", "node-b", "node-c", "node-x"]
    assert args.raw_nodes is None


def test_args_with_whole_nodes_are_read_and_given_back_untouched() -> None:
    """What the scheduler sent of a node comes back as it was."""
    content = read("filter_args_nodes.json")
    args = parse_nodes_args(content, NAMES)
    assert args.names == ["node-a", "node-b"]
    answer = Filtered(fitting=["node-b"])
    nodes = json.loads(filter_result(answer, args))["Nodes"]
    assert nodes["items"] == [json.loads(content)["Nodes"]["items"][1]]


def test_results_have_the_fields_of_the_public_types_in_their_order() -> None:
    """Names as in the Go source, whether or not there is something to say."""
    names = parse_nodes_args(read("filter_args_names.json"), NAMES)
    answer = Filtered(fitting=["n2", "n1"], failed={"b": "y", "a": "x"}, unresolvable={"c": "z"})
    assert filter_result(answer, names) == (
        b'{"Nodes":null,"NodeNames":["n2","n1"],"FailedNodes":{"a":"x","b":"y"},'
        b'"FailedAndUnresolvableNodes":{"c":"z"},"Error":""}'
    )
    failed = Filtered(error="why")
    assert filter_result(failed, names) == (
        b'{"Nodes":null,"NodeNames":null,"FailedNodes":{},"FailedAndUnresolvableNodes":{},"Error":"why"}'
    )
    assert host_priorities([("n1", 10), ("n2", 0)]) == b'[{"Host":"n1","Score":10},{"Host":"n2","Score":0}]'
    assert binding_result("") == b'{"Error":""}'
    assert at_once(preemption_result({"n": [PodUid("u")]}, {"n": 1})) == (
        b'{"NodeNameToMetaVictims":{"n":{"Pods":[{"UID":"u"}],"NumPDBViolations":1}}}'
    )


def test_a_reason_that_utf8_cannot_have_is_answered_all_the_same() -> None:
    """A GPU's name may end in half a surrogate pair."""
    names = parse_nodes_args(read("filter_args_names.json"), NAMES)
    answered = json.loads(filter_result(Filtered(failed={"n1": "no GPU \ud800", "n2": "é"}), names))
    assert answered["FailedNodes"] == {"n1": "no GPU ?", "n2": "é"}


def test_both_forms_of_victims_say_the_same() -> None:
    """Whole pods and UIDs."""
    by_pod = at_once(parse_preempt_args(read("preemption_args_victims.json"), NAMES))
    by_uid = at_once(parse_preempt_args(read("preemption_args_meta.json"), NAMES))
    assert by_pod == by_uid
    assert by_uid.victims == {"node-b": ["victim-1"], "node-c": ["victim-2"]}
    assert by_uid.violations == {"node-b": 0, "node-c": 1}


def test_bind_args_are_read() -> None:
    """All four are needed."""
    args = parse_bind_args(read("bind_args.json"))
    assert (args.namespace, args.pod, args.node) == ("team-a", "train", "node-a")
    raw = json.loads(read("bind_args.json"))
    for field in raw:
        for value in (None, "", 7, "x" * 300):
            with pytest.raises(Corrupt, match=field):
                parse_bind_args(json.dumps(raw | {field: value}).encode())


JSON = any_json()
FIELDS = st.sampled_from(["Pod", "Nodes", "NodeNames", "NodeNameToVictims", "NodeNameToMetaVictims", "PodName", "Node"])
POD = st.just(raw_pod("a", (30, 4)))


@given(st.dictionaries(FIELDS, st.one_of(JSON, POD), max_size=4) | JSON)
def test_whatever_is_sent_is_read_or_refused(raw: Any) -> None:
    """Nothing but Corrupt is raised."""
    content = json.dumps(raw).encode()
    for parse in (
        lambda: parse_nodes_args(content, NAMES),
        lambda: at_once(parse_preempt_args(content, NAMES)),
        lambda: parse_bind_args(content),
    ):
        try:
            parse()
        except Corrupt as e:
            assert str(e)


@given(st.binary(max_size=64))
def test_bytes_that_are_no_json_are_refused(content: bytes) -> None:
    """And deep nesting too."""
    for bad in (content, b"[" * 100_000, b'{"Pod":' + b"[" * 100_000):
        with pytest.raises(Corrupt):
            parse_bind_args(bad)


def test_a_kept_pod_has_what_it_asks_for_and_nothing_that_a_tenant_wrote() -> None:
    """Containers that ask for nothing are left out and positions stay; alike containers are one object. Of annotations it is
    known whether any chooses GPUs, and which GPUs the owner accepts, and no more."""
    raw = raw_pod("a", (0, 0), (30, 4), annotations={"tencent.com/predicate-gpu-idx-1": "0"})
    first, second = pod_of(raw), pod_of(raw)
    assert [(c.name, c.position) for c in first.containers] == [("c1", 1)]
    assert first.containers[0] is second.containers[0]
    assert first.annotations == {"tencent.com/predicate-gpu-idx-": ""}
    assert pod_of(raw_pod("a", (30, 4), annotations={"mine": "x"})).annotations == {}
    accepting = raw_pod("a", (30, 4), annotations={"mine": "x", "nvidia.com/use-gputype": "A100"})
    assert pod_of(accepting).annotations == {"nvidia.com/use-gputype": "A100"}


def asking(cpu: str = "", memory: str = "", **more: Any) -> dict[str, Any]:
    requests = {name: amount for name, amount in (("cpu", cpu), ("memory", memory)) if amount}
    return {"name": "c", "resources": {"requests": requests}, **more}


SIDECAR = {"restartPolicy": "Always"}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, (0, 0)),
        ({"containers": [asking("250m", "64Mi"), asking("1.5", "1G")]}, (1750, 64 + 954)),
        ({"containers": [{"name": "c", "resources": {"limits": {"cpu": "0.5"}}}]}, (500, 0)),
        # The largest init container alone, with the sidecars before it; after it the sidecars and all containers.
        ({"initContainers": [asking("3")], "containers": [asking("1"), asking("1")]}, (3000, 0)),
        ({"initContainers": [asking("1", **SIDECAR), asking("3")], "containers": [asking("1")]}, (4000, 0)),
        ({"initContainers": [asking("3"), asking("1", **SIDECAR)], "containers": [asking("2.5")]}, (3500, 0)),
        ({"containers": [asking("1", "1Gi")], "resources": {"requests": {"cpu": "2"}}}, (2000, 1024)),
        ({"containers": [asking("1")], "overhead": {"cpu": "100m", "memory": "10Mi"}}, (1100, 10)),
        ({"containers": [asking("-1", "much")], "overhead": [], "resources": "x"}, (0, 0)),
        ({"containers": [asking("9" * 15)]}, (1 << 40, 0)),
    ],
)
def test_what_a_pod_requests_of_its_node_is_what_the_scheduler_counts(
    spec: dict[str, Any], expected: tuple[int, int]
) -> None:
    """Milli-CPUs and MiB, rounded up; what is no quantity is nothing."""
    raw = {"metadata": {"uid": "u", "namespace": "n", "name": "p"}, "spec": spec}
    assert host_request(read_pod_json(undecoded(raw)).spec)[:2] == expected


def required(*terms: list[dict[str, Any]]) -> dict[str, Any]:
    selector = {"nodeSelectorTerms": [{"matchExpressions": expressions} for expressions in terms]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": selector}}}


def of_model(*models: str, operator: str = "In") -> dict[str, Any]:
    return {"key": "model", "operator": operator, "values": list(models)}


@pytest.mark.parametrize(
    ("spec", "models"),
    [
        ({}, ()),
        ({"nodeSelector": {"model": "T4", "zone": "a"}}, ("T4",)),
        (required([of_model("T4", "A10")]), ("A10", "T4")),
        (required([of_model("T4")], [of_model("A10")]), ("A10", "T4")),
        (required([of_model("T4")], [{"key": "zone", "operator": "Exists"}]), ()),
        (required([of_model("T4", operator="NotIn")]), ()),
        ({"nodeSelector": 1, "affinity": {"nodeAffinity": []}}, ()),
    ],
)
def test_the_models_that_a_pod_names_are_read_from_its_spec(spec: dict[str, Any], models: tuple[str, ...]) -> None:
    """By its node selector, or by every term that it requires of the node's affinity."""
    raw = {"metadata": {"uid": "u", "namespace": "n", "name": "p"}, "spec": spec}
    assert host_request(read_pod_json(undecoded(raw)).spec, "model").models == models


_TERMS = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}
_REQUIRED = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}


@pytest.mark.parametrize(
    ("spec", "prefers"),
    [
        ({}, False),
        ({"affinity": None, "topologySpreadConstraints": None}, False),
        ({"affinity": {"nodeAffinity": _REQUIRED, "podAffinity": None}}, False),
        ({"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}}, False),
        ({"topologySpreadConstraints": [{"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}]}, False),
        ({"affinity": {"nodeAffinity": _REQUIRED, "podAntiAffinity": _TERMS}}, True),
        ({"affinity": {"podAffinity": _TERMS}}, True),
        ({"topologySpreadConstraints": [{"whenUnsatisfiable": "ScheduleAnyway"}]}, True),
        ({"affinity": "unreadable"}, True),
    ],
)
def test_a_pods_own_preferences_are_seen(spec: dict[str, Any], prefers: bool) -> None:
    """What it requires is no preference: kube-scheduler has decided on that before it asks."""
    pod = raw_pod("a", (30, 4))
    pod["spec"] |= spec
    content = json.dumps({"Pod": pod, "Nodes": None, "NodeNames": ["n"]}).encode()
    assert parse_nodes_args(content, NAMES).prefers_nodes is prefers


@given(JSON)
def test_the_quick_look_never_overlooks_a_pod(raw: Any) -> None:
    """It says no only where the full reading finds no request of ours."""
    pod = {"metadata": {"uid": "u", "namespace": "n", "name": "p", "annotations": raw}, "spec": raw}
    try:
        read = read_pod_json(undecoded(pod))
    except Corrupt:
        return
    assert asks_for_ours(read, NAMES) or lean_pod(read, NAMES).containers == ()


def test_violations_are_a_whole_number_of_gos() -> None:
    """Any int64 is given back; a bool, and what an int64 does not hold, is refused."""

    def read_back(count: object) -> Mapping[str, int]:
        meta = {"n": {"Pods": [{"UID": "u"}], "NumPDBViolations": count}}
        content = json.dumps({"Pod": raw_pod("a", (30, 4)), "NodeNameToMetaVictims": meta}).encode()
        return at_once(parse_preempt_args(content, NAMES)).violations

    for count in (0, 1, (1 << 63) - 1):
        assert read_back(count) == {"n": count}
    for odd in (True, False, -1, 10**30, 1 << 63, 1.0, "1", None):
        with pytest.raises(Corrupt, match="NumPDBViolations"):
            read_back(odd)


@pytest.mark.parametrize("small", [b"{}", b"[]", b"1", b'{"":0}', b"[[]]"])
def test_a_request_of_nothing_but_small_values_is_not_decoded(small: bytes) -> None:
    """It would take 35 times its size in memory: it is refused by its bytes, though it is malformed at its end."""
    content = b'{"Pod":{},"Nodes":{"items":[' + b",".join([small] * 100_000) + b"]}"
    with pytest.raises(Corrupt, match="no scheduler's request"):
        parse_nodes_args(content, NAMES)


def test_values_are_read_as_python_reads_them() -> None:
    """Whatever stands between them, and whatever is in them."""
    nodes = [{"metadata": {"name": f"n{n}"}, "é\n": ["]", "}", '"', "\\", 1.5, -1, None, "x" * n]} for n in (0, 40_000)]
    raw = {"Pod": raw_pod("a", (30, 4)), "Other": [{}, [], "", {"a": [1]}], "Nodes": {"metadata": {}, "items": nodes}}
    for shape in ({"indent": 3}, {"ensure_ascii": False}, {"separators": (",", ":")}):
        args = parse_nodes_args(json.dumps(raw, **shape).encode(), NAMES)
        assert args.names == ["n0", "n40000"]
        answer = filter_result(Filtered(fitting=list(args.names)), args)
        assert json.loads(answer)["Nodes"]["items"] == nodes


def test_a_pod_that_is_too_long_is_refused() -> None:
    """No pod is as long; a node may be, because what is not read of it is skipped."""
    long = {"metadata": {"name": "a"}, "other": "x" * MAX_POD_BYTES}
    with pytest.raises(Corrupt, match=str(MAX_POD_BYTES)):
        parse_nodes_args(json.dumps({"Pod": long, "NodeNames": []}).encode(), NAMES)
    args = parse_nodes_args(json.dumps({"Pod": raw_pod("a", (30, 4)), "Nodes": {"items": [long]}}).encode(), NAMES)
    assert args.names == ["a"]


@pytest.mark.parametrize("victims", [{"pods": [{"UID": "u"}]}, {"Pods": [{"uid": "u"}]}, {"Pods": [{}]}, {"Pods": "u"}])
def test_victims_in_another_form_are_refused(victims: object) -> None:
    """They would read as a node where nothing has to end."""
    content = json.dumps({"Pod": raw_pod("a", (30, 4)), "NodeNameToMetaVictims": {"n": victims}}).encode()
    with pytest.raises(Corrupt, match=r"NodeNameToMetaVictims|without a UID"):
        at_once(parse_preempt_args(content, NAMES))


@pytest.mark.parametrize("form", ["names", "nodes", "victims"])
def test_a_request_about_more_nodes_than_any_cluster_has_is_refused(form: str) -> None:
    """However short their names; and one about 20,000 is not."""
    for count in (MAX_NODES, MAX_NODES + 1):
        names = [f"node-with-a-name-of-some-length-{number}" for number in range(count)]
        about: dict[str, dict[str, object]] = {
            "names": {"NodeNames": names},
            "nodes": {"Nodes": {"items": [{"metadata": {"name": name}} for name in names]}},
            "victims": {"NodeNameToMetaVictims": {name: {"Pods": []} for name in names}},
        }
        content = json.dumps({"Pod": raw_pod("a", (30, 4)), **about[form]}).encode()
        with pytest.raises(Corrupt, match=str(MAX_NODES)) if count > MAX_NODES else nullcontext():
            if form == "victims":
                at_once(parse_preempt_args(content, NAMES))
            else:
                parse_nodes_args(content, NAMES)


def test_victims_are_bounded_by_node_and_read_in_steps() -> None:
    """No kubelet runs as many pods as MAX_VICTIMS. Of more nodes' victims each step reads about VICTIMS_OF_A_STEP, and the
    answer is written so too."""
    uids = [f"victim-with-a-uid-of-36-characters-{number:04d}" for number in range(MAX_VICTIMS + 1)]

    def content(nodes: int, victims: int) -> bytes:
        meta = {f"node-{n:04d}": {"Pods": [{"UID": uid} for uid in uids[:victims]]} for n in range(nodes)}
        return json.dumps({"Pod": raw_pod("a", (30, 4)), "NodeNameToMetaVictims": meta}).encode()

    at_once(parse_preempt_args(content(1, MAX_VICTIMS), NAMES))
    with pytest.raises(Corrupt, match=rf"node node-0000: .*{MAX_VICTIMS}"):
        at_once(parse_preempt_args(content(1, MAX_VICTIMS + 1), NAMES))
    args = at_once(parse_preempt_args(content(50, 99), NAMES))
    assert sum(1 for _ in parse_preempt_args(content(50, 99), NAMES)) == 50 * 100 // VICTIMS_OF_A_STEP
    assert sum(1 for _ in preemption_result(args.victims, args.violations)) == 50 * 100 // VICTIMS_OF_A_STEP


def test_requests_with_whole_nodes_are_far_from_the_bound_on_small_values() -> None:
    """A thousand recorded nodes; and the densest, 13 bytes a value: nodes of a cluster were seen with 16.7."""
    [item, *_] = json.loads(read("filter_args_nodes.json"))["Nodes"]["items"]
    recorded = [{**item, "metadata": {**item["metadata"], "name": f"n{number}"}} for number in range(1000)]
    densest = {"metadata": {"name": "a"}, "status": [10**11 + number for number in range(100_000)]}
    for items in (recorded, [densest]):
        raw = {"Pod": raw_pod("a", (30, 4)), "Nodes": {"items": items}}
        content = json.dumps(raw, separators=(",", ":")).encode()
        assert parse_nodes_args(content, NAMES).names == [one["metadata"]["name"] for one in items]
