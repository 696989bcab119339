"""The specs of Kubernetes' own test of device plugins (test/e2e_node/device_plugin_test.go, v1.32), with the agent in
the place of its sample plugin. Each test names its spec, which it may go beyond; the plugin of the specs is a pod without a
controller, here a DaemonSet's. Not here: "can make a CDI device accessible in a container", which the sample plugin's own
devices are for; claims reach their containers by CDI (test_claims.py).

The agent and the kubelet end and come back: what runs is not touched, and the ledger is the same.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import CORE, MEMORY, Cluster, KubectlError, Object
from tests.e2e.installation import BLOCK_BYTES, SYSTEM, Installation, is_ready, take_off_node

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
        name: [(one.get("containerID", ""), one["restartCount"]) for one in pod["status"].get("containerStatuses", ())]
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
    """Keeps device plugin assignments after the device plugin has restarted (no kubelet restart, pod restart): from the
    kubelet's records; the container starts again in its pod."""
    ((uid, before),) = _restarts(installed).items()
    installed.signal(number)
    cluster.wait_for("the container's restart", lambda: _restarts(installed).get(uid, 0) == before + 1)


def test_an_agents_pod_that_is_deleted_is_replaced_with_the_same_ledger(
    cluster: Cluster, installed: Installation, running: str
) -> None:
    """The same spec as it does it: by deleting the plugin's pod. The DaemonSet makes another."""
    before = set(_restarts(installed))
    cluster.run("delete", "pod", installed.agent(), "-n", SYSTEM)
    cluster.wait_for("another pod", lambda: bool(_restarts(installed).keys() - before))


@pytest.mark.smoke
def test_a_kubelet_that_restarts_has_the_agent_again(cluster: Cluster, installed: Installation, running: str) -> None:
    """Keeps device plugin assignments across kubelet restarts (no pod restart, no device plugin restart): it removes the
    agent's sockets when it starts; the agent registers again by itself, without a restart."""
    before = _restarts(installed)
    _restart_kubelet(cluster, installed)
    assert _restarts(installed) == before


def test_kubelet_and_agent_restart(cluster: Cluster, installed: Installation, running: str) -> None:
    """Keeps device plugin assignments after kubelet restart and device plugin restart (no pod restart)."""
    before = set(_restarts(installed))
    _restart_kubelet(cluster, installed)
    cluster.run("delete", "pod", installed.agent(), "-n", SYSTEM)
    cluster.wait_for("another pod", lambda: bool(_restarts(installed).keys() - before))


def _restart_kubelet(cluster: Cluster, installed: Installation) -> None:
    registered = _registrations(installed)
    cluster.hook("restart-kubelet")
    cluster.wait_for("another registration", lambda: _registrations(installed) > registered)


def _registrations(installed: Installation) -> float:
    """With the kubelet, of both resources; 0 while the agent cannot be asked."""
    try:
        return installed.metric("gpushare_registrations_total")
    except KubectlError:
        return 0


def test_a_share_has_the_same_gpu_in_every_record(cluster: Cluster, installed: Installation, namespace: str) -> None:
    """Can schedule a pod that requires a device: the kubelet's records, the agent's ledger, the pod's annotations and the
    container's environment name it."""
    cluster.start(namespace, cluster.pod_of("share", cluster.container(40, 8, command="env; sleep 3600")))
    (core, memory, gpus) = installed.wait_ledger(namespace, 1)[f"{namespace}/share/main"]
    assert (core, memory, len(gpus)) == (40, 8 * BLOCK_BYTES, 1)
    uuid = installed.view()["gpus"][gpus[0]]["uuid"]
    (records,) = installed.kubelet_records([cluster.pods(namespace)["share"]]).values()
    assert records[CORE] == [uuid] * 40
    assert len(records[MEMORY]) == 8
    cluster.wait_for("annotation", lambda: annotated(cluster.pods(namespace)["share"]) == str(gpus[0]))
    if cluster.runtime_class is None:  # NVIDIA's runtime may replace the variable
        seen = cluster.wait_for("its environment", lambda: cluster.run("logs", "share", "-n", namespace))
        assert f"NVIDIA_VISIBLE_DEVICES={uuid}\n" in seen


