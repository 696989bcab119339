"""kit/grpc_server.py and kit/grpc_codec.py over real unix sockets, with grpclib's, grpcio's and a raw HTTP/2 client."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import struct
import sys
import termios
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import hpack
import pytest
from grpclib import GRPCError, Status
from grpclib.client import Channel
from grpclib.const import Cardinality, Handler
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, StreamReset

from gpushare_agent.core.kit.grpc_codec import StrictCodec, decode_generated
from gpushare_agent.core.kit.grpc_server import GrpcServer, ServedSocket, send_answer
from gpushare_agent.core.kit.protobuf import (
    MalformedMessageError,
    bytes_field,
    decode_allocate,
    integer_field,
    string_list,
)
from gpushare_agent.core.kit.sockets import bind_unix_socket
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.wire import v1, v1beta1
from tests.kit.support_grpc import RawCodec
from tests.kit.support_http2 import RawClient, frame, raw_client, request_fields
from tests.kubelet.support_plugin import DEADLINE_S, Recorder, serving

ECHO = "/test.Echo/Echo"
FAIL = "/test.Echo/Fail"
WAIT = "/test.Echo/Wait"


REQUEST_HEADERS = hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*field) for field in request_fields(ECHO)])


class Echo:
    """Answers a PreStartContainerRequest with its IDs, fails on demand, or waits until it is cancelled."""

    def __init__(self) -> None:
        self.happened = Recorder()

    def __mapping__(self) -> dict[str, Handler]:
        request, answer = v1beta1.PreStartContainerRequest, v1beta1.ContainerPreferredAllocationResponse
        return {
            ECHO: Handler(self._echo, Cardinality.UNARY_UNARY, request, answer),
            FAIL: Handler(self._fail, Cardinality.UNARY_UNARY, request, answer),
            WAIT: Handler(self._wait, Cardinality.UNARY_STREAM, request, answer),
        }

    async def _echo(self, stream: Any) -> None:
        message = await stream.recv_message()
        await stream.send_message(v1beta1.ContainerPreferredAllocationResponse(device_ids=message.device_ids))

    async def _fail(self, stream: Any) -> None:
        await stream.recv_message()
        raise TimeoutError("a fault that nobody expected")

    async def _wait(self, stream: Any) -> None:
        await stream.recv_message()
        await stream.send_message(b"")
        self.happened.record("waiting")
        try:
            await asyncio.Event().wait()
        finally:
            self.happened.record("ended")


async def call_on(channel: Channel, method: str, request: bytes) -> bytes:
    """One unary call with raw bytes."""
    async with channel.request(method, Cardinality.UNARY_UNARY, bytes, bytes, timeout=DEADLINE_S) as stream:
        await stream.send_message(request, end=True)
        answer = await stream.recv_message()
    assert isinstance(answer, bytes)
    return answer


async def call(path: Path, method: str, request: bytes) -> bytes:
    """The same on a connection of its own."""
    async with Channel(path=str(path), codec=RawCodec()) as channel:
        return await call_on(channel, method, request)


async def refused(path: Path, method: str, request: bytes) -> GRPCError:
    with pytest.raises(GRPCError) as caught:
        await call(path, method, request)
    return caught.value


async def until_stuck(client: RawClient) -> None:
    """Waits until the kernel takes no more of what the server sends, as nobody reads here."""
    sizes = [-1]
    while len(sizes) < 20 or len(set(sizes[-20:])) > 1 or sizes[-1] == 0:
        await asyncio.sleep(0)  # a turn of the loop: if the kernel had taken anything, the size would differ
        answer = fcntl.ioctl(client.writer.get_extra_info("socket").fileno(), termios.FIONREAD, bytes(4))
        sizes.append(int.from_bytes(answer, sys.byteorder))


class AtOnce:
    """Answers a request with its bytes, by `send_answer`."""

    def __mapping__(self) -> dict[str, Handler]:
        return {ECHO: Handler(self._echo, Cardinality.UNARY_UNARY, bytes, bytes)}

    async def _echo(self, stream: Any) -> None:
        await send_answer(stream, await stream.recv_message())


class Deaf(AtOnce):
    """Its calls take no notice of their cancellation, as where a call that they make is cut off at the same time."""

    def __init__(self) -> None:
        self.happened = Recorder()

    async def _echo(self, stream: Any) -> None:
        self.happened.record("waiting")
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        try:
            await send_answer(stream, b"")
        finally:
            self.happened.record("ended")


async def test_a_call_that_is_cut_off_and_answers_all_the_same_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """Each restart of the kubelet would be one in the log, with a traceback."""
    deaf = Deaf()
    async with serving(deaf) as path, raw_client(path) as client:
        stream_id = client.begin(ECHO)
        client.flush()
        await deaf.happened.wait_for("waiting")
        client.h2.reset_stream(stream_id)
        client.flush()
        await deaf.happened.wait_for("ended")
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_an_answer_longer_than_a_frame_arrives_whole() -> None:
    """A frame has at most 16 KiB, so it is sent in parts; the connection goes on."""
    async with serving(AtOnce()) as path, Channel(path=str(path), codec=RawCodec()) as channel:
        for size in (0, 16_379, 16_380, 200_000):
            assert await call_on(channel, ECHO, bytes(size)) == bytes(size)


async def test_a_storm_of_cancelled_calls_leaves_the_connection_usable() -> None:
    """HEADERS, DATA and RST_STREAM in one read, more bytes than the connection's window: the next call is answered."""
    async with serving(Echo()) as path, raw_client(path) as client:
        part = struct.pack(">BI", 0, 60_000) + bytes(16_000)
        sent = 0
        while sent < 3 * 4 * 1024 * 1024:
            stream_id = client.begin(ECHO)
            while client.h2.local_flow_control_window(stream_id) < len(part):
                client.flush()
                assert await client.read()
            client.h2.send_data(stream_id, part)
            client.h2.reset_stream(stream_id)
            client.flush()
            sent += len(part)
        stream_id = client.call(ECHO, string_list(1, ["a"]))
        client.flush()
        assert (await client.headers_of(stream_id))[b"grpc-status"] == b"0"


