"""Pods come and go under faults: `nox -s e2e -- --endurance 120 -k endurance`, in minutes.

Shares by the device plugins and by ResourceClaims, under the default isolation: each container compares its limits with its
share all the time (share_program.py). A few pods stay from the beginning to the end. Meanwhile a GPU is lost and healed, the
kubelet restarts where `--restart-kubelet` says how, and tenants write into their annotations. In the first half the agent is
killed and rolled out too; in the second it is one process, whose memory is watched. Each snapshot must show: no device ID in
two pods, no GPU over its capacity, no container that sees another GPU than it was given, no limit that was not kept. Nothing
is left after. What the agent remembers on purpose, curves of 15 minutes and the last 500 decisions, is set to little: its
memory would grow for longer than it is watched.

`--endurance-log bench/measured/endurance.json` adds the run to those that docs/reference/measurements.md shows.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.e2e import share_program
from tests.e2e.cluster import Cluster, DeadlineError, KubectlError, Object, claim_template, message_of, names_of
from tests.e2e.endurance_snapshot import Snapshot, is_living
from tests.e2e.installation import CHECKPOINT, SYSTEM, Installation, is_ready, with_variables
from tests.e2e.test_claims import DRIVER
from tests.e2e.test_claims import request as claim_request

pytestmark = pytest.mark.e2e
COMPARE_EVERY_S, ANNOTATE_EVERY_S, CHURN_EVERY_S = 5.0, 5.0, 2.0
KILL_EVERY_S, RESTART_EVERY_S, UPGRADE_EVERY_S, LOSE_EVERY_S = 20.0, 120.0, 600.0, 60.0
UNSETTLED_S, LEAST_MIN = 60.0, 5.0
"""Of an agent's life before its memory is watched; of a run."""
PODS, CLAIM_PODS, STAYING, BATCH = 24, 0.4, 6, 3
"""At a time, at most: about what eight GPUs hold of the requests below; which part of them have claims."""
FORCED, HOSTILE_PODS = 0.1, 0.2
"""Part of the deletions that do not wait for the containers' end; of the new pods, those with annotations of their own."""
MEMORY_GROWTH = 1.05
GPUS, FOR_CLAIMS = 8, 3
FAULTS = "/var/lib/gpushare-agent/faults.json"
SETTINGS = {
    "GPUSHARE_USAGE__HISTORY_S": "60",
    "GPUSHARE_USAGE__HISTORY_POINTS": "12",
    "GPUSHARE_DECISIONS__KEPT": "20",
    "GPUSHARE_DRA__GPUS": ",".join(map(str, range(FOR_CLAIMS))),
    "GPUSHARE_SIMULATED__FAULTS": FAULTS,
    # GPUs that fail each eight minutes would be out of service longer and longer, and in the second hour all of them.
    "GPUSHARE_HEALTH__RECOVERY_PERIOD_MAX_S": "10",
}
LABEL = "app=endurance"
CONTAINERS_OF_POD = 3
MANY_LOGS = ("--all-containers", "--prefix", "--tail=1", f"--max-log-requests={CONTAINERS_OF_POD * 2 * PODS}")
BLOCK_MIB = 256
REQUESTS = ((5, 2), (5, 3), (10, 4), (20, 4), (20, 8), (30, 10), (50, 20), (100, 0), (200, 0))
"""Hundredths of a GPU, memory blocks; a whole GPU has none."""
CLAIMED = {"small": (5, 512), "medium": (20, 2048), "large": (50, 5120)}
"""Of one GPU each: percent of its cores, MiB."""
PAIR = {"a": (30, 1024), "b": (10, 512)}


def _share(share: tuple[int, int], name: str = "gpu", **more: Any) -> Object:
    return claim_request(name, cores=share[0], memory=f"{share[1]}Mi", **more)


