"""The embedded kubelet and scheduler with a DRA driver, compared with the calls that a real kubelet has made."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.dra.plugin import DraRegistration
from gpushare_agent.core.model.errors import NotFound, Rejected
from gpushare_agent.core.wire.k8s.io.kubelet.pkg.apis.dra import v1 as dra_v1
from gpushare_agent.sandbox.api.kinds import KINDS
from gpushare_agent.sandbox.api.validation import completed
from gpushare_agent.sandbox.behaviour import KubeletTimes
from gpushare_agent.sandbox.kubelet.pod_worker import PREPARE_FAILED
from gpushare_agent.sandbox.node import running_task
from tests.sandbox.support_sandbox import SHORT_TIMES, NodeUnderTest, limits_of, open_test_node, pod
from tests.sandbox.support_sandbox_cli import once

RECORDED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/dra/calls.json").read_text())
DRIVER, CLASS = "gpushare-agent", "gpu.gpushare-agent"
TIMES = replace(
    SHORT_TIMES, registry_poll_s=0.01, slice_wipe_s=0.0, unprepare_retry_s=0.01, claims_reconcile_s=0.05,
    prepare_retry_s=(3600.0, 3600.0),
)  # fmt: skip
RETRIED = replace(TIMES, prepare_retry_s=(0.01, 0.02))


@dataclass
class SmallDriver(dra_v1.DraPluginBase):
    """Prepares every claim, with a CDI spec for each, or fails with `error`."""

    cdi: Path
    error: str = ""
    request: str = "gpu"
    unprepare_errors: int = 0
    prepared: list[str] = field(default_factory=list)

    async def node_prepare_resources(
        self, message: dra_v1.NodePrepareResourcesRequest
    ) -> dra_v1.NodePrepareResourcesResponse:
        return dra_v1.NodePrepareResourcesResponse(claims={one.uid: self._prepare(one) for one in message.claims})

    def _prepare(self, claim: dra_v1.Claim) -> dra_v1.NodePrepareResourceResponse:
        if self.error:
            return dra_v1.NodePrepareResourceResponse(error=self.error)
        edits = {"env": [f"CLAIM_{claim.name.replace('-', '_')}=yes"]}
        spec = {"cdiVersion": "0.6.0", "kind": "test/claim", "devices": [{"name": claim.uid, "containerEdits": edits}]}
        self.cdi.mkdir(exist_ok=True)
        (self.cdi / f"{claim.uid}.json").write_text(json.dumps(spec))
        self.prepared.append(claim.uid)
        device = dra_v1.Device(
            request_names=[self.request], pool_name="p", device_name="gpu-0", cdi_device_ids=[f"test/claim={claim.uid}"]
        )
        return dra_v1.NodePrepareResourceResponse(devices=[device])

    async def node_unprepare_resources(
        self, message: dra_v1.NodeUnprepareResourcesRequest
    ) -> dra_v1.NodeUnprepareResourcesResponse:
        failing, self.unprepare_errors = bool(self.unprepare_errors), max(0, self.unprepare_errors - 1)
        answer = dra_v1.NodeUnprepareResourceResponse(error="busy" if failing else "")
        return dra_v1.NodeUnprepareResourcesResponse(claims={one.uid: answer for one in message.claims})


@asynccontextmanager
async def open_driver(node: NodeUnderTest, driver: SmallDriver) -> AsyncIterator[None]:
    registration = DraRegistration(
        instance="00000001", registry=node.paths.plugin_registry, plugin_path=node.paths.dra_plugin,
        services=[driver],
    )  # fmt: skip
    async with running_task("driver", registration.run):
        await node.kubelet.wait_for(lambda: "NotifyRegistrationStatus" in [name for name, _ in node.calls.dra_calls])
        yield


@asynccontextmanager
async def open_dra_node(times: KubeletTimes = TIMES) -> AsyncIterator[tuple[NodeUnderTest, SmallDriver]]:
    """With a driver, a class, a template and the claim `shared`, each of one device that many can have."""
    async with open_test_node(times=times) as node:
        driver = SmallDriver(node.paths.cdi)
        await node.kubelet.wait_for(lambda: node.kubelet.has_wiped_slices)
        publish(node)
        requests = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": CLASS}}]}}
        node.api.create("deviceclasses", {"metadata": {"name": CLASS}, "spec": {}})
        node.api.create("resourceclaimtemplates", {"metadata": {"name": "share-40"}, "spec": {"spec": requests}})
        node.api.create("resourceclaims", {"metadata": {"name": "shared"}, "spec": requests})
        async with open_driver(node, driver):
            yield node, driver


def publish(node: NodeUnderTest) -> None:
    device = {"name": "gpu-0", "allowMultipleAllocations": True, "capacity": {"cores": {"value": "100", "requestPolicy": {
        "default": "10", "validRange": {"min": "1"}}}}}  # fmt: skip
    pool = {"name": node.name, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": DRIVER, "nodeName": node.name, "pool": pool, "devices": [device]}
    node.api.create("resourceslices", {"metadata": {"name": "s"}, "spec": spec})


def claiming(name: str, *claims: dict[str, str], **extra: Any) -> dict[str, Any]:
    containers = [{"name": "c", "image": "x", "resources": {"claims": [{"name": one["name"]} for one in claims]}}]
    return pod(name, *containers, resourceClaims=list(claims), terminationGracePeriodSeconds=1, **extra)


FROM_TEMPLATE = {"name": "g", "resourceClaimTemplateName": "share-40"}
SHARED = {"name": "g", "resourceClaimName": "shared"}


def has_ended(node: NodeUnderTest, *claims: str) -> Callable[[], bool]:
    """The kubelet has no record of a claim whose name begins so."""
    return lambda: not any(record.name.startswith(claims) for record in node.kubelet.claims.values())


async def test_the_calls_are_those_of_a_real_kubelet() -> None:
    """Over a pod's start and end, a container's restart, shared claims, a kubelet's restart and a forced deletion."""
    steps = iter(RECORDED["steps"])
    async with open_dra_node() as (node, _driver):

        def check() -> None:
            step = next(steps)
            made = [
                [name, [re.sub(r"-[a-z0-9]{5}$", "", one) for one in claims]] for name, claims in node.calls.dra_calls
            ]
            assert made == step["calls"], step["done"]
            node.calls.dra_calls.clear()

        async def run(name: str, *claims: dict[str, str], **extra: Any) -> None:
            await node.start_pods(claiming(name, *claims, **extra))

        async def delete(*names: str) -> None:
            for name in names:
                node.api.delete_pod("default", name)
            for name in names:
                await node.wait_gone(name)

        check()
        await run("one", FROM_TEMPLATE)
        check()
        await delete("one")
        check()
        await run("again", FROM_TEMPLATE)
        node.kill_container("again", "c")
        await node.kubelet.wait_for(lambda: node.restarts("again", "c") == 1)
        check()
        await delete("again")
        check()
        ends = claiming(
            "ends", FROM_TEMPLATE, restartPolicy="Never", annotations={"sandbox.gpushare/run-seconds": "0.01"}
        )
        node.api.create_pod(ends)
        await node.wait_phase("ends", "Succeeded")
        await node.kubelet.wait_for(lambda: [one["metadata"]["name"] for one in claims_of(node)] == ["shared"])
        check()
        await run("first", SHARED)
        check()
        await run("second", SHARED)
        check()
        await delete("first")
        check()
        await node.kubelet.restart()
        await node.kubelet.wait_for(lambda: len(node.calls.dra_calls) == 2 and not node.api.store.all("resourceslices"))
        check()
        publish(node)
        await run("third", SHARED)
        check()
        await delete("second", "third")
        check()
        await run(
            "both", {"name": "a", "resourceClaimTemplateName": "share-40"}, {"name": "b", "resourceClaimName": "shared"}
        )
        check()
        node.api.delete_pod("default", "both", grace_period_s=0)
        await node.kubelet.wait_for(has_ended(node, "both", "shared"))
        check()
        assert next(steps, None) is None and not node.kubelet.claims


