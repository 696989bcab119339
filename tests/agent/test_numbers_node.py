"""GPUs that the driver counts otherwise after a boot: the whole agent on scripted NVML, by claims and by device plugins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpushare_agent.core.claims.claim import DRIVER
from gpushare_agent.core.kit.grpc_client import UnixChannel
from gpushare_agent.core.wire.k8s.io.kubelet.pkg.apis.dra import v1 as dra_v1
from gpushare_agent.sandbox.kubelet.container_config import parsed_answer
from tests.agent.support_agent import open_child, poll_until
from tests.gpus.support_nvml import becomes
from tests.sandbox.support_sandbox import CORE, MEMORY, NodeUnderTest, limits_of, open_test_node, pod
from tests.support_deadline import DEADLINE_S

FLAGS = (
    "--driver=nvml",
    "--isolation=none",
    "--device-list-strategy=device-nodes,envvar",
    "--health.recovery-probes=1",
    "--health.recovery-period-s=0.05",
)
A = ("GPU-aaaaaaaa-0000-4000-8000-000000000001", "00000000:3B:00.0 24576 2 NVIDIA A10")
H = ("GPU-bbbbbbbb-0000-4000-8000-000000000002", "00000000:AF:00.0 81559 2 NVIDIA H100 80GB HBM3")
X = ("GPU-cccccccc-0000-4000-8000-000000000003", "00000000:3B:00.0 24576 2 NVIDIA A10")


def boots(script: Path, *gpus: tuple[tuple[str, str], int]) -> None:
    """The driver shows these GPUs, each with its minor, in this order."""
    lines = [f"GPU {index} {uuid} {minor} {rest}\n" for index, ((uuid, rest), minor) in enumerate(gpus)]
    becomes(script, f"count {len(gpus)}\n" + "".join(lines))


def make_templates(node: NodeUnderTest, **expressions: str) -> None:
    """Of whole GPUs, by name; the expression selects them."""
    selector = {"cel": {"expression": f"device.driver == '{DRIVER}'"}}
    node.api.create("deviceclasses", {"metadata": {"name": "gpu"}, "spec": {"selectors": [selector]}})
    for name, expression in expressions.items():
        exactly = {"deviceClassName": "gpu", "selectors": [{"cel": {"expression": expression}}]}
        spec = {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
        node.api.create("resourceclaimtemplates", {"metadata": {"name": name}, "spec": {"spec": spec}})


def claiming(name: str, template: str) -> dict[str, Any]:
    one = {"name": "c", "image": "x", "resources": {"claims": [{"name": "g"}]}}
    claims = [{"name": "g", "resourceClaimTemplateName": template}]
    return pod(name, one, resourceClaims=claims, terminationGracePeriodSeconds=0)


async def prepare_again(node: NodeUnderTest) -> dict[str, tuple[str, list[str]]]:
    """The kubelet's call after its own restart, by pod: the error, and the nodes that the runtime gives then."""
    # Those of agents that were killed stay for a while.
    socket = max(node.paths.dra_plugin.glob("dra-*.sock"), key=lambda path: path.stat().st_mtime_ns)
    refs = {
        raw["metadata"]["ownerReferences"][0]["name"]: raw["metadata"] for raw in node.api.store.all("resourceclaims")
    }
    claims = [dra_v1.Claim(namespace="default", name=one["name"], uid=one["uid"]) for one in refs.values()]
    channel = UnixChannel(socket)
    try:
        answer = await channel.unary(
            "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources",
            dra_v1.NodePrepareResourcesRequest(claims=claims), dra_v1.NodePrepareResourcesResponse,
            timeout_s=DEADLINE_S,
        )  # fmt: skip
    finally:
        channel.close()
    return {name: (answer.claims[one["uid"]].error, nodes_of(node, one["uid"])) for name, one in refs.items()}


def nodes_of(node: NodeUnderTest, uid: str) -> list[str]:
    path = node.paths.cdi / f"gpushare-agent-claim-{uid}.json"
    devices = json.loads(path.read_text())["devices"] if path.exists() else []
    return [one["path"] for device in devices for one in device["containerEdits"]["deviceNodes"]]


def offered(node: NodeUnderTest) -> set[str]:
    return {one["name"] for raw in node.api.store.all("resourceslices") for one in raw["spec"]["devices"]}


