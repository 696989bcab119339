"""Serves the device plugins and keeps them registered with the kubelet.

Level, not edge: for each resource one loop compares what is with what should be (our socket lies in the directory and
is ours; the kubelet that runs now has accepted us; it holds a ListAndWatch stream) and makes one step. Events of the
directory, ended streams and a slow poll only say "look again". A kubelet that starts removes every socket and tells
nobody, and rejects pods for good about a second later: hence the hurry.

State owned: which kubelet is there, and per resource with which of them it is registered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

import structlog

from gpushare_agent.kit.backoff import Backoff
from gpushare_agent.kit.sockets import FileIdentity, file_identity
from gpushare_agent.kit.watch_path import open_directory_watch
from gpushare_agent.kubelet.plugin_endpoint import PluginEndpoint
from gpushare_agent.model.errors import Rejected, Unavailable
from gpushare_agent.wire import v1beta1

__all__ = ["PluginEndpoint", "RegisterCall", "Registrar"]

log = structlog.get_logger(__name__)

KUBELET_SOCKET = "kubelet.sock"
REGISTER_TIMEOUT_S = 15.0
"""The kubelet dials back for up to 10 s inside Register."""
_FIRST_STREAM_S = 2.0
"""How long after Register the kubelet may take to open ListAndWatch; without a stream it does not use the plugin."""
_NEXT_STREAM_S = 0.25
"""How long after a stream ended another may take to open, before the resource is registered again."""
_STABLE_S = 10.0
"""A registration that held this long makes the next failure the first one."""
_STOP_S = 1.5
_RESTART_S = 5.0
DEFAULT_BACKOFF = Backoff(base_s=0.05, cap_s=5.0)


class RegisterCall(Protocol):
    """kubelet/registration_client.py's `register`. Raises Unavailable, Rejected."""

    async def __call__(
        self,
        kubelet_socket: Path,
        *,
        endpoint: str,
        resource: str,
        options: v1beta1.DevicePluginOptions,
        timeout_s: float,
    ) -> None: ...


class Registrar:
    """Keeps every endpoint served and registered while `run` runs."""

    def __init__(
        self,
        *,
        device_plugin_path: Path,
        endpoints: Sequence[PluginEndpoint],
        register: RegisterCall,
        poll_s: float = 5.0,
        backoff: Backoff = DEFAULT_BACKOFF,
    ) -> None:
        self._directory = device_plugin_path
        self._socket = device_plugin_path / KUBELET_SOCKET
        self._on_kubelet_restart: Callable[[], None] = lambda: None
        self._poll_s = poll_s
        self._on_registered: Callable[[str], None] = lambda _resource: None
        self._registered_kubelet: FileIdentity | None = None
        self._keepers = [
            _Keeper(endpoint, self._socket, register=register, on_registered=self._registered, backoff=backoff)
            for endpoint in endpoints
        ]

    def subscribe(self, *, on_registered: Callable[[str], None], on_kubelet_restart: Callable[[], None]) -> None:
        """`on_registered` is called with the resource after each registration, `on_kubelet_restart` when another kubelet
        socket has come after one with which a resource was registered. Neither may block."""
        self._on_registered, self._on_kubelet_restart = on_registered, on_kubelet_restart

    def is_registered(self, resource: str) -> bool:
        """The kubelet that runs now has accepted this resource and uses it, as far as can be seen from here."""
        return any(keeper.endpoint.resource == resource and keeper.is_registered for keeper in self._keepers)

    async def restart_servers(self) -> None:
        """Closes every server, serves anew and registers again; returns when all serve, or after 5 s."""
        for keeper in self._keepers:
            keeper.ask_restart()
        try:
            async with asyncio.timeout(_RESTART_S):
                for keeper in self._keepers:
                    await keeper.restarted.wait()
        except TimeoutError:
            log.error("device_plugin_restart_slow", directory=str(self._directory), waited_s=_RESTART_S)

    async def run(self) -> NoReturn:
        """Runs until it is cancelled; then ends the streams, closes, and removes the sockets, within 2 s."""
        self._look()
        try:
            async with asyncio.TaskGroup() as tasks:
                for keeper in self._keepers:
                    tasks.create_task(keeper.run(), name=f"register-{keeper.endpoint.resource}")
                tasks.create_task(self._watch(), name="watch-device-plugin-directory")
        finally:
            await self._stop()
        raise AssertionError("a registrar's tasks do not return")

    async def _stop(self) -> None:
        try:
            async with asyncio.timeout(_STOP_S), asyncio.TaskGroup() as tasks:
                for keeper in self._keepers:
                    tasks.create_task(keeper.close(), name=f"stop-{keeper.endpoint.resource}")
        except TimeoutError:
            log.warning("device_plugins_cut_off", timeout_s=_STOP_S)

    async def _watch(self) -> NoReturn:
        async with open_directory_watch(self._directory, poll_s=self._poll_s) as watch:
            while True:
                await watch.wait_change()
                self._look()

    def _look(self) -> None:
        kubelet = file_identity(self._socket)
        directory = file_identity(self._directory)
        is_restart = kubelet is not None and self._registered_kubelet not in (None, kubelet)
        for keeper in self._keepers:
            keeper.look_again(kubelet, has_directory=directory is not None)
        if is_restart:
            self._registered_kubelet = None
            log.info("kubelet_restarted", socket=str(self._socket))
            self._on_kubelet_restart()

    def _registered(self, resource: str, kubelet: FileIdentity) -> None:
        self._registered_kubelet = kubelet
        self._on_registered(resource)


