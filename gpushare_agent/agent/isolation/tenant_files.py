"""The file that a container may write, `usage` in its directory: the one module that makes, shortens and removes such files.

A tenant can make its file so long, and of so many pieces, that the kernel takes half a minute to free it; the kubelet does
not count it. Meanwhile the file's lock is held, whether the agent or the tenant shortens it. Whoever renames, links,
shortens or removes the file waits for it (ext4: 37 s), and renames from one directory to another wait for such a rename. To
rename the directory around it within its parent waits for neither.

So where anyone waits, a directory with a tenant's file is renamed (`put_aside`) and a new one made. `cut` and `remove_aside`
wait for the file, in threads of their own. Every step is relative to a descriptor and follows no link. No state.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import signal
import stat
from contextlib import suppress

from gpushare_agent.agent.isolation.directories import pods_in
from gpushare_agent.core.formats.vdevice import USAGE_BYTES, USAGE_NAME
from gpushare_agent.core.kit.directories import DIRECTORY, names_in, opened, remove_tree, status_of
from gpushare_agent.core.model.errors import Corrupt

ASIDE_PREFIX = ".removed-"
"""Begins no name of Kubernetes."""
REMOVAL_TIMEOUT_S = 600.0
"""The time to remove or shorten one file of a tenant: 300,000 pieces of 4 KiB took 25 s on a busy disk."""
MAX_DISK_BYTES = 8 * 1024 * 1024
"""More than any file system sets aside for a file of the library."""
_TENANT_MODE = 0o666
"""Containers run under any user, also of a user namespace."""
BLOCK_BYTES = 512  # of st_blocks, on any file system
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: a FIFO in its place, or a lease
_HELD = (errno.EAGAIN, errno.EACCES, errno.ETXTBSY)


def make_usage(directory: int, content: bytes) -> None:
    """Open to all users, because the only access is the mount. Its blocks are there from the beginning: a program that maps
    a sparse one would end by a signal where the disk is full later. Raises OSError, and leaves nothing then."""
    file = os.open(USAGE_NAME, _NEW_FILE, _TENANT_MODE, dir_fd=directory)
    try:
        os.fchmod(file, _TENANT_MODE)  # whatever the umask says
        if os.write(file, content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        os.unlink(USAGE_NAME, dir_fd=directory)  # no tenant has had it yet
        raise
    finally:
        os.close(file)


def put_aside(parent: int, name: str) -> None:
    """Renames a directory, or whatever is there, within its parent, for `remove_aside`. Raises OSError."""
    # A random name: what two containers leave never meets, and no name that a tenant chose is used again.
    os.rename(name, f"{ASIDE_PREFIX}{secrets.token_hex(8)}", src_dir_fd=parent, dst_dir_fd=parent)


def put_usage_aside(pod: int, container: str) -> None:
    """Renames a container's directory where it has a tenant's file. Raises OSError."""
    with suppress(FileNotFoundError, NotADirectoryError), opened(container, pod, DIRECTORY) as directory:
        if status_of(directory, USAGE_NAME) is not None:
            put_aside(pod, container)


def list_aside(root: int) -> tuple[str, ...]:
    """What was put aside, as paths below `root`. Raises OSError."""
    found = [name for name in names_in(root) if name.startswith(ASIDE_PREFIX)]
    for uid in pods_in(root):
        # A pod that is removed meanwhile, or a link in its place.
        with suppress(OSError), opened(uid, root, DIRECTORY) as pod:
            found += [f"{uid}/{name}" for name in names_in(pod) if name.startswith(ASIDE_PREFIX)]
    return tuple(found)


def remove_aside(root: int, path: str) -> None:
    """Removes one of these; of a link not its target. The file of a pod that is still there stays while a process has it
    open, and is shortened at each call. May take half a minute. Raises OSError."""
    pod, _, name = path.rpartition("/")
    with suppress(FileNotFoundError), opened(pod or ".", root, DIRECTORY) as parent:
        if not pod or not _is_held(parent, name):
            remove_tree(parent, name)


def _is_held(parent: int, name: str) -> bool:
    """A container can pass its open file to another one of the pod by a socket. Without a name nobody could shorten it."""
    try:
        with opened(name, parent, DIRECTORY) as directory:
            cut(directory)
            with opened(USAGE_NAME, directory, READ) as file:
                # The kernel's signal to the holder, once somebody opens the file: the usual one ends the program.
                fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
                # The kernel gives such a lease only to the one process that has the file open.
                fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except Corrupt:
        return False
    except OSError as e:
        return e.errno in _HELD
    return False


def is_oversized(status: os.stat_result) -> bool:
    """A regular file that is longer than the library makes it, or has more on the disk: a file that the kernel is still
    shortening, piece by piece, has the new length already, and writers wait."""
    is_large = status.st_size > USAGE_BYTES or status.st_blocks * BLOCK_BYTES > MAX_DISK_BYTES
    return stat.S_ISREG(status.st_mode) and is_large


def cut(directory: int) -> None:
    """Shortens an oversized `usage`; processes that have it mapped keep it. May take half a minute, and wait for a lease,
    45 s as kernels are set. Raises Corrupt if it is no regular file, OSError."""
    with opened(USAGE_NAME, directory, _PLACE) as place:
        if not stat.S_ISREG(os.fstat(place).st_mode):  # before it is opened: a FIFO would wait for its other end
            raise Corrupt(f"{USAGE_NAME} is no regular file")
        # Without O_NONBLOCK, which fails if a tenant has a lease on the file (root in the container owns it). A waiting
        # open counts as a writer, so the lease cannot be taken again once it is broken.
        with opened(f"/proc/self/fd/{place}", None, os.O_RDWR | os.O_CLOEXEC) as file:
            status = os.fstat(file)
            if is_oversized(status):
                # Also to its present length: blocks that fallocate took beyond it are freed.
                os.ftruncate(file, min(status.st_size, USAGE_BYTES))
