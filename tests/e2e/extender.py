"""The scheduler extender and the second scheduler, as docs/how-to/schedule-with-the-extender.md installs them."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.cluster import DEADLINE_S, Cluster, Object, read_unix
from tests.e2e.installation import MANIFESTS, SYSTEM, Installation, kustomization_of

NAME, SCHEDULER = "gpushare-agent-extender", "gpushare-scheduler"
APP = f"app.kubernetes.io/name={NAME}"
LEADER = f"{APP},gpushare-agent/role=leader"
WEBHOOK = MANIFESTS / "extender/components/claims-webhook"
WEBHOOK_GUIDE = MANIFESTS.parent / "docs/how-to/turn-limits-into-claims.md"
GUIDE = MANIFESTS.parent / "docs/how-to/schedule-with-the-extender.md"
NOT_PULLED = {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull"}


class ExtenderInstallation:
    """`install` what the guide's steps 1 to 3 install, `remove` all of it."""

    def __init__(self, cluster: Cluster, *, folder: Path, image: str, scheduler_image: str | None) -> None:
        self.cluster = cluster
        self._folder = folder
        self._image = image
        self._scheduler_image = scheduler_image or f"registry.k8s.io/kube-scheduler:{self._server_version()}"

    def _server_version(self) -> str:
        return str(json.loads(self.cluster.run("version", "-o", "json"))["serverVersion"]["gitVersion"]).split("+")[0]

    def install(self, node_policy: str) -> None:
        """Until both replicas are ready and one leads. Skips where the nodes cannot pull a kube-scheduler."""
        self._make_certificates()
        variable = {"name": "GPUSHARE_EXTENDER__NODE_POLICY", "value": node_policy}
        patch = [{"op": "add", "path": "/spec/template/spec/containers/0/env/-", "value": variable}]
        patches = [{"target": {"kind": "Deployment", "name": NAME}, "patch": json.dumps(patch)}]
        self._apply("extender", {"gpushare-agent": self._image}, patches)
        self._roll_out(NAME)
        self.leader()
        self.point_scheduler()

    def install_webhook(self) -> None:
        """The extender with the webhook for claims, by its guide; no scheduler asks it."""
        self._make_certificates()
        components = ["extender/components/claims-webhook"]
        self._apply("extender", {"gpushare-agent": self._image}, components=components)
        text = WEBHOOK_GUIDE.read_text(encoding="utf-8")
        (command,) = re.findall(r"^for n in .*?kubectl patch .*?(?=^```$)", text, re.DOTALL | re.MULTILINE)
        self._run(command)
        self._roll_out(NAME)

    def _make_certificates(self) -> None:
        """The guide's own commands."""
        step = GUIDE.read_text(encoding="utf-8").partition("## 1. Certificates")[2].partition("\n## ")[0]
        commands = "\n".join(re.findall(r"^```\n(.*?)^```$", step, re.DOTALL | re.MULTILINE))
        self._run(commands)

    def _run(self, commands: str) -> None:
        done = subprocess.run(
            ["bash", "-e", "-c", commands], cwd=self._folder, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr

    def point_scheduler(self) -> None:
        """Installs the second scheduler. In a cluster without a DNS of its own it is given the address of the pod that leads
        now for the Service's name: call it again when another one does."""
        patches: list[Object] = []
        if not self.cluster.read("/api/v1/namespaces/kube-system/services?labelSelector=k8s-app%3Dkube-dns")["items"]:
            address = self.leader()["status"]["podIP"]
            alias = [{"ip": address, "hostnames": [NAME]}]
            patch = [{"op": "add", "path": "/spec/template/spec/hostAliases", "value": alias}]
            patches = [{"target": {"kind": "Deployment", "name": SCHEDULER}, "patch": json.dumps(patch)}]
        images = {"registry.k8s.io/kube-scheduler": self._scheduler_image}
        self._apply("extender/second-scheduler", images, patches)
        self.cluster.wait_for("a second scheduler leads", self._scheduler_leads)

    def _scheduler_leads(self) -> bool:
        pods = self.cluster.pods(SYSTEM, selector=f"app.kubernetes.io/name={SCHEDULER}")
        for pod in pods.values():
            for status in pod["status"].get("containerStatuses", ()):
                if status["state"].get("waiting", {}).get("reason") in NOT_PULLED:
                    pytest.skip(f"the node cannot pull {self._scheduler_image}; --scheduler-image names another")
        deployment = self.cluster.read(f"/apis/apps/v1/namespaces/{SYSTEM}/deployments/{SCHEDULER}")
        status = deployment["status"]
        if (
            status.get("observedGeneration") != deployment["metadata"]["generation"]
            or status.get("updatedReplicas") != 2
            or status.get("readyReplicas") != 2
            or status.get("replicas") != 2
        ):
            return False
        return self.holder(SCHEDULER) in {
            name for name, pod in pods.items() if "deletionTimestamp" not in pod["metadata"]
        }

    def _apply(
        self, directory: str, images: Mapping[str, str], patches: Sequence[Object] = (), components: Sequence[str] = ()
    ) -> None:
        own = self._folder / "own"
        own.mkdir(exist_ok=True)
        text = kustomization_of(own, [directory], images, components, patches)
        (own / "kustomization.yaml").write_text(text, encoding="utf-8")
        self.cluster.run("apply", "-k", str(own))

    def _roll_out(self, name: str) -> None:
        self.cluster.run("-n", SYSTEM, "rollout", "status", f"deployment/{name}", timeout_s=2 * DEADLINE_S)

    def holder(self, lease: str) -> str:
        """The pod whose process holds the Lease; empty where nobody does."""
        found = self.cluster.read(f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases")["items"]
        specs = {one["metadata"]["name"]: one["spec"] for one in found}
        return str(specs.get(lease, {}).get("holderIdentity") or "").partition("_")[0]

    def leader(self, *, but: str = "") -> Object:
        """The one pod with the leader's label, which holds the Lease; another one than `but`."""

        def poll() -> Object | None:
            found = self.cluster.pods(SYSTEM, selector=LEADER).values()
            pods = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
            names = {pod["metadata"]["name"] for pod in pods}
            return pods[0] if names == {self.holder(NAME)} - {but, ""} and len(pods) == 1 else None

        return self.cluster.wait_for("one replica holds the lease and has the leader's label", poll)

    def metric(self, sample: str) -> float:
        """One sample of the leader's metrics, by its name with labels."""
        name = self.leader()["metadata"]["name"]
        path = f"/api/v1/namespaces/{SYSTEM}/pods/https:{name}:3456/proxy/metrics"
        text = read_unix(self.cluster.api, path).decode()
        (value,) = [line.rpartition(" ")[2] for line in text.splitlines() if line.rpartition(" ")[0] == sample]
        return float(value)

    def remove(self) -> None:
        """The webhook and the policies first: they are for the whole cluster."""
        of_webhook = [one for file in ("rbac", "service", "webhook") for one in ("-f", str(WEBHOOK / f"{file}.yaml"))]
        self.cluster.run("delete", "--ignore-not-found", *of_webhook)
        for directory in ("extender/second-scheduler", "extender"):
            self.cluster.run("delete", "--ignore-not-found", "-k", str(MANIFESTS / directory), timeout_s=DEADLINE_S)
        secrets = ("secret/gpushare-agent-extender-tls", "secret/gpushare-scheduler-tls")
        leases = (f"lease/{NAME}", f"lease/{SCHEDULER}")
        self.cluster.run("-n", SYSTEM, "delete", "--ignore-not-found", *secrets, *leases)


@contextmanager
def open_extender(
    installation: Installation, request: pytest.FixtureRequest, folder: Path
) -> Iterator[ExtenderInstallation]:
    """Not installed yet; with the image and the scheduler's of the run. Removed at the end."""
    option = request.config.getoption
    image, scheduler_image = option("--image"), option("--scheduler-image")
    extender = ExtenderInstallation(installation.cluster, folder=folder, image=image, scheduler_image=scheduler_image)
    try:
        yield extender
    finally:
        extender.remove()
