"""A node with the fake driver's GPUs and the real isolation libraries, and programs in its containers.

The node is `gpushare-agent sandbox` with the agent on the driver nvml; a program gets exactly the environment,
devices and mounts that the agent answered (native/enter_container.py). Everything ends with the `with` block:
programs, node, files. Needs root.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpushare_agent.core.model.errors import StartupError, Unavailable
from gpushare_agent.sandbox.control import ask
from gpushare_agent.sandbox.runtime.cgroup_tree import open_cgroup_tree
from gpushare_agent.sandbox.state_directory import NodePaths
from native.build_gpushare import build_gpushare
from tests.native.build import (
    NATIVE,
    CannotBuildError,
    build_fake_driver,
    build_gpu_client,
    build_vcuda,
    build_vgpu,
    build_vgpu_manager,
    cuda_include,
    install_driver,
    proc_version,
)
from tests.native.fake_driver.host_view import HostView
from tests.native.gpu_program import DEADLINE_S, Ended, build_gpu_program, steps_in

ROOT = Path(__file__).parents[2]
GPU_MEMORY_MIB, CONTEXT_MIB = 24576, 300
WAYS = ("link", "dlsym", "cuGetProcAddress", "cuGetProcAddress_v2")
_MODULES = {
    "host": ("proprietary", "580.95.05"),
    "open": ("open", "550.163.01"),
    "open570": ("open", "580.95.05"),
}
"""The kernel module of each PID behaviour of the fake driver, and a version that behaves so."""
_POLL_S = 0.05


def why_not() -> str:
    """Why no container can be made here; empty where one can."""
    if os.geteuid() != 0:
        return "containers with mounts and PID namespaces need root"
    if shutil.which("ldconfig", path="/usr/sbin:/sbin") is None:
        return "no ldconfig"
    try:
        with tempfile.TemporaryDirectory() as folder:
            tree = open_cgroup_tree(Path(folder))
            tree.close()
    except StartupError as error:
        return str(error)
    if tree.why_no_exec:
        return tree.why_no_exec
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "true"], check=False, capture_output=True, text=True
    )
    return "" if done.returncode == 0 else f"no mount and PID namespaces: {done.stderr.strip()}"


_LIBRARIES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "gpushare": ("libgpushare.so", lambda output: build_gpushare(cuda_include(), output)),
    "vcuda": ("libcuda-control.so", build_vcuda),
    "gpu-client": ("gpu-client", build_gpu_client),
    "hami-core": ("libvgpu.so", build_vgpu),
    "vgpu-manager": ("libvgpu-control.so", build_vgpu_manager),
}
_NEEDED = {"gpushare": ("gpushare",), "vcuda": ("vcuda", "gpu-client")}
"""By each part of an isolation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What is run, all below one directory. In the place of a library that could not be built is the reason."""

    directory: Path
    driver: Path
    programs: Path
    libraries: Mapping[str, Path | str]

    def why_not(self, isolation: str) -> str:
        """Why this isolation cannot be had, empty where it can."""
        needed = [self.libraries[name] for part in isolation.split("+") for name in _NEEDED.get(part, ())]
        return "; ".join(reason for reason in needed if isinstance(reason, str))


def build_all(directory: Path) -> Built:
    """Raises CannotBuildError where there is no driver or no program: then nothing can be run."""
    places = {name: directory / "libraries" / file for name, (file, _) in _LIBRARIES.items()}
    (directory / "libraries").mkdir()
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:  # each build is a compiler's process
        libraries = {name: threads.submit(_or_reason, _LIBRARIES[name][1], place) for name, place in places.items()}
        driver, programs = build_fake_driver(directory / "driver"), directory / "programs"
        programs.mkdir()
        build_gpu_program(programs, driver)
        found = {name: built.result() for name, built in libraries.items()}
    return Built(directory=directory, driver=driver, programs=programs, libraries=found)


def _or_reason(build: Callable[[Path], object], output: Path) -> Path | str:
    try:
        build(output)
    except CannotBuildError as error:
        return str(error)
    return output


class Program:
    """One that runs in a container, and ends with the `with` block. It writes into files, so that it never waits for who
    reads."""

    def __init__(self, command: Sequence[str], directory: Path) -> None:
        self._output, self._error = directory / "output", directory / "error"
        self._steps: list[dict[str, Any]] = []
        self._waited = 0  # so many of them `wait_for` has passed
        with self._output.open("wb") as output, self._error.open("wb") as error:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=error, text=True, env=_environment()
            )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        """As a runtime kills a container: the end of its PID 1 is the end of all its processes."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(DEADLINE_S)
        self._process.kill()
        self._process.communicate()

    @property
    def error(self) -> str:
        return self._error.read_text(errors="replace")

    def wait_for(self, action: str, timeout_s: float = DEADLINE_S) -> bool:
        """Whether the next step of that name comes, before the program's end. AssertionError at the timeout."""
        deadline = time.monotonic() + timeout_s
        while True:
            has_ended = self._process.poll() is not None
            self._read()
            while self._waited < len(self._steps):
                self._waited += 1
                if self._steps[self._waited - 1]["action"] == action:
                    return True
            if has_ended:
                return False
            assert time.monotonic() < deadline, f"after {timeout_s:g} s: no step {action!r}, but {self._steps}"
            time.sleep(_POLL_S)

    def go_on(self) -> None:
        """Past its next `wait`; nothing where it has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def outcome(self, timeout_s: float = DEADLINE_S) -> Ended:
        """Waits for its end. AssertionError at the timeout."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._read()
            raise AssertionError(f"the program did not end; {self._steps}") from None
        self._read()
        return Ended(steps=list(self._steps), code=self._process.returncode, error=self.error)

    def _read(self) -> None:
        self._steps = steps_in(self._output.read_text(errors="replace"))