def claims_of(node: NodeUnderTest) -> list[dict[str, Any]]:
    return node.api.store.all("resourceclaims")


async def test_a_claim_of_a_template_is_the_pods_and_reaches_its_container() -> None:
    async with open_dra_node() as (node, _driver):
        node.api.create_pod(claiming("p", FROM_TEMPLATE))
        raw = await node.wait_phase("p", "Running")
        (claim,) = [one for one in claims_of(node) if one["metadata"]["name"] != "shared"]
        metadata = claim["metadata"]
        assert re.fullmatch(r"p-g-[a-z0-9]{5}", metadata["name"])
        assert metadata["annotations"]["resource.kubernetes.io/pod-claim-name"] == "g"
        assert metadata["ownerReferences"][0]["uid"] == raw["metadata"]["uid"]
        assert raw["status"]["resourceClaimStatuses"] == [{"name": "g", "resourceClaimName": metadata["name"]}]
        assert claim["status"]["reservedFor"] == [{"resource": "pods", "name": "p", "uid": raw["metadata"]["uid"]}]
        assert node.container_of("p", "c").env[f"CLAIM_{metadata['name'].replace('-', '_')}"] == "yes"


async def test_a_failed_prepare_waits_for_a_change_of_the_pod() -> None:
    """An annotation is one, the kubelet's own status is none; the text is in an Event."""
    async with open_dra_node() as (node, driver):
        driver.error = "the GPU is away"
        node.api.create_pod(claiming("p", SHARED))
        await node.kubelet.wait_for(lambda: node.messages(PREPARE_FAILED))
        assert node.messages(PREPARE_FAILED)[0] == (
            "Failed to prepare dynamic resources: prepare dynamic resources: NodePrepareResources failed for ResourceClaim"
            " shared: the GPU is away"
        )
        driver.error = ""
        raw = node.api.pod("default", "p")
        assert not driver.prepared and raw["status"]["phase"] == "Pending"
        annotated = {**raw["metadata"], "annotations": {"gpushare-agent/claims-retry-at": "1"}}
        node.api.store.replace("pods", {**raw, "metadata": annotated})
        await node.wait_phase("p", "Running")


