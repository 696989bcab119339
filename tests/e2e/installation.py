"""The product as a user installs it: `kubectl apply -k` of a kustomization of his own, as docs/how-to/install.md has it."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.names import GpuUuid, split_device_id
from tests.e2e.cluster import CORE, DEADLINE_S, MEMORY, Cluster, KubectlError, Object, Right, manifest, read_unix

MANIFESTS = Path(__file__).parents[2] / "manifests"
UNINSTALL = MANIFESTS.parent / "docs/how-to/uninstall.md"
SYSTEM = "gpushare-system"
NODE_LABEL = "nvidia-device-enable"
LABEL = "app.kubernetes.io/name=gpushare-agent"
BLOCK_BYTES = 256 * 1024 * 1024
CHECKPOINT = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"

Ledger = dict[str, tuple[int, int, tuple[int, ...]]]
"""namespace/pod/container -> hundredths of a GPU, bytes, indexes of the GPUs."""


def with_variables(variables: Mapping[str, str]) -> Object:
    """A patch: settings of the agent."""
    container = {"name": "agent", "env": [{"name": name, "value": value} for name, value in variables.items()]}
    return with_pods({"spec": {"containers": [container]}})


def with_pods(template: Object) -> Object:
    """A patch: of the template of the agent's pods."""
    patch = manifest("apps/v1", "DaemonSet", "gpushare-agent", spec={"template": template})
    return {"target": {"kind": "DaemonSet", "name": "gpushare-agent"}, "patch": json.dumps(patch)}


def kustomization_of(
    folder: Path,
    resources: Iterable[str],
    images: Mapping[str, str],
    components: Iterable[str],
    patches: Iterable[Object],
) -> str:
    """The text of a kustomization in this folder, of folders below manifests/."""
    above = Path(os.path.relpath(MANIFESTS, folder))
    named = ((name, *image.rpartition(":")) for name, image in images.items())
    document = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [str(above / one) for one in resources],
        "components": [str(above / one) for one in components],
        "images": [{"name": name, "newName": new, "newTag": tag} for name, new, _, tag in named],
        "patches": list(patches),
    }
    return yaml.safe_dump(document)


SIGNAL_PROGRAM = """
import os, pathlib, sys
own = pathlib.Path("/proc/self/cgroup").read_text()
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        words = (process / "cmdline").read_bytes().split(b"\\0")
        ours = (process / "cgroup").read_text() == own
    except OSError:
        continue
    if ours and b"run" in words and any(word.endswith(b"gpushare-agent") for word in words[:2]):
        os.kill(int(process.name), int(sys.argv[1]))
"""
"""Runs in the agent's container: a signal to run-again, whose arguments name the agent, and to the agent itself, which the
host's PID namespace shows: killed alone it would start again in the container."""


