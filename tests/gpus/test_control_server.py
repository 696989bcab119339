"""The control socket: who may ask, what is answered, how a GPU is named, and whose file it is."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.agent.commands.cordon import Answer, ask, reported
from gpushare_agent.agent.gpus import control_server
from gpushare_agent.agent.gpus.control_server import MAX_REQUEST_BYTES, ControlServer, select_gpus
from gpushare_agent.agent.gpus.inventory import GpuInventoryState
from gpushare_agent.core.kit.sockets import is_served
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.model.names import GpuUuid
from tests.cluster.support_kube import running
from tests.gpus.support_health import IMMEDIATE, xid
from tests.support_core import inventory, mig_instance
from tests.support_deadline import poll_until
from tests.support_process import output_of


class Parts:
    """What the server speaks to, and what it did with it."""

    def __init__(self) -> None:
        self.inventory = GpuInventoryState(IMMEDIATE)
        self.inventory.read(inventory())
        self.not_kept = ""
        self.polls = 0

    async def save_now(self) -> str:
        return self.not_kept

    def poll_soon(self) -> None:
        self.polls += 1

    def server(self, path: Path) -> ControlServer:
        return ControlServer(path, self.inventory, self, poll_soon=self.poll_soon)


@asynccontextmanager
async def _listening(path: Path) -> AsyncIterator[Parts]:
    parts = Parts()
    async with running(parts.server(path).run):
        await poll_until(lambda: is_served(path), "the socket")
        assert (await _ask(path, "GET", "/gpus")).status == 200
        yield parts


async def _ask(path: Path, method: str, target: str, request: Any = None) -> Answer:
    """The blocking client of the command line, in a thread."""
    return await asyncio.to_thread(ask, path, method, target, request)


def events(logs: Sequence[Mapping[str, Any]]) -> list[str]:
    return [line["event"] for line in logs]


@pytest.fixture
def path(short_dir: Path) -> Path:
    return short_dir / "control.sock"


@pytest.fixture
async def parts(path: Path) -> AsyncIterator[Parts]:
    """Of a server that listens at `path`."""
    async with _listening(path) as made:
        yield made


async def test_a_gpu_is_cordoned_and_put_back(short_dir: Path) -> None:
    """By index or by UUID; the answer shows the GPU as it is now."""
    path = short_dir / "run" / "control.sock"
    async with _listening(path) as parts:
        answer = await _ask(path, "POST", "/cordon", {"gpu": "1", "reason": " new fan "})
        assert (answer.status, answer.document["changed"], answer.document["not_kept"]) == (200, True, "")
        gpu = answer.document["gpu"]
        assert (gpu["index"], gpu["is_healthy"], gpu["cordoned"]) == (1, False, "new fan")
        assert parts.inventory.current.gpus[1].unhealthy_reason == "cordoned: new fan"
        again = await _ask(path, "POST", "/cordon", {"gpu": "GPU-1", "reason": "new fan"})
        assert not again.document["changed"]
        back = await _ask(path, "POST", "/uncordon", {"gpu": "gpu-1"})
        assert back.document["changed"] and back.document["gpu"]["is_healthy"]
        assert parts.polls == 1 and parts.inventory.cordoned == {}
        gpus = (await _ask(path, "GET", "/gpus")).document["gpus"]
    assert [(gpu["index"], gpu["state"], gpu["cordoned"]) for gpu in gpus] == [
        (0, "healthy", None),
        (1, "healthy", None),
    ]


async def test_uncordon_ends_a_wait_for_a_reset_and_says_so(path: Path, parts: Parts) -> None:
    """A poll follows at once."""
    parts.inventory.note_events([xid(79)])
    answer = await _ask(path, "POST", "/uncordon", {"gpu": "0"})
    assert answer.document["ended_wait"] == "Xid 79 (GPU has fallen off the bus)"
    assert answer.document["gpu"]["state"] == "probing" and parts.polls == 1
    text = reported("uncordon", answer.document)
    assert "that wait is ended" in text and "It is Unhealthy still" in text


async def test_what_could_not_be_written_down_is_in_the_answer(path: Path, parts: Parts) -> None:
    """The cordon holds all the same."""
    parts.not_kept = "the disk is full"
    answer = await _ask(path, "POST", "/cordon", {"gpu": "0"})
    assert (answer.status, answer.document["not_kept"]) == (200, "the disk is full")
    assert parts.inventory.cordoned == {"GPU-0": ""}
    assert "forgotten when the agent ends" in reported("cordon", answer.document)


@pytest.mark.parametrize(
    ("request_", "status", "text"),
    [
        ({"gpu": "7"}, 404, "no GPU '7'; its GPUs: 0 (GPU-0), 1 (GPU-1)"),
        ({"gpu": "GPU-"}, 409, "the beginning of 2 GPUs"),
        ({}, 404, "no GPU ''"),
        ({"gpu": 1}, 400, "'gpu' must be a text"),
        ({"gpu": "0", "reason": "x" * 201}, 400, "at most 200 printable"),
        ({"gpu": "0", "reason": "a\nb"}, 400, "printable"),
        ({"gpu": "0", "reason": "\x1b[2J"}, 400, "printable"),
        (["0"], 400, "no JSON object"),
    ],
)
async def test_a_bad_request_changes_nothing_and_is_reported_why(
    path: Path, request_: Any, status: int, text: str, parts: Parts
) -> None:
    """What root asks is bounded and checked, too."""
    answer = await _ask(path, "POST", "/cordon", request_)
    assert answer.status == status and text in answer.document["error"]
    assert parts.inventory.cordoned == {}


@pytest.mark.parametrize(
    ("size", "content", "status", "says"),
    [
        (MAX_REQUEST_BYTES + 1, b"", b" 413 ", b""),
        (1, b"\xff", b" 400 ", b"no JSON"),
        (10_000, b"[" * 10_000, b" 400 ", b"no JSON"),
    ],
    ids=["by its length alone", "no JSON", "nested too deep"],
)
async def test_a_request_that_cannot_be_read_is_refused(
    path: Path, parts: Parts, size: int, content: bytes, status: bytes, says: bytes
) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"POST /cordon HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % size + content)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    assert status in answer.splitlines()[0] and says in answer
    assert parts.inventory.cordoned == {}


async def test_the_socket_is_the_owners_alone_and_goes_with_the_server(path: Path) -> None:
    """Mode 0600 from the first moment."""
    async with _listening(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_is_refused_by_the_kernels_word(path: Path) -> None:
    """Even where the file's mode lets it through."""
    path.parent.chmod(0o755)
    asks = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        "s.sendall(b'GET /gpus HTTP/1.0\\r\\n\\r\\n'); sys.stdout.buffer.write(s.recv(4096))"
    )
    async with _listening(path):
        path.chmod(0o666)
        _, out, _ = await output_of(sys.executable, "-c", asks, path)
    assert b" 403 " in out.splitlines()[0]


