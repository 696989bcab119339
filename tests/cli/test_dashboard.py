"""The server of the page of all nodes: whom it answers, and what of a waiting pod."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
import pytest

from gpushare_agent.core.kit import http_answers
from gpushare_agent.core.kube.pods import MAX_SCHEDULER_CHARS, read_pod_json
from gpushare_agent.core.model.allocations import Charge
from gpushare_agent.core.model.gpus import GpuReport
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.model.resources import Request
from gpushare_agent.core.node_report.annotations import ALLOCATIONS_ANNOTATION, GPUS_ANNOTATION
from gpushare_agent.core.node_report.documents import GpuState
from gpushare_agent.core.node_report.reported import reported_state
from gpushare_agent.core.placement import GpuAccount
from gpushare_agent.core.settings.settings import Settings
from gpushare_agent.extender.decisions.quota import Quota
from gpushare_agent.extender.objects import read_quota
from gpushare_agent.kubectl import cluster_reading, dashboard
from gpushare_agent.kubectl.cluster_reading import read_cluster_view
from gpushare_agent.kubectl.explain_waiting import first_reason, waiting_document
from tests.cli.support_cluster_page import extender, served_cluster, waiting
from tests.cli.test_explain_instances import claim, every_place, has, selector, slices
from tests.cluster.support_kube import running
from tests.extender.support_extender import raw_node, raw_pod
from tests.fakes.api_server import Raw, raw_status
from tests.support_deadline import DEADLINE_S


async def ask(url: str, **headers: str) -> tuple[int, Any, str]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, headers=named) as answer,
    ):
        text = await answer.text()
        is_json = answer.content_type == "application/json"
        return answer.status, json.loads(text) if is_json else text, answer.headers["Content-Security-Policy"]


async def shown(url: str, is_shown: Callable[[Any], object]) -> Any:
    """The answer once it is so."""
    while not is_shown(answer := (await ask(url))[1]):
        await asyncio.sleep(0.01)
    return answer


async def listed(url: str) -> None:
    """Until nodes and pods are."""
    await shown(f"{url}api/v1/cluster", lambda answer: not answer["not_listed"])


async def waiting_pods(url: str, count: int) -> Any:
    """The answer once so many wait."""
    return await shown(f"{url}api/v1/waiting", lambda answer: answer["count"] == count)


async def test_only_its_own_page_is_answered() -> None:
    """No other web page reads the cluster with the rights of whoever runs it."""
    async with served_cluster() as (url, _):
        own = url.rstrip("/")
        assert (await ask(f"{url}api/v1/cluster", Origin=own, Sec_Fetch_Site="same-origin"))[0] == 200
        for headers in (
            {"Host": "evil.example"},
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Sec_Fetch_Site": "cross-site"},
        ):
            assert (await ask(f"{url}api/v1/cluster", **headers))[0] == 403, headers
        status, page, policy = await ask(url)
        assert status == 200 and "GPUs of the cluster" in page
        assert "default-src 'self'" in policy


async def test_a_waiting_pod_with_every_gpu() -> None:
    """Its requests, what the scheduler wrote, cut, and each GPU's lack; a pod that waits no more is not found."""
    async with served_cluster() as (url, _):
        await listed(url)
        _, answer, _ = await ask(f"{url}api/v1/waiting")
        assert answer["count"] == 2
        pod = next(one for one in answer["pods"] if one["pod"] == "needs-much")
        assert pod["requests"] == [{"cores": 20, "memory_bytes": 65 * 256 << 20}]
        assert len(pod["message"]) == MAX_SCHEDULER_CHARS
        _, answer, _ = await ask(f"{url}api/v1/waiting?uid={pod['uid']}")
        assert [(node["name"], len(node["gpus"])) for node in answer["nodes"]] == [
            ("gpu-1", 8),
            ("gpu-2", 8),
            ("gpu-3", 2),
        ]
        assert answer["nodes"][0]["gpus"][0] == {
            "index": 0,
            "label": "0",
            "free_cores": 20,
            "free_bytes": 40 * 256 << 20,
            "verdict": "too small, with 16 GiB in all",
        }
        assert (await ask(f"{url}api/v1/waiting?uid=unknown"))[0] == 404
        assert (await ask(f"{url}api/v1/waiting?uid={'x' * 200}"))[0] == 400


