"""`gpushare-agent driver-devices` under a kubelet: links to /dev/null stand in for the device nodes of a host."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from grpclib import GRPCError
from grpclib.client import Channel

from gpushare_agent.agent.commands import driver_devices
from gpushare_agent.core.wire import v1beta1
from tests.cli.support_cli import call
from tests.kubelet.support_plugin import fake_kubelet


def make_nodes(dev: Path, *names: str) -> None:
    for name in names:
        (dev / name).parent.mkdir(exist_ok=True)
        (dev / name).symlink_to("/dev/null")


def test_the_drivers_nodes_are_those_of_nvidia(tmp_path: Path) -> None:
    """Its GPUs, control nodes and MIG's capabilities; no other device, no file; none without the one that all need."""
    make_nodes(tmp_path, "nvidia0", "nvidia-uvm", "nvidia-caps/nvidia-cap1", "null", "dri")
    (tmp_path / "nvidia-file").touch()
    assert driver_devices.driver_nodes(tmp_path) == ()
    make_nodes(tmp_path, "nvidiactl")
    names = ("nvidia-caps/nvidia-cap1", "nvidia-uvm", "nvidia0", "nvidiactl")
    assert driver_devices.driver_nodes(tmp_path, with_mig_config=True) == tuple(f"/dev/{name}" for name in names)
    assert driver_devices.driver_nodes(tmp_path) == tuple(f"/dev/{name}" for name in names[1:]), (
        "no right to make instances"
    )


@pytest.mark.parametrize("flags", [(), ("--mig.on-demand=all",)])
async def test_a_pod_that_asks_gets_every_node_once_the_driver_is_there(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], short_dir: Path
) -> None:
    """Until then no unit is healthy, and the agent's pod waits unscheduled. The right to make MIG instances is in the answer
    where the setting mig.on_demand wants it."""
    monkeypatch.setattr(driver_devices, "PERIOD_S", 0.01)
    dev = short_dir / "dev"
    dev.mkdir()
    async with fake_kubelet(short_dir) as kubelet, asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(call("driver-devices", f"--device-plugin-path={short_dir}", f"--dev={dev}", *flags))
        await kubelet.wait_listed(driver_devices.RESOURCE)
        assert {one.is_healthy for one in kubelet.lists[driver_devices.RESOURCE][-1].values()} == {False}
        async with Channel(path=str(short_dir / driver_devices.SOCKET)) as channel:
            stub = v1beta1.DevicePluginStub(channel)
            request = v1beta1.AllocateRequest([v1beta1.ContainerAllocateRequest(["driver-0"])])
            with pytest.raises(GRPCError, match="no /dev/nvidiactl"):
                await stub.allocate(request)
            make_nodes(dev, "nvidiactl", "nvidia0", "nvidia-caps/nvidia-cap1")
            await kubelet.wait_listed(driver_devices.RESOURCE, times=2)
            assert {one.is_healthy for one in kubelet.lists[driver_devices.RESOURCE][-1].values()} == {True}
            (answer,) = (await stub.allocate(request)).container_responses
        found = [(one.host_path, one.container_path, one.permissions) for one in answer.devices]
        given = [*(["/dev/nvidia-caps/nvidia-cap1"] if flags else []), "/dev/nvidia0", "/dev/nvidiactl"]
        assert found == [(path, path, "rwm") for path in given]
        os.kill(os.getpid(), signal.SIGTERM)
        assert await serving == 0
    assert not (short_dir / driver_devices.SOCKET).exists()
