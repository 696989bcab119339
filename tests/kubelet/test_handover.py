"""kubelet/handover.py: which of two agents serves, who is told, which sockets are removed."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare_agent.agent.admission.part import AdmissionPart
from gpushare_agent.agent.kubelet.handover import (
    TAKE,
    WAIT,
    Handover,
    QueuedCalls,
    ServingLock,
    StaleSockets,
    ask_for_handover,
    instance_socket_name,
)
from gpushare_agent.agent.kubelet.registration import Registrar
from gpushare_agent.core.kit.sockets import bind_unix_socket
from gpushare_agent.core.model.allocations import ContainerEdits
from gpushare_agent.core.settings.sections import KubeletSettings
from gpushare_agent.core.settings.settings import Settings
from tests.cluster.support_kube import running
from tests.kit.support_grpc import served_at
from tests.kubelet.support_plugin import FakeAdmission, Recorder
from tests.support_process import no_free_descriptor


def serving(directory: Path, handover: Handover) -> AbstractAsyncContextManager[Path]:
    return served_at(directory / instance_socket_name("vcore"), handover)


def test_one_agent_holds_the_lock(short_dir: Path) -> None:
    """Until it releases it."""
    first, second = ServingLock(short_dir), ServingLock(short_dir)
    assert first.try_acquire() and first.try_acquire()
    assert not second.try_acquire()
    first.release()
    assert second.try_acquire()
    second.release()


async def test_the_lock_of_a_killed_agent_is_free(short_dir: Path) -> None:
    """The kernel frees it; who waits gets it."""
    hold = (
        "import fcntl, os, sys, time; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX); print();"
        " time.sleep(600)"
    )
    lock = ServingLock(short_dir)
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(short_dir)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as holder:
        assert holder.stdout is not None and await asyncio.to_thread(holder.stdout.readline)
        assert not lock.try_acquire()
        holder.kill()
        await lock.acquire()
    lock.release()


def test_an_agent_without_a_free_descriptor_waits_for_one(short_dir: Path) -> None:
    """Another one may serve, and two would make each other's files."""
    first, second = ServingLock(short_dir), ServingLock(short_dir)
    assert first.try_acquire()
    with no_free_descriptor():
        assert not second.try_acquire() and second.try_acquire(in_doubt=True)
    assert not second.try_acquire()
    first.release()


def test_without_a_directory_no_other_agent_is_waited_for(short_dir: Path) -> None:
    """There is no kubelet yet."""
    assert ServingLock(short_dir / "none").try_acquire()


@pytest.mark.parametrize("method", [TAKE, WAIT])
async def test_a_successor_is_told_when_the_agent_has_left(method: str, short_dir: Path) -> None:
    """Only an incoming agent's request makes it leave."""
    handover, requested = Handover(), Recorder()
    handover.is_serving = True
    handover.on_requested = lambda: requested.record("requested")
    async with serving(short_dir, handover), asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(ask_for_handover(short_dir, method))
        while not handover.waiting:
            await asyncio.sleep(0.001)
        assert requested.events == (["requested"] if method == TAKE else [])
        assert not asked.done()
        await handover.answer()
        assert await asked
        assert not handover.waiting


async def test_of_several_successors_one_incoming_agent_is_answered(short_dir: Path) -> None:
    """The others go on waiting, and ask again when the sockets close."""
    handover = Handover()
    handover.is_serving = True
    async with asyncio.TaskGroup() as tasks:
        async with serving(short_dir, handover):
            waiting = tasks.create_task(ask_for_handover(short_dir, WAIT))
            while handover.waiting < 1:
                await asyncio.sleep(0.001)
            incoming = tasks.create_task(ask_for_handover(short_dir, TAKE))
            while handover.waiting < 2:
                await asyncio.sleep(0.001)
            await handover.answer()
            assert await incoming
            assert not waiting.done()
        assert not await waiting


async def test_an_agent_that_hangs_keeps_no_incoming_one_from_the_one_that_serves(short_dir: Path) -> None:
    """Its process is stopped, or waits for the driver: the kernel takes connections, and nobody answers. All sockets are
    asked, and the agent is to leave once."""
    handover, requested = Handover(), Recorder()
    handover.is_serving = True
    handover.on_requested = lambda: requested.record("requested")
    with bind_unix_socket(short_dir / "vcore-00000000.sock", mode=0o600) as hangs:
        hangs.listen()
        async with (
            served_at(short_dir / "vcore-10000000.sock", handover),
            served_at(short_dir / "vmemory-10000000.sock", handover),
            asyncio.TaskGroup() as tasks,
        ):
            asked = tasks.create_task(ask_for_handover(short_dir, TAKE))
            while handover.waiting < 2:
                await asyncio.sleep(0.001)
            await handover.answer()
            assert await asked
            assert requested.events == ["requested"]
            while handover.waiting:
                await asyncio.sleep(0.001)


