"""What an isolation with a library preloaded into the container needs on the host: the library, the preload file, and a
directory for each container with files that the tenant writes.

    <directory>/<library>                                      copied from where the setting names it
    <directory>/ld.so.preload                                  the library's path in the container; mounted read-only
    <directory>/containers/<pod uid>/<container>/…             mounted into that container alone
    <directory>/containers/removed/<16 hexadecimal digits>     what is to be removed

The first two are written whole under another name and renamed. A container's mount is of the file that had the name when it
started: running containers keep their library until they end, the kernel keeps the file for them, and one that starts
again gets the present one, for the kubelet keeps the path.

A tenant can make its file as large as the file system allows (directories.py): `cut` shortens one that is larger than the
library makes it.
The place is below `containers`, which may be a file system of its own.

To rename or link a file the kernel waits for whoever writes or shortens it (ext4: 37 s for a `cut`), and no other rename
between directories of that file system goes on meanwhile. `prepare` and `remove_pod` rename directories, which does not.

Every step is one of kit/directories.py, relative to a descriptor and following no link. State owned: none but the files.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec import Struct

from gpushare_agent.isolation.directories import (
    CLOSED_MODE,
    container_path,
    list_aside,
    opened_container,
    opened_root,
    pods_in,
    put_aside,
    remove_aside,
    step_failed,
)
from gpushare_agent.isolation.names import require_nameable
from gpushare_agent.kit.directories import (
    DIRECTORY,
    DIRECTORY_MODE,
    made_directory,
    names_in,
    opened,
    replace_file,
    status_of,
)
from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.errors import AgentError, Corrupt, NotFound, StartupError, Unavailable
from gpushare_agent.model.names import PodUid
from gpushare_agent.runtime.node_probes import require_writable

PRELOAD_NAME = "ld.so.preload"
MAX_LIBRARY_BYTES = 64 * 1024 * 1024
"""The libraries have one MiB; with debugging information several."""
CONTAINERS_NAME = "containers"
TENANT_MODE = 0o666
"""Containers run under any user, also of a user namespace."""
TENANT_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: a FIFO in its place
_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_DISK_BYTES = 8 * 1024 * 1024
"""Above what any file system sets aside for a file of the library's."""
_BLOCK_BYTES = 512  # of st_blocks, on any file system
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


LibraryStamp = tuple[int, int, int]
"""Inode, size, and time of change in nanoseconds."""
_NO_LIBRARY: LibraryStamp = (0, 0, 0)


class PreloadedLibrary(Struct, frozen=True, kw_only=True):
    """`mark` is in every file of the library, and in no other; `file_bytes` what it makes of a tenant's file at most."""

    isolation: str
    owner: str
    name: str
    path_in_container: str
    mark: bytes
    file_bytes: int
    setting: str
    cure: str


