"""For the tests of the vDevice socket: names, a server with scripted fakes, and clients."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from grpclib import GRPCError, Status
from grpclib.client import Channel

from gpushare_agent.agent.isolation.vdevice.files import VDeviceFiles
from gpushare_agent.agent.isolation.vdevice.server import VDeviceLimits, VDeviceServer
from gpushare_agent.agent.runtime.cgroup_paths import PeerIdentity
from gpushare_agent.core.formats.vdevice import VDeviceConfig, encode_config
from gpushare_agent.core.kit.sockets import connectable_path
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.errors import AgentError
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.wire.vcuda import VcudaServiceStub, VDeviceRequest

POD = PodUid("0f9c4f0e-5a0b-4b8e-9d38-0d4a3f7b6c11")
OTHER_POD = PodUid("9e1d7c52-1111-4222-8333-444455556666")
KEY = ContainerKey(POD, "cuda")
OTHER = ContainerKey(OTHER_POD, "cuda")
ID = "ab" * 32
OTHER_ID = "cd" * 32
MIB = 1024 * 1024
T = TypeVar("T")


def plant(kind: str, place: Path, target: Path) -> None:
    """What a tenant may have put into the place of a file or a directory; a link leads to `target`, or nowhere."""
    if kind in ("link", "dangling"):
        place.symlink_to(target if kind == "link" else target.with_name("nowhere"))
    elif kind == "file":
        place.write_text("in the way")
    elif kind == "directory":
        (place / "deep").mkdir(parents=True)
        (place / "deep" / "link").symlink_to(target)
    elif kind == "fifo":
        os.mkfifo(place)
    else:
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(place))


def share_config(key: ContainerKey = KEY, *, limit: int = 0, cores: int = 20) -> bytes:
    """A share of 2 GiB."""
    config = VDeviceConfig(
        pod_uid=key.pod_uid,
        container=key.container,
        limit=limit,
        memory_bytes=2048 * MIB,
        utilization=cores,
        hard_limit=limit == 0,
        driver=(535, 161),
        enable=True,
    )
    return encode_config(config)


@dataclass
class FakeNode:
    """The outside of a VDeviceServer: who runs where, and what was asked and counted."""

    peers: dict[int, PeerIdentity | None] = field(default_factory=dict)
    """By PID; a PID that is missing cannot be known."""
    containers: dict[str, ContainerKey] = field(default_factory=lambda: {ID: KEY, OTHER_ID: OTHER})
    refreshed: list[tuple[ContainerKey, str | None]] = field(default_factory=list)
    codes: list[str] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    noted: list[tuple[ContainerKey, int]] = field(default_factory=list)
    fails: AgentError | Exception | None = None
    refresh_hangs: bool = False
    runtime_fails: AgentError | None = None
    files: VDeviceFiles = field(default_factory=lambda: VDeviceFiles(Path("/nonexistent")))
    """Where sockets are bound."""
    writes: bool = False
    """A refresh writes the files, as the virtual manager would."""

    async def identify(self, pid: int) -> PeerIdentity | None:
        self.asked.append(pid)
        return self.peers.get(pid)

    async def owner_of(self, container_id: str) -> ContainerKey | None:
        if self.runtime_fails is not None:
            raise self.runtime_fails
        return self.containers.get(container_id)

    async def refresh(self, key: ContainerKey, container_id: str | None, caller: PeerIdentity | None = None) -> None:
        if self.fails is not None:
            raise self.fails
        if self.refresh_hangs:
            await asyncio.Event().wait()
        if self.writes:
            self.files.write(key, pids=[os.getpid()])
            self.files.write(key, config=share_config(key))
            if container_id is not None:
                self.files.copy_for_id(key, container_id)
        self.refreshed.append((key, container_id))

    async def in_thread(self, blocking: Callable[[], T], what: str) -> T:
        return blocking()

    def is_sharer(self, key: ContainerKey, user: ContainerKey) -> bool:
        return False

    async def note_process(self, key: ContainerKey, pid: int) -> None:
        self.noted.append((key, pid))

    def registered(self, code: str) -> None:
        self.codes.append(code)

    def we_are(self, pod_uid: str | None, container_id: str | None) -> None:
        """What the cgroup of this process, the peer of its own servers, says."""
        self.peers[os.getpid()] = PeerIdentity(pod_uid=pod_uid, container_id=container_id)


def server_of(
    files: VDeviceFiles, node: FakeNode, key: ContainerKey = KEY, limits: VDeviceLimits | None = None
) -> VDeviceServer:
    node.files = files
    return VDeviceServer(key, node, limits=limits)


@asynccontextmanager
async def serving(
    root: Path, node: FakeNode, key: ContainerKey = KEY, limits: VDeviceLimits | None = None
) -> AsyncIterator[Path]:
    """A prepared container with its server; gives the path of its socket."""
    files = VDeviceFiles(root)
    files.prepare(key)
    server = server_of(files, node, key, limits)
    await server.start(files.bind_socket(key))
    try:
        yield files.path(key) / "vcuda.sock"
    finally:
        await server.stop()


async def register(
    path: Path, *, pod_uid: str = POD, name: str = "", container_id: str = "", bus_id: str = "", timeout_s: float = 10.0
) -> None:
    """One registration on a connection of its own; the server's refusal comes as a GRPCError."""
    with connectable_path(path) as address:
        async with Channel(path=address) as channel:
            request = VDeviceRequest(bus_id=bus_id, pod_uid=pod_uid, container_name=name, container_id=container_id)
            await VcudaServiceStub(channel).register_v_device(request, timeout=timeout_s)


async def refusal_of(path: Path, **fields: Any) -> tuple[Status, str]:
    """Of a registration as by `register`."""
    with pytest.raises(GRPCError) as caught:
        await register(path, **fields)
    return caught.value.status, str(caught.value.message)
