"""A sandbox with the machine's own GPU, and programs in its containers.

The sandbox is the project's (`gpushare-agent sandbox --driver=nvml`), a child process in a state directory of its own; the
containers' programs have exactly the environment, mounts and device nodes that its agent answered (container.py).
State owned: the sandbox's process. Only it is ever signalled, by its PID.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench.gpu.programs import Outcome, Program, StepFailed, run_program

ROOT = Path(__file__).parents[2]
BLOCK_MIB = 256
_START_TIMEOUT_S, _RUNNING_TIMEOUT_S, _END_TIMEOUT_S, _COMMAND_TIMEOUT_S = 60.0, 30.0, 12.0, 20.0
_POLL_S = 0.2
_LOG_BYTES = 1500
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What every program of a run needs. `agent_environment` is for our own programs, `passed` for those in containers."""

    python: str
    agent_environment: Mapping[str, str]
    passed: Mapping[str, str]
    library_path: str
    work: Path
    why_no_namespaces: str
    """Empty where containers get mount and PID namespaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodShare:
    """A pod of one container, with a part of a GPU."""

    name: str
    cores: int
    memory_mib: int

    def manifest(self) -> dict[str, Any]:
        limits = {"tencent.com/vcuda-core": self.cores, "tencent.com/vcuda-memory": self.memory_mib // BLOCK_MIB}
        container = {"name": "main", "image": "registry.invalid/program", "resources": {"limits": limits}}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": self.name}, "spec": {"containers": [container]}}


def why_no_namespaces() -> str:
    """Why `unshare` cannot make the namespaces of a container here; empty where it can."""
    try:
        done = subprocess.run(  # noqa: S603 - a constant command
            [*_UNSHARE, "--mount-proc", "true"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.strip() or f"unshare: exit code {done.returncode}"


class Sandbox:
    """Use it with `with`. Raises StepFailed where it cannot start; `flags` are settings of the agent. `limit` adds to a
    container what limits it without the agent."""

    def __init__(
        self,
        surroundings: Surroundings,
        name: str,
        flags: Sequence[str],
        limit: Callable[[PodShare, dict[str, Any]], dict[str, Any]] = lambda _, container: container,
    ) -> None:
        self._around = surroundings
        self._flags = list(flags)
        self._limit = limit
        self.state = surroundings.work / f"s-{name}"
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._web = ""

    def __enter__(self) -> Sandbox:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._log = (self._around.work / f"{self.state.name}.log").open("w+b")
        command = [*self._agent(), "--samples", "none", "--port", "0", "--driver=nvml", *self._flags]
        self._process = subprocess.Popen(  # noqa: S603 - our own program
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=dict(self._around.agent_environment),
        )
        document = self._wait("the sandbox", lambda found: bool(_capacity(found)), _START_TIMEOUT_S)
        self._web = document["node"]["addresses"]["web"]

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None

    def run_pods(self, shares: Sequence[PodShare]) -> dict[str, Any]:
        """Creates them and waits until they run; returns their containers by pod. Raises StepFailed."""
        path = self._around.work / "pods.json"
        path.write_text("\n---\n".join(json.dumps(share.manifest()) for share in shares))
        self._command("apply", "-f", str(path))
        named = {share.name: share for share in shares}
        names = set(named)
        document = self._wait(
            "pods " + ", ".join(sorted(names)), lambda found: _all_run(found, names), _RUNNING_TIMEOUT_S
        )
        pods = {pod["name"]: pod["containers"][0] for pod in document["pods"] if pod["name"] in names}
        return {name: self._limit(named[name], container) for name, container in pods.items()}

    def delete_pods(self, names: Sequence[str]) -> None:
        self._command("delete", *names)
        self._wait("the end of " + ", ".join(names), lambda found: not found["pods"], _RUNNING_TIMEOUT_S)

    def status(self) -> dict[str, Any]:
        document = json.loads(self._command("status", "-o", "json"))
        if not isinstance(document, dict):
            raise StepFailed("the sandbox's status is no object")
        return document

    def cordon_others(self, uuid: str) -> None:
        """The measured GPU is the only one on which pods are placed."""
        node = self.status()["node"]
        for gpu in node["gpus"]:
            if gpu["uuid"] != uuid:
                socket = node["addresses"]["control_socket"]
                self._run([*self._module(), "cordon", gpu["uuid"], "--socket", socket])

    def metrics(self) -> str:
        """The agent's metrics, as text. Raises OSError."""
        with _DIRECT.open(f"{self._web}/metrics", timeout=5) as answer:
            return str(answer.read().decode())

    def isolations(self) -> list[dict[str, Any]]:
        """As the agent describes them. Raises StepFailed."""
        try:
            with _DIRECT.open(f"{self._web}/api/v1/node", timeout=5) as answer:
                return list(json.loads(answer.read())["agent"]["isolations"])
        except OSError as error:
            raise StepFailed(f"the agent does not answer: {error}") from error

    def program(self, pod: str, container: Mapping[str, Any], command: Sequence[str], uid: int = 0) -> Program:
        """Starts a command in the container of a pod."""
        return Program(self.command_inside(pod, container, command, uid), env=self._around.agent_environment)

    def run(
        self,
        pod: str,
        container: Mapping[str, Any],
        command: Sequence[str],
        timeout_s: float,
        at_wait: Callable[[int], None] | None = None,
    ) -> Outcome:
        """Runs a command there to its end."""
        inside = self.command_inside(pod, container, command)
        return run_program(inside, env=self._around.agent_environment, timeout_s=timeout_s, at_wait=at_wait)

    def agent_log(self, pattern: str) -> list[str]:
        """The newest lines of the agent's log that match."""
        try:
            lines = (self.state / "agent.log").read_text(errors="replace").splitlines()
        except OSError:
            return []
        return [line[:400] for line in lines if re.search(pattern, line)][-5:]

    def agent_warnings(self) -> list[str]:
        """What it said in Events to the pods' owners."""
        lines = self.agent_log('"pod_warned"')
        return [line.split('"detail": "', 1)[-1].split('", "event"', 1)[0] for line in lines]

    def command_inside(self, pod: str, container: Mapping[str, Any], command: Sequence[str], uid: int = 0) -> list[str]:
        around = self._around
        staging = around.work / "staging"
        staging.mkdir(exist_ok=True)
        has_namespaces = not around.why_no_namespaces
        spec = {
            "mounts": container["mounts"], "devices": container["devices"], "library_path": around.library_path,
            "path": os.environ.get("PATH", os.defpath), "staging": str(staging), "uid": uid,
            "has_namespaces": has_namespaces,
        }  # fmt: skip
        path = around.work / f"{self.state.name}-{pod}.json"
        path.write_text(json.dumps(spec))
        passed = [f"{name}={value}" for name, value in around.passed.items()]
        given = [f"{name}={value}" for name, value in container["env"].items()]
        if container["pid"] is None:  # no cgroups can be made here, so there is nothing that a program could join
            start = ["env", "-i", *given, *passed]
        else:
            start = [*self._agent(), "exec", pod, "--", "env", *given, *passed]
        return [
            *start, *(_UNSHARE if has_namespaces else ()),
            around.python, str(Path(__file__).with_name("container.py")), str(path), "--", *command,
        ]  # fmt: skip

    def _module(self) -> list[str]:
        return [self._around.python, "-P", "-m", "gpushare_agent"]

    def _agent(self) -> list[str]:
        return [*self._module(), "sandbox", "--state-dir", str(self.state)]

    def _command(self, *words: str) -> str:
        return self._run([*self._agent(), *words])

    def _run(self, command: Sequence[str]) -> str:
        try:
            done = subprocess.run(  # noqa: S603 - our own program
                list(command), capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False,
                env=dict(self._around.agent_environment), stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise StepFailed(f"gpushare-agent {' '.join(command[4:])} did not end") from error
        if done.returncode:
            raise StepFailed(done.stderr.strip()[-_LOG_BYTES:] or f"gpushare-agent: exit code {done.returncode}")
        return done.stdout

    def _wait(self, what: str, is_so: Callable[[dict[str, Any]], bool], timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        why = ""
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise StepFailed(f"the sandbox has ended: {self._log_tail()}")
            try:
                document = self.status()
                if is_so(document):
                    return document
                why = _reasons(document)
            except StepFailed as error:
                why = str(error)
            time.sleep(_POLL_S)
        raise StepFailed(f"waited {timeout_s:g} s for {what}: {why or 'no reason is known'}; {self._log_tail()}")

    def _log_tail(self) -> str:
        if self._log is None:
            return ""
        self._log.flush()
        text = (self._around.work / f"{self.state.name}.log").read_text(errors="replace")
        return " | ".join([*self.agent_log('"(warning|error)"'), *text[-_LOG_BYTES:].splitlines()[-3:]])


def _capacity(document: Mapping[str, Any]) -> int:
    return int(document["node"]["capacity"].get("tencent.com/vcuda-core", 0))


def _all_run(document: Mapping[str, Any], names: set[str]) -> bool:
    pods = {pod["name"]: pod for pod in document["pods"]}
    for name in names & pods.keys():
        if pods[name]["phase"] == "Failed":
            raise StepFailed(f"pod {name} was refused: {pods[name]['reason']}: {pods[name]['message']}")
    return all(name in pods and pods[name]["phase"] == "Running" for name in names)


def _reasons(document: Mapping[str, Any]) -> str:
    return "; ".join(f"{pod['name']} {pod['phase']} {pod['message']}".strip() for pod in document["pods"])


def sample_of(metrics: str, name: str, **labels: str) -> float | None:
    """The value of the first row of a series that has these labels."""
    for line in metrics.splitlines():
        if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    return None
