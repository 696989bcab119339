"""A fake of NVIDIA's MPS control daemon: it answers the same commands and serves no client.

`open_fake_mps` runs the daemon in this process and leaves a control program (mps_control.py) next to it, for the agent to
ask with. What it was asked stands in `control.log` of the log directory. Its sockets and files have the real ones' names;
what goes through them is its own protocol.

State owned: the default percentage, the commands heard.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from gpushare_agent.sandbox.mps_control import ANSWER_TIMEOUT_S, CONTROL, MAX_COMMANDS_BYTES

_LOCK = "control_lock"
_PID = "nvidia-cuda-mps-control.pid"


class FakeMps:
    """The daemon. `clients` are PIDs that it claims to serve, by the PID of their server."""

    def __init__(self, pipe: Path, logs: Path) -> None:
        self.commands: list[str] = []
        self.percentage = 100.0
        self.clients: dict[int, list[int]] = {}
        self.is_ended = asyncio.Event()
        self._pipe = pipe
        self._log = logs / "control.log"

    def answer(self, command: str) -> str:
        """One command's answer, each line ended."""
        self.commands.append(command)
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"{command}\n")
        try:
            return self._obey(command)
        # Not a number: the real daemon answers so, too.
        except ValueError:
            return f"Invalid argument: {command}\n"

    def _obey(self, command: str) -> str:
        match command.split():
            case ["get_server_list"]:
                return "".join(f"{pid}\n" for pid in sorted(self.clients))
            case ["get_client_list", pid]:
                return "".join(f"{client}\n" for client in self.clients.get(int(pid), ()))
            case ["get_default_active_thread_percentage"]:
                return f"{self.percentage:.1f}\n"
            case ["set_default_active_thread_percentage", percent]:
                self.percentage = float(percent)
                return f"{self.percentage:.1f}\n"
            case ["quit", *_]:
                self.is_ended.set()
                return ""
        return f"Unrecognized command: {command}\n"

    async def run(self, started: asyncio.Event | None = None) -> None:
        """Serves until `quit` or cancelled. Its socket stays, as a dead daemon's does."""
        with (
            (self._pipe / _LOCK).open("a") as lock,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as listener,
        ):
            # As the real daemon: a second one for the same directory ends.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path = self._pipe / CONTROL
            # A dead daemon's socket: the lock says that none lives.
            path.unlink(missing_ok=True)
            listener.bind(str(path))
            # Clients are programs of any user.
            path.chmod(0o666)
            listener.listen()
            (self._pipe / _PID).write_text(str(os.getpid()))
            try:
                if started is not None:
                    started.set()
                await self._serve_all(listener)
            finally:
                (self._pipe / _PID).unlink(missing_ok=True)

    async def _serve_all(self, listener: socket.socket) -> None:
        """Every accepted connection has an owner at once: none is left open when this ends. After `quit` those that ask are
        answered still."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:

            def accept() -> None:
                with suppress(BlockingIOError, ConnectionError):
                    client, _ = listener.accept()
                    client.setblocking(False)
                    task = group.create_task(self._serve(client), name="fake mps client")
                    task.add_done_callback(lambda _: client.close())  # also of a task that never began

            loop.add_reader(listener, accept)
            try:
                await self.is_ended.wait()
            finally:
                loop.remove_reader(listener)

    async def _serve(self, client: socket.socket) -> None:
        loop, received = asyncio.get_running_loop(), b""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                # Until the control program has sent all: it shuts its side down.
                while len(received) < MAX_COMMANDS_BYTES and (piece := await loop.sock_recv(client, 4096)):
                    received += piece
                for command in received.decode(errors="replace").splitlines():
                    await loop.sock_sendall(client, self.answer(command.strip()).encode())
        except (TimeoutError, ConnectionError):
            return


def write_control_program(path: Path) -> None:
    """A control program that speaks to a fake daemon, for this installation of the agent and this Python."""
    # From a checkout the package is on no path of the interpreter.
    package = str(Path(__file__).resolve().parents[2])
    path.write_text(
        '#!/bin/sh\n[ "$1" = -f ] && module=fake_mps || module=mps_control\n'
        f"PYTHONPATH={shlex.quote(package)} exec {shlex.quote(sys.executable)} -P -m gpushare_agent.sandbox.$module\n"
    )
    path.chmod(0o755)


@asynccontextmanager
async def open_fake_mps(pipe: Path, logs: Path, control: Path) -> AsyncIterator[FakeMps]:
    """A daemon that serves in this process while the block runs, and its control program at `control`."""
    for directory in (pipe, logs, control.parent):
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    write_control_program(control)
    daemon, started = FakeMps(pipe, logs), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(daemon.run(started), name="fake mps")
        try:
            await started.wait()
            yield daemon
        finally:
            task.cancel()
            await asyncio.wait({task})


async def _run_daemon(pipe: Path, logs: Path) -> None:
    daemon = FakeMps(pipe, logs)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.is_ended.set)
    await daemon.run()


if __name__ == "__main__":
    asyncio.run(_run_daemon(*(Path(os.environ[f"CUDA_MPS_{name}_DIRECTORY"]) for name in ("PIPE", "LOG"))))
