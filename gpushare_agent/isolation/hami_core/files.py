"""What isolation hami-core needs on the host: the library, the preload file, and one cache file per container.

    <directory>/ld.so.preload                                  the library's path in the container; mounted read-only
    <directory>/containers/<pod uid>/<container>/<container>.cache    mounted read-write, for that container alone

The tenant owns the cache file from the container's start on. The agent makes it anew before each start, for the library
would count processes of an earlier instance, whose PIDs recur, as using the GPU. region.py reads and edits it.
Containers run under any user, also of a user namespace, so the file is open to all (0666, as the library itself would make
it), and `containers`, of mode 0700, keeps other users away: the only access is the mount. The mount is of the file, not of
its directory, so a tenant cannot place other files there. No sticky bit anywhere: behind one the kernel
(fs.protected_regular) refuses the file to the second user of a container.

A tenant can make its file as large as the file system allows, and the kubelet does not count it: docs/isolation.md shows
how to bound that.

Every step is one of kit/directories.py, relative to a descriptor and following no link. State owned: none but the files.
Source of the layout: docs/formats.md, section 7, and isolation/decisions/hami_core.py, which names the same paths.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from gpushare_agent.isolation.decisions.vdevice_format import is_pod_uid, require_nameable
from gpushare_agent.isolation.driver_volume.elf import read_elf
from gpushare_agent.isolation.hami_core.region import Region, opened_region
from gpushare_agent.kit.directories import (
    DIRECTORY,
    DIRECTORY_MODE,
    made_directory,
    names_in,
    opened,
    remove_tree,
    replace_file,
)
from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.errors import AgentError, Corrupt, NotFound, StartupError, Unavailable
from gpushare_agent.model.names import PodUid

PRELOAD_NAME = "ld.so.preload"
CONTAINERS_NAME = "containers"
CONTAINERS_MODE = 0o700
CACHE_MODE = 0o666

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class HamiCoreFiles:
    """The settings hami_core.library and hami_core.directory; `path_in_container` is what the preload file names."""

    def __init__(self, library: Path, directory: Path, path_in_container: str) -> None:
        self.library = library
        self.directory = directory
        self._preload = f"{path_in_container}\n".encode()

    def check_library(self) -> None:
        """Reads only. Raises StartupError where the file is no library, or one for another machine."""
        remedy = (
            "Put HAMi-core's libvgpu.so there (in the agent's pod: mount it under the same path), name it by"
            " --hami-core.library, or choose another isolation"
        )
        try:
            self._require_library()
            found, own = read_elf(self.library), read_elf(Path("/proc/self/exe"))
        except (NotFound, Corrupt, Unavailable) as e:
            raise StartupError(f"isolation hami-core has no library: {e}. {remedy}") from e
        if (found.elf_class, found.machine) != (own.elf_class, own.machine):
            raise StartupError(
                f"isolation hami-core: {self.library} is a {found.elf_class}-bit library for {found.machine}, and this"
                f" node's programs are {own.elf_class}-bit for {own.machine}. {remedy}"
            )

    def install(self) -> None:
        """Makes the directory and the preload file. Raises StartupError."""
        try:
            with self._step("preparing", self.directory), self._open_containers(make=True):
                pass
        except AgentError as e:
            raise StartupError(f"isolation hami-core cannot keep its files: {e}") from e

    def cache_file(self, key: ContainerKey) -> Path:
        """What is mounted into the container. Raises Rejected for a name that cannot be part of a path."""
        require_nameable(key)
        return self.directory / CONTAINERS_NAME / key.pod_uid / key.container / f"{key.container}.cache"

    def prepare(self, key: ContainerKey) -> None:
        """An empty cache file in place of what an earlier instance left; preload file and library are checked.

        Raises:
            Rejected: a name that cannot be part of a path.
            Unavailable: the file system refuses, or the library is missing: the runtime would make a directory
                in its place.
        """
        path = self.cache_file(key)
        with self._step("making", path):
            self._require_library()
            with (
                self._open_containers(make=True) as containers,
                made_directory(containers, key.pod_uid) as pod,
                made_directory(pod, key.container) as directory,
            ):
                for name in names_in(directory):
                    remove_tree(directory, name)
                file = os.open(path.name, _NEW_FILE, CACHE_MODE, dir_fd=directory)
                try:
                    os.fchmod(file, CACHE_MODE)  # whatever the umask says
                finally:
                    os.close(file)

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
                pod = stack.enter_context(opened(key.pod_uid, containers, DIRECTORY))
                directory = stack.enter_context(opened(key.container, pod, DIRECTORY))
            yield stack.enter_context(opened_region(path.name, directory))

    def remove_pod(self, uid: PodUid) -> bool:
        """Removes all of a pod; whether there was anything. A link is removed, not what it leads to. Raises Rejected for no
        pod UID, Unavailable where the file system refuses: what is left is tried again."""
        require_nameable(ContainerKey(uid, "x"))
        try:
            with (
                self._step("removing", self.directory / CONTAINERS_NAME / uid),
                self._open_containers(make=False) as containers,
            ):
                remove_tree(containers, uid)
        except NotFound:
            return False
        return True

    def list_pods(self) -> tuple[PodUid, ...]:
        """The pods that have an entry, sorted. Raises Unavailable."""
        try:
            with (
                self._step("listing", self.directory / CONTAINERS_NAME),
                self._open_containers(make=False) as containers,
            ):
                return tuple(PodUid(name) for name in names_in(containers) if is_pod_uid(name))
        except NotFound:
            return ()

    @contextmanager
    def _open_containers(self, *, make: bool) -> Iterator[int]:
        """The directory of all cache files; `make` creates it and the preload file beside it."""
        if make:
            self.directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        with opened(self.directory, None, DIRECTORY & ~os.O_NOFOLLOW) as root:  # the operator's choice may be a link
            if make:
                replace_file(root, PRELOAD_NAME, self._preload)
                with made_directory(root, CONTAINERS_NAME, CONTAINERS_MODE):
                    pass
            with opened(CONTAINERS_NAME, root, DIRECTORY) as containers:
                yield containers

    def _require_library(self) -> None:
        """Raises Unavailable."""
        try:
            mode = self.library.stat().st_mode
        except OSError as e:
            raise Unavailable(f"{self.library} cannot be used: {e.strerror or e}") from e
        if not stat.S_ISREG(mode):
            raise Unavailable(f"{self.library} cannot be used: it is no regular file")

    @contextmanager
    def _step(self, verb: str, path: Path) -> Iterator[None]:
        """Errors renamed. Raises NotFound where nothing is there, Unavailable."""
        try:
            yield
        except FileNotFoundError as e:
            raise NotFound(f"{verb} {path} failed: {e.strerror}") from e
        except OSError as e:
            remedy = (
                "free space or inodes on its file system"
                if e.errno in _FULL
                else "check that the agent may write there (setting hami_core.directory)"
            )
            raise Unavailable(f"{verb} {path} failed: {e.strerror or e}; it is tried again: {remedy}") from e
