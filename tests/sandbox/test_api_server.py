"""The embedded API server over HTTP, as a client of a real one would meet it."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from gpushare_agent.core.model.errors import StartupError
from gpushare_agent.sandbox.api.kinds import KINDS
from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from tests.fakes.api_server import JSON_PATCH, MERGE, PODS, STRATEGIC, open_client
from tests.sandbox.support_sandbox import pod


async def test_a_created_pod_has_identity_defaults_and_a_pending_status() -> None:
    """It is there once, under its name: 201, 409 AlreadyExists, 404 NotFound."""
    async with open_client() as client:
        status, raw = await client.call("POST", PODS, pod("a"))
        assert status == 201
        assert raw["status"]["phase"] == "Pending"
        assert isinstance(raw["metadata"]["resourceVersion"], str)
        assert raw["metadata"]["uid"]
        assert raw["spec"]["terminationGracePeriodSeconds"] == 30
        assert (await client.call("GET", f"{PODS}/a"))[1] == raw
        assert (await client.call("POST", PODS, pod("a")))[1]["reason"] == "AlreadyExists"
        status, body = await client.call("GET", f"{PODS}/b")
        assert (status, body["reason"], body["details"]) == (404, "NotFound", {"name": "b", "kind": "pods"})


def timed(seconds: str) -> dict[str, Any]:
    return pod("a", annotations={"sandbox.gpushare/run-seconds": seconds})


@pytest.mark.parametrize(
    ("manifest", "code", "field"),
    [
        ({"kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": []}}, 422, "spec.containers"),
        ({"kind": "Pod", "metadata": {"name": "No!"}, "spec": {"containers": [{"name": "x"}]}}, 422, "metadata.name"),
        ({"kind": "Service", "metadata": {"name": "a"}, "spec": {}}, 422, "kind"),
        ({**pod("a"), "metadata": {"name": "a", "namespace": "other"}}, 400, "namespace"),
        ([], 400, "object"),
        *((timed(seconds), 422, "sandbox.gpushare/run-seconds") for seconds in ("soon", "-1", "nan", "")),
    ],
)
async def test_a_bad_manifest_is_refused_with_a_status_body(manifest: Any, code: int, field: str) -> None:
    """At creation, because later nobody would hear of it: kind Status, the HTTP code in it, a reason, and the field."""
    async with open_client() as client:
        status, body = await client.call("POST", PODS, manifest)
        reason = {400: "BadRequest", 422: "Invalid"}[code]
        assert (status, body["kind"], body["code"], body["reason"]) == (code, "Status", code, reason)
        assert field in body["message"]


async def test_lists_are_filtered_by_fields_and_namespace() -> None:
    """spec.nodeName=, metadata.name=, status.phase!=; an absent field counts as empty."""
    async with open_client() as client:
        for name in ("a", "b", "c"):
            client.api.create_pod(pod(name))
        client.api.create_pod(pod("d"), "other")
        client.api.bind_pod("default", "a", "node-a")
        client.api.set_pod_status("default", "b", {"phase": "Failed"})

        async def names(path: str, selector: str) -> list[str]:
            _, body = await client.call("GET", path, fieldSelector=selector)
            assert (body["kind"], body["apiVersion"]) == ("PodList", "v1")
            return [item["metadata"]["name"] for item in body["items"]]

        assert await names("/api/v1/pods", "spec.nodeName=node-a") == ["a"]
        assert await names("/api/v1/pods", "spec.nodeName=") == ["b", "c", "d"]
        assert await names(PODS, "status.phase!=Failed") == ["a", "c"]
        assert await names(PODS, "metadata.name==c,status.phase!=Failed") == ["c"]
        assert (await client.call("GET", PODS, fieldSelector="nonsense"))[0] == 400


async def test_a_watch_goes_on_where_the_list_ended() -> None:
    """Every change after the list's version, once, in order; a deletion carries a newer version. Without one it begins with
    what is there."""
    async with open_client() as client:
        client.api.create_pod(pod("a"))
        _, listed = await client.call("GET", "/api/v1/pods")
        async with client.watch() as watch:
            assert (await watch.next())[0] == "ADDED"
        client.api.create_pod(pod("b"))
        async with client.watch(resourceVersion=listed["metadata"]["resourceVersion"]) as watch:
            assert (await watch.next())[1]["metadata"]["name"] == "b"
            client.api.set_pod_status("default", "b", {"phase": "Running"})
            kind, modified = await watch.next()
            assert (kind, modified["status"]["phase"]) == ("MODIFIED", "Running")
            client.api.delete_pod("default", "b", grace_period_s=0)
            kind, deleted = await watch.next()
            assert kind == "DELETED"
            assert int(deleted["metadata"]["resourceVersion"]) > int(modified["metadata"]["resourceVersion"])


async def test_a_pod_that_enters_or_leaves_the_selector_is_added_or_deleted() -> None:
    """Binding brings a pod into a node's watch as ADDED; a phase selector lets it go as DELETED."""
    async with open_client() as client:
        client.api.create_pod(pod("a"))
        selector = "spec.nodeName=node-a,status.phase!=Failed"
        async with client.watch(fieldSelector=selector, resourceVersion=str(client.api.version)) as watch:
            client.api.bind_pod("default", "a", "node-a")
            assert (await watch.next())[0] == "ADDED"  # with its condition: a binding is one change
            client.api.set_pod_status("default", "a", {"phase": "Running"})
            assert (await watch.next())[0] == "MODIFIED"
            client.api.set_pod_status("default", "a", {"phase": "Failed"})
            assert (await watch.next())[0] == "DELETED"


