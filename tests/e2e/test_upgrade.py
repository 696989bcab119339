"""A rolling update of the agent while pods start: none is rejected, and the ledger stays whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from tests.e2e.cluster import Cluster, Object
from tests.e2e.installation import SYSTEM, Installation

pytestmark = pytest.mark.e2e
PODS = 30
DAEMONSET = "daemonset/gpushare-agent"
SETTLED_S = 15
"""Longer than the period of the readiness probe."""


def _rollout(cluster: Cluster, verb: str) -> None:
    cluster.run("-n", SYSTEM, "rollout", verb, DAEMONSET)


def without_rejection(cluster: Cluster, installed: Installation, namespace: str, *changes: Callable[[], None]) -> None:
    """A burst of pods during the rollouts that `changes` begin: all run, and the ledger has each of them."""
    cluster.wait_for(
        "the agent has been Ready for some time", lambda: all(map(_is_settled, installed.agents().values()))
    )
    names = [f"burst-{number}" for number in range(PODS)]
    half = PODS // 2
    cluster.apply(*(cluster.pod(name, 5, 2) for name in names[:half]), namespace=namespace)
    for change in changes:
        change()
    cluster.apply(*(cluster.pod(name, 5, 2) for name in names[half:]), namespace=namespace)
    installed.wait_ready()
    cluster.wait_phase(namespace, *names)
    ledger = installed.wait_ledger(namespace, PODS)
    assert {(cores, len(gpus)) for cores, _, gpus in ledger.values()} == {(5, 1)}
    cluster.wait_for("the end of the agent that handed over", lambda: len(installed.agents()) == 1)


def _is_settled(pod: Object, ready: str = "True") -> bool:
    """A pod that is not Ready the DaemonSet replaces at once, without waiting for the new one: so it is for some seconds
    after a restart of the kubelet, as another test may have left it."""
    found = next((one for one in pod["status"].get("conditions", ()) if one["type"] == "Ready"), None)
    if found is None:
        return False
    since = datetime.fromisoformat(found["lastTransitionTime"].replace("Z", "+00:00"))
    return bool(found["status"] == ready) and datetime.now(UTC) - since > timedelta(seconds=SETTLED_S)


@pytest.mark.smoke
def test_a_rolling_update_during_a_burst_rejects_no_pod(
    cluster: Cluster, installed: Installation, namespace: str
) -> None:
    """The new agent takes over from the old one while both run."""
    before = set(installed.agents())
    without_rejection(cluster, installed, namespace, partial(_rollout, cluster, "restart"))
    assert before.isdisjoint(installed.agents())


def test_an_update_that_is_taken_back_at_once_rejects_no_pod(
    cluster: Cluster, installed: Installation, namespace: str
) -> None:
    """The rollback finds an agent that stands by, or starts another one."""
    without_rejection(
        cluster, installed, namespace, *(partial(_rollout, cluster, verb) for verb in ("restart", "undo"))
    )


def _variables(**values: str) -> Object:
    return {"env": [{"name": f"GPUSHARE_{name}", "value": value} for name, value in values.items()]}


@pytest.mark.parametrize(
    "broken",
    [
        {"args": ["--no-such-setting=1"]},
        _variables(ISOLATION="vcuda", VIRTUAL_MANAGER__PATH="/proc/nope/vm"),
        _variables(LIBGPUSHARE__LIBRARY="/proc/self/status"),
    ],
    ids=["does-not-start", "no-directory", "no-library"],
)
def test_a_version_that_could_give_no_share_leaves_the_old_one_serving(
    cluster: Cluster, installed: Installation, namespace: str, broken: Object
) -> None:
    """The rollout stops at the node; pods go on starting there."""
    template = {"spec": {"containers": [{"name": "agent", **broken}]}}
    cluster.run("-n", SYSTEM, "patch", DAEMONSET, "--patch", json.dumps({"spec": {"template": template}}))
    cluster.wait_for("the new agent beside the old one", lambda: len(installed.agents()) == 2)
    cluster.start(namespace, cluster.pod("meanwhile", 20, 4))
    for ready in ("False", "True"):
        settled = partial(_is_settled, ready=ready)
        cluster.wait_for(f"an agent whose Ready is {ready}", lambda: any(map(settled, installed.agents().values())))  # noqa: B023 - waited for here
    cluster.start(namespace, cluster.pod("later", 20, 4))
    _rollout(cluster, "undo")
    installed.wait_ready()
    cluster.start(namespace, cluster.pod("after", 20, 4))
    assert len(installed.wait_ledger(namespace, 3)) == 3


@pytest.fixture
def on_delete(cluster: Cluster, installed: Installation) -> Iterator[Installation]:
    """The DaemonSet replaces no pod by itself."""
    strategy = {"updateStrategy": {"type": "OnDelete", "rollingUpdate": None}}
    cluster.run("-n", SYSTEM, "patch", DAEMONSET, "--patch", json.dumps({"spec": strategy}))
    yield installed
    installed.change()


def test_with_on_delete_a_pod_that_is_deleted_is_replaced_by_the_new_version(
    cluster: Cluster, on_delete: Installation, namespace: str
) -> None:
    """Nothing changes before; what runs and its shares are the same after."""
    cluster.start(namespace, *(cluster.pod(f"share-{number}", 20, 4) for number in range(3)))
    ledger, before = on_delete.wait_ledger(namespace, 3), on_delete.agent()
    _rollout(cluster, "restart")
    cluster.start(namespace, cluster.pod("meanwhile", 20, 4))
    assert on_delete.agent() == before
    cluster.run("-n", SYSTEM, "delete", "pod", before)
    cluster.wait_for("another agent", lambda: before not in on_delete.agents() and on_delete.agent())
    cluster.start(namespace, cluster.pod("after", 20, 4))
    after = on_delete.wait_ledger(namespace, 5)
    assert {key: after[key] for key in ledger} == ledger