class _Keeper:
    """Keeps one endpoint served and registered. Each resource has its own, so that none waits for another."""

    def __init__(
        self,
        endpoint: PluginEndpoint,
        kubelet_socket: Path,
        *,
        register: RegisterCall,
        on_registered: Callable[[str, FileIdentity], None],
        backoff: Backoff,
    ) -> None:
        self.endpoint = endpoint
        self.registered_with: FileIdentity | None = None
        self.restarted = asyncio.Event()
        self._kubelet_socket = kubelet_socket
        self._call = register
        self._on_registered = on_registered
        self._backoff = backoff
        self._kubelet: FileIdentity | None = None
        self._own_file: FileIdentity | None = None
        self._has_directory = False
        self._registered_at = 0.0
        self._stream_due_at = 0.0
        self._failures = 0
        self._said = ""
        self._must_restart = False
        self._wake = asyncio.Event()
        self._attempt: asyncio.Timeout | None = None
        endpoint.plugin.on_streams_changed = self._streams_changed

    @property
    def is_registered(self) -> bool:
        return self._is_accepted and self.endpoint.is_serving and not self._must_restart

    @property
    def _is_accepted(self) -> bool:
        """The kubelet that is there took the registration, and holds a stream or has time left to open one."""
        has_stream = self.endpoint.plugin.open_streams > 0 or _now() < self._stream_due_at
        return self.registered_with is not None and self.registered_with == self._kubelet and has_stream

    def look_again(self, kubelet: FileIdentity | None, *, has_directory: bool) -> None:
        """Wakes the loop if the directory or a socket in it is not what it was; anything else is no news."""
        own_file = file_identity(self.endpoint.path)
        if (kubelet, own_file, has_directory) == (self._kubelet, self._own_file, self._has_directory):
            return
        if kubelet != self._kubelet:
            self._failures = 0  # what the last kubelet answered says nothing about this one
        self._kubelet, self._own_file, self._has_directory = kubelet, own_file, has_directory
        self._interrupt()

    def ask_restart(self) -> None:
        self.restarted.clear()
        self._must_restart = True
        self._interrupt()

    async def run(self) -> NoReturn:
        while True:
            self._wake.clear()
            pause_s = await self._step()
            try:
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def close(self) -> None:
        self.registered_with = None
        await self.endpoint.stop()

    async def _step(self) -> float | None:
        """Makes one step towards "served and registered"; returns when to look again without being woken."""
        try:
            if self._must_restart or not self.endpoint.is_serving:
                await self._serve()
            if self._kubelet is not None and not self._is_accepted:
                await self._register(self._kubelet)
        except (Unavailable, Rejected) as e:
            return self._failed(e)
        if self.registered_with is None or self.endpoint.plugin.open_streams:
            return None
        return max(self._stream_due_at - _now(), 0.0)

    async def _serve(self) -> None:
        self.registered_with = None
        if self.endpoint.is_replaced:
            await self._yield_to_other()
        await self.endpoint.serve()
        self._own_file = file_identity(self.endpoint.path)
        self._must_restart = False
        self.restarted.set()

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
        self.registered_with = None
        try:
            async with asyncio.timeout(REGISTER_TIMEOUT_S) as self._attempt:
                await self._call(
                    self._kubelet_socket,
                    endpoint=self.endpoint.socket_name,
                    resource=self.endpoint.resource,
                    options=self.endpoint.plugin.options,
                    timeout_s=REGISTER_TIMEOUT_S,
                )
        except TimeoutError as e:
            raise Unavailable(f"registering {self.endpoint.resource} was given up; it is tried again") from e
        finally:
            self._attempt = None
        self.registered_with, self._registered_at = kubelet, _now()
        self._stream_due_at = self._registered_at + _FIRST_STREAM_S
        self._said = ""
        log.info("device_plugin_registered", resource=self.endpoint.resource, kubelet=str(self._kubelet_socket))
        self._on_registered(self.endpoint.resource, kubelet)

    def _failed(self, error: Exception) -> float:
        pause_s = self._next_pause_s()
        report = log.debug if str(error) == self._said else log.warning
        self._said = str(error)
        report(
            "device_plugin_not_registered",
            resource=self.endpoint.resource,
            error=str(error),
            failures=self._failures,
            next_in_s=round(pause_s, 3),
        )
        return pause_s

    def _next_pause_s(self) -> float:
        if self._registered_at and _now() - self._registered_at > _STABLE_S:
            self._failures = 0
        self._failures += 1
        return self._backoff.delay_s(self._failures)

    def _streams_changed(self) -> None:
        if not self.endpoint.plugin.open_streams:
            self._stream_due_at = _now() + _NEXT_STREAM_S
        self._wake.set()

    def _interrupt(self) -> None:
        """Wakes the loop, also out of a Register whose kubelet or socket is gone."""
        self._wake.set()
        if self._attempt is not None and not self._attempt.expired():
            self._attempt.reschedule(_now())


def _now() -> float:
    return asyncio.get_running_loop().time()
