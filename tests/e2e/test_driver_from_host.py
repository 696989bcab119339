"""The agent's own NVML where NVIDIA's container runtime is not installed: overlays/cdi, and gpu-manager's DaemonSet.

A stand-in of NVIDIA's driver lies in the node's library path, with device nodes behind which there is no driver. Needs
--driver-libraries, on the node itself, as root; a C compiler.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, KubectlError, Object
from tests.e2e.installation import SYSTEM, Installation, with_variables
from tests.e2e.test_gpu_manager import NAMESPACE, answer, objects, running
from tests.isolation.support_driver import compile_library, require_cc
from tests.native.build import NATIVE

pytestmark = pytest.mark.e2e
VERSION = "550.54.14"
MIG_CONFIG = "nvidia-caps/nvidia-cap1"
NODES = {"nvidiactl": 255, "nvidia0": 0, "nvidia1": 1, "nvidia-uvm": 254, MIG_CONFIG: 250}
"""Of /dev: their minor numbers."""
MAJOR = 195
"""NVIDIA's; to open a node whose driver is not loaded fails with ENXIO, one that the cgroup forbids with EPERM."""
MACHINE = """\
count 2
GPU 0 GPU-aaaaaaaa-0000-0000-0000-000000000000 0 00000000:3B:00.0 24576 0 NVIDIA A10
GPU 1 GPU-bbbbbbbb-0000-0000-0000-000000000000 1 00000000:3C:00.0 24576 0 NVIDIA A10
"""
SCRIPT = Path("/etc/gpu-manager/nvml-of-the-test")
"""What the stand-in answers, where every agent mounts the host's path, and gpu-manager's in a volume of its own."""
STAND_IN = {"FAKE_NVML_SCRIPT": str(SCRIPT / "machine"), "GPUSHARE_LIBGPUSHARE__PROBE": "false"}
"""The stand-in's own variable, and no proof by a CUDA program, which it could not run."""
OPEN = "import os, sys; print(*(e for p in sys.argv[1:] for e in [0] if not os.close(os.open(p, os.O_RDWR))))"
LIBRARY = "/usr/local/nvidia/lib64/libnvidia-ml.so.1"


@pytest.fixture
def stand_in(cluster: Cluster) -> Iterator[None]:
    libraries = cluster.path("driver-libraries")
    if libraries.exists() or SCRIPT.exists() or any(Path("/dev", name).exists() for name in NODES):
        pytest.skip(f"the node has a driver, or {libraries}")
    made = [one for one in (*reversed(libraries.parents), libraries) if not one.exists()]
    try:
        compile_library(libraries / f"libcuda.so.{VERSION}", "libcuda.so.1")
        (libraries / "libcuda.so.1").symlink_to(f"libcuda.so.{VERSION}")
        flags = ["-shared", "-fPIC", "-pthread", "-Wl,-soname,libnvidia-ml.so.1"]
        nvml = libraries / f"libnvidia-ml.so.{VERSION}"
        subprocess.run([require_cc(), *flags, "-o", nvml, NATIVE / "fake_nvml.c"], check=True)
        (libraries / "libnvidia-ml.so.1").symlink_to(nvml.name)
        SCRIPT.mkdir(parents=True)
        (SCRIPT / "machine").write_text(MACHINE, encoding="utf-8")
        Path("/dev", MIG_CONFIG).parent.mkdir()
        for name, minor in NODES.items():
            os.mknod(f"/dev/{name}", stat.S_IFCHR | 0o666, os.makedev(MAJOR, minor))
        yield
    finally:
        for name in NODES:
            Path("/dev", name).unlink(missing_ok=True)
        shutil.rmtree(Path("/dev", MIG_CONFIG).parent, ignore_errors=True)
        shutil.rmtree(SCRIPT, ignore_errors=True)
        shutil.rmtree(made[0], ignore_errors=True)


def opened(cluster: Cluster, pod: str, *paths: str, namespace: str = SYSTEM) -> str:
    """What becomes of it in the pod's first container: the error of the last line, empty where all could be opened."""
    try:
        cluster.run("-n", namespace, "exec", pod, "--", "python", "-c", OPEN, *paths)
    except KubectlError as error:
        return str(error)
    return ""


