"""Answers to a process its PID and its cgroup as the host sees them: what the kernel module of a real driver knows by
itself.

    python3 host_view.py STATE_DIRECTORY

listens on STATE_DIRECTORY/host-view, in the host's PID and cgroup namespaces; the fake driver asks once per process
that uses a GPU. Standard library alone. The answer is one line, `PID CGROUP`, with cgroup v2's path, or v1's of the
first controller.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
from pathlib import Path


class HostView:
    """A thread that answers, until `close`."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "host-view"
        self._path.unlink(missing_ok=True)
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(self._path))
        self._path.chmod(0o666)
        self._server.listen(512)
        self._thread = threading.Thread(target=self._serve, name="host-view", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            with connection:
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                pid = struct.unpack("3i", credentials)[0]
                try:
                    connection.sendall(f"{pid} {cgroup_of(pid)}\n".encode())
                except OSError:  # it has gone
                    continue

    def join(self) -> None:
        self._thread.join()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()
        self._path.unlink(missing_ok=True)


def cgroup_of(pid: int) -> str:
    """The path in the hierarchy that has it: v2's unless that says `/`, as on hosts whose controllers are v1's."""
    lines = (Path("/proc") / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines()
    paths = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in lines}
    own = [paths.get("", "/"), *(path for _, path in sorted(paths.items()))]
    return next((path for path in own if path != "/"), "/")


if __name__ == "__main__":
    os.umask(0)
    HostView(Path(sys.argv[1])).join()
