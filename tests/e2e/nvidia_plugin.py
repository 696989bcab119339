"""A stand-in for NVIDIA's device plugin, whose binary needs a driver: `nvidia_plugin.py REPLICAS GPU-<uuid>…`.

Registers nvidia.com/gpu with the plugin's own IDs and answers Allocate with NVIDIA_VISIBLE_DEVICES, until it is ended.
tests/e2e/test_nvidia.py runs it in a pod of the agent's image.

Source: k8s-device-plugin v0.20.0, internal/rm (IDs, `<uuid>::<n>` for replicas) and internal/plugin/server.go (answers).
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from grpclib.server import Server

from gpushare_agent.agent.kubelet.registration import register
from gpushare_agent.core.wire import v1beta1

DIRECTORY = Path("/var/lib/kubelet/device-plugins")
SOCKET = "nvidia-gpu.sock"


class Plugin(v1beta1.DevicePluginBase):
    """The five calls of the kubelet."""

    def __init__(self, ids: list[str]) -> None:
        self._ids = ids

    async def get_device_plugin_options(self, message: v1beta1.Empty) -> v1beta1.DevicePluginOptions:
        return v1beta1.DevicePluginOptions()

    async def list_and_watch(self, message: v1beta1.Empty) -> AsyncIterator[v1beta1.ListAndWatchResponse]:
        devices = [v1beta1.Device(id=one, health="Healthy") for one in self._ids]
        yield v1beta1.ListAndWatchResponse(devices=devices)
        await asyncio.Event().wait()

    async def allocate(self, message: v1beta1.AllocateRequest) -> v1beta1.AllocateResponse:
        def visible(ids: list[str]) -> str:
            return ",".join(dict.fromkeys(one.partition("::")[0] for one in ids))

        answers = [
            v1beta1.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": visible(list(one.device_ids))})
            for one in message.container_requests
        ]
        return v1beta1.AllocateResponse(container_responses=answers)


async def serve(replicas: int, gpus: list[str]) -> None:
    """Until SIGTERM; then the socket is gone, as when the plugin's pod ends."""
    ids = [gpu if replicas == 1 else f"{gpu}::{number}" for gpu in gpus for number in range(replicas)]
    server, stopped = Server([Plugin(ids)]), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await server.start(path=str(DIRECTORY / SOCKET))
    options = v1beta1.DevicePluginOptions()
    await register(
        DIRECTORY / "kubelet.sock", endpoint=SOCKET, resource="nvidia.com/gpu", options=options, timeout_s=10
    )
    await stopped.wait()
    server.close()
    (DIRECTORY / SOCKET).unlink(missing_ok=True)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2:]))
