"""native/gpu-client.c against this project's servers, grpcio's, and answers of hostile ones; under sanitizers."""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import hpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpushare_agent.agent.isolation.vdevice.files import VDeviceFiles
from gpushare_agent.agent.isolation.vdevice.server import METHOD, VDeviceLimits
from gpushare_agent.core.kit.bounded_grpc import ServerLimits
from gpushare_agent.core.model.errors import NotFound, Unavailable
from gpushare_agent.core.wire.vcuda import VDeviceRequest
from tests.isolation.support_gpu_client import (
    Ended,
    compile_gpu_client,
    register_by_id,
    register_by_name,
    run_gpu_client,
)
from tests.isolation.support_vdevice import (
    ID,
    KEY,
    OTHER_ID,
    OTHER_POD,
    POD,
    FakeNode,
    server_of,
    serving,
    share_config,
)
from tests.kit.support_http2 import frame

DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 9
END_STREAM, END_HEADERS, PADDED = 1, 4, 8
STATUS_OK, FIELDS_OK = ("grpc-status", "0"), [(":status", "200"), ("content-type", "application/grpc")]
STARTED_AT_ONCE = 150


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As it is built for containers."""
    return compile_gpu_client(tmp_path_factory.mktemp("gpu-client") / "gpu-client")


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With sanitizers; it calls for a minute, so every test ends before it gives up."""
    return compile_gpu_client(tmp_path_factory.mktemp("gpu-client") / "gpu-client", calls_ms=60_000)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With sanitizers; it calls once, and waits a minute for the answer."""
    directory = tmp_path_factory.mktemp("gpu-client")
    return compile_gpu_client(directory / "gpu-client", calls_ms=0, attempt_ms=60_000)


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With sanitizers; it calls once, and waits 200 ms for the answer."""
    directory = tmp_path_factory.mktemp("gpu-client")
    return compile_gpu_client(directory / "gpu-client", calls_ms=0, attempt_ms=200)


def with_files(directory: Path, *, has_pids: bool = True) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "vcuda.config").write_bytes(share_config())
    if has_pids:
        (directory / "pids.config").write_bytes(b"")
    return directory / "vcuda.sock"


# ---- This project's server ----


async def test_it_registers_by_name_and_by_id(patient: Path, short_dir: Path) -> None:
    """Exit code 0 and no output: the program's own output is its user's."""
    node = FakeNode()
    node.containers[ID] = KEY
    async with serving(short_dir, node) as path:
        assert await register_by_name(patient, path) == Ended(0, "")
        assert await register_by_id(patient, path, ID) == Ended(0, "")
    assert node.refreshed == [(KEY, None), (KEY, ID)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"pod_uid": OTHER_POD}, f"PERMISSION_DENIED: the message names pod {OTHER_POD}, but this socket belongs to"),
        ({"name": "other"}, "PERMISSION_DENIED: the message names container 'other'"),
        ({"name": "../x"}, "INVALID_ARGUMENT: container_name '../x' (4 characters)"),
        ({"pod_uid": "a"}, "INVALID_ARGUMENT: pod_uid 'a' (1 characters) is no pod UID"),
    ],
)
async def test_a_refusal_ends_it_at_once_with_the_agents_text(
    patient: Path, short_dir: Path, arguments: dict[str, str], says: str
) -> None:
    """A claim that is wrong stays wrong: no second call, also where the files are in place."""
    node = FakeNode()
    async with serving(short_dir, node) as path:
        with_files(path.parent)
        ended = await register_by_name(patient, path, **arguments)
    assert ended.code == 1
    assert says in ended.text
    assert len(node.codes) == 1


class Recovers(FakeNode):
    """Fails so many times, then registers."""

    failures: list[Exception]

    async def refresh(self, key: Any, container_id: str | None, caller: Any = None) -> None:
        self.fails = self.failures.pop(0) if self.failures else None
        await super().refresh(key, container_id)


async def test_it_calls_again_until_the_agent_can_answer(patient: Path, short_dir: Path) -> None:
    """UNAVAILABLE, NOT_FOUND and INTERNAL are no answer; the first OK is."""
    node = Recovers()
    node.failures = [Unavailable("the disk is full"), NotFound("not prepared"), RuntimeError("a fault of the agent")]
    async with serving(short_dir, node) as path:
        assert await register_by_name(patient, path) == Ended(0, "")
    assert node.codes == ["UNAVAILABLE", "NOT_FOUND", "INTERNAL", "OK"]


