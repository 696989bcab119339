"""What a container finds at /etc/vcuda: `<root>/<pod uid>/<container>/` with vcuda.sock, vcuda.config and pids.config; under
isolation gpushare also its gpushare.config and `usage` (isolation/gpushare/files.py), which go with the directory.

Every step is one of kit/directories.py, relative to a descriptor and following no symbolic link: nothing is written or
removed outside the root, whatever a tenant placed below it. An entry of the wrong kind is replaced, with a warning.
Only names that core/formats/vdevice.py accepts reach a path. The files are written under another name and
renamed: a reader sees the old content or the new, never a part. No fsync: after a reboot the PIDs are void, and both
files are compared with their content before the container starts again, so a torn file is rewritten, and the
disk is written less.

The calls block for some system calls each and may come from several threads; a lock keeps them apart. State owned: none
but the files. Source of the layout: docs/reference/formats.md, section 5.
"""

from __future__ import annotations

import errno
import socket
import stat
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import structlog

from gpushare_agent.agent.isolation.directories import (
    container_path,
    listed,
    made_container,
    opened_container,
    opened_root,
    pods_in,
    step,
)
from gpushare_agent.agent.isolation.tenant_files import ASIDE_PREFIX, list_aside, put_aside, remove_aside
from gpushare_agent.core.formats.vdevice import (
    CONFIG_BYTES,
    CONFIG_NAME,
    GPUSHARE_CONFIG_NAME,
    MAX_PIDS,
    PIDS_NAME,
    SOCKET_NAME,
    USAGE_NAME,
    decode_pids,
    encode_pids,
)
from gpushare_agent.core.kit.directories import (
    DIRECTORY,
    DIRECTORY_MODE,
    NEW_PREFIX,
    clear_path,
    made_directory,
    names_in,
    opened,
    read_content,
    remove_tree,
    replace_file,
    status_of,
)
from gpushare_agent.core.kit.sockets import FileIdentity, bind_unix_socket, file_identity, remove_socket
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.directory_names import is_container_name, require_nameable
from gpushare_agent.core.model.errors import NotFound, Rejected
from gpushare_agent.core.model.names import PodUid, is_container_id

log = structlog.get_logger(__name__)

SOCKET_MODE = 0o666
"""Every user in the container may register: the mount, not the mode, decides who reaches the socket."""

BoundSocket = tuple[socket.socket, FileIdentity]
"""A socket that does not listen yet, and its file's identity."""

_LARGEST_BYTES = max(CONFIG_BYTES, 4 * MAX_PIDS)


