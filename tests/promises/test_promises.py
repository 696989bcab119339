"""What the agent was asked to be built of, and of which shape, shown on one that runs: a promise and its proof in a row.

The agent is a process of its own, on the real nvidia-ml-py with a scripted driver. What no socket shows is asked inside it:
which objects are alive there, not which packages are installed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from grpclib.client import Channel
from msgspec import Struct

from gpushare_agent.core.formats.vdevice import decode_config
from gpushare_agent.core.settings.settings import load_settings
from gpushare_agent.core.wire.v1beta1 import DevicePluginStub, Empty
from tests.agent.support_agent import open_child, page_of_child
from tests.gpus.support_nvml import ONE_GPU, fake_library
from tests.isolation.support_library import fake_library as limiting_library
from tests.sandbox.support_sandbox import CORE, MEMORY, NodeUnderTest, container, open_test_node, pod

INSIDE = """
import asyncio, gc, importlib, json, socket, sys, threading

def alive(name):
    module, _, kind = name.rpartition(".")
    kind = getattr(sys.modules.get(module), kind, ())
    return [one for one in gc.get_objects() if isinstance(one, kind)]

def serve(listener):
    while True:
        peer = listener.accept()[0]
        with peer, peer.makefile("rw") as lines:
            print(json.dumps(eval(lines.readline())), file=lines, flush=True)

listener = socket.socket(socket.AF_UNIX)
listener.bind({path!r})
listener.listen()
threading.Thread(target=serve, args=(listener,), daemon=True).start()
from gpushare_agent.commands import main
sys.exit(main(sys.argv[1:]))
"""
FLAGS = ("--driver=nvml", "--isolation=gpushare", "--libgpushare.probe=false", "--device-list-strategy=envvar")


class Running(Struct, frozen=True):
    """The agent with a running share, pod `train`."""

    node: NodeUnderTest
    socket: Path

    async def inside(self, expression: str) -> Any:
        """Its value in the agent's process; `alive(NAME)` has the objects there of a class."""
        reader, writer = await asyncio.open_unix_connection(str(self.socket))
        writer.write(f"{expression}\n".encode())
        answer = await reader.readline()
        writer.close()
        await writer.wait_closed()
        assert answer, f"the agent cannot say {expression}"
        return json.loads(answer)

    async def page(self, path: str) -> tuple[int, str]:
        """Status and text."""
        return await page_of_child(self.node, path)

    async def containers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((await self.page("/api/v1/node"))[1])["containers"]
        return found

    def plugin_sockets(self) -> dict[str, list[str]]:
        directory = self.node.paths.device_plugin_path
        return {kind: [path.name for path in directory.glob(f"{kind}-*.sock")] for kind in ("vcore", "vmemory")}


# --- packages ---


async def _one_loop(agent: Running) -> bool:
    """Its services are tasks of one loop of asyncio's own."""
    names = await agent.inside("[task.get_name() for task in alive('asyncio.Task')]")
    loops = "{task.get_loop() for task in alive('asyncio.Task')}"
    classes = await agent.inside(f"[[one.__module__ for one in type(loop).__mro__] for loop in {loops}]")
    is_one = len(classes) == 1 and "asyncio.unix_events" in classes[0]
    return {"registration", "garbage collection", "live resize"} <= {*names} and is_one


async def _grpclib(agent: Running) -> bool:
    """Each plugin's socket has a server of grpclib's behind it."""
    served = "['/v1beta1.DevicePlugin/Allocate' in one._mapping for one in alive('grpclib.server.Server')]"
    return (await agent.inside(served)).count(True) == 2


async def _betterproto(agent: Running) -> bool:
    """The messages of the plugin are its classes, and a client of it understands them."""
    rpc = "/v1beta1.DevicePlugin/GetDevicePluginOptions"
    methods = f"one._mapping[{rpc!r}] for one in alive('grpclib.server.Server') if {rpc!r} in one._mapping"
    modules = await agent.inside(f"[method.reply_type.__mro__[1].__module__ for method in ({methods})]")
    (name,) = agent.plugin_sockets()["vcore"]
    channel = Channel(path=str(agent.node.paths.device_plugin_path / name))
    try:
        options = await DevicePluginStub(channel).get_device_plugin_options(Empty())
    finally:
        channel.close()
    return options.pre_start_required and {*modules} == {"betterproto2"}


async def _pynvml(agent: Running) -> bool:
    """It has opened the driver's library, and the GPU is the scripted one."""
    library = await agent.inside("str(getattr(sys.modules.get('pynvml'), 'nvmlLib', None))")
    (gpu,) = json.loads((await agent.page("/api/v1/node"))[1])["gpus"]
    return "libnvidia-ml.so.1" in library and (gpu["uuid"], gpu["name"]) == ("GPU-aaaa", "NVIDIA A10")


async def _kubernetes_asyncio(agent: Running) -> bool:
    """The configuration of the API server's client is its own, read from the kubeconfig."""
    hosts = await agent.inside("[one.host for one in alive('kubernetes_asyncio.client.configuration.Configuration')]")
    return any(host in agent.node.paths.kubeconfig.read_text() for host in hosts if host)


async def _aiohttp(agent: Running) -> bool:
    """It serves the web port, and is the client of the API server."""
    return all([await agent.inside(f"len(alive('aiohttp.{kind}'))") for kind in ("web.AppRunner", "ClientSession")])