class TenantFiles:
    """`library` is where the library comes from, `directory` what containers get it from (the isolation's settings);
    `containers` has the containers' directories."""

    kind: PreloadedLibrary

    def __init__(self, library: Path, directory: Path, *, is_library_optional: bool = False) -> None:
        """`is_library_optional`: where there is none an empty file is mounted in its place, and nothing preloaded."""
        self.library = library
        self.directory = directory
        self.containers = directory / CONTAINERS_NAME
        self._is_library_optional = is_library_optional
        self._checked: LibraryStamp | None = None

    @property
    def without_library(self) -> str:
        """What containers get where there is no library and none is needed, for people; else empty."""
        if not self._is_library_optional or self.library.exists():
            return ""
        # The first line that a sandbox prints: it must not read like a fault.
        what = f"isolation {self.kind.isolation}: containers get limits and mounts, and no library"
        return f"{what}: simulated GPUs need none, and {self.library} is not there"

    def _fill(self, key: ContainerKey, directory: int) -> None:
        """The files of a container that is about to start, in its empty directory. Raises OSError, AgentError."""
        raise NotImplementedError

    def _put_previous_aside(self, containers: int, pod: int, name: str) -> None:
        """What the tenant of a previous instance has written in the directory `name`, which may not be there."""
        if status_of(pod, name) is not None:
            put_aside(containers, pod, name)

    def keep_started(self, key: ContainerKey, container_id: str) -> None:
        """Gives a claim's container that has started its files to keep, where the next start is to find others."""

    def container_directory(self, key: ContainerKey) -> Path:
        """Raises Rejected for a name that cannot be part of a path."""
        return container_path(self.containers, key)

    def check_library(self) -> LibraryStamp:
        """Reads only; differs for another file in its place. Raises StartupError where there is no library, one
        for another machine, or a place that programs cannot load it from."""
        if self.without_library:
            return _NO_LIBRARY
        try:
            status = self._library_status()
            stamp = status.st_ino, status.st_size, status.st_mtime_ns
            if stamp != self._checked:  # a check each second or two, and the ELF reader takes 3 ms
                self._check_machine()
                self._checked = stamp
        except (NotFound, Corrupt, Unavailable) as e:
            raise StartupError(f"isolation {self.kind.isolation} has no library: {e}. {self.kind.cure}") from e
        try:
            # The directory may not be there yet: its file system is that of the nearest one above.
            place = next(path for path in (self.directory, *self.directory.parents) if path.exists())
            is_noexec = bool(os.statvfs(place).f_flag & os.ST_NOEXEC)
        except OSError as e:
            raise StartupError(
                f"isolation {self.kind.isolation}: {self.directory} cannot be read: {e.strerror or e}"
            ) from e
        if is_noexec:
            raise StartupError(
                f"isolation {self.kind.isolation}: {place} is on a file system mounted noexec, from which no"
                " program can load the library. Mount it without noexec (its directory containers, which the tenants"
                " write, may have it), or set"
                f" {self.kind.setting} to another place"
            )
        return stamp

    def _check_machine(self) -> None:
        """Raises NotFound, Corrupt, StartupError."""
        from gpushare_agent.isolation.driver_volume.elf import read_elf  # a twentieth of the start, not yet needed

        found, own = read_elf(self.library), read_elf(Path("/proc/self/exe"))
        if (found.elf_class, found.machine) != (own.elf_class, own.machine):
            raise StartupError(
                f"isolation {self.kind.isolation}: {self.library} is a {found.elf_class}-bit library for {found.machine},"
                f" and this node's programs are {own.elf_class}-bit for {own.machine}. {self.kind.cure}"
            )

    def look(self) -> None:
        """Whether `install` and `prepare` find all that they need. Writes nothing that stays. Raises AgentError with the
        remedy."""
        self.check_library()
        self.library_content()
        try:
            require_writable(self.directory)
        except Unavailable as e:
            raise Unavailable(f"{e} (setting {self.kind.setting})") from e

    def install(self) -> None:
        """Makes the directory, and library and preload file as they are now. Raises StartupError."""
        try:
            with self._step("preparing", self.directory):
                content = self.library_content()
                with self._open_containers(make=True, library=content):
                    pass
        except AgentError as e:
            where = f" (setting {self.kind.setting})" if isinstance(e, NotFound) else ""
            raise StartupError(f"isolation {self.kind.isolation} cannot keep its files: {e}{where}") from e

    def prepare(self, key: ContainerKey) -> None:
        """New files in place of what a previous instance left; preload file and library are put back if need be.

        Raises:
            Rejected: a name that cannot be part of a path.
            Unavailable: the file system refuses, or the library is gone from both places: the runtime would make a
                directory in its place.
        """
        path = self.container_directory(key)
        with self._step("making", path):
            # Somebody may have removed it: the runtime would make a directory in the place of a missing mount source.
            library = None if self._is_installed() else self.library_content()
            with (
                self._open_containers(make=True, library=library) as containers,
                made_directory(containers, key.pod_uid, CLOSED_MODE) as pod,
            ):
                self._put_previous_aside(containers, pod, key.container)
                with made_directory(pod, key.container) as directory:
                    self._fill(key, directory)

    def remove_pod(self, uid: PodUid) -> bool:
        """Puts all of a pod aside for `remove_aside`; whether there was anything. Raises Rejected for no pod UID,
        Unavailable where the file system refuses."""
        require_nameable(ContainerKey(uid, "x"))
        try:
            with (
                self._step("removing", self.containers / uid),
                self._open_containers(make=False) as containers,
            ):
                put_aside(containers, containers, uid)
        except NotFound:
            return False
        return True

    def list_aside(self) -> tuple[str, ...]:
        """The names of what is to be removed. Raises Unavailable."""
        with (
            suppress(NotFound),
            self._step("listing", self.containers),
            self._open_containers(make=False) as containers,
        ):
            return list_aside(containers)
        return ()

    def remove_aside(self, name: str) -> None:
        """May take half a minute. Raises Unavailable where the file system refuses: what is left is tried again."""
        with (
            suppress(NotFound),
            self._step("removing", self.containers),
            self._open_containers(make=False) as containers,
        ):
            remove_aside(containers, name)

    def oversized(self, keys: Iterable[ContainerKey]) -> list[tuple[ContainerKey, int]]:
        """The containers with a file that is larger than the library makes it, and how large in bytes, the largest
        first. A container whose files cannot be read is left out: its tenant may have done that, or it is gone. Raises
        Unavailable."""
        found = []
        with suppress(NotFound), self._step("listing", self.directory), self._open_containers(make=False) as containers:
            for key in keys:
                with suppress(OSError):
                    found += [
                        (key, occupied_bytes(status))
                        for status in self._statuses(containers, key)
                        if is_oversized(status, self.kind.file_bytes)
                    ]
        return sorted(found, key=lambda one: one[1], reverse=True)

    def _statuses(self, containers: int, key: ContainerKey) -> list[os.stat_result]:
        """Of what a tenant may have made long, in the directory of all containers. Raises OSError."""
        with opened_container(containers, key) as directory:
            return [os.lstat(name, dir_fd=directory) for name in names_in(directory)]

    def cut(self, key: ContainerKey) -> None:
        """Shortens the container's files that are larger than the library makes them. May take half a minute. Raises
        NotFound, Corrupt, Unavailable."""
        with (
            self._step("shortening", self.container_directory(key)),
            self._open_containers(make=False) as containers,
            opened_container(containers, key) as directory,
        ):
            for name in names_in(directory):
                cut(name, directory, self.kind.file_bytes)

    def list_pods(self) -> tuple[PodUid, ...]:
        """The pods that have an entry, sorted. Raises Unavailable."""
        try:
            with (
                self._step("listing", self.containers),
                self._open_containers(make=False) as containers,
            ):
                return pods_in(containers)
        except NotFound:
            return ()

    @contextmanager
    def _open_containers(self, *, make: bool, library: bytes | None = None) -> Iterator[int]:
        """The directory of all containers; `make` creates it and the preload file, and the library if given."""
        if make:
            self.directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        with opened_root(self.directory) as root:
            if make:
                if library is not None:
                    replace_file(root, self.kind.name, library, is_synced=True)
                # The loader prints a line in every program for a file that it cannot preload, as an empty one.
                installed = status_of(root, self.kind.name)
                is_empty = installed is not None and installed.st_size == 0
                replace_file(root, PRELOAD_NAME, b"" if is_empty else f"{self.kind.path_in_container}\n".encode())
            with self._opened_containers(root, make=make) as containers:
                yield containers

    @contextmanager
    def _opened_containers(self, root: int, *, make: bool) -> Iterator[int]:
        """`root` is the directory that containers get the library from."""
        if make:
            with made_directory(root, CONTAINERS_NAME, CLOSED_MODE):
                pass
        with opened(CONTAINERS_NAME, root, DIRECTORY) as containers:
            yield containers

    def _is_installed(self) -> bool:
        try:
            status = (self.directory / self.kind.name).lstat()
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and (status.st_size > 0 or bool(self.without_library))

    def _library_status(self) -> os.stat_result:
        """Raises Unavailable."""
        try:
            status = self.library.stat()
        except OSError as e:
            raise Unavailable(f"{self.library} cannot be used: {e.strerror or e}") from e
        if not stat.S_ISREG(status.st_mode):
            raise Unavailable(f"{self.library} cannot be used: it is no regular file")
        return status

    def library_content(self) -> bytes:
        """The library, at most MAX_LIBRARY_BYTES. Raises Unavailable, also where it is another one than the isolation's."""
        if self.without_library:
            return b""
        self._library_status()
        try:
            with self.library.open("rb") as file:
                content = file.read(MAX_LIBRARY_BYTES + 1)
        except OSError as e:
            raise Unavailable(f"{self.library} cannot be used: {e.strerror or e}") from e
        # An empty file is a copy that was cut off; the loader would print a line in every program.
        if not 0 < len(content) <= MAX_LIBRARY_BYTES:
            raise Unavailable(f"{self.library} cannot be used: it has not between 1 and {MAX_LIBRARY_BYTES} bytes")
        # Any library loads: one that is not the isolation's would limit nobody, and nobody would see it.
        if self.kind.mark not in content:
            raise Unavailable(f"{self.library} is not {self.kind.owner}: it would limit nobody. {self.kind.cure}")
        return content

    @contextmanager
    def _step(self, verb: str, path: Path) -> Iterator[None]:
        """Errors renamed. Raises NotFound where nothing is there, Unavailable."""
        try:
            yield
        except FileNotFoundError as e:
            raise NotFound(f"{verb} {path} failed: {e.strerror}") from e
        except OSError as e:
            raise step_failed(verb, path, e, self.kind.setting) from e


