"""The extender, installed by its guide, with a real kube-scheduler that asks it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from gpushare_agent.core.model.names import (
    PREDICATE_GPU_INDEX_PREFIX,
    PREDICATE_NODE_ANNOTATION,
    RESIZE_ANNOTATION,
    VCORE_RESOURCE,
    VMEMORY_RESOURCE,
)
from gpushare_agent.core.node_report.annotations import ALLOCATIONS_ANNOTATION, GPUS_ANNOTATION
from tests.e2e.cluster import Cluster, KubectlError, Object, audited, manifest
from tests.e2e.extender import APP, NAME, SCHEDULER, ExtenderInstallation, open_extender
from tests.e2e.installation import MANIFESTS, SYSTEM, Installation, rights_of_component
from tests.manifests.support_manifests import rendered

pytestmark = pytest.mark.e2e
INDEX = f"{PREDICATE_GPU_INDEX_PREFIX}0"
QUOTA = ("-n", "kube-system", "configmap", "gpuquota")


@pytest.fixture(scope="module")
def extender(
    installation: Installation, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ExtenderInstallation]:
    installation.install()
    with open_extender(installation, request, tmp_path_factory.mktemp("extender")) as found:
        found.install("fgd")
        yield found


@pytest.fixture
def quota(cluster: Cluster) -> Iterator[Any]:
    """Writes the quota's ConfigMap; removed at the end. Skips where the cluster has one."""
    if cluster.run("get", *QUOTA, "--ignore-not-found", "-o", "name"):
        pytest.skip("the cluster has a quota of its own")

    def write(text: str) -> None:
        cluster.apply(manifest("v1", "ConfigMap", "gpuquota", data={"gpu_quota": text}), namespace="kube-system")

    yield write
    cluster.run("delete", *QUOTA, "--ignore-not-found")


def waits_because(cluster: Cluster, namespace: str, name: str, text: str) -> None:
    """Until the scheduler has refused the pod with this text in its reason."""

    def poll() -> bool:
        status = cluster.pods(namespace)[name]["status"]
        assert "nodeName" not in cluster.pods(namespace)[name]["spec"]
        return any(text in one.get("message", "") for one in status.get("conditions", ()))

    cluster.wait_for(f"pod {name} waits because: {text}", poll)


def share(cluster: Cluster, name: str, core: int, **more: Any) -> Object:
    return cluster.pod(name, core, 1, schedulerName=SCHEDULER, **more)


@pytest.mark.smoke
def test_a_pod_gets_the_gpu_that_the_extender_chose(
    cluster: Cluster, installed: Installation, extender: ExtenderInstallation, namespace: str
) -> None:
    """One replica leads as installed, a kube-scheduler asks it, and the agent allocates what was planned."""
    cluster.start(namespace, share(cluster, "share", 30))
    ((_, _, gpus),) = installed.wait_ledger(namespace, 1).values()
    annotations = cluster.pods(namespace)["share"]["metadata"]["annotations"]
    assert annotations[PREDICATE_NODE_ANNOTATION] == cluster.node
    assert annotations[INDEX] == ",".join(map(str, gpus))
    assert extender.metric('gpushare_extender_binds_total{outcome="bound"}') >= 1
    assert extender.metric("gpushare_extender_placement_disagreements_total") == 0


def test_a_pod_waits_for_one_gpu_that_fits_whatever_is_free_in_sum(
    cluster: Cluster, installed: Installation, extender: ExtenderInstallation, namespace: str
) -> None:
    """kube-scheduler alone would bind it, and the node reject it. It starts when a GPU is free."""
    number = installed.gpus()
    if number < 2:
        pytest.skip("with one GPU the sum is what one has")
    holders = [share(cluster, f"holder-{n}", 60) for n in range(number)]
    cluster.start(namespace, *holders)
    ledger = installed.wait_ledger(namespace, number)
    assert len({gpus for _, _, gpus in ledger.values()}) == number, "60 and 60 do not fit on one GPU"
    cluster.apply(share(cluster, "whole", 50), namespace=namespace)
    waits_because(cluster, namespace, "whole", "GPU")
    cluster.run("delete", "pod", "holder-0", "-n", namespace)
    cluster.wait_phase(namespace, "whole")


