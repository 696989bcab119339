"""The whole agent on the NVML driver: the real nvidia-ml-py, on a scripted libnvidia-ml.so.1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpushare_agent.core.model.names import NVIDIA_GPU_RESOURCE
from gpushare_agent.sandbox.kubelet.container_config import parsed_answer
from tests.agent.support_agent import open_child, page_of_child, poll_until
from tests.gpus.support_mig import profile_lines
from tests.gpus.support_nvml import TWO_PAIRS, becomes
from tests.sandbox.support_sandbox import CORE, CORES, MEMORY, NodeUnderTest, container, limits_of, open_test_node, pod
from tests.settings.support_settings import run_program

FLAGS = (
    "--driver=nvml",
    "--isolation=none",
    "--sample-period-s=0.1",
    "--usage.idle-period-s=0",
    "--health.recovery-probes=1",
    "--health.recovery-period-s=0.05",
)
GPUS = TWO_PAIRS + "value utilization 0 1 1\n"
HANGS = GPUS + "hang_sample\n"
H100 = "NVIDIA H100 80GB HBM3"
LACKS = "call_error nvmlDeviceGetMemoryInfo 0 3\ncall_error nvmlDeviceGetMemoryInfo_v2 0 3\n"


async def test_a_node_whose_sampling_hangs_keeps_its_gpus(script: Path) -> None:
    """While usage cannot be sampled, a GPU that is lost goes alone, within moments, and comes back."""
    becomes(script, GPUS)
    async with open_test_node() as node, open_child(node, *FLAGS):
        everything = (4 * CORES, 4 * CORES)
        await node.wait_devices(CORE, *everything)
        becomes(script, HANGS)
        await poll_until(lambda: node.log_lines("usage_not_sampled"), "a sample that failed")
        becomes(script, HANGS + "error 1 15\n")
        await node.wait_devices(CORE, 4 * CORES, 3 * CORES)
        becomes(script, HANGS)
        await node.wait_devices(CORE, *everything)
        assert not node.log_lines("gpus_lost")
        becomes(script, GPUS)


async def test_gpus_without_memory_of_their_own_are_given_whole(script: Path) -> None:
    """As GB10: by cores, by NVIDIA's name and as replicas; a share, which is one of memory, is refused."""
    gpus = "".join(
        f"GPU {gpu} GPU-{digit * 8}-1111 {gpu} 0000000F:0{gpu}:00.0 0 2 NVIDIA GB10\n"
        f"call_error nvmlDeviceGetMemoryInfo {gpu} 3\ncall_error nvmlDeviceGetMemoryInfo_v2 {gpu} 3\n"
        for gpu, digit in enumerate("ab")
    )
    becomes(script, f"count 2\n{gpus}")
    async with (
        open_test_node() as node,
        open_child(node, *FLAGS, "--nvidia.enabled", "--nvidia.replicas=1=4", wait=False),
    ):
        await node.wait_allocatable(NVIDIA_GPU_RESOURCE, 5)
        await node.wait_allocatable(CORE, 200)
        await node.start_pods(pod("whole", container(cores=100)))
        await node.start_pods(pod("quarter", limits_of("main", {NVIDIA_GPU_RESOURCE: 1})))
        await node.wait_allocatable(CORE, 175)
        node.api.create_pod(pod("share", container(cores=30, blocks=4), nodeName=node.name))
        await node.wait_phase("share", "Failed")


