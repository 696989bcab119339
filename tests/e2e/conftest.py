"""`nox -s e2e`: the product on a real cluster, named by KUBECONFIG. For users: docs/how-to/test-your-cluster.md.

To add a test: a file tests/e2e/test_<topic>.py with `pytestmark = pytest.mark.e2e`, plain functions, and these fixtures:
- `cluster` (session): kubectl (`run`, `get`, `apply`), pods with shares (`pod`, `container`), `start`, `wait_for`, …
- `installed`: the agent of the run's overlay is ready, its node offers both resources, and no earlier test's share is left.
- `installation` (session): for another one: `install("overlays/mps", components=["components/…"], patches=[…], image=…)`,
  `change(…)` in place, `remove()`; and `exec`, `signal`, `view`, `ledger`, `kubelet_records`. The next test that takes
  `installed` gets the default one again. What `install` did not make, the test removes.
- `namespace`: one of its own, removed with all that is in it. Objects without one: with `cluster.suffix` in their name.
- What kubectl cannot do: `cluster.hook("restart-kubelet")`, `cluster.path("static-pods")`; they skip where none was given.
A test skips, with the reason, what a cluster lacks. Poll with `cluster.wait_for`; no sleeps, no timings.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from gpushare_agent import __version__
from tests.e2e.cluster import (
    DEADLINE_S,
    RUN_LABEL,
    Cluster,
    KubectlError,
    Object,
    kubectl,
    manifest,
    names_of,
    open_proxy,
)
from tests.e2e.installation import LABEL, MANIFESTS, NODE_LABEL, SYSTEM, Installation, found_installed, take_off_node
from tests.native.build import NATIVE, CannotBuildError, build_fake_driver, build_program

CLUSTER = pytest.StashKey[Cluster]()
MOST_SHOWN = 20_000
"""Characters of one command's output in the report of a failure: its end."""
HOOKS = {
    "restart-kubelet": ("COMMAND", "restarts the node's kubelet, and ends when it runs"),
    "stop-kubelet": ("COMMAND", "stops it"),
    "start-kubelet": ("COMMAND", "starts it, and ends when it runs"),
    "reboot-node": ("COMMAND", "reboots the node, and ends when its kubelet runs"),
    "audit-log": ("FILE", "the API server's, of level Metadata for the accounts of gpushare-system"),
    "static-pods": ("DIR", "the node's static pod path"),
    "driver-libraries": ("DIR", "of a node without a driver, for a stand-in's libraries: /usr/local/nvidia/lib64"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("e2e")
    agent, pods = f"gpushare-agent:{__version__}", "busybox:1.35"
    group.addoption("--node", metavar="NODE", help="the one that is used, when more than one has the label or none")
    group.addoption("--image", metavar="IMAGE", default=agent, help="the agent's, as the node pulls it")
    group.addoption("--pod-image", metavar="IMAGE", default=pods, help="of the test pods: with sh and sleep")
    group.addoption(
        "--overlay", metavar="DIR", default="overlays/simulated", help="of manifests/, or base (overlays/simulated)"
    )
    group.addoption("--scheduler-image", metavar="IMAGE", help="default: registry.k8s.io's of the cluster's version")
    group.addoption("--runtime-class", metavar="NAME", help="of pods with a share, such as nvidia")
    group.addoption("--replace-installed", action="store_true", help="remove what an earlier run left, and go on")
    group.addoption("--endurance", metavar="MINUTES", type=float, default=0, help="of tests/e2e/test_endurance.py")
    group.addoption("--endurance-log", metavar="FILE", help="of its runs, JSON, to which it adds its own")
    for name, (metavar, text) in HOOKS.items():
        group.addoption(f"--{name}", metavar=metavar, help=text)


@pytest.fixture(scope="session")
def api() -> Iterator[Path]:
    """`kubectl proxy`, where there is a cluster."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG names no cluster; a default one is not taken, for the tests install a system component")
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not on the PATH")
    with open_proxy() as path:
        yield path


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, api: Path) -> Iterator[Cluster]:
    """The user's cluster, on which the product is not installed."""
    option = request.config.getoption
    node = _chosen_node(option("--node"))
    labels = node["metadata"].get("labels", {})
    cluster = Cluster(
        node=node["metadata"]["name"],
        hostname=labels.get("kubernetes.io/hostname", node["metadata"]["name"]),
        pod_image=option("--pod-image"),
        runtime_class=option("--runtime-class"),
        hooks={name: option(f"--{name}") for name in HOOKS},
        api=api,
    )
    request.config.stash[CLUSTER] = cluster
    if found := found_installed(cluster):
        if not option("--replace-installed"):
            pytest.exit(
                f"gpushare-agent is already there ({found}): the tests would remove it; --replace-installed allows it",
                3,
            )
        _remove_leftovers(cluster)
        labels.pop(NODE_LABEL, None)
    yield cluster
    for name in names_of(cluster.items("namespaces", "-l", f"{RUN_LABEL}={cluster.suffix}")):
        wait = ("--ignore-not-found", f"--timeout={DEADLINE_S:.0f}s")
        cluster.run("delete", "namespace", name, *wait, timeout_s=DEADLINE_S + 20)
    if NODE_LABEL in labels:
        cluster.run("label", "node", cluster.node, f"{NODE_LABEL}={labels[NODE_LABEL]}", "--overwrite")


def _chosen_node(name: str | None) -> Object:
    """The named node, else the only one with the label, else the only one."""
    nodes: list[Object] = json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
    labelled = [node for node in nodes if NODE_LABEL in node["metadata"].get("labels", {})]
    chosen = [node for node in nodes if node["metadata"]["name"] == name] if name else labelled or nodes
    if len(chosen) != 1:
        pytest.exit(f"which node? --node names one of {', '.join(names_of(chosen or nodes))}", 3)
    return chosen[0]


def _remove_leftovers(cluster: Cluster) -> None:
    """What a run that was killed left; the objects of any overlay have the names of the base."""
    take_off_node(cluster)
    cluster.run("delete", "namespaces", "-l", RUN_LABEL, f"--timeout={DEADLINE_S:.0f}s", timeout_s=DEADLINE_S + 20)
    everything = ("overlays/simulated", "extender/second-scheduler", "extender", "resize")
    for folder in everything:
        where = str(MANIFESTS / folder)
        cluster.run("delete", "--ignore-not-found", "-k", where, timeout_s=180)


@pytest.fixture(scope="session")
def installation(
    cluster: Cluster, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    option = request.config.getoption
    installation = Installation(
        cluster, folder=tmp_path_factory.mktemp("own"), overlay=option("--overlay"), image=option("--image")
    )
    yield installation
    installation.remove()


@pytest.fixture
def installed(installation: Installation) -> Installation:
    """The default installation, with nothing of an earlier test allocated."""
    installation.install()
    prefix = _namespace_name(installation.cluster)
    installation.cluster.wait_for(
        "no share of an earlier test is allocated",
        lambda: not [key for key in installation.ledger() if key.startswith(prefix)],
    )
    return installation


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of its own; the pods are gone at the end, the rest goes on being deleted."""
    name = f"{_namespace_name(cluster)}{secrets.token_hex(2)}"
    cluster.apply(manifest("v1", "Namespace", {"name": name, "labels": {RUN_LABEL: cluster.suffix}}))
    accounts = f"/api/v1/namespaces/{name}/serviceaccounts"
    cluster.wait_for("the service account of pods", lambda: cluster.read(accounts)["items"])
    yield name
    owners = "deployments,statefulsets,daemonsets,replicasets,jobs,cronjobs"
    cluster.run("delete", owners, "--all", "-n", name, "--cascade=background", "--wait=false")
    cluster.delete_pods(name)
    cluster.run("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def driver_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The fake driver and a program, by name; without symbols, for a ConfigMap holds a MiB. Skips without a compiler."""
    directory = tmp_path_factory.mktemp("driver")
    try:
        driver = build_fake_driver(directory / "built")
        program = build_program(directory / "gpu_program", NATIVE / "gpu_program.c", ["-ldl"])
    except CannotBuildError as error:
        pytest.skip(str(error))
    built = {
        "libcuda.so.1": driver / "libcuda.so",
        "libnvidia-ml.so.1": driver / "libnvidia-ml.so",
        "gpu_program": program,
    }
    for path in built.values():
        subprocess.run(["strip", str(path)], check=True)
    return {name: path.read_bytes() for name, path in built.items()}


@pytest.fixture(scope="session")
def suite() -> Path:
    """A checkout of NVIDIA's DRA driver."""
    if not (found := os.environ.get("NVIDIA_DRA_DRIVER")):
        pytest.skip("NVIDIA_DRA_DRIVER does not name a checkout of NVIDIA's DRA driver")
    return Path(found).resolve()


def _namespace_name(cluster: Cluster) -> str:
    return f"{RUN_LABEL}-{cluster.suffix}-"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure has the cluster's view of it in its report: before the fixtures remove it."""
    report = yield
    cluster = item.config.stash.get(CLUSTER, None)
    if report.failed and call.when != "teardown" and cluster is not None:
        names = [SYSTEM, *filter(None, [getattr(item, "funcargs", {}).get("namespace")])]
        report.sections += [section for name in names for section in _seen(cluster, name)]
    return report


def _seen(cluster: Cluster, namespace: str) -> Iterator[tuple[str, str]]:
    what = {
        "objects": ("get", "all", "-o", "wide"),
        "pods": ("describe", "pods"),
        "events": ("get", "events", "--sort-by=.lastTimestamp"),
    }
    if namespace == SYSTEM:
        what |= {
            "agent's log": ("logs", "-l", LABEL, "--all-containers", "--tail=60"),
            "agent's log before": ("logs", "-l", LABEL, "--all-containers", "--tail=60", "--previous"),
        }
    for title, arguments in what.items():
        try:
            text = cluster.run(*arguments, "-n", namespace, timeout_s=20)
        except KubectlError as error:
            text = str(error)
        yield f"{namespace}: {title}", text[-MOST_SHOWN:]
