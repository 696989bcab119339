"""The control socket: through it root takes a GPU out of service and puts it back.

HTTP with JSON on a unix socket of mode 0600. Only root and the agent's own user may call (SO_PEERCRED). aiohttp is
imported in a thread once `run` begins. Where the socket cannot be opened the agent runs without it.

    POST /cordon   {"gpu": "…", "reason": "…"}   → {"gpu": {…}, "changed": bool, "not_kept": "…"}
    POST /uncordon {"gpu": "…"}                  → the same, and "ended_wait": "…"
    GET  /gpus                                  → {"gpus": [{…}]}

`gpu` is an index, `0:1` for a MIG instance, a UUID, or the beginning of one.
A refusal is {"error": "…"} with status 400, 403, 404, 409 or 500.
State owned: the listening socket and the identity of its file, which is checked periodically: a file that was removed or
replaced no longer leads to the agent, and the socket is opened again.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import structlog
from msgspec import Struct

from gpushare_agent.agent.gpus.inventory import GpuInventoryState
from gpushare_agent.agent.gpus.saved_health import HealthStateWriter
from gpushare_agent.core.kit.json_schema import loaded
from gpushare_agent.core.kit.peer_credentials import peer_credentials
from gpushare_agent.core.kit.sockets import FileIdentity, bind_unix_socket, file_identity, is_served, remove_socket
from gpushare_agent.core.kit.supervision import in_pool, retried, stop_task
from gpushare_agent.core.model.errors import AgentError, Conflict, Corrupt, NotFound, Rejected, Unavailable, file_remedy
from gpushare_agent.core.model.gpu_health import HealthState
from gpushare_agent.core.model.gpus import Gpu

if TYPE_CHECKING:
    from aiohttp import web

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = structlog.get_logger(__name__)

SOCKET_MODE = 0o600
DIRECTORY_MODE = 0o755
BACKLOG = 16
MAX_REQUEST_BYTES = 16 * 1024
REQUEST_TIMEOUT_S = 10.0
CHECK_PERIOD_S = 30.0
"""Between two checks of the socket's file, and two tries to open it."""
MAX_REASON_CHARS = 200
MAX_GPU_CHARS = 100
STATUS = {Rejected: 400, NotFound: 404, Conflict: 409}