async def test_it_waits_for_an_agent_that_starts(patient: Path, short_dir: Path) -> None:
    """No socket, a socket without a listener, a server that hangs up: each is an agent that restarts."""
    node, files = FakeNode(), VDeviceFiles(short_dir)
    files.prepare(KEY)
    path = files.path(KEY) / "vcuda.sock"
    async with asyncio.TaskGroup() as group:
        call = group.create_task(register_by_name(patient, path))
        async with hanging_up(path) as came:
            async with asyncio.timeout(20):
                await came.wait()
        server = server_of(files, node)
        await server.start(files.bind_socket(KEY))
        assert await call == Ended(0, "")
        await server.stop()


@asynccontextmanager
async def hanging_up(path: Path) -> AsyncIterator[asyncio.Event]:
    """Closes each connection at once; the event is set by the first."""
    came = asyncio.Event()

    def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()
        came.set()

    async with await asyncio.start_unix_server(close, path):
        yield came


@pytest.mark.parametrize(
    ("has_config", "has_pids", "code", "says"),
    [
        (True, True, 0, "The limits that it wrote stay in force, and the program starts"),
        (True, False, 1, "Without its limits the program cannot start"),
        (False, False, 1, "Without its limits the program cannot start"),
    ],
)
async def test_an_agent_that_stays_away_ends_no_program_that_has_its_limits(
    single: Path, short_dir: Path, has_config: bool, has_pids: bool, code: int, says: str
) -> None:
    """After the time it exits with 0 where both files are in place, and with 1 where the library has no limits to read."""
    if has_config:
        with_files(short_dir, has_pids=has_pids)
    ended = await register_by_name(single, short_dir / "vcuda.sock")
    assert ended.code == code
    assert says in ended.text
    assert "No such file or directory" in ended.text


async def test_by_id_the_files_named_after_the_id_count(single: Path, short_dir: Path) -> None:
    """The library then reads those, not the ones next to the socket."""
    path = with_files(short_dir)
    assert (await register_by_id(single, path, ID)).code == 1
    with_files(short_dir / ID)
    assert (await register_by_id(single, path, ID)).code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--addr"],
        ["--addr", "/x", "--unknown", "y"],
        ["--addr", "/x", "--pod-uid", POD],
        ["--addr", "/x", "--pod-uid", POD, "--cont-name", "a", "--cont-id", ID],
        ["--addr", "", "--pod-uid", POD, "--cont-name", "a"],
        ["--addr", "/" + "x" * 107, "--pod-uid", POD, "--cont-name", "a"],
        ["--addr", "/x", "--pod-uid", "u" * 65, "--cont-name", "a"],
        ["--addr", "/x", "--pod-uid", POD, "--cont-name", "n" * 513],
        ["--addr", "/x", "--pod-uid", POD, "--cont-id", "../" + "a" * 61],
    ],
)
async def test_wrong_arguments_are_refused_before_any_call(patient: Path, arguments: list[str]) -> None:
    ended = await run_gpu_client(patient, *arguments)
    assert ended.code == 2
    assert ended.text.startswith("usage: gpu-client --addr SOCKET")


async def test_the_longest_names_arrive_whole(patient: Path, short_dir: Path) -> None:
    """Lengths of two bytes in the message: dockershim's names are up to 512 characters."""
    name = f"/k8s_cuda_{'p' * 253}_{'n' * 63}_{POD}_0"
    node = FakeNode()
    async with serving(short_dir, node) as path:
        assert await register_by_name(patient, path, name=name) == Ended(0, "")


async def all_at_once(program: Path, path: Path) -> list[Ended]:
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(register_by_name(program, path)) for _ in range(STARTED_AT_ONCE)]
    return [call.result() for call in calls]


