"""The MPS control daemon's directories on the host: whether they are usable, which daemon uses them, and stale files.

What a daemon keeps in its pipe directory, as seen on nodes with drivers 550 to 580:

| file | is |
|---|---|
| `control` | unix socket of clients and of the control program; stays when the daemon ends |
| `control_privileged` | unix socket for root |
| `control_lock` | regular file, locked while the daemon lives |
| `log` | FIFO into which servers write their log lines |
| `nvidia-cuda-mps-control.pid` | the daemon's PID as text; removed when it ends in good order |

No state. Blocking calls on local files, microseconds each.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

import structlog

from gpushare_agent.core.kit.regular_file import read_regular
from gpushare_agent.core.kit.sockets import MAX_ADDRESS_BYTES, connectable_path
from gpushare_agent.core.model.errors import StartupError, os_errors_as

log = structlog.get_logger(__name__)

CONTROL_SOCKET = "control"
PID_FILE = "nvidia-cuda-mps-control.pid"
LOCK_FILE = "control_lock"
DAEMON_FILES = (CONTROL_SOCKET, "control_privileged", LOCK_FILE, "log", PID_FILE)
"""All that a daemon makes in its pipe directory; nothing else there is ever removed."""

SELINUX_LABEL = b"system_u:object_r:container_file_t:s0\0"
"""Lets confined containers use the files, whatever their category."""

_DIRECTORY_MODE = 0o755
_SHARED_MODE = 0o1777
_SELINUX = "security.selinux"
_COMM_BYTES = 15
"""The kernel's length of a program's name in /proc/<pid>/comm."""
_CONNECT_TIMEOUT_S = 1.0


class MpsFiles:
    """`pipe` and `logs` are the daemon's CUDA_MPS_PIPE_DIRECTORY and CUDA_MPS_LOG_DIRECTORY; `program` is its name."""

    def __init__(self, pipe: Path, logs: Path, program: str) -> None:
        self.pipe = pipe
        self.logs = logs
        self._program = program

    def obstacle(self) -> str:
        """Why the pipe directory cannot be used, empty when it can."""
        if not self.pipe.is_absolute():
            return f"the MPS pipe directory {self.pipe} is not an absolute path"
        if (size := len(os.fsencode(self.pipe / "control_privileged"))) > MAX_ADDRESS_BYTES:
            return (
                f"the MPS pipe directory {self.pipe} is too long: a socket in it would have {size} bytes of path, "
                f"{MAX_ADDRESS_BYTES} are possible"
            )
        try:
            status = self.pipe.stat()
        except OSError as error:
            return f"the MPS pipe directory {self.pipe} cannot be seen ({error.strerror})"
        if not stat.S_ISDIR(status.st_mode):
            return f"the MPS pipe directory {self.pipe} is not a directory"
        if status.st_uid not in (0, os.geteuid()):
            return (
                f"the MPS pipe directory {self.pipe} belongs to user {status.st_uid}, neither to root nor to this "
                f"program's user {os.geteuid()}: its owner decides which daemon answers there"
            )
        return ""

    def listener(self) -> str:
        """Why no process can be reached at the daemon's socket, empty when one listens there.

        The daemon logs the connection, as it logs one of the control program, and does not answer it.
        """
        path = self.pipe / CONTROL_SOCKET
        try:
            status = path.lstat()
        except OSError as error:
            return f"there is no MPS control socket {path} ({error.strerror})"
        if not stat.S_ISSOCK(status.st_mode):
            return f"{path} is no socket, so no MPS control daemon listens there"
        error_number = _connect(path)
        if error_number in (0, errno.EPROTOTYPE):  # a socket of another type, and a process has it open
            return ""
        if error_number == errno.ECONNREFUSED:
            return f"no process listens on {path}: the MPS control daemon that made it has ended"
        return f"the MPS control daemon's socket {path} cannot be connected to ({os.strerror(error_number)})"

    def live_daemon(self) -> str:
        """The evidence of a running daemon in the pipe directory, empty where there is none."""
        path = self.pipe / CONTROL_SOCKET
        # Any other error (a full queue, no permission) is taken for a daemon: a second one must never be started next to it.
        if path.is_socket() and _connect(path) not in (errno.ECONNREFUSED, errno.ENOENT):
            return f"a process listens on {path}"
        if _is_locked(self.pipe / LOCK_FILE):
            return f"a process has locked {self.pipe / LOCK_FILE}"
        pid = self.daemon_pid()
        # By name too: the PID of a daemon that was killed may be another process's by now.
        if pid is not None and _comm(pid) == self._program[:_COMM_BYTES]:
            return f"{self.pipe / PID_FILE} names PID {pid}, which runs {self._program}"
        return ""

    def daemon_pid(self) -> int | None:
        """The PID in the PID file, None where there is none or it is invalid."""
        try:
            text = read_regular(self.pipe / PID_FILE, 32).strip()  # clients may write in this directory
        except OSError:
            return None
        return int(text) if text.isdigit() and 0 < int(text) < 2**31 else None

    def make(self, *, shared_memory: Path | None = None) -> None:
        """Makes the directories where they are missing, with SELinux's label where the host has labels: for everybody to
        read, and one for shared memory for everybody to write. Raises StartupError.
        """
        desired = [(self.pipe, _DIRECTORY_MODE), (self.logs, _DIRECTORY_MODE)]
        if shared_memory is not None:
            desired.append((shared_memory, _SHARED_MODE))
        for directory, mode in desired:
            what = f"the control daemon was not started: the directory {directory} cannot be made for MPS"
            remedy = "check what is at this path, or choose another: mps.pipe_directory"
            with os_errors_as(StartupError, what, otherwise=remedy):
                # One that is there keeps its mode: it may be the operator's.
                if not directory.is_dir():
                    directory.mkdir(parents=True)
                    directory.chmod(mode)  # whatever the umask
            _label(directory)
        if problem := self.obstacle():
            raise StartupError(f"{problem}. The control daemon was not started; choose another with mps.pipe_directory")

    def remove_stale(self) -> list[str]:
        """Removes the files of an ended daemon; returns their names. Only to be called where `live_daemon` found none.

        Raises StartupError where something cannot be removed.
        """
        removed = []
        for name in DAEMON_FILES:
            path = self.pipe / name
            what = f"no MPS control daemon was started: {path}, left by one that has ended, cannot be removed"
            with os_errors_as(StartupError, what, otherwise="remove it by hand"), suppress(FileNotFoundError):
                path.unlink()
                removed.append(name)
        return removed


def _connect(path: Path) -> int:
    """0, or the error number of connecting to the socket at `path`."""
    try:
        with (
            connectable_path(path) as name,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as visitor,
        ):
            visitor.settimeout(_CONNECT_TIMEOUT_S)  # only a full queue makes a local connect wait
            visitor.connect(name)
    except TimeoutError:
        return errno.ETIMEDOUT
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _is_locked(path: Path) -> bool:
    """Whether another process has a lock of either kind on the file."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Both kinds, because NVIDIA does not say which one its daemon uses.
        for lock in (fcntl.flock, fcntl.lockf):
            lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False
    finally:
        os.close(file)
    return False


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").rstrip("\n")
    except OSError:
        return ""


def _label(directory: Path) -> None:
    """Sets the label as `chcon` would; a host without SELinux has no such attribute."""
    current = b""
    with suppress(OSError):
        current = os.getxattr(directory, _SELINUX)
    if not current or current == SELINUX_LABEL:
        return
    try:
        os.setxattr(directory, _SELINUX, SELINUX_LABEL)
    except OSError as error:
        log.warning("mps_directory_not_labelled", directory=str(directory), error=error.strerror, then="left as it is")