async def test_more_than_any_node_has_fits_nowhere_and_has_its_remedies() -> None:
    """In the sentences of `kubectl gpushare explain`: no GPU of a node that does not suit the pod is green."""
    async with served_cluster() as (url, cluster):
        await listed(url)
        _, answer, _ = await ask(f"{url}api/v1/waiting?uid=uid-needs-nine")
        mistake = "900 cores are 9 GPUs, and no node has more than 8. Write tencent.com/vcuda-core: 800 or less."
        assert answer["mistake"] == f"container c0: {mistake}"
        assert (answer["fits"], answer["fitting"]) == ("", {"nodes": [], "gpus": []})
        change = answer["changes"][0]["text"]
        assert change.startswith("ask for 700 cores (200 fewer): GPUs 1, 2, 3, 4, 5, 6, 7 of gpu-")
        assert dict(answer["lines"])["to start now, one of:"][0] == change
        gpus = [gpu["verdict"] for node in answer["nodes"] for gpu in node["gpus"]]
        assert gpus.count("free, but the node does not suit the pod") == 7 and "fits" not in gpus
        away = waiting("away", (20, 8))
        away["spec"]["nodeSelector"] = {"pool": "b"}
        cluster.put("pods", away)
        while (answer := await ask(f"{url}api/v1/waiting?uid=uid-away"))[0] != 200:
            await asyncio.sleep(0.01)
        against = "the node does not match the pod's nodeSelector pool=b"
        assert all(node["verdict"].startswith(against) for node in answer[1]["nodes"])
        assert answer[1]["other_reasons"] == {against: 1} and "fits" not in json.dumps(answer[1]["nodes"])