async def test_150_processes_are_all_registered_although_the_agent_restarts_meanwhile(
    program: Path, short_dir: Path
) -> None:
    """Its server ends among their calls, and another one takes the socket over."""
    first, second, files = FakeNode(), FakeNode(), VDeviceFiles(short_dir)
    files.prepare(KEY)
    server = server_of(files, first)
    await server.start(files.bind_socket(KEY))
    async with asyncio.TaskGroup() as group:
        calls = group.create_task(all_at_once(program, files.path(KEY) / "vcuda.sock"))
        async with asyncio.timeout(20):
            while len(first.codes) < 20:
                await asyncio.sleep(0.001)
        await server.stop()
        server = server_of(files, second)
        await server.start(files.bind_socket(KEY))
        assert await calls == [Ended(0, "")] * STARTED_AT_ONCE
        await server.stop()
    assert second.codes.count("OK") >= 1


# ---- grpcio's server: another encoder of headers, with trailers of its own ----


@pytest.fixture
def grpc() -> ModuleType:
    return pytest.importorskip("grpc", reason="grpcio, the other gRPC implementation, is not installed")


@contextmanager
def grpcio_serving(grpc: Any, path: Path, answer: Callable[[VDeviceRequest, Any], bytes]) -> Iterator[None]:
    def serve(content: bytes, context: Any) -> bytes:
        return answer(VDeviceRequest.parse(content), context)

    handler = grpc.method_handlers_generic_handler(
        METHOD.split("/")[1], {METHOD.split("/")[2]: grpc.unary_unary_rpc_method_handler(serve)}
    )
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2), handlers=[handler])
    server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        yield
    finally:
        server.stop(grace=None).wait(10)


async def test_grpcios_server_reads_the_request_and_its_answer_is_read(
    grpc: ModuleType, patient: Path, short_dir: Path
) -> None:
    """All fields arrive; an empty message and trailers come back."""
    found: list[VDeviceRequest] = []

    def answer(request: VDeviceRequest, _: Any) -> bytes:
        found.append(request)
        return b""

    with grpcio_serving(grpc, short_dir / "s", answer):
        assert await register_by_name(patient, short_dir / "s") == Ended(0, "")
        assert await register_by_id(patient, short_dir / "s", OTHER_ID) == Ended(0, "")
    assert found == [
        VDeviceRequest(pod_uid=POD, container_name="cuda"),
        VDeviceRequest(pod_uid=POD, container_id=OTHER_ID),
    ]


async def test_grpcios_refusal_is_read_with_its_text(grpc: Any, patient: Path, short_dir: Path) -> None:
    """Percent encoding is undone, control characters are left out, and a long text is cut short."""

    def refuse(_: VDeviceRequest, context: Any) -> bytes:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "100 % größer\n\x1b[31m" + "x" * 2000)
        return b""

    with grpcio_serving(grpc, short_dir / "s", refuse):
        ended = await register_by_name(patient, short_dir / "s")
    assert ended.code == 1
    assert "PERMISSION_DENIED: 100 % größer[31mxxx" in ended.text
    assert len(ended.text) < 1000


# ---- Answers of hostile servers ----


def block(fields: list[tuple[str, str]], *, huffman: bool = True) -> bytes:
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    return encoder.encode(fields, huffman=huffman)


def answer(*trailers: tuple[str, str], huffman: bool = True) -> bytes:
    """Headers, an empty message, trailers."""
    return (
        frame(SETTINGS, 0, 0, b"")
        + frame(HEADERS, END_HEADERS, 1, block(FIELDS_OK, huffman=huffman))
        + frame(DATA, 0, 1, bytes(5))
        + frame(HEADERS, END_HEADERS | END_STREAM, 1, block(list(trailers), huffman=huffman))
    )


@asynccontextmanager
async def answering(path: Path, content: bytes, *, repeats: bool = False, stays: bool = True) -> AsyncIterator[None]:
    """Answers whatever comes with the bytes, for ever where it repeats; it stays connected until the peer goes, or not."""

    async def answer_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readexactly(24)  # the preface
            writer.write(content)
            while repeats:
                await writer.drain()
                writer.write(content)
            await writer.drain()
            while stays and await reader.read(65536):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    async with await asyncio.start_unix_server(answer_one, path):
        yield


