"""The benchmark's node: a state directory, an API server, the lean kubelet, and the agent that serves them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from bench.agent import BenchAgent
from bench.containers import Containers
from bench.kubelet import BenchKubelet
from bench.pods import CONTAINER, FOREIGN_RESOURCE, NAMESPACE, BenchPod, bench_pod, device, manifest, running_status
from gpushare_agent.agent.gpus.simulated.driver import GPUS_PER_NUMA_NODE, simulated_uuid
from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.names import CORES_PER_GPU, VCORE_RESOURCE, VMEMORY_RESOURCE, device_id
from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from gpushare_agent.sandbox.state_directory import NodePaths

NODE_NAME = "bench"
GPUS, GPU_MEMORY_MIB, BLOCK_MIB = 8, 81920, 256
BLOCKS_PER_GPU = GPU_MEMORY_MIB // BLOCK_MIB
FIRST_PID, PROCESSES = 200_000, 20
RESOURCES = (VCORE_RESOURCE, VMEMORY_RESOURCE)
PODS, POD_CORES, POD_BLOCKS, POD_FOREIGN = 100, 5, 20, 25
"""100 pods with 50 IDs each: 5,000 listed, with 300 cores and 560 memory blocks left to offer."""
AGED_S = 10.0
"""A younger kubelet is asked about every pod again half a minute later, because it may still be admitting them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchNode:
    state: Path
    api: EmbeddedApiServer
    kubelet: BenchKubelet
    agent: BenchAgent

    async def wait_registered(self, timeout_s: float = 20.0, resources: tuple[str, ...] = RESOURCES) -> None:
        """Until their plugins are registered and have sent their lists. Raises RuntimeError with the agent's log."""
        try:
            await self.kubelet.wait(resources, timeout_s)
        except TimeoutError:
            text = f"the agent is not registered after {timeout_s:g} s; its log:\n{self.agent.log_tail()}"
            raise RuntimeError(text) from None

    async def start_agent(self, timeout_s: float = 20.0) -> None:
        """Returns when it is ready and its first comparison with the kubelet is over."""
        await self.agent.start()
        await self.agent.wait_ready()
        await self.wait_registered()
        await asyncio.sleep(0.3)
        await self.kubelet.wait_quiet(0.3, timeout_s)

    def served(self) -> int:
        """How many containers have a vDevice socket."""
        return len(list(NodePaths(state=self.state).virtual_manager.glob("*/*/vcuda.sock")))

    def create(self, pod: BenchPod) -> None:
        """In the API server only; the agent sees it in its watch."""
        pod.raw = self.api.create_pod(manifest(pod, NODE_NAME), namespace=NAMESPACE)

    def delete(self, pod: BenchPod) -> None:
        self.kubelet.remove(pod.name)
        self.api.delete_pod(NAMESPACE, pod.name, grace_period_s=0)

    def run(self, pod: BenchPod, container_id: str, cgroup_text: str) -> None:
        """The container runs by the pod's status, and this process is in it by what the agent finds in its /proc."""
        self.api.set_pod_status(NAMESPACE, pod.name, running_status(container_id))
        own = self.state / "proc" / str(os.getpid())
        own.mkdir(parents=True, exist_ok=True)
        (own / "cgroup").write_text(cgroup_text)

    def fill(
        self,
        pods: int = PODS,
        cores: int = POD_CORES,
        blocks: int = POD_BLOCKS,
        gpus: int = GPUS,
        foreign: int = POD_FOREIGN,
    ) -> None:
        """The 100 pods with 5,000 IDs, spread over the GPUs in turn; or others. Each has a container with 20
        processes; `foreign` IDs are of another device plugin."""
        containers = Containers(self.state / "cgroup")
        left = {gpu: [0, 0] for gpu in range(gpus)}
        for number in range(pods):
            pod = bench_pod(f"filled-{number:03d}", cores, blocks)
            gpu = number % gpus
            uuid, numa = simulated_uuid(NODE_NAME, gpu), gpu // GPUS_PER_NUMA_NODE
            ids = DeviceIds([uuid])
            for index, (resource, count) in enumerate(pod.requests.items()):
                first = left[gpu][index]
                left[gpu][index] += count
                pod.allocated[resource] = [
                    device(resource, ids.write(device_id(uuid, n)), numa) for n in range(first, first + count)
                ]
            ports = range(number * foreign, (number + 1) * foreign)
            pod.hold(FOREIGN_RESOURCE, [device(FOREIGN_RESOURCE, f"fabric-port-{n:029d}", numa) for n in ports])
            self.create(pod)
            containers.put(pod.uid, range(FIRST_PID + PROCESSES * number, FIRST_PID + PROCESSES * (number + 1)))
            self.api.set_pod_status(NAMESPACE, pod.name, running_status(containers.id_of(pod.uid)))
            self.kubelet.pods[pod.name] = pod
        self._write_checkpoint()

    def _write_checkpoint(self) -> None:
        """What the kubelet has on record: only there does it name pods by UID."""
        entries = [
            {
                "PodUID": pod.uid, "ContainerName": CONTAINER, "ResourceName": resource,
                "DeviceIDs": {"0": [one.id for one in devices]}, "AllocResp": "",
            }
            for pod in self.kubelet.pods.values()
            for resource, devices in pod.allocated.items()
        ]  # fmt: skip
        text = json.dumps({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": 0})
        (self.kubelet.plugin_directory / "kubelet_internal_checkpoint").write_text(text)

    def wrong_gpus(self) -> list[str]:
        """What is wrong in where pods are, by the kubelet's own records."""
        wrong = [f"{pod.name} has cores of several GPUs or none" for pod in self.kubelet.pods.values() if not pod.gpu]
        for gpu in range(GPUS):
            uuid = simulated_uuid(NODE_NAME, gpu)
            pods = [pod for pod in self.kubelet.pods.values() if uuid.startswith(f"GPU-{pod.gpu}")]
            cores = sum(len(pod.allocated[VCORE_RESOURCE]) for pod in pods)
            blocks = sum(pod.blocks for pod in pods)
            if cores > CORES_PER_GPU or blocks > BLOCKS_PER_GPU:
                wrong.append(f"GPU {gpu} carries {cores} cores and {blocks} blocks")
            wrong += [
                f"{pod.name} has cores of GPU {gpu} and was not given its device node"
                for pod in pods
                if f"/dev/nvidia{gpu}".encode() not in pod.answers.get(VCORE_RESOURCE, b"/dev/nvidia%d" % gpu)
            ]
        return wrong


@asynccontextmanager
async def open_node(
    *,
    isolation: str = "vcuda",
    flags: Mapping[str, object] = MappingProxyType({}),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[BenchNode]:
    """A node whose kubelet listens, without the agent; at the end the agent is stopped and the directory removed. `flags`
    are further settings of the agent, or others than usual, `environment` further variables."""
    state = Path(tempfile.mkdtemp(prefix="gsb", dir="/tmp"))
    try:
        async with EmbeddedApiServer() as api, BenchKubelet(NodePaths(state=state)) as kubelet:
            api.apply_node({
                "apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE_NAME}, "spec": {},
                "status": {"nodeInfo": {"kubeletVersion": api.behaviour.release}},
            })  # fmt: skip
            api.write_kubeconfig(state / "kubeconfig")
            Containers(state / "cgroup")
            (state / "proc" / "self").mkdir(parents=True)
            (state / "proc" / "self" / "cgroup").write_text("0::/\n")
            agent = BenchAgent(agent_arguments(state, {"isolation": isolation, **flags}), state, environment)
            await kubelet.start()
            try:
                yield BenchNode(state=state, api=api, kubelet=kubelet, agent=agent)
            finally:
                await agent.stop()
    finally:
        shutil.rmtree(state, ignore_errors=True)


def agent_arguments(state: Path, others: Mapping[str, object]) -> list[str]:
    """No other node's file, socket or kubelet is in them: a benchmark may run on a node."""
    flags = {
        "driver": "simulated",
        "simulated.gpus": GPUS,
        "simulated.gpu-memory-mib": GPU_MEMORY_MIB,
        "simulated.device-nodes": "true",
        "resources.memory-block-mib": BLOCK_MIB,
        "node-name": NODE_NAME,
        "kubeconfig": state / "kubeconfig",
        "root": state,
        "runtime.cgroup-root": state / "cgroup",
        "runtime.proc-root": state / "proc",
        "runtime.endpoint": state / "no-runtime.sock",
        "simulated.usage": state / "usage.json",
        "web.port": 0,
        **others,
    }
    return [f"--{flag}={value}" for flag, value in flags.items()]
