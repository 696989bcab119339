"""Two agents on one node, as during an upgrade: which of them serves, and how it hands over to the other without a gap.

The one that holds the lock of the device-plugin directory (flock: the kernel frees it when the process ends) serves; the
other has prepared everything and waits. An incoming instance asks the one that serves to hand over (`Take`); one that has
handed over waits until the other leaves or dies (`Wait`). Both are gRPC methods next to the device plugin's, on its sockets.

| step | the agent that serves | the agent that waits |
|---|---|---|
| 1 | waits for a moment between two admissions | serves its sockets, which no kubelet knows yet |
| 2 | ends its ListAndWatch streams, waits until the kubelet has disconnected | waits for the answer |
| 3 | answers | registers; queues the kubelet's calls |
| 4 | ends everything else that it does on the node, frees the lock | takes the lock, rebuilds the ledger, answers |

Between 2 and 3 the kubelet knows no plugin and rejects pods: some milliseconds. Were the other to register before 2,
the kubelet would disconnect it as soon as the older stream ends (measured), so the time would be as long.

State owned: the lock; who waits for the handover; the calls that are queued.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import structlog
from grpclib import GRPCError, Status
from grpclib.const import Cardinality, Handler
from msgspec import Struct

from gpushare_agent.agent.kubelet.device_plugin import AdmissionHandler
from gpushare_agent.core.kit.grpc_client import RpcFailed, UnixChannel
from gpushare_agent.core.kit.protobuf import MalformedMessageError
from gpushare_agent.core.kit.sockets import file_identity, is_served, remove_socket
from gpushare_agent.core.kit.supervision import ChangeSignal, wait_while
from gpushare_agent.core.model.allocations import ContainerEdits
from gpushare_agent.core.model.errors import Refused, may_pass
from gpushare_agent.core.model.names import DeviceId

log = structlog.get_logger(__name__)

TAKE = "/gpushare.Handover/Take"
WAIT = "/gpushare.Handover/Wait"
LOCK_POLL_S = 0.02
ANSWER_S = 0.5
"""Time for the answer to the agent that waits to leave this process."""
_SOCKET = re.compile(r"[a-z]+-[0-9a-f]{8}\.sock")
STALE_AGE_S = 10.0
"""A socket that refuses connections may be about to listen; after this time its agent is dead."""


def instance_socket_name(name: str) -> str:
    """`vcore` -> `vcore-1f0c22a9.sock`: another one for each agent, so that two do not replace each other's."""
    return f"{name}-{secrets.token_hex(4)}.sock"


class StaleSockets(Struct, frozen=True):
    """Removes the sockets of agents that were killed, of those with such names in a directory. Those of live ones and of
    other programs stay. While it runs: an agent may be killed within STALE_AGE_S of its start, and one that was to take
    over, before it did.
    """

    directory: Path
    names: re.Pattern[str] = _SOCKET
    age_s: float = STALE_AGE_S
    period_s: float = 60.0

    async def run(self) -> NoReturn:
        """Now and every `period_s`, until cancelled."""
        while True:
            self.remove()
            await asyncio.sleep(self.period_s)

    def remove(self) -> None:
        for path in _instance_sockets(self.directory, self.names):
            identity = file_identity(path)
            # Connecting is the only way to know: a killed agent leaves its socket file, and the kernel refuses
            # connections to it.
            if identity is None or time.time() - identity[2] / 1e9 < self.age_s or is_served(path, in_doubt=True):
                continue
            with suppress(OSError):
                if remove_socket(path, identity):
                    log.info("stale_socket_removed", socket=str(path))


class ServingLock:
    """flock(2) of a directory itself, the device plugins' and those of claims: no file that a kubelet removes when it
    starts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        return self._descriptor is not None

    def try_acquire(self, *, in_doubt: bool = False) -> bool:
        """Whether no other agent serves there. Without a directory there is no kubelet, and no other agent to wait for.
        `in_doubt` is the answer where that cannot be known now, as without a free descriptor."""
        if self.is_held:
            return True
        try:
            # O_CLOEXEC: a program that the agent starts would inherit the lock and hold it beyond the agent's end.
            descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as e:
            return in_doubt or not may_pass(e)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError as e:
            # A file system without flock: one agent must still work, so it serves without the protection.
            log.warning("directory_not_locked", directory=str(self.directory), error=str(e))
        self._descriptor = descriptor
        return True

    async def acquire(self) -> None:
        """Waits until no other agent serves."""
        while not self.try_acquire():  # noqa: ASYNC110 - the kernel wakes nobody who does not block a thread
            await asyncio.sleep(LOCK_POLL_S)

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class Handover:
    """Served together with the device plugins; `is_serving`: this agent is the one to ask."""

    def __init__(self) -> None:
        self.is_serving = False
        self.on_requested: Callable[[], None] = lambda: None
        """Called when an incoming instance asks; must not block."""
        self._waiting: list[tuple[bool, asyncio.Future[None]]] = []

    @property
    def waiting(self) -> int:
        """The agents that wait now."""
        return len(self._waiting)

    def __mapping__(self) -> dict[str, Handler]:
        return {
            TAKE: Handler(partial(self._answer_later, is_incoming=True), Cardinality.UNARY_UNARY, bytes, bytes),
            WAIT: Handler(partial(self._answer_later, is_incoming=False), Cardinality.UNARY_UNARY, bytes, bytes),
        }

    async def answer(self) -> None:
        """Answers one agent that waits, once the kubelet has disconnected: an incoming instance before one that has handed
        over itself. The others ask that one, once this agent's sockets are closed."""
        if not self._waiting:
            return
        # (True, …) is an incoming instance: the upgrade goes on before a standby gets its turn.
        next_one = max(self._waiting, key=lambda one: one[0])
        next_one[1].set_result(None)
        await wait_while(lambda: next_one in self._waiting, ANSWER_S, poll_s=0)

    async def _answer_later(self, stream: Any, *, is_incoming: bool) -> None:
        await stream.recv_message()
        if not self.is_serving:
            raise GRPCError(Status.FAILED_PRECONDITION, "this agent does not serve")
        # An agent that waits after its own handover must not make this one leave: the two would swap for ever. One that
        # leaves already is asked once: the next request would be for what it does after its handover.
        if is_incoming and not any(one[0] for one in self._waiting):
            self.on_requested()
        waiting = is_incoming, asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            await waiting[1]
            await stream.send_message(b"")
        finally:
            self._waiting.remove(waiting)


