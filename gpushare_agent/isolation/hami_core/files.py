"""What isolation hami-core needs on the host: the library, the preload file, and one cache file per container.

    <directory>/libvgpu.so                                     the library, copied from where the setting names it
    <directory>/ld.so.preload                                  the library's path in the container; mounted read-only
    <directory>/containers/<pod uid>/<container>/<container>.cache    mounted read-write, for that container alone
    … of a claim also <container>.cache.<container ID>                 that of the container that runs; see `keep_started`
    <directory>/containers/removed/<16 hexadecimal digits>     what is to be removed

The first two are written whole under another name and renamed. A container's mount is of the file that had the name when it
started: running containers keep their library until they end, the kernel keeps the file for them, and one that starts
again gets the present one, for the kubelet keeps the path.

The tenant owns the cache file from the container's start on. The agent makes it anew before each start, for the library
would count processes of an earlier instance, whose PIDs recur, as using the GPU. region.py reads and edits it.
Containers run under any user, also of a user namespace, so the file is open to all (0666, as the library itself would make
it), and `containers`, of mode 0700, keeps other users away: the only access is the mount. The mount is of the file, not of
its directory, so a tenant cannot place other files there. No sticky bit anywhere: behind one the kernel
(fs.protected_regular) refuses the file to the second user of a container.

A tenant can make its file as large as the file system allows, and of so many pieces that the kernel frees it for half a
minute; the kubelet does not count it. So nothing that a tenant has written is removed where anybody waits: `prepare`,
`keep_started` and `remove_pod` rename it, `remove_aside` removes it, and `cut` shortens a file that is larger than a region.
The place is below `containers`, which may be a file system of its own.

To rename or link a file the kernel waits for whoever writes or shortens it (ext4: 37 s for a `cut`), and no other rename
between directories of that file system goes on meanwhile. `prepare` and `remove_pod` rename directories, which does not.

Every step is one of kit/directories.py, relative to a descriptor and following no link. State owned: none but the files.
Source of the layout: docs/reference/formats.md, section 7, and isolation/hami_core/edits.py, which names the same paths.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from gpushare_agent.isolation.directories import container_path, opened_container, opened_root, pods_in, step_failed
from gpushare_agent.isolation.hami_core.region import Region, cut, is_oversized, occupied_bytes, opened_region
from gpushare_agent.isolation.names import require_nameable
from gpushare_agent.kit.directories import (
    DIRECTORY,
    DIRECTORY_MODE,
    made_directory,
    names_in,
    opened,
    remove_tree,
    replace_file,
    status_of,
)
from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.errors import AgentError, Corrupt, NotFound, StartupError, Unavailable
from gpushare_agent.model.names import ENV_HAMI_CORE_CACHE, PodUid
from gpushare_agent.runtime.node_probes import require_writable

PRELOAD_NAME = "ld.so.preload"
LIBRARY_NAME = "libvgpu.so"
MAX_LIBRARY_BYTES = 64 * 1024 * 1024
"""It has one MiB; with debugging information several."""
CONTAINERS_NAME = "containers"
CONTAINERS_MODE = 0o700
ASIDE_NAME = "removed"
"""No pod UID: beside the directories of the pods."""
CACHE_MODE = 0o666

_CURE = (
    "Build the image with HAMi-core's source (docs/explanation/isolation.md), put a libvgpu.so at the path that"
    " --hami-core.library names, or choose another isolation"
)
_FRESH = ".new"
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


LibraryStamp = tuple[int, int, int]
"""Inode, size, and time of change in nanoseconds."""


class HamiCoreFiles:
    """`library` is where the library comes from, `directory` what containers get it from (the settings of these names);
    `path_in_container` is what the preload file names."""

    def __init__(self, library: Path, directory: Path, path_in_container: str) -> None:
        self.library = library
        self.directory = directory
        self._preload = f"{path_in_container}\n".encode()

    def check_library(self) -> LibraryStamp:
        """Reads only; differs for another file in its place. Raises StartupError where there is no library, one
        for another machine, or a place that programs cannot load it from."""
        try:
            status = self._library_status()
            from gpushare_agent.isolation.driver_volume.elf import read_elf  # a twentieth of the start, not yet needed

            found, own = read_elf(self.library), read_elf(Path("/proc/self/exe"))
        except (NotFound, Corrupt, Unavailable) as e:
            raise StartupError(f"isolation hami-core has no library: {e}. {_CURE}") from e
        if (found.elf_class, found.machine) != (own.elf_class, own.machine):
            raise StartupError(
                f"isolation hami-core: {self.library} is a {found.elf_class}-bit library for {found.machine}, and this"
                f" node's programs are {own.elf_class}-bit for {own.machine}. {_CURE}"
            )
        try:
            place = next(path for path in (self.directory, *self.directory.parents) if path.exists())
            is_noexec = bool(os.statvfs(place).f_flag & os.ST_NOEXEC)
        except OSError as e:
            raise StartupError(f"isolation hami-core: {self.directory} cannot be read: {e.strerror or e}") from e
        if is_noexec:
            raise StartupError(
                f"isolation hami-core: {place} is on a file system mounted noexec, from which no program can load the"
                " library. Mount it without noexec (its directory containers, which the tenants write, may have it), or set"
                " hami_core.directory to another place"
            )
        return status.st_ino, status.st_size, status.st_mtime_ns

    def look(self) -> None:
        """Whether `install` and `prepare` find all that they need. Writes nothing that stays. Raises AgentError with the
        cure."""
        self.check_library()
        self.library_content()
        require_writable(self.directory)

    def install(self) -> None:
        """Makes the directory, and library and preload file as they are now. Raises StartupError."""
        try:
            with self._step("preparing", self.directory):
                content = self.library_content()
                with self._open_containers(make=True, library=content):
                    pass
        except AgentError as e:
            raise StartupError(f"isolation hami-core cannot keep its files: {e}") from e

    def cache_file(self, key: ContainerKey) -> Path:
        """What is mounted into the container. Raises Rejected for a name that cannot be part of a path."""
        return container_path(self.directory / CONTAINERS_NAME, key) / f"{key.container}.cache"

    def prepare(self, key: ContainerKey) -> None:
        """An empty cache file in place of what an earlier instance left; preload file and library are put back if need be.

        Raises:
            Rejected: a name that cannot be part of a path.
            Unavailable: the file system refuses, or the library is gone from both places: the runtime would make a
                directory in its place.
        """
        path = self.cache_file(key)
        with self._step("making", path):
            library = None if self._is_installed() else self.library_content()
            with (
                self._open_containers(make=True, library=library) as containers,
                made_directory(containers, key.pod_uid) as pod,
            ):
                if status_of(pod, key.container) is not None:
                    _put_aside(containers, pod, key.container)
                with made_directory(pod, key.container) as directory:
                    _make_empty(directory, path.name)

    def keep_started(self, key: ContainerKey, container_id: str) -> None:
        """Of a claim's container that has started: it keeps its file, under a name with its ID, and the next start finds an
        empty one. No call of the kubelet comes before a start of it. Nothing where that was done, or nothing was prepared.
        It may wait for a tenant's write. Raises Rejected, Unavailable: also where a file is too large, until it is cut."""
        path = self.cache_file(key)
        kept, fresh = f"{path.name}.{container_id}", f"{path.name}{_FRESH}"
        with (
            suppress(NotFound),
            self._step("replacing", path),
            self._open_containers(make=False) as containers,
            opened_container(containers, key) as directory,
        ):
            own = status_of(directory, path.name)
            known = status_of(directory, kept)
            if own is None or (known is not None and known.st_ino != own.st_ino):
                return
            present = names_in(directory)
            if any(is_oversized(os.lstat(name, dir_fd=directory)) for name in present):
                raise Unavailable(f"{path} is kept once it is shortened")
            for name in present:
                if name != path.name:
                    _put_aside(containers, directory, name)
            _make_empty(directory, fresh)
            os.link(path.name, kept, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
            os.replace(fresh, path.name, src_dir_fd=directory, dst_dir_fd=directory)

    @contextmanager
    def opened_region(self, key: ContainerKey) -> Iterator[Region | None]:
        """The shared region in a container's cache file; None while none of its processes has called cuInit.

        Raises:
            Rejected: a name that cannot be part of a path.
            NotFound: the container was not prepared, or its files are removed.
            Corrupt: the tenant made something else of the file.
            Unavailable: the file system refuses.
        """
        path = self.cache_file(key)
        with ExitStack() as stack:
            with self._step("opening", path):
                containers = stack.enter_context(self._open_containers(make=False))
                directory = stack.enter_context(opened_container(containers, key))
                kept = [name for name in names_in(directory) if name not in (path.name, f"{path.name}{_FRESH}")]
            yield stack.enter_context(opened_region(kept[0] if kept else path.name, directory))

    def remove_pod(self, uid: PodUid) -> bool:
        """Puts all of a pod aside for `remove_aside`; whether there was anything. Raises Rejected for no pod UID,
        Unavailable where the file system refuses."""
        require_nameable(ContainerKey(uid, "x"))
        try:
            with (
                self._step("removing", self.directory / CONTAINERS_NAME / uid),
                self._open_containers(make=False) as containers,
            ):
                _put_aside(containers, containers, uid)
        except NotFound:
            return False
        return True

    def list_aside(self) -> tuple[str, ...]:
        """The names of what is to be removed. Raises Unavailable."""
        with suppress(NotFound), self._opened_aside("listing") as aside:
            return tuple(names_in(aside))
        return ()

    def remove_aside(self, name: str) -> None:
        """Removes one of these, a link and not what it leads to. May take half a minute. Raises Unavailable where the file
        system refuses: what is left is tried again."""
        with suppress(NotFound), self._opened_aside("removing") as aside:
            remove_tree(aside, name)

    def oversized(self, keys: Iterable[ContainerKey]) -> list[tuple[ContainerKey, int]]:
        """The containers with a file that is larger than a region, and how large in bytes, the largest first. A container
        whose files cannot be read is left out: its tenant may have done that, or it is gone. Raises Unavailable."""
        found = []
        with suppress(NotFound), self._step("listing", self.directory), self._open_containers(make=False) as containers:
            for key in keys:
                with suppress(OSError), opened_container(containers, key) as directory:
                    statuses = [os.lstat(name, dir_fd=directory) for name in names_in(directory)]
                    found += [(key, occupied_bytes(status)) for status in statuses if is_oversized(status)]
        return sorted(found, key=lambda one: one[1], reverse=True)

    def cut(self, key: ContainerKey) -> None:
        """Shortens the container's files that are larger than a region. May take half a minute. Raises NotFound, Corrupt,
        Unavailable."""
        with (
            self._step("shortening", self.cache_file(key)),
            self._open_containers(make=False) as containers,
            opened_container(containers, key) as directory,
        ):
            for name in names_in(directory):
                cut(name, directory)

    def list_pods(self) -> tuple[PodUid, ...]:
        """The pods that have an entry, sorted. Raises Unavailable."""
        try:
            with (
                self._step("listing", self.directory / CONTAINERS_NAME),
                self._open_containers(make=False) as containers,
            ):
                return pods_in(containers)
        except NotFound:
            return ()

    @contextmanager
    def _opened_aside(self, verb: str) -> Iterator[int]:
        with (
            self._step(verb, self.directory / CONTAINERS_NAME / ASIDE_NAME),
            self._open_containers(make=False) as containers,
            opened(ASIDE_NAME, containers, DIRECTORY) as aside,
        ):
            yield aside

    @contextmanager
    def _open_containers(self, *, make: bool, library: bytes | None = None) -> Iterator[int]:
        """The directory of all cache files; `make` creates it and the preload file beside it, and the library if given."""
        if make:
            self.directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        with opened_root(self.directory) as root:
            if make:
                if library is not None:
                    replace_file(root, LIBRARY_NAME, library, is_synced=True)
                replace_file(root, PRELOAD_NAME, self._preload)
                with made_directory(root, CONTAINERS_NAME, CONTAINERS_MODE):
                    pass
            with opened(CONTAINERS_NAME, root, DIRECTORY) as containers:
                yield containers

    def _is_installed(self) -> bool:
        try:
            status = (self.directory / LIBRARY_NAME).lstat()
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size > 0

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
        """The library, at most MAX_LIBRARY_BYTES. Raises Unavailable, also where it is another one than HAMi-core's."""
        self._library_status()
        try:
            with self.library.open("rb") as file:
                content = file.read(MAX_LIBRARY_BYTES + 1)
        except OSError as e:
            raise Unavailable(f"{self.library} cannot be used: {e.strerror or e}") from e
        if not 0 < len(content) <= MAX_LIBRARY_BYTES:
            raise Unavailable(f"{self.library} cannot be used: it has not between 1 and {MAX_LIBRARY_BYTES} bytes")
        if ENV_HAMI_CORE_CACHE.encode() not in content:
            raise Unavailable(f"{self.library} is not HAMi-core's: it would limit nobody. {_CURE}")
        return content

    @contextmanager
    def _step(self, verb: str, path: Path) -> Iterator[None]:
        """Errors renamed. Raises NotFound where nothing is there, Unavailable."""
        try:
            yield
        except FileNotFoundError as e:
            raise NotFound(f"{verb} {path} failed: {e.strerror}") from e
        except OSError as e:
            raise step_failed(verb, path, e, "hami_core.directory") from e


def _put_aside(containers: int, directory: int, name: str) -> None:
    with made_directory(containers, ASIDE_NAME, CONTAINERS_MODE) as aside:
        os.rename(name, secrets.token_hex(8), src_dir_fd=directory, dst_dir_fd=aside)


def _make_empty(directory: int, name: str) -> None:
    file = os.open(name, _NEW_FILE, CACHE_MODE, dir_fd=directory)
    try:
        os.fchmod(file, CACHE_MODE)  # whatever the umask says
    finally:
        os.close(file)
