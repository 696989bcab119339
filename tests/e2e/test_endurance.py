"""Pods come and go while the agent is killed and the kubelet restarts: `nox -s e2e -- --endurance 20`, in minutes.

Two thirds of the time the agent is killed every ten seconds (SIGKILL); then it lives, and its memory is watched. Meanwhile
pods are created and deleted, and the kubelet restarts each minute where `--restart-kubelet` says how. Each snapshot must
show: no device ID in two pods, no GPU over its capacity, no container that sees another GPU than it was given. Nothing is
left after. What the agent remembers on purpose, curves of 15 minutes and the last 500 decisions, is set to little: its
memory would grow for longer than it is watched.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from statistics import median

import pytest

from tests.e2e.cluster import Cluster, DeadlineError, KubectlError, Object, message_of
from tests.e2e.installation import CHECKPOINT, SYSTEM, Installation, is_ready, with_variables

pytestmark = pytest.mark.e2e
KILL_EVERY_S, RESTART_EVERY_S, COMPARE_EVERY_S = 10.0, 60.0, 5.0
PODS = 24
"""At a time, at most: about what eight GPUs hold of the requests below."""
BATCH = 3
FORCED = 0.1
"""Part of the deletions that do not wait for the containers' end."""
MEMORY_GROWTH = 1.05
FORGETFUL = {
    "GPUSHARE_USAGE__HISTORY_S": "60",
    "GPUSHARE_USAGE__HISTORY_POINTS": "12",
    "GPUSHARE_DECISIONS__KEPT": "20",
}
LABEL = "app=endurance"
MANY_LOGS = (f"--max-log-requests={2 * PODS}", "--ignore-errors")
SHOW_GPUS = "echo gpus=$NVIDIA_VISIBLE_DEVICES; trap 'exit 0' TERM; while :; do sleep 3600 & wait; done"
REQUESTS = ((5, 1), (5, 2), (10, 2), (10, 4), (20, 4), (20, 8), (30, 10), (50, 20), (100, 0), (200, 0))
"""Hundredths of a GPU, memory blocks."""


@dataclass(kw_only=True)
class Seen:
    """What happened, for the report; and what must not have."""

    created: int = 0
    deleted: int = 0
    kills: int = 0
    kubelet_restarts: int = 0
    snapshots: int = 0
    compared: int = 0
    """Containers whose environment was compared with the kubelet's records."""
    rejected: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    """Of each kind of rejection the first, whole."""
    faults: list[str] = field(default_factory=list)
    resident_mib: list[float] = field(default_factory=list)
    """Of the agent that is not killed any more, once for each snapshot."""


@dataclass(kw_only=True)
class Every:
    """True once in each period."""

    period_s: float
    due: float = field(default_factory=time.monotonic)

    def now(self) -> bool:
        if time.monotonic() < self.due:
            return False
        self.due = time.monotonic() + self.period_s
        return True