@dataclass(slots=True, kw_only=True)
class IsolationNode:
    """A running node."""

    built: Built
    directory: Path

    @property
    def state(self) -> Path:
        return self.directory / "node"

    def configure_driver(self, **settings: object) -> None:
        """For processes that ask the driver for the first time from now on."""
        lines = "".join(f"{name} {value}\n" for name, value in settings.items())
        fresh = self.directory / "gpu" / "config.new"
        fresh.write_text(lines)
        fresh.replace(fresh.with_name("config"))

    def apply(self, name: str, *, cores: int, blocks: int, **pod: Any) -> None:
        """A pod with one container `main`, of whose end nothing is waited for but its start. `pod` may have
        `annotations`.
        """
        limits = {"tencent.com/vcuda-core": cores, "tencent.com/vcuda-memory": blocks}
        main = {"name": "main", "image": "program", "resources": {"limits": {k: v for k, v in limits.items() if v}}}
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, **pod},
            "spec": {"containers": [main]},
        }
        self.create(manifest)

    def create(self, *manifests: dict[str, Any]) -> None:
        """Pods, and the claims and templates that they name before them; returns when the pods run."""
        self.ask("apply", pods=list(manifests))
        for name in [one["metadata"]["name"] for one in manifests if one["kind"] == "Pod"]:
            self._wait_running(name)

    def _wait_running(self, name: str) -> None:
        self.wait_until(lambda: self.pod(name)["phase"] != "Pending", f"pod {name} running")
        pod = self.pod(name)
        assert pod["phase"] == "Running", f"{pod['reason']}: {pod['message']}"

    def delete(self, name: str) -> None:
        """Returns when the pod is gone."""
        self.ask("delete", names=[name], namespace="default")
        self.wait_until(lambda: not [pod for pod in self.status()["pods"] if pod["name"] == name], f"pod {name} gone")

    def delete_all(self) -> None:
        """Every pod; returns when they are gone."""
        if names := [pod["name"] for pod in self.status()["pods"]]:
            self.ask("delete", names=names, namespace="default")
        self.wait_until(lambda: not self.status()["pods"], "no pod left")

    def kill_agent(self) -> None:
        """SIGKILL; returns when another one serves."""
        before = self.log_lines("registered")
        self.ask("kill-agent")
        self.wait_until(lambda: self.log_lines("registered") > before and self.is_ready(), "the agent again")

    def log_lines(self, event: str) -> int:
        return (self.state / "agent.log").read_text().count(event)

    def is_ready(self) -> bool:
        try:
            node = self.status()["node"]
        except (AssertionError, Unavailable):
            return False
        return node["is_offered"] and {gpu["is_healthy"] for gpu in node["gpus"]} == {True}

    def pod(self, name: str) -> dict[str, Any]:
        [found] = [pod for pod in self.status()["pods"] if pod["name"] == name]
        return dict(found)

    def container(self, pod: str, name: str = "") -> dict[str, Any]:
        """The only one, where none is named."""
        [found] = [one for one in self.pod(pod)["containers"] if name in ("", one["name"])]
        return dict(found)

    def status(self) -> dict[str, Any]:
        """The document of `gpushare-agent sandbox status -o json`."""
        document: dict[str, Any] = self.ask("status")["document"]
        return document

    def ask(self, command: str, **request: Any) -> dict[str, Any]:
        """A command of `gpushare-agent sandbox` for a running node, without the time that the program takes to start.
        AssertionError where it fails."""
        answer = asyncio.run(ask(self.state / "control.sock", {"command": command, **request}))
        assert answer["ok"], answer["errors"]
        return answer

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, (
                f"after {DEADLINE_S:g} s: {what} did not come about; {self._state_of_things()}"
            )
            time.sleep(_POLL_S)  # another process: it can only be asked again

    def _state_of_things(self) -> str:
        """For a failure: the pods' reasons, and the end of the agent's log."""
        try:
            pods = [(pod["name"], pod["phase"], pod["reason"], pod["message"]) for pod in self.status()["pods"]]
        except (AssertionError, Unavailable) as error:
            pods = [error]
        log = self.state / "agent.log"
        return f"pods: {pods}; the agent's log ends with {log.read_text()[-2000:] if log.exists() else 'nothing'}"

    def start(
        self,
        pod: str,
        *actions: str,
        way: str = "dlsym",
        version: int = 12080,
        uid: int = 0,
        env: Mapping[str, str] | None = None,
        container: str = "",
    ) -> Program:
        """gpu_program with these actions, as user `uid`. `env` is what the pod's manifest would set over the answered
        one; `container` is named where the pod has several.
        """
        program = "gpu_program_linked" if way == "link" else "gpu_program"
        command = [f"/opt/programs/{program}", way, str(version), *actions]
        return self.start_command(pod, command, uid=uid, env=env, named=container)

    def start_command(
        self, pod: str, command: Sequence[str], *, uid: int = 0, env: Mapping[str, str] | None = None, named: str = ""
    ) -> Program:
        container = self.container(pod, named)
        spec = {
            **{"pod": pod, "container": container["name"], "control": str(self.state / "control.sock")},
            **{"mounts": container["mounts"], "devices": container["devices"], "uid": uid, "env": dict(env or {})},
            **({} if container["mounts"] or container["devices"] else self._claimed()),
            **{"root": str(self.directory / "root"), "state": str(self.directory / "gpu")},
            **{"proc_driver": str(self.directory / "proc"), "programs": str(self.built.programs)},
            "libraries": str(self.directory / "driver"),
        }
        words = [sys.executable, str(NATIVE / "enter_container.py"), json.dumps(spec), *command]
        return Program(words, Path(tempfile.mkdtemp(dir=self.directory / "programs")))

    def _claimed(self) -> dict[str, list[dict[str, Any]]]:
        """What CDI adds to the containers of the node's only claim."""
        [path] = NodePaths(state=self.state).cdi.glob("gpushare-agent-claim-*.json")
        edits = [device["containerEdits"] for device in json.loads(path.read_text())["devices"]]
        mounts = {
            mount["containerPath"]: {
                "host_path": mount["hostPath"],
                "container_path": mount["containerPath"],
                "read_only": "ro" in mount["options"],
            }
            for one in edits
            for mount in one["mounts"]
        }
        nodes = {
            node["path"]: {"host_path": node["hostPath"], "container_path": node["path"]}
            for one in edits
            for node in one["deviceNodes"]
        }
        return {"mounts": list(mounts.values()), "devices": list(nodes.values())}

    def run(self, pod: str, *actions: str, timeout_s: float = DEADLINE_S, **how: Any) -> Ended:
        """As `start`, to its end."""
        with self.start(pod, *actions, **how) as program:
            return program.outcome(timeout_s)

    def start_at_once(self, pod: str, count: int, *words: str, kill: str = "", uid: int = 0) -> Ended:
        """So many programs; `kill`: the agent too, by SIGKILL, before the starts or among them, when the first has ended."""
        one = f"/opt/programs/gpu_program {' '.join(words)} > /dev/null"
        script = f"""
        echo '{{"action": "wait"}}'
        read line
        for i in $(seq {count}); do
            ({one}; echo '{{"action": "ended", "result": '$?'}}') &
        done
        wait
        """
        command = ["sh", "-c", script]
        with self.start_command(pod, command, uid=uid, env={"FAKE_GPU_CONTEXT_MIB": "1"}) as program:
            assert program.wait_for("wait"), program.error
            if kill == "before":
                self.ask("kill-agent")
            program.go_on()
            if kill == "among":
                assert program.wait_for("ended")
                self.ask("kill-agent")
            return program.outcome(300)