async def test_a_version_that_is_forgotten_is_gone() -> None:
    """410 as an ERROR event, after compact() and when the bounded history has run over."""
    async with open_client(history_limit=3) as client:
        first = str(client.api.version)
        for name in "abcde":
            client.api.create_pod(pod(name))
        for forget in (lambda: None, client.api.store.compact):
            forget()
            async with client.watch(resourceVersion=first) as watch:
                [(kind, body)] = await watch.rest()
                assert (kind, body["code"], body["reason"]) == ("ERROR", 410, "Expired")
        async with client.watch(resourceVersion=str(client.api.version), timeoutSeconds="0") as watch:
            assert await watch.rest() == []


async def test_a_watch_that_lags_behind_the_history_ends() -> None:
    """The 410 comes in the middle of a stream."""
    async with open_client() as client, client.watch() as watch:
        client.api.running.clear()
        client.api.create_pod(pod("a"))
        client.api.store.compact()
        client.api.running.set()
        [(kind, body)] = await watch.rest()
        assert (kind, body["code"]) == ("ERROR", 410)


async def test_bookmarks_come_where_asked_for_and_at_the_end() -> None:
    """With the newest version; never without allowWatchBookmarks."""
    async with open_client(bookmark_interval_s=0.02) as client:
        client.api.create_pod(pod("a"))
        version = str(client.api.version)
        async with client.watch(resourceVersion=version, allowWatchBookmarks="true", timeoutSeconds="1") as watch:
            kind, body = await watch.next()
            assert (kind, body["kind"], body["metadata"]["resourceVersion"]) == ("BOOKMARK", "Pod", version)
            assert {kind for kind, _ in await watch.rest()} == {"BOOKMARK"}
        async with client.watch(resourceVersion=version, timeoutSeconds="0") as watch:
            assert await watch.rest() == []


@pytest.mark.parametrize("kind", [MERGE, STRATEGIC])
async def test_merge_patches_change_and_remove_annotations(kind: str) -> None:
    """null removes; the rest stays; an equal patch makes no new version."""
    async with open_client() as client:
        client.api.create_pod(pod("a", annotations={"keep": "1", "drop": "2"}))
        patch = {"metadata": {"annotations": {"drop": None, "new": "3"}}}
        status, raw = await client.call("PATCH", f"{PODS}/a", patch, kind)
        assert (status, raw["metadata"]["annotations"]) == (200, {"keep": "1", "new": "3"})
        version = client.api.version
        assert (await client.call("PATCH", f"{PODS}/a", patch, kind))[1]["metadata"] == raw["metadata"]
        assert client.api.version == version


async def test_json_patches_work_on_annotations() -> None:
    """add, replace, remove and test, with ~1 for a slash."""
    async with open_client() as client:
        client.api.create_pod(pod("a", annotations={"x/y": "1", "z": "2"}))
        path = "/metadata/annotations/x~1y"
        operations = [
            {"op": "test", "path": path, "value": "1"},
            {"op": "replace", "path": path, "value": "9"},
            {"op": "remove", "path": "/metadata/annotations/z"},
            {"op": "add", "path": "/metadata/annotations/n", "value": "3"},
        ]
        _, raw = await client.call("PATCH", f"{PODS}/a", operations, JSON_PATCH)
        assert raw["metadata"]["annotations"] == {"x/y": "9", "n": "3"}