@pytest.mark.parametrize("huffman", [True, False])
async def test_it_reads_texts_with_and_without_huffman_codes(patient: Path, short_dir: Path, huffman: bool) -> None:
    text = "".join(chr(c) for c in range(32, 127) if chr(c) != "%")
    content = answer(("grpc-status", "7"), ("grpc-message", text), huffman=huffman)
    async with answering(short_dir / "s", content):
        ended = await register_by_name(patient, short_dir / "s")
    assert ended.code == 1
    assert f"PERMISSION_DENIED: {text}\n" in ended.text


FRAGMENTS = block([*FIELDS_OK, ("x-long", "y" * 9000), STATUS_OK], huffman=False)
GOOD = {
    "trailers alone": frame(HEADERS, END_HEADERS | END_STREAM, 1, block([*FIELDS_OK, STATUS_OK])),
    "in three fragments": (
        frame(HEADERS, END_STREAM, 1, FRAGMENTS[:10])
        + frame(CONTINUATION, 0, 1, FRAGMENTS[10:5000])
        + frame(CONTINUATION, END_HEADERS, 1, FRAGMENTS[5000:])
    ),
    "padded, with a priority": frame(
        HEADERS, END_HEADERS | END_STREAM | PADDED | 32, 1, b"\x03" + bytes(5) + block([STATUS_OK]) + bytes(3)
    ),
    "among other streams and kinds": (
        frame(HEADERS, END_HEADERS, 3, b"\xff")
        + frame(PING, 0, 0, bytes(8))
        + frame(99, 255, 1, b"?")
        + answer(STATUS_OK)
    ),
    "after a GOAWAY that lets the call end": frame(GOAWAY, 0, 0, struct.pack(">II", 1, 0)) + answer(STATUS_OK),
    "names to remember, in a table of no bytes": frame(
        HEADERS, END_HEADERS | END_STREAM, 1, b"\x20\x40\x0bgrpc-status\x010"
    ),
}


@pytest.mark.parametrize("name", GOOD)
async def test_it_reads_every_form_of_an_answer(patient: Path, short_dir: Path, name: str) -> None:
    async with answering(short_dir / "s", GOOD[name]):
        assert await register_by_name(patient, short_dir / "s") == Ended(0, "")