async def test_memory_that_the_operator_set_is_shared(script: Path) -> None:
    """Of GB10, here one without minor number, bus ID and name: it has no node, so NVIDIA's runtime gives it by its UUID."""
    lacks = "".join(f"call_error nvmlDevice{name} 0 3\n" for name in ("GetMinorNumber", "GetPciInfo_v3", "GetName"))
    becomes(script, f"count 1\nGPU 0 GPU-aaaaaaaa-1111 0 0000000F:01:00.0 0 2 NVIDIA GB10\n{LACKS}{lacks}")
    async with open_test_node() as node, open_child(node, *FLAGS, "--resources.unified-memory-mib=98304"):
        await node.wait_allocatable(MEMORY, 384)
        await node.start_pods(pod("share", container(cores=30, blocks=4)))
        answers = [parsed_answer(record.response) for record in node.active_records()]
        annotation = await _annotated(node)
        inspected = await run_program("inspect", f"--query-port={_port(node)}")
    [visible] = [answer.envs["NVIDIA_VISIBLE_DEVICES"] for answer in answers if answer.envs]
    nodes = [device.host_path for answer in answers for device in answer.devices]
    assert visible == "GPU-aaaaaaaa-1111" and not any("-1" in node for node in nodes)
    assert (annotation["memory_mib"], annotation["host_memory"]) == (98304, "unified")
    assert "GPU 0: its memory is the host's" in inspected.out


@pytest.mark.parametrize(
    ("lines", "unified_mib", "what", "detail", "remedy"),
    [
        (
            "value addressing 0 2\nvalue numa_node 0 1\n",
            "",
            "gpu memory",
            "is a NUMA node of the host: malloc",
            "CDMM mode",
        ),
        (LACKS, "", "gpu memory", "the host's: malloc", "resources.unified_memory_mib"),
        (LACKS, "1024", "gpu memory", "number 0: its memory is the host's", "pods' memory limits"),
        (LACKS, "4194304", "gpu memory", "is 4194304, and the host has", "systemReserved"),
        ("call_error nvmlDeviceGetMinorNumber 0 3\n", "", "gpu", "names no device node", "nvidia-ctk"),
    ],
    ids=["NUMA mode", "GB10", "a size", "a size that no host has", "no device node"],
)
async def test_check_says_what_no_share_can_have(
    script: Path, lines: str, unified_mib: str, what: str, detail: str, remedy: str
) -> None:
    """Of the memory, in some cases with --resources.unified-memory-mib, and of the device node."""
    becomes(script, f"count 1\nGPU 0 GPU-aaaaaaaa-1111 0 0000000F:01:00.0 24576 2 NVIDIA GH200\n{lines}")
    memory = [f"--resources.unified-memory-mib={unified_mib}"] if unified_mib else []
    checked = await run_program("check", "--output=json", "--driver=nvml", "--isolation=none", *memory)
    [found] = [one for one in json.loads(checked.out)["findings"] if one["what"] == what]
    assert found["level"] == "warning" and detail in found["detail"] and remedy in found["cure"], found


async def test_a_name_of_other_bytes_costs_its_gpu_alone(script: Path) -> None:
    """It comes while the agent runs; the Event of the Node names the call."""
    becomes(script, GPUS)
    async with open_test_node() as node, open_child(node, *FLAGS, "--health.check-period-s=0.05") as child:
        await node.wait_allocatable(CORE, 4 * CORES)
        becomes(script, GPUS.replace("00000000:3C:00.0 24576 0 Tesla P40", "00000000:3C:00.0 24576 0 \udcf8\udc95"))
        await node.wait_allocatable(CORE, 3 * CORES)
        [line] = node.log_lines("gpu_unhealthy")
        assert "nvmlDeviceGetName" in line["reason"]
        becomes(script, GPUS)
        await node.wait_allocatable(CORE, 4 * CORES)
        assert child.returncode is None


def _port(node: NodeUnderTest) -> int:
    port: int = node.log_lines("web_listening")[-1]["port"]
    return port


async def _annotated(node: NodeUnderTest) -> dict[str, Any]:
    """The first GPU in the Node's annotation."""
    name, metadata = "gpushare-agent/gpus", lambda: node.api.node(node.name)["metadata"]
    await poll_until(lambda: name in metadata().get("annotations", {}), "the annotation")
    found: dict[str, Any] = json.loads(metadata()["annotations"][name])["gpus"][0]
    return found


