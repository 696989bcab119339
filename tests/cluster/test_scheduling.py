"""What kube-scheduler checks of a node except GPUs, by its own rules; and what a disruption budget covers."""

from __future__ import annotations

from typing import Any

import pytest

from gpushare_agent.core.kube.budgets import read_budget
from gpushare_agent.core.kube.pods import read_pod_json
from gpushare_agent.core.kube.scheduling import (
    NodeOffer,
    PodNeeds,
    lacking_labels,
    node_offer,
    pod_needs,
    refusing_taints,
    shortages,
)
from gpushare_agent.core.model.errors import Corrupt
from tests.support_json import undecoded


def offer(labels: dict[str, str] | None = None, **spec: Any) -> NodeOffer:
    allocatable = {"cpu": "3500m", "memory": "8Gi", "pods": "2"}
    return node_offer(
        undecoded(
            {"metadata": {"name": "n", "labels": labels or {}}, "spec": spec, "status": {"allocatable": allocatable}}
        )
    )


def needs(**spec: Any) -> PodNeeds:
    return pod_needs(read_pod_json(undecoded({"spec": spec})).spec)


def container(cpu: str, **fields: Any) -> dict[str, Any]:
    return {"name": "c", "resources": {"requests": {"cpu": cpu}}, **fields}


def affinity(*terms: list[tuple[str, str, list[str]]], kind: str = "matchExpressions") -> dict[str, Any]:
    """A required node affinity of these terms, each of (key, operator, values)."""
    made = [{kind: [{"key": k, "operator": o, "values": v} for k, o, v in term]} for term in terms]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": made}}}


@pytest.mark.parametrize(
    ("operator", "values", "labels", "holds"),
    [
        ("In", ["a", "b"], {"k": "b"}, True),
        ("In", ["a"], {}, False),
        ("NotIn", ["a"], {}, True),
        ("NotIn", ["a"], {"k": "a"}, False),
        ("Exists", [], {"k": ""}, True),
        ("DoesNotExist", [], {"k": ""}, False),
        ("Gt", ["7"], {"k": "8"}, True),
        ("Lt", ["7"], {"k": "8"}, False),
        ("Gt", ["7"], {"k": "many"}, False),
        ("Gt", ["7"], {}, False),
        ("Near", ["a"], {"k": "a"}, False),
    ],
)
def test_operators(operator: str, values: list[str], labels: dict[str, str], holds: bool) -> None:
    """One that is not known promises nothing."""
    found = lacking_labels(needs(affinity=affinity([("k", operator, values)])), offer(labels))
    assert found == (() if holds else ("k",))


def test_one_term_is_enough_and_the_nearest_is_named() -> None:
    """Of a selector every label counts; a term without requirements, and an affinity without terms, select no node."""
    pod = needs(affinity=affinity([("a", "Exists", []), ("b", "Exists", [])], [("c", "Exists", [])]))
    assert lacking_labels(pod, offer({"c": "1"})) == ()
    assert lacking_labels(pod, offer()) == ("c",)
    assert lacking_labels(needs(nodeSelector={"x": "1", "y": "2"}), offer({"y": "2"})) == ("x",)
    assert lacking_labels(needs(affinity=affinity([])), offer()) == ("nodeAffinity",)
    by_name = affinity([("metadata.name", "In", ["n"])], kind="matchFields")
    assert lacking_labels(needs(affinity=by_name), offer()) == ()


@pytest.mark.parametrize(
    ("toleration", "tolerates"),
    [
        ({"key": "k", "operator": "Exists"}, True),
        ({"key": "k", "value": "v"}, True),
        ({"key": "k", "value": "other"}, False),
        ({"operator": "Exists"}, True),
        ({"key": "k", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({"value": "v"}, False),
    ],
)
def test_tolerations(toleration: dict[str, str], tolerates: bool) -> None:
    """By key, value and effect; a preference refuses nobody."""
    taints = [{"key": "k", "value": "v", "effect": "NoSchedule"}, {"key": "p", "effect": "PreferNoSchedule"}]
    found = refusing_taints(needs(tolerations=[toleration]), offer(taints=taints))
    assert [str(taint) for taint in found] == ([] if tolerates else ["k=v:NoSchedule"])


def test_the_taint_of_a_cordon_is_the_cordon() -> None:
    """It goes with it."""
    cordon = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    found = offer(unschedulable=True, taints=[cordon])
    assert (found.is_cordoned, found.taints) == (True, ())
    assert offer(taints=[cordon]).taints != ()


def test_what_is_left_counts() -> None:
    """Pods too, and what init containers ask for (how it is added: tests/extender/test_messages.py). A device that no plugin
    offers is lacking, a resource of which the node says nothing is not."""
    pod = needs(containers=[container("1")])
    assert shortages(pod, offer(), {"cpu": 2500, "pods": 1}) == []
    assert shortages(pod, offer(), {"cpu": 2501, "pods": 2}) == ["cpu", "pods"]
    asks = {"resources": {"requests": {"a.test/device": "1", "ephemeral-storage": "1Gi"}}, "name": "c"}
    assert shortages(needs(initContainers=[asks]), offer(), {}) == ["a.test/device"]


def test_what_is_not_checked_is_named() -> None:
    """Only where it can refuse a node."""
    required = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]}
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}
    spec: dict[str, Any] = {
        "affinity": {"podAffinity": preferred, "podAntiAffinity": required},
        "topologySpreadConstraints": [{"whenUnsatisfiable": "ScheduleAnyway"}],
        "volumes": [{"name": "v", "emptyDir": {}}, {"name": "d", "persistentVolumeClaim": {"claimName": "d"}}],
        "containers": [container("1", ports=[{"containerPort": 80, "hostPort": 80}])],
        "schedulingGates": [{"name": "g"}],
    }
    assert needs(**spec).unchecked == ("schedulingGates", "podAntiAffinity", "persistent volumes", "host ports")


def test_budgets() -> None:
    """Selectors as Kubernetes has them; what its controller has not seen allows nothing, what cannot be read is an error."""

    def raw(generation: int = 1, **selector: Any) -> Any:
        status = {"disruptionsAllowed": 2, "observedGeneration": 1}
        meta = {"namespace": "ns", "name": "b", "generation": generation}
        return undecoded({"metadata": meta, "spec": {"selector": selector}, "status": status})

    every = read_budget(raw())
    assert every is not None and every.covers("ns", {}) and not every.covers("other", {})
    chosen = read_budget(raw(matchLabels={"a": "1"}, matchExpressions=[{"key": "b", "operator": "Exists"}]))
    assert chosen is not None and chosen.covers("ns", {"a": "1", "b": ""}) and not chosen.covers("ns", {"a": "1"})
    stale = read_budget(raw(generation=2))
    assert stale is not None and (stale.allowed, every.allowed) == (0, 2)
    assert read_budget(undecoded({"metadata": {"namespace": "ns", "name": "b"}, "spec": {}})) is None
    with pytest.raises(Corrupt):
        read_budget(undecoded({"metadata": {}, "spec": 7}))