@pytest.mark.parametrize(
    ("limits", "remedy"),
    [
        ({"tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "4Gi"}, "tencent.com/vcuda-memory: 16 for 4 GiB."),
        ({"tencent.com/vcuda-cores": "30"}, "Write tencent.com/vcuda-core: 30, in 1/100 of a GPU's compute."),
        ({"nvidia.com/gpumem": "3000", "nvidia.com/gpucores": "30"}, "and tencent.com/vcuda-memory: 12."),
    ],
)  # fmt: skip
async def test_a_wrong_request_waits_with_what_to_write(limits: dict[str, str], remedy: str) -> None:
    """Until it is deleted. Also where it asks for nothing of ours, and no other change is named."""
    async with served_cluster() as (url, cluster):
        mistaken = waiting("mistaken", (30, 8))
        mistaken["spec"]["containers"][0]["resources"] = {"limits": limits}
        cluster.put("pods", mistaken)
        answer = await waiting_pods(url, 3)
        (pod,) = [one for one in answer["pods"] if one["pod"] == "mistaken"]
        asked = ", ".join(f"{name}: {count}" for name, count in sorted(limits.items()))
        assert pod["mistake"].endswith(remedy) and (pod["requests"], pod["asked"]) == ([], asked)
        _, answer, _ = await ask(f"{url}api/v1/waiting?uid=uid-mistaken")
        assert (answer["mistake"], answer["changes"], answer["fits"]) == (pod["mistake"], [], "")
        assert not any(gpu["verdict"] == "fits" for node in answer["nodes"] for gpu in node["gpus"])
        cluster.remove("pods", "team-b/mistaken")
        await waiting_pods(url, 2)


async def test_only_an_agents_own_paths_are_reachable_through_it() -> None:
    """Of a node that is known; where no agent answers, its reason."""
    async with served_cluster() as (url, _):
        await listed(url)
        assert (await ask(f"{url}nodes/gpu-1/"))[0] == 200
        assert (await ask(f"{url}nodes/gpu-1/dashboard/app.js"))[0] == 200
        for path in ("metrics", "debug/state", "api/v1/..%2f..%2fsecrets"):
            assert (await ask(f"{url}nodes/gpu-1/{path}"))[0] == 404, path
        for what in ("node", "history", "changes", "decisions"):
            status, answer, _ = await ask(f"{url}nodes/gpu-1/api/v1/{what}")
            assert status == 404 and answer["error"].startswith("no agent runs on node gpu-1: "), what
        assert (await ask(f"{url}nodes/other/api/v1/node"))[1] == {"error": 'no node "other" is known'}
        assert (await ask(f"{url}nodes/gpu-1/api/v1/node", Origin="https://evil.example"))[0] == 403


async def test_a_node_with_half_a_surrogate_pair_hides_no_other() -> None:
    """An annotation may escape one in any of its texts; UTF-8 has none."""
    async with served_cluster() as (url, cluster):
        spoilt = raw_node("gpu-4")
        reported = json.loads(spoilt["metadata"]["annotations"][GPUS_ANNOTATION])
        reported["gpus"][0] |= {"name": "\ud800", "cordoned": "\udfff fan"}
        spoilt["metadata"]["annotations"] |= {
            GPUS_ANNOTATION: json.dumps(reported),
            ALLOCATIONS_ANNOTATION: json.dumps({"schema": 1, "allocations": {"\ud801": {"0": [10, 1, 0, 0]}}}),
        }
        cluster.put("nodes", spoilt)
        while (answer := await ask(f"{url}api/v1/cluster"))[0] == 200 and len(answer[1]["nodes"]) < 4:
            await asyncio.sleep(0.01)
        assert answer[0] == 200
        node = answer[1]["nodes"][3]
        gpu = node["gpus"][0]
        assert (gpu["name"], gpu["cordoned"], node["unattributed"]) == ("\ud800", "\udfff fan", ["\ud801"])


async def test_which_requests_of_waiting_pods_are_listed() -> None:
    """Those that are planned, and how many more it has: the answer for a pod of a thousand containers is a short one. One
    that waits for NVIDIA's resource alone is not there, whatever the reader's own settings say of it: nodes show their
    shares, and no unit of NVIDIA's."""
    async with served_cluster() as (url, cluster):
        other = waiting("whole", (0, 0))
        other["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": "1"}
        cluster.put("pods", other)
        cluster.put("pods", waiting("many", *[(1, 1)] * 1000))
        answer = await waiting_pods(url, 3)
        assert sorted(pod["pod"] for pod in answer["pods"]) == ["many", "needs-much", "needs-nine"]
        pod = next(one for one in answer["pods"] if one["pod"] == "many")
        assert (len(pod["requests"]), pod["more_requests"]) == (16, 984)
        _, answer, _ = await ask(f"{url}api/v1/waiting?uid={pod['uid']}")
        assert answer["nodes"][0]["verdict"].startswith("more than 16 containers of the pod ask for GPUs")
        assert (await ask(f"{url}api/v1/waiting?uid={other['metadata']['uid']}"))[0] == 404


async def test_the_page_says_what_explain_says() -> None:
    """Of the same cluster: from informers, or from one list; other resources of the nodes count, too."""
    hca = {"rdma/hca": "1"}
    async with served_cluster() as (url, cluster):
        for name in ("gpu-1", "gpu-2"):
            cluster.change("nodes", name, lambda raw: raw["status"]["allocatable"].update(hca))
        taken, waits = raw_pod("taken", (0, 0), node="gpu-1"), waiting("hca", (200, 0))
        for one in (taken, waits):
            resources = one["spec"]["containers"][0]["resources"]
            resources["requests"] = {**resources["limits"], **hca}
            cluster.put("pods", one)
        cluster.put("pods", waiting("last", (1, 1)))
        await waiting_pods(url, 4)
        async with cluster.opened_api() as api:
            read = await read_cluster_view(api, Settings())
            for pod in ("hca", "last", "needs-nine", "needs-much"):
                raw = await api.get_pod(waits["metadata"]["namespace"], pod, timeout_s=DEADLINE_S)
                found = await waiting_document(api, read, read_pod_json(raw))
                _, answer, _ = await ask(f"{url}api/v1/waiting?uid=uid-{pod}")
                assert found is not None
                assert [answer[name] for name in found if name != "nodes"] == json.loads(
                    json.dumps([found[name] for name in found if name != "nodes"])
                )
                if pod == "hca":
                    assert found["other_reasons"] == {"too little rdma/hca is left": 1}


async def test_what_namespaces_have_used_of_their_quota() -> None:
    """By the extender's count: also where a namespace has no pods, may have no GPU at all, or has used too much."""
    async with served_cluster() as (url, cluster):
        cluster.put_quota(
            {
                "team-a": {"quota": {"L4": 2, "H100": 1}, "vcore": 60, "pool": ["b", "a"]},
                "team-b": {"quota": {}},
                "empty": {"vmemory": 64},
            }
        )
        label = {"gaia.tencent.com/gpu-model": "L4"}
        for name in ("gpu-1", "gpu-2"):
            cluster.change("nodes", name, lambda raw: raw["metadata"].update(labels=label))
        cluster.put("pods", raw_pod("last", (1, 1), namespace="team-c", node="gpu-2"))
        await shown(f"{url}api/v1/cluster", lambda answer: "team-c/last" in json.dumps(answer))
        _, answer, _ = await ask(f"{url}api/v1/namespaces")
        of_a = [["H100 GPUs", 0, 1], ["L4 GPUs", 0.8, 2], ["vcore", 80, 60]]
        assert answer["quota_problem"] == ""
        assert [tuple(one.values()) for one in answer["namespaces"]] == [
            ("empty", 0, 0, [], [["vmemory blocks", 0, 64]]),
            ("team-a", 80, 6 << 30, ["a", "b"], of_a),
            ("team-b", 100, 16 << 30, [], [["GPUs", 1, 0]]),
            ("team-c", 1, 256 << 20, [], None),
        ]


async def test_a_quota_that_nobody_keeps_is_shown_and_holds_up_no_pod() -> None:
    """Once the last extender that was Ready is gone, and until there is one again."""
    async with served_cluster() as (url, cluster):
        cluster.put_quota({"team-b": {"quota": {}}})
        gone: dict[bool, str] = {True: "no extender enforces it here: none is Ready", False: ""}
        for is_ready in (True, False, True):
            cluster.put("pods", extender(is_ready=is_ready))
            await shown(f"{url}api/v1/namespaces", lambda answer: answer["quota_note"] == gone[not is_ready])  # noqa: B023
            _, answer, _ = await ask(f"{url}api/v1/waiting?uid=uid-needs-much")
            assert any("allows no GPUs at all" in one for one in answer["reasons"]) is is_ready
            assert (f"the quota ({gone[True]})" in answer["not_checked"]) is not is_ready
            [limits] = [
                one["limits"] for one in (await ask(f"{url}api/v1/namespaces"))[1]["namespaces"] if one["limits"]
            ]
            assert limits == [["GPUs", 1, 0]]


async def test_nobody_is_said_to_keep_no_quota_while_pods_are_not_listed() -> None:
    async with served_cluster(**{"/api/v1/pods": (403, raw_status(403, "no right"))}) as (url, cluster):
        cluster.put_quota({"team-b": {"quota": {}}})
        _, answer, _ = await ask(f"{url}api/v1/namespaces")
        assert (answer["quota_note"], answer["namespaces"][0]["limits"]) == ("", [["GPUs", 0, 0]])


async def test_a_deleted_pod_shows_no_extender() -> None:
    """Also one that asks for no GPU."""
    async with served_cluster() as (url, cluster):
        cluster.put_quota({"team-b": {"quota": {}}})
        cluster.put("pods", extender(is_ready=False))
        refused = waiting("refused")
        refused["status"]["conditions"][0]["message"] = "namespace team-b has used 1 of its quota of 1"
        for is_enforced, change in (
            (False, lambda: None),
            (True, lambda: cluster.put("pods", refused)),
            (False, lambda: cluster.remove("pods", "team-b/refused")),
        ):
            change()
            await shown(f"{url}api/v1/namespaces", lambda answer: bool(answer["quota_note"]) is not is_enforced)  # noqa: B023


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("", ""),
        ("0/3 nodes are available: 1 Insufficient cpu, 2 the pod, alone, asks: too much. preemption: none.",
         "1 Insufficient cpu"),
        ("0/1 nodes are available: 1 node(s) had untolerated taint {a: b}.", "1 node(s) had untolerated taint {a: b}."),
        ("waits for its gang", "waits for its gang"),
    ],
)  # fmt: skip
def test_a_row_has_the_first_reason(message: str, reason: str) -> None:
    assert first_reason(message, "") == reason
    assert first_reason(message, "Write 16.") == "Write 16."