async def test_an_unknown_method_is_answered_unimplemented_with_its_name() -> None:
    """The answer carries content-type and gRPC status, so that every client reads UNIMPLEMENTED."""
    async with serving(Echo()) as path:
        error = await refused(path, "/test.Echo/Nothing", b"")
        assert (error.status, error.message) == (Status.UNIMPLEMENTED, "unknown method /test.Echo/Nothing")
        async with raw_client(path) as client:
            stream_id = client.begin("/test.Echo/Nothing")
            client.h2.end_stream(stream_id)
            client.flush()
            headers = await client.headers_of(stream_id)
            assert headers[b"content-type"].startswith(b"application/grpc")
            assert headers[b"grpc-status"] == b"12"


@pytest.mark.parametrize(
    ("data", "ends", "status", "says"),
    [
        (
            struct.pack(">BI", 0, 2**32 - 1),
            False,
            b"8",
            b"the request of 4294967295 bytes is over the limit of 4194304 bytes",
        ),
        (struct.pack(">BI", 0, 50) + bytes(10), True, b"3", b"the request ended before its 50 bytes were there"),
        (b"\x00\x00", True, b"3", b"the request ended before its 5 bytes were there"),
        (b"", True, b"3", b"the request holds no message"),
        (
            struct.pack(">BI", 1, 1) + b"x",
            True,
            b"12",
            b"compressed requests are not supported: send them uncompressed",
        ),
    ],
)
async def test_a_broken_frame_is_answered_with_what_is_wrong(
    data: bytes, ends: bool, status: bytes, says: bytes
) -> None:
    """Cut off, empty and compressed requests each get a status and a text; one that announces 4 GiB before they come."""
    async with serving(Echo()) as path, raw_client(path) as client:
        stream_id = client.begin(ECHO)
        client.h2.send_data(stream_id, data, end_stream=ends)
        client.flush()
        headers = await client.headers_of(stream_id)
        assert (headers[b"grpc-status"], headers[b"grpc-message"]) == (status, says)


async def test_an_unknown_frame_is_ignored() -> None:
    """As HTTP/2 has it (RFC 9113, 5.5): the call after it is answered on the same connection."""
    async with serving(Echo()) as path, raw_client(path) as client:
        client.flush()
        client.writer.write(frame(0xEE, 0, 0, b"content") + frame(0xEE, 0xFF, 5, b""))
        stream_id = client.call(ECHO, b"")
        client.flush()
        assert (await client.headers_of(stream_id))[b"grpc-status"] == b"0"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"\xff\xff\xff\xff\xff", ErrorCodes.COMPRESSION_ERROR),
        (b"\x10\x03x-a\x02\xff\xfe", ErrorCodes.PROTOCOL_ERROR),
    ],
    ids=["no HPACK", "no text"],
)
async def test_headers_that_cannot_be_read_end_the_connection_with_goaway(content: bytes, code: ErrorCodes) -> None:
    """And nothing is raised: asyncio would log each with a traceback."""
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: raised.append(context))
    async with serving(Echo()) as path, raw_client(path) as client:
        client.flush()
        client.writer.write(frame(1, 4, 1, REQUEST_HEADERS + content))
        await client.read_until(lambda event: isinstance(event, ConnectionTerminated))
        assert await call(path, ECHO, b"") == b""
    assert [event.error_code for event in client.events if isinstance(event, ConnectionTerminated)] == [code]
    assert raised == []