@pytest.mark.parametrize(
    "refuses",
    [
        "driver 18\ninit 18\n",
        "driver 999\ninit 999\n",
        "".join(f"handle_error {gpu} 999\n" for gpu in range(4)),
        "".join(f"error {gpu} 17\n" for gpu in range(4)),
    ],
    ids=["driver upgraded", "no right to nvidiactl", "no right to any GPU", "blocked by the cgroup"],
)
async def test_a_driver_that_refuses_the_container_ends_it(script: Path, refuses: str) -> None:
    """The kubelet's liveness probe fails after some polls, with the reason, and the log has it once; a driver that answers
    again ends it all."""
    becomes(script, GPUS)
    async with open_test_node() as node, open_child(node, *FLAGS, "--health.check-period-s=0.05"):
        await node.wait_allocatable(CORE, 4 * CORES)
        assert await page_of_child(node, "/healthz") == (200, "ok\n")
        becomes(script, GPUS + refuses)
        await poll_until(lambda: node.log_lines("restart_needed"), "the end of its patience")
        (status, text), ready = await page_of_child(node, "/healthz"), await page_of_child(node, "/readyz")
        assert status == ready[0] == 503 and text in ready[1]
        assert "A new container may reach it" in text and "nvidia-smi" in text
        assert node.kubelet.devices.capacity()[CORE] == (4 * CORES, 0)
        becomes(script, GPUS)
        await node.wait_allocatable(CORE, 4 * CORES)
        assert await page_of_child(node, "/healthz") == (200, "ok\n")
        assert len(node.log_lines("restart_needed")) == 1


async def test_a_node_whose_gpus_have_not_joined_their_fabric_waits(script: Path) -> None:
    """The agent is not Ready and says why, in Event, metric and node report too; with one that has joined it is Ready, and
    the other is left out; nothing has to be restarted for it."""
    waits = "".join(f"fabric {gpu} 2 0 {'0' * 32} 0\n" for gpu in range(4))
    joined = f"fabric {{}} 3 0 {'1' * 32} 1\n"
    becomes(script, GPUS + waits)
    flags = (*FLAGS, "--health.check-period-s=0.05")
    async with open_test_node() as node, open_child(node, *flags, wait=False):
        await poll_until(lambda: node.log_lines("web_listening"), "the web port")
        await poll_until(lambda: node.log_lines("no_shares_possible"), "a look at the fabric")
        status, text = await page_of_child(node, "/readyz")
        assert status == 503 and "has not joined its NVLink fabric" in text and "802" in text
        _, metrics = await page_of_child(node, "/metrics")
        assert metrics.count("gpushare_gpu_fabric_joined{") == 4
        await poll_until(lambda: "NVLink fabric" in str(node.api.events()), "the Event")
        node.api.create_pod(pod("early", container(cores=100), nodeName=node.name))
        await node.wait_phase("early", "Failed")
        becomes(script, GPUS + joined.format(0) + waits.replace("fabric 0 2", "fabric 9 2"))
        await node.wait_allocatable(CORE, CORES)
        while await page_of_child(node, "/readyz") != (200, "ok\n"):
            pass  # it is looked at every two seconds
        await node.start_pods(pod("whole", container(cores=100)))


async def test_a_divided_gpu_on_demand_is_no_fault(script: Path) -> None:
    """With no instance yet and without the right to make some, the agent runs; `check` says what gives the right."""
    cards = "".join(f"GPU {n} GPU-{n} {n} 00000000:0{n}:00.0 81559 {1 - n} {H100}\n" for n in (0, 1))
    becomes(script, f"count 2\n{cards}" + profile_lines(0, H100, 81559))
    on_demand = (*FLAGS, "--mig.on-demand=all")
    async with open_test_node() as node, open_child(node, *on_demand):
        checked = await run_program("check", *node.arguments(*on_demand))
        becomes(script, script.read_text() + "rights config monitor\n")
        allowed = await run_program("check", *node.arguments(*on_demand))
    assert "component driver-from-host" in checked.out
    assert "no GPU" not in checked.out and "unhealthy" not in checked.out
    assert "mig-on-demand" not in allowed.out
