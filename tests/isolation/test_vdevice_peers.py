"""Who registers, by real processes in real cgroups: the peer credentials are read at each call, not cached.

A process may connect in its container and then change cgroup, hand its connection to somebody else, or end. What counts is
where the one that connected is now; the socket and the message are right in every field here.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpushare_agent.agent.isolation.vdevice.server import METHOD
from gpushare_agent.agent.runtime.cgroup_paths import NOBODY, PeerIdentity
from gpushare_agent.agent.runtime.cgroups import Cgroups
from tests.gpus.support_real_cgroups import RealCgroups, real_cgroups, why_not
from tests.isolation.support_vdevice import ID, KEY, OTHER_ID, OTHER_POD, POD, FakeNode
from tests.isolation.support_vdevice_raw import DEADLINE_S, REQUEST, Node, node_with
from tests.kit.support_http2 import RawClient, hang_up

_PEER = """
import socket, sys
sys.stdin.readline()
with socket.socket(socket.AF_UNIX) as s, socket.socket(fileno=int(sys.argv[2])) as to:
    s.connect(sys.argv[1])
    socket.send_fds(to, [b"x"], [s.fileno()])
sys.stdin.readline()
"""
"""Waits for a line, connects, hands the connection out, and ends at the next line."""
OK, PERMISSION_DENIED = "0", "7"


class LooksForItself(FakeNode):
    """Whose a process is comes from this machine's own /proc and cgroups."""

    cgroups = Cgroups()

    async def identify(self, pid: int) -> PeerIdentity | None:
        self.asked.append(pid)
        return await self.cgroups.identify_in_thread(pid)


@pytest.fixture
def cgroups() -> Iterator[RealCgroups]:
    if (reason := why_not()) is not None:
        pytest.skip(f"no process can be put into a container's cgroup here: {reason}")
    with real_cgroups() as made:
        yield made


class Peer:
    """A process that connected, and the connection it handed out."""

    def __init__(self, process: asyncio.subprocess.Process, client: RawClient) -> None:
        self.process, self.client = process, client

    @property
    def pid(self) -> int:
        return self.process.pid

    async def register(self) -> tuple[str, str]:
        """Code and text of a registration through its connection, by its own name."""
        stream_id = self.client.call(METHOD, REQUEST)
        self.client.flush()
        return await self.client.status_of(stream_id)

    async def end(self) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]  # it is a pipe
        await self.process.wait()


@asynccontextmanager
async def peer_in(cgroups: RealCgroups, node: Node, pod_uid: str, container_id: str) -> AsyncIterator[Peer]:
    """A process that connects to the attacked socket from inside that container's cgroup."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", _PEER, str(node.socket), str(theirs.fileno())),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=[theirs.fileno()],
        )
        cgroups.move(process.pid, pod_uid, container_id)
        process.stdin.write(b"connect\n")  # type: ignore[union-attr]
        ours.settimeout(DEADLINE_S)
        _, (fd,), _, _ = await asyncio.to_thread(socket.recv_fds, ours, 1, 1)
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=fd))
    peer = Peer(process, RawClient(reader, writer))
    try:
        yield peer
    finally:
        await hang_up(writer)
        await peer.end()


@asynccontextmanager
async def watched_node(short_dir: Path) -> AsyncIterator[Node]:
    """Both containers served; at the end nothing but files in the caller's own directory may have changed."""
    async with node_with(short_dir, outside=LooksForItself) as node:
        before = node.tree()
        yield node
        changed = dict(node.tree().items() ^ before.items())
        assert [path for path in changed if not path.startswith(f"{node.files.path(KEY)}/")] == []
        await node.neighbour_is_served()


async def test_a_process_that_changes_its_cgroup_registers_as_the_one_it_is_now(
    short_dir: Path, cgroups: RealCgroups
) -> None:
    """OK in its container; refused once it moved to another's, by the very connection that was OK; OK after it came back."""
    async with watched_node(short_dir) as node, peer_in(cgroups, node, POD, ID) as peer:
        assert (await peer.register())[0] == OK
        cgroups.move(peer.pid, OTHER_POD, OTHER_ID)
        code, text = await peer.register()
        assert code == PERMISSION_DENIED
        assert text.startswith(f"the calling process is in pod {OTHER_POD}, but this socket belongs to container cuda")
        assert len(node.outside.refreshed) == 1
        cgroups.move(peer.pid, POD, ID)
        assert (await peer.register())[0] == OK
    assert node.outside.asked == [peer.pid] * 3


async def test_a_process_of_another_container_is_refused_before_and_let_in_after_it_moves(
    short_dir: Path, cgroups: RealCgroups
) -> None:
    """Who reaches the socket from elsewhere is not its container; another container of the same pod is not either."""
    async with watched_node(short_dir) as node, peer_in(cgroups, node, OTHER_POD, OTHER_ID) as peer:
        assert (await peer.register())[0] == PERMISSION_DENIED
        cgroups.move(peer.pid, POD, "ef" * 32)
        code, text = await peer.register()
        assert (code, node.outside.refreshed) == (PERMISSION_DENIED, [])
        assert text.startswith("the calling process is in container efef")
        cgroups.move(peer.pid, POD, ID)
        assert (await peer.register())[0] == OK


async def test_a_process_whose_hierarchies_contradict_is_in_no_container(short_dir: Path, cgroups: RealCgroups) -> None:
    """Moved in one hierarchy of two, it is in both containers and so in none."""
    if len(cgroups.tops) < 2:
        pytest.skip("this machine has one hierarchy of cgroups: nothing can contradict")
    async with watched_node(short_dir) as node, peer_in(cgroups, node, POD, ID) as peer:
        cgroups.move(peer.pid, OTHER_POD, OTHER_ID, in_first_only=True)
        assert LooksForItself.cgroups.identify(peer.pid) == NOBODY
        code, text = await peer.register()
        assert (code, node.outside.refreshed) == (PERMISSION_DENIED, [])
        assert text.startswith("the calling process is in no container")


async def test_a_connection_whose_maker_ended_registers_nothing(short_dir: Path, cgroups: RealCgroups) -> None:
    """The process handed its connection to one outside of every container, this one, and ended: nobody calls."""
    async with watched_node(short_dir) as node, peer_in(cgroups, node, POD, ID) as peer:
        assert (await peer.register())[0] == OK
        await peer.end()
        code, text = await peer.register()
        assert (code, len(node.outside.refreshed)) == (PERMISSION_DENIED, 1)
        assert text.startswith("the calling process is in no container")


async def test_a_process_below_its_containers_cgroup_is_that_container(short_dir: Path, cgroups: RealCgroups) -> None:
    """A container may make cgroups in its own and name one as another container's: it stays what it is."""
    async with watched_node(short_dir) as node, peer_in(cgroups, node, POD, ID) as peer:
        for path in cgroups.paths(POD, ID):
            below = path / f"pod{OTHER_POD}" / OTHER_ID
            below.mkdir(parents=True)
            (below / "cgroup.procs").write_text(str(peer.pid))
        assert (await peer.register())[0] == OK
