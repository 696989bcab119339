"""MIG instances on a real scheduler and kubelet, by claims and by plain limits. The GPUs in MIG mode are simulated.

The specifications of NVIDIA's DRA driver run where NVIDIA_DRA_DRIVER names a checkout of it (test_nvidia_dra.py; on_rig.sh
has images in the place of theirs). One is changed: in the class of mig-1g-12gb.yaml `device.driver == 'gpu.nvidia.com'`,
which is gpushare-agent here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from gpushare_agent.core.formats.mig_profiles import mig_profiles
from tests.e2e.cluster import Cluster, DeadlineError, Object, claim_template
from tests.e2e.installation import Installation, with_variables

pytestmark = pytest.mark.e2e
FAULTS = "/tmp/faults.json"
COMPONENTS = [f"components/{name}" for name in ("dra", "dra-nvidia-names", "dra-mig-profiles", "mig-on-demand")]
DIVIDED = 4
"""GPUs in MIG mode; the next is for claims as a whole, the others stay the device plugins'."""
A100, H100 = ("NVIDIA A100-SXM4-40GB", 40960), ("NVIDIA H100 NVL", 95830)
CLASS = "mig.gpushare-agent"
Product = tuple[str, int]


class Divided:
    """An installation of GPUs in MIG mode without an instance."""

    def __init__(self, installation: Installation) -> None:
        self.installation = installation
        self.cluster = installation.cluster

    def of(self, product: Product = A100, *, gpus: int = DIVIDED) -> Cluster:
        """With that many GPUs of the product in MIG mode, on which nothing is allocated."""
        name, memory_mib = product
        variables = {
            "GPUSHARE_DRA__GPUS": str(DIVIDED),
            "GPUSHARE_ISOLATIONS_ALLOWED": "none",
            "GPUSHARE_SIMULATED__GPU_NAME": name,
            "GPUSHARE_SIMULATED__GPU_MEMORY_MIB": str(memory_mib),
            "GPUSHARE_SIMULATED__FAULTS": FAULTS,
        }
        self.installation.install(components=COMPONENTS, patches=[with_variables(variables)])
        self.divide({str(index): [] for index in range(gpus)})
        expected = gpus * sum(len(one.starts) for one in mig_profiles(*product))
        self.cluster.wait_for("the places are published", lambda: len(self.devices("mig")) == expected)
        return self.cluster

    def divide(self, mig: Mapping[str, list[str]]) -> None:
        """Has these GPUs in MIG mode, by index, with instances of these profiles that somebody has made."""
        program = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
        self.installation.exec("python", "-c", program, FAULTS, json.dumps({"mig": mig}))

    def devices(self, kind: str) -> list[Object]:
        return [
            device
            for one in self.cluster.slices()
            for device in one["spec"].get("devices", ())
            if device["attributes"]["type"]["string"] == kind
        ]

    def profiles(self, namespace: str) -> dict[str, list[str]]:
        """pod/container -> the profiles of its instances, as the agent shows them; none of a UUID that it does not show."""
        shown = {gpu["uuid"]: gpu["mig"]["profile"] for gpu in self.installation.view()["gpus"] if gpu.get("mig")}
        found = {}
        for name, pod in self.cluster.pods(namespace).items():
            for one in pod["spec"]["containers"]:
                found[f"{name}/{one['name']}"] = [shown[uuid] for uuid in self.visible(namespace, name, one["name"])]
        return found

    def visible(self, namespace: str, pod: str, container: str) -> list[str]:
        return self.cluster.environment(namespace, pod, container)["NVIDIA_VISIBLE_DEVICES"].split(",")

    def places(self, namespace: str) -> dict[str, str]:
        """Pod -> the device that its claim was allocated."""
        found = {}
        for claim in self.cluster.read(f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims")["items"]:
            results = claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", ())
            for user in claim.get("status", {}).get("reservedFor", ()):
                found[user["name"]] = ",".join(one["device"] for one in results)
        return found


@pytest.fixture(scope="module")
def divided(installation: Installation) -> Iterator[Divided]:
    installation.cluster.needs_claims()
    if not installation.overlay.endswith("simulated"):
        pytest.skip("needs GPUs that tests may divide: the overlay is not of simulated ones")
    yield Divided(installation)


def template(name: str, profile: str) -> Object:
    chosen = {"cel": {"expression": f"device.attributes['gpushare-agent'].profile == '{profile}'"}}
    exactly = {"deviceClassName": CLASS, "selectors": [chosen]}
    return claim_template(name, {"name": "mig", "exactly": exactly})


def claiming(cluster: Cluster, name: str, claim: str) -> Object:
    container = cluster.container(resources={"claims": [{"name": "mig"}]})
    return cluster.pod_of(name, container, resourceClaims=[{"name": "mig", "resourceClaimTemplateName": claim}])


def asking(cluster: Cluster, name: str, profile: str, number: int = 1) -> Object:
    """By plain limits."""
    resource = f"nvidia.com/mig-{profile.replace('+', '.')}"
    return cluster.pod_of(name, cluster.container(resources={"limits": {resource: str(number)}}))


def name_of(profile: str) -> str:
    return re.sub("[^a-z0-9]", "-", profile)


@pytest.mark.parametrize("way", ["claim", "limits"])
def test_a_pod_of_each_profile(divided: Divided, namespace: str, way: str) -> None:
    """All at once: the scheduler finds places for them on four GPUs. `+me` is a profile of its own."""
    cluster = divided.of()
    profiles = [one.name for one in mig_profiles(*A100)]
    if way == "claim":
        cluster.apply(*(template(name_of(one), one) for one in profiles), namespace=namespace)
        pods = [claiming(cluster, name_of(one), name_of(one)) for one in profiles]
    else:
        pods = [asking(cluster, name_of(one), one) for one in profiles]
    cluster.start(namespace, *pods)
    assert divided.profiles(namespace) == {f"{name_of(one)}/main": [one] for one in profiles}
    for name, pod in cluster.pods(namespace).items():
        status = pod["status"].get("extendedResourceClaimStatus", {})
        mapped = [one["containerName"] for one in status.get("requestMappings", ())]
        assert mapped == ([] if way == "claim" else ["main"]), f"{name}: {status}"


def test_instances_that_somebody_made_are_given_and_stay(divided: Divided, namespace: str) -> None:
    """By the same limits. The rest of the GPU is made on demand around them, and they outlive their pods."""
    cluster = divided.of()
    divided.divide({})  # a GPU that leaves MIG mode has no instance of an earlier test
    cluster.wait_for("no GPU is in MIG mode", lambda: not divided.devices("mig"))
    divided.divide({"0": ["3g.20gb"], "1": []})
    made = cluster.wait_for("the instance is offered", lambda: instances(divided))
    pods = [asking(cluster, "small", "1g.5gb"), *(asking(cluster, f"half-{n}", "3g.20gb") for n in range(3))]
    cluster.start(namespace, *pods)
    given = {uuid for n in range(3) for uuid in divided.visible(namespace, f"half-{n}", "main")}
    assert len(made) == 1 and len(given) == 3 and made < given
    cluster.delete_pods(namespace)
    assert instances(divided) == made


def instances(divided: Divided) -> set[str]:
    """UUIDs of those that this agent did not make: their devices have their names."""
    names = (device["name"] for device in divided.devices("mig"))
    return {f"MIG-{name.removeprefix('mig-')}" for name in names if name.startswith("mig-")}


def test_small_instances_leave_the_place_of_a_large_one(divided: Divided, namespace: str) -> None:
    """On one GPU: small ones lie at its end, so 4g, which has one place, fits. Nothing else does, and it is explained. What
    waits gets the place of those that end."""
    cluster = divided.of(gpus=1)
    cluster.start(namespace, *(asking(cluster, f"small-{n}", "1g.5gb") for n in range(3)))
    cluster.start(namespace, asking(cluster, "large", "4g.20gb"))
    starts = {pod: int(device.rpartition("-")[2]) for pod, device in divided.places(namespace).items()}
    assert starts["large"] == 0 and sorted(starts[f"small-{n}"] for n in range(3)) == [4, 5, 6]
    cluster.apply(asking(cluster, "waits", "3g.20gb"), namespace=namespace)
    said = cluster.wait_for("the scheduler's reason", lambda: unscheduled(cluster, namespace, "waits"))
    shown = explained(namespace, "waits")
    sys.stdout.write(f"the scheduler: {said}\n{shown}\n")
    assert "cannot allocate all claims" in said and "nvidia.com/mig-3g.20gb" in shown
    cluster.run("-n", namespace, "delete", "pods", *(f"small-{n}" for n in range(3)), "--wait")
    cluster.wait_phase(namespace, "waits")
    assert divided.places(namespace)["waits"].endswith("-4")
    assert divided.profiles(namespace)["waits/main"] == ["3g.20gb"]


def unscheduled(cluster: Cluster, namespace: str, pod: str) -> str:
    conditions = cluster.pods(namespace)[pod]["status"].get("conditions", ())
    return next(
        (one["message"] for one in conditions if one["type"] == "PodScheduled" and one["status"] == "False"), ""
    )


def explained(namespace: str, pod: str) -> str:
    """What `kubectl gpushare explain` says."""
    program = "from gpushare_agent.__main__ import run_plugin; run_plugin()"
    command = [sys.executable, "-c", program, "explain", pod, "-n", namespace]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def test_kills_leave_instances_with_their_pods_and_no_other(divided: Divided, namespace: str) -> None:
    """Of the agent, and a restart of the kubelet, which deletes the slices. Afterwards every GPU can be had whole."""
    cluster, installation = divided.of(), divided.installation
    cluster.start(namespace, asking(cluster, "small", "1g.5gb", 2), asking(cluster, "half", "3g.20gb"))
    given = {name: divided.visible(namespace, name, "main") for name in ("small", "half")}
    before = len(divided.devices("mig"))
    installation.signal()
    cluster.hook("restart-kubelet")
    installation.wait_ready()
    cluster.wait_for("the places are published again", lambda: len(divided.devices("mig")) == before)
    cluster.start(namespace, asking(cluster, "large", "4g.20gb"))
    assert {name: divided.visible(namespace, name, "main") for name in given} == given
    assert divided.profiles(namespace) == {
        "small/main": ["1g.5gb"] * 2,
        "half/main": ["3g.20gb"],
        "large/main": ["4g.20gb"],
    }
    cluster.delete_pods(namespace)
    whole = [f"whole-{n}" for n in range(DIVIDED)]
    cluster.start(namespace, *(asking(cluster, name, "7g.40gb") for name in whole))
    assert divided.profiles(namespace) == {f"{name}/main": ["7g.40gb"] for name in whole}


def test_how_long_a_claim_takes(divided: Divided, namespace: str) -> None:
    """A whole GPU, an instance that is made for the claim, where idle ones have to go first, and one that is used again. The
    time until a pod runs is only written down (-rP shows it): machines differ, and simulated instances are made at once."""
    cluster = divided.of()
    whole = {"name": "mig", "exactly": {"deviceClassName": "gpu.gpushare-agent"}}
    profiles = ("7g.40gb", "4g.20gb", "3g.20gb", "2g.10gb", "1g.5gb")
    cluster.apply(
        template("whole", "") | {"spec": {"spec": {"devices": {"requests": [whole]}}}},
        *(template(name_of(one), one) for one in profiles),
        namespace=namespace,
    )
    seen: dict[str, list[str]] = {"whole": [], "made": [], "used again": []}
    for profile in profiles:
        name = name_of(profile)
        for what, claim in (("whole", "whole"), ("made", name), ("used again", name)):
            begun = time.monotonic()
            cluster.start(namespace, claiming(cluster, "timed", claim))
            seen[what].append(f"{time.monotonic() - begun:.2f}")
            if what != "whole":
                assert divided.profiles(namespace) == {"timed/main": [profile]}
            cluster.delete_pods(namespace)
    sys.stdout.writelines(f"{what}: {', '.join(found)} s\n" for what, found in seen.items())


SPECS = {
    "gpu-simple-mig": [["3g.20gb"]],
    "gpu-multiple-mig": [["1g.5gb"], ["4g.20gb"]],
    "gpu-anymig": [["1g.5gb"]],
    "gpu-simple-mig-ts": [["1g.5gb"]],
}
"""Of tests/bats/specs: the profiles that its containers get, which the order of the places decides for the most part."""


@pytest.mark.parametrize("name", SPECS)
def test_specs_of_nvidias_suite(suite: Path, divided: Divided, namespace: str, name: str) -> None:
    cluster = divided.of()
    cluster.run("-n", namespace, "apply", "-f", str(suite / f"tests/bats/specs/{name}.yaml"))
    (pod,) = cluster.wait_for("its pod is there", lambda: cluster.pods(namespace))
    cluster.wait_phase(namespace, pod)
    found = divided.profiles(namespace)
    sys.stdout.write(f"{name}: {found}\n")
    assert len(found) == len(SPECS[name]) and all(len(one) == 1 for one in found.values())


def test_the_example_of_four_instances_on_one_gpu(suite: Path, divided: Divided) -> None:
    """gpu-test4: four pods, each with 1g, 1g, 2g and 3g of one GPU, which it fills."""
    cluster = divided.of()
    path = suite / "demo/specs/quickstart/v1/gpu-test4.yaml"
    try:
        cluster.run("apply", "-f", str(path))
        cluster.wait_for("its pods run", lambda: cluster.phases("gpu-test4") == ["Running"] * 4)
        profiles = divided.profiles("gpu-test4")
        assert sorted(one for found in profiles.values() for one in found) == sorted(
            ["1g.5gb", "1g.5gb", "2g.10gb", "3g.20gb"] * 4
        )
        parents = [{place[:40] for place in one.split(",")} for one in divided.places("gpu-test4").values()]
        assert all(len(one) == 1 for one in parents) and len(set.union(*parents)) == 4
    except DeadlineError as error:
        raise AssertionError(cluster.run("-n", "gpu-test4", "get", "events")) from error
    finally:
        cluster.run("delete", "-f", str(path), "--wait", "--timeout=60s", timeout_s=70)


def test_the_example_of_an_extended_resource(suite: Path, divided: Divided) -> None:
    """mig-1g-12gb, of an H100 NVL. Its class is newer than ours for the same resource, so the scheduler takes it."""
    cluster = divided.of(H100)
    text = (suite / "demo/specs/extended-resources/mig-1g-12gb.yaml").read_text(encoding="utf-8")
    changed = text.replace("device.driver == 'gpu.nvidia.com'", "device.driver == 'gpushare-agent'")
    assert changed != text, "of another version"
    namespace = "extended-resource-mig-1g12gb"
    try:
        cluster.run("apply", "-f", "-", stdin=changed)
        cluster.wait_phase(namespace, "mig-1g12gb-pod")
        assert divided.profiles(namespace) == {"mig-1g12gb-pod/cuda-container": ["1g.12gb"]}
        (claim,) = cluster.items("resourceclaims", "-n", namespace)
        (asked,) = claim["spec"]["devices"]["requests"]
        assert asked["exactly"]["deviceClassName"] == "mig-1g-12gb.gpu.nvidia.com"
        assert claim["metadata"]["annotations"]["resource.kubernetes.io/extended-resource-claim"] == "true"
    finally:
        cluster.run("delete", "-f", "-", "--wait", "--timeout=60s", stdin=changed, timeout_s=70)
