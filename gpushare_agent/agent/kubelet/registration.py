"""Serves the device plugins and keeps them registered with the kubelet.

Level, not edge: one loop per resource reconciles three conditions: our socket is in the directory, the kubelet that runs
now has accepted the registration, and it follows ListAndWatch. Events of the directory, ended streams and a slow poll
only wake the loop. A kubelet that starts removes every socket without notice and rejects pods for good about a second
later, so a lost socket is served and registered again within milliseconds.

After a reload (SIGHUP) the new parts take servers and registrations over: `take_over`.

State owned: the kubelet's socket as last seen; per resource the server, the identity of its socket file, and the kubelet
with which it is registered. device_plugin.py answers the kubelet's calls afterwards.
Format: protos/deviceplugin.proto, service Registration.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import structlog
from grpclib import Status

from gpushare_agent.agent.kubelet.device_plugin import DevicePlugin
from gpushare_agent.agent.kubelet.handover import Handover
from gpushare_agent.core.kit.backoff import Backoff
from gpushare_agent.core.kit.grpc_client import RpcFailed, UnixChannel
from gpushare_agent.core.kit.grpc_server import GrpcServer, ServedSocket
from gpushare_agent.core.kit.protobuf import MalformedMessageError
from gpushare_agent.core.kit.sockets import FileIdentity, file_identity
from gpushare_agent.core.kit.supervision import ReportOnce, wait_for, wait_while
from gpushare_agent.core.kit.watch_path import DirectoryWatch
from gpushare_agent.core.model.errors import Rejected, Unavailable
from gpushare_agent.core.wire import v1beta1

if TYPE_CHECKING:
    from grpclib._typing import IServable

log = structlog.get_logger(__name__)

_STREAMS_END_S = 0.05
"""Between ending the streams and closing: time for their last frames to leave."""


class PluginEndpoint(ServedSocket):
    """Serves `plugin`, and `handover` with it, at `device_plugin_path`/`socket_name`."""

    def __init__(
        self, *, device_plugin_path: Path, socket_name: str, plugin: DevicePlugin, handover: Handover | None = None
    ) -> None:
        handlers: Sequence[IServable] = [plugin] if handover is None else [plugin, handover]
        super().__init__(device_plugin_path / socket_name, lambda: GrpcServer(handlers, decoders=plugin.decoders))
        self.socket_name = socket_name
        self.plugin = plugin

    @property
    def resource(self) -> str:
        return self.plugin.resource

    async def serve(self) -> None:
        try:
            await super().serve()
        except Unavailable as e:
            cure = "Check that the kubelet's directory (kubelet.device_plugin_path) exists and can be written to"
            raise Unavailable(f"{self.resource}: {e}; it is tried again. {cure}") from e
        log.info("device_plugin_serving", resource=self.resource, socket=str(self.path))

    async def stop(self) -> None:
        """Ends the streams first. Takes at most 0.6 s."""
        try:
            if self.connections and self.plugin.open_streams:
                self.plugin.end_streams()
                await asyncio.sleep(_STREAMS_END_S)
        finally:  # also when cancelled: an open socket must not outlive its endpoint
            await super().stop()


API_VERSION = "v1beta1"

_TRANSIENT = (Status.UNAVAILABLE, Status.CANCELLED)


async def register(
    kubelet_socket: Path, *, endpoint: str, resource: str, options: v1beta1.DevicePluginOptions, timeout_s: float
) -> None:
    """Announces to the kubelet that `endpoint`, a file name next to its own socket, serves `resource`.

    The kubelet connects to the endpoint before it answers, so it must be served already, and go on being served.

    Raises:
        Unavailable: no answer at the socket, or not in time.
        Rejected: the kubelet refuses, with its reason.
    """
    attempt = f"registering {resource} ({endpoint}) with the kubelet at {kubelet_socket}"
    request = v1beta1.RegisterRequest(version=API_VERSION, endpoint=endpoint, resource_name=resource, options=options)
    channel = UnixChannel(kubelet_socket)
    try:
        await channel.unary("/v1beta1.Registration/Register", request, v1beta1.Empty, timeout_s=timeout_s)
    except RpcFailed as e:
        if e.status is Status.DEADLINE_EXCEEDED:
            raise Unavailable(f"{attempt} got no answer within {timeout_s:g} s; it is tried again") from e
        # A kubelet that starts or ends answers so, or not at all; any other answer it gives again.
        if not e.is_answer or e.status in _TRANSIENT:
            advice = "" if e.is_answer else ". Is the kubelet running?"
            raise Unavailable(f"{attempt} failed: {e}; it is tried again{advice}") from e
        raise Rejected(
            f"{attempt} was refused: {e}; check that the kubelet supports device plugins of {API_VERSION}"
        ) from e
    except MalformedMessageError as e:
        raise Unavailable(f"{attempt} was answered with no valid message: {e}; it is tried again") from e
    finally:
        channel.close()


KUBELET_SOCKET = "kubelet.sock"
REGISTER_TIMEOUT_S = 15.0
"""The kubelet dials back for up to 10 s inside Register."""
_FIRST_STREAM_S = 2.0
"""How long after Register the kubelet may take to open ListAndWatch; without a stream it does not use the plugin."""
_NEXT_STREAM_S = 0.25
"""How long after a stream ended another may take to open, before the resource is registered again. The first end after a
registration that lasted `_LASTING_S` is answered at once: until then the kubelet rejects pods."""
_LASTING_S = 1.0
_STABLE_S = 10.0
"""After a registration that lasted this long the back-off starts over."""
_STOP_S = 1.5
_LEAVE_S = 0.2
"""The kubelet disconnects within milliseconds of a stream's end."""
DEFAULT_BACKOFF = Backoff(base_s=0.05, cap_s=5.0)


