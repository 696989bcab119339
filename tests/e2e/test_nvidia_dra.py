"""The suites and examples of NVIDIA's DRA driver, with the component dra-nvidia-names and without a change of their claims.

They are another project's and not here: NVIDIA_DRA_DRIVER names the folder of a checkout of
kubernetes-sigs/dra-driver-nvidia-gpu (measured with commit 95932046). Go, bats with its libraries, jq, yq and bc are needed,
and nothing is fetched. on_rig.sh builds tests/e2e/nvidia_dra in the place of the images, for there is no GPU; for the same
reason an MPS daemon is a program that listens on its socket. What a suite said is in the test's folder (--basetemp).

Changed is what asks for the driver's own name, which is gpushare-agent here, and the installation, which is ours:

| file | in the place of | is |
|---|---|---|
| test/e2e (two lines of Go) | `s.Spec.Driver != "gpu.nvidia.com"` | `… != "gpushare-agent"` |
| tests/bats | `.spec.driver=="gpu.nvidia.com"`, and the slices' and results' driver | gpushare-agent |
| tests/bats | `helm` | a program that does nothing: the test installs |
| tests/bats | the API server's pod | one by that label that says DRAExtendedResource=true: the cluster may have none |

What does not pass is in nvidia_dra_suites.py with the reason, and is expected to fail: one that passes is reported.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, DeadlineError
from tests.e2e.installation import Installation, is_ready, with_pods, with_variables
from tests.e2e.nvidia_dra_suites import BATS, EXAMPLES, GO_SPECS, SHARING, Example

pytestmark = pytest.mark.e2e
MPS_DIRECTORY = "/run/gpushare-mps"
LISTENER = f"""
import os, socket, time
os.makedirs("{MPS_DIRECTORY}/pipe", exist_ok=True)
path = "{MPS_DIRECTORY}/pipe/control"
if os.path.exists(path): os.unlink(path)
listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listening.bind(path)
listening.listen(64)
while True: listening.accept()[0].close()
"""
LABEL = {"dra-driver-nvidia-gpu-component": "kubelet-plugin"}
BATS_LIBRARIES = "/usr/lib/bats/"


class Served:
    """An installation that serves seven GPUs by NVIDIA's names, by this setting dra.consumable_shares."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self.cluster = installation.cluster

    def by(self, shares: str) -> Cluster:
        variables = {
            # The installation waits for resources of the device plugins, so one GPU stays theirs.
            "GPUSHARE_DRA__GPUS": "0,1,2,3,4,5,6",
            "GPUSHARE_DRA__CONSUMABLE_SHARES": shares,
            "GPUSHARE_SIMULATED__GPU_NAME": "NVIDIA A100 24GB",
            # As whoever runs their claims has it: MPS is asked for by them, and is not the node's own.
            "GPUSHARE_ISOLATIONS_ALLOWED": "mps,none",
        }
        mounts = {"name": "agent", "volumeMounts": [{"name": "mps", "mountPath": MPS_DIRECTORY}]}
        volumes = [{"name": "mps", "hostPath": {"path": MPS_DIRECTORY, "type": "DirectoryOrCreate"}}]
        template = {"metadata": {"labels": LABEL}, "spec": {"containers": [mounts], "volumes": volumes}}
        patches = [with_variables(variables), with_pods(template)]
        components = ["components/dra", "components/dra-nvidia-names"]
        self._installation.change(components=components, patches=patches)
        asked = "0" if shares != "memory" else "24Gi"
        self.cluster.wait_for("the slice has the setting", lambda: self._default() == asked)
        return self.cluster

    def _default(self) -> str:
        for one in self.cluster.slices():
            if len(one["spec"]["devices"]) == 7:
                found: str = one["spec"]["devices"][0]["capacity"]["memory"]["requestPolicy"]["default"]
                return found
        return ""