async def test_a_failed_prepare_is_tried_again_after_a_while() -> None:
    async with open_dra_node(RETRIED) as (node, driver):
        driver.error = "the GPU is away"
        node.api.create_pod(claiming("p", SHARED))
        await node.kubelet.wait_for(lambda: sum(name.startswith("NodeP") for name, _ in node.calls.dra_calls) > 2)
        driver.error = ""
        await node.wait_phase("p", "Running")


async def test_a_pod_stays_until_its_claims_are_unprepared() -> None:
    async with open_dra_node() as (node, driver):
        await node.start_pods(claiming("p", SHARED))
        driver.unprepare_errors = 3
        await node.remove_pod("p")
        assert driver.unprepare_errors == 0 and not node.kubelet.claims
        await node.kubelet.wait_for(lambda: not claims_of(node)[0]["status"])


async def test_a_pod_that_ended_while_the_kubelet_was_down_is_unprepared() -> None:
    async with open_dra_node() as (node, _driver):
        await node.start_pods(claiming("p", SHARED))
        await node.kubelet.stop()
        node.api.delete_pod("default", "p", grace_period_s=0)
        await node.kubelet.start()
        await node.kubelet.wait_for(has_ended(node, "shared"))


async def test_a_pod_waits_for_a_share_and_for_its_claim() -> None:
    """Ten shares of ten cores are all there are; a claim that does not exist is named."""
    async with open_dra_node() as (node, _driver):
        await node.start_pods(*(claiming(f"p{number}", FROM_TEMPLATE) for number in range(10)))
        node.api.create_pod(claiming("p10", FROM_TEMPLATE))
        await node.kubelet.wait_for(lambda: "1 cannot allocate all claims" in str(node.condition_of("p10")))
        node.api.create_pod(claiming("other", {"name": "g", "resourceClaimName": "none"}))
        await node.kubelet.wait_for(lambda: 'resourceclaim "none" not found' in str(node.condition_of("other")))
        node.api.delete_pod("default", "p3")
        await node.wait_phase("p10", "Running")


async def test_a_claim_in_use_is_deleted_with_its_last_pod() -> None:
    async with open_dra_node() as (node, _driver):
        await node.start_pods(claiming("p", SHARED))
        node.api.delete("resourceclaims", ("default", "shared"))
        assert "deletionTimestamp" in claims_of(node)[0]["metadata"]
        node.api.delete_pod("default", "p")
        await node.kubelet.wait_for(lambda: not claims_of(node))
        with pytest.raises(NotFound):
            node.api.delete("resourceclaims", ("default", "shared"))


def gpus_of(document: dict[str, Any]) -> dict[str, list[list[int]]]:
    """The indexes of the GPUs of each pod's containers."""
    return {one["name"]: [c["gpus"] for c in one["containers"]] for one in document["pods"]}


async def test_the_agent_serves_claims_in_the_sandbox(short_dir: Path) -> None:
    """The real agent: registered, slice published, claims prepared, and what they use is within their limits."""
    document = await once(short_dir / "s", "--dra", "--gpus", "4")
    assert gpus_of(document) == {"share": [[0], [0]], "whole": [[1]], "two-gpus": [[2, 3]]}
    gpus = document["node"]["gpus"]
    assert [gpu["cores"]["allocated"] for gpu in gpus] == [40, 100, 100, 100]
    assert [gpu["memory"]["allocated_bytes"] >> 20 for gpu in gpus] == [8192, 24576, 24576, 24576]
    assert {gpu["is_healthy"] for gpu in gpus} == {True}
    shared = next(one for one in document["node"]["containers"] if one["pod"] == "share")
    assert (shared["cores"], shared["memory_bytes"] >> 20) == (40, 8192)
    assert 0 < shared["gpus"][0]["usage"]["sm_ratio"] <= 0.4