async def test_a_call_whose_metadata_is_no_base64_is_reset() -> None:
    """grpclib would leave it without an answer, and the place that it takes."""
    async with serving(Echo()) as path, raw_client(path) as client:
        stream_id = client.begin(ECHO, ("x-bin", "a"))
        client.flush()
        await client.read_until(lambda event: isinstance(event, StreamReset) and event.stream_id == stream_id)


@pytest.mark.parametrize("data", [b"\x0a\x7fshort", b"\x08\x01", b"\x0a\x02\xff\xfe", b"\xff" * 12, b"\x0b"])
@pytest.mark.parametrize("decoders", [None, {v1beta1.PreStartContainerRequest: decode_allocate}])
async def test_malformed_protobuf_is_answered_invalid_argument(data: bytes, decoders: Any) -> None:
    """The text names the message and the fault, with generated classes and with fast decoders alike."""
    async with serving(Echo(), decoders=decoders) as path:
        error = await refused(path, ECHO, data if decoders is None else bytes_field(1, data))
        assert error.status is Status.INVALID_ARGUMENT
        assert error.message is not None
        assert error.message.startswith("malformed PreStartContainerRequest of ")


async def test_a_fault_of_a_handler_is_answered_with_where_to_look() -> None:
    """An unexpected exception, a TimeoutError too, is INTERNAL, and the text names the log, not the exception."""
    async with serving(Echo()) as path:
        error = await refused(path, FAIL, b"")
        assert error.status is Status.INTERNAL
        assert error.message == f"{FAIL} failed unexpectedly; the agent's log has the traceback (event rpc_failed)"


async def test_stop_ends_a_call_says_goaway_and_closes_while_the_client_stays(short_dir: Path) -> None:
    """A client that never leaves keeps stop() from nothing; it reads GOAWAY and then the end."""
    echo = Echo()
    server = GrpcServer([echo])
    await server.serve(bind_unix_socket(short_dir / "s.sock", mode=0o600))
    async with raw_client(short_dir / "s.sock") as client:
        client.call(WAIT, b"")
        client.flush()
        await echo.happened.wait_for("waiting")
        assert server.connections == 1
        await server.stop()
        await echo.happened.wait_for("ended")
        assert server.connections == 0
        await client.wait_closed_by_server()
        assert any(isinstance(event, ConnectionTerminated) for event in client.events)


async def test_stop_cuts_off_a_client_that_does_not_read(short_dir: Path) -> None:
    """Bytes that nobody takes do not hold the server: its connection is gone after the grace."""
    table = bytes(50_000_000)

    class Flood:
        def __init__(self) -> None:
            self.happened = Recorder()

        def __mapping__(self) -> dict[str, Handler]:
            return {WAIT: Handler(self._flood, Cardinality.UNARY_STREAM, v1beta1.Empty, v1beta1.Empty)}

        async def _flood(self, stream: Any) -> None:
            await stream.recv_message()
            try:
                self.happened.record("sending")
                await stream.send_message(table)
            finally:
                self.happened.record("ended")

    flood = Flood()
    server = GrpcServer([flood])
    await server.serve(bind_unix_socket(short_dir / "s.sock", mode=0o600))
    async with raw_client(short_dir / "s.sock") as client:
        client.h2.increment_flow_control_window(2**30)
        stream_id = client.begin(WAIT)
        client.h2.increment_flow_control_window(2**30, stream_id)
        client.h2.send_data(stream_id, struct.pack(">BI", 0, 0), end_stream=True)
        client.flush()
        await flood.happened.wait_for("sending")
        await until_stuck(client)
        await server.stop(grace_s=0.05)
        await flood.happened.wait_for("ended")
        assert server.connections == 0


async def test_stop_before_serve_does_nothing() -> None:
    """A server that never listened can be stopped."""
    await GrpcServer([Echo()]).stop()


