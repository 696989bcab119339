"""A cluster as its user has it: kubectl, bounded, and waits under a deadline."""

from __future__ import annotations

import base64
import http.client
import json
import secrets
import shlex
import socket
import subprocess
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

CORE, MEMORY = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
DEADLINE_S = 300.0
"""Of every wait, which costs nothing where it succeeds. The node's status is the slowest: ten seconds on an idle machine."""
RUN_LABEL = "gpushare-e2e"
"""On each namespace of a run, with the run's suffix."""

T = TypeVar("T")
Right = tuple[str, str]
"""A verb, and a resource with its subresource."""
Object = dict[str, Any]


class KubectlError(AssertionError):
    """kubectl ended with an error or not in time; the text is its own."""


class DeadlineError(AssertionError):
    """A condition did not come true in time; the text names it and what was seen last."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`node`: the one that is used. `hooks`: the commands and paths that the user gave for what kubectl cannot do."""

    node: str
    hostname: str
    pod_image: str
    runtime_class: str | None
    hooks: dict[str, str | None]
    api: Path
    """The socket of `kubectl proxy`: what is polled is read there, for a kubectl a poll is most of a core."""
    suffix: str = field(default_factory=lambda: secrets.token_hex(3))

    def run(self, *arguments: str, stdin: str | None = None, timeout_s: float = 60.0) -> str:
        """kubectl's standard output. Raises: KubectlError."""
        return kubectl(*arguments, stdin=stdin, timeout_s=timeout_s)

    def get(self, *arguments: str) -> Object:
        """`kubectl get … -o json`. Raises: KubectlError."""
        found: Object = json.loads(self.run("get", *arguments, "-o", "json"))
        return found

    def items(self, *arguments: str) -> list[Object]:
        return list(self.get(*arguments)["items"])

    def read(self, path: str) -> Object:
        """The API server's answer to a GET. Raises: KubectlError."""
        answer: Object = json.loads(read_unix(self.api, path))
        return answer

    def needs_claims(self) -> None:
        """Skips where the API server has none."""
        try:
            self.run("get", "resourceslices.v1.resource.k8s.io")
        except KubectlError:
            pytest.skip("this cluster has no resource.k8s.io/v1")

    def may(self, account: str, verb: str, resource: str, namespace: str = "") -> bool:
        """What the API server says of a service account, `namespace:name`; `resource`: with its group and subresource, as
        `leases.coordination.k8s.io` and `pods/exec`."""
        kind, _, sub = resource.partition("/")
        name, _, group = kind.partition(".")
        attributes = {"verb": verb, "group": group, "resource": name, "subresource": sub, "namespace": namespace}
        groups = [
            "system:serviceaccounts",
            f"system:serviceaccounts:{account.partition(':')[0]}",
            "system:authenticated",
        ]
        spec = {"user": f"system:serviceaccount:{account}", "groups": groups, "resourceAttributes": attributes}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        answer = json.loads(self.run("create", "-f", "-", "-o", "json", stdin=json.dumps(review)))
        return bool(answer["status"]["allowed"])

    def node_object(self) -> Object:
        return self.read(f"/api/v1/nodes/{self.node}")

    def apply(self, *objects: Object, namespace: str | None = None) -> None:
        """Raises: KubectlError, also for an object that admission refuses."""
        where = ("-n", namespace) if namespace else ()
        self.run("apply", *where, "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def create_files(self, namespace: str, name: str, files: Mapping[str, bytes]) -> None:
        """A ConfigMap of them. Not by apply, whose annotation holds a quarter of a MiB."""
        data = {path: base64.b64encode(content).decode() for path, content in files.items()}
        made = manifest("v1", "ConfigMap", name, binaryData=data)
        self.run("create", "-n", namespace, "-f", "-", stdin=json.dumps(made))

    def wait_for(self, what: str, poll: Callable[[], T | None], *, deadline_s: float = DEADLINE_S) -> T:
        """What `poll` returns as soon as it is true. Raises: DeadlineError."""
        until = time.monotonic() + deadline_s
        while True:
            found = poll()
            if found:
                return found
            if time.monotonic() > until:
                raise DeadlineError(f"not within {deadline_s:.0f} s: {what}; last seen: {found!r}")
            time.sleep(0.2)

    def pods(self, namespace: str, *, selector: str = "") -> dict[str, Object]:
        """By name."""
        path = f"/api/v1/namespaces/{namespace}/pods?labelSelector={urllib.parse.quote(selector)}"
        return {pod["metadata"]["name"]: pod for pod in self.read(path)["items"]}

    def phases(self, namespace: str) -> list[str]:
        return [pod["status"].get("phase", "") for pod in self.pods(namespace).values()]

    def wait_gpushare_annotations(self, namespace: str) -> None:
        """Until each of its pods says, as GPUShare's plugin has it, that it has its share of the first GPU."""
        wanted = {"ALIYUN_COM_GPU_MEM_IDX": "0", "ALIYUN_COM_GPU_MEM_ASSIGNED": "true"}

        def are_there() -> bool:
            annotations = [one["metadata"].get("annotations", {}) for one in self.pods(namespace).values()]
            return all(wanted.items() <= one.items() for one in annotations)

        self.wait_for("GPUShare's annotations", are_there)

    def wait_phase(self, namespace: str, *names: str, phase: str = "Running", deadline_s: float = DEADLINE_S) -> None:
        """Until each pod has the phase. Raises: DeadlineError, at once where a pod ended in another phase."""

        def poll() -> bool:
            seen = self.pods(namespace)
            states = {name: seen.get(name, {}).get("status", {}) for name in names}
            for name, status in states.items():
                if status.get("phase") in {"Failed", "Succeeded"} - {phase}:
                    raise DeadlineError(f"pod {name} is {status['phase']}: {status.get('message', status)}")
            return all(status.get("phase") == phase for status in states.values())

        self.wait_for(f"{', '.join(names)} {phase} in {namespace}", poll, deadline_s=deadline_s)

    def free_pods(self) -> int:
        """How many more pods the kubelet of the node would run."""
        taken = self.items("pods", "-A", "--field-selector", f"spec.nodeName={self.node}")
        return int(self.node_object()["status"]["allocatable"]["pods"]) - len(taken)

    def start(self, namespace: str, *pods: Object) -> None:
        """Creates pods and waits until they run."""
        self.apply(*pods, namespace=namespace)
        self.wait_phase(namespace, *(pod["metadata"]["name"] for pod in pods))

    def delete_pods(self, namespace: str) -> None:
        """All of a namespace, until their containers have ended and the kubelet gave their devices back."""
        wait = ("--wait", f"--timeout={DEADLINE_S:.0f}s")
        self.run("delete", "pods", "--all", "-n", namespace, *wait, timeout_s=DEADLINE_S + 20)

    def container(
        self, core: int = 0, memory: int = 0, *, name: str = "main", command: str = "", **more: Any
    ) -> Object:
        """A container with a share: hundredths of a GPU and memory blocks. It runs on, or does `command`."""
        limits = {CORE: core, MEMORY: memory}
        return {
            "name": name,
            "image": self.pod_image,
            "imagePullPolicy": "IfNotPresent",
            "command": ["sh", "-c", command or "trap 'exit 0' TERM; while :; do sleep 3600 & wait; done"],
            "resources": {"limits": {resource: str(number) for resource, number in limits.items() if number}},
            **more,
        }

    def pod_spec(self, *containers: Object, **more: Any) -> Object:
        return {
            "nodeSelector": {"kubernetes.io/hostname": self.hostname},
            "tolerations": [{"operator": "Exists"}],
            "terminationGracePeriodSeconds": 2,
            "automountServiceAccountToken": False,
            "containers": list(containers),
            **({"runtimeClassName": self.runtime_class} if self.runtime_class else {}),
            **more,
        }

    def pod(self, name: str, core: int = 0, memory: int = 0, **more: Any) -> Object:
        """A pod of one container with a share; `more` goes into its spec."""
        return self.pod_of(name, self.container(core, memory), **more)

    def pod_of(self, name: str, *containers: Object, **more: Any) -> Object:
        return manifest("v1", "Pod", name, spec=self.pod_spec(*containers, **more))

    def workload(self, kind: str, *containers: Object, name: str = "work", **spec: Any) -> Object:
        """A controller of pods of these containers."""
        labels = {"app": name}
        is_job = kind == "Job"
        pod = self.pod_spec(*containers, **({"restartPolicy": "Never"} if is_job else {}))
        more = {} if is_job else {"selector": {"matchLabels": labels}}
        spec = {"template": {"metadata": {"labels": labels}, "spec": pod}, **more, **spec}
        return manifest("batch/v1" if is_job else "apps/v1", kind, name, spec=spec)

    def make_node(self, metadata: Object, size: Object) -> None:
        """A node that no kubelet runs: pods are bound to it, none runs there."""
        self.apply(manifest("v1", "Node", metadata))
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        status = {"status": {"capacity": size, "allocatable": size, "conditions": [ready]}}
        where = ("node", metadata["name"], "--subresource=status", "--type=merge")
        self.run("patch", *where, "-p", json.dumps(status))

    def bound(self, namespace: str, *pods: Object) -> list[str]:
        """Creates pods; the nodes to which kube-scheduler bound them."""
        self.apply(*pods, namespace=namespace)
        names = [pod["metadata"]["name"] for pod in pods]

        def nodes() -> list[str] | None:
            seen = self.pods(namespace)
            found = [seen.get(name, {}).get("spec", {}).get("nodeName", "") for name in names]
            return found if all(found) else None

        return self.wait_for(f"{', '.join(names)} bound", nodes)

    def force_delete_pods(self, namespace: str) -> None:
        """All of a namespace, also those that no kubelet ends."""
        self.run("delete", "pods", "--all", "-n", namespace, "--force", "--grace-period=0", "--wait=false")

    def environment(self, namespace: str, pod: str, container: str = "main") -> dict[str, str]:
        """The variables that the container was given."""
        text = self.run("-n", namespace, "exec", pod, "-c", container, "--", "env")
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def slices(self) -> list[Object]:
        """The agent's ResourceSlices of the node."""
        wanted = ("gpushare-agent", self.node)
        found = self.read("/apis/resource.k8s.io/v1/resourceslices")["items"]
        return [one for one in found if (one["spec"]["driver"], one["spec"].get("nodeName")) == wanted]

    def hook(self, name: str, *, timeout_s: float = DEADLINE_S) -> None:
        """Runs the command that the user gave as `--<name>`; skips the test where there is none."""
        done = subprocess.run(
            ["bash", "-c", self._given(name)], capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"--{name} ended with {done.returncode}: {done.stdout}{done.stderr}"

    def path(self, name: str) -> Path:
        """The file or folder that the user gave as `--<name>`; skips the test where there is none."""
        return Path(self._given(name))

    def _given(self, name: str) -> str:
        given = self.hooks[name]
        if given is None:
            pytest.skip(f"needs what kubectl cannot do: --{name} is not given")
        return given


def kubectl(*arguments: str, stdin: str | None = None, timeout_s: float = 60.0) -> str:
    """Standard output. Raises: KubectlError."""
    shown = shlex.join(("kubectl", *arguments))
    try:
        done = subprocess.run(
            ["kubectl", *arguments], input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise KubectlError(f"{shown}: not ended after {timeout_s:.0f} s") from error
    if done.returncode:
        raise KubectlError(f"{shown}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@contextmanager
def open_proxy() -> Iterator[Path]:
    """`kubectl proxy` on a socket that this user alone can reach."""
    with tempfile.TemporaryDirectory(prefix="gs", dir="/tmp") as directory:
        path = Path(directory) / "api"
        process = subprocess.Popen(["kubectl", "proxy", f"--unix-socket={path}"], stdout=subprocess.DEVNULL)
        try:
            until = time.monotonic() + DEADLINE_S
            while not path.exists():
                assert process.poll() is None and time.monotonic() < until, "kubectl proxy does not serve"
                time.sleep(0.05)
            yield path
        finally:
            process.terminate()
            process.wait(timeout=30)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(str(self._path))


def read_unix(socket_path: Path, path: str) -> bytes:
    """The body of a GET. Raises: KubectlError."""
    connection = _UnixConnection(socket_path)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
    except OSError as error:
        raise KubectlError(f"GET {path}: {error}") from error
    finally:
        connection.close()
    if answer.status != 200:
        raise KubectlError(f"GET {path}: {answer.status} {body[:500]!r}")
    return body


def audited(log: Path, user: str, pods: Collection[str] | None = None) -> tuple[set[Right], list[str]]:
    """What the user asked of the API server, by its audit log, and which of it was forbidden; `pods`: to these pods of a
    service account. One of an earlier installation may have outlived its RoleBinding."""
    used: set[Right] = set()
    forbidden: list[str] = []
    for line in log.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if entry["user"]["username"] != user or "objectRef" not in entry:
            continue
        names = entry["user"].get("extra", {}).get("authentication.kubernetes.io/pod-name", [])
        if pods is not None and not set(pods).intersection(names):
            continue
        target = entry["objectRef"]
        resource = "/".join(filter(None, (target["resource"], target.get("subresource"))))
        used.add((entry["verb"], resource))
        # By RBAC: in a namespace that is being deleted admission answers 403 too.
        if entry.get("annotations", {}).get("authorization.k8s.io/decision") == "forbid":
            forbidden.append(f"{entry['verb']} {resource}: {entry['requestURI']}")
    return used, forbidden


def manifest(version: str, kind: str, metadata: str | Object, **fields: Any) -> Object:
    """An object for the API server; its name alone, or more of its metadata."""
    found = {"name": metadata} if isinstance(metadata, str) else metadata
    return {"apiVersion": version, "kind": kind, "metadata": found, **fields}


def claim_template(name: str, *requests: Object, **devices: Any) -> Object:
    """A ResourceClaimTemplate; `devices`: what its claims have next to the requests."""
    spec = {"spec": {"devices": {"requests": list(requests), **devices}}}
    return manifest("resource.k8s.io/v1", "ResourceClaimTemplate", name, spec=spec)


def message_of(pod: Object) -> str:
    """Why the kubelet rejected it."""
    return str(pod["status"].get("message", ""))


def names_of(objects: Iterable[Object]) -> list[str]:
    return sorted(one["metadata"]["name"] for one in objects)
