"""Sends commands to the MPS control daemon by its control program: one short-lived process each, bounded in time and output.

The program is given the two directories in an environment of its own and the command on standard input; never through a
shell. Where it is not installed (an agent's image without the driver's programs) `check` can only find out whether a process
listens on the daemon's socket. Source: docs/reference/formats.md, section 7. State owned: none.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from gpushare_agent.agent.isolation.mps.files import MpsFiles
from gpushare_agent.core.kit.process import end_process
from gpushare_agent.core.kit.supervision import bounded
from gpushare_agent.core.model.errors import Unavailable, os_errors_as

COMMAND_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 64 * 1024
_REAP_TIMEOUT_S = 1.0
_PID = re.compile(r"[0-9]{1,10}")
_INHERITED = ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
_USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_RETRIED = "Shares wait until it answers; it is polled periodically."


class MpsControl:
    """`control` is the program, a path or a name searched in PATH. `timeout_s` bounds one command."""

    def __init__(
        self, control: Path, pipe_directory: Path, log_directory: Path, *, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> None:
        self._control = control
        self.files = MpsFiles(pipe_directory, log_directory, control.name)
        self._timeout_s = timeout_s

    def program(self) -> str | None:
        """The control program's path, None if it is not installed."""
        return shutil.which(self._control)

    def environment(self) -> dict[str, str]:
        """The environment of the daemon and the control program: the directories that both use, and their search paths."""
        # Of the agent's environment these alone: where the driver's libraries are, and which GPUs the daemon serves.
        found = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        return {
            "PATH": os.environ.get("PATH", _USUAL_PATH),
            **found,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.files.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.files.logs),
        }

    async def check(self) -> None:
        """Raises Unavailable with the reason if the daemon does not answer."""
        if problem := self.files.obstacle():
            raise Unavailable(problem)
        # Without the program (an image without the driver's programs) a listening socket is all that can be seen.
        if self.program() is not None:
            await self.get_default_active_thread_percentage()
        elif problem := await asyncio.to_thread(self.files.listener):
            raise Unavailable(problem)

    async def list_clients(self) -> list[int]:
        """PIDs of the clients of all servers, sorted. There is no server before the first client."""
        servers = set(await self._pids("get_server_list"))
        return sorted({pid for server in servers for pid in await self._pids(f"get_client_list {server}")})

    async def get_default_active_thread_percentage(self) -> float:
        """The limit of a client without one of its own, percent."""
        answer = await self._send("get_default_active_thread_percentage")
        try:
            percent = float(answer)
        except ValueError:
            percent = -1.0
        if not 0 < percent <= 100:
            raise _invalid("get_default_active_thread_percentage", answer)
        return percent

    async def set_default_active_thread_percentage(self, percent: int) -> None:
        """Sets the limit of clients without one of their own, of servers that start from now on."""
        await self._send(f"set_default_active_thread_percentage {percent}")

    async def quit(self) -> None:
        """Ends the daemon and its servers; clients that still run lose their GPU."""
        await self._send("quit")

    async def _pids(self, command: str) -> list[int]:
        answer = await self._send(command)
        if not all(_PID.fullmatch(text) for text in answer.split()):
            raise _invalid(command, answer)
        return [int(text) for text in answer.split()]

    async def _send(self, command: str) -> str:
        """The answer's text, without surrounding space.

        Raises:
            Unavailable: no program, no answer in time, too long an answer, or the program reports a failure.
        """
        program = self.program()
        if program is None:
            raise Unavailable(
                f"the MPS control program {self._control} is not installed, so {command} was not sent. It comes with the "
                "driver; name its path with mps.control"
            )
        late = f"gave no answer to {command} within {self._timeout_s:g} s. {_RETRIED}"
        async with bounded(self._timeout_s, f"the MPS control daemon in {self.files.pipe} {late}"):
            with os_errors_as(Unavailable, f"the MPS control program {program} cannot be run"):
                code, answer = await self._run(program, command)
        # Not cut off: a list of PIDs that ends in the middle of one names another process.
        if len(answer) > MAX_ANSWER_BYTES:
            raise Unavailable(f"the answer of {program} to {command} is longer than {MAX_ANSWER_BYTES} bytes")
        text = answer.decode(errors="replace").strip()
        if code != 0:
            raise Unavailable(
                f"{program} failed at {command} with the pipe directory {self.files.pipe} (exit code {code}): "
                f"{_shown(text) or 'it gave no reason'}"
            )
        return text

    async def _run(self, program: str, command: str) -> tuple[int, bytes]:
        process = await asyncio.create_subprocess_exec(
            program,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self.environment(),
            start_new_session=True,  # so that its descendants are killed with it
        )
        assert process.stdin is not None and process.stdout is not None  # noqa: S101 - both are pipes, for mypy
        try:
            with suppress(
                BrokenPipeError, ConnectionResetError
            ):  # it ended without reading; its exit code is the answer
                process.stdin.write(f"{command}\n".encode())
                await process.stdin.drain()
            process.stdin.close()
            answer = b""
            # Read to a bound and not by communicate(): whoever answers on the socket decides how much comes.
            while len(answer) <= MAX_ANSWER_BYTES and (piece := await process.stdout.read(8192)):
                answer += piece
            if len(answer) > MAX_ANSWER_BYTES:
                return 0, answer
            return await process.wait(), answer
        finally:
            await end_process(process, _REAP_TIMEOUT_S, has_group=True)


def _invalid(command: str, answer: str) -> Unavailable:
    return Unavailable(f"the MPS control daemon's answer to {command} is invalid: {_shown(answer)!r}")


def _shown(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"