async def test_grpcio_reads_the_same_statuses_and_texts() -> None:
    """A second implementation of the client agrees on success, unknown methods, size and malformed requests."""
    grpc = pytest.importorskip("grpc")
    aio = pytest.importorskip("grpc.aio")
    async with serving(Echo()) as path:
        limits = [("grpc.max_send_message_length", -1)]
        async with aio.insecure_channel(f"unix:{path}", options=limits) as channel:

            async def status(method: str, request: bytes) -> Any:
                try:
                    await channel.unary_unary(method)(request, timeout=DEADLINE_S)
                except aio.AioRpcError as e:
                    return e.code(), e.details()
                return grpc.StatusCode.OK, ""

            assert await status(ECHO, string_list(1, ["a"])) == (grpc.StatusCode.OK, "")
            assert (await status("/x/Y", b""))[0] is grpc.StatusCode.UNIMPLEMENTED
            assert await status(ECHO, bytes(5 * 1024 * 1024)) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "the request of 5242880 bytes is over the limit of 4194304 bytes",
            )
            assert (await status(ECHO, b"\x0a\x7fshort"))[0] is grpc.StatusCode.INVALID_ARGUMENT
            assert await status(ECHO, string_list(1, ["b"])) == (grpc.StatusCode.OK, "")


def test_generated_messages_are_checked_to_their_depth() -> None:
    """A fault inside a submessage, which the generated class would accept silently, is found."""
    good = v1.PodResources(name="p", containers=[v1.ContainerResources(name="c", cpu_ids=[1, 300])])
    assert decode_generated(bytes(v1.ListPodResourcesResponse([good])), v1.ListPodResourcesResponse).pod_resources == [
        good
    ]
    for fault in (
        string_list(3, ["x"]) + b"\x0a\x05x",
        bytes_field(3, integer_field(1, 7)),
        bytes_field(3, b"\x0a\x09"),
    ):
        with pytest.raises(MalformedMessageError):
            decode_generated(bytes_field(1, fault), v1.ListPodResourcesResponse)


def test_unpacked_and_packed_numbers_are_both_accepted() -> None:
    """Protobuf lets a repeated number come either way."""
    packed = decode_generated(bytes_field(3, b"\x01\x02"), v1.ContainerResources)
    unpacked = decode_generated(integer_field(3, 1) + integer_field(3, 2), v1.ContainerResources)
    assert packed.cpu_ids == unpacked.cpu_ids == [1, 2]


def test_an_answer_of_the_wrong_type_is_a_type_error() -> None:
    """A handler's mistake is not sent."""
    with pytest.raises(TypeError, match="must be Empty or bytes, not AllocateRequest"):
        StrictCodec().encode(v1beta1.AllocateRequest(), v1beta1.Empty)


@pytest.mark.parametrize("turns", range(5))
async def test_a_connection_accepted_while_the_server_stops_is_closed(turns: int, short_dir: Path) -> None:
    """However far asyncio has come with it: the client reads the end, and no socket is left open."""
    path = short_dir / "s"
    server = GrpcServer([Echo()])
    await server.serve(bind_unix_socket(path, mode=0o600))
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        client.connect(str(path))
        for _ in range(turns):
            await asyncio.sleep(0)
        await server.stop()
        with suppress(ConnectionResetError):  # an end too: it was never attached
            while await asyncio.get_running_loop().sock_recv(client, 4096):
                pass
    assert server.connections == 0


class Full(GrpcServer):
    async def serve(self, sock: socket.socket) -> None:
        sock.close()
        raise OSError(errno.ENOSPC, "the limit fs.epoll.max_user_watches")


@pytest.mark.parametrize("what", [Full, GrpcServer])
async def test_a_socket_that_cannot_be_served_is_unavailable_and_not_left(
    short_dir: Path, what: type[GrpcServer]
) -> None:
    """The kernel refuses a socket at the bind, or where the event loop begins to listen."""
    path = short_dir / "s.sock"
    if what is GrpcServer:
        path.mkdir()
    served = ServedSocket(path, lambda: what([]))
    with pytest.raises(Unavailable, match=f"{path} cannot be served: "):
        await served.serve()
    assert not served.is_serving and not path.is_socket()


class Slow(GrpcServer):
    async def serve(self, sock: socket.socket) -> None:
        with closing(sock):
            await asyncio.Event().wait()


async def test_a_cancelled_start_stays_cancelled_where_its_socket_cannot_be_removed(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent would not end."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    served = ServedSocket(short_dir / "s.sock", lambda: Slow([]))
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(served.serve())
        await asyncio.sleep(0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", refuse)
            serving.cancel()
            await asyncio.wait({serving})
    assert serving.cancelled()