class Registrar:
    """Keeps every endpoint served and registered while `run` runs."""

    def __init__(
        self,
        *,
        device_plugin_path: Path,
        endpoints: Sequence[PluginEndpoint],
        register: Callable[..., Awaitable[None]] = register,
        poll_s: float = 5.0,
        backoff: Backoff = DEFAULT_BACKOFF,
    ) -> None:
        self._directory = device_plugin_path
        self.socket = device_plugin_path / KUBELET_SOCKET
        self.register = register
        self.backoff = backoff
        self._poll_s = poll_s
        self.on_registered: Callable[[str], None] = lambda _resource: None
        """Called with the resource after each registration; must not block."""
        self.on_kubelet_restart: Callable[[], None] = lambda: None
        """Called when another kubelet socket has come after one with which a resource was registered; must not block."""
        self._registered_kubelet: FileIdentity | None = None
        self._resources = [ResourceRegistrar(endpoint, self) for endpoint in endpoints]
        self._missing = {endpoint.resource for endpoint in endpoints}
        self.all_registered = asyncio.Event()
        """Set once the kubelet has accepted every resource."""
        if not endpoints:  # claims alone
            self.all_registered.set()
        self.stays_registered = False
        """The servers outlive `run`, so that another registrar can take over."""
        self._renewed: list[tuple[ResourceRegistrar, PluginEndpoint]] = []
        self._removed: list[ResourceRegistrar] = []

    def is_registered(self, resource: str) -> bool:
        """The kubelet that runs now has accepted this resource and follows its ListAndWatch."""
        return any(one.endpoint.resource == resource and one.is_registered for one in self._resources)

    def take_over(self, previous: Registrar) -> None:
        """Goes on with the servers and registrations of `previous`, whose `run` has ended and which has none from now on.
        Of a resource that both have, with the same options, the kubelet notices nothing; it is served as before until
        `renew`. Those of which this registrar has none end once it runs."""
        taken_over = {one.endpoint.resource: one for one in previous._resources}
        is_same_directory = self._directory == previous._directory
        for position, one in enumerate(self._resources):
            old = taken_over.get(one.endpoint.resource)
            # The kubelet reads the options once, when a plugin registers: with others it has to register again.
            if is_same_directory and old is not None and old.endpoint.plugin.options == one.endpoint.plugin.options:
                self._resources[position], old.registrar = old, self
                self._renewed.append((old, one.endpoint))
        left = [one for one in previous._resources if one not in self._resources]
        self._removed = [*previous._removed, *left]
        # Otherwise a kubelet that restarts during the reload would not be noticed as another one.
        self._registered_kubelet = previous._registered_kubelet if is_same_directory else None
        previous._resources, previous._removed, previous._renewed = [], [], []

    def renew(self) -> None:
        """The resources that were taken over are served by this registrar's own plugins from now on."""
        for old, endpoint in self._renewed:
            old.endpoint.plugin.continue_as(endpoint.plugin)
        self._renewed = []
        for resource in filter(self.is_registered, list(self._missing)):
            self._has_accepted(resource)

    async def serve(self) -> None:
        """Serves the sockets before `run` registers them. Raises Unavailable."""
        for one in self._resources:
            # What was taken over serves already.
            if not one.endpoint.is_serving:
                await one.endpoint.serve()

    async def leave(self, waiting: Callable[[], int]) -> None:
        """Ends the streams for good, and waits until the kubelet has disconnected: before that it would disconnect whoever
        registers next. `waiting` is how many of the connections are not the kubelet's."""
        for one in self._all:
            one.leave()
        await wait_while(lambda: sum(one.endpoint.connections for one in self._all) > waiting(), _LEAVE_S, poll_s=0.001)

    async def run(self) -> NoReturn:
        """Runs until it is cancelled; then ends the streams and removes the sockets, within 2 s, unless
        `stays_registered`."""
        self._poll()
        try:
            await _close(self._removed)
            self._removed = []
            async with asyncio.TaskGroup() as tasks:
                for one in self._resources:
                    tasks.create_task(one.run(), name=f"register-{one.endpoint.resource}")
                tasks.create_task(self._watch(), name="watch-device-plugin-directory")
        finally:
            if not self.stays_registered:
                await self.close()
        raise AssertionError("a registrar's tasks do not return")

    async def close(self) -> None:
        """Ends what `serve` began where `run` did not follow, and what stayed registered for another registrar."""
        await _close(self._all)

    @property
    def _all(self) -> list[ResourceRegistrar]:
        return [*self._resources, *self._removed]

    async def _watch(self) -> NoReturn:
        with closing(DirectoryWatch(self._directory, poll_s=self._poll_s)) as watch:
            # To begin takes 10 ms, in which the kubelet could dial back. What happens meanwhile is found afterwards.
            await wait_for(self.all_registered, watch.fast_poll_s)
            while True:
                await watch.wait_change()
                self._poll()

    def _poll(self) -> None:
        kubelet = file_identity(self.socket)
        directory = file_identity(self._directory)
        # None: no resource was registered yet, so there is nothing that a restart could have changed.
        is_restart = kubelet is not None and self._registered_kubelet not in (None, kubelet)
        for one in self._resources:
            # Before the callback below: registering again is urgent, because the kubelet rejects pods about a second after
            # its start.
            one.refresh(kubelet, has_directory=directory is not None)
        if is_restart:
            self._registered_kubelet = None
            log.info("kubelet_restarted", socket=str(self.socket))
            self.on_kubelet_restart()

    def registered(self, resource: str, kubelet: FileIdentity) -> None:
        self._registered_kubelet = kubelet
        self.on_registered(resource)
        self._has_accepted(resource)

    def _has_accepted(self, resource: str) -> None:
        self._missing.discard(resource)
        if not self._missing:
            self.all_registered.set()