class QueuedCalls:
    """An admission handler before another one: the kubelet's calls wait until `open`, and again once it is closed, because
    the ledger of an agent that has just taken over, or was just reloaded, is not there yet. Each waits within its own bound.

    State owned: who is asked, None while calls wait; how many calls there are and how many of them are under way."""

    def __init__(self) -> None:
        self._served: AdmissionHandler | None = None
        self._is_between: Callable[[], bool] | None = None
        self._calls = self._under_way = 0
        self._changes = ChangeSignal()

    def open(self, handler: AdmissionHandler) -> None:
        """Lets the calls that wait go on, with this one."""
        # A close that was waiting for the end of an admission is void: another handler answers now.
        self._served, self._is_between = handler, None
        self._changes.notify()

    def close(self) -> None:
        """Calls wait from now on; those under way go on."""
        self._served = None
        self._changes.notify()

    async def close_between(self, is_between: Callable[[], bool]) -> None:
        """Closes in the step that ends a call after which none is under way and `is_between` is true: of a burst no other
        moment is between two admissions. PreStartContainer, which belongs to none, waits at once."""
        self._is_between = is_between
        self._close_if_between()
        await self._changes.wait_until(lambda: self._served is None)

    async def wait_idle(self) -> None:
        """Waits until no call is under way."""
        await self._changes.wait_until(lambda: not self._calls)

    async def preferred(
        self, resource: str, available: Collection[DeviceId], must_include: Sequence[DeviceId], size: int
    ) -> Sequence[str]:
        async with self._counted() as served:
            return await served.preferred(resource, available, must_include, size)

    async def allocate(self, resource: str, ids: Sequence[DeviceId]) -> ContainerEdits | Refused:
        async with self._counted() as served:
            return await served.allocate(resource, ids)

    async def pre_start(self, resource: str, ids: Sequence[DeviceId]) -> Refused | None:
        async with self._counted(is_start=True) as served:
            return await served.pre_start(resource, ids)

    @asynccontextmanager
    async def _counted(self, *, is_start: bool = False) -> AsyncIterator[AdmissionHandler]:
        self._calls += 1
        try:
            # A PreStartContainer belongs to no admission: let through, it would keep a burst from ever having an end.
            while (served := self._served) is None or (is_start and self._is_between is not None):
                await self._changes.wait_next()
            # Those that wait for the handler are not under way: `close_between` would wait for itself.
            self._under_way += 1
            try:
                yield served
            finally:
                self._under_way -= 1
                self._close_if_between()
        finally:
            self._calls -= 1
            self._changes.notify()

    def _close_if_between(self) -> None:
        if self._is_between is not None and not self._under_way and self._is_between():
            self.close()


async def ask_for_handover(directory: Path, method: str) -> bool:
    """Asks the agent that serves at one of the sockets in `directory`: True once the kubelet follows it no more, False where
    none is there. The caller bounds it."""
    async with asyncio.TaskGroup() as group:
        # All at once: the one that serves answers late, and another agent that is stopped, or hangs in the driver, never.
        asked = {group.create_task(_ask(path, method), name="ask") for path in _instance_sockets(directory)}
        try:
            for answer in asyncio.as_completed(asked):
                if await answer:
                    return True
        finally:
            for one in asked:
                one.cancel()
    return False


async def _ask(path: Path, method: str) -> bool:
    channel = UnixChannel(path)
    try:
        await channel.unary(method, b"", bytes)
    except (RpcFailed, MalformedMessageError):
        return False  # a stale socket, or one of an agent that waits as well
    finally:
        channel.close()
    return True


def _instance_sockets(directory: Path, names: re.Pattern[str] = _SOCKET) -> Iterator[Path]:
    try:
        paths = sorted(directory.iterdir())
    except OSError:
        return
    yield from (path for path in paths if names.fullmatch(path.name))