class ControlServer(Struct, eq=False):
    """`poll_soon` lets a GPU that an operator put back be polled at once."""

    path: Path
    inventory: GpuInventoryState
    writer: HealthStateWriter
    poll_soon: Callable[[], None]

    async def run(self) -> NoReturn:
        """Serve until cancelled. While the socket cannot be had, it is tried again every half a minute."""
        # 190 ms of imports, which must not hold the loop.
        load = partial(importlib.import_module, "gpushare_agent.core.kit.http_server")
        await in_pool(load, "control_socket_not_open")
        while True:
            await self._serve_until_gone(*await retried(self._bind, CHECK_PERIOD_S, "control_socket_not_open"))
            log.warning("control_socket_gone", path=str(self.path), then="opened again")

    async def _wait_gone(self, identity: FileIdentity | None) -> None:
        while True:
            await asyncio.sleep(CHECK_PERIOD_S)
            # By identity: another agent of an upgrade may have put its own socket under the name.
            if identity != file_identity(self.path):
                return

    async def _serve_until_gone(self, listener: socket.socket, identity: FileIdentity | None) -> None:
        from aiohttp import web

        from gpushare_agent.core.kit.http_server import HttpLimits, HttpServer

        routes = [
            web.post("/cordon", self._answered(self._cordon)),
            web.post("/uncordon", self._answered(self._uncordon)),
            web.get("/gpus", self._answered(self._show)),
        ]
        # Handlers are not cancelled: a cordon that is half done would be in the inventory and not in the file.
        limits = HttpLimits(connections=16, body_bytes=MAX_REQUEST_BYTES, cancels_handlers=False)
        server = HttpServer("control", routes, limits=limits)
        log.info("control_listening", path=str(self.path))
        try:
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(server.serve([listener]), name="control server")
                await self._wait_gone(identity)
                await stop_task(serving)
        finally:
            self._remove_file(identity)

    def _remove_file(self, identity: FileIdentity | None) -> None:
        try:
            remove_socket(self.path, identity)
        except OSError as e:  # a directory that has become read-only: the next agent replaces the stale socket
            log.warning("control_socket_not_removed", path=str(self.path), error=str(e))

    async def _bind(self) -> tuple[socket.socket, FileIdentity | None]:
        """The bound socket and its file's identity, None where the file is gone already."""
        lost = "GPUs cannot be cordoned by command until it can"
        try:
            self.path.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            # bind_unix_socket replaces a stale socket: that of an agent that lives must stay.
            if is_served(self.path):
                raise Unavailable(
                    f"the control socket {self.path} is not opened: another process listens there. {lost}: end that one, "
                    "or choose another path with --control.socket"
                )
            listener = bind_unix_socket(self.path, mode=SOCKET_MODE)
            listener.setblocking(False)
            # Connected ones wait here until the server accepts: it is not asked for before this.
            listener.listen(BACKLOG)
            return listener, file_identity(self.path)
        except OSError as e:
            raise Unavailable(
                f"the control socket {self.path} cannot be opened: {e.strerror or e}. {lost}: "
                + file_remedy(e, "make its directory writable, or choose another path with --control.socket")
            ) from e

    def _answered(self, handle: Callable[[web.Request], Awaitable[dict[str, Any]]]) -> Handler:
        """The edge: checks the caller, bounds the time, and turns every error into an answer."""
        from aiohttp import web

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                # In addition to the mode of the file: it can be reached through a descriptor or a bind mount.
                if not is_allowed(request.transport):
                    return web.json_response({"error": "only root and the agent's own user may ask"}, status=403)
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    return web.json_response(await handle(request))
            except AgentError as e:
                return web.json_response({"error": str(e)}, status=STATUS.get(type(e), 500))
            except TimeoutError:
                return web.json_response({"error": f"not done within {REQUEST_TIMEOUT_S:g} s"}, status=500)
            except ConnectionError:  # the caller hung up; the server ignores it
                raise
            except Exception as e:  # a servicer's edge: one request must not end the agent
                log.error("control_request_failed", path=request.path, exc_info=e)
                return web.json_response({"error": f"the agent failed at it: {e!r}; see its log"}, status=500)

        return answer

    async def _cordon(self, request: web.Request) -> dict[str, Any]:
        raw = await _body(request)
        reason = _text(raw, "reason", MAX_REASON_CHARS)
        # The reason first: a text that is wrong is refused before anything is looked up.
        gpu = self._gpu(_text(raw, "gpu", MAX_GPU_CHARS))
        changed = self.inventory.cordon(gpu.uuid, reason)
        log.info("cordon_asked", index=gpu.index, uuid=gpu.uuid, reason=reason, changed=changed)
        return self._result(gpu, changed, await self.writer.save_now())

    async def _uncordon(self, request: web.Request) -> dict[str, Any]:
        gpu = self._gpu(_text(await _body(request), "gpu", MAX_GPU_CHARS))
        # Taken before: uncordon ends a wait for a reset too, and the answer says which.
        before = self.inventory.healths[gpu.uuid]
        changed = self.inventory.uncordon(gpu.uuid)
        ended_wait = before.cause if before.state is HealthState.NEEDS_RESET else ""
        log.info("uncordon_asked", index=gpu.index, uuid=gpu.uuid, changed=changed, ended_wait=ended_wait)
        # The person waits for the GPU: not for the end of the period.
        self.poll_soon()
        return self._result(gpu, changed, await self.writer.save_now()) | {"ended_wait": ended_wait}

    async def _show(self, _request: web.Request) -> dict[str, Any]:
        return {"gpus": [self._shown(gpu) for gpu in self.inventory.current.known]}

    def _result(self, gpu: Gpu, changed: bool, not_saved: str) -> dict[str, Any]:
        [now] = [one for one in self.inventory.current.known if one.uuid == gpu.uuid]
        return {"gpu": self._shown(now), "changed": changed, "not_kept": not_saved}

    def _shown(self, gpu: Gpu) -> dict[str, Any]:
        """`reason` is without the cordon; `probes` is how many polls must pass before the GPU is offered again."""
        health = self.inventory.healths[gpu.uuid]
        return {
            "index": gpu.index,
            "label": gpu.label,
            "uuid": gpu.uuid,
            "name": gpu.name,
            "is_healthy": gpu.is_healthy,
            "reason": self.inventory.unhealthy_reasons.get(gpu.uuid, ""),
            "state": health.state.value,
            "cause": health.cause,
            "passes": health.passes,
            "probes": self.inventory.policy.recovery_probes,
            "relapses": health.relapses,
            "cordoned": self.inventory.cordoned.get(gpu.uuid),  # an instance is cordoned with its GPU
        }

    def _gpu(self, text: str) -> Gpu:
        gpus = self.inventory.current.known
        selected = select_gpus(text, gpus)
        # Never a guess: a cordon of the wrong GPU takes it from pods.
        if len(selected) == 1:
            return selected[0]
        known = ", ".join(f"{gpu.label} ({gpu.uuid})" for gpu in sorted(gpus, key=lambda gpu: gpu.index)) or "none"
        if not selected:
            raise NotFound(f"this node has no GPU {text!r}; its GPUs: {known}")
        raise Conflict(f"{text!r} is the beginning of {len(selected)} GPUs' UUIDs; the GPUs: {known}")


def is_allowed(transport: asyncio.BaseTransport | None) -> bool:
    """Root, or the user that the agent runs as."""
    peer = peer_credentials(transport) if transport is not None else None
    return peer is not None and peer.uid in (0, os.geteuid())


async def _body(request: web.Request) -> dict[str, Any]:
    content = await request.read()
    try:
        raw = loaded(content)
    except Corrupt as e:
        raise Rejected(f"the request: {e}") from e
    if not isinstance(raw, dict):
        raise Rejected("the request is no JSON object")
    return raw


def _text(raw: dict[str, Any], name: str, limit: int) -> str:
    """A printable text; empty where it is absent. A line break in a reason could forge lines of a log or a table."""
    value = raw.get(name, "")
    if not isinstance(value, str) or len(value) > limit or not value.isprintable():
        raise Rejected(f"{name!r} must be a text of at most {limit} printable characters")
    return value.strip()


PREFIX = "GPU-"


def select_gpus(text: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    """One GPU where `text` is unambiguous, none where it matches no GPU, several where it is too short a prefix.

    Digits alone are an index, `0:1` is NVIDIA's name of a MIG instance. A UUID may lack its `GPU-`,
    may be in any case, and may be cut short.
    """
    requested = text.strip().lower()
    if not requested:
        return []
    # Before prefixes: an index is meant, though a UUID may begin with these digits.
    if requested.isdecimal():
        return [gpu for gpu in gpus if str(gpu.index) == (requested.lstrip("0") or "0")]
    if ":" in requested:
        return [gpu for gpu in gpus if gpu.mig is not None and not gpu.is_gone and gpu.label == requested]
    exact = [gpu for gpu in gpus if gpu.uuid.lower() == requested]
    begins = [gpu for gpu in gpus if gpu.uuid.lower().startswith((requested, PREFIX.lower() + requested))]
    # A whole UUID is unambiguous, also where it is the beginning of another.
    return exact or sorted(begins, key=lambda gpu: gpu.index)