_SANDBOX = (sys.executable, "-P", "-m", "gpushare_agent", "sandbox")


def _environment(**more: str) -> dict[str, str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith(("FAKE_GPU_", "CUDA_", "GPUSHARE_"))}
    return {**own, "PYTHONPATH": str(ROOT), **more}


@contextmanager
def open_node(
    built: Built, isolation: str, *flags: str, pids: str = "host", gpus: int = 2, **driver: Any
) -> Iterator[IsolationNode]:
    """A node whose agent keeps shares by `isolation`; `pids` and `driver` are the fake driver's settings
    (fake_driver/machine.h), the driver's version among them where it is not to be that of `pids`."""
    directory = Path(tempfile.mkdtemp(prefix="gs", dir="/tmp"))
    node = IsolationNode(built=built, directory=directory)
    try:
        directory.chmod(0o755)  # user 1000 gets at the mounts through it
        for name in ("gpu", "root", "programs", "proc/nvidia"):
            (directory / name).mkdir(parents=True)
        module, version = _MODULES[pids]
        settings = {"pids": pids, "gpus": gpus, "driver_version": version, "memory_mib": GPU_MEMORY_MIB, **driver}
        (directory / "proc/nvidia/version").write_text(proc_version(module, settings["driver_version"]))
        install_driver(built.driver, directory / "driver", settings["driver_version"])
        node.configure_driver(**settings, context_mib=CONTEXT_MIB)
        (directory / "gpu").chmod(0o777)
        view = HostView(directory / "gpu")
        try:
            with _sandbox(node, isolation, flags):
                yield node
        finally:
            view.close()
    finally:
        shutil.rmtree(directory)