@pytest.mark.parametrize(
    ("name", "body", "content_type", "code", "reason"),
    [
        pytest.param("absent", {}, MERGE, 404, "NotFound", id="no such pod"),
        pytest.param("a", {"metadata": {"resourceVersion": "1"}}, MERGE, 409, "Conflict", id="an old version"),
        pytest.param("a", {"metadata": {"uid": "another"}}, MERGE, 409, "Conflict", id="another pod"),
        pytest.param("a", [1], MERGE, 422, "Invalid", id="no object"),
        pytest.param("a", [{"op": "remove", "path": "/nope"}], JSON_PATCH, 422, "Invalid", id="nothing to remove"),
        pytest.param("a", [{"op": "test", "path": "/kind", "value": "x"}], JSON_PATCH, 422, "Invalid", id="a failed test"),
        pytest.param("a", {}, "application/json", 415, "UnsupportedMediaType", id="no patch"),
    ],
)  # fmt: skip
async def test_a_patch_that_does_not_fit_is_refused(
    name: str, body: Any, content_type: str, code: int, reason: str
) -> None:
    """With a Status that says so; the pod stays as it is."""
    async with open_client() as client:
        client.api.create_pod(pod("a"))
        before = client.api.set_pod_status("default", "a", {"phase": "Running"})
        status, answer = await client.call("PATCH", f"{PODS}/{name}", body, content_type)
        assert (status, answer["kind"], answer["reason"]) == (code, "Status", reason)
        assert client.api.pod("default", "a") == before


async def test_status_and_spec_have_their_own_doors() -> None:
    """A patch of the pod leaves the status; one of /status leaves the spec; a changed pod spec is refused."""
    async with open_client() as client:
        client.api.create_pod(pod("a"))
        _, raw = await client.call("PATCH", f"{PODS}/a", {"status": {"phase": "Failed"}}, MERGE)
        assert raw["status"]["phase"] == "Pending"
        change = {"status": {"phase": "Running"}, "spec": {"nodeName": "x"}}
        status, _ = await client.call("PATCH", f"{PODS}/a", {"spec": {"nodeName": "x"}}, MERGE)
        assert status == 422
        _, raw = await client.call("PATCH", f"{PODS}/a/status", change, MERGE)
        assert raw["status"]["phase"] == "Running" and "nodeName" not in raw["spec"]


async def test_strategic_patches_merge_conditions_by_type() -> None:
    """Other conditions stay."""
    async with open_client() as client:
        client.api.create_pod(pod("a"))
        for kind in ("X", "Y", "X"):
            patch = {"status": {"conditions": [{"type": kind, "status": "True"}]}}
            _, raw = await client.call("PATCH", f"{PODS}/a/status", patch, STRATEGIC)
        assert [c["type"] for c in raw["status"]["conditions"]] == ["X", "Y"]


async def test_deletion_is_graceful_for_a_bound_pod_only() -> None:
    """Bound: marked, and left to the kubelet; grace 0, unbound or ended: gone at once; another UID: 409."""
    async with open_client() as client:
        for name in ("bound", "loose", "done"):
            client.api.create_pod(pod(name))
        for name in ("bound", "done"):
            client.api.bind_pod("default", name, "node-a")
        client.api.set_pod_status("default", "done", {"phase": "Succeeded"})
        wrong = {"preconditions": {"uid": "other"}}
        assert (await client.call("DELETE", f"{PODS}/bound", wrong))[0] == 409
        _, raw = await client.call("DELETE", f"{PODS}/bound", {"gracePeriodSeconds": 7})
        assert raw["metadata"]["deletionTimestamp"]
        assert raw["metadata"]["deletionGracePeriodSeconds"] == 7
        for name in ("loose", "done"):
            assert (await client.call("DELETE", f"{PODS}/{name}"))[0] == 200
        assert [p["metadata"]["name"] for p in client.api.pods()] == ["bound"]
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": raw["metadata"]["uid"]}}
        assert (await client.call("DELETE", f"{PODS}/bound", options))[0] == 200
        assert client.api.pods() == []


async def test_an_event_is_named_counted_up_and_selected() -> None:
    """By generateName; a repeated Event is a patch of the first."""
    async with open_client() as client:
        event = {"metadata": {"generateName": "e."}, "reason": "R", "message": "m", "involvedObject": {"name": "a"}}
        path = "/api/v1/namespaces/default/events"
        status, raw = await client.call("POST", path, event)
        name = raw["metadata"]["name"]
        assert (status, name[:2], raw["kind"]) == (201, "e.", "Event")
        await client.call("PATCH", f"{path}/{name}", {"count": 2}, MERGE)
        await client.call("POST", path, {**event, "involvedObject": {"name": "b"}})
        _, found = await client.call("GET", path, fieldSelector="involvedObject.name=a")
        assert [(one["reason"], one["count"]) for one in found["items"]] == [("R", 2)]


