"""The label by which the Service finds the leader, against a real HTTP server: on one pod, whoever had it before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from gpushare_agent.extender import app
from gpushare_agent.extender.leader_election import APP_LABEL, LEADER, ROLE_LABEL, LeaderLabel
from tests.cluster.support_kube import FAST, running
from tests.extender.support_extender import FakeCluster, eventually, fake_cluster, raw_pod, running_extender
from tests.fakes.api_server import Raw

NAMESPACE = "gpushare-system"
APP = {APP_LABEL: "gpushare-agent-extender"}
LED = {ROLE_LABEL: LEADER}


class Term:
    """Leadership, for the test to turn."""

    def __init__(self, *, is_leading: bool) -> None:
        self.term = int(is_leading)
        self._is_leading = is_leading
        self._changed = asyncio.Event()

    def leads(self) -> bool:
        return self._is_leading

    async def wait_change(self, term: int, is_leading: bool) -> None:
        while (term, is_leading) == (self.term, self._is_leading):
            self._changed.clear()
            await self._changed.wait()

    def turn(self, *, is_leading: bool) -> None:
        self.term += int(is_leading)
        self._is_leading = is_leading
        self._changed.set()


def replica(name: str, labels: dict[str, str]) -> Raw:
    raw = raw_pod(name, (0, 0), namespace=NAMESPACE, node="n1", phase="Running")
    raw["metadata"]["labels"] = dict(labels)
    return raw


def leaders(cluster: FakeCluster) -> list[str]:
    """What the Service's selector finds, and whatever else has the role."""
    pods = sorted(cluster.objects["pods"].items())
    return [key.partition("/")[2] for key, raw in pods if raw["metadata"].get("labels", {}).get(ROLE_LABEL) == LEADER]


def patches(cluster: FakeCluster) -> list[str]:
    return [path.rpartition("/")[2] for method, path in cluster.requests if method == "PATCH"]


def warnings(logs: Sequence[MutableMapping[str, Any]]) -> list[MutableMapping[str, Any]]:
    return [entry for entry in logs if entry["event"] == "leader_label_not_written"]


@asynccontextmanager
async def labelling(
    cluster: FakeCluster, term: Term, name: str = "a", *, check_period_s: float = 60.0
) -> AsyncIterator[list[MutableMapping[str, Any]]]:
    """With what is logged meanwhile."""
    async with cluster.opened_api() as api:
        label = LeaderLabel(
            api=api, election=term, namespace=NAMESPACE, name=name, backoff=FAST, check_period_s=check_period_s
        )
        with capture_logs() as logs:
            async with running(label.run):
                yield logs


async def test_a_new_leader_takes_the_label_from_the_others_first() -> None:
    """From pods of its own Deployment; other labels, other Deployments and other namespaces keep what they have."""
    elsewhere = replica("elsewhere", APP | LED)
    elsewhere["metadata"]["namespace"] = "other"
    pods = [
        replica("a", APP | {"pod-template-hash": "7"}),
        replica("former", APP | LED | {"x": "y"}),
        replica("older", APP | LED),
        replica("follower", APP),
        replica("database", {APP_LABEL: "database"} | LED),
        elsewhere,
    ]
    async with fake_cluster(pods=pods) as cluster, labelling(cluster, Term(is_leading=True)):
        await eventually(lambda: leaders(cluster) == ["a", "database", "elsewhere"])
        assert patches(cluster) == ["former", "older", "a"]
        assert cluster.pod(NAMESPACE, "former")["metadata"]["labels"] == APP | {"x": "y"}
        assert cluster.pod(NAMESPACE, "a")["metadata"]["labels"] == APP | LED | {"pod-template-hash": "7"}


async def test_who_leads_no_more_takes_its_own_label_off() -> None:
    """And puts it on again in its next term."""
    async with fake_cluster(pods=[replica("a", APP)]) as cluster:
        term = Term(is_leading=True)
        async with labelling(cluster, term):
            await eventually(lambda: leaders(cluster) == ["a"])
            term.turn(is_leading=False)
            await eventually(lambda: leaders(cluster) == [])
            term.turn(is_leading=True)
            await eventually(lambda: leaders(cluster) == ["a"])


async def test_a_follower_touches_no_pod_but_its_own() -> None:
    """A label that an earlier process of its pod left behind is removed; the leader's stays."""
    pods = [replica("a", APP | LED), replica("b", APP | LED)]
    async with fake_cluster(pods=pods) as cluster, labelling(cluster, Term(is_leading=False)):
        await eventually(lambda: leaders(cluster) == ["b"])
        assert patches(cluster) == ["a"]


async def test_a_label_that_somebody_changed_is_put_right() -> None:
    """It is checked as long as the replica leads."""
    pods = [replica("a", APP), replica("b", APP)]
    async with fake_cluster(pods=pods) as cluster, labelling(cluster, Term(is_leading=True), check_period_s=0.02):
        await eventually(lambda: leaders(cluster) == ["a"])
        cluster.change("pods", f"{NAMESPACE}/b", lambda raw: raw["metadata"]["labels"].update(LED))
        cluster.change("pods", f"{NAMESPACE}/a", lambda raw: raw["metadata"]["labels"].pop(ROLE_LABEL))
        await eventually(lambda: leaders(cluster) == ["a"])


