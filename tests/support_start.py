"""Starts programs of PREPARED by a fork of a process that has imported them. Else a start of the agent takes half a second
of processor time, most of it imports, and the tests make hundreds.

In the session `tests` alone, `StartedByFork` takes the place of `subprocess.Popen` (conftest.py). What it starts so is
`python -m MODULE`, in an environment and a way that the forked process can take on; all else is started as ever. The
program is a child of this process, as always: the server forks twice, and this process is the subreaper meanwhile.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BY_FORK = "TESTS_START_BY_FORK"
"""The variable by which the session `tests` asks for it."""
ROOT = Path(__file__).parents[1]
PREPARED = {
    "gpushare_agent": ("commands", "agent.program", "extender.app", "kubectl.plugin", "sandbox.run"),
    "tests.gpus.support_nvml_probe": ("",),
}
"""What is imported of each before its first start."""
FIXED = ("PYTHON", "LC_", "LANG", "LD_PRELOAD", "TZ")
"""Variables that count when Python starts, and not later. So does LD_LIBRARY_PATH, by which the fake NVML is found."""
NVML = "libnvidia-ml.so.1"
PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)


def _fixed(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(FIXED)}


class Server:
    """The process that forks, started at the first request."""

    def __init__(self) -> None:
        self.environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, request: Any, files: Sequence[int]) -> int:
        """The PID. Raises OSError."""
        with self._lock:
            if self._socket is None:
                self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    command = (sys.executable, "-m", "tests.support_start", str(theirs.fileno()))
                    self._process = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, env=self.environ, cwd=ROOT, pass_fds=(theirs.fileno(),)
                    )
            _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], files)
                pid = int(self._socket.recv(32))
                self._socket.recv(32)
            finally:
                _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
            return pid

    def stop(self) -> None:
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait()


SERVER = Server()


class StartedByFork(subprocess.Popen[Any]):
    """A Popen whose child, where it is the agent's program, comes from the server."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        _, pass_fds, cwd, env, _, _, shell, *pipes = rest[:13]
        # restore_signals, gid, gids, uid, umask, start_new_session, process_group: CPython 3.11 to 3.13.
        is_plain = rest[13:] == (True, None, None, None, -1, False, -1)
        is_plain = is_plain and env and not (executable or preexec_fn or pass_fds or shell)
        words = [] if isinstance(args, (str, bytes)) else [os.fspath(one) for one in args]
        if words[1:2] == ["-P"]:  # the directory is on no path of the server's either
            del words[1]
        is_prepared = words[:2] == [sys.executable, "-m"] and "".join(words[2:3]) in PREPARED
        if not is_plain or not is_prepared or _fixed(env) != _fixed(SERVER.environ):
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        files = [one if one != -1 else number for number, one in enumerate((pipes[0], pipes[3], pipes[5]))]
        request = {"words": words[2:], "environ": dict(env), "cwd": str(cwd or Path.cwd())}
        self.pid = SERVER.start(request, files)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _serve(requests: socket.socket) -> list[str]:
    """Ends with the last request's connection; returns in each forked process, with its module and words."""
    prepared = dict(PREPARED)
    while True:
        message, files, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not message:
            os._exit(0)
        asked = json.loads(message)
        if (module := asked["words"][0]) in prepared:
            for name in prepared.pop(module):
                importlib.import_module(f"{module}.{name}".rstrip("."))
            # It runs again, as __main__.
            sys.modules.pop(module if module.startswith("tests") else f"{module}.__main__", None)
            gc.freeze()
        if (middle := os.fork()) == 0:
            if pid := os.fork():
                requests.send(str(pid).encode())
                os._exit(0)
            break
        for one in files:
            os.close(one)
        os.waitpid(middle, 0)
        requests.send(b"parted")  # the program is a child of who asked
    requests.close()
    for number, one in enumerate(files):
        os.dup2(one, number)
        os.close(one)
    os.environ.clear()
    os.environ.update(asked["environ"])
    os.chdir(asked["cwd"])
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if folder and (library := Path(folder, NVML)).exists():
            ctypes.CDLL(str(library))  # a later dlopen finds what is loaded already, by its soname
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        own, buffering = getattr(sys, name), 1 if number == 2 or os.isatty(number) else -1
        made = open(number, mode, buffering, own.encoding, own.errors, closefd=False)  # noqa: SIM115 - for ever
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)
    return list(asked["words"])


def main() -> None:
    gc.disable()
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "true")
    from gpushare_agent.__main__ import import_libraries

    import_libraries(is_agent=False)
    module, *words = _serve(socket.socket(fileno=int(sys.argv[1])))
    sys.argv[1:], sys.orig_argv[1:] = words, ["-m", module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