async def test_the_kubelets_next_status_of_a_node_keeps_what_an_agent_has_written() -> None:
    """Its labels and annotations; a removed label does not come back. A node has no namespace."""
    node = {
        "metadata": {"name": "n1", "labels": {"kubernetes.io/hostname": "n1"}},
        "status": {"capacity": {"cpu": "8"}},
    }
    async with open_client() as client:
        client.api.apply_node(node)
        for labels in ({"a": "1", "b": "2"}, {"b": None}):
            patch = {"metadata": {"labels": labels, "annotations": {"c": "3"}}}
            await client.call("PATCH", "/api/v1/nodes/n1", patch, STRATEGIC)
        client.api.apply_node({**node, "status": {"capacity": {"cpu": "4"}}})
        _, raw = await client.call("GET", "/api/v1/nodes/n1")
        assert raw["metadata"]["labels"] == {"a": "1", "kubernetes.io/hostname": "n1"}
        assert (raw["metadata"]["annotations"], raw["status"]) == ({"c": "3"}, {"capacity": {"cpu": "4"}})


async def test_version_health_and_access_reviews_answer() -> None:
    """gitVersion of the embedded release; every access is allowed."""
    async with open_client(version="1.34") as client:
        assert (await client.call("GET", "/version"))[1]["gitVersion"] == "v1.34.9"
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        review = {"resourceAttributes": {"verb": "list", "resource": "nodes"}}
        status, body = await client.call("POST", path, {"spec": review})
        assert (status, body["status"]["allowed"], body["spec"]) == (201, True, review)
        async with client.session.get(client.api.url + "/readyz") as answer:
            assert await answer.text() == "ok"


async def test_discovery_names_the_resources_for_kubectl() -> None:
    """Versions, groups, and the resources of each with what can be done to them."""
    async with open_client() as client:
        assert (await client.call("GET", "/api"))[1]["versions"] == ["v1"]
        groups = (await client.call("GET", "/apis"))[1]
        assert groups["kind"] == "APIGroupList"
        versions = [group["preferredVersion"]["groupVersion"] for group in groups["groups"]]
        assert versions == sorted({"policy/v1", *(kind.group_version for kind in KINDS.values())} - {"v1"})
        found = [(await client.call("GET", path))[1] for path in ("/api/v1", *(f"/apis/{one}" for one in versions))]
    assert [(one["kind"], one["groupVersion"]) for one in found] == [("APIResourceList", v) for v in ("v1", *versions)]
    by_name = {entry["name"]: entry for one in found for entry in one["resources"]}
    assert {name for name in by_name if "/" not in name} == KINDS.keys()
    assert by_name.keys() >= {"nodes/status", "pods/status", "resourceclaims/status"}
    cluster_wide = {name for name in KINDS if not by_name[name]["namespaced"]}
    assert cluster_wide == {"namespaces", "nodes", "deviceclasses", "resourceslices"}
    assert all({"get", "list", "watch", "create", "patch", "delete"} <= set(by_name[name]["verbs"]) for name in KINDS)


async def test_a_stalled_server_accepts_and_answers_later() -> None:
    """Requests hang until unstall; an open watch falls silent."""
    async with open_client() as client, client.watch() as watch:
        client.api.running.clear()
        client.api.create_pod(pod("a"))
        async with asyncio.TaskGroup() as group:
            held = group.create_task(client.call("GET", PODS))
            while ("GET", PODS) not in client.api.requests:
                await asyncio.sleep(0)
            assert not held.done()
            client.api.running.set()
        assert held.result()[0] == 200
        assert (await watch.next())[0] == "ADDED"


async def test_a_server_that_stops_listening_comes_back_on_its_port_with_its_objects() -> None:
    """Open watches break, new connections are refused, versions go on."""
    async with open_client() as client:
        client.api.create_pod(pod("a"))
        url, version = client.api.url, client.api.version
        async with client.watch(resourceVersion=str(version)) as watch:
            await client.api.stop_listening()
            with pytest.raises(aiohttp.ClientPayloadError):
                await watch.rest()
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.call("GET", PODS)
        await client.api.start_listening()
        assert client.api.url == url
        _, body = await client.call("GET", PODS)
        assert (len(body["items"]), body["metadata"]["resourceVersion"]) == (1, str(version))


async def test_a_taken_port_is_a_readable_start_error() -> None:
    """It names the address and what to do."""
    async with EmbeddedApiServer() as api:
        with pytest.raises(StartupError, match=f"127.0.0.1:{api.port}.*choose another port"):
            async with EmbeddedApiServer(port=api.port):
                pass
