"""observability/display.py: gpu-manager's messages over gRPC (grpcio as a foreign client) and as
JSON.
"""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import structlog
from aiohttp import ClientSession
from msgspec import to_builtins
from msgspec.structs import replace

from gpushare_agent import __version__
from gpushare_agent.agent.observability.display import (
    DisplayServer,
    Usage,
    encode_usage,
    graph_text,
    routes,
    usage_document,
)
from gpushare_agent.agent.observability.node_snapshot import NodeSnapshot
from gpushare_agent.core.kit.sockets import bind_unix_socket, is_served
from gpushare_agent.core.model.gpus import Health
from gpushare_agent.core.wire.display import GraphResponse, UsageResponse, VersionResponse
from tests.agent.support_agent import poll_until
from tests.cluster.support_kube import running
from tests.observability.support_display import GPU_0, GPU_1, GPU_MIB, snapshot, usage_round
from tests.observability.support_web import served
from tests.support_deadline import DEADLINE_S

MIB = 1024 * 1024
GRAPH = f"""\
ROOT:0
|---PIX (aval: 0, pids: [41 42 77], usedMemory: {3 * 1024 * MIB}, totalMemory: {2 * GPU_MIB * MIB}, \
allocatableCores: 0, allocatableMemory: 0) cost: 2000
|   |---GPU0 (pids: [41 42 77], usedMemory: {3 * 1024 * MIB}, totalMemory: {GPU_MIB * MIB}, \
allocatableCores: 70, allocatableMemory: {(GPU_MIB - 2048) * MIB})
|   |---GPU1 (pids: [], usedMemory: 0, totalMemory: {GPU_MIB * MIB}, allocatableCores: 0, allocatableMemory: 0)
"""


@pytest.fixture
def grpc() -> ModuleType:
    return pytest.importorskip("grpc", reason="grpcio, the other gRPC implementation, is not installed")


async def call(grpc: Any, path: Path, method: str, request: bytes = b"") -> bytes | tuple[str, str]:
    """The answer's bytes to grpcio in a thread of its own, or the code's name and the text."""

    def ask() -> bytes | tuple[str, str]:
        with grpc.insecure_channel(f"unix:{path}", options=[("grpc.enable_http_proxy", 0)]) as channel:
            stub = channel.unary_unary(
                f"/display.GPUDisplay/{method}", request_serializer=bytes, response_deserializer=bytes
            )
            try:
                return bytes(stub(request, timeout=DEADLINE_S))
            except grpc.RpcError as error:
                return error.code().name, error.details()

    return await asyncio.to_thread(ask)


@asynccontextmanager
async def serving(path: Path, **others: Any) -> AsyncIterator[DisplayServer]:
    server = DisplayServer(path, lambda: snapshot(usage=usage_round()), **others)
    async with running(server.run):
        await poll_until(lambda: is_served(path), "the display serves")
        yield server


@pytest.fixture
def path(short_dir: Path) -> Path:
    return short_dir / "display.sock"


def test_the_graph_shows_what_is_used_and_free_of_each_gpu() -> None:
    """One line a GPU, in gpu-manager's words and bytes, below the tree."""
    assert graph_text(snapshot(usage=usage_round())) == GRAPH


def test_the_graph_names_the_health_of_a_gpu_in_one_line() -> None:
    """A cordon is no reason, a GPU may have both, and a reason of several lines cannot make a line of its own."""
    seen = snapshot()
    gpus = [replace(gpu, health=Health.UNHEALTHY, unhealthy_reason="for the kubelet") for gpu in seen.inventory.gpus]
    ill = replace(
        seen,
        inventory=replace(seen.inventory, gpus=tuple(gpus)),
        cordoned={GPU_0: "swap", GPU_1: ""},
        unhealthy_reasons={GPU_0: "Xid 79\nGPU9"},
    )
    lines = graph_text(ill).splitlines()
    assert lines[2].endswith(") Unhealthy: Xid 79 GPU9 Cordoned: swap")
    assert all("allocatableCores: 0, allocatableMemory: 0)" in line for line in lines[2:])
    assert lines[3].endswith(") Cordoned: no reason given")
    assert len(lines) == 4


