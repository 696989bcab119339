"""isolation/vdevice/server.py over real sockets, with grpclib's client and grpcio's."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import structlog
from grpclib import Status

from gpushare_agent.agent.isolation.vdevice.files import VDeviceFiles
from gpushare_agent.agent.isolation.vdevice.server import METHOD, VDeviceLimits, VDeviceServer
from gpushare_agent.core.kit.peer_credentials import PeerCredentials, peer_credentials
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.errors import NotFound, Unavailable
from gpushare_agent.core.wire.vcuda import VDeviceRequest
from tests.isolation.support_vdevice import (
    ID,
    KEY,
    OTHER_ID,
    OTHER_POD,
    POD,
    FakeNode,
    refusal_of,
    register,
    server_of,
    serving,
)
from tests.isolation.support_vdevice_raw import flood
from tests.kit.support_http2 import hang_up
from tests.support_deadline import DEADLINE_S

DOCKER_NAME = f"/k8s_cuda_my-pod_default_{POD}_0"


def is_serving(files: VDeviceFiles, server: VDeviceServer) -> bool:
    """Whether the socket that the server listens on is in place."""
    return server.identity is not None and files.has_socket(server.key, server.identity)


@pytest.fixture
def grpc() -> ModuleType:
    return pytest.importorskip("grpc", reason="grpcio, the other gRPC implementation, is not installed")


async def with_grpcio(grpc: Any, path: Path, **fields: str) -> tuple[str, str]:
    """Registers with grpcio from a thread of its own; the code's name and the text."""

    def call() -> tuple[str, str]:
        options = [("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(f"unix:{path}", options=options) as channel:
            method = channel.unary_unary(METHOD, request_serializer=bytes, response_deserializer=bytes)
            try:
                assert method(bytes(VDeviceRequest(**fields)), timeout=DEADLINE_S) == b""
            except grpc.RpcError as error:
                return error.code().name, error.details()
            return "OK", ""

    return await asyncio.to_thread(call)


async def test_grpcio_registers_and_reads_the_text_of_a_refusal(grpc: ModuleType, short_dir: Path) -> None:
    node = FakeNode()
    node.we_are(POD, ID)
    async with serving(short_dir, node) as path:
        assert await with_grpcio(grpc, path, pod_uid=POD, container_name="cuda") == ("OK", "")
        code, text = await with_grpcio(grpc, path, pod_uid=POD, container_name="other")
    assert code == "PERMISSION_DENIED" and text.startswith("the message names container 'other', but")
    assert (node.refreshed, node.codes) == ([(KEY, None)], ["OK", code])


@pytest.mark.parametrize(
    ("fields", "refreshed"),
    [
        ({"name": "cuda"}, (KEY, None)),
        ({"name": DOCKER_NAME}, (KEY, None)),
        ({"container_id": ID}, (KEY, ID)),
        ({"container_id": ID, "bus_id": "0000:3b:00.0"}, (KEY, ID)),
        ({"container_id": ID, "name": "cuda"}, (KEY, ID)),
    ],
)
async def test_each_way_to_name_the_own_container_is_answered(
    short_dir: Path, fields: dict[str, str], refreshed: tuple[ContainerKey, str | None]
) -> None:
    """After the files were refreshed."""
    node = FakeNode()
    node.we_are(POD, ID)
    async with serving(short_dir, node) as path:
        await register(path, **fields)  # type: ignore[arg-type]
    assert (node.refreshed, node.codes, node.asked) == ([refreshed], ["OK"], [os.getpid()])


@pytest.mark.parametrize(
    ("pod_uid", "container_id", "says"),
    [
        (OTHER_POD, ID, f"the calling process is in pod {OTHER_POD}"),
        (OTHER_POD, OTHER_ID, f"the calling process is in pod {OTHER_POD}"),
        (POD, OTHER_ID, f"the calling process is in container {OTHER_ID}"),
        (None, OTHER_ID, f"the calling process is in container {OTHER_ID}"),
        (POD, "ee" * 32, "the calling process is in container eeee"),
        (None, None, "the calling process is in no container"),
    ],
)
async def test_a_process_of_another_container_is_refused_whatever_it_says(
    short_dir: Path, pod_uid: str | None, container_id: str | None, says: str
) -> None:
    """The message is right in every field; the peer credentials decide."""
    node = FakeNode()
    node.we_are(pod_uid, container_id)
    async with serving(short_dir, node) as path:
        status, text = await refusal_of(path, name="cuda")
    assert (status, says in text) == (Status.PERMISSION_DENIED, True)
    assert (node.refreshed, node.codes) == ([], ["PERMISSION_DENIED"])


@pytest.mark.parametrize("identity", [(POD, None), (None, ID), (POD, ID)])
async def test_what_the_cgroup_names_may_be_a_part(short_dir: Path, identity: tuple[str | None, str | None]) -> None:
    """Pod UID or container ID alone are enough, for registrations by name and by ID."""
    node = FakeNode()
    node.we_are(*identity)
    async with serving(short_dir, node) as path:
        await register(path, name="cuda")
        await register(path, container_id=ID)
    assert node.refreshed == [(KEY, None), (KEY, ID)]


async def test_a_caller_of_a_known_pod_cannot_claim_another_id(short_dir: Path) -> None:
    """Where only the pod is known of the caller, the runtime says whose ID it is."""
    node = FakeNode()
    node.we_are(POD, None)
    async with serving(short_dir, node) as path:
        for claimed in (OTHER_ID, "ee" * 32):
            assert (await refusal_of(path, container_id=claimed))[0] is Status.PERMISSION_DENIED
    assert node.refreshed == []


async def test_an_unknown_caller_is_the_sockets_container_and_this_is_said_once(short_dir: Path) -> None:
    """Where the process cannot be inspected, the socket and the message decide; the log reports it one time."""
    node = FakeNode()
    with structlog.testing.capture_logs() as logs:
        async with serving(short_dir, node) as path:
            for _ in range(3):
                await register(path, name="cuda")
            await refusal_of(path, name="other")
    assert node.refreshed == [(KEY, None)] * 3 and node.noted == [(KEY, os.getpid())] * 3
    assert [entry["event"] for entry in logs] == ["vdevice_peer_unknown", "vdevice_registration_refused"]


async def test_a_refusal_is_logged_once_per_peer_and_counted_each_time(short_dir: Path) -> None:
    """The log line names socket and caller; five refusals make one line and five counts."""
    node = FakeNode()
    node.we_are(OTHER_POD, OTHER_ID)
    with structlog.testing.capture_logs() as logs:
        async with serving(short_dir, node) as path:
            for _ in range(5):
                await refusal_of(path, name="cuda")
    assert node.codes == ["PERMISSION_DENIED"] * 5
    assert [(entry["event"], entry["pid"], entry["pod_uid"]) for entry in logs] == [
        ("vdevice_registration_refused", os.getpid(), POD)
    ]


@pytest.mark.parametrize(
    ("fails", "status", "says"),
    [
        (Unavailable("the disk is full: free space"), Status.UNAVAILABLE, "the disk is full: free space"),
        (NotFound("prepare it first"), Status.NOT_FOUND, "prepare it first"),
        (RuntimeError("secret"), Status.INTERNAL, "the agent's log has the traceback"),
    ],
)
async def test_a_refresh_that_fails_is_answered_with_what_to_do(
    short_dir: Path, fails: Exception, status: Status, says: str
) -> None:
    """The agent's own errors go to the caller as they are, a bug without its text."""
    node = FakeNode(fails=fails)
    node.we_are(POD, ID)
    async with serving(short_dir, node) as path:
        found, text = await refusal_of(path, name="cuda")
    assert (found, says in text, "secret" in text, node.codes) == (status, True, False, [status.name])


@pytest.mark.parametrize(("pod_uid", "claim"), [(POD, {"container_id": ID}), (None, {"name": "cuda"})])
async def test_a_runtime_that_is_away_makes_a_registration_wait_not_fail_for_good(
    short_dir: Path, pod_uid: str | None, claim: dict[str, str]
) -> None:
    """UNAVAILABLE: the client tries again; nothing is believed meanwhile, of an ID or of a caller whose pod is unknown."""
    node = FakeNode(runtime_fails=Unavailable("containerd does not answer; try again"))
    node.we_are(pod_uid, ID)
    async with serving(short_dir, node, limits=VDeviceLimits(question_interval_s=0.0)) as path:
        assert await refusal_of(path, **claim) == (Status.UNAVAILABLE, "containerd does not answer; try again")
        node.runtime_fails = None
        await register(path, **claim)


async def test_while_the_id_is_unknown_the_callers_pod_is_enough_for_a_registration_by_name(short_dir: Path) -> None:
    """A program that starts with its container need not wait until somebody knows the ID. Another pod's is refused."""
    node = FakeNode(runtime_fails=Unavailable("it takes a second or two after the start"))
    async with serving(short_dir, node) as path:
        node.we_are(POD, ID)
        await register(path, name="cuda")
        node.we_are(OTHER_POD, ID)
        assert f"is in pod {OTHER_POD}" in (await refusal_of(path, name="cuda"))[1]
    assert node.codes == ["OK", "PERMISSION_DENIED"]


async def test_the_runtime_is_asked_once_for_all_that_wait(short_dir: Path) -> None:
    """Whose container this is, for 50 calls, 16 at once: one question; also where there is no answer yet."""
    questions: list[str] = []

    class Counts(FakeNode):
        async def owner_of(self, container_id: str) -> ContainerKey | None:
            questions.append(container_id)
            await asyncio.sleep(0)
            return await super().owner_of(container_id)

    for fails in (None, Unavailable("not known yet")):
        questions.clear()
        node = Counts(runtime_fails=fails)
        node.we_are(POD, ID)
        limits = VDeviceLimits(question_interval_s=10.0)
        async with serving(short_dir, node, limits=limits) as path:
            await flood(path, 50)
        assert node.codes == ["OK"] * 50
        assert questions == [ID]


async def test_a_refresh_that_hangs_is_answered_deadline_exceeded(short_dir: Path) -> None:
    """The time of one call is limited by the server too."""
    node = FakeNode(refresh_hangs=True)
    async with serving(short_dir, node, limits=VDeviceLimits(call_s=0.05)) as path:
        status, _ = await refusal_of(path, name="cuda")
    assert (status, node.codes) == (Status.DEADLINE_EXCEEDED, ["DEADLINE_EXCEEDED"])


async def test_the_socket_works_beyond_107_bytes_of_path(short_dir: Path) -> None:
    """A unix address is shorter than the host's path of a deep root; server and client reach each other all the same."""
    node = FakeNode()
    async with serving(short_dir / ("d" * 100) / ("e" * 100), node) as path:
        assert len(os.fsencode(path)) > 250
        assert stat.S_IMODE(path.lstat().st_mode) == 0o666
        await register(path, name="cuda")
    assert not path.exists()


async def test_a_server_says_when_its_socket_was_taken_away_and_starts_anew(short_dir: Path) -> None:
    """A removed directory ends the service; after preparing, `start` serves again, and `stop` leaves no socket."""
    node, files = FakeNode(), VDeviceFiles(short_dir)
    files.prepare(KEY)
    server = server_of(files, node)
    assert not is_serving(files, server)
    await server.start(files.bind_socket(KEY))
    assert is_serving(files, server)
    files.remove_pod(POD)
    assert not is_serving(files, server)
    files.prepare(KEY)
    await server.start(files.bind_socket(KEY))
    await register(files.path(KEY) / "vcuda.sock", name="cuda")
    await server.stop()
    await server.stop()
    assert (is_serving(files, server), list(files.path(KEY).iterdir())) == (False, [])


async def test_a_server_that_stops_leaves_its_successors_socket(short_dir: Path) -> None:
    """Two agents overlap at an update: the old one's stop does not take the new one's socket."""
    node, files = FakeNode(), VDeviceFiles(short_dir)
    files.prepare(KEY)
    old, new = server_of(files, node), server_of(files, node)
    await old.start(files.bind_socket(KEY))
    await new.start(files.bind_socket(KEY))
    await old.stop()
    await register(files.path(KEY) / "vcuda.sock", name="cuda")
    assert is_serving(files, new)
    await new.stop()


async def test_the_kernel_says_who_is_at_the_other_end() -> None:
    """PID, user and group of the connecting process; a pair of TCP sockets has no such thing."""
    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_unix_connection(sock=ours)
    assert peer_credentials(writer.transport) == PeerCredentials(pid=os.getpid(), uid=os.getuid())
    await hang_up(writer)
    theirs.close()
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert peer_credentials(writer.transport) is None
        await hang_up(writer)
