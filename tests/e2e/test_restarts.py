"""The agent and the kubelet end and come back: what runs is not touched, and the ledger is the same."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import Cluster, KubectlError
from tests.e2e.installation import SYSTEM, Installation

pytestmark = pytest.mark.e2e


@pytest.fixture
def running(cluster: Cluster, installed: Installation, namespace: str) -> Iterator[str]:
    """Pods of several kinds; their containers, and the agent's ledger, must be the same after the test's fault."""
    cluster.start(
        namespace,
        *(cluster.pod(f"share-{index}", 30, 4) for index in range(3)),
        cluster.pod_of("two", cluster.container(5, 1), cluster.container(5, 2, name="second")),
        *([cluster.pod("whole", 100)] if installed.gpus() > 2 else []),
    )
    number = 5 + (installed.gpus() > 2)
    before = installed.wait_ledger(namespace, number), _containers(cluster, namespace)
    yield namespace
    installed.wait_ready()
    after = installed.wait_ledger(namespace, number), _containers(cluster, namespace)
    assert after == before
    cluster.start(namespace, cluster.pod("next", 10, 1))
    installed.wait_ledger(namespace, number + 1)


def _containers(cluster: Cluster, namespace: str) -> dict[str, list[tuple[str, int]]]:
    """pod -> ID and restarts of each container."""
    return {
        name: [(one["containerID"], one["restartCount"]) for one in pod["status"]["containerStatuses"]]
        for name, pod in cluster.pods(namespace).items()
    }


def _restarts(installed: Installation) -> dict[str, int]:
    """Of the agents' pods, by UID: how often the container started again."""
    return {
        pod["metadata"]["uid"]: pod["status"]["containerStatuses"][0]["restartCount"]
        for pod in installed.agents().values()
        if pod["status"].get("containerStatuses")
    }


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, id="killed", marks=pytest.mark.smoke), pytest.param(signal.SIGTERM, id="ended")],
)
def test_an_agent_that_is_killed_has_the_same_ledger_after(
    cluster: Cluster, installed: Installation, running: str, number: signal.Signals
) -> None:
    """From the kubelet's records; the container starts again in its pod."""
    ((uid, before),) = _restarts(installed).items()
    installed.signal(number)
    cluster.wait_for("the container's restart", lambda: _restarts(installed).get(uid, 0) == before + 1)


def test_an_agents_pod_that_is_deleted_is_replaced_with_the_same_ledger(
    cluster: Cluster, installed: Installation, running: str
) -> None:
    """The DaemonSet makes another."""
    before = set(_restarts(installed))
    cluster.run("delete", "pod", installed.agent(), "-n", SYSTEM)
    cluster.wait_for("another pod", lambda: bool(_restarts(installed).keys() - before))


@pytest.mark.smoke
def test_a_kubelet_that_restarts_has_the_agent_again(cluster: Cluster, installed: Installation, running: str) -> None:
    """It removes the agent's sockets when it starts; the agent registers again by itself, without a restart."""
    before = _restarts(installed)
    registered = _registrations(installed)
    cluster.hook("restart-kubelet")
    cluster.wait_for("another registration", lambda: _registrations(installed) > registered)
    assert _restarts(installed) == before


def _registrations(installed: Installation) -> float:
    """With the kubelet, of both resources; 0 while the agent cannot be asked."""
    try:
        return installed.metric("gpushare_registrations_total")
    except KubectlError:
        return 0
