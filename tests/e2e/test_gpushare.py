"""Programs under libgpushare in pods, as agent and kubelet put it there: on simulated GPUs, by the fake driver of the
isolation tests (tests/native), which the pods have from a ConfigMap. Needs a C compiler and NVIDIA's headers on the machine
that runs the tests (extra `isolation`).

A share is of 30 cores and 2,560 MiB: 8 blocks of 256 MiB beside a context of 300, of 1,000 launches a second about 300.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, Object, message_of
from tests.e2e.installation import SYSTEM, Installation, with_variables

pytestmark = pytest.mark.e2e
CORES, BLOCKS = 30, 10
TAKE = "alloc:alloc:256:20"
OF_USER = {
    "runAsUser": 1000,
    "runAsGroup": 1000,
    "runAsNonRoot": True,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}
SECURITY: dict[str, Object] = {"root": {}, "user": OF_USER, "read-only": {"readOnlyRootFilesystem": True}}
RESIZE = {"patches": [with_variables({"GPUSHARE_RESIZE__MODE": "free-capacity"})]}


@pytest.fixture
def programs(cluster: Cluster, installed: Installation, namespace: str, driver_files: dict[str, bytes]) -> Programs:
    if installed.overlay != "overlays/simulated":
        pytest.skip("on a real GPU nox -s gpu measures the library")
    return Programs(cluster, installed, namespace, driver_files)


class Programs:
    """Pods whose container has the fake driver, and programs in them."""

    def __init__(self, cluster: Cluster, installation: Installation, namespace: str, files: dict[str, bytes]) -> None:
        self.cluster, self.installation, self.namespace = cluster, installation, namespace
        cluster.create_files(namespace, "driver", files)

    def pod(self, name: str, security: Object | None = None, **more: Any) -> Object:
        """Of an image with glibc, which the preload file needs: the agent's own."""
        mounts = [{"name": "driver", "mountPath": "/driver"}, {"name": "state", "mountPath": "/state"}]
        container = self.cluster.container(CORES, BLOCKS, image=self.installation.image, volumeMounts=mounts, **more)
        container["securityContext"] = security or {}
        volumes = [
            {"name": "driver", "configMap": {"name": "driver", "defaultMode": 0o555}},
            {"name": "state", "emptyDir": {}},
        ]
        return self.cluster.pod_of(name, container, volumes=volumes)

    def start(self, *pods: Object) -> None:
        self.cluster.start(self.namespace, *pods)

    @contextmanager
    def begun(self, pod: str, *actions: str) -> Iterator[subprocess.Popen[str]]:
        """gpu_program, on the GPU that the container was given."""
        env = ["LD_LIBRARY_PATH=/driver", "FAKE_GPU_STATE=/state/state", "FAKE_GPU_GPUS=1", "FAKE_GPU_DEVICES=all"]
        shell = f'exec env {" ".join(env)} FAKE_GPU_UUID_PREFIX="$NVIDIA_VISIBLE_DEVICES" "$@"'
        command = ["kubectl", "-n", self.namespace, "exec", "-i", pod, "--", "sh", "-c", shell, "sh"]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            [*command, "/driver/gpu_program", "dlsym", "12080", *actions],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def run(self, pod: str, *actions: str) -> Steps:
        with self.begun(pod, *actions) as process:
            return Steps.read(process)


class Steps:
    """What a program said; its code is 0 and its standard error is empty."""

    def __init__(self, steps: list[dict[str, Any]]) -> None:
        self.steps = steps

    @classmethod
    def read(cls, process: subprocess.Popen[str], text: str = "") -> Steps:
        """To its end, with what was read of it before."""
        output, error = process.communicate(text or None, timeout=120)
        # kubectl's own line where the end of the program overtakes its output: `E1124 15:09:10 … websocket.go:296] …`.
        said = [line for line in error.splitlines() if "websocket.go" not in line]
        assert (process.returncode, said) == (0, []), (output, error)
        return cls([json.loads(line) for line in output.splitlines() if line.startswith("{")])

    def all(self, action: str, key: str) -> list[Any]:
        return [step[key] for step in self.steps if step["action"] == action]