async def test_a_living_agents_socket_is_left_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second agent reports it once, runs on, and takes over when the first one ends."""
    monkeypatch.setattr(control_server, "CHECK_PERIOD_S", 0.01)
    second = Parts()
    with capture_logs() as logs:
        async with _listening(path) as first:
            server = second.server(path)
            async with running(server.run):
                await _ask(path, "POST", "/cordon", {"gpu": "0"})
                await poll_until(lambda: "control_socket_not_open" in events(logs), "the report")
                assert first.inventory.cordoned and not second.inventory.cordoned
        async with running(second.server(path).run):
            await poll_until(path.exists, "the socket")
            await _ask(path, "POST", "/cordon", {"gpu": "1"})
    assert second.inventory.cordoned == {"GPU-1": ""}
    [warning] = [line for line in logs if line["event"] == "control_socket_not_open"]
    assert "another process listens there" in warning["error"]


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_socket_whose_file_is_gone_is_opened_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    """Removed, or replaced by a stale one: operators reach the agent again, whose end removes the file."""
    monkeypatch.setattr(control_server, "CHECK_PERIOD_S", 0.01)
    with capture_logs() as logs:
        async with _listening(path) as parts:
            path.unlink()
            if is_replaced:
                with socket.socket(socket.AF_UNIX) as stale:
                    stale.bind(str(path))
            await poll_until(lambda: is_served(path), "the socket again")
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert (await _ask(path, "POST", "/cordon", {"gpu": "0"})).status == 200
            assert parts.inventory.cordoned
    assert os.listdir(path.parent) == []
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["control_socket_gone"]


async def test_a_socket_of_another_program_in_its_place_is_left_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither replaced nor removed at the end; the log names who is in the way."""
    monkeypatch.setattr(control_server, "CHECK_PERIOD_S", 0.01)
    with capture_logs() as logs, socket.socket(socket.AF_UNIX) as other:
        async with _listening(path):
            path.unlink()
            other.bind(str(path))
            other.listen()
            await poll_until(lambda: "control_socket_not_open" in events(logs), "the report")
        assert path.is_socket()
    assert events(logs).count("control_socket_gone") == 1