TEMPLATES = [
    *(claim_template(name, _share(share)) for name, share in CLAIMED.items()),
    claim_template("whole", claim_request()),
    claim_template("two", _share((10, 1024), count=2)),
    claim_template(
        "pair",
        *(_share(share, name) for name, share in PAIR.items()),
        constraints=[{"distinctAttribute": f"{DRIVER}/uuid"}],
    ),
]
STAYS = "stays-"
HOSTILE = {
    "tencent.com/vcuda-core-limit": "x" * 20_000,
    "tencent.com/gpu-assigned": "../../etc",
    "tencent.com/predicate-gpu-idx-0": "99999999999999999999",
    "gpushare-agent/resize": "main-0:cores=100,memory=90",
}
FOREIGN_ISOLATION = {"tencent.com/gpu-isolation": "none"}
"""For which a pod is rejected."""
LEFT = """ls -d /etc/gpu-manager/vm/*-*/ /etc/gpu-manager/vm/.removed-* /var/run/cdi/gpushare-agent-claim-* \
/var/lib/gpushare-agent/claims/* 2>/dev/null || true"""
"""Directories of pods, also those that are set aside, and what is kept of claims."""


@dataclass(kw_only=True)
class Seen:
    """What happened, for the report; and what must not have."""

    created: int = 0
    deleted: int = 0
    kills: int = 0
    kubelet_restarts: int = 0
    upgrades: int = 0
    gpus_lost: int = 0
    snapshots: int = 0
    compared: int = 0
    """Containers whose environment was compared with what they were given."""
    checks: dict[str, int] = field(default_factory=dict, repr=False)
    """How often each container compared its limits with its share."""
    rejected: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    """Of each kind of rejection the first, whole."""
    unanswered: list[str] = field(default_factory=list)
    """What kubectl said where it failed: on a node under faults a request may."""
    wrong: list[str] = field(default_factory=list)
    over: list[str] = field(default_factory=list)
    lost_limits: dict[str, list[str]] = field(default_factory=dict)
    life_min: float = 0.0
    """How long the agent was the same process whose memory was watched."""
    resident_mib: list[float] = field(default_factory=list, repr=False)
    """Of that process, once for each snapshot."""

    def thirds_mib(self) -> tuple[float, float]:
        """The memory of the first third and of the last."""
        third = len(self.resident_mib) // 3
        return median(self.resident_mib[:third]), median(self.resident_mib[-third:])

    def as_run(self, minutes: float) -> Object:
        """The run as bench/measured/endurance.json has it."""
        counted = {
            name: getattr(self, name) for name in ("kills", "kubelet_restarts", "upgrades", "gpus_lost", "compared")
        }
        faults = {name: len(getattr(self, name)) for name in ("wrong", "over", "lost_limits")}
        memory = dict(zip(("first_mib", "last_mib"), self.thirds_mib(), strict=True))
        pods = {"pods": self.created, "checks": sum(self.checks.values())}
        machine = f"{os.cpu_count()} CPUs, load {os.getloadavg()[2]:.1f}"
        begun = {"on": datetime.now(UTC).date().isoformat(), "machine": machine, "minutes": minutes}
        return begun | counted | pods | faults | memory | {"life_min": self.life_min}


class Every:
    """True once in each period, for the first time after `first_s`, half of one by default."""

    def __init__(self, period_s: float, first_s: float | None = None) -> None:
        self.period_s = period_s
        self.due = time.monotonic() + (period_s / 2 if first_s is None else first_s)

    def now(self) -> bool:
        if time.monotonic() < self.due:
            return False
        self.due = time.monotonic() + self.period_s
        return True


@pytest.fixture
def minutes(request: pytest.FixtureRequest) -> float:
    given: float = request.config.getoption("--endurance")
    if not given:
        pytest.skip("takes as long as --endurance MINUTES says")
    assert given >= LEAST_MIN, "its second half is too short to say whether memory grows"
    return given


@pytest.fixture
def claiming(installation: Installation, minutes: float) -> Iterator[Installation]:
    """Skips where the API server has no claims, and with real GPUs, which nothing here could lose and heal."""
    if installation.overlay != "overlays/simulated":
        pytest.skip("its programs and the GPUs that are lost are simulated ones")
    installation.cluster.needs_claims()
    installation.install(components=["components/dra"], patches=[with_variables(SETTINGS)])
    yield installation
    installation.exec("rm", "-f", FAULTS)