class Installation:
    """What is installed now; `install` and `remove` change it."""

    def __init__(self, cluster: Cluster, *, folder: Path, overlay: str, image: str) -> None:
        self.cluster = cluster
        self.overlay = overlay
        self.image = image
        self.folder = folder
        self._installed: str | None = None

    def kustomization(
        self, *resources: str, components: Sequence[str] = (), patches: Sequence[Object] = (), image: str | None = None
    ) -> str:
        """The text of a user's kustomization of folders below manifests/, limited to the node of the run."""
        images = {"gpushare-agent": image or self.image}
        return kustomization_of(
            self.folder, resources or (self.overlay,), images, components, [self._only_this_node(), *patches]
        )

    def _only_this_node(self) -> Object:
        path = "/spec/template/spec/nodeSelector/kubernetes.io~1hostname"
        patch = [{"op": "add", "path": path, "value": self.cluster.hostname}]
        return {"target": {"kind": "DaemonSet", "name": "gpushare-agent"}, "patch": json.dumps(patch)}

    def install(self, *resources: str, **more: Any) -> None:
        """Applies a kustomization and waits until the node offers both resources. Another one is removed before; the same
        one stays where it serves."""
        text = self.kustomization(*resources, **more)
        if text == self._installed and self._serves():
            self._replace_restarted()
            return
        self.remove()
        self.apply(text)

    def render(self, *resources: str, **more: Any) -> str:
        """The objects of such a kustomization, which is not installed."""
        folder = self.folder.with_name(f"{self.folder.name}-rendered")
        folder.mkdir(exist_ok=True)
        (folder / "kustomization.yaml").write_text(self.kustomization(*resources, **more), encoding="utf-8")
        return self.cluster.run("kustomize", str(folder))

    def change(self, *resources: str, **more: Any) -> None:
        """As a user changes or upgrades what is there: apply without a removal before."""
        self.start_change(*resources, **more)
        self.wait_ready()

    def start_change(self, *resources: str, **more: Any) -> None:
        """As `change`, which does not wait for the rollout."""
        self._apply(self.kustomization(*resources, **more))

    def apply(self, text: str) -> None:
        self._apply(text)
        self.wait_ready()

    def _apply(self, text: str) -> None:
        (self.folder / "kustomization.yaml").write_text(text, encoding="utf-8")
        self._installed = text
        self.cluster.run("label", "node", self.cluster.node, f"{NODE_LABEL}=enable", "--overwrite")
        self.cluster.run("apply", "-k", str(self.folder))

    def wait_rolled_out(self) -> None:
        self.cluster.run("-n", SYSTEM, "rollout", "status", "daemonset/gpushare-agent", timeout_s=2 * DEADLINE_S)

    def wait_ready(self) -> None:
        """Until the rollout is complete and the node offers the resources."""
        self.wait_rolled_out()
        self.cluster.wait_for("the node offers both resources", lambda: all(self.offered().values()))

    def offered(self) -> dict[str, int]:
        """What is allocatable by the kubelet's status of the node."""
        shown = self.cluster.node_object()["status"]["allocatable"]
        return {resource: int(shown.get(resource, "0")) for resource in (CORE, MEMORY)}

    def gpus(self) -> int:
        """How many the node offers, a hundred units of cores each."""
        return self.offered()[CORE] // 100

    def _serves(self) -> bool:
        pods = list(self.agents().values())
        return len(pods) == 1 and "deletionTimestamp" not in pods[0]["metadata"] and all(self.offered().values())

    def _replace_restarted(self) -> None:
        """A container that ended twice starts again after 10, 20, … 300 s, one of a new pod at once."""
        for name, pod in self.agents().items():
            if any(one["restartCount"] > 1 for one in pod["status"]["containerStatuses"]):
                self.cluster.run("-n", SYSTEM, "delete", "pod", name)
                self.cluster.wait_for("another agent", lambda: self.agents().keys() - {name})  # noqa: B023 - waited for here
                self.wait_ready()

    def remove(self) -> None:
        """The steps 1 and 2 of docs/how-to/uninstall.md."""
        if self._installed is None:
            return
        take_off_node(self.cluster)
        self.cluster.run("delete", "--ignore-not-found", "-k", str(self.folder), timeout_s=DEADLINE_S)
        self._installed = None

    def agents(self) -> dict[str, Object]:
        """The agent's pods by name: one, but for the moment of an update."""
        return self.cluster.pods(SYSTEM, selector=LABEL)

    def agent(self) -> str:
        """The name of the agent's pod that is ready."""

        def poll() -> str | None:
            return next((name for name, pod in self.agents().items() if is_ready(pod)), None)

        return self.cluster.wait_for("an agent that is ready", poll)

    def exec(self, *command: str, timeout_s: float = 60.0) -> str:
        """Standard output of a command in the agent's container."""
        return self.cluster.run("-n", SYSTEM, "exec", self.agent(), "-c", "agent", "--", *command, timeout_s=timeout_s)

    def check(self, *arguments: str) -> str:
        """What `gpushare-agent check` finds."""
        return self.exec("sh", "-c", 'gpushare-agent check "$@" || true', "sh", *arguments, timeout_s=120)

    def signal(self, number: int = signal.SIGKILL) -> None:
        """A signal to the agent and run-again; the container starts again after a kill. Skips where its PIDs are its own."""
        spec = self.cluster.get("daemonset", "gpushare-agent", "-n", SYSTEM)["spec"]["template"]["spec"]
        if not spec.get("hostPID"):
            pytest.skip("without the host's PID namespace the agent is PID 1, which nothing in its container can kill")
        try:
            self.exec("python", "-c", SIGNAL_PROGRAM, str(int(number)))
        except KubectlError as error:
            if "exit code 137" not in str(
                error
            ):  # the container ended, and this program with it, before it could return
                raise

    def view(self, path: str = "node") -> Object:
        """The agent's answer at /api/v1/<path>."""
        base = f"/api/v1/namespaces/{SYSTEM}/pods/{self.agent()}:5678/proxy/api/v1/"
        return self.cluster.read(base + path)

    def metric(self, sample: str) -> float:
        """The sum of a metric's samples. Raises: KubectlError."""
        base = f"/api/v1/namespaces/{SYSTEM}/pods/{self.agent()}:5678/proxy/metrics"
        lines = read_unix(self.cluster.api, base).decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.split("[{ ]", line)[0] == sample)

    def ledger(self) -> Ledger:
        """What the agent has allocated."""
        return {
            f"{one['namespace']}/{one['pod']}/{one['container']}": (
                one["cores"],
                one["memory_bytes"],
                tuple(gpu["index"] for gpu in one["gpus"]),
            )
            for one in self.view()["containers"]
        }

    def wait_ledger(self, namespace: str, number: int) -> Ledger:
        """The ledger's entries of a namespace, as soon as there are that many."""

        found: Ledger = {}

        def poll() -> bool:
            found.clear()
            try:
                ledger = self.ledger()
            except KubectlError:  # killed a moment ago: the kubelet starts it again
                return False
            found.update({key: one for key, one in ledger.items() if key.startswith(f"{namespace}/")})
            return len(found) == number

        self.cluster.wait_for(f"{number} containers of {namespace} in the ledger", poll)
        return found

    def kubelet_records(self, pods: Iterable[Object]) -> dict[str, dict[str, list[str]]]:
        """pod UID -> resource -> GPU of each device ID, from the kubelet's checkpoint. Of these pods alone, for it keeps
        entries of pods that have ended until the next Allocate."""
        uids = {pod["metadata"]["uid"] for pod in pods}
        found: dict[str, dict[str, list[str]]] = {}
        read = DeviceIds(GpuUuid(gpu["uuid"]) for gpu in self.view()["gpus"]).read
        for entry in json.loads(self.exec("cat", CHECKPOINT))["Data"]["PodDeviceEntries"] or []:
            if entry["PodUID"] not in uids:
                continue
            ids = read([one for of_numa in entry["DeviceIDs"].values() for one in of_numa])
            split = [split_device_id(one) for one in ids]
            gpus = found.setdefault(entry["PodUID"], {}).setdefault(entry["ResourceName"], [])
            gpus += [one[0] if one else "" for one in split]
        return found