async def test_instances_are_made_on_demand_in_the_sandbox(short_dir: Path) -> None:
    """By a claim for two profiles of one GPU, by a plain pod, and a whole GPU next to them: the real agent makes them."""
    document = await once(short_dir / "s", "--mig", "--gpus", "2")
    assert gpus_of(document) == {"small-and-large": [[0], [0]], "plain": [[0]], "whole": [[1]]}
    gpus = document["node"]["gpus"]
    found = [(gpu["mig"]["profile"], gpu["is_healthy"]) for gpu in gpus if gpu.get("mig")]
    assert sorted(found) == [("1g.10gb", True), ("1g.10gb", True), ("3g.40gb", True)]
    assert all(gpu["usage"]["memory_used_bytes"] for gpu in gpus)


async def test_a_class_stands_for_an_extended_resource() -> None:
    """A pod without a claim gets one of the scheduler's; only the container that asks has the device; the claim goes with
    the pod."""
    resource = "example.com/part"
    async with open_dra_node() as (node, driver):
        driver.request = "container-1-request-1"
        node.api.create("deviceclasses", {"metadata": {"name": "part"}, "spec": {"extendedResourceName": resource}})

        def asking(name: str, count: int) -> dict[str, Any]:
            plain, asks = limits_of("plain", {}), limits_of("asks", {resource: count, "cpu": 1})
            return pod(name, plain, asks, terminationGracePeriodSeconds=1)

        node.api.create_pod(asking("p", 2))
        await node.kubelet.wait_for(lambda: "cannot allocate all claims" in str(node.condition_of("p")))
        assert [one["metadata"]["name"] for one in claims_of(node)] == ["shared"]
        await node.remove_pod("p")
        await node.start_pods(asking("q", 1))
        (claim,) = [one for one in claims_of(node) if one["metadata"]["name"] != "shared"]
        assert claim["metadata"]["name"].startswith("q-extended-resources-")
        assert claim["metadata"]["annotations"] == {"resource.kubernetes.io/extended-resource-claim": "true"}
        assert [one["name"] for one in claim["metadata"]["ownerReferences"]] == ["q"]
        exactly = {"deviceClassName": "part", "allocationMode": "ExactCount", "count": 1}
        assert claim["spec"]["devices"]["requests"] == [{"name": "container-1-request-1", "exactly": exactly}]
        assert node.api.pod("default", "q")["status"]["extendedResourceClaimStatus"] == {
            "resourceClaimName": claim["metadata"]["name"],
            "requestMappings": [
                {"containerName": "asks", "resourceName": resource, "requestName": "container-1-request-1"}
            ],
        }
        name = claim["metadata"]["name"].replace("-", "_")
        runs = [node.container_of("q", container) for container in ("plain", "asks")]
        assert [run.env.get(f"CLAIM_{name}") for run in runs] == [None, "yes"]
        await node.remove_pod("q")
        await node.kubelet.wait_for(lambda: [one["metadata"]["name"] for one in claims_of(node)] == ["shared"])
        assert not node.kubelet.claims


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"devices": [{"name": "a"}], "sharedCounters": [{"name": "s", "counters": {}}]}, "only one of"),
        ({"devices": [{"name": f"d-{number}"} for number in range(129)]}, "at most 128"),
        ({"devices": [{"name": f"d-{number}", "consumesCounters": [{}]} for number in range(65)]}, "at most 64"),
        ({"devices": [{"name": "d", "consumesCounters": [{}, {}, {}]}]}, "at most 2"),
        ({"sharedCounters": [{"name": f"s-{number}", "counters": {}} for number in range(9)]}, "at most 8"),
        ({"sharedCounters": [{"name": "s", "counters": {f"c-{n}": {"value": "1"} for n in range(33)}}]}, "at most 32"),
    ],
)
def test_slices_have_the_limits_of_the_api(spec: dict[str, Any], problem: str) -> None:
    with pytest.raises(Rejected, match=problem):
        completed(KINDS["resourceslices"], {"metadata": {"name": "s"}, "spec": {"driver": DRIVER, **spec}})