class VDeviceFiles:
    """The tree below `root` (the setting virtual_manager.path).

    Methods raise Rejected for a name that cannot be part of a path, NotFound where the container's directory is not
    prepared, and Unavailable where the file system refuses: what was there stays, and it can be tried again.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._root_text = str(root)
        self._lock = threading.Lock()

    def path(self, key: ContainerKey) -> Path:
        """What is mounted at /etc/vcuda."""
        return container_path(self.root, key)

    def _text_path(self, key: ContainerKey) -> str:
        """The same as text, for what is done for every container every second."""
        require_nameable(key)
        return f"{self._root_text}/{key.pod_uid}/{key.container}"

    def make_root(self) -> None:
        """The tree itself."""
        with self._step("preparing", self.root):
            self.root.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)

    def prepare(self, key: ContainerKey, *, pids: Collection[int] | None = None, config: bytes | None = None) -> None:
        """Makes the container's directory, clears what a killed agent left half-written in it, and writes as `write`."""
        # One opening for all: this thread releases the interpreter's lock at each system call, and in a burst of pods waits
        # for the event loop to get it back.
        with self._step("preparing", self.path(key)):
            self.root.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            with opened_root(self.root) as root, made_container(root, key) as directory:
                # A killed agent left some (found by 100 kills under 50 registering containers).
                names = names_in(directory)
                _clear_half_written(directory, names)
                _put(key, directory, filter(is_container_id, names), pids, config, is_new=True)

    def write(self, key: ContainerKey, *, pids: Collection[int] | None = None, config: bytes | None = None) -> None:
        """Writes pids.config and vcuda.config where they do not hold this; None leaves what is there. Of more than 1,024
        PIDs the lowest are written, and the log warns."""
        with self._step("writing", self._text_path(key)), self._open(key) as directory:
            _put(key, directory, _copies(directory), pids, config)

    def read_pids(self, key: ContainerKey) -> tuple[int, ...] | None:
        """What pids.config lists, None where there is none that can be read as one."""
        content = self._read(key, PIDS_NAME)
        return decode_pids(content) if content is not None and len(content) in range(0, 4 * MAX_PIDS + 1, 4) else None

    def read_config(self, key: ContainerKey) -> bytes | None:
        """What vcuda.config holds, None where there is none of the right size."""
        content = self._read(key, CONFIG_NAME)
        return content if content is not None and len(content) == CONFIG_BYTES else None

    def stamps(self, key: ContainerKey) -> tuple[FileIdentity | None, FileIdentity | None]:
        """The identities of vcuda.config and pids.config: unchanged if no other process has replaced them. Two stats."""
        directory = self._text_path(key)
        return file_identity(f"{directory}/{CONFIG_NAME}"), file_identity(f"{directory}/{PIDS_NAME}")

    def copy_for_id(self, key: ContainerKey, container_id: str) -> None:
        """Makes `<container id>/` with the same two files, which later writes update; a previous instance's is removed."""
        if not is_container_id(container_id):
            raise Rejected(
                f"{container_id[:80]!r} is no container ID (64 hexadecimal digits): no file is named after it"
            )
        with self._step("copying", self.path(key) / container_id), self._open(key) as directory:
            contents = [(name, read_content(directory, name, _LARGEST_BYTES)) for name in (PIDS_NAME, CONFIG_NAME)]
            for old in _copies(directory):
                if old != container_id:
                    remove_tree(directory, old)
            with made_directory(directory, container_id) as copy:
                for name, content in contents:  # the config last: where it is, the library expects both
                    replace_file(copy, name, content)

    def remove_pod(self, uid: PodUid) -> bool:
        """Puts all of a pod aside, for `remove_aside`; whether there was anything. A directory with entries that the agent
        never makes is not the agent's and stays as it is: Rejected."""
        require_nameable(ContainerKey(uid, "x"))
        with suppress(NotFound), self._step("removing", self.root / uid), opened_root(self.root) as root:
            # The root is a setting: a wrong one must not cost directories of others that have names like pods'.
            if foreign := _foreign_entry(root, uid):
                raise Rejected(
                    f"{self.root / foreign} is nothing that the agent makes, so {uid} is not removed: is the setting"
                    " virtual_manager.path right?"
                )
            put_aside(root, uid)
            return True
        return False

    def list_aside(self) -> tuple[str, ...]:
        """What `remove_aside` is to remove."""
        # Without the lock: to remove may take half a minute, and starts wait for the lock.
        return listed(self.root, list_aside)

    def remove_aside(self, name: str) -> None:
        """Removes one of these while other calls go on: it may take half a minute."""
        with step("removing", self.root), opened_root(self.root) as root:
            remove_aside(root, name)

    def pod_names(self) -> tuple[PodUid, ...]:
        """The pods that have an entry."""
        with self._lock:
            return listed(self.root, pods_in)

    def bind_socket(self, key: ContainerKey) -> BoundSocket:
        """Binds vcuda.sock, open to all, in place of whatever lies there.

        It is bound through the directory's descriptor: its address is /proc/self/fd/… in `ss`, short enough for any path.
        """
        with self._step("binding", self.path(key) / SOCKET_NAME), self._open(key) as directory:
            status = status_of(directory, SOCKET_NAME)
            # A socket of a killed agent is replaced by the bind itself.
            if status is not None and not stat.S_ISSOCK(status.st_mode):
                clear_path(directory, SOCKET_NAME)
            path = _socket_path(directory)
            sock = bind_unix_socket(path, mode=SOCKET_MODE)
            # By identity: whoever replaces the file later makes a socket that leads nowhere, which each poll looks for.
            identity = file_identity(path)
            if identity is None:
                sock.close()
                raise OSError(errno.ESTALE, "the socket vanished at once")
            return sock, identity

    def has_socket(self, key: ContainerKey, identity: FileIdentity) -> bool:
        """Whether vcuda.sock still is this one, and leads to its server. One stat: called every second."""
        return file_identity(f"{self._text_path(key)}/{SOCKET_NAME}") == identity

    def remove_socket(self, key: ContainerKey, identity: FileIdentity) -> None:
        """Removes vcuda.sock if it still is this one."""
        with suppress(NotFound), self._step("removing", self.path(key) / SOCKET_NAME), self._open(key) as directory:
            remove_socket(_socket_path(directory), identity)

    def _read(self, key: ContainerKey, name: str) -> bytes | None:
        # Not prepared yet, or something else in the directory's place.
        with suppress(NotFound), self._step("reading", self.path(key) / name), self._open(key) as directory:
            status = status_of(directory, name)
            if status is not None and stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST_BYTES:
                return read_content(directory, name, _LARGEST_BYTES)
        return None

    @contextmanager
    def _open(self, key: ContainerKey) -> Iterator[int]:
        """The container's directory, which must be there."""
        try:
            with opened_root(self.root) as root, opened_container(root, key) as directory:
                yield directory
        except (FileNotFoundError, NotADirectoryError) as e:
            raise NotFound(
                f"{e.filename or key.container!r} is missing below {self.root} or of the wrong kind ({e.strerror}): "
                f"the vDevice directory of container {key.container} of pod {key.pod_uid} must be prepared (again)"
            ) from e

    @contextmanager
    def _step(self, verb: str, path: Path | str) -> Iterator[None]:
        """One call at a time, its errors renamed."""
        with self._lock, step(verb, path):
            yield