def test_pods_come_and_go_under_faults(
    cluster: Cluster,
    claiming: Installation,
    namespace: str,
    driver_files: dict[str, bytes],
    minutes: float,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No over-commit, no wrong container, no limit lost, nothing left, memory flat."""
    program = Path(share_program.__file__)
    cluster.create_files(namespace, "driver", driver_files | {program.name: program.read_bytes()})
    cluster.apply(*TEMPLATES, namespace=namespace)
    run = Run(cluster, claiming, namespace)
    try:
        seen = run.endure(minutes)
    finally:
        with capsys.disabled():
            print(f"\n{run.seen}, {sum(run.seen.checks.values())} checks")  # noqa: T201 - the counts are what it is run for
    if log := request.config.getoption("--endurance-log"):
        add_run(Path(log), seen.as_run(minutes))
    assert (seen.wrong, seen.over, seen.lost_limits) == ([], [], {})
    assert len(seen.unanswered) < minutes, seen.unanswered
    assert min(seen.kills, seen.snapshots, seen.compared, sum(seen.checks.values())) > minutes
    early, late = seen.thirds_mib()
    assert late < early * MEMORY_GROWTH, seen.resident_mib
    cluster.wait_for("no file is left on the node", lambda: claiming.exec("sh", "-c", LEFT).split() == [])


def add_run(path: Path, run: Object) -> None:
    runs = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    path.write_text(json.dumps([*runs, run], indent=2) + "\n", encoding="utf-8")


class Run:
    """The pods of the namespace, the faults, and what was seen of them."""

    def __init__(self, cluster: Cluster, installed: Installation, namespace: str) -> None:
        self.cluster, self.installed, self.namespace = cluster, installed, namespace
        self.seen, self.chance = Seen(), random.Random(13)
        self.uuids = {gpu["uuid"].replace("GPU-", "gpu-"): gpu["uuid"] for gpu in installed.view()["gpus"]}
        self.lost: int | None = None
        self.life: tuple[object, float] | None = None

    def endure(self, minutes: float) -> Seen:
        """Raises DeadlineError, AssertionError: what stays did not stay, or something is left."""
        stay = [self.pod_of_shares(f"{STAYS}share-{number}", (20, 4)) for number in range(STAYING // 2)]
        stay += [self.pod_of_claim(f"{STAYS}claim-{number}", "medium") for number in range(STAYING // 2)]
        self.cluster.start(self.namespace, *stay)
        before, offered = self.containers_that_stay(), self.installed.offered()
        start = time.monotonic()
        until, last_kill = start + minutes * 60, start + minutes * 30
        deeds = [
            (Every(CHURN_EVERY_S), self.churn, until),
            (Every(ANNOTATE_EVERY_S), self.annotate, until),
            (Every(LOSE_EVERY_S / 2), self.lose_or_heal, until),
            (Every(COMPARE_EVERY_S), self.compare, until),
            (Every(KILL_EVERY_S), self.kill, last_kill),
            (Every(UPGRADE_EVERY_S, first_s=UPGRADE_EVERY_S / 8), self.upgrade, last_kill),
        ]
        if self.cluster.hooks["restart-kubelet"]:
            deeds.append((Every(RESTART_EVERY_S), self.restart_kubelet, until))
        while time.monotonic() < until:
            due = self.cluster.wait_for(
                "something to do",
                lambda: [deed for every, deed, end in deeds if time.monotonic() < end and every.now()],
            )
            for deed in due:
                try:
                    deed()
                except KubectlError as error:
                    self.seen.unanswered.append(f"{deed.__name__}: {error}"[:500])
            if time.monotonic() > last_kill + UNSETTLED_S:
                self.watch_life()
        if self.lost is not None:
            self.lose_or_heal()
        self.cluster.wait_for("all is offered again", lambda: self.installed.offered() == offered)
        assert self.containers_that_stay() == before
        assert min(self.seen.checks.get(f"{pod}/main-0", 0) for pod in before) > minutes
        self.cluster.delete_pods(self.namespace)
        self.cluster.wait_for("an empty ledger", lambda: not self.own_ledger())
        return self.seen

    def containers_that_stay(self) -> dict[str, list[str]]:
        """pod -> IDs of its containers, which a restart changes."""
        return {
            name: [one["containerID"] for one in pod["status"]["containerStatuses"]]
            for name, pod in self.cluster.pods(self.namespace).items()
            if name.startswith(STAYS)
        }

    def own_ledger(self) -> list[str]:
        return [key for key in self.installed.ledger() if key.startswith(f"{self.namespace}/")]

    # --- pods ---

    def churn(self) -> None:
        """A batch of new pods, and as many of the old ones deleted; rejected ones are counted by the reason."""
        pods = [pod for pod in self.cluster.pods(self.namespace).values() if is_living(pod)]
        failed = [pod for pod in pods if pod["status"].get("phase") == "Failed"]
        for pod in failed:
            kind = re.sub(r"[0-9]+|GPU-\S+|endurance-\S+|x{9,}", "N", message_of(pod))[:120]
            self.seen.rejected[kind] += 1
            self.seen.examples.setdefault(kind, message_of(pod)[:500])
            # The kubelet tries a claim again until its driver is back.
            if "resourceClaims" in pod["spec"]:
                self.seen.wrong.append(f"{pod['metadata']['name']} was rejected: {message_of(pod)[:500]}")
        living = [pod for pod in pods if pod not in failed and not pod["metadata"]["name"].startswith(STAYS)]
        gone = failed + self.chance.sample(living, min(BATCH, max(0, len(living) + BATCH + STAYING - PODS)))
        if gone:
            names = [pod["metadata"]["name"] for pod in gone]
            force = ("--force", "--grace-period=0") if self.chance.random() < FORCED else ()
            self.cluster.run(
                "delete", "pod", "-n", self.namespace, "--wait=false", "--ignore-not-found", *force, *names
            )
        made = [self.pod_of_chance(f"endurance-{self.seen.created + index}") for index in range(BATCH)]
        # Counted first: after an answer that was lost the names are taken.
        self.seen.created, self.seen.deleted = self.seen.created + len(made), self.seen.deleted + len(gone)
        self.cluster.apply(*made, namespace=self.namespace)

    def pod_of_chance(self, name: str) -> Object:
        """Of shares, one container or two, or one behind an init container with a share; or of a claim."""
        annotations: dict[str, str] = {}
        if self.chance.random() < CLAIM_PODS:
            pod = self.pod_of_claim(name, self.chance.choice(names_of(TEMPLATES)))
        else:
            shares = [self.chance.choice(REQUESTS) for _ in range(self.chance.choice((1, 1, 2)))]
            pod = self.pod_of_shares(name, *shares)
            if self.chance.random() < 0.3:
                pod["spec"]["initContainers"] = [self.cluster.container(10, 2, name="init", command="true")]
            annotations |= FOREIGN_ISOLATION if self.chance.random() < HOSTILE_PODS / 4 else {}
        annotations |= HOSTILE if self.chance.random() < HOSTILE_PODS else {}
        pod["metadata"]["annotations"] = annotations
        return pod

    def pod_of_shares(self, name: str, *shares: tuple[int, int]) -> Object:
        """A container for each share, hundredths of a GPU and memory blocks."""
        containers = [
            self.container(index, (cores, blocks * BLOCK_MIB) if blocks else None, of=(cores, blocks))
            for index, (cores, blocks) in enumerate(shares)
        ]
        return self.pod_of(name, *containers)

    def pod_of_claim(self, name: str, template: str) -> Object:
        """One container; of a claim with two requests sometimes two, with one each."""
        uses: list[tuple[Object, tuple[int, int] | None]] = [({}, CLAIMED.get(template))]
        if template == "pair" and self.chance.random() < 0.5:
            uses = [({"request": name}, share) for name, share in PAIR.items()]
        containers = []
        for index, (use, share) in enumerate(uses):
            containers.append(self.container(index, share))
            containers[-1]["resources"] = {"claims": [{"name": "gpu", **use}]}
        source = {"name": "gpu", "resourceClaimTemplateName": template}
        return self.pod_of(name, *containers, resourceClaims=[source])

    def container(self, index: int, share: tuple[int, int] | None, *, of: tuple[int, int] = (0, 0)) -> Object:
        """`share`: cores and MiB of one GPU, with which it compares its limits. None where nobody limits it, or several."""
        arguments = " ".join(map(str, share)) if share else ""
        return self.cluster.container(
            *of,
            name=f"main-{index}",
            image=self.installed.image,
            command=f"exec python /driver/{Path(share_program.__file__).name} {arguments}",
            volumeMounts=[{"name": "driver", "mountPath": "/driver"}],
        )

    def pod_of(self, name: str, *containers: Object, **more: Any) -> Object:
        driver = {"name": "driver", "configMap": {"name": "driver", "defaultMode": 0o555}}
        pod = self.cluster.pod_of(name, *containers, volumes=[driver], **more)
        pod["metadata"]["labels"] = dict([LABEL.split("=")])
        return pod

    # --- faults ---

    def annotate(self) -> None:
        """As the tenant of a pod that lives."""
        pods = [name for name, pod in self.cluster.pods(self.namespace).items() if is_living(pod)]
        words = [f"{name}={value}" for name, value in HOSTILE.items()]
        try:
            self.cluster.run("annotate", "pod", "-n", self.namespace, "--overwrite", self.chance.choice(pods), *words)
        except KubectlError as error:
            if "not found" not in str(error):  # its deletion was waited for by nobody
                raise

    def lose_or_heal(self) -> None:
        """The next GPU is lost, or the one that is lost comes back."""
        lost = self.seen.gpus_lost % GPUS if self.lost is None else None
        faults = {"lost": {} if lost is None else {str(lost): "fell off the bus"}}
        write = f"printf '%s' '{json.dumps(faults)}' > {FAULTS}.new && mv {FAULTS}.new {FAULTS}"
        self.cluster.wait_for("the faults are written", lambda: self.can("sh", "-c", write))
        self.lost, self.seen.gpus_lost = lost, self.seen.gpus_lost + (lost is not None)

    def can(self, *command: str) -> bool:
        """In the agent's container. False: it was killed meanwhile, or the kubelet does not know it yet."""
        try:
            self.installed.exec(*command)
        except KubectlError:
            return False
        return True

    def kill(self) -> None:
        self.cluster.wait_for("the agent is killed", lambda: kill_agent(self.installed))
        self.seen.kills += 1

    def upgrade(self) -> None:
        """It is not waited for."""
        self.cluster.run("-n", SYSTEM, "rollout", "restart", "daemonset/gpushare-agent")
        self.seen.upgrades += 1

    def restart_kubelet(self) -> None:
        self.cluster.hook("restart-kubelet")
        self.seen.kubelet_restarts += 1

    # --- what is seen ---

    def watch_life(self) -> None:
        """The agent is one process from now on, and so much is in RAM."""
        life = {
            name: [one["restartCount"] for one in pod["status"]["containerStatuses"]]
            for name, pod in self.installed.agents().items()
        }
        if self.life is None:
            if len(life) > 1:  # the last rollout's handover goes on
                return
            self.life = life, time.monotonic()
        first, began_at = self.life
        if life != first:
            self.seen.wrong.append(f"the agent {first} ended by itself: it is {life}")
            self.life = life, time.monotonic()
        self.seen.life_min = (time.monotonic() - began_at) / 60
        self.seen.resident_mib += resident_mib(self.installed)

    def compare(self) -> None:
        """Records of the kubelet, ledger of the agent, allocations of the scheduler, and what the containers see; nothing
        while no agent can be asked."""
        if not any(is_ready(pod) for pod in self.installed.agents().values()):
            return
        try:
            view = self.installed.view()
            entries = json.loads(self.installed.exec("cat", CHECKPOINT))["Data"]["PodDeviceEntries"] or []
            logs = self.cluster.run("logs", "-n", self.namespace, "-l", LABEL, "--ignore-errors", *MANY_LOGS)
            claims = self.cluster.read(f"/apis/resource.k8s.io/v1/namespaces/{self.namespace}/resourceclaims")["items"]
            pods = self.cluster.pods(self.namespace)
        except (KubectlError, DeadlineError, KeyError, ValueError):  # the agent was killed meanwhile
            return
        snapshot = Snapshot(
            namespace=self.namespace, view=view, entries=entries, claims=claims, pods=pods, logs=logs, uuids=self.uuids
        )
        said = snapshot.said()
        self.seen.snapshots += 1
        self.seen.compared += len(said.keys() & snapshot.given().keys())
        self.seen.wrong += snapshot.wrong()
        self.seen.over += snapshot.over()
        self.seen.checks |= {container: one["checks"] for container, one in said.items()}
        self.seen.lost_limits |= {container: one["wrong"] for container, one in said.items() if one["wrong"]}


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


def resident_mib(installed: Installation) -> list[float]:
    """Anonymous memory of the agent's container, by its cgroup (v1 or v2); none while it cannot be asked."""
    files = "/sys/fs/cgroup/memory/memory.stat /sys/fs/cgroup/memory.stat"
    try:
        text = installed.exec("sh", "-c", f"cat {files} 2>/dev/null || true")
    except (KubectlError, DeadlineError):
        return []
    return [int(value) / 2**20 for value in re.findall(r"^(?:total_rss|anon) ([0-9]+)$", text, flags=re.M)][:1]
