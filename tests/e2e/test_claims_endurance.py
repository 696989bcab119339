"""As tests/e2e/test_endurance.py, of pods with ResourceClaims: under hami-core, whose files would show what is left."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, DeadlineError, KubectlError, Object
from tests.e2e.installation import HAMI_CORE, Installation, is_ready, with_variables
from tests.e2e.test_claims import DRIVER, request
from tests.e2e.test_endurance import (
    FORGETFUL,
    LABEL,
    MANY_LOGS,
    SHOW_GPUS,
    Seen,
    check_capacity,
    endure,
    left_on_the_node,
    minutes_of,
)

pytestmark = pytest.mark.e2e
GPUS = 7
"""For claims; the last of the eight stays with the device plugins."""
FILES = "/var/run/cdi/gpushare-agent-claim-* /var/lib/gpushare-agent/claims/*"
DIFFERENT = {"constraints": [{"distinctAttribute": f"{DRIVER}/uuid"}]}
TEMPLATES = {
    "small": [request(cores=5, memory="256Mi")],
    "medium": [request(cores=20, memory="2Gi")],
    "large": [request(cores=50, memory="5Gi")],
    "memory": [request(cores=0, memory="1Gi")],
    "whole": [request()],
    "two": [request(cores=10, memory="1Gi", count=2)],
    "pair": [request("a", cores=30, memory="1Gi"), request("b", cores=10, memory="512Mi")],
}


@pytest.fixture
def claiming(installation: Installation) -> Installation:
    """Skips where the API server has no claims."""
    try:
        installation.cluster.run("get", "resourceslices.v1.resource.k8s.io")
    except KubectlError:
        pytest.skip("this cluster has no resource.k8s.io/v1")
    variables = FORGETFUL | {"GPUSHARE_DRA__GPUS": ",".join(map(str, range(GPUS)))}
    installation.install(components=["components/dra"], patches=[HAMI_CORE, with_variables(variables)])
    return installation


def test_pods_with_claims_come_and_go_under_faults(
    cluster: Cluster,
    claiming: Installation,
    namespace: str,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No GPU over its capacity, no container with another GPU than its claim's, no pod rejected, no file left."""
    minutes = minutes_of(request)
    for name, requests in TEMPLATES.items():
        devices: dict[str, Any] = {"requests": requests, **(DIFFERENT if name == "pair" else {})}
        cluster.apply(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaimTemplate",
                "metadata": {"name": name},
                "spec": {"spec": {"devices": devices}},
            },
            namespace=namespace,
        )
    with capsys.disabled():
        seen = endure(cluster, claiming, namespace, minutes, pod_with_claim, compare)
    assert not seen.rejected
    cluster.wait_for("no file is left on the node", lambda: left_on_the_node(claiming) == [])
    assert claiming.exec("sh", "-c", f"ls -d {FILES} 2>/dev/null || true").split() == []


def pod_with_claim(cluster: Cluster, name: str, chance: random.Random) -> Object:
    """One container; of a claim with two requests sometimes two, with one each: HAMi-core keeps no share of several."""
    template = chance.choice(sorted(TEMPLATES))
    uses = [{"request": "a"}, {"request": "b"}] if template == "pair" and chance.random() < 0.5 else [{}]
    containers = []
    for index, use in enumerate(uses):
        container = cluster.container(name=f"main-{index}", command=SHOW_GPUS)
        container["resources"] = {"claims": [{"name": "gpu", **use}]}
        containers.append(container)
    source = {"name": "gpu", "resourceClaimTemplateName": template}
    pod = cluster.pod_of(name, *containers, resourceClaims=[source])
    pod["metadata"]["labels"] = dict([LABEL.split("=")])
    return pod


def compare(cluster: Cluster, installed: Installation, namespace: str, seen: Seen) -> None:
    """What the scheduler allocated, what the agent has booked, and what the containers see."""
    if not any(is_ready(pod) for pod in installed.agents().values()):
        return
    try:
        view = installed.view()
        claims = cluster.read(f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims")["items"]
        pods = cluster.pods(namespace)
        shown = cluster.run("logs", "-n", namespace, "-l", LABEL, "-c", "main-0", "--prefix", "--tail=1", *MANY_LOGS)
    except (KubectlError, DeadlineError):  # the agent was killed meanwhile
        return
    seen.snapshots += 1
    check_capacity(view, seen)
    uuids = {f"gpu-{gpu['index']}": gpu["uuid"] for gpu in view["gpus"]}
    by_pod = {
        user["name"]: {uuids[one["device"]]: one["request"] for one in allocation["devices"]["results"]}
        for claim in claims
        if (allocation := claim.get("status", {}).get("allocation"))
        for user in claim["status"].get("reservedFor", [])
    }
    environments = dict(re.findall(r"^\[pod/(\S+)/main-0\] gpus=(\S*)$", shown, flags=re.M))
    for pod in environments.keys() & by_pod.keys() & pods.keys():
        seen.compared += 1
        [use] = pods[pod]["spec"]["containers"][0]["resources"]["claims"]
        given = {uuid for uuid, request in by_pod[pod].items() if use.get("request", request) == request}
        if set(environments[pod].split(",")) != given:
            seen.faults.append(f"{pod} sees {environments[pod]}, its claim gives it {sorted(given)}")