def assert_share_has_the_driver(cluster: Cluster, namespace: str) -> None:
    cluster.start(namespace, cluster.pod("share", 30, 8))
    for test in (("-c", "/dev/nvidia0"), ("-e", LIBRARY)):
        cluster.run("-n", namespace, "exec", "share", "--", "test", *test)


def test_the_overlay_cdi_needs_no_runtime_of_nvidias(
    cluster: Cluster, installation: Installation, namespace: str, stand_in: None
) -> None:
    """The agent is not privileged: it has libraries by its init container and the device nodes by driver-devices, which
    itself may open none; containers get theirs and the driver by CDI; nobody else may ask for the agent's."""
    assert cluster.items("runtimeclasses") == []
    installation.install("overlays/cdi", patches=[with_variables(STAND_IN)])
    name = installation.agent()
    spec = installation.agents()[name]["spec"]
    (container,) = spec["containers"]
    assert "runtimeClassName" not in spec and container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert [gpu["name"] for gpu in installation.view()["gpus"]] == ["NVIDIA A10", "NVIDIA A10"]
    for node in NODES.keys() - {MIG_CONFIG}:
        assert os.strerror(errno.ENXIO) in opened(cluster, name, f"/dev/{node}")
    assert os.strerror(errno.ENOENT) in opened(cluster, name, f"/dev/{MIG_CONFIG}"), (
        "nobody asked to make MIG instances"
    )
    (plugin,) = cluster.pods(SYSTEM, selector="app.kubernetes.io/name=gpushare-driver-devices")
    assert os.strerror(errno.EPERM) in opened(cluster, plugin, "/host/dev/nvidiactl")
    assert_share_has_the_driver(cluster, namespace)
    greedy = cluster.container(resources={"limits": {"gpushare-agent/driver": 1}})
    with pytest.raises(KubectlError, match="for the pods of the GPU agent alone"):
        cluster.apply(cluster.pod_of("greedy", greedy), namespace=namespace)


def test_mig_on_demand_has_the_drivers_capability_and_none_of_linux(
    cluster: Cluster, installation: Installation, stand_in: None
) -> None:
    """By the device node alone, which a hostPath would not do: the container's cgroup must allow it."""
    components = ["components/dra", "components/mig-on-demand"]
    variables = STAND_IN | {"GPUSHARE_DRA__GPUS": ""}
    installation.install("overlays/cdi", components=components, patches=[with_variables(variables)])
    name = installation.agent()
    (container,) = installation.agents()[name]["spec"]["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert os.strerror(errno.ENXIO) in opened(cluster, name, f"/dev/{MIG_CONFIG}")


def test_gpu_managers_daemonset_finds_the_driver_by_the_hosts_root(
    cluster: Cluster, installation: Installation, namespace: str, stand_in: None
) -> None:
    """Its privileged container collects it from /proc/1/root, starts anew with it, and mounts it into containers."""
    found: list[Object] = objects(installation.image, "--logtostderr=false --libgpushare.probe=false")
    found[2]["spec"]["template"]["spec"]["containers"][0]["env"].append(
        {"name": "FAKE_NVML_SCRIPT", "value": f"/proc/1/root{SCRIPT}/machine"}
    )
    if not _shows_root(cluster, installation):
        pytest.skip("/proc/1/root is closed on this node also for a privileged container")
    with running(cluster, installation, found) as pod:
        assert '"NVIDIA A10"' in answer(cluster, pod, "api/v1/node")
        assert_share_has_the_driver(cluster, namespace)
        log = cluster.run("-n", NAMESPACE, "logs", pod)
        assert "/proc/1/root/var/lib/kubelet/pod-resources/kubelet.sock" in log
        assert "mount_missing" in log and '"level": "error"' not in log


def _shows_root(cluster: Cluster, installation: Installation) -> bool:
    """By a pod with the privileges of gpu-manager's."""
    container = cluster.container(command="test -d /proc/1/root/usr", securityContext={"privileged": True})
    pod = cluster.pod_of("looks", container, hostPID=True, restartPolicy="Never")
    cluster.apply(pod, namespace=NAMESPACE)

    def phase() -> str:
        return str(
            cluster.pods(NAMESPACE)["looks"]["status"].get("phase", "").replace("Running", "").replace("Pending", "")
        )

    try:
        return cluster.wait_for("the look at /proc/1/root", phase) == "Succeeded"
    finally:
        cluster.run("-n", NAMESPACE, "delete", "pod", "looks", "--wait=true")
