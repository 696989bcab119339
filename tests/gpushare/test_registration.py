"""libgpushare registers each process with the agent by the vDevice socket next to its files, and never depends on it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpushare_agent.agent.isolation.gpushare.format import GpuLimits
from gpushare_agent.agent.isolation.vdevice.files import VDeviceFiles
from gpushare_agent.agent.isolation.vdevice.server import VDeviceLimits
from gpushare_agent.agent.runtime.cgroup_paths import PeerIdentity
from gpushare_agent.core.formats.vdevice import SOCKET_NAME
from gpushare_agent.core.kit.bounded_grpc import ServerLimits
from gpushare_agent.core.kit.sockets import connectable_path
from gpushare_agent.core.model.errors import Unavailable
from tests.gpushare.conftest import MachineWith
from tests.gpushare.support_gpushare import BLOCK_MIB, MIB, SHARE_MIB, TAKE, Container, Machine, uuid_of, write_files
from tests.isolation.support_vdevice import KEY, OTHER_ID, OTHER_POD, FakeNode, serving
from tests.native.gpu_program import finish

pytestmark = pytest.mark.isolation

BLOCKS = 8
"""Of 256 MiB in 2,560 MiB, with a context of 300."""


def container(machine: Machine, root: Path) -> Container:
    """With its limits in its vDevice directory."""
    directory = VDeviceFiles(root).path(KEY)
    directory.mkdir(parents=True, exist_ok=True)
    write_files(directory, GpuLimits(uuid=uuid_of("0"), memory_bytes=SHARE_MIB * MIB), KEY)
    return Container(machine, directory)


async def took(share: Container, *actions: str) -> list[int]:
    """The blocks that each step got, while the loop serves the socket."""
    ended = await asyncio.to_thread(finish, share.start(*actions))
    assert (ended.code, ended.error) == (0, "")
    return ended.blocks()


@pytest.mark.smoke
async def test_a_process_registers_once_and_its_child_anew(machine_with: MachineWith, short_dir: Path) -> None:
    """By the names in gpushare.config; the PIDs are the kernel's."""
    node, machine = FakeNode(), machine_with()
    async with serving(short_dir, node):
        share = container(machine, short_dir)
        assert await took(share, TAKE, "free", TAKE) == [BLOCKS, BLOCKS]
        assert (node.codes, node.refreshed) == (["OK"], [(KEY, None)])
        assert await took(share, f"alloc:alloc:{BLOCK_MIB}:2", "fork", TAKE) == [2, BLOCKS - 3]
        _, processes = share.usage()
    assert node.codes == ["OK"] * 3
    assert len(set(node.noted)) == 3 and {key for key, _ in node.noted} == {KEY}
    assert {process.pid for process in processes} <= {pid for _, pid in node.noted}


@pytest.mark.parametrize("answer", ["refused", "unavailable", "hangs"])
async def test_no_answer_of_the_agents_keeps_a_program_from_its_gpu(
    machine_with: MachineWith, short_dir: Path, answer: str
) -> None:
    node = FakeNode(refresh_hangs=answer == "hangs")
    if answer == "refused":
        node.peers = _EveryoneElse()
    if answer == "unavailable":
        node.fails = Unavailable("the disk does not answer")
    async with serving(short_dir, node):
        assert await took(container(machine_with(), short_dir), TAKE) == [BLOCKS]
    expected = {"refused": "PERMISSION_DENIED", "unavailable": "UNAVAILABLE", "hangs": "CANCELLED"}
    assert node.codes == [expected[answer]]


class _EveryoneElse(dict[int, PeerIdentity | None]):
    """Whoever calls is in another container."""

    def get(self, pid: int, default: object = None) -> PeerIdentity | None:  # type: ignore[override]
        return PeerIdentity(pod_uid=OTHER_POD, container_id=OTHER_ID)


@pytest.mark.parametrize("listens", [True, False])
async def test_an_agent_that_is_away_or_accepts_nobody_is_not_waited_for(
    machine_with: MachineWith, short_dir: Path, listens: bool
) -> None:
    share = container(machine_with(), short_dir)
    with socket.socket(socket.AF_UNIX) as nobody, connectable_path(share.directory) as directory:
        nobody.bind(f"{directory}/{SOCKET_NAME}")
        if listens:
            nobody.listen(0)
        assert await took(share, TAKE) == [BLOCKS]


@pytest.fixture
def comes_first() -> Iterator[None]:
    """This thread runs before whatever else the machine does, where that is allowed: the library waits 100 ms for an answer,
    which is no bound for a loop that gets no processor. What it starts is as any other program."""
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    yield
    os.sched_setscheduler(0, policy, priority)


STARTS = 1000


@pytest.mark.usefixtures("comes_first")
async def test_of_1000_starts_the_agent_misses_none(machine_with: MachineWith, short_dir: Path) -> None:
    """One after the other: each is known by the PID that the kernel says. The socket's share of a processor is not what is
    tried here: with the default one the agent answers some 200 of a burst, and finds the others by their cgroup alone."""
    node, machine = FakeNode(), machine_with(context_mib=1)
    limits = VDeviceLimits(server=ServerLimits(busy_share=1, busy_burst_s=60, byte_burst=1 << 24))
    pids = []
    async with serving(short_dir, node, limits=limits):
        share = container(machine, short_dir)
        for _ in range(STARTS):
            ended = await asyncio.to_thread(finish, share.start("alloc:alloc:1:1"))
            assert (ended.code, ended.error, ended.step("alloc")["blocks"]) == (0, "", 1)
            pids.append(ended.step("init")["pid"])
    assert [pid for _, pid in node.noted] == pids
    assert node.codes == ["OK"] * STARTS
