"""The real libraries in the containers of ResourceClaims: a claim's limits are for all that use it together.

A share of 30 cores and 2,560 MiB; a program's context takes 300 MiB, so one gets 8 blocks of 256 MiB, and where another
of the claim has 4 and its context, 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.real_isolation.support_isolation import Built, IsolationNode, open_node

pytestmark = pytest.mark.isolation

TAKE = "alloc:alloc:256:20"
LIFTING = {
    "CUDA_DEVICE_MEMORY_LIMIT_0": "20000m",
    "CUDA_DEVICE_SM_LIMIT": "100",
    "CUDA_DEVICE_SM_LIMIT_0": "100",
    "CUDA_REDIRECT": "libcuda.so.1",
    "GPU_CORE_UTILIZATION_POLICY": "disable",
    "NVIDIA_GPU_MEMORY_LIMIT": "20000",
}
"""Of a pod's spec, which the runtime applies before the claim's edits."""


def claim(**metadata: Any) -> dict[str, Any]:
    capacity = {"requests": {"cores": "30", "memory": "2560Mi"}}
    request = {"name": "gpu", "exactly": {"deviceClassName": "gpu.gpushare-agent", "capacity": capacity}}
    return {"apiVersion": "resource.k8s.io/v1", "metadata": metadata, "spec": {"devices": {"requests": [request]}}}


def pod(name: str, source: str, *containers: str) -> dict[str, Any]:
    env = [{"name": name, "value": value} for name, value in LIFTING.items()]
    uses = {"claims": [{"name": "g"}]}
    made = [{"name": one, "image": "program", "env": env, "resources": uses} for one in containers]
    spec = {"resourceClaims": [{"name": "g", source: "shared"}], "containers": made}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def of_template(name: str, *containers: str) -> list[dict[str, Any]]:
    template = claim(name="shared") | {"kind": "ResourceClaimTemplate"}
    return [template | {"spec": {"spec": template["spec"]}}, pod(name, "resourceClaimTemplateName", *containers)]


@pytest.fixture(params=["vcuda", "driver"])
def node(built: Built, request: pytest.FixtureRequest) -> Iterator[IsolationNode]:
    """Of isolations that limit containers together."""
    if reason := built.why_not(request.param):
        pytest.skip(reason)
    driver = {"driver_version": "615.12.01"} if request.param == "driver" else {}
    with open_node(built, request.param, "--dra", gpus=1, **driver) as node:
        yield node


def blocks_beside(node: IsolationNode, first: tuple[str, str], second: tuple[str, str]) -> tuple[int, int]:
    """What a program takes, and what one in another container does while it has 4 blocks."""
    alone = node.run(first[0], TAKE, container=first[1])
    with node.start(first[0], "alloc:alloc:256:4", "wait", container=first[1]) as holding:
        assert holding.wait_for("wait"), holding.error
        beside = node.run(second[0], TAKE, container=second[1])
    assert (alone.code, beside.code) == (0, 0), alone.error + beside.error
    return alone.step("alloc")["blocks"], beside.step("alloc")["blocks"]


def test_two_containers_of_a_pod_have_the_claims_memory_together(node: IsolationNode) -> None:
    """The variables of the spec lift nothing. After a kill of the agent the same."""
    node.create(*of_template("web", "a", "b"))
    assert blocks_beside(node, ("web", "a"), ("web", "b")) == (8, 3)
    node.kill_agent()
    assert blocks_beside(node, ("web", "b"), ("web", "a")) == (8, 3)


def test_two_pods_have_the_claims_memory_together(node: IsolationNode, request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["node"] == "driver":
        pytest.skip("pods have no cgroup in common: such a claim is refused")
    node.create(claim(name="shared") | {"kind": "ResourceClaim"}, pod("web", "resourceClaimName", "main"))
    node.create(pod("side", "resourceClaimName", "main"))
    assert blocks_beside(node, ("web", "main"), ("side", "main")) == (8, 3)


def test_two_containers_have_the_claims_compute_together(node: IsolationNode, request: pytest.FixtureRequest) -> None:
    """Of 1,000 kernels a second."""
    if request.node.callspec.params["node"] == "driver":
        pytest.skip("the driver limits no compute")
    node.create(*of_template("web", "a", "b"))
    launch = ("web", "wait", "launch:kernel:8")
    with node.start(*launch, container="a") as first, node.start(*launch, container="b") as second:
        assert [first.wait_for("wait"), second.wait_for("wait")] == [True, True]
        first.go_on()
        second.go_on()
        rates = [program.outcome().step("launch")["rate"] for program in (first, second)]
    assert sum(rates) < 500


def test_under_the_open_kernel_modules_vcuda_limits_a_claim_of_one_container(built: Built) -> None:
    """The driver lists a container's own processes alone, so each of two would have all of the memory (measured: 8 and 8
    blocks): such a claim is refused."""
    if reason := built.why_not("vcuda"):
        pytest.skip(reason)
    with open_node(built, "vcuda", "--dra", gpus=1, pids="open570") as node:
        node.create(*of_template("web", "a"))
        assert node.run("web", TAKE, container="a").step("alloc")["blocks"] == 8