@contextmanager
def in_place_of(installation: Installation, found: Sequence[Object], label: str) -> Iterator[None]:
    """Objects of another program in the place of what is installed, with the label (NAME=VALUE) that its nodes have."""
    cluster = installation.cluster
    installation.remove()
    made = json.dumps({"apiVersion": "v1", "kind": "List", "items": found})
    cluster.run("label", "node", cluster.node, label, "--overwrite")
    try:
        cluster.run("apply", "-f", "-", stdin=made)
        yield
    finally:
        cluster.run("label", "node", cluster.node, f"{label.partition('=')[0]}-")
        cluster.run("delete", "-f", "-", stdin=made, timeout_s=DEADLINE_S)


def rights_of_component(folder: str) -> set[Right]:
    """What the roles of a component grant, which an earlier test of the run may have used."""
    roles = yaml.safe_load_all((MANIFESTS / folder / "rbac.yaml").read_text(encoding="utf-8"))
    rules = [rule for role in roles for rule in role.get("rules", ())]
    return {right for rule in rules for right in itertools.product(rule["verbs"], rule["resources"])}


def is_ready(pod: Object) -> bool:
    """And not on its way out."""
    conditions = pod["status"].get("conditions", [])
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


def take_off_node(cluster: Cluster) -> None:
    """The labels and annotations that the agent wrote, by the record of them; the label that lets it run goes first."""
    cluster.run("label", "node", cluster.node, f"{NODE_LABEL}-")
    cluster.wait_for("the agent's pod is gone", lambda: not cluster.pods(SYSTEM, selector=LABEL))
    written = cluster.node_object()["metadata"].get("annotations", {})
    if labels := written.get("gpushare-agent/labels"):
        cluster.run("label", "node", cluster.node, *(f"{label}-" for label in labels.split(",")))
    (line,) = re.findall(r"kubectl annotate node NODE (.*)", UNINSTALL.read_text(encoding="utf-8"))
    cluster.run("annotate", "node", cluster.node, *line.split())


def found_installed(cluster: Cluster) -> str:
    """What of the product, or of another that offers its resources, is there already; empty where nothing is."""
    for kind, name in (("namespace", SYSTEM), ("clusterrole", "gpushare-agent")):
        if cluster.run("get", kind, name, "--ignore-not-found", "-o", "name"):
            return f"{kind} {name}"
    offered = cluster.node_object()["status"].get("allocatable", {}).get(CORE, "0")
    return "" if offered == "0" else f"node {cluster.node} offers {offered} {CORE}"