async def test_a_quota_that_cannot_be_read_says_why() -> None:
    """Malformed, or without the right; nobody is shown as without a limit."""
    for answer, problem in ((None, "no JSON"), ((403, raw_status(403, "no right")), "no right")):
        async with served_cluster() as (url, cluster):
            cluster.put_quota("{")
            if answer is not None:
                cluster.script.answers["/api/v1/namespaces/kube-system/configmaps"] = answer
            _, found, _ = await ask(f"{url}api/v1/namespaces")
        assert problem in found["quota_problem"] and {one["limits"] for one in found["namespaces"]} <= {None}


def divided_node(name: str) -> Raw:
    """Of which all GPUs are for instances."""
    node = raw_node(name)
    reported = json.loads(node["metadata"]["annotations"][GPUS_ANNOTATION])
    ill = {**reported["gpus"][0], "name": "A100", "is_healthy": False, "reason": "row remapping failed"}
    node["metadata"]["annotations"][GPUS_ANNOTATION] = json.dumps({**reported, "gpus": [], "mig_gpus": [ill]})
    return {**node, "status": {}}


async def test_nodes_with_mig_on_demand_are_written_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand of them would hold the loop."""
    monkeypatch.setattr(http_answers, "SLICE_S", 0.0)
    made, turns = list[object](), set[int]()

    def counted(gpu: GpuReport) -> GpuState:
        made.append(gpu)
        return reported_state(gpu)

    async def count() -> None:
        while True:
            turns.add(len(made))
            await asyncio.sleep(0)

    monkeypatch.setattr(dashboard, "reported_state", counted)
    async with served_cluster([divided_node(f"gpu-{number}") for number in range(3)]) as (url, _), running(count):
        while (await ask(f"{url}api/v1/mig"))[1]["count"] < 3:
            made.clear()
            turns.clear()
    assert turns >= {1, 2}


async def test_a_large_quota_is_not_read_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page, its informers and what it reads of agents go on meanwhile."""
    threads = []

    def read(raw: msgspec.Raw) -> Quota:
        threads.append(threading.current_thread())
        return read_quota(raw)

    monkeypatch.setattr(cluster_reading, "read_quota", read)
    async with served_cluster() as (url, cluster):
        cluster.put_quota({f"namespace-{number}": {"vcore": 1} for number in range(100)})
        _, answer, _ = await ask(f"{url}api/v1/namespaces")
        assert (answer["quota_problem"], len(answer["namespaces"])) == ("", 102)
    assert threads and threading.current_thread() not in threads


