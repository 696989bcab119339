"""The agent's rights are those that it needs, and it needs those that it has."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import Cluster, Object, Right, audited
from tests.e2e.installation import SYSTEM, Installation, rights_of_component

pytestmark = pytest.mark.e2e
ACCOUNT = f"{SYSTEM}:gpushare-agent"
USER = f"system:serviceaccount:{ACCOUNT}"
FORBIDDEN = [
    *(("get", one) for one in ("secrets", "configmaps", "services", "nodes/proxy", "leases.coordination.k8s.io")),
    *(("create", one) for one in ("pods", "pods/exec", "pods/binding", "serviceaccounts/token", "pods/eviction")),
    *(("update", one) for one in ("pods", "nodes", "pods/status", "nodes/status")),
    ("delete", "nodes"),
    ("impersonate", "users"),
    ("escalate", "clusterroles.rbac.authorization.k8s.io"),
    ("bind", "clusterroles.rbac.authorization.k8s.io"),
]
"""Ways to other rights, or to other people's objects."""


def granted(cluster: Cluster) -> set[Right]:
    """By the ClusterRoles that are bound to the agent's service account."""
    rules = [rule for name in _bound_roles(cluster) for rule in cluster.get("clusterrole", name)["rules"]]
    return {right for rule in rules for right in itertools.product(rule["verbs"], rule["resources"])}


def _bound_roles(cluster: Cluster) -> list[str]:
    return [
        binding["roleRef"]["name"]
        for binding in cluster.items("clusterrolebindings")
        for one in binding.get("subjects", [])
        if (one.get("namespace"), one["name"]) == (SYSTEM, "gpushare-agent")
    ]


def test_the_agent_has_no_right_that_leads_to_others(cluster: Cluster, installed: Installation) -> None:
    """What the API server says to the service account, whatever else of the cluster grants to all of them."""
    allowed = [one for one in FORBIDDEN if cluster.may(ACCOUNT, *one)]
    assert not allowed
    assert cluster.may(ACCOUNT, "patch", "pods")


def test_what_the_agent_asks_of_the_api_server_is_what_it_may(
    cluster: Cluster, installed: Installation, namespace: str
) -> None:
    """By the API server's audit log: nothing was forbidden, and each right that is granted was used."""
    log = cluster.path("audit-log")
    cluster.start(namespace, cluster.pod("share", 10, 1))
    # A pod of a controller that the agent refuses has an Event and is deleted: two more rights.
    refused = cluster.workload("ReplicaSet", cluster.container(1), name="refused", replicas=1)  # a share without memory
    cluster.apply(refused, namespace=namespace)

    rights = granted(cluster) - SELDOM - OF_POLICIES
    try:
        cluster.wait_for(f"each of {sorted(rights)} in the audit log", lambda: rights <= audited(log, USER)[0])
    finally:  # its pods come back ten times a second
        cluster.run("delete", "replicaset", "refused", "-n", namespace)
    used, forbidden = audited(log, USER)
    # Once gpu-mem is switched off: a right to remove aliyun.com/gpu-count may be left, and is asked for in vain.
    assert not [one for one in forbidden if not one.startswith("patch nodes/status: ")]
    folders = ("components/dra", "components/gpushare", "components/node-configuration")
    others = set().union(*map(rights_of_component, folders))
    assert used <= granted(cluster) | EVERYBODYS | others


EVERYBODYS = {("create", "selfsubjectaccessreviews")}
"""By the ClusterRole system:basic-user: `gpushare-agent check` asks so which rights it has."""
SELDOM = {("get", "pods"), ("get", "runtimeclasses")}
"""Where a pod's call comes before the watch has its pod: happens in bursts, and cannot be provoked. Where a pod names a
RuntimeClass."""
OF_POLICIES = {("use", "annotations"), ("use", "driver")}
"""Admission policies ask for them, which the audit log does not show."""


@pytest.fixture
def roles(cluster: Cluster, installed: Installation) -> Iterator[dict[str, Object]]:
    """The agent's ClusterRoles by name, which are as before afterwards."""
    found = {}
    for name in _bound_roles(cluster):
        found[name] = cluster.get("clusterrole", name)
        found[name]["metadata"] = {"name": name, "annotations": found[name]["metadata"].get("annotations", {})}
    yield found
    for role in found.values():
        cluster.run("replace", "-f", "-", stdin=json.dumps(role))


def test_check_names_each_right_that_is_missing(
    cluster: Cluster, installed: Installation, roles: dict[str, Object]
) -> None:
    """One right after the other is taken away: `gpushare-agent check` names it, but for those that only policies ask for,
    which it tries by a write. With all of them it names none."""
    assert "not allowed" not in installed.check()
    unseen = []
    for role in roles.values():
        for rule in role["rules"]:
            for verb, resource in sorted({*itertools.product(rule["verbs"], rule["resources"])} - OF_POLICIES):
                cluster.run("replace", "-f", "-", stdin=json.dumps(_without(role, verb, resource)))
                # The node itself cannot be read without `get nodes`, and the server's own answer says so.
                named = rf"not allowed: .*\b{verb} {resource}\b|cannot {verb} resource \W*{resource}\b"
                if not re.search(named, installed.check()):
                    unseen.append((verb, resource))
        cluster.run("replace", "-f", "-", stdin=json.dumps(role))
    assert not unseen


def _without(role: Object, verb: str, resource: str) -> Object:
    rules = [
        {**rule, "verbs": [one for one in rule["verbs"] if one != verb or resource not in rule["resources"]]}
        for rule in role["rules"]
    ]
    return {**role, "rules": [rule for rule in rules if rule["verbs"]]}