@contextmanager
def _sandbox(node: IsolationNode, isolation: str, flags: Sequence[str]) -> Iterator[None]:
    directory = node.directory
    arguments = ["--state-dir", str(node.state), "--port", "0", "--samples", "none", "--driver=nvml"]
    arguments += [f"--isolation={isolation}", *_settings_of(node, isolation), *flags]
    env = _environment(LD_LIBRARY_PATH=str(directory / "driver"), FAKE_GPU_STATE=str(directory / "gpu" / "state"))
    env["FAKE_GPU_DEVICES"] = "all"  # whatever GPUs this machine has; in the containers those that have a node
    # The agent reads what the kernel module writes into /proc: in a mount namespace of the node that is the fake one's.
    script = 'mount --bind "$0" /proc/driver && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, str(directory / "proc"), *_SANDBOX, *arguments]
    with (directory / "sandbox.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
    try:
        node.wait_until(
            lambda: process.poll() is not None or ((node.state / "control.sock").exists() and node.is_ready()),
            "the node",
        )
        assert process.poll() is None, f"the sandbox ended: {(directory / 'sandbox.log').read_text()}"
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _settings_of(node: IsolationNode, isolation: str) -> list[str]:
    """Where the isolation finds its library. AssertionError where there is none."""
    directory, libraries, parts = node.directory, node.built.libraries, isolation.split("+")
    settings = ["--driver-limits.set-by-agent=true"] if "driver" in parts else []
    if "gpushare" in parts:
        own = [
            f"--libgpushare.library={libraries['gpushare']}",
            f"--libgpushare.directory={directory / 'gpushare'}",
        ]
        return [*settings, *own, f"--virtual-manager-path={directory / 'vm'}"]
    if isolation == "vcuda":
        config = directory / "volume.conf"
        _fill_driver_volume(node, config)
        return [f"--volume-config={config}", f"--virtual-manager-path={directory / 'vm'}"]
    return settings


def _fill_driver_volume(node: IsolationNode, config: Path) -> None:
    """With the agent's own command, from a host whose only driver is the fake one."""
    host = node.directory / "host"
    (host / "etc").mkdir(parents=True)
    (host / "usr").mkdir()
    shutil.copytree(node.directory / "driver", host / "usr/lib64", symlinks=True)
    (host / "etc/ld.so.conf").write_text("/usr/lib64\n")
    subprocess.run(["ldconfig", "-r", str(host)], check=True, env={"PATH": "/usr/sbin:/sbin"})
    components = {"binaries": [], "libraries": ["libcuda.so", "libnvidia-ml.so"]}
    volumes = [
        {"name": name, "base": str(node.directory / "vdriver"), "mode": "ro", "components": components}
        for name in ("nvidia", "origin")
    ]
    config.write_text(json.dumps({"volume": volumes}))
    words = [sys.executable, "-P", "-m", "gpushare_agent", "driver-volume", f"--volume-config={config}"]
    words += [f"--driver-volume.root={host}", f"--driver-volume.control-library={node.built.libraries['vcuda']}"]
    words += [f"--driver-volume.gpu-client={node.built.libraries['gpu-client']}"]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=DEADLINE_S, env=_environment())
    assert done.returncode == 0, f"driver-volume: {done.stdout}{done.stderr}"
