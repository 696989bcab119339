"""Deployments, ReplicaSets, StatefulSets and Jobs of the sandbox: passes of the controllers over its objects."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gpushare_agent.core.model.errors import Rejected
from gpushare_agent.sandbox.api.patch import MERGE, patched
from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from gpushare_agent.sandbox.api.store import key_of
from gpushare_agent.sandbox.api.validation import updated
from gpushare_agent.sandbox.pod_controllers import REVISION, PodControllers
from tests.fakes.api_server import open_client
from tests.sandbox.support_sandbox import pod

READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}


class Cluster:
    """The API server without nodes: pods run and end as the test says."""

    def __init__(self, api: EmbeddedApiServer) -> None:
        self.api = api
        self.controllers = PodControllers(api)

    def settle(self, status: dict[str, Any] | None = READY) -> None:
        """Passes until nothing changes; each pod that waits gets the status, where one is given."""
        while True:
            before = self.api.version
            self.controllers.reconcile()
            for raw in self.api.pods():
                if status is not None and raw["status"]["phase"] == "Pending":
                    self.set_status(raw, status)
            if self.api.version == before:
                return

    def set_status(self, raw: dict[str, Any], status: dict[str, Any]) -> None:
        self.api.set_pod_status(raw["metadata"]["namespace"], raw["metadata"]["name"], status)

    def patch(self, resource: str, name: str, patch: dict[str, Any]) -> None:
        old = self.api.store.get(resource, ("default", name))
        self.api.store.replace(resource, updated(resource, old, patched(old, patch, MERGE)))

    def get(self, resource: str, name: str) -> dict[str, Any]:
        return self.api.store.get(resource, ("default", name))

    def pods(self) -> list[str]:
        return [raw["metadata"]["name"] for raw in self.api.pods()]


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    yield Cluster(EmbeddedApiServer())


def deployment(replicas: int = 3, **spec: Any) -> dict[str, Any]:
    template = {"metadata": {"labels": {"app": "web"}}, "spec": pod("x")["spec"]}
    return {
        "metadata": {"name": "web"},
        "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": "web"}}, "template": template, **spec},
    }


def job(**spec: Any) -> dict[str, Any]:
    template = {"spec": {**pod("x")["spec"], "restartPolicy": "Never"}}
    return {"metadata": {"name": "train"}, "spec": {"template": template, **spec}}


CHANGED = {"spec": {"template": {"metadata": {"labels": {"version": "2"}}}}}


async def test_a_deployment_has_its_pods_and_replaces_what_is_lost(cluster: Cluster) -> None:
    """Through one ReplicaSet, whose pods carry its label; a deleted and a failed pod are replaced."""
    cluster.api.create("deployments", deployment())
    cluster.settle()
    [one] = cluster.api.store.all("replicasets")
    assert len(cluster.pods()) == 3
    for raw in cluster.api.pods():
        assert raw["metadata"]["ownerReferences"][0]["uid"] == one["metadata"]["uid"]
        assert raw["metadata"]["labels"] == one["spec"]["selector"]["matchLabels"]
    expected = {"replicas": 3, "updatedReplicas": 3, "readyReplicas": 3, "unavailableReplicas": 0}
    assert cluster.get("deployments", "web")["status"].items() >= expected.items()
    lost, failed, kept = cluster.api.pods()
    cluster.api.delete("pods", key_of(lost))
    cluster.set_status(failed, {"phase": "Failed"})
    cluster.settle()
    assert len(cluster.pods()) == 4  # with the failed one, which stays to be looked at
    assert {failed["metadata"]["name"], kept["metadata"]["name"]} < set(cluster.pods())


async def test_a_deployment_is_scaled_and_takes_pods_that_are_not_ready_first(cluster: Cluster) -> None:
    """Both ways; a ReplicaSet on its own too."""
    cluster.api.create("deployments", deployment(2))
    cluster.settle()
    ready = set(cluster.pods())
    cluster.patch("deployments", "web", {"spec": {"replicas": 4}})
    cluster.settle(status=None)
    assert len(cluster.pods()) == 4
    cluster.patch("deployments", "web", {"spec": {"replicas": 2}})
    cluster.settle(status=None)
    assert set(cluster.pods()) == ready


async def test_a_rolling_update_keeps_enough_pods_and_not_too_many(cluster: Cluster) -> None:
    """Of four pods with 25% each: never below three available, never above five in all; the old set stays at zero."""
    cluster.api.create("deployments", deployment(4))
    cluster.settle()
    old = set(cluster.pods())
    cluster.patch("deployments", "web", CHANGED)
    for _ in range(50):
        cluster.settle(status=None)
        pods = cluster.api.pods()
        assert len(pods) <= 5
        assert sum(raw["status"]["phase"] == "Running" for raw in pods) >= 3
        waiting = [raw for raw in pods if raw["status"]["phase"] == "Pending"]
        if not waiting:
            break
        cluster.set_status(waiting[0], READY)
    assert len(cluster.pods()) == 4 and not old & set(cluster.pods())
    assert sorted(raw["spec"]["replicas"] for raw in cluster.api.store.all("replicasets")) == [0, 4]


async def test_a_recreated_deployment_starts_the_new_pods_after_the_old_ones(cluster: Cluster) -> None:
    """For GPUs of which there are no two at a time."""
    cluster.api.create("deployments", deployment(1, strategy={"type": "Recreate"}))
    cluster.settle()
    [old] = cluster.api.pods()
    cluster.api.bind_pod("default", old["metadata"]["name"], "node")  # its deletion takes as long as a kubelet needs
    cluster.patch("deployments", "web", CHANGED)
    cluster.settle()
    assert cluster.pods() == [old["metadata"]["name"]]
    cluster.api.delete_pod("default", old["metadata"]["name"], grace_period_s=0)
    cluster.settle()
    [new] = cluster.api.pods()
    assert new["metadata"]["labels"]["version"] == "2"


async def test_a_rollback_takes_the_set_of_before(cluster: Cluster) -> None:
    """`kubectl rollout undo` sends the earlier template with a creationTimestamp of null: revision 3, and no third set."""
    cluster.api.create("deployments", deployment(1))
    cluster.settle()
    [first] = cluster.api.store.all("replicasets")
    cluster.patch("deployments", "web", CHANGED)
    cluster.settle()
    back = {"metadata": {"labels": {"app": "web", "version": None}, "creationTimestamp": None}}
    cluster.patch("deployments", "web", {"spec": {"template": back}})
    cluster.settle()
    sets = {raw["metadata"]["name"]: raw for raw in cluster.api.store.all("replicasets")}
    assert len(sets) == 2
    again = sets[first["metadata"]["name"]]
    assert again["spec"]["replicas"] == 1 and again["metadata"]["annotations"] == {REVISION: "3"}


async def test_what_is_owned_goes_with_its_owner(cluster: Cluster) -> None:
    """Sets and pods of a Deployment, pods of a Job; a pod on its own stays."""
    cluster.api.create_pod(pod("alone"))
    cluster.api.create("deployments", deployment(2))
    cluster.api.create("jobs", job())
    cluster.settle()
    assert len(cluster.pods()) == 4
    cluster.api.delete("deployments", ("default", "web"))
    cluster.api.delete("jobs", ("default", "train"))
    cluster.settle()
    assert (cluster.pods(), cluster.api.store.all("replicasets")) == (["alone"], [])


async def test_a_job_runs_as_many_pods_at_once_as_it_may_and_ends(cluster: Cluster) -> None:
    """Three completions, two at a time: Complete, with its times, and no pod after that."""
    cluster.api.create("jobs", job(completions=3, parallelism=2))
    for running in (2, 1):
        cluster.settle()
        pods = [raw for raw in cluster.api.pods() if raw["status"]["phase"] == "Running"]
        assert len(pods) == running
        for raw in pods:
            cluster.set_status(raw, {"phase": "Succeeded"})
    cluster.settle()
    status = cluster.get("jobs", "train")["status"]
    assert (status["succeeded"], status["active"], status["conditions"][0]["type"]) == (3, 0, "Complete")
    assert status["completionTime"] and len(cluster.pods()) == 3


async def test_a_job_gives_up_after_its_backoff_limit(cluster: Cluster) -> None:
    """Failed, with the reason of a cluster; what still runs is deleted."""
    cluster.api.create("jobs", job(parallelism=2, completions=2, backoffLimit=0))
    cluster.settle()
    failed, _ = cluster.api.pods()
    cluster.set_status(failed, {"phase": "Failed"})
    cluster.settle()
    condition = cluster.get("jobs", "train")["status"]["conditions"][0]
    assert (condition["type"], condition["reason"]) == ("Failed", "BackoffLimitExceeded")
    assert cluster.pods() == [failed["metadata"]["name"]]


async def test_pods_that_fail_are_not_replaced_in_a_storm(cluster: Cluster) -> None:
    """Each failure doubles the wait: a pod that no node admits makes a handful of pods, not thousands."""
    cluster.api.create("deployments", deployment(1))
    cluster.settle({"phase": "Failed", "reason": "UnexpectedAdmissionError"})
    assert 1 <= len(cluster.pods()) <= 3


@pytest.mark.parametrize(
    ("resource", "raw", "said"),
    [
        ("deployments", deployment(selector={"matchLabels": {"app": "other"}}), "does not match template"),
        ("deployments", deployment(selector={}), "spec.selector: Required"),
        ("deployments", deployment(replicas=-1), "spec.replicas"),
        ("deployments", {**deployment(), "spec": {**deployment()["spec"], "replicas": "3"}}, "spec.replicas"),
        ("deployments", deployment(strategy={"rollingUpdate": {"maxSurge": "many"}}), "maxSurge"),
        ("deployments", deployment(template={"metadata": {"labels": {"app": "web"}}}), "spec.template"),
        ("deployments", {**deployment(), "metadata": {"name": "x" * 250}}, "metadata.name"),
        ("jobs", job(template={"spec": pod("x")["spec"]}), "restartPolicy"),
    ],
)
async def test_what_cannot_work_is_refused_at_once(
    cluster: Cluster, resource: str, raw: dict[str, Any], said: str
) -> None:
    """With the field: the controllers never meet it."""
    with pytest.raises(Rejected, match=said):
        cluster.api.create(resource, raw)
    assert cluster.api.store.all(resource) == []


async def test_the_scale_is_an_object_of_its_own() -> None:
    """Read and patched as `kubectl scale` and autoscalers do; a wrong number is refused, and so is what may not change: a
    Job's template and a Deployment's selector."""
    async with open_client() as client:
        client.api.create("jobs", job())
        client.api.create("deployments", deployment())
        train, web = (
            "/apis/batch/v1/namespaces/default/jobs/train",
            "/apis/apps/v1/namespaces/default/deployments/web",
        )
        for path, spec in (
            (train, {"completions": 5}),
            (web, {"selector": {"matchLabels": {"app": None}}}),
            (f"{web}/scale", {"replicas": "5"}),
        ):
            assert (await client.call("PATCH", path, {"spec": spec}, MERGE))[0] == 422
        _, scale = await client.call("GET", f"{web}/scale")
        assert (scale["kind"], scale["spec"]) == ("Scale", {"replicas": 3})
        assert (await client.call("PATCH", f"{web}/scale", {"spec": {"replicas": 5}}, MERGE))[0] == 200
        assert client.api.store.get("deployments", ("default", "web"))["spec"]["replicas"] == 5
        assert (await client.call("GET", f"{web}/scale".replace("web", "none")))[0] == 404


async def test_a_null_in_a_spec_is_an_absent_field(cluster: Cluster) -> None:
    """It gets the default, and no null ends the controllers."""
    raw = deployment(strategy=None)
    raw["spec"]["replicas"] = None
    cluster.api.create("deployments", raw)
    cluster.settle()
    assert len(cluster.pods()) == 1
    assert cluster.get("deployments", "web")["spec"]["strategy"] == {"type": "RollingUpdate"}


async def test_a_revision_that_is_no_number_counts_as_none(cluster: Cluster) -> None:
    """A client may write into the annotation, or take it away."""
    cluster.api.create("deployments", deployment())
    cluster.settle()
    [name] = [raw["metadata"]["name"] for raw in cluster.api.store.all("replicasets")]
    for odd in ({REVISION: "x"}, None):
        cluster.patch("replicasets", name, {"metadata": {"annotations": odd}})
        cluster.patch("deployments", "web", CHANGED)
        cluster.settle()
        assert len(cluster.pods()) == 3


async def test_pods_of_a_large_owner_are_made_in_bursts(cluster: Cluster) -> None:
    """One pass holds the loop for few of them; more than a thousand are refused."""
    with pytest.raises(Rejected, match="100000: at most 1000 in the sandbox"):
        cluster.api.create("deployments", deployment(100_000))
    cluster.api.create("deployments", deployment(120))
    sizes = []
    for _ in range(4):
        cluster.controllers.reconcile()
        sizes.append(len(cluster.pods()))
    assert sizes == [50, 100, 120, 120]


def stateful_set(replicas: int = 3, **spec: Any) -> dict[str, Any]:
    return {**deployment(replicas, serviceName="web", **spec)}


async def test_a_stateful_set_has_its_pods_one_after_the_other(cluster: Cluster) -> None:
    """Each by its number once the one before it is ready; a lost one comes back under its name, and the last go first."""
    made = cluster.api.create("statefulsets", stateful_set())
    cluster.settle(None)
    assert cluster.pods() == ["web-0"]
    cluster.settle()
    assert cluster.pods() == ["web-0", "web-1", "web-2"]
    status = cluster.get("statefulsets", "web")["status"]
    assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == (3, 3, 3)
    cluster.api.delete_pod("default", "web-1")
    cluster.settle()
    assert cluster.pods() == ["web-0", "web-1", "web-2"]
    cluster.patch("statefulsets", "web", {"spec": {"replicas": 1}})
    cluster.settle()
    assert cluster.pods() == ["web-0"]
    cluster.api.delete("statefulsets", key_of(made))
    cluster.settle()
    assert cluster.pods() == []
    cluster.api.create("statefulsets", stateful_set(podManagementPolicy="Parallel"))  # as GPUShare's guide has it
    cluster.controllers.reconcile()
    assert cluster.pods() == ["web-0", "web-1", "web-2"]


async def test_a_stateful_sets_failed_pod_is_replaced_and_then_later(cluster: Cluster) -> None:
    """By one of its name: at once the first time; the second failure waits."""
    cluster.api.create("statefulsets", stateful_set(1))
    cluster.settle()
    first = cluster.api.pod("default", "web-0")
    cluster.set_status(first, {"phase": "Failed"})
    cluster.settle()
    second = cluster.api.pod("default", "web-0")
    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    cluster.set_status(second, {"phase": "Failed"})
    cluster.settle()
    assert cluster.api.pod("default", "web-0")["status"]["phase"] == "Failed"


async def test_a_stateful_sets_new_template_reaches_all_pods(cluster: Cluster) -> None:
    """From the last pod on, and none is made again twice."""
    cluster.api.create("statefulsets", stateful_set(2))
    cluster.settle()
    before = {raw["metadata"]["uid"] for raw in cluster.api.pods()}
    cluster.patch("statefulsets", "web", CHANGED)
    cluster.controllers.reconcile()
    assert cluster.pods() == ["web-0"]
    cluster.settle()
    assert [raw["metadata"]["labels"]["version"] for raw in cluster.api.pods()] == ["2", "2"]
    assert not before & {raw["metadata"]["uid"] for raw in cluster.api.pods()}