async def test_mig_on_demand() -> None:
    """Its GPUs, also of a node without any other, until the node has gone; and the pods that wait for an instance, as
    `explain` explains them."""
    divided = divided_node("gpu-4")
    wants = {"exactly": {"deviceClassName": "mig", "selectors": selector("3g.40gb")}}
    waits = waiting("instance", (0, 0), namespace="ns")
    waits["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": "mine"}]
    other = waiting("other", (0, 0), namespace="ns")
    other["spec"]["resourceClaims"] = [{"name": "net", "resourceClaimName": "net"}]
    async with served_cluster() as (url, cluster):
        for one in slices(every_place()):
            cluster.put("resourceslices", one)
        for one in (claim("mine", wants), has("gpu-1-mig-3g40gb-0", "b"), has("gpu-1-mig-3g40gb-4", "c")):
            cluster.put("resourceclaims", one)
        cluster.put("resourceclaims", claim("net", {"exactly": {"deviceClassName": "net"}}))
        for name, raw in (("nodes", divided), ("pods", waits), ("pods", other)):
            cluster.put(name, raw)
        answer = await waiting_pods(url, 3)
        assert (answer["pods"][2]["pod"], answer["pods"][2]["asked"]) == ("instance", "claim gpu")
        # A page asks every few seconds, and claims may be many.
        lists = [one.path for one in cluster.seen].count("/apis/resource.k8s.io/v1/resourceclaims")
        assert (await ask(f"{url}api/v1/waiting"))[1]["count"] == 3
        assert lists == [one.path for one in cluster.seen].count("/apis/resource.k8s.io/v1/resourceclaims") == 1
        _, answer, _ = await ask(f"{url}api/v1/waiting?uid=uid-instance")
        assert "b" in dict(answer["lines"])["to start now, one of:"][0]
        assert (await ask(f"{url}api/v1/waiting?uid=uid-other"))[0] == 404
        nodes = (await shown(f"{url}api/v1/mig", lambda answer: answer["nodes"]))["nodes"]
        gpu = nodes["gpu-4"]["mig_gpus"][0]
        _, answer, _ = await ask(f"{url}nodes/gpu-4/api/v1/node")
        assert answer["error"].startswith("no agent runs on node gpu-4: ")
        assert list(nodes) == ["gpu-4"] and (gpu["name"], gpu["health_reason"]) == ("A100", "row remapping failed")
        cluster.remove("nodes", "gpu-4")
        await shown(f"{url}api/v1/mig", lambda answer: not answer["nodes"])
        divided["metadata"]["name"] = "gpu-3"
        cluster.put("nodes", divided)
        await shown(f"{url}api/v1/mig", lambda answer: answer["nodes"])
        # It has no shares any more.
        assert [node["name"] for node in (await ask(f"{url}api/v1/cluster"))[1]["nodes"]] == ["gpu-1", "gpu-2"]


