"""What a scheduler extender needs of the embedded API server: bindings and leases."""

from __future__ import annotations

from typing import Any

from tests.fakes.api_server import PODS, open_client
from tests.sandbox.support_sandbox import pod

LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"


async def test_a_binding_names_pod_and_node_and_is_taken_once() -> None:
    """A second one, another UID, a missing node and a missing pod are told apart."""
    async with open_client() as client:
        uid = client.api.create_pod(pod("p"))["metadata"]["uid"]

        async def bind(name: str = "p", node: str = "n", uid: str = uid) -> tuple[int, str]:
            body = {"kind": "Binding", "metadata": {"name": name, "uid": uid}, "target": {"name": node}}
            status, answer = await client.call("POST", f"{PODS}/{name}/binding", body)
            return status, answer.get("message", "")

        assert (await bind(uid="other"))[0] == 409
        assert (await bind(node=""))[0] == 422
        assert (await bind(name="absent"))[0] == 404
        assert await bind() == (201, "")
        status, message = await bind(node="m")
        assert (status, "already assigned to node 'n'" in message) == (409, True)
        assert client.api.pod("default", "p")["spec"]["nodeName"] == "n"


async def test_a_binding_may_insist_on_the_version_and_brings_annotations() -> None:
    """A pod that has changed since is not bound; one that is gets all of it in one change."""
    async with open_client() as client:
        old = client.api.create_pod(pod("p", annotations={"mine": "1", "both": "old"}))["metadata"]
        new = client.api.set_pod_status("default", "p", {"message": "x"})["metadata"]
        assert old["resourceVersion"] != new["resourceVersion"]

        async def bind(version: str, **metadata: Any) -> tuple[int, str]:
            known = {"name": "p", "uid": old["uid"], "resourceVersion": version}
            body = {"metadata": {**known, **metadata}, "target": {"name": "n"}}
            status, answer = await client.call("POST", f"{PODS}/p/binding", body)
            return status, answer.get("reason", "")

        assert await bind(old["resourceVersion"]) == (409, "Conflict")
        assert "nodeName" not in client.api.pod("default", "p")["spec"]
        for wrong in ({"annotations": {"k": 1}}, {"annotations": [1]}, {"name": "q"}, {"namespace": "elsewhere"}):
            assert await bind(new["resourceVersion"], **wrong) == (400, "BadRequest")
        version = client.api.store.version
        assert await bind(new["resourceVersion"], annotations={"both": "new", "theirs": "2"}) == (201, "")
        bound = client.api.pod("default", "p")
        assert bound["spec"]["nodeName"] == "n"
        assert bound["metadata"]["annotations"] == {"mine": "1", "both": "new", "theirs": "2"}
        assert [c["type"] for c in bound["status"]["conditions"]] == ["PodScheduled"]
        assert client.api.store.version == version + 1


async def test_a_pod_that_is_being_deleted_cannot_be_bound() -> None:
    """As a real API server refuses it: two schedulers, or a scheduler and a person, are often at it."""
    async with open_client() as client:
        raw = client.api.create_pod(pod("p"))
        client.api.store.replace("pods", {**raw, "metadata": {**raw["metadata"], "deletionTimestamp": "now"}})
        status, answer = await client.call("POST", f"{PODS}/p/binding", {"target": {"name": "n"}})
        assert (status, answer["reason"]) == (409, "Conflict")


async def test_a_lease_is_replaced_only_at_the_version_that_was_read() -> None:
    """That is what an election stands on."""
    async with open_client() as client:
        lease = {"metadata": {"name": "l"}, "spec": {"holderIdentity": "one"}}
        status, made = await client.call("POST", LEASES, lease)
        assert (status, made["apiVersion"], made["kind"]) == (201, "coordination.k8s.io/v1", "Lease")
        assert (await client.call("POST", LEASES, lease))[0] == 409
        taken = {**made, "spec": {"holderIdentity": "two"}}
        assert (await client.call("PUT", f"{LEASES}/l", taken))[0] == 200
        assert (await client.call("PUT", f"{LEASES}/l", {**made, "spec": {"holderIdentity": "three"}}))[0] == 409
        assert (await client.call("GET", f"{LEASES}/l"))[1]["spec"] == {"holderIdentity": "two"}
