"""Fakes for the device-plugin side: a kubelet's registration, a scripted admission handler, a recorder."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from grpclib import GRPCError, Status

from gpushare_agent.core.kit.grpc_server import GrpcServer
from gpushare_agent.core.kit.sockets import bind_unix_socket
from gpushare_agent.core.model.allocations import ContainerEdits
from gpushare_agent.core.model.errors import Refused
from gpushare_agent.core.wire import v1beta1
from gpushare_agent.sandbox.kubelet.plugin_endpoint import PluginDevice, PluginEndpoint, RegistrationService
from tests.kit.support_grpc import served_at
from tests.support_deadline import DEADLINE_S as DEADLINE_S  # noqa: PLC0414 - exported on
from tests.support_deadline import Changes


class Recorder:
    """What happened, in order."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self._recorded = Changes()
        self.wait_until = self._recorded.until

    def record(self, event: Any) -> None:
        self.events.append(event)
        self._recorded.set()

    async def wait_for(self, event: Any, count: int = 1) -> None:
        await self.wait_until(lambda: self.events.count(event) >= count)


class FakeAdmission:
    """Answers as its fields define and records its calls."""

    def __init__(self) -> None:
        self.calls = Recorder()
        self.preferred_answer: Callable[[Sequence[str], Sequence[str], int], Sequence[str]] = lambda a, m, n: a[:n]
        self.allocate_answer: Callable[[Sequence[str]], ContainerEdits | Refused] = lambda ids: ContainerEdits()
        self.pre_start_answer: Refused | None = None
        self.hangs = False

    async def preferred(
        self, resource: str, available: Collection[str], must_include: Sequence[str], size: int
    ) -> Sequence[str]:
        available = sorted(available)
        self.calls.record(("preferred", resource, available, list(must_include), size))
        await self._maybe_hang()
        return self.preferred_answer(available, must_include, size)

    async def allocate(self, resource: str, ids: Sequence[str]) -> ContainerEdits | Refused:
        self.calls.record(("allocate", resource, list(ids)))
        await self._maybe_hang()
        return self.allocate_answer(ids)

    async def pre_start(self, resource: str, ids: Sequence[str]) -> Refused | None:
        self.calls.record(("pre_start", resource, list(ids)))
        return self.pre_start_answer

    async def _maybe_hang(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()


class RpcLog:
    """Keeps resource, method and code of each call."""

    def __init__(self) -> None:
        self.finished: list[tuple[str, str, str]] = []

    def rpc_finished(self, resource: str, method: str, code: str, duration_s: float) -> None:
        assert duration_s >= 0
        self.finished.append((resource, method, code))


class FakeKubelet(RegistrationService):
    """The embedded kubelet's registration, which refuses or stalls as its fields say. When it starts it removes all sockets
    of its directory, and when it stops it leaves its own behind. Events: ("register", resource), ("refused", resource),
    ("stalled", resource), ("list", resource, number of devices), ("stream-ended", resource)."""

    def __init__(self, directory: Path, tasks: asyncio.TaskGroup) -> None:
        super().__init__(directory, self._follow)
        self.directory = directory
        self.happened = Recorder()
        self.requests: list[v1beta1.RegisterRequest] = []
        self.endpoints: dict[str, PluginEndpoint] = {}
        """Of the last registration of each resource."""
        self.lists: dict[str, list[Mapping[str, PluginDevice]]] = {}
        self.refuse_next: dict[str, int] = {}
        self.stalls: set[str] = set()
        self._tasks = tasks
        self._server: GrpcServer | None = None

    @property
    def socket(self) -> Path:
        return self.directory / "kubelet.sock"

    def registrations(self, resource: str) -> int:
        return self.happened.events.count(("register", resource))

    async def wait_listed(self, resource: str, *, times: int = 1) -> None:
        """Waits until ListAndWatch has sent a message for this resource so often."""
        await self.happened.wait_until(lambda: len(self.lists.get(resource, ())) >= times)

    async def start(self, *, removes_sockets: bool = True) -> None:
        self.directory.mkdir(exist_ok=True)
        for path in self.directory.iterdir() if removes_sockets else ():
            if stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()
        self._server = GrpcServer([self])
        await self._server.serve(bind_unix_socket(self.socket, mode=0o600))

    async def stop(self) -> None:
        """Like a stopped kubelet: every connection ends, every socket stays."""
        self.drop_streams()
        server, self._server = self._server, None
        if server is not None:
            await server.stop()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    def drop_streams(self) -> None:
        """Ends the connections to the plugins while going on to serve."""
        for endpoint in self.endpoints.values():
            endpoint.close()

    async def dialled(self, request: v1beta1.RegisterRequest) -> PluginEndpoint:
        resource = request.resource_name
        self.requests.append(request)
        if self.refuse_next.get(resource, 0) > 0:
            self.refuse_next[resource] -= 1
            self.happened.record(("refused", resource))
            raise GRPCError(Status.UNKNOWN, f"no place for {resource} today")
        if resource in self.stalls:
            self.happened.record(("stalled", resource))
            await asyncio.Event().wait()
        return await super().dialled(request)

    def _follow(self, endpoint: PluginEndpoint) -> None:
        if (old := self.endpoints.get(endpoint.resource)) is not None:
            old.close()
        self.endpoints[endpoint.resource] = endpoint
        self.happened.record(("register", endpoint.resource))
        self._tasks.create_task(self._watch(endpoint))

    async def _watch(self, endpoint: PluginEndpoint) -> None:
        def receive(devices: Mapping[str, PluginDevice]) -> None:
            self.lists.setdefault(endpoint.resource, []).append(devices)
            self.happened.record(("list", endpoint.resource, len(devices)))

        await endpoint.follow_devices(receive)
        self.happened.record(("stream-ended", endpoint.resource))


@asynccontextmanager
async def fake_kubelet(directory: Path, *, started: bool = True) -> AsyncIterator[FakeKubelet]:
    async with asyncio.TaskGroup() as tasks:
        kubelet = FakeKubelet(directory, tasks)
        try:
            if started:
                await kubelet.start()
            yield kubelet
        finally:
            await kubelet.stop()


@asynccontextmanager
async def serving(*services: Any, **options: Any) -> AsyncIterator[Path]:
    """Serves on a GrpcServer; gives the path of its socket."""
    with TemporaryDirectory(prefix="gs", dir="/tmp") as directory:  # a unix address has room for 107 bytes
        async with served_at(Path(directory) / "s.sock", *services, **options) as path:
            yield path