def make_tenant_file(directory: int, name: str, content: bytes = b"") -> None:
    """Open to all users, for the only access is the mount. Its blocks are there from the beginning."""
    file = os.open(name, _NEW_FILE, TENANT_MODE, dir_fd=directory)
    try:
        os.fchmod(file, TENANT_MODE)  # whatever the umask says
        # Written now and not left sparse: a program that maps it would end by a signal where the disk is full later.
        if os.write(file, content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(file)


def is_oversized(status: os.stat_result, file_bytes: int) -> bool:
    """A regular file that is longer than that, or has more on the disk: while the kernel shortens a file in many pieces,
    it has the new length already, and whoever writes there waits."""
    return stat.S_ISREG(status.st_mode) and (
        status.st_size > file_bytes or status.st_blocks * _BLOCK_BYTES > MAX_DISK_BYTES
    )


def occupied_bytes(status: os.stat_result) -> int:
    """Its length, or what it has on the disk where that is more."""
    return max(status.st_size, status.st_blocks * _BLOCK_BYTES)


def cut(name: str, directory: int, file_bytes: int) -> None:
    """Shortens an oversized file to that size; processes that have it mapped keep it. May wait for a lease, 45 s as kernels
    are set. Raises NotFound, Corrupt for what is no regular file, Unavailable."""
    with renamed(name), opened(name, directory, _PLACE) as place:
        if not stat.S_ISREG(os.fstat(place).st_mode):  # before it is opened: a FIFO would wait for its other end
            raise Corrupt(f"{name} is no regular file")
        # Without O_NONBLOCK, which fails where a tenant has a lease on the file (root in the container owns it). Whoever
        # waits here counts as a writer, so the lease cannot be taken again once it was broken.
        with opened(f"/proc/self/fd/{place}", None, os.O_RDWR | os.O_CLOEXEC) as file:
            status = os.fstat(file)
            if is_oversized(status, file_bytes):
                # To its own length too: blocks beyond it, which fallocate takes, are freed.
                os.ftruncate(file, min(status.st_size, file_bytes))


@contextmanager
def renamed(name: str) -> Iterator[None]:
    """Errors at a file that a tenant may have changed: NotFound, Corrupt, Unavailable."""
    try:
        yield
    except FileNotFoundError as e:
        raise NotFound(f"{name} is not there") from e
    except OSError as e:
        # A link (O_NOFOLLOW), a directory, a socket or a FIFO without its other end: made by the tenant, so not tried again
        # as a fault of the disk.
        if e.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise Corrupt(f"{name} is no regular file: {e.strerror}") from e
        raise Unavailable(f"{name} cannot be used: {e.strerror or e}; it is tried again") from e