async def test_claims_that_may_not_be_read_are_said() -> None:
    """The other waiting pods are listed all the same."""
    async with served_cluster() as (url, cluster):
        cluster.script.answers["/apis/resource.k8s.io/v1/resourceslices"] = (403, raw_status(403, "no right"))
        waits = waiting("instance", (0, 0))
        waits["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": "mine"}]
        cluster.put("pods", waits)
        answer = await shown(f"{url}api/v1/waiting", lambda answer: answer["claims_problem"])
        assert "no right" in answer["claims_problem"] and answer["count"] == 2
        assert (await ask(f"{url}api/v1/waiting?uid=uid-instance"))[0] == 502


@pytest.mark.parametrize(
    ("request_", "state", "text"),
    [
        ((30, 8), {"used": Charge(cores=80)}, "10 cores short"),
        ((30, 60), {"used": Charge(cores=80, blocks=10)}, "10 cores and 1.5 GiB short"),
        ((30, 70), {"used": Charge(cores=80)}, "too small, with 16 GiB in all"),
        ((30, 8), {}, ""),
        ((200, 0), {"used": Charge(cores=1)}, "in use: 99 cores and 16 GiB are free, and all of both are needed"),
        ((200, 0), {}, ""),
        ((30, 8), {"is_healthy": False}, "out of service"),
        ((100, 0), {"instance": "0:1"}, "a MIG instance, and no whole GPU"),
        (
            (30, 8),
            {"instance": "0:1", "takes_shares": False},
            "a MIG instance, in which the isolation keeps no share",
        ),
    ],
)
def test_what_a_gpu_lacks(request_: tuple[int, int], state: dict[str, Any], text: str) -> None:
    """By itself, for one container."""
    gpu = GpuAccount(index=0, uuid=GpuUuid("GPU-0"), memory_mib=16384, **state)
    lack = gpu.lack(Request(cores=request_[0], blocks=request_[1]))
    assert (lack.of_gpu() if lack is not None else "") == text