BAD = {
    "a status of 12 digits": (answer(("grpc-status", "9" * 12)), "malformed header block"),
    "a status that is no number": (answer(("grpc-status", "OK")), "malformed header block"),
    "no status": (answer(), "ended without a status"),
    "an index beyond the static table": (frame(HEADERS, END_HEADERS, 1, b"\xbe"), "malformed header block"),
    "index 0": (frame(HEADERS, END_HEADERS, 1, b"\x80"), "malformed header block"),
    "a number without end": (frame(HEADERS, END_HEADERS, 1, b"\xff" + b"\xff" * 20), "malformed header block"),
    "a number at the block's end": (frame(HEADERS, END_HEADERS, 1, b"\x7f"), "malformed header block"),
    "a text longer than its block": (frame(HEADERS, END_HEADERS, 1, b"\x00\x7e" + b"x"), "malformed header block"),
    "a table of 4096 bytes": (frame(HEADERS, END_HEADERS, 1, b"\x3f\xe1\x1f"), "malformed header block"),
    "the end symbol in a text": (frame(HEADERS, END_HEADERS, 1, b"\x00\x84" + b"\xff" * 4), "malformed header block"),
    "a frame of 16 MiB": (b"\xff\xff\xff" + bytes([HEADERS, 4]) + b"\0\0\0\1", "more than 16 KiB"),
    "a block of 64 KiB": (
        frame(HEADERS, 0, 1, b"x" * 16000) + frame(CONTINUATION, 0, 1, b"x" * 16000) * 4,
        "over 16 KiB",
    ),
    "padding longer than its frame": (frame(HEADERS, END_HEADERS | PADDED, 1, b"\xff\x00"), "malformed or over"),
    "padding of an empty frame": (frame(HEADERS, END_HEADERS | PADDED, 1, b""), "malformed or over"),
    "a priority cut short": (frame(HEADERS, END_HEADERS | 32, 1, b"\x00"), "malformed or over"),
    "an interrupted block": (frame(HEADERS, 0, 1, b"") + frame(PING, 0, 0, bytes(8)), "interrupted"),
    "a continuation of nothing": (frame(CONTINUATION, 4, 1, b""), "interrupted"),
    "another stream's continuation": (frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, 4, 3, b""), "interrupted"),
    "a ping of 100 bytes": (frame(PING, 0, 0, bytes(100)), "ping"),
    "a push": (frame(PUSH_PROMISE, 4, 1, bytes(4)), "push"),
    "a reset": (frame(RST_STREAM, 0, 1, struct.pack(">I", 8)), "ended the call"),
    "a GOAWAY before the call": (frame(GOAWAY, 0, 0, bytes(8)), "shutting down"),
    "a GOAWAY cut short": (frame(GOAWAY, 0, 0, b"\1"), "shutting down"),
    "a status of tomorrow": (answer(("grpc-status", "99")), "an unknown status"),
    "no HTTP/2": (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" + bytes(100), "more than 16 KiB"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
async def test_a_malformed_answer_is_none(single: Path, short_dir: Path, name: str) -> None:
    """It counts as no answer, with the reason; no sanitizer finds a fault."""
    content, says = BAD[name]
    async with answering(short_dir / "s", content):
        ended = await register_by_name(single, short_dir / "s")
    assert ended.code == 1
    assert says in ended.text
    assert "ERROR: " not in ended.text
    assert "runtime error" not in ended.text


@pytest.mark.parametrize(
    ("content", "repeats", "says"),
    [
        (b"", False, "no answer in time|over 262144 bytes"),
        (answer(STATUS_OK)[:-1], False, "no answer in time"),
        (frame(SETTINGS, 0, 0, b""), True, "over 262144 bytes|no answer in time"),
        (frame(PING, 1, 0, bytes(8)), True, "over 262144 bytes|no answer in time"),
        (frame(DATA, 0, 1, bytes(16384)), True, "over 262144 bytes|no answer in time"),
        (frame(HEADERS, END_HEADERS, 1, block(FIELDS_OK)), True, "over 262144 bytes|no answer in time"),
    ],
    ids=["silence", "all but the last byte", "settings", "pings", "data", "headers"],
)
async def test_an_answer_without_end_is_cut_off(
    hasty: Path, short_dir: Path, content: bytes, repeats: bool, says: str
) -> None:
    async with answering(short_dir / "s", content, repeats=repeats):
        ended = await register_by_name(hasty, short_dir / "s")
    assert ended.code == 1
    assert re.search(says, ended.text), ended.text


WHOLE = answer(("grpc-status", "7"), ("grpc-message", "no"))


async def test_an_answer_cut_off_anywhere_is_none(single: Path, short_dir: Path) -> None:
    """The server closes the connection after each number of bytes."""
    for size in range(0, len(WHOLE), 7):
        async with answering(short_dir / f"s{size}", WHOLE[:size], stays=False):
            ended = await register_by_name(single, short_dir / f"s{size}")
        assert ended.code == 1
        assert "closed the connection" in ended.text


@given(at=st.integers(0, len(WHOLE) - 1), bytes_=st.binary(min_size=1, max_size=6))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_answer_with_any_bytes_changed_is_survived(single: Path, short_dir: Path, at: int, bytes_: bytes) -> None:
    """It exits with 0 or 1 and names the agent; anything else were a fault that a sanitizer found."""

    async def call() -> Ended:
        async with answering(short_dir / "s", WHOLE[:at] + bytes_ + WHOLE[at + len(bytes_) :], stays=False):
            return await register_by_name(single, short_dir / "s")

    ended = asyncio.run(call())
    (short_dir / "s").unlink(missing_ok=True)
    assert ended.code in (0, 1)
    assert ended.code == 0 or ended.text.startswith("gpu-client: the node's GPU agent ")


def test_the_bounds_of_the_socket_are_those_that_the_client_expects() -> None:
    """One of its calls outlasts the agent's longest."""
    source = (Path(__file__).parent.parent.parent / "native" / "gpu-client.c").read_text()
    attempt_ms = re.search(r"define ATTEMPT_MS (\d+)", source)
    assert attempt_ms is not None
    assert int(attempt_ms[1]) > 1000 * VDeviceLimits().call_s
    assert ServerLimits().max_request_bytes >= 1024