def test_pods_come_and_go_under_faults(
    cluster: Cluster,
    installation: Installation,
    namespace: str,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No over-commit, no wrong container, nothing left, memory flat."""
    minutes = minutes_of(request)
    installation.install(patches=[with_variables(FORGETFUL)])
    with capsys.disabled():
        endure(cluster, installation, namespace, minutes, pod_of_chance, compare)
    cluster.wait_for("no file is left on the node", lambda: left_on_the_node(installation) == [])


def minutes_of(request: pytest.FixtureRequest) -> float:
    minutes: float = request.config.getoption("--endurance")
    if not minutes:
        pytest.skip("takes as long as --endurance MINUTES says")
    return minutes


def endure(
    cluster: Cluster,
    installed: Installation,
    namespace: str,
    minutes: float,
    make_pod: Callable[[Cluster, str, random.Random], Object],
    compare: Callable[[Cluster, Installation, str, Seen], None],
) -> Seen:
    """Prints the counts, which it is run for."""
    seen, chance = Seen(), random.Random(13)
    start = time.monotonic()
    until, last_kill = start + minutes * 60, start + minutes * 40
    kill, restart, compare_now = (Every(period_s=period) for period in (KILL_EVERY_S, RESTART_EVERY_S, COMPARE_EVERY_S))
    while time.monotonic() < until:
        churn(cluster, namespace, chance, seen, make_pod)
        if time.monotonic() < last_kill and kill.now():
            cluster.wait_for("the agent is killed", lambda: kill_agent(installed))
            seen.kills += 1
        if cluster.hooks["restart-kubelet"] and restart.now():
            cluster.hook("restart-kubelet")
            seen.kubelet_restarts += 1
        if compare_now.now():
            compare(cluster, installed, namespace, seen)
            if time.monotonic() > last_kill + 60:
                seen.resident_mib += resident_mib(installed)
    cluster.delete_pods(namespace)
    installed.wait_ready()
    cluster.wait_for("an empty ledger", lambda: not [key for key in installed.ledger() if key.startswith(namespace)])
    print(f"\n{seen}")  # noqa: T201 - the counts are what it is run for
    assert not seen.faults
    assert min(seen.kills, seen.snapshots, seen.compared) > minutes
    third = len(seen.resident_mib) // 3
    early, late = (median(part) for part in (seen.resident_mib[:third], seen.resident_mib[-third:]))
    assert late < early * MEMORY_GROWTH, seen.resident_mib
    return seen


def churn(
    cluster: Cluster,
    namespace: str,
    chance: random.Random,
    seen: Seen,
    make_pod: Callable[[Cluster, str, random.Random], Object],
) -> None:
    """A batch of new pods, and as many of the old ones deleted; rejected ones are counted by the reason."""
    pods = [pod for pod in cluster.pods(namespace).values() if "deletionTimestamp" not in pod["metadata"]]
    failed = [pod for pod in pods if pod["status"].get("phase") == "Failed"]
    for pod in failed:
        kind = re.sub(r"[0-9]+|GPU-\S+|endurance-\S+", "N", message_of(pod))[:120]
        seen.rejected[kind] += 1
        seen.examples.setdefault(kind, message_of(pod))
    living = sorted((pod for pod in pods if pod not in failed), key=lambda pod: pod["metadata"]["creationTimestamp"])
    gone = failed + chance.sample(living, min(BATCH, max(0, len(living) + BATCH - PODS)))
    if gone:
        names = [pod["metadata"]["name"] for pod in gone]
        force = ("--force", "--grace-period=0") if chance.random() < FORCED else ()
        cluster.run("delete", "pod", "-n", namespace, "--wait=false", *force, *names)
    made = [make_pod(cluster, f"endurance-{seen.created + index}", chance) for index in range(BATCH)]
    cluster.apply(*made, namespace=namespace)
    seen.created, seen.deleted = seen.created + len(made), seen.deleted + len(gone)


def pod_of_chance(cluster: Cluster, name: str, chance: random.Random) -> Object:
    """One container or two, or one behind an init container with a share."""
    containers = [
        cluster.container(*chance.choice(REQUESTS), command=SHOW_GPUS) for _ in range(chance.choice((1, 1, 2)))
    ]
    for index, container in enumerate(containers):
        container["name"] = f"main-{index}"
    first = {"initContainers": [cluster.container(10, 2, name="init", command="true")]} if chance.random() < 0.3 else {}
    pod = cluster.pod_of(name, *containers, **first)
    pod["metadata"]["labels"] = dict([LABEL.split("=")])
    return pod


def kill_agent(installed: Installation) -> bool:
    """SIGKILL. The kubelet starts a container again at once the first time alone, then after 10, 20, … s in which most pods
    are rejected: after the second kill its pod is deleted, and the DaemonSet makes another. False: not possible now."""
    name = installed.agent()
    try:
        pod = installed.cluster.get("pod", name, "-n", SYSTEM)
        installed.signal()
    except KubectlError:  # a kubelet that has just started does not know its pods yet
        return False
    if any(one["restartCount"] for one in pod["status"]["containerStatuses"]):
        how = ("--force", "--grace-period=0", "--ignore-not-found")
        installed.cluster.run("delete", "pod", name, "-n", SYSTEM, *how)
    return True


def compare(cluster: Cluster, installed: Installation, namespace: str, seen: Seen) -> None:
    """Records of the kubelet, ledger of the agent, and what the containers see; nothing while no agent can be asked."""
    if not any(is_ready(pod) for pod in installed.agents().values()):
        return
    try:
        view = installed.view()
        entries = json.loads(installed.exec("cat", CHECKPOINT))["Data"]["PodDeviceEntries"] or []
        shown = cluster.run("logs", "-n", namespace, "-l", LABEL, "-c", "main-0", "--prefix", "--tail=1", *MANY_LOGS)
        running = {
            pod["metadata"]["uid"]: name
            for name, pod in cluster.pods(namespace).items()
            if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
        }
    except (KubectlError, DeadlineError, KeyError, ValueError):  # the agent was killed meanwhile
        return
    seen.snapshots += 1
    ledger = {f"{one['pod']}/{one['container']}": one for one in view["containers"] if one["namespace"] == namespace}
    owners: dict[tuple[str, str], str] = {}
    for entry in entries:
        for device in chain.from_iterable(entry["DeviceIDs"].values()):
            name = running.get(entry["PodUID"])
            if name and owners.setdefault((entry["ResourceName"], device), name) != name:
                seen.faults.append(f"{device} is of {owners[entry['ResourceName'], device]} and of {name}")
    check_capacity(view, seen)
    environments = dict(re.findall(r"^\[pod/(\S+)\] gpus=(\S*)$", shown, flags=re.M))
    for container in environments.keys() & ledger.keys():
        seen.compared += 1
        given = {gpu["uuid"] for gpu in ledger[container]["gpus"]}
        if set(environments[container].split(",")) != given:
            seen.faults.append(f"{container} sees {environments[container]}, allocated is {sorted(given)}")


def check_capacity(view: Object, seen: Seen) -> None:
    for gpu in view["gpus"]:
        for unit, used in (("cores", gpu["cores"]), ("memory", gpu["memory"])):
            most, allocated = used.values()
            if allocated > most:
                seen.faults.append(f"{gpu['uuid']}: {allocated} of {most} {unit} allocated")


def resident_mib(installed: Installation) -> list[float]:
    """Anonymous memory of the agent's container, by its cgroup (v1 or v2); none while it cannot be asked."""
    files = "/sys/fs/cgroup/memory/memory.stat /sys/fs/cgroup/memory.stat"
    try:
        text = installed.exec("sh", "-c", f"cat {files} 2>/dev/null || true")
    except (KubectlError, DeadlineError):
        return []
    return [int(value) / 2**20 for value in re.findall(r"^(?:total_rss|anon) ([0-9]+)$", text, flags=re.M)][:1]


def left_on_the_node(installed: Installation) -> list[str]:
    """Files of containers that are no more: the agent's directories for vcuda and hami-core."""
    return installed.exec(
        "sh", "-c", "ls -d /etc/gpu-manager/vm/*/ /etc/gpu-manager/hami-core/*/* 2>/dev/null || true"
    ).split()