def claimed(node: NodeUnderTest) -> dict[str, str]:
    """The device of each pod's claim."""
    return {
        raw["metadata"]["ownerReferences"][0]["name"]: raw["status"]["allocation"]["devices"]["results"][0]["device"]
        for raw in node.api.store.all("resourceclaims")
        if raw.get("status", {}).get("allocation")
    }


async def test_a_claim_has_its_own_gpu_or_none_after_a_boot(script: Path) -> None:
    """GPUs are enumerated otherwise, have each other's minors, drop out, or are replaced."""
    boots(script, (A, 0), (H, 1))
    model = "device.attributes['gpushare-agent'].productName.startsWith('NVIDIA {}')"
    flags = (*FLAGS, "--dra.gpus=all")
    async with open_test_node() as node:
        make_templates(node, a10=model.format("A10"), h100=model.format("H100"))
        async with open_child(node, *flags, wait=False):
            await node.start_pods(claiming("first", "a10"))
            assert claimed(node) == {"first": A[0].replace("GPU-", "gpu-")}
        # Allocated while the agent is away, by the names of before.
        node.api.create_pod(claiming("second", "h100"))
        await poll_until(lambda: len(claimed(node)) == 2, "the scheduler's choice")
        boots(script, (H, 0), (A, 1))
        async with open_child(node, *flags, wait=False):
            await node.wait_phase("second", "Running")
            assert await prepare_again(node) == {"first": ("", ["/dev/nvidia1"]), "second": ("", ["/dev/nvidia0"])}
        boots(script, (H, 1))
        async with open_child(node, *flags, wait=False):
            await poll_until(lambda: len(node.log_lines("dra_driver_registered")) == 3, "the driver")
            found = await prepare_again(node)
            assert found["second"] == ("", ["/dev/nvidia1"]) and found["first"][1] == []
            assert A[0] in found["first"][0] and "delete the pod" in found["first"][0]
        boots(script, (X, 0), (H, 1))
        async with open_child(node, *flags, wait=False):
            await poll_until(lambda: len(node.log_lines("dra_driver_registered")) == 4, "the driver")
            assert (await prepare_again(node))["first"][0] == found["first"][0]
            await node.remove_pod("first")
            # Before that the scheduler may choose the GPU that is gone.
            await poll_until(
                lambda: offered(node) == {X[0].replace("GPU-", "gpu-"), H[0].replace("GPU-", "gpu-")}, "slice"
            )
            await node.start_pods(claiming("third", "a10"))
            assert (await prepare_again(node))["third"] == ("", ["/dev/nvidia0"])


async def test_a_container_restarts_with_its_own_gpu_alone(script: Path) -> None:
    """The kubelet gives it the answer of before the boot again."""
    boots(script, (A, 0), (H, 1))
    async with open_test_node() as node:
        async with open_child(node, *FLAGS):
            await node.start_pods(pod("p", limits_of("main", {CORE: 10, MEMORY: 4})))
        boots(script, (A, 1), (H, 0))

        async with open_child(node, *FLAGS):
            node.kill_container("p")
            await node.wait_until(lambda: node.waiting("p"), "the refusal")
            message = node.waiting("p")["message"]
            assert "other numbers than /dev/nvidia" in message and "Delete the pod" in message and "GPU GPU-" in message
        boots(script, (A, 0), (H, 1))
        async with open_child(node, *FLAGS):
            await node.wait_until(lambda: "running" in node.container_status("p")["state"], "its own GPU")


async def test_an_answer_by_index_has_the_drivers_index_of_now(script: Path) -> None:
    """A GPU drops out while the agent runs, and NVML counts the others again."""
    boots(script, (A, 0), (H, 1))
    flags = ("--nvidia.enabled=true", "--nvidia.device-ids=index", "--device-list-strategy=envvar")
    async with open_test_node() as node, open_child(node, *FLAGS, *flags):
        boots(script, (H, 1))
        await node.wait_devices("nvidia.com/gpu", 2, 1)
        node.api.create_pod(pod("p", limits_of("main", {"nvidia.com/gpu": 1})))
        uid = (await node.wait_phase("p", "Running"))["metadata"]["uid"]
        (record,) = node.kubelet.devices.records.of_container(uid, "main").values()
        assert parsed_answer(record.response).envs["NVIDIA_VISIBLE_DEVICES"] == "0"