async def _structlog(agent: Running) -> bool:
    """Its log is one of structlog's, in JSON."""
    (line, *_) = agent.node.log_lines("device_plugin_registered")
    return {"level", "timestamp"} <= line.keys() and await agent.inside("sys.modules['structlog'].is_configured()")


async def _pydantic_settings(agent: Running) -> bool:
    """The settings in force are an object of it, and flags reached it."""
    settings = "one.settings for one in alive('gpushare_agent.agent.node.Node')"
    kinds = await agent.inside(f"[kind.__module__ for settings in ({settings}) for kind in type(settings).__mro__]")
    return "pydantic_settings.main" in kinds and await agent.inside(f"[one.driver for one in ({settings})] == ['nvml']")


# --- shape ---


async def _two_servers(agent: Running) -> bool:
    """Cores and memory have a socket each, and the kubelet has registered both."""
    sockets = agent.plugin_sockets()
    registered = {one["resource"] for one in agent.node.log_lines("device_plugin_registered")}
    return [len(found) for found in sockets.values()] == [1, 1] and registered == {CORE, MEMORY}


async def _vdevice(agent: Running) -> bool:
    """The container's own directory below /etc/gpu-manager/vm, with its socket and its limits."""
    uid = agent.node.api.pod("default", "train")["metadata"]["uid"]
    directory = agent.node.paths.virtual_manager / uid / "main"
    config = decode_config((directory / "vcuda.config").read_bytes())
    return (
        load_settings([], {}).settings.virtual_manager.path == Path("/etc/gpu-manager/vm")
        and (directory / "vcuda.sock").is_socket()
        and (config.utilization, config.memory_bytes) == (30, 8 * 2**28)
    )


async def _informer(agent: Running) -> bool:
    """It knows the pod's phase by a watch."""
    watched = await agent.inside(
        "[one.last_message_at is not None for one in alive('gpushare_agent.core.kube.informer.Informer')]"
    )
    return watched == [True] and [one["phase"] for one in await agent.containers()] == ["Running"]


async def _one_cache(agent: Running) -> bool:
    """Every part reads the same allocations, which are the kubelet's."""
    caches = "alive('gpushare_agent.agent.admission.allocation_cache.AllocationCache')"
    held = await agent.inside(f"[[sorted(map(len, one.ids.values())) for one in cache] for cache in {caches}]")
    return bool(held == [[[8, 30]]])


async def _metrics(agent: Running) -> bool:
    pages = [await agent.page(path) for path in ("/metrics", "/metric")]
    return (
        [status for status, _ in pages] == [200, 200]
        and "container_request_gpu_memory{" in pages[1][1]
        and all("gpushare_container_memory_limit_bytes{" in text for _, text in pages)
    )


async def _debug(agent: Running) -> bool:
    pages = [await agent.page(f"/debug/{name}") for name in ("allocations", "tasks")]
    return [status for status, _ in pages] == [200, 200] and "train" in pages[0][1]


async def _garbage_collection(agent: Running) -> bool:
    """The last row, because it ends the pod."""
    await agent.node.remove_pod("train", grace_period_s=0)
    await agent.node.wait_until(lambda: agent.node.log_lines("share_freed"), "the share is free")
    freed = [one["pod"] for one in agent.node.log_lines("share_freed")]
    return freed == ["train"] and await agent.containers() == []


PROMISES: Mapping[str, Callable[[Running], Awaitable[bool]]] = {
    "one asyncio loop": _one_loop,
    "grpclib serves the device plugin": _grpclib,
    "betterproto messages on the wire": _betterproto,
    "pynvml reads the GPUs": _pynvml,
    "kubernetes-asyncio": _kubernetes_asyncio,
    "aiohttp": _aiohttp,
    "structlog": _structlog,
    "pydantic-settings": _pydantic_settings,
    "a server of vcore and one of vmemory": _two_servers,
    "vDevice sockets under /etc/gpu-manager/vm": _vdevice,
    "a pod informer": _informer,
    "one allocation cache": _one_cache,
    "/metrics": _metrics,
    "/debug": _debug,
    "garbage collection": _garbage_collection,
}


async def _is_kept(proof: Callable[[Running], Awaitable[bool]], agent: Running) -> bool:
    """False also where a file, a page or an object that it looks for is not there."""
    try:
        return bool(await proof(agent))
    except (AssertionError, LookupError, OSError, ValueError):
        return False


async def test_the_agent_is_what_it_was_asked_to_be(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows on one node; those that are not so are named together."""
    script, socket = short_dir / "script", short_dir / "inside"
    script.write_text(ONE_GPU)
    monkeypatch.setenv("FAKE_NVML_SCRIPT", str(script))
    program = ("-c", INSIDE.format(path=str(socket)))
    with fake_library() as library:
        monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
        flags = (*FLAGS, f"--libgpushare.library={limiting_library(short_dir / 'lib.so')}")
        async with open_test_node() as node, open_child(node, *flags, program=program):
            await node.start_pods(pod("train", container(cores=30, blocks=8)))
            agent = Running(node, socket)
            assert [promise for promise, proof in PROMISES.items() if not await _is_kept(proof, agent)] == []