async def test_a_file_in_the_sockets_place_is_left_alone(path: Path) -> None:
    """The agent runs on without the socket, and reports what to do."""
    path.write_text("mine")
    with capture_logs() as logs:
        async with running(Parts().server(path).run):
            await poll_until(lambda: logs, "the report")
    assert path.read_text() == "mine"
    assert "--control.socket" in logs[0]["error"]


async def test_where_no_agent_listens_the_caller_gets_an_error(path: Path) -> None:
    """No socket, or one that nobody serves, or something else."""
    with pytest.raises(Unavailable, match="no agent listens"):
        await _ask(path, "GET", "/gpus")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with pytest.raises(Unavailable, match="no agent listens"):
        await _ask(path, "GET", "/gpus")
    path.unlink()

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello\r\n\r\n" + json.dumps({}).encode())
        writer.close()

    server = await asyncio.start_unix_server(babble, path)
    with pytest.raises(Unavailable, match="did not answer as it should"):
        await _ask(path, "GET", "/gpus")
    server.close()
    await server.wait_closed()


async def test_a_gpu_that_mig_divides_is_cordoned_and_put_back(path: Path, parts: Parts) -> None:
    """It is named by its index as ever; its instance shows what holds for it, and is not put back by itself."""
    found = inventory()
    instance = mig_instance(2, 0, 1)
    parts.inventory.read(replace(found, gpus=(found.gpus[1], instance), mig_partitioned=(found.gpus[0],)))
    cordoned = await _ask(path, "POST", "/cordon", {"gpu": "0", "reason": "fan"})
    parts.inventory.note_events([xid(79, 0)])
    shown = (await _ask(path, "GET", "/gpus")).document["gpus"]
    alone = await _ask(path, "POST", "/uncordon", {"gpu": "0:1"})
    back = await _ask(path, "POST", "/uncordon", {"gpu": "0"})
    parts.inventory.read(parts.inventory.current)
    assert cordoned.document["changed"] and not cordoned.document["gpu"]["is_healthy"]
    assert {gpu["label"]: (gpu["is_healthy"], gpu["cordoned"]) for gpu in shown} == {
        "1": (True, None),
        "0:1": (False, "fan"),
        "0": (False, "fan"),
    }
    assert "It is Unhealthy still: fan; also, its GPU 0: Xid 79" in reported("uncordon", alone.document)
    assert back.document["ended_wait"] == "Xid 79 (GPU has fallen off the bus)"


UUIDS = ("GPU-11aa-1", "GPU-11ab-2", "GPU-2ccc-3")
GPUS = [replace(gpu, uuid=GpuUuid(uuid)) for gpu, uuid in zip(inventory(3).gpus, UUIDS, strict=True)]


@pytest.mark.parametrize(
    ("text", "indexes"),
    [
        ("0", [0]),
        (" 02 ", [2]),
        ("3", []),
        ("11", []),
        ("GPU-11aa-1", [0]),
        ("gpu-11AA-1", [0]),
        ("2c", [2]),
        ("GPU-11a", [0, 1]),
        ("11a", [0, 1]),
        ("GPU-", [0, 1, 2]),
        ("", []),
        ("²", []),
        ("GPU-9", []),
    ],
)
def test_a_gpu_is_an_index_a_uuid_or_its_beginning(text: str, indexes: list[int]) -> None:
    """Several are left to the caller to distinguish; digits alone are never a UUID."""
    assert [gpu.index for gpu in select_gpus(text, GPUS)] == indexes


def test_a_mig_instance_is_named_as_nvidia_does() -> None:
    """By its GPU's index and its number; one that is gone has no such name any more. An index alone is the agent's."""
    made, place = mig_instance(4, 0, 1), mig_instance(5, 0, 1).mig
    assert place is not None
    gone = replace(mig_instance(5, 0, 1), mig=replace(place, is_gone=True))
    assert [gpu.index for gpu in select_gpus("0:1", [*GPUS, gone, made])] == [4]
    assert [gpu.index for gpu in select_gpus("mig-5", [*GPUS, gone, made])] == [5]
    assert select_gpus("0:2", [made]) == []


def test_a_whole_uuid_wins_over_a_longer_one_that_begins_so() -> None:
    """What is named in full is meant."""
    longer = replace(GPUS[1], uuid=GpuUuid(UUIDS[0] + "-x"))
    assert select_gpus(UUIDS[0], [longer, GPUS[0]]) == [GPUS[0]]