def annotated(pod: Object) -> str:
    return str(pod["metadata"].get("annotations", {}).get("tencent.com/predicate-gpu-idx-0", ""))


def test_init_containers_sidecars_and_main_containers_have_their_shares(
    cluster: Cluster, installed: Installation, namespace: str
) -> None:
    """Can schedule a pod with a restartable init container: the kubelet hands an init container's devices on to those after
    it, without a call. The sidecar and one main container have devices that the init container had."""
    pod = cluster.pod_of(
        "mixed",
        cluster.container(20, 4, name="main"),
        cluster.container(10, 2, name="second"),
        initContainers=[
            cluster.container(20, 4, name="init", command="env"),
            cluster.container(10, 2, name="sidecar", restartPolicy="Always"),
        ],
    )
    cluster.start(namespace, pod)
    ledger = installed.wait_ledger(namespace, 3)
    assert {key.rsplit("/")[-1]: one[0] for key, one in ledger.items()} == {"main": 20, "second": 10, "sidecar": 10}
    seen = cluster.run("logs", "mixed", "-c", "init", "-n", namespace)
    assert cluster.runtime_class is not None or "NVIDIA_VISIBLE_DEVICES=GPU-" in seen
    (records,) = installed.kubelet_records([cluster.pods(namespace)["mixed"]]).values()
    assert len(set(records[CORE])) <= 2


class Dying:
    """A pod with a share whose container ends when it is told to, and starts again; each start writes its GPU."""

    def __init__(self, cluster: Cluster, namespace: str, name: str = "dying") -> None:
        self._cluster, self._namespace, self._name = cluster, namespace, name
        command = "echo gpus=$NVIDIA_VISIBLE_DEVICES; trap 'exit 1' TERM; while :; do sleep 3600 & wait; done"
        cluster.start(namespace, cluster.pod_of(name, cluster.container(30, 4, command=command)))

    def pod(self) -> Object:
        return self._cluster.pods(self._namespace)[self._name]

    def seen(self) -> str:
        """What the container that runs now has of GPUs."""
        logs = ("logs", self._name, "-n", self._namespace)
        return self._cluster.wait_for("its log", lambda: self._cluster.run(*logs).strip())

    def restart(self) -> None:
        before = _containers(self._cluster, self._namespace)[self._name][0][1]

        def ended() -> bool:
            try:
                self._cluster.run("exec", self._name, "-n", self._namespace, "--", "kill", "1")
            except KubectlError:  # a kubelet that has just started does not know its pods yet
                return False
            return True

        self._cluster.wait_for("its end", ended)

        def restarted() -> bool:
            (status,) = self.pod()["status"].get("containerStatuses") or [{}]
            return bool(status.get("restartCount") == before + 1 and "running" in status["state"])

        self._cluster.wait_for("the next start", restarted)


def test_a_container_that_dies_starts_again_with_its_share(
    cluster: Cluster, installed: Installation, namespace: str
) -> None:
    """Keeps device plugin assignments across pod restarts (no kubelet restart, no device plugin restart): PreStartContainer
    alone is called. Another pod gets other devices."""
    dying = Dying(cluster, namespace)
    seen, records = dying.seen(), installed.kubelet_records([dying.pod()])
    dying.restart()
    cluster.start(namespace, cluster.pod("another", 80, 4))
    assert (dying.seen(), installed.kubelet_records([dying.pod()])) == (seen, records)
    ledger = installed.wait_ledger(namespace, 2)
    assert ledger[f"{namespace}/dying/main"][:2] == (30, 4 * BLOCK_BYTES)
    assert len({gpus for _, _, gpus in ledger.values()}) == 2, "30 and 80 do not fit on one GPU"


def test_a_container_that_dies_before_and_after_a_restart_of_the_kubelet_keeps_its_share(
    cluster: Cluster, installed: Installation, namespace: str
) -> None:
    """Keeps device plugin assignments across pod and kubelet restarts (no device plugin restart)."""
    dying = Dying(cluster, namespace)
    seen, records, ledger = dying.seen(), installed.kubelet_records([dying.pod()]), installed.wait_ledger(namespace, 1)
    dying.restart()
    _restart_kubelet(cluster, installed)
    dying.restart()
    assert (dying.seen(), installed.kubelet_records([dying.pod()])) == (seen, records)
    assert installed.wait_ledger(namespace, 1) == ledger


