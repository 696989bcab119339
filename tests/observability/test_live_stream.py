"""The stream over real sockets: document and patches, one work for all readers, slow and vanished readers, the end."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from bench.sample_node import SampleNode, uid_of
from gpushare_agent.observability.http.live_stream import MOST_STREAMS
from tests.support_agent import poll_until
from tests.support_kube import DEADLINE_S
from tests.support_web import ServedNode, served_node


class Reader:
    """A client of the stream on a plain socket, so that nothing is buffered or retried behind the test's back."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self.status = 0
        self.headers: dict[str, str] = {}
        self._rest = b""

    async def read_head(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        self.status = int(first.split()[1])
        self.headers = dict(line.split(": ", 1) for line in lines if line)

    async def next_block(self) -> str:
        """The next event or comment as it was sent; empty at the end of the answer."""
        async with asyncio.timeout(DEADLINE_S):
            while b"\n\n" not in self._rest:
                size = int((await self._reader.readline()).strip() or b"0", 16)
                if size == 0:
                    return ""
                self._rest += await self._reader.readexactly(size)
                await self._reader.readexactly(2)
        block, _, self._rest = self._rest.partition(b"\n\n")
        return block.decode()

    async def next_event(self) -> tuple[str, dict[str, Any]]:
        """Name and document."""
        block = await self.next_block()
        assert block, "the stream has ended"
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        return fields["event"], json.loads(fields["data"])


@asynccontextmanager
async def reading(served: ServedNode, *, method: str = "GET", buffer_bytes: int = 0) -> AsyncIterator[Reader]:
    """One connection; its head is read. With `buffer_bytes` nothing is: the kernel keeps so much, and no more is taken."""
    address = urlsplit(served.url)
    assert address.hostname is not None and address.port is not None
    sock = socket.socket()
    if buffer_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    sock.setblocking(False)
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.get_running_loop().sock_connect(sock, (address.hostname, address.port))
        streams = await asyncio.open_connection(sock=sock, limit=2**22)
    reader = Reader(*streams)
    if buffer_bytes:
        reader.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's transport can
    try:
        reader.writer.write(f"{method} /api/v1/stream HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode())
        if not buffer_bytes:
            await reader.read_head()
        yield reader
    finally:
        reader.writer.transport.abort()


async def test_the_document_comes_first_and_then_what_changed() -> None:
    """With the headers of an event stream, the time after which to connect again, and the names of the numbers."""
    async with served_node(SampleNode(gpus=2, containers=2)) as served, reading(served) as reader:
        assert reader.status == 200
        assert reader.headers["Content-Type"] == "text/event-stream"
        assert reader.headers["Cache-Control"] == "no-store"
        block = await reader.next_block()
        assert block.startswith("retry: 2000\nevent: node\ndata: {")
        node = json.loads(block.partition("data: ")[2])
        assert len(node["cards"]) == len(node["containers"]) == 2
        assert node["use_fields"]["container"][:2] == ["sm_ratio", "memory_bytes"]
        assert node["decisions"] == []
        served.step()
        name, found = await reader.next_event()
        assert name == "patch"
        assert set(found["container_use"]) == {f"{uid_of(0)}/main", f"{uid_of(1)}/main"}


async def test_a_change_that_nobody_announced_is_seen_at_the_next_period() -> None:
    """The stream polls by itself while it has a reader."""
    async with served_node(SampleNode(gpus=1, containers=1)) as served, reading(served) as reader:
        await reader.next_event()
        served.node.unhealthy[0] = "lost"
        while "cards" not in (found := (await reader.next_event())[1]):
            pass
        [fields] = found["cards"].values()
        assert fields["health_reason"] == "lost"


async def test_a_document_that_cannot_be_made_costs_one_period() -> None:
    """A bug in what is shown is logged; the stream goes on once it can be made again."""
    async with served_node(SampleNode(gpus=1, containers=1)) as served, reading(served) as reader:
        await reader.next_event()
        served.node.cordoned = None  # type: ignore[assignment]  # the document raises
        before = served.asked[0]
        await poll_until(lambda: served.asked[0] > before + 1, "the stream to poll twice")
        served.node.cordoned = {}
        served.step()
        assert (await reader.next_event())[0] == "patch"


async def test_decisions_come_once_without_their_candidates() -> None:
    """The last ones with the document, new ones with the patch."""
    node = SampleNode(gpus=2, containers=0)
    async with served_node(node) as served:
        served.decisions.add(node.decision(1))
        async with reading(served) as reader:
            first = (await reader.next_event())[1]
            assert [one["number"] for one in first["decisions"]] == [1]
            assert "candidates" not in first["decisions"][0]
            served.decisions.add(node.decision(2, refused=True))
            served.stream.changed()
            while "decisions" not in (found := (await reader.next_event())[1]):
                pass
            [one] = found["decisions"]
            assert (one["number"], one["outcome"], one["reason"]) == (2, "refused", "Fragmented")
            assert "candidates" not in one


async def test_without_a_reader_nothing_is_computed() -> None:
    """Not before the first, and not after the last has gone."""
    async with served_node(SampleNode(gpus=1, containers=1), heartbeat_s=0.05) as served:
        served.step()
        async with reading(served) as reader:
            await reader.next_event()
            assert served.asked[0] > 0
        await poll_until(lambda: served.stream.reader_count == 0, "the reader to be noticed gone")
        before = served.asked[0]
        for _ in range(5):
            served.step()
            await asyncio.sleep(0.06)  # a period passes, in which a stream without readers must do nothing
        assert served.asked[0] == before


async def test_all_readers_share_one_work() -> None:
    """Thirty-two streams cost as many documents as one, and get the same bytes."""
    async with served_node(SampleNode(gpus=2, containers=4), sample_period_s=60.0) as served, AsyncExitStack() as stack:
        readers = [await stack.enter_async_context(reading(served)) for _ in range(MOST_STREAMS)]
        firsts = {await reader.next_block() for reader in readers}
        before = served.asked[0]
        served.step()
        patches = {(await reader.next_block()) for reader in readers}
        assert len(firsts) <= before
        assert len(patches) <= served.asked[0] - before + 1
        assert before <= 4


async def test_a_late_reader_gets_the_document_that_patches_follow() -> None:
    """The second reader's document and the next patch fit together: both readers then know the same."""
    async with served_node(SampleNode(gpus=1, containers=1), sample_period_s=0.2) as served, reading(served) as early:
        node = (await early.next_event())[1]
        served.step()
        change = (await early.next_event())[1]
        async with reading(served) as late:
            seen = (await late.next_event())[1]
            key = f"{uid_of(0)}/main"
            use = node["containers"][0]["cards"][0]["usage"] | dict(
                zip(node["use_fields"]["container"], change["container_use"][key][0][1:], strict=True)
            )
            assert seen["containers"][0]["cards"][0]["usage"] == use
            served.step()
            assert await early.next_event() == await late.next_event()


async def test_more_streams_than_allowed_are_reported_to_come_later() -> None:
    """503 with Retry-After; a place that becomes free is given again."""
    async with served_node(SampleNode(gpus=1, containers=1), heartbeat_s=0.05) as served:
        async with AsyncExitStack() as stack:
            for _ in range(MOST_STREAMS):
                await stack.enter_async_context(reading(served))
            async with reading(served) as refused:
                assert (refused.status, refused.headers["Retry-After"]) == (503, "10")
            async with reading(served, method="HEAD") as asking:
                assert asking.status == 200
        await poll_until(lambda: served.stream.reader_count == 0, "the readers to be noticed gone")
        async with reading(served) as again:
            assert again.status == 200


async def test_a_slow_reader_is_dropped_and_the_others_go_on() -> None:
    """One that takes nothing costs a bounded number of events, then its connection."""
    node = SampleNode(gpus=16, containers=200)
    async with served_node(node, sample_period_s=0.01) as served, reading(served) as good:
        async with reading(served, buffer_bytes=4096):
            await good.next_event()
            await poll_until(lambda: served.stream.reader_count == 2, "both to read")
            async with asyncio.timeout(DEADLINE_S):
                while served.stream.reader_count > 1:
                    served.step()
                    await good.next_event()
        served.step()
        assert (await good.next_event())[0] == "patch"


async def test_an_idle_stream_sends_comments() -> None:
    """So that proxies keep the connection and a vanished reader is noticed."""
    node = SampleNode(gpus=1, containers=0)
    async with served_node(node, sample_period_s=5.0, heartbeat_s=0.03) as served, reading(served) as reader:
        await reader.next_event()
        assert await reader.next_block() == ": still here"


async def test_streams_end_at_once_with_the_server() -> None:
    """The answer is ended properly, without waiting for a timeout."""
    async with AsyncExitStack() as stack:
        async with served_node(SampleNode(gpus=1, containers=1)) as served:
            reader = await stack.enter_async_context(reading(served))
            await reader.next_event()
        async with asyncio.timeout(DEADLINE_S):
            while await reader.next_block():
                pass