def test_a_pod_over_its_quota_starts_when_it_is_raised(
    cluster: Cluster, installed: Installation, extender: ExtenderInstallation, namespace: str, quota: Any
) -> None:
    """Without any other event in the cluster: the scheduler would try it again after five minutes."""
    quota(json.dumps({namespace: {"vcore": 20}}))
    cluster.wait_for(
        "the quota is read", lambda: extender.metric('gpushare_extender_quota_loads_total{outcome="good"}') >= 1
    )
    cluster.apply(share(cluster, "waiting", 30), namespace=namespace)
    waits_because(cluster, namespace, "waiting", "quota")
    quota(json.dumps({namespace: {"vcore": 30}}))
    cluster.wait_phase(namespace, "waiting")
    cluster.apply(share(cluster, "second", 30), namespace=namespace)
    waits_because(cluster, namespace, "second", "quota")
    cluster.run("delete", "pod", "waiting", "-n", namespace)
    cluster.wait_phase(namespace, "second")


class Nodes:
    """Objects of nodes that no kubelet runs, for pods with this label in their nodeSelector, whose value is the `group`:
    pods are bound to them, none runs there."""

    LABEL = "gpushare-agent-e2e/without-kubelet"

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._names: list[str] = []

    def make(self, name: str, used: Sequence[int], *, cpu: str, group: str = "tried") -> None:
        """`used` cores of each of its GPUs, which have 96 memory blocks each, in use in proportion."""
        name = f"gpushare-e2e-{name}"
        self._names.append(name)
        gpus = [
            {"index": index, "uuid": f"GPU-{name}-{index}", "name": "A10", "memory_mib": 24576, "is_healthy": True}
            for index in range(len(used))
        ]
        held = {f"uid-{name}": {str(i): [100, 0, 0, 1] if n == 100 else [n, 96 * n // 100] for i, n in enumerate(used)}}
        annotations = {
            GPUS_ANNOTATION: json.dumps({"schema": 1, "memory_block_mib": 256, "gpus": gpus}),
            ALLOCATIONS_ANNOTATION: json.dumps({"schema": 1, "allocations": held}),
        }
        metadata = {"name": name, "labels": {self.LABEL: group}, "annotations": annotations}
        size = {"cpu": cpu, "memory": "64Gi", "pods": "110"}
        size |= {VCORE_RESOURCE: str(100 * len(used)), VMEMORY_RESOURCE: str(96 * len(used))}
        self._cluster.make_node(metadata, size)

    def pod(self, name: str, core: int, cpu: str, *, group: str = "tried", **more: Any) -> Object:
        container = self._cluster.container(core, 96 * core // 100)
        container["resources"]["requests"] = {"cpu": cpu, "memory": "64Mi"}
        keys = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
        tolerations = [{"key": key, "operator": "Exists"} for key in keys]
        return self._cluster.pod_of(
            name, container, nodeSelector={self.LABEL: group}, tolerations=tolerations, schedulerName=SCHEDULER, **more
        )

    def bound(self, namespace: str, *pods: Object) -> list[str]:
        """The names, as given to `make`, of the nodes to which they were bound."""
        return [one.removeprefix("gpushare-e2e-") for one in self._cluster.bound(namespace, *pods)]

    def remove(self) -> None:
        for name in self._names:
            self._cluster.run("delete", "node", name, "--ignore-not-found")


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[Nodes]:
    made = Nodes(cluster)
    yield made
    made.remove()


def test_the_extenders_best_node_wins_over_the_schedulers_own_criteria(
    cluster: Cluster, extender: ExtenderInstallation, namespace: str, nodes: Nodes
) -> None:
    """Policy fgd: once pods of fifty cores are what usually comes, a share goes to a GPU that those cannot use, while
    kube-scheduler likes other nodes better, where more CPU is free. What the extender learnt from earlier tests differs by
    which of their pods are still there."""
    for number in range(4):
        # Thirty cores are left: too little for fifty, and the CPUs are nearly all in use.
        nodes.make(f"rest-{number}", [70], cpu="4")
        cluster.apply(
            nodes.pod(f"cpus-{number}", 0, "3500m", nodeName=f"gpushare-e2e-rest-{number}"), namespace=namespace
        )
        nodes.make(f"half-{number}", [100] * 7 + [50], cpu="64")
    nodes.make("past", [0] * 16, cpu="64", group="past")
    try:
        usual = [nodes.pod(f"usual-{number}", 50, "1", group="past") for number in range(20)]
        assert nodes.bound(namespace, *usual) == ["past"] * 20

        later = [nodes.bound(namespace, nodes.pod(f"later-{number}", 30, "100m"))[0] for number in range(4)]
        assert sorted(later) == [f"rest-{number}" for number in range(4)]
    finally:
        cluster.force_delete_pods(namespace)


@pytest.fixture
def urgent(cluster: Cluster) -> Iterator[str]:
    """A PriorityClass above that of pods without one."""
    name = f"gpushare-e2e-urgent-{cluster.suffix}"
    cluster.apply(manifest("scheduling.k8s.io/v1", "PriorityClass", name, value=1000))
    yield name
    cluster.run("delete", "priorityclass", name, "--ignore-not-found")


def preempts(
    cluster: Cluster, namespace: str, nodes: Nodes, urgent: str, *, held: Sequence[int], wanted: Sequence[int]
) -> int:
    """Binds a pod of each of these cores to a node of eight GPUs, then pods of the higher priority; how many of the former
    have ended."""
    nodes.make("full", [0] * 8, cpu="64", group="full")
    low = [
        nodes.pod(f"low-{n}", cores, "100m", group="full", terminationGracePeriodSeconds=0)
        for n, cores in enumerate(held)
    ]
    nodes.bound(namespace, *low)
    high = [
        nodes.pod(f"high-{n}", cores, "100m", group="full", terminationGracePeriodSeconds=0, priorityClassName=urgent)
        for n, cores in enumerate(wanted)
    ]
    try:
        # One after the other: pods that end at once leave the scheduler's dry run for the second with the first's victims.
        assert [nodes.bound(namespace, one) for one in high] == [["full"]] * len(high)
        return len({one["metadata"]["name"] for one in low} - cluster.pods(namespace).keys())
    finally:
        cluster.force_delete_pods(namespace)


def test_the_schedulers_victims_are_replaced_by_those_of_one_gpu(
    cluster: Cluster, installed: Installation, extender: ExtenderInstallation, namespace: str, urgent: str
) -> None:
    """Its own are any halves: on two GPUs their end would make room for nobody. For two pods at once two pairs end, and no
    more."""
    halves = [share(cluster, f"low-{n}", 50) for n in range(2 * installed.gpus())]
    cluster.start(namespace, *halves)
    had = {name: pod["metadata"]["annotations"][INDEX] for name, pod in cluster.pods(namespace).items()}
    high = [share(cluster, f"high-{cores}", cores, priorityClassName=urgent) for cores in (100, 60)]
    cluster.start(namespace, *high)
    gone = had.keys() - cluster.pods(namespace).keys()
    assert sorted(Counter(had[name] for name in gone).values()) == [2, 2]


def test_pods_end_for_another_where_the_sum_of_what_is_free_suffices(
    cluster: Cluster, extender: ExtenderInstallation, namespace: str, nodes: Nodes, urgent: str
) -> None:
    """kube-scheduler finds no victims there, and asks only in versions after 1.36."""
    assert preempts(cluster, namespace, nodes, urgent, held=[60] * 8, wanted=[60]) == 1


def test_pods_that_a_budget_protects_are_spared(
    cluster: Cluster, installed: Installation, extender: ExtenderInstallation, namespace: str, urgent: str
) -> None:
    """By the API server's answer to an eviction that is only tried; the only pod that may end is not the cheapest else."""
    held = [share(cluster, f"low-{n}", 60) for n in range(installed.gpus())]
    for pod in held[1:]:
        pod["metadata"]["labels"] = {"app": "kept"}
    spec = {"minAvailable": len(held) - 1, "selector": {"matchLabels": {"app": "kept"}}}
    cluster.apply(manifest("policy/v1", "PodDisruptionBudget", "kept", spec=spec), namespace=namespace)
    cluster.start(namespace, *held)

    def is_counted() -> bool:
        status = cluster.get("poddisruptionbudget", "kept", "-n", namespace)["status"]
        return bool(status.get("currentHealthy") == len(held) - 1 and status.get("disruptionsAllowed") == 0)

    cluster.wait_for("the budget allows nothing", is_counted)
    cluster.start(namespace, share(cluster, "high", 60, priorityClassName=urgent))
    assert set(cluster.pods(namespace)) == {"high", *(f"low-{n}" for n in range(1, len(held)))}


def test_a_tenant_cannot_pass_by_the_policies(cluster: Cluster, extender: ExtenderInstallation, namespace: str) -> None:
    """Every ValidatingAdmissionPolicy of the manifests, asked by a user who may write pods."""
    cluster.run("apply", "-k", str(MANIFESTS / "resize"))
    try:
        tenant = f"tenant-{cluster.suffix}"
        rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "get", "patch", "update"]}]
        group = "rbac.authorization.k8s.io"
        role, subject = ({"apiGroup": group, "kind": kind, "name": tenant} for kind in ("Role", "User"))
        cluster.apply(
            manifest(f"{group}/v1", "Role", tenant, rules=rules),
            manifest(f"{group}/v1", "RoleBinding", tenant, roleRef=role, subjects=[subject]),
            namespace=namespace,
        )
        asked: list[tuple[Object, Object, str]] = [
            ({INDEX: "0"}, {}, "only the scheduler extender and the agents"),
            ({"tencent.com/gpu-assigned": "true"}, {}, "only the scheduler extender and the agents"),
            ({"gpushare-agent/retry-at": "1"}, {}, "only the scheduler extender and the agents"),
            ({RESIZE_ANNOTATION: "main:cores=90"}, {}, "needs the verb resize"),
            ({}, {"nodeName": cluster.node}, "may not name its node"),
            ({}, {"schedulerName": "default-scheduler"}, "needs `schedulerName: gpushare-scheduler`"),
            ({"mine": "x"}, {}, ""),
        ]

        def are_in_force() -> bool:  # one after the other
            for annotations, spec, text in asked:
                refusal = _refusal(cluster, namespace, tenant, annotations, **spec)
                if text not in refusal or bool(text) != bool(refusal):
                    return False
            return True

        cluster.wait_for("each policy refuses what it is for, and nothing else", are_in_force)
        cluster.start(namespace, share(cluster, "own", 10))
        for change in (f"{INDEX}=7", f"{INDEX}-"):
            with pytest.raises(KubectlError, match="only the scheduler extender and the agents"):
                cluster.run("annotate", "pod", "own", change, "-n", namespace, "--overwrite", f"--as={tenant}")
    finally:
        cluster.run("delete", "-k", str(MANIFESTS / "resize"), "--ignore-not-found")


def _refusal(cluster: Cluster, namespace: str, tenant: str, annotations: Object, **spec: Any) -> str:
    """Why the tenant's pod is not created; empty where it would be."""
    pod = share(cluster, "tried", 10)
    pod["metadata"]["annotations"] = annotations
    pod["spec"] |= spec
    try:
        cluster.run("create", "-n", namespace, f"--as={tenant}", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
    except KubectlError as error:
        return str(error)
    return ""


def test_what_they_ask_of_the_api_server_is_what_they_may(
    cluster: Cluster,
    installed: Installation,
    extender: ExtenderInstallation,
    namespace: str,
    quota: Any,
    nodes: Nodes,
    urgent: str,
) -> None:
    """By the API server's audit log: nothing was forbidden to both, and each right of the extender was used. The scheduler's
    are Kubernetes' own, but for its lease."""
    log = cluster.path("audit-log")
    cluster.start(namespace, share(cluster, "bound", 10))
    assert preempts(cluster, namespace, nodes, urgent, held=[60] * 8, wanted=[60])
    quota("no JSON")  # an Event; pods with shares wait from here on
    granted = {
        (verb, resource)
        for role in rendered("extender")
        for rule in role.get("rules", ())
        for verb in rule["verbs"]
        for resource in rule["resources"]
    } - {("use", "annotations")}  # its policy asks for it, which the audit log does not show
    account = f"system:serviceaccount:{SYSTEM}:{NAME}"
    cluster.wait_for(f"each of {sorted(granted)} is used", lambda: granted <= audited(log, account)[0])
    pods = cluster.pods(SYSTEM).keys()
    used, forbidden = audited(log, account, pods)
    assert not forbidden
    assert used <= granted | rights_of_component("extender/components/claims-webhook")
    used, forbidden = audited(log, f"system:serviceaccount:{SYSTEM}:{SCHEDULER}", pods)
    assert not forbidden
    assert used >= {(verb, "leases") for verb in ("create", "get", "update")}


def test_the_other_replica_leads_when_the_leader_ends(
    cluster: Cluster, installed: Installation, extender: ExtenderInstallation, namespace: str
) -> None:
    """And pods are scheduled by it."""
    former = extender.leader()["metadata"]["name"]
    cluster.run("delete", "pod", former, "-n", SYSTEM, "--force", "--grace-period=0")
    assert extender.leader(but=former)["metadata"]["name"] != former
    extender.point_scheduler()
    cluster.start(namespace, share(cluster, "later", 20))
    assert extender.metric('gpushare_extender_binds_total{outcome="bound"}') >= 1
    cluster.wait_for("two replicas", lambda: len(cluster.pods(SYSTEM, selector=APP)) >= 2)