def wait_for_step(process: subprocess.Popen[str], action: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if f'"action": "{action}"' in line:
            return
    raise AssertionError(process.communicate())


def is_limited(rate: float) -> bool:
    """Of launches a second: in the first one the share has a tenth of a second more, saved while it was idle."""
    return 0 < rate < 600


@pytest.mark.smoke
def test_shares_of_root_and_of_a_user_are_limited_also_with_a_read_only_root(programs: Programs) -> None:
    programs.start(*(programs.pod(name, security) for name, security in SECURITY.items()))
    for name in SECURITY:
        found = programs.run(name, TAKE, "info", "launch:kernel:2")
        assert (found.all("alloc", "blocks"), found.all("info", "total_mib")) == ([8], [BLOCKS * 256]), name
        assert is_limited(*found.all("launch", "rate")), name


def test_a_program_goes_on_within_its_limits_while_the_agent_is_killed_and_replaced(programs: Programs) -> None:
    """Killed by SIGKILL, and a rollout that ends with another pod. A new program in the container has the same limits."""
    cluster, installation = programs.cluster, programs.installation
    programs.start(programs.pod("web", OF_USER))
    before = set(installation.agents())
    actions = ["alloc:alloc:256:4", "wait", *["launch:kernel:5"] * 4, "wait", TAKE, "launch:kernel:2"]
    with programs.begun("web", *actions) as process:
        wait_for_step(process, "wait")
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        installation.signal()
        cluster.run("-n", SYSTEM, "rollout", "restart", "daemonset/gpushare-agent")
        installation.wait_ready()
        cluster.wait_for("another agent alone", lambda: not before & set(installation.agents()))
        beside = programs.run("web", "info", "alloc:alloc:256:20")
        found = Steps.read(process, "\n")
    assert found.all("alloc", "blocks") == [4] and all(map(is_limited, found.all("launch", "rate")))
    assert beside.all("info", "total_mib") == [BLOCKS * 256]
    assert beside.all("alloc", "blocks") == [3]
    programs.start(programs.pod("later"))
    assert programs.run("later", TAKE).all("alloc", "blocks") == [8]


def test_a_running_program_follows_a_resize(
    cluster: Cluster, installation: Installation, namespace: str, driver_files: dict[str, bytes]
) -> None:
    """Twice the memory, then three fifths of it."""
    installation.install(**RESIZE)
    programs = Programs(cluster, installation, namespace, driver_files)
    programs.start(programs.pod("web", OF_USER))
    actions = [TAKE, "wait", TAKE, "free", "wait", TAKE, "info"]
    with programs.begun("web", *actions) as process:
        wait_for_step(process, "wait")
        resize(programs, "web", blocks=20)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        wait_for_step(process, "wait")
        resize(programs, "web", blocks=6)
        found = Steps.read(process, "\n")
    assert (found.all("alloc", "blocks"), found.all("info", "total_mib")) == ([4], [6 * 256])


def resize(programs: Programs, pod: str, *, blocks: int) -> None:
    text, cluster = f"main:cores={CORES},memory={blocks}", programs.cluster
    cluster.run("-n", programs.namespace, "annotate", "pod", pod, "--overwrite", f"gpushare-agent/resize={text}")

    def is_in_force() -> bool:
        annotations = cluster.pods(programs.namespace)[pod]["metadata"]["annotations"]
        return bool(annotations.get("gpushare-agent/resize-status") == f"{text},in-force")

    cluster.wait_for("the size in force", is_in_force)


def test_what_a_spec_has_to_lift_a_limit_is_refused_and_what_a_tenant_does_in_its_files_ends_there(
    programs: Programs,
) -> None:
    """As root in its container: `usage` filled, emptied, without permissions; what is read-only stays what it is."""
    cluster, namespace = programs.cluster, programs.namespace
    preloads = programs.pod("preloads", env=[{"name": "LD_PRELOAD", "value": "/driver/libcuda.so.1"}])
    mounts = programs.pod("mounts")
    mounts["spec"]["containers"][0]["volumeMounts"].append({"name": "state", "mountPath": "/etc/vcuda"})
    cluster.apply(preloads, mounts, programs.pod("hostile"), programs.pod("web"), namespace=namespace)
    cluster.wait_phase(namespace, "hostile", "web")
    cluster.wait_phase(namespace, "preloads", "mounts", phase="Failed")
    found = cluster.pods(namespace)
    assert "sets LD_PRELOAD (libcuda.so)" in message_of(found["preloads"])
    assert "mounts a volume at /etc/vcuda" in message_of(found["mounts"])
    script = """
    head -c 131072 /dev/urandom > /etc/vcuda/usage; truncate -s 1T /etc/vcuda/usage; truncate -s 0 /etc/vcuda/usage
    head -c 20000000 /dev/zero > /etc/vcuda/usage; chmod 0 /etc/vcuda/usage; chown 1000 /etc/vcuda/usage
    for path in /etc/vcuda/gpushare.config /etc/ld.so.preload /usr/local/gpushare/libgpushare.so; do
        rm -f $path; true > $path; umount $path
    done 2> /dev/null
    cat /etc/ld.so.preload
    """
    with programs.begun("web", TAKE, "launch:kernel:5", "info") as process:
        shown = cluster.run("-n", namespace, "exec", "hostile", "--", "sh", "-c", script)
        beside = Steps.read(process)
    assert shown == "/usr/local/gpushare/libgpushare.so\n"
    assert beside.all("alloc", "blocks") == [8] and is_limited(*beside.all("launch", "rate"))
    assert programs.run("web", TAKE).all("alloc", "blocks") == [8]
    cluster.run("-n", namespace, "delete", "pod", "hostile")
    programs.start(programs.pod("hostile"))
    assert programs.run("hostile", TAKE).all("alloc", "blocks") == [8]
