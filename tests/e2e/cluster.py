"""A cluster as its user has it: kubectl, bounded, and waits under a deadline."""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

CORE, MEMORY = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
DEADLINE_S = 120.0
"""Of every wait: the slowest thing waited for is the kubelet's node status, up to ten seconds on an idle machine."""
RUN_LABEL = "gpushare-e2e"
"""On each namespace of a run, with the run's suffix."""

T = TypeVar("T")
Object = dict[str, Any]


class KubectlError(AssertionError):
    """kubectl ended with an error or not in time; the text is its own."""


class DeadlineError(AssertionError):
    """A condition did not come true in time; the text names it and what was seen last."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`node`: the one that is used. `hooks`: the commands and folders that the user gave for what kubectl cannot do."""

    node: str
    hostname: str
    pod_image: str
    runtime_class: str | None
    hooks: dict[str, str | None]
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

    def apply(self, *objects: Object, namespace: str | None = None) -> None:
        """Raises: KubectlError, also for an object that admission refuses."""
        where = ("-n", namespace) if namespace else ()
        self.run("apply", *where, "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def wait_for(self, what: str, look: Callable[[], T | None], *, deadline_s: float = DEADLINE_S) -> T:
        """What `look` returns as soon as it is true. Raises: DeadlineError."""
        until = time.monotonic() + deadline_s
        while True:
            found = look()
            if found:
                return found
            if time.monotonic() > until:
                raise DeadlineError(f"not within {deadline_s:.0f} s: {what}; last seen: {found!r}")
            time.sleep(0.3)

    def pods(self, namespace: str, *arguments: str) -> dict[str, Object]:
        """By name."""
        return {pod["metadata"]["name"]: pod for pod in self.items("pods", "-n", namespace, *arguments)}

    def wait_phase(self, namespace: str, *names: str, phase: str = "Running", deadline_s: float = DEADLINE_S) -> None:
        """Until each pod has the phase. Raises: DeadlineError, at once where a pod ended in another phase."""

        def look() -> bool:
            seen = self.pods(namespace)
            states = {name: seen.get(name, {}).get("status", {}) for name in names}
            for name, status in states.items():
                if status.get("phase") in {"Failed", "Succeeded"} - {phase}:
                    raise DeadlineError(f"pod {name} is {status['phase']}: {status.get('message', status)}")
            return all(status.get("phase") == phase for status in states.values())

        self.wait_for(f"{', '.join(names)} {phase} in {namespace}", look, deadline_s=deadline_s)

    def start(self, namespace: str, *pods: Object) -> None:
        """Creates pods and waits until they run."""
        self.apply(*pods, namespace=namespace)
        self.wait_phase(namespace, *(pod["metadata"]["name"] for pod in pods))

    def delete_pods(self, namespace: str) -> None:
        """All of a namespace, until their containers have ended and the kubelet gave their devices back."""
        self.run(
            "delete",
            "pods",
            "--all",
            "-n",
            namespace,
            "--wait",
            f"--timeout={DEADLINE_S:.0f}s",
            timeout_s=DEADLINE_S + 20,
        )

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
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": self.pod_spec(*containers, **more),
        }

    def hook(self, name: str, *, timeout_s: float = 120.0) -> None:
        """Runs the command that the user gave as `--<name>`; skips the test where there is none."""
        done = subprocess.run(
            ["bash", "-c", self._given(name)], capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"--{name} ended with {done.returncode}: {done.stdout}{done.stderr}"

    def folder(self, name: str) -> Path:
        """The folder that the user gave as `--<name>`; skips the test where there is none."""
        return Path(self._given(name))

    def _given(self, name: str) -> str:
        given = self.hooks[name]
        if given is None:
            pytest.skip(f"needs the node's own processes: --{name} is not given")
        return given


def kubectl(*arguments: str, stdin: str | None = None, timeout_s: float = 60.0) -> str:
    """Standard output. Raises: KubectlError."""
    shown = shlex.join(("kubectl", *arguments))
    try:
        done = subprocess.run(
            ["kubectl", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise KubectlError(f"{shown}: not ended after {timeout_s:.0f} s") from error
    if done.returncode:
        raise KubectlError(f"{shown}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def message_of(pod: Object) -> str:
    """Why the kubelet rejected it."""
    return str(pod["status"].get("message", ""))


def names_of(objects: Iterable[Object]) -> list[str]:
    return sorted(one["metadata"]["name"] for one in objects)