def test_a_pod_that_succeeded_is_not_admitted_again(cluster: Cluster, installed: Installation, namespace: str) -> None:
    """will not attempt to admit the succeeded pod after the kubelet restart and device plugin removed: its phase stays,
    where an admission would fail. The kubelet has come to it when a pod that was made later runs."""
    done = cluster.pod_of("done", cluster.container(30, 4, command="true"), restartPolicy="Never")
    # As the spec: nothing but the test deletes it.
    done["metadata"]["finalizers"] = ["example.com/test"]
    cluster.apply(done, namespace=namespace)
    cluster.wait_phase(namespace, "done", phase="Succeeded")
    try:
        take_off_node(cluster)
        cluster.wait_for("nothing is offered", lambda: not any(installed.offered().values()))
        cluster.hook("restart-kubelet")
        cluster.start(namespace, cluster.pod("later"))
        assert cluster.pods(namespace)["done"]["status"]["phase"] == "Succeeded"
    finally:
        cluster.run("patch", "pod", "done", "-n", namespace, "-p", '{"metadata": {"finalizers": null}}')


def test_a_pod_that_is_deleted_while_the_kubelet_is_down_leaves_nothing(
    cluster: Cluster, installed: Installation, namespace: str
) -> None:
    """[OrphanedPods] Ensures pods consuming devices deleted while kubelet is down are cleaned up correctly: its container
    ends, and another pod gets all that it had."""
    whole, registered = installed.gpus() * 100, _registrations(installed)
    cluster.start(namespace, cluster.pod("orphan", whole))
    cluster.hook("stop-kubelet")
    try:
        cluster.run("delete", "pod", "orphan", "-n", namespace, "--force", "--grace-period=0")
    finally:
        cluster.hook("start-kubelet")
    # Before that the kubelet rejects pods: it has no plugin.
    cluster.wait_for("another registration", lambda: _registrations(installed) > registered)
    installed.wait_ledger(namespace, 0)
    cluster.start(namespace, cluster.pod("next", whole))
    assert set(installed.wait_ledger(namespace, 1)) == {f"{namespace}/next/main"}


def test_a_node_that_boots_again(cluster: Cluster, installed: Installation, namespace: str) -> None:
    """Keeps device plugin assignments across node reboots (no pod restart, no device plugin re-registration): as there a pod
    that the kubelet comes to before the agent fails at admission; one that it comes to later has the GPU that it had. No
    share is lost and none is given twice; a controller's pods are all there in the end."""
    number = installed.gpus()
    web = cluster.workload("Deployment", cluster.container(60, 4), name="web", replicas=number)
    cluster.apply(web, *(cluster.pod(f"bare-{index}", 20, 4) for index in range(3)), namespace=namespace)
    before = installed.wait_ledger(namespace, number + 3)
    cluster.wait_phase(namespace, *cluster.pods(namespace))
    former = {one for ids in _containers(cluster, namespace).values() for one, _ in ids}
    cluster.hook("reboot-node")

    def booted() -> dict[str, Object] | None:
        """The pods, once each has failed or runs in a container that was not there before, as many as the controller has."""
        pods = cluster.pods(namespace)
        runs = {name for name, pod in pods.items() if is_ready(pod)} - {
            name for name, ids in _containers(cluster, namespace).items() if former.intersection(one for one, _ in ids)
        }
        is_clear = all(name in runs or pod["status"]["phase"] == "Failed" for name, pod in pods.items())
        return pods if is_clear and sum(name.startswith("web") for name in runs) == number else None

    pods = cluster.wait_for("each pod runs again or has failed", booted)
    failed = {name for name, pod in pods.items() if pod["status"]["phase"] == "Failed"}
    assert {pods[name]["status"]["reason"] for name in failed} <= {"UnexpectedAdmissionError"}
    after = installed.wait_ledger(namespace, len(pods) - len(failed))
    assert after.keys() == {f"{namespace}/{name}/main" for name in pods.keys() - failed}, "a share is lost"
    assert {key: after[key] for key in after.keys() & before} == {key: before[key] for key in after.keys() & before}
    webs = [gpus for cores, _, gpus in after.values() if cores == 60]
    assert len(webs) == len(set(webs)) == number, "60 and 60 do not fit on one GPU"