@pytest.fixture(scope="module")
def served(suite: Path, installation: Installation) -> Iterator[Served]:
    installation.cluster.needs_claims()
    cluster = installation.cluster
    listening = {"image": installation.image, "command": ["python3", "-c", LISTENER]}
    mounts = {"volumeMounts": [{"name": "mps", "mountPath": MPS_DIRECTORY}], "securityContext": {"runAsUser": 0}}
    container = cluster.container() | listening | mounts
    host = {"name": "mps", "hostPath": {"path": MPS_DIRECTORY, "type": "DirectoryOrCreate"}}
    cluster.start("kube-system", cluster.pod_of("mps-daemon-stand-in", container, volumes=[host]))
    yield Served(installation)
    cluster.run("-n", "kube-system", "delete", "pod", "mps-daemon-stand-in")


def run(command: list[str], folder: Path, timeout_s: float, **env: str) -> str:
    """The output, of standard error too; a command that takes too long ends with what it has said."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return f"{(error.stdout or b'').decode(errors='replace')}\nnot ended after {timeout_s:.0f} s"
    return done.stdout


@pytest.fixture(scope="module")
def go_suite(suite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled suite."""
    folder = tmp_path_factory.mktemp("go")
    replaced = {}
    for name in ("test/e2e/framework/gpu.go", "test/e2e/gpu_allocation_test.go"):
        text = (suite / name).read_text(encoding="utf-8")
        changed = text.replace('s.Spec.Driver != "gpu.nvidia.com"', 's.Spec.Driver != "gpushare-agent"')
        assert changed != text, f"{name} of another version"
        copy = folder / Path(name).name
        copy.write_text(changed, encoding="utf-8")
        replaced[str(suite / name)] = str(copy)
    (folder / "overlay.json").write_text(json.dumps({"Replace": replaced}), encoding="utf-8")
    program = folder / "e2e.test"
    flags = ["-tags", "e2e", "-mod=vendor", "-overlay", str(folder / "overlay.json"), "-o", str(program)]
    said = run(["go", "test", "-c", *flags, "./test/e2e"], suite, 600, GOTOOLCHAIN="local", GOFLAGS="-mod=vendor")
    assert program.exists(), said
    return program


@pytest.mark.parametrize("shares", GO_SPECS)
def test_go_suite(go_suite: Path, served: Served, tmp_path: Path, shares: str) -> None:
    """Ginkgo's own words count: so many specs passed, none failed. The unlimited one wants another setting of the driver."""
    chosen, count = GO_SPECS[shares]
    served.by(shares)
    said = run(
        [str(go_suite), "-ginkgo.v", "-ginkgo.no-color", f"-ginkgo.{chosen}", "/unlimited"], go_suite.parent, 400
    )
    (tmp_path / "said.txt").write_text(said, encoding="utf-8")
    assert f"{count} Passed | 0 Failed" in said, said[-6000:]