async def test_nobody_is_asked_at_stale_sockets_and_the_time_is_bounded(short_dir: Path) -> None:
    """A killed agent's socket refuses; one that does not leave is given up. One that does not serve refuses, as the
    asking one itself, whose sockets are there already; with nobody else the answer is no."""
    bind_unix_socket(short_dir / instance_socket_name("vcore"), mode=0o600).close()
    assert not await ask_for_handover(short_dir, TAKE)
    handover, requested = Handover(), Recorder()
    handover.on_requested = lambda: requested.record("requested")
    async with serving(short_dir, handover):
        assert not await ask_for_handover(short_dir, TAKE)
        assert requested.events == []
        handover.is_serving = True
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await ask_for_handover(short_dir, TAKE)


async def test_an_agent_that_hangs_is_asked_once_before_the_lock_is_tried(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the one that served has died, the node has no agent meanwhile."""
    monkeypatch.setattr("gpushare_agent.agent.admission.part.ASK_S", 0.05)
    settings = Settings(node_name="n", kubelet=KubeletSettings(device_plugin_path=short_dir))
    agent: Any = SimpleNamespace(
        registrar=Registrar(device_plugin_path=short_dir, endpoints=[]),
        node=SimpleNamespace(settings=settings),
        lock=ServingLock(short_dir),
    )
    with bind_unix_socket(short_dir / "vcore-00000000.sock", mode=0o600) as hangs:
        hangs.listen()
        hangs.setblocking(False)
        assert await AdmissionPart.follow(agent, is_incoming=True)
        hangs.accept()[0].close()
        with pytest.raises(BlockingIOError):
            hangs.accept()
    agent.lock.release()


def test_stale_sockets_are_removed_and_no_others(short_dir: Path) -> None:
    """Those that are young, live or another program's stay."""
    stale, live = short_dir / instance_socket_name("vcore"), short_dir / instance_socket_name("vmemory")
    foreign, file = short_dir / "nvidia-gpu.sock", short_dir / "vcore-00000000.sock"
    for path in (stale, foreign):
        bind_unix_socket(path, mode=0o600).close()
    file.write_text("")
    with bind_unix_socket(live, mode=0o600) as listener:
        listener.listen()
        StaleSockets(short_dir).remove()
        assert stale.is_socket()  # it may be about to listen
        StaleSockets(short_dir, age_s=0.0).remove()
        assert sorted(short_dir.iterdir()) == sorted([live, foreign, file])
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(live))


async def test_a_socket_of_an_agent_that_is_killed_later_is_removed_without_another_start(short_dir: Path) -> None:
    """As of a version that crashes before it takes over, while this agent goes on serving."""
    socket_path = short_dir / instance_socket_name("vcore")
    killed = bind_unix_socket(socket_path, mode=0o600)
    killed.listen()
    stale = StaleSockets(short_dir, age_s=0.0, period_s=0.001)
    async with running(stale.run):
        await asyncio.sleep(0)
        assert socket_path.is_socket()
        killed.close()
        while socket_path.exists():
            await asyncio.sleep(0.001)


async def test_calls_are_held_until_the_ledger_is_there_and_counted() -> None:
    """All three of them; without a call the wait for idleness returns at once."""
    handler = FakeAdmission()
    calls = QueuedCalls()
    async with asyncio.TaskGroup() as tasks:
        await calls.wait_idle()
        preferred = tasks.create_task(calls.preferred("r", ["a", "b"], [], 1))
        allocated = tasks.create_task(calls.allocate("r", ["a"]))
        started = tasks.create_task(calls.pre_start("r", ["a"]))
        await asyncio.sleep(0)
        idle = tasks.create_task(calls.wait_idle())
        await asyncio.sleep(0)
        assert not handler.calls.events and not idle.done()
        calls.open(handler)
        assert (await preferred, await allocated, await started) == (["a"], ContainerEdits(), None)
        await idle


async def test_calls_close_in_the_step_that_ends_an_admission() -> None:
    """The next call waits, although it came before anybody could have run in between, and the next handler answers it."""
    first, second = FakeAdmission(), FakeAdmission()
    calls = QueuedCalls()
    calls.open(first)
    allocated = ("allocate", "r", ["a"])

    async def admit() -> None:
        await calls.preferred("r", ["a"], [], 1)
        await calls.allocate("r", ["a"])
        await calls.preferred("r", ["b"], [], 1)

    async with asyncio.TaskGroup() as tasks:
        await calls.preferred("r", ["a"], [], 1)
        closed = tasks.create_task(calls.close_between(lambda: allocated in first.calls.events))
        await asyncio.sleep(0)
        started = tasks.create_task(calls.pre_start("r", ["c"]))
        admitted = tasks.create_task(admit())
        await closed
        await asyncio.sleep(0)
        assert first.calls.events[-1] == allocated and not admitted.done() and not started.done()
        calls.open(second)
        await admitted
        await started
    assert sorted(event[0] for event in second.calls.events) == ["pre_start", "preferred"]
