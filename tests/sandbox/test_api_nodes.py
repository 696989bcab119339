"""What a node agent asks of the API server about nodes: labels and annotations of its own, Events, and the list of all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.api_server import JSON_PATCH, MERGE, STRATEGIC, open_client

NODE = "/api/v1/nodes/n1"
EVENTS = "/api/v1/namespaces/default/events"


def node(name: str = "n1", **status: Any) -> dict[str, Any]:
    """As the kubelet writes it."""
    metadata = {"name": name, "labels": {"kubernetes.io/hostname": name}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {}, "status": status}


def patch(**metadata: Any) -> dict[str, Any]:
    return {"metadata": metadata}


@pytest.mark.parametrize("content_type", [MERGE, STRATEGIC])
async def test_labels_and_annotations_of_a_node_are_merged_and_removed(content_type: str) -> None:
    """Each by its name; null removes one; what others have written stays."""
    async with open_client() as client:
        client.api.apply_node(node(capacity={"cpu": "8"}))
        added = patch(labels={"gpu.count": "8", "old": "x"}, annotations={"cards": "[]"})
        status, raw = await client.call("PATCH", NODE, added, content_type)
        assert (status, raw["status"]) == (200, {"capacity": {"cpu": "8"}})
        assert raw["metadata"]["labels"] == {"gpu.count": "8", "old": "x", "kubernetes.io/hostname": "n1"}
        _, raw = await client.call("PATCH", NODE, patch(labels={"old": None}), content_type)
        assert raw["metadata"]["labels"] == {"gpu.count": "8", "kubernetes.io/hostname": "n1"}
        assert raw["metadata"]["annotations"] == {"cards": "[]"}
        assert (await client.call("GET", NODE))[1] == raw


async def test_a_patch_that_changes_nothing_makes_no_new_version() -> None:
    """As in a real API server: no watcher is woken."""
    async with open_client() as client:
        client.api.apply_node(node())
        _, first = await client.call("PATCH", NODE, patch(labels={"a": "1"}), MERGE)
        _, again = await client.call("PATCH", NODE, patch(labels={"a": "1", "gone": None}), MERGE)
        assert again == first


async def test_the_kubelets_next_status_keeps_what_an_agent_has_written() -> None:
    """Its labels, its annotations; and a removed label does not come back."""
    async with open_client() as client:
        client.api.apply_node(node())
        await client.call("PATCH", NODE, patch(labels={"a": "1", "b": "2"}, annotations={"c": "3"}), MERGE)
        await client.call("PATCH", NODE, patch(labels={"b": None}), MERGE)
        client.api.apply_node(node(capacity={"cpu": "4"}))
        _, raw = await client.call("GET", NODE)
        assert raw["metadata"]["labels"] == {"a": "1", "kubernetes.io/hostname": "n1"}
        assert (raw["metadata"]["annotations"], raw["status"]) == ({"c": "3"}, {"capacity": {"cpu": "4"}})


async def test_a_patch_of_the_node_leaves_its_status_and_one_of_the_status_its_spec() -> None:
    """A subresource owns what it is named for."""
    async with open_client() as client:
        client.api.apply_node(node(capacity={"cpu": "8"}))
        whole = {"spec": {"unschedulable": True}, "status": {"capacity": {"cpu": "1"}}}
        _, raw = await client.call("PATCH", NODE, whole, MERGE)
        assert (raw["spec"], raw["status"]) == ({"unschedulable": True}, {"capacity": {"cpu": "8"}})
        _, raw = await client.call("PATCH", f"{NODE}/status", {**whole, "spec": {}}, MERGE)
        assert (raw["spec"], raw["status"]) == ({"unschedulable": True}, {"capacity": {"cpu": "1"}})


@pytest.mark.parametrize(
    ("path", "body", "content_type", "code"),
    [
        ("/api/v1/nodes/absent", patch(labels={}), MERGE, 404),
        (NODE, patch(resourceVersion="1"), MERGE, 409),
        (NODE, patch(uid="another"), MERGE, 409),
        (NODE, [1], MERGE, 422),
        (NODE, [{"op": "test", "path": "/metadata/name", "value": "n2"}], JSON_PATCH, 422),
        (NODE, patch(labels={}), "application/json", 415),
    ],
    ids=["no such node", "an old version", "another node", "no object", "a failed test", "no patch"],
)
async def test_a_patch_that_does_not_fit_is_refused(path: str, body: Any, content_type: str, code: int) -> None:
    """With a Status that says so; the node stays as it is."""
    async with open_client() as client:
        before = client.api.apply_node(node())
        status, raw = await client.call("PATCH", path, body, content_type)
        assert (status, raw["kind"], raw["code"]) == (code, "Status", code)
        assert client.api.node("n1") == before


async def test_all_nodes_are_listed_by_name_and_one_can_be_selected() -> None:
    """What an overview of the cluster asks for, and an agent that watches its own node."""
    async with open_client() as client:
        for name in ("n2", "n1"):
            client.api.apply_node(node(name))
        status, body = await client.call("GET", "/api/v1/nodes")
        assert (status, body["kind"], [n["metadata"]["name"] for n in body["items"]]) == (200, "NodeList", ["n1", "n2"])
        _, body = await client.call("GET", "/api/v1/nodes", fieldSelector="metadata.name=n2")
        assert [n["metadata"]["name"] for n in body["items"]] == ["n2"]


async def test_a_patched_node_is_seen_by_who_watches_it() -> None:
    """With its new annotation."""
    async with open_client() as client:
        version = client.api.apply_node(node())["metadata"]["resourceVersion"]
        selector = {"fieldSelector": "metadata.name=n1", "resourceVersion": version}
        async with client.watch("/api/v1/nodes", **selector) as watch:
            await client.call("PATCH", NODE, patch(annotations={"cards": "[1]"}), MERGE)
            kind, raw = await watch.next()
            assert (kind, raw["metadata"]["annotations"]) == ("MODIFIED", {"cards": "[1]"})


def event(name: str, **involved: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": name, "namespace": "default"},
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": "n1", **involved}, "type": "Warning",
        "reason": "GPUUnhealthy", "message": "Xid 79", "source": {"component": "gpushare-agent", "host": "n1"}, "count": 1,
    }  # fmt: skip


async def test_events_of_a_node_lie_in_the_default_namespace_and_can_be_counted_up() -> None:
    """A node has no namespace of its own; a repeated Event is a patch of the first."""
    async with open_client() as client:
        status, raw = await client.call("POST", EVENTS, event("n1.1", uid="n1"))
        assert (status, raw["metadata"]["namespace"]) == (201, "default")
        assert (await client.call("POST", EVENTS, event("n1.1")))[1]["reason"] == "AlreadyExists"
        assert (await client.call("PATCH", f"{EVENTS}/n1.1", {"count": 2}, MERGE))[1]["count"] == 2
        named = {**event(""), "metadata": {"generateName": "n1."}}
        assert (await client.call("POST", EVENTS, named))[1]["metadata"]["name"].startswith("n1.")
        selector = "involvedObject.kind=Node,involvedObject.name=n1"
        _, body = await client.call("GET", EVENTS, fieldSelector=selector)
        assert sorted(e["count"] for e in body["items"]) == [1, 2]


@pytest.mark.parametrize(
    ("verb", "resource", "namespace"), [("patch", "nodes", ""), ("list", "nodes", ""), ("create", "events", "default")]
)
async def test_the_rights_that_an_agent_asks_about_are_granted(verb: str, resource: str, namespace: str) -> None:
    """A SelfSubjectAccessReview comes back with its answer; discovery names the verb."""
    async with open_client() as client:
        attributes = {"verb": verb, "resource": resource, "namespace": namespace}
        review = {
            "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }  # fmt: skip
        status, raw = await client.call("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
        assert (status, raw["status"]["allowed"], raw["spec"]["resourceAttributes"]) == (201, True, attributes)
        _, known = await client.call("GET", "/api/v1")
        assert verb in next(entry["verbs"] for entry in known["resources"] if entry["name"] == resource)


async def test_a_node_is_patched_only_with_the_token() -> None:
    """401 without it, and the node stays as it is."""
    async with open_client() as client:
        before = client.api.apply_node(node())
        client.session.headers.clear()
        assert (await client.call("PATCH", NODE, patch(labels={"a": "1"}), MERGE))[0] == 401
        assert client.api.node("n1") == before