class ResourceRegistrar:
    """Keeps one endpoint served and registered. Each resource has its own, so that none waits for another.

    `_step` handles, in this order; the first that fails ends the step, and the back-off decides when the next one is due:

    | condition | action |
    |---|---|
    | the agent leaves the kubelet to another one | none |
    | our server does not run, or its socket was removed | serve |
    | another program's socket is at our path | wait as the back-off says, then serve |
    | no kubelet socket | none: the watch of the directory wakes the loop |
    | the kubelet has not accepted this registration, or its stream is overdue | register |
    | registered, no stream yet | step again when the stream is overdue |
    | registered, with a stream | none until an event |
    """

    def __init__(self, endpoint: PluginEndpoint, registrar: Registrar) -> None:
        self.endpoint = endpoint
        self.registrar = registrar
        """After a reload the next generation's."""
        self.registered_with: FileIdentity | None = None
        self._kubelet: FileIdentity | None = None
        self._own_file: FileIdentity | None = None
        self._has_directory = False
        self._is_leaving = False
        self._registered_at = 0.0
        self._stream_due_at = 0.0
        self._failures = 0
        self._failure = ReportOnce()
        self._wake = asyncio.Event()
        self._attempt: asyncio.Task[Unavailable | Rejected | None] | None = None
        endpoint.plugin.on_streams_changed = self._streams_changed

    @property
    def is_registered(self) -> bool:
        return self._is_accepted and self.endpoint.is_serving

    @property
    def _is_accepted(self) -> bool:
        """The present kubelet accepted the registration, and follows ListAndWatch or has time left to begin."""
        has_stream = self.endpoint.plugin.open_streams > 0 or _now() < self._stream_due_at
        return self.registered_with is not None and self.registered_with == self._kubelet and has_stream

    def refresh(self, kubelet: FileIdentity | None, *, has_directory: bool) -> None:
        """Wakes the loop where the directory, the kubelet's socket or our own has changed."""
        own_file = file_identity(self.endpoint.path)
        if (kubelet, own_file, has_directory) == (self._kubelet, self._own_file, self._has_directory):
            return
        if kubelet != self._kubelet:
            self._failures = 0  # they were the previous kubelet's
        self._kubelet, self._own_file, self._has_directory = kubelet, own_file, has_directory
        self._interrupt()

    async def run(self) -> NoReturn:
        while True:
            # Cleared before the step: an event during it wakes the loop again at once.
            self._wake.clear()
            await wait_for(self._wake, await self._step())

    def leave(self) -> None:
        """Ends the stream, and registers no more."""
        # Before the streams end: their end wakes the loop, which would register again.
        self._is_leaving = True
        self.registered_with = None
        self.endpoint.plugin.end_streams()
        self._interrupt()

    async def close(self) -> None:
        self.registered_with = None
        await self.endpoint.stop()

    async def _step(self) -> float | None:
        """One step of the reconciliation; returns after how many seconds the next is due, None: not before an event."""
        if self._is_leaving:
            return None
        try:
            if not self.endpoint.is_serving:
                await self._serve()
            if self._kubelet is not None and not self._is_accepted:
                await self._register(self._kubelet)
        except (Unavailable, Rejected) as e:
            return self._failed(e)
        # Without a kubelet's socket there is nobody to register with: the watch of the directory wakes the loop.
        if self.registered_with is None or self.endpoint.plugin.open_streams:
            return None
        return max(self._stream_due_at - _now(), 0.0)

    async def _serve(self) -> None:
        self.registered_with = None
        if self.endpoint.is_replaced:
            await self._yield_to_other()
        await self.endpoint.serve()
        # Our own new file is no event: without this the next look at the directory would wake the loop for it.
        self._own_file = file_identity(self.endpoint.path)

    async def _yield_to_other(self) -> None:
        """Two agents that replace each other's socket must not do it at full speed: each waits longer every time."""
        pause_s = self._next_pause_s()
        log.warning(
            "device_plugin_socket_replaced",
            resource=self.endpoint.resource,
            socket=str(self.endpoint.path),
            served_again_in_s=round(pause_s, 3),
            advice="run only one agent for this resource on a node",
        )
        await asyncio.sleep(pause_s)

    async def _register(self, kubelet: FileIdentity) -> None:
        """The call has a task of its own, which `_interrupt` cancels. When it moved a timeout of this task to now instead, a
        restart of the kubelet ended this task as cancelled, which no TaskGroup reports (seen with Python 3.11.2)."""
        self.registered_with = None
        try:
            async with asyncio.TaskGroup() as group:
                self._attempt = attempt = group.create_task(self._try_call(), name=f"call-{self.endpoint.resource}")
        finally:
            self._attempt = None
        # `_interrupt` did it: the kubelet or our socket is another one, so what it was about to answer does not count.
        if attempt.cancelled():
            raise Unavailable(
                f"registering {self.endpoint.resource} was broken off: the kubelet or our socket changed meanwhile; "
                "it is tried again"
            )
        if (error := attempt.result()) is not None:
            raise error
        self.registered_with, self._registered_at = kubelet, _now()
        self._stream_due_at = self._registered_at + _FIRST_STREAM_S
        self._failure.is_over()
        log.info("device_plugin_registered", resource=self.endpoint.resource, kubelet=str(self.registrar.socket))
        self.registrar.registered(self.endpoint.resource, kubelet)

    async def _try_call(self) -> Unavailable | Rejected | None:
        """Why it failed."""
        try:
            await self.registrar.register(
                self.registrar.socket,
                endpoint=self.endpoint.socket_name,
                resource=self.endpoint.resource,
                options=self.endpoint.plugin.options,
                timeout_s=REGISTER_TIMEOUT_S,
            )
        except (Unavailable, Rejected) as e:
            return e
        return None

    def _failed(self, error: Exception) -> float:
        pause_s = self._next_pause_s()
        report = log.warning if self._failure.is_new(str(error)) else log.debug
        report(
            "device_plugin_not_registered",
            resource=self.endpoint.resource,
            error=str(error),
            failures=self._failures,
            next_in_s=round(pause_s, 3),
        )
        return pause_s

    def _next_pause_s(self) -> float:
        # A registration that lasted was a good one: its end is a new fault, and not the next of a row.
        if self._registered_at and _now() - self._registered_at > _STABLE_S:
            self._failures = 0
        self._failures += 1
        return self.registrar.backoff.delay_s(self._failures)

    def _streams_changed(self) -> None:
        if not self.endpoint.plugin.open_streams:
            # A stream that ends at once may be the old one's, whose end the kubelet handles after the new registration
            # (measured).
            has_lasted = _now() - self._registered_at > _LASTING_S
            self._stream_due_at = _now() + (0.0 if has_lasted else _NEXT_STREAM_S)
        self._wake.set()

    def _interrupt(self) -> None:
        """Wakes the loop, also out of a Register whose kubelet or socket is no longer there."""
        self._wake.set()
        if self._attempt is not None:
            self._attempt.cancel()


async def _close(resources: Sequence[ResourceRegistrar]) -> None:
    try:
        async with asyncio.timeout(_STOP_S), asyncio.TaskGroup() as tasks:
            for one in resources:
                tasks.create_task(one.close(), name=f"stop-{one.endpoint.resource}")
    except TimeoutError:
        log.warning("device_plugins_cut_off", timeout_s=_STOP_S)


def _now() -> float:
    return asyncio.get_running_loop().time()