def _socket_path(directory: int) -> Path:
    return Path(f"/proc/self/fd/{directory}/{SOCKET_NAME}")


def _clear_half_written(directory: int, names: Iterable[str]) -> None:
    for entry in names:
        if entry.startswith(NEW_PREFIX):
            remove_tree(directory, entry)


def _put(
    key: ContainerKey,
    directory: int,
    copies: Iterable[str],
    pids: Collection[int] | None,
    config: bytes | None,
    *,
    is_new: bool = False,
) -> None:
    """Into the directory and its copies."""
    encoded, dropped = encode_pids(pids or ())
    with ExitStack() as stack:
        opened_copies = [stack.enter_context(made_directory(directory, name)) for name in copies]
        for copy in opened_copies if is_new else ():
            _clear_half_written(copy, names_in(copy))
        places = (directory, *opened_copies)
        has_changed = pids is not None and True in [replace_file(place, PIDS_NAME, encoded) for place in places]
        if config is not None:  # last: where it is, the library expects both
            for place in places:
                replace_file(place, CONFIG_NAME, config)
    if dropped and has_changed:
        log.warning("vdevice_pids_dropped", pod_uid=key.pod_uid, container=key.container, dropped=dropped)


def _copies(directory: int) -> list[str]:
    return sorted(filter(is_container_id, names_in(directory)))


def _foreign_entry(root: int, pod: str) -> str | None:
    """The first entry of a pod's directory that the agent never makes, as a path below the root."""
    own = {SOCKET_NAME, CONFIG_NAME, PIDS_NAME, GPUSHARE_CONFIG_NAME, USAGE_NAME}
    try:
        with opened(pod, root, DIRECTORY) as directory:
            for container in (name for name in names_in(directory) if not name.startswith(ASIDE_PREFIX)):
                status = status_of(directory, container)
                if status is not None and stat.S_ISREG(status.st_mode):
                    return f"{pod}/{container} (a file)"
                if not is_container_name(container):
                    return f"{pod}/{container}"
                with suppress(OSError), opened(container, directory, DIRECTORY) as inner:
                    for entry in names_in(inner):
                        if not (entry in own or entry.startswith(NEW_PREFIX) or is_container_id(entry)):
                            return f"{pod}/{container}/{entry}"
    except OSError as e:
        if e.errno not in (errno.ENOTDIR, errno.ELOOP):  # the pod's own entry is no directory, or a link
            raise
    return None