@pytest.mark.parametrize("fault", ["403", "409", "429", "500", "silent", "silent-done"])
async def test_a_patch_that_fails_is_tried_again(fault: str) -> None:
    """Whatever the API server does, also where the right is missing and comes later; each time with a warning."""
    async with fake_cluster(pods=[replica("a", APP)]) as cluster:
        cluster.faults = [fault]
        async with labelling(cluster, Term(is_leading=True)) as logs:
            await eventually(lambda: leaders(cluster) == ["a"] and warnings(logs) != [])
        reported = warnings(logs)
        assert {entry["log_level"] for entry in reported} == {"warning"}
        assert all("POD_NAME" in entry["cure"] and entry["pod"] == f"{NAMESPACE}/a" for entry in reported)


async def test_a_pod_that_does_not_exist_is_a_warning() -> None:
    """POD_NAME says something else: the replica goes on, and finds its pod once there is one."""
    async with fake_cluster() as cluster, labelling(cluster, Term(is_leading=True)) as logs:
        await eventually(lambda: warnings(logs) != [])
        cluster.put("pods", replica("a", APP))
        await eventually(lambda: leaders(cluster) == ["a"])


async def test_a_former_leader_that_is_gone_meanwhile_stops_nobody() -> None:
    """Another pod of that name, or none: the answers 409 and 404 to the removal are as good as a removal."""
    pods = [replica("a", APP), replica("former", APP | LED)]
    async with fake_cluster(pods=pods) as cluster:
        cluster.faults = ["409"]
        async with labelling(cluster, Term(is_leading=True)):
            await eventually(lambda: "a" in leaders(cluster))
            assert patches(cluster) == ["former", "a"]


async def test_pods_of_any_shape_are_survived() -> None:
    """Labels that are none, a list with objects that are no pods."""
    metadata = {"name": "odd", "namespace": NAMESPACE, "labels": APP | LED, "uid": ""}
    odd: dict[str, Any] = {"metadata": metadata, "spec": {}}
    own = replica("a", {})
    own["metadata"]["labels"] = APP
    async with fake_cluster(pods=[own, odd]) as cluster, labelling(cluster, Term(is_leading=True)) as logs:
        await eventually(lambda: any("UID is missing" in entry["error"] for entry in warnings(logs)))
        cluster.remove("pods", f"{NAMESPACE}/odd")
        await eventually(lambda: leaders(cluster) == ["a"])


async def test_the_extender_labels_its_pod_and_takes_the_label_off_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the variables POD_NAME and POD_NAMESPACE, also where there is no election; without them it runs all the same."""
    pods = [replica("a", APP), replica("b", APP | LED)]
    async with fake_cluster(pods=pods) as cluster:
        async with running_extender(cluster):
            assert patches(cluster) == []
        monkeypatch.setenv("POD_NAME", "a")
        monkeypatch.setenv("POD_NAMESPACE", NAMESPACE)
        async with running_extender(cluster):
            await eventually(lambda: leaders(cluster) == ["a"])
        assert leaders(cluster) == []


async def test_of_two_replicas_the_leaders_pod_has_the_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are ready; when the leader ends, its label goes and the other one's pod gets it."""
    for name, value in (("LEASE_DURATION_S", 600.0), ("RENEW_DEADLINE_S", 500.0), ("RETRY_PERIOD_S", 0.05)):
        monkeypatch.setattr(app, name, value)
    monkeypatch.setenv("POD_NAMESPACE", NAMESPACE)
    async with fake_cluster(pods=[replica("a", APP), replica("b", APP)]) as cluster, AsyncExitStack() as stack:
        monkeypatch.setenv("POD_NAME", "a")
        first = await stack.enter_async_context(running_extender(cluster, leader_elect=True))
        await eventually(lambda: leaders(cluster) == ["a"])
        monkeypatch.setenv("POD_NAME", "b")
        async with running_extender(cluster, is_ready=False, leader_elect=True) as second:
            await eventually(lambda: all(one.has_listed for one in second.parts.informers))
            assert [(await one.get("/readyz"))[0] for one in (first, second)] == [200, 200]
            assert leaders(cluster) == ["a"]
            await stack.aclose()
            await eventually(lambda: leaders(cluster) == ["b"])


async def test_in_a_pod_without_its_variables_a_warning_says_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the variable that is missing."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("POD_NAMESPACE", NAMESPACE)
    monkeypatch.delenv("POD_NAME", raising=False)
    async with fake_cluster() as cluster:
        with capture_logs() as logs:
            async with running_extender(cluster):
                (reported,) = [entry for entry in logs if entry["event"] == "leader_label_off"]
        assert (reported["log_level"], reported["missing"]) == ("warning", ["POD_NAME"])