@pytest.fixture(scope="module")
def bats_folder(suite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what BATS reads, with the changes of this module's table."""
    folder = tmp_path_factory.mktemp("bats")
    shutil.copytree(suite / "tests/bats", folder / "tests/bats")
    for path in (folder / "tests/bats").rglob("*"):
        if path.suffix not in {".bats", ".sh", ".bash"}:
            continue
        text = path.read_text(encoding="utf-8").replace("/bats-libraries/", BATS_LIBRARIES)
        text = re.sub(r'(spec\.driver==|driver_name=|assert_output )"gpu\.nvidia\.com"', r'\1"gpushare-agent"', text)
        text = text.replace("grep 'gpu.nvidia.com'", "grep 'gpushare-agent'")
        path.write_text(text, encoding="utf-8")
    programs = folder / "programs"
    programs.mkdir()
    (programs / "helm").write_text("#!/bin/sh\nexit 0\n", encoding="utf-8")
    (programs / "helm").chmod(0o755)
    return folder


@pytest.mark.parametrize("name", BATS)
def test_bats(bats_folder: Path, served: Served, tmp_path: Path, name: str) -> None:
    """Each test passes but those that are known to differ; none skips itself."""
    file = BATS[name]
    cluster = served.by(file.shares)
    server = cluster.pod_of("kube-apiserver-stand-in", cluster.container())
    server["metadata"] |= {
        "labels": {"component": "kube-apiserver"},
        "annotations": {"gates": "DRAExtendedResource=true"},
    }
    cluster.apply(server, namespace="kube-system")
    env = {
        "PATH": f"{bats_folder / 'programs'}:{os.environ['PATH']}",
        "DISABLE_COMPUTE_DOMAINS": "true",
        "TEST_CHART_REPO": "none",
        "TEST_CHART_VERSION": "0",
        "TEST_NVIDIA_DRIVER_ROOT": "/",
        "TEST_CRD_UPGRADE_TARGET_GIT_REF": "none",
        "NVMM_PATH": str(bats_folder / "tests/bats/lib/lambda"),
    }
    said = run(["bats", "--tap", f"tests/bats/test_gpu_{name}.bats"], bats_folder, file.limit_s, **env)
    (tmp_path / "said.txt").write_text(said, encoding="utf-8")
    cluster.run("delete", "pods,resourceclaimtemplates,resourceclaims", "-l", "env=batssuite", "--ignore-not-found")
    cluster.run("-n", "kube-system", "delete", "pod", "kube-apiserver-stand-in")
    results = {found[2]: found[1] == "ok" for found in re.finditer(r"^(ok|not ok) \d+ (.*)$", said, re.MULTILINE)}
    assert len(results) == file.tests and "# skip" not in said, said[-4000:]
    expected = {test for test in results if any(part in test for part in file.differs)}
    assert {test for test, is_ok in results.items() if not is_ok} == expected and len(expected) == len(file.differs)


def variables(cluster: Cluster, path: Path, pods: int) -> list[dict[str, str]]:
    """Applies the example, waits until its pods are Ready, and removes it. The variables of each container."""
    text = path.read_text(encoding="utf-8")
    (namespace,) = set(re.findall(r"^  namespace: (\S+)$", text, re.MULTILINE))

    def ready() -> int:
        return sum(map(is_ready, cluster.pods(namespace).values()))

    try:
        cluster.run("apply", "-f", str(path))
        cluster.wait_for(f"{path.name} is Ready", lambda: ready() == pods, deadline_s=60)
        return [
            cluster.environment(namespace, name, one["name"])
            for name, pod in cluster.pods(namespace).items()
            for one in pod["spec"]["containers"]
        ]
    except DeadlineError as error:
        raise AssertionError(cluster.run("-n", namespace, "get", "events")) from error
    finally:
        cluster.run("delete", "-f", str(path), "--wait", "--timeout=60s", timeout_s=70)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(suite: Path, served: Served, name: str) -> None:
    """Each container has one GPU, and the limits of MPS that its claim asks for."""
    pods = EXAMPLES[name].pods
    found = variables(served.by("memory"), suite / f"demo/specs/quickstart/v1/{name}.yaml", pods)
    lists = [one["NVIDIA_VISIBLE_DEVICES"] for one in found]
    assert all(re.fullmatch(r"GPU-[0-9a-f-]+", one) for one in lists)
    limits = [one["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for one in found if "CUDA_MPS_PIPE_DIRECTORY" in one]
    assert Example(pods, len(set(lists)), len(limits)) == EXAMPLES[name] and set(limits) <= {"50"}


@pytest.mark.parametrize("name", SHARING)
def test_examples_of_consumable_shares(suite: Path, served: Served, name: str) -> None:
    cluster = served.by(SHARING[name])
    path = suite / f"demo/specs/consumable-shares/{name}-sharing.yaml"
    pods = sum(map(int, re.findall(r"^  replicas: (\d+)", path.read_text(encoding="utf-8"), re.MULTILINE)))
    found = variables(cluster, path, pods)
    assert len(found) == pods and len({one["NVIDIA_VISIBLE_DEVICES"] for one in found}) == 1