def shown_usage(seen: NodeSnapshot) -> dict[str, Any]:
    """As it is written."""
    found: dict[str, Any] = to_builtins(usage_document(seen))
    return found


def test_usage_is_reported_in_percent_and_mib_by_pod_and_container() -> None:
    """Keys, units and whose it is are gpu-manager's; what is zero is left out, as its gateway does."""
    assert shown_usage(snapshot(usage=usage_round())) == {
        "usage": {
            "uid-big": {
                "project": "default",
                "spec": {"main": {"gpu": 1.0, "mem": float(GPU_MIB)}},
                "stat": {"main": {"dev": [{"id": "0000:01:00.0", "card_idx": "1", "device_mem": 24576.0}]}},
            },
            "uid-train": {
                "cluster": "blue",
                "project": "default",
                "spec": {"log": {}, "train": {"gpu": 0.3, "mem": 2048.0}},
                "stat": {
                    "train": {
                        "dev": [
                            {
                                "id": "0000:00:00.0",
                                "card_idx": "0",
                                "gpu": 7.0,
                                "mem": 1536.0,
                                "pids": [41, 42],
                                "device_mem": 24576.0,
                            }
                        ]
                    }
                },
                "user": "ann",
            },
        }
    }


def test_containers_are_listed_before_the_first_sample() -> None:
    """From the moment of allocation, with nothing used."""
    found = shown_usage(snapshot())["usage"]["uid-train"]["stat"]["train"]
    assert found == {"dev": [{"id": "0000:00:00.0", "card_idx": "0", "device_mem": 24576}]}


@pytest.mark.parametrize("round_of", [usage_round, lambda: None])
def test_the_bytes_of_usage_are_those_of_the_generated_class(round_of: Any) -> None:
    """Whatever is in the document, the proto's own decoder reads it."""
    document = usage_document(snapshot(usage=round_of()))
    read = UsageResponse.parse(encode_usage(document))
    assert read == UsageResponse.parse(bytes(UsageResponse.from_dict(to_builtins(document))))
    assert read.usage["uid-train"].stat["train"].dev[0].card_idx == "0"
    assert UsageResponse.parse(encode_usage(Usage())) == UsageResponse()


def test_a_node_without_gpus_and_pods_has_an_empty_usage_and_a_bare_root() -> None:
    """As gpu-manager's empty message."""
    empty = snapshot()
    nothing = replace(
        empty,
        containers=(),
        inventory=replace(
            empty.inventory,
            gpus=(),
            topology=replace(
                empty.inventory.topology, links=(), root=replace(empty.inventory.topology.root, gpus=(), children=())
            ),
        ),
    )
    assert shown_usage(nothing) == {}
    assert graph_text(nothing) == "ROOT:0\n"


async def test_a_foreign_client_reads_all_three(path: Path, grpc: ModuleType) -> None:
    """grpcio gets the graph, the usage and the version."""
    async with serving(path):
        answers = [await call(grpc, path, method) for method in ("PrintGraph", "PrintUsages", "Version")]
    assert all(isinstance(answer, bytes) for answer in answers), answers
    graph_bytes, usage_bytes, version_bytes = answers
    assert GraphResponse.parse(graph_bytes).graph == GRAPH
    assert UsageResponse.parse(usage_bytes) == UsageResponse.parse(
        encode_usage(usage_document(snapshot(usage=usage_round())))
    )
    assert VersionResponse.parse(version_bytes).version == "1.2.3"
    assert not path.exists()


