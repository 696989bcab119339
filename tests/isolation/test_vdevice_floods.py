"""Floods through one container's socket, at full size: what they cost is bounded, and others are served meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import monotonic

import pytest
import structlog
from grpclib import GRPCError
from grpclib.exceptions import StreamTerminatedError
from h2.config import H2Configuration
from h2.connection import H2Connection

from gpushare_agent.agent.isolation.vdevice.server import HANDLING_COST_S, VDeviceLimits
from gpushare_agent.core.kit.bounded_grpc import ServerLimits
from tests.isolation.support_vdevice import POD, register
from tests.isolation.support_vdevice_raw import (
    CALLS_AT_ONCE,
    ENDLESS,
    FIELDS,
    OPENING,
    Node,
    canned_calls,
    connected,
    flood,
    half_a_call,
    node_with,
    read_to_end,
    resident_mib,
)

pytestmark = pytest.mark.slow

REGISTRATIONS = 10_000
CONNECTIONS = 1_000
FLOODS_CODES = {"OK", "CANCELLED", "DEADLINE_EXCEEDED"}
"""Of what a flood asks: delayed to its share, a call may wait longer than its ten seconds."""
GROWTH_MIB = 48
"""Far more than is seen, and far less than the floods would take where nothing bounds them."""


@asynccontextmanager
async def neighbour_served_all_the_time(node: Node) -> AsyncIterator[None]:
    """Its registrations go on while the block runs; each one is answered OK."""
    is_over = False

    async def go_on() -> None:
        while not is_over:
            await node.neighbour_is_served()
            await asyncio.sleep(0.2)  # well below its own rate

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(go_on())
        yield
        is_over = True
    codes = Counter(node.neighbours_outside.codes)
    assert codes["OK"] >= 1
    assert set(codes) == {"OK"}


def allowed_calls(spent_s: float) -> float:
    """By the processor's share of one socket; each of its connections may have read two calls before any is charged."""
    limits = ServerLimits()
    return (limits.busy_burst_s + limits.busy_share * spent_s) / HANDLING_COST_S + 2 * limits.max_connections


async def test_registrations_in_a_row_are_delayed_to_their_share_and_fill_no_log(short_dir: Path) -> None:
    """10,000 on ten connections: what is carried out meets the bound, one line in the log, memory does not grow."""
    before = resident_mib()
    with structlog.testing.capture_logs() as logs:
        async with node_with(short_dir) as node, neighbour_served_all_the_time(node):
            started = monotonic()
            async with asyncio.TaskGroup() as tasks:
                floods = [tasks.create_task(flood(node.socket, REGISTRATIONS // 10)) for _ in range(10)]
                while len(node.outside.codes) < 400:
                    await asyncio.sleep(0.01)
                for task in floods:
                    task.cancel()
            handled, spent_s = len(node.outside.codes), monotonic() - started
    assert handled <= allowed_calls(spent_s) < REGISTRATIONS
    assert set(node.outside.codes) <= FLOODS_CODES
    assert Counter(entry["event"] for entry in logs if entry["pod_uid"] == POD) == {"vdevice_peer_unknown": 1}
    assert resident_mib() - before < GROWTH_MIB


async def test_10000_registrations_in_one_second_meet_the_default_bounds(short_dir: Path) -> None:
    """Sent as fast as the socket takes them, on 625 connections: at most 64 are let in, and they are carried out at their
    share of the processor; then the container itself is served again."""
    before = resident_mib()
    async with node_with(short_dir) as node, neighbour_served_all_the_time(node):
        started = monotonic()
        content = OPENING + canned_calls(range(CALLS_AT_ONCE))
        async with connected(node.socket, REGISTRATIONS // CALLS_AT_ONCE, content) as opened:
            assert len(opened) * CALLS_AT_ONCE == REGISTRATIONS
            assert node.attacked.connections <= 64
            assert resident_mib() - before < GROWTH_MIB
            while node.outside.codes.count("OK") < 20:
                await asyncio.sleep(0.01)
        await node.wait_empty()
        codes = Counter(node.outside.codes)
        assert codes["OK"] <= allowed_calls(monotonic() - started)
        assert set(codes) <= FLOODS_CODES
        await wait_served_again(node)


async def test_calls_that_are_begun_and_reset_take_a_bounded_share_of_the_processor(short_dir: Path) -> None:
    """8,192 of them are 32 bytes each, within every bound on bytes and calls; what they cost is charged and not read on."""
    client = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
    client.initiate_connection()
    for number in range(128):
        client.send_headers(2 * number + 1, FIELDS)
        client.reset_stream(2 * number + 1)
    content = client.data_to_send()
    async with node_with(short_dir) as node, neighbour_served_all_the_time(node):
        started = monotonic()
        async with connected(node.socket, 64, content):
            for _ in range(20):
                await node.neighbour_is_served()
            server = node.attacked._server
            assert server is not None
            begun = sum(connection.handler.accepted for connection in server.open)
            spent_s = monotonic() - started
        await node.wait_empty()
    limits = ServerLimits()
    per_reading = 8 * 2  # and one reading of each connection may be under way before any is charged
    allowed = (limits.busy_burst_s + limits.busy_share * spent_s) / 0.0002 + 64 * per_reading
    assert begun <= allowed < 64 * 128


async def wait_served_again(node: Node) -> None:
    """Once its share of the processor is given back."""
    before = node.outside.codes.count("OK")
    while node.outside.codes.count("OK") == before:
        with suppress(GRPCError, StreamTerminatedError):  # idle too long while it was delayed
            await register(node.socket, name="cuda")


@pytest.mark.usefixtures("many_open_files")
@pytest.mark.parametrize("content", [b"", OPENING + half_a_call()], ids=["idle", "half a request"])
async def test_of_1000_connections_the_allowed_ones_stay_until_they_are_idle_too_long(
    short_dir: Path, content: bytes
) -> None:
    """Those beyond 64 are closed at accept; the rest is cut off; then the container itself is served again."""
    limits = VDeviceLimits(server=ServerLimits(idle_s=0.5, busy_burst_s=ENDLESS))
    before = resident_mib()
    async with node_with(short_dir, limits) as node, neighbour_served_all_the_time(node):
        async with connected(node.socket, CONNECTIONS, content) as opened:
            assert len(opened) == CONNECTIONS
            assert node.attacked.connections <= 64
            assert resident_mib() - before < GROWTH_MIB
            greeted = await asyncio.to_thread(lambda: [sock for sock in opened if read_to_end(sock)])
            assert greeted
            await node.wait_empty()
        await wait_served_again(node)
