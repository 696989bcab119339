"""The driver on its sockets, called as the kubelet calls it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

from msgspec.structs import replace

from gpushare_agent.agent.dra.plugin import DeviceHealth, DraPlugin, DraRegistration
from gpushare_agent.core.kit.grpc_client import UnixChannel
from gpushare_agent.core.model.gpus import Health
from gpushare_agent.core.wire import pluginregistration, v1alpha1
from gpushare_agent.core.wire.k8s.io.kubelet.pkg.apis.dra import v1 as dra_v1
from tests.cluster.support_kube import running
from tests.dra.support_claims import DRIVER, NODE, Driver, raw_claim, ref_of, result, uid_of
from tests.extender.support_extender import eventually
from tests.support_deadline import DEADLINE_S

PREPARE = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources"
REGISTRATION = "/pluginregistration.Registration"
UNPREPARE = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources"


class Served:
    def __init__(self, directory: Path, driver: Driver) -> None:
        self.driver, self.ready = driver, asyncio.Event()
        self.plugin = DraPlugin(driver.claims, self.ready)
        self.health = DeviceHealth(driver.node, driver.mig)
        self.registry, self.plugins = directory / "r", directory / "p"
        self.registry.mkdir()
        self.registration = DraRegistration(
            instance="0a0a0a0a",
            registry=self.registry,
            plugin_path=self.plugins,
            services=[self.plugin, self.health],
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with running(self.registration.run):
            await eventually(lambda: list(self.registry.iterdir()) != [])
            yield

    def channel(self) -> UnixChannel:
        return UnixChannel(self.plugins / "dra-0a0a0a0a.sock")

    async def prepare(self, *numbers: int) -> dict[str, dra_v1.NodePrepareResourceResponse]:
        return await self.prepare_claims(*map(_claim, numbers))

    async def prepare_claims(self, *claims: dra_v1.Claim) -> dict[str, dra_v1.NodePrepareResourceResponse]:
        request, answer = dra_v1.NodePrepareResourcesRequest(claims=[*claims]), dra_v1.NodePrepareResourcesResponse
        with closing(self.channel()) as channel:
            return (await channel.unary(PREPARE, request, answer, timeout_s=DEADLINE_S)).claims

    async def unprepare(self, *numbers: int) -> dict[str, dra_v1.NodeUnprepareResourceResponse]:
        request = dra_v1.NodeUnprepareResourcesRequest(claims=[*map(_claim, numbers)])
        answer = dra_v1.NodeUnprepareResourcesResponse
        with closing(self.channel()) as channel:
            return (await channel.unary(UNPREPARE, request, answer, timeout_s=DEADLINE_S)).claims


def _claim(number: int) -> dra_v1.Claim:
    ref = ref_of(number)
    return dra_v1.Claim(namespace=ref.namespace, name=ref.name, uid=ref.uid)


async def test_the_kubelet_learns_the_endpoint_and_the_services(short_dir: Path) -> None:
    served = Served(short_dir, Driver(short_dir))
    async with served.running():
        (socket,) = served.registry.iterdir()
        with closing(UnixChannel(socket)) as channel:
            asked, answer = pluginregistration.InfoRequest(), pluginregistration.PluginInfo
            info = await channel.unary(f"{REGISTRATION}/GetInfo", asked, answer, timeout_s=DEADLINE_S)
            told = pluginregistration.RegistrationStatus(plugin_registered=True)
            done = pluginregistration.RegistrationStatusResponse
            await channel.unary(f"{REGISTRATION}/NotifyRegistrationStatus", told, done, timeout_s=DEADLINE_S)
        assert socket.name == "gpushare-agent-0a0a0a0a-reg.sock"
        assert served.registration.registration.registered.is_set()
    assert (info.type, info.name, info.endpoint) == ("DRAPlugin", DRIVER, str(served.plugins / "dra-0a0a0a0a.sock"))
    assert info.supported_versions == ["v1.DRAPlugin", "v1alpha1.DRAResourceHealth"]
    assert not list(served.registry.iterdir()) and not list(served.plugins.iterdir())


async def test_each_claim_of_a_call_has_its_own_answer(short_dir: Path) -> None:
    served = Served(short_dir, Driver(short_dir, raw_claim(result())))
    served.ready.set()
    async with served.running():
        answers = await served.prepare(1, 2)
        (device,) = answers[uid_of(1)].devices
        assert (device.request_names, device.pool_name, device.device_name) == (["gpu"], NODE, "gpu-0")
        assert device.cdi_device_ids == [f"gpushare-agent/claim=gpu-0.gpu.{uid_of(1)}"] and device.share_id
        assert "gone from the API server" in answers[uid_of(2)].error
        answers = await served.prepare_claims(dra_v1.Claim(namespace="default", name="../../x", uid="../../etc"))
        assert "name no claim" in answers["../../etc"].error
        ended = await served.unprepare(1, 2)
        assert [one.error for one in ended.values()] == ["", ""]
    assert not served.driver.specs()


async def test_calls_wait_for_the_ledger(short_dir: Path) -> None:
    """A newcomer is registered before the agent that serves has left."""
    served = Served(short_dir, Driver(short_dir, raw_claim(result())))
    async with served.running(), asyncio.TaskGroup() as group:
        call = group.create_task(served.prepare(1))
        await eventually(lambda: served.plugin.open_calls == 1)
        assert not call.done()
        served.ready.set()
        assert not (await call)[uid_of(1)].error


async def test_health_is_reported_at_once_and_at_each_change(short_dir: Path) -> None:
    served = Served(short_dir, Driver(short_dir))
    async with served.running():
        channel = served.channel()
        path = "/v1alpha1.DRAResourceHealth/NodeWatchResources"
        messages = channel.unary_stream(path, v1alpha1.NodeWatchResourcesRequest(), v1alpha1.NodeWatchResourcesResponse)
        try:
            first = await anext(messages)
            gpus = served.driver.gpus.gpus
            ill = replace(gpus[1], health=Health.UNHEALTHY, unhealthy_reason="Xid 79")
            served.driver.node.inventory.current = replace(served.driver.gpus, gpus=(gpus[0], ill))
            served.health.changed()
            second = await anext(messages)
        finally:
            with suppress(Exception):
                await messages.aclose()
            channel.close()
    assert [one.health for one in first.devices] == [v1alpha1.HealthStatus.HEALTHY] * 2
    assert (second.devices[1].health, second.devices[1].message) == (v1alpha1.HealthStatus.UNHEALTHY, "Xid 79")


async def test_a_claim_that_is_booked_sends_no_report_of_health(short_dir: Path) -> None:
    """In a burst the kubelet would get two for each claim, of all GPUs."""
    driver = Driver(short_dir)
    health = DeviceHealth(driver.node, driver.mig)
    messages = health.node_watch_resources(v1alpha1.NodeWatchResourcesRequest())
    await anext(messages)
    async with asyncio.TaskGroup() as group:
        following = group.create_task(anext(messages))
        for _ in range(10):
            health.changed()
            await asyncio.sleep(0)
        assert not following.done()
        first, *others = driver.gpus.gpus
        driver.node.inventory.current = replace(driver.gpus, gpus=(replace(first, health=Health.UNHEALTHY), *others))
        health.changed()
    assert following.result().devices[0].health is v1alpha1.HealthStatus.UNHEALTHY
    await messages.aclose()  # type: ignore[attr-defined]


async def test_an_instance_has_the_name_of_its_place(short_dir: Path) -> None:
    """The kubelet knows it by the device that the scheduler chose, from when it is the claim's."""
    driver = Driver(short_dir)
    health = DeviceHealth(driver.node, driver.mig)
    messages = health.node_watch_resources(v1alpha1.NodeWatchResourcesRequest())
    await anext(messages)
    assert await driver.mig.hold(uid_of(1), ["gpu-8f-mig-1g10gb-19-6"]) is None
    place = dict(driver.mig.gpus)
    driver.mig.gpus.clear()
    health.changed()
    first = await anext(messages)
    driver.mig.gpus.update(place)
    health.changed()
    second = await anext(messages)
    assert [one.devices[2].device.device_name for one in (first, second)] == ["mig-1", "gpu-8f-mig-1g10gb-19-6"]
    await messages.aclose()  # type: ignore[attr-defined]


async def test_a_socket_that_is_removed_comes_back(short_dir: Path) -> None:
    """A kubelet that starts cleans its directories."""
    served = Served(short_dir, Driver(short_dir))
    async with served.running():
        (socket,) = served.registry.iterdir()
        socket.unlink()
        await eventually(socket.exists)
        endpoint = served.plugins / "dra-0a0a0a0a.sock"
        endpoint.unlink()
        socket.unlink()
        await eventually(lambda: socket.exists() and endpoint.exists())
        assert socket.is_socket() and endpoint.is_socket()


async def test_an_agent_that_leaves_is_not_found_by_the_kubelet_any_more(short_dir: Path) -> None:
    served = Served(short_dir, Driver(short_dir, raw_claim(result())))
    served.ready.set()
    async with served.running():
        await served.registration.leave()
        assert not list(served.registry.iterdir())
        assert not (await served.prepare(1))[uid_of(1)].error, "calls that are under way end"