async def test_what_is_no_such_call_is_refused_by_name(path: Path, grpc: ModuleType) -> None:
    """An unknown method and bytes that are no message each get a code; the server goes on."""
    async with serving(path):
        assert (await call(grpc, path, "Shutdown"))[0] == "UNIMPLEMENTED"
        assert (await call(grpc, path, "Version", b"\xff\xff\xff"))[0] == "INVALID_ARGUMENT"
        assert (await call(grpc, path, "Version", b"\x0a" * 8192))[0] == "RESOURCE_EXHAUSTED"
        assert isinstance(await call(grpc, path, "Version"), bytes)


async def test_a_failing_look_at_the_node_is_an_answer_and_not_the_end(short_dir: Path, grpc: ModuleType) -> None:
    """The caller reads where the traceback is."""

    def fail() -> Any:
        raise ValueError("broken")

    path = short_dir / "display.sock"
    server = DisplayServer(path, fail)
    async with running(server.run):
        await poll_until(lambda: is_served(path), "the display serves")
        with structlog.testing.capture_logs() as logged:
            code, text = await call(grpc, path, "PrintGraph")  # type: ignore[misc]  # bytes would be the failure
    assert (code, "log has the traceback" in str(text)) == ("INTERNAL", True)
    assert [line["event"] for line in logged] == ["rpc_failed"]


async def test_the_socket_is_for_root_alone(path: Path) -> None:
    """It names all tenants' pods and processes."""
    async with serving(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_socket_that_another_process_serves_is_left_to_it(path: Path) -> None:
    """gpu-manager may still run; once it has gone, the socket is taken. The problem is logged once."""
    other = bind_unix_socket(path, mode=0o600)
    other.listen(8)
    inode = path.stat().st_ino
    server = DisplayServer(path, snapshot, retry_s=0.01)
    with structlog.testing.capture_logs() as logged:
        async with running(server.run):
            accepted = [await _accept(other) for _ in range(3)]
            assert path.stat().st_ino == inode
            for connection in accepted:
                connection.close()
            other.close()
            await poll_until(lambda: is_served(path), "the display serves")
    events = [line["event"] for line in logged]
    assert events == ["display_unavailable", "display_serving"]
    assert "another process" in logged[0]["error"]


@pytest.mark.parametrize("has_file", [True, False])
async def test_what_is_no_socket_stays_and_is_reported_with_the_cure(short_dir: Path, has_file: bool) -> None:
    """Also a missing directory. The agent runs on without the display; nothing is removed."""
    path = short_dir / "d" / "display.sock"
    if has_file:
        path.parent.mkdir()
        path.write_text("kept")
    with structlog.testing.capture_logs() as logged:
        async with running(DisplayServer(path, snapshot, retry_s=0.01).run):
            await poll_until(lambda: logged, "the warning")
    assert [line["event"] for line in logged] == ["display_unavailable"]
    assert "display.socket" in logged[0]["error"]
    assert not has_file or path.read_text() == "kept"


async def test_a_socket_that_was_removed_comes_back(path: Path, grpc: ModuleType) -> None:
    """A clean-up of /var/run costs one interval."""
    async with serving(path, retry_s=0.01):
        path.unlink()
        await poll_until(lambda: is_served(path), "the socket is back")
        assert isinstance(await call(grpc, path, "Version"), bytes)


async def test_the_web_port_gives_the_same_messages_as_json() -> None:
    """/graph, /usage and /version, GET only."""
    async with served(routes=routes(lambda: snapshot(usage=usage_round()))) as url, ClientSession() as session:
        found = {}
        for path in ("/graph", "/usage", "/version"):
            async with session.get(url + path) as answer:
                assert (answer.status, answer.content_type) == (200, "application/json")
                found[path] = await answer.json()
        async with session.post(url + "/usage") as answer:
            assert answer.status == 405
    assert found["/graph"] == {"graph": GRAPH}
    assert found["/usage"] == shown_usage(snapshot(usage=usage_round()))
    assert found["/version"] == {"version": __version__}


async def _accept(listener: socket.socket) -> socket.socket:
    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
    return connection
