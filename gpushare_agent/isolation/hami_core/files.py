"""What isolation hami-core has on the host besides isolation/tenant_files.py: one cache file per container.

    <directory>/containers/<pod uid>/<container>/<container>.cache    mounted read-write, for that container alone
    … of a claim also <container>.cache.<container ID>                 that of the container that runs; see `keep_started`

The tenant owns the cache file from the container's start on. The agent makes it anew before each start, for the library
would count processes of a previous instance, whose PIDs recur, as using the GPU.
The file is open to all (0666, as the library itself would make it), and `containers`, of mode 0700, keeps other users away:
the only access is the mount. The mount is of the file, not of its directory, so a tenant cannot place other files there. No
sticky bit anywhere: behind one the kernel (fs.protected_regular) refuses the file to the second user of a container.

`Region` reads and edits the shared region in it (layout: isolation/hami_core/region_format.py), which the tenant may write
at any time. No link is followed, nothing but a regular file of exactly the region's size is read, each read and write is
bounded, and the file is never mapped: a tenant that cuts it short would end the agent by a signal. Each edit is eight
aligned bytes or four, which the processes that have the file mapped see whole.

Everything blocks; call it in a thread. State owned: none but the files.
Source of the layout: docs/reference/formats.md, section 7, and isolation/hami_core/edits.py, which names the same paths.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from gpushare_agent.isolation.directories import opened_container, put_aside
from gpushare_agent.isolation.hami_core.edits import LIBRARY_PATH
from gpushare_agent.isolation.hami_core.region_format import (
    FILE_BYTES,
    HEAD_BYTES,
    SLOT_BYTES,
    SLOTS_OFFSET,
    TAIL_BYTES,
    TAIL_OFFSET,
    RegionHead,
    RegionTail,
    Slot,
    core_limit_edit,
    memory_limit_edit,
    parse_head,
    parse_slot_pids,
    parse_slots,
    parse_tail,
)
from gpushare_agent.isolation.tenant_files import (
    TENANT_FILE,
    PreloadedLibrary,
    TenantFiles,
    is_oversized,
    make_tenant_file,
    occupied_bytes,
    renamed,
)
from gpushare_agent.kit.directories import names_in, status_of
from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.errors import Corrupt, NotFound, Unavailable
from gpushare_agent.model.names import ENV_HAMI_CORE_CACHE

LIBRARY = PreloadedLibrary(
    isolation="hami-core",
    owner="HAMi-core's",
    name="libvgpu.so",
    path_in_container=LIBRARY_PATH,
    mark=ENV_HAMI_CORE_CACHE.encode(),
    file_bytes=FILE_BYTES,
    setting="hami_core.directory",
    cure="Build the image with HAMi-core's source (docs/explanation/isolation.md), put a libvgpu.so at the path that"
    " --hami-core.library names, or choose another isolation",
)
_FRESH = ".new"


class HamiCoreFiles(TenantFiles):
    """The library and the containers' cache files, as TenantFiles has them."""

    kind = LIBRARY

    def cache_file(self, key: ContainerKey) -> Path:
        """What is mounted into the container. Raises Rejected for a name that cannot be part of a path."""
        return self.container_directory(key) / f"{key.container}.cache"

    def _fill(self, key: ContainerKey, directory: int) -> None:
        make_tenant_file(directory, f"{key.container}.cache")

    def keep_started(self, key: ContainerKey, container_id: str) -> None:
        """Keeps a claim's container that has started its file, under a name with its ID; the next start finds an empty one.
        No call of the kubelet comes before a start of it. Nothing where that was done, or nothing was prepared. It may wait
        for a tenant's write. Raises Rejected, Unavailable: also where a file is too large, until it is cut."""
        path = self.cache_file(key)
        own_name, fresh = f"{path.name}.{container_id}", f"{path.name}{_FRESH}"
        with (
            suppress(NotFound),
            self._step("replacing", path),
            self._open_containers(make=False) as containers,
            opened_container(containers, key) as directory,
        ):
            own = status_of(directory, path.name)
            known = status_of(directory, own_name)
            # Another inode: the present file is the next start's, and the container's own has its ID already.
            if own is None or (known is not None and known.st_ino != own.st_ino):
                return
            present = names_in(directory)
            # To link or rename a file the kernel waits until it is freed (37 s of a large one, measured).
            if any(is_oversized(os.lstat(name, dir_fd=directory), FILE_BYTES) for name in present):
                raise Unavailable(f"{path} gets a name of its own once it is shortened")
            for name in present:
                # A previous container's: it has ended, or this one would not run.
                if name != path.name:
                    put_aside(containers, directory, name)
            make_tenant_file(directory, fresh)
            # The link first: killed between the two, the next cycle finds the same inode under both names and goes on.
            os.link(path.name, own_name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
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
                # Of a claim the file with the ID is the one that runs; the other waits for a start.
                started = [name for name in names_in(directory) if name not in (path.name, f"{path.name}{_FRESH}")]
            yield stack.enter_context(opened_region(started[0] if started else path.name, directory))


class Region:
    """An open cache file. Methods raise Corrupt for what is no region, Unavailable where the file system refuses."""

    def __init__(self, file: int, name: str) -> None:
        self._file = file
        self._name = name

    def head(self) -> RegionHead | None:
        """None where no process of the container has called cuInit since it started."""
        return parse_head(self._read(HEAD_BYTES, 0))

    def tail(self) -> RegionTail:
        return parse_tail(self._read(TAIL_BYTES, TAIL_OFFSET))

    def slots(self, count: int) -> tuple[Slot, ...]:
        """The first ones; as many as `tail` says, at most 1,024."""
        return parse_slots(self._read(count * SLOT_BYTES, SLOTS_OFFSET))

    def slot_pids(self, count: int) -> tuple[tuple[int, int], ...]:
        """The PID and the host PID of each of the first slots."""
        return parse_slot_pids(self._read(count * SLOT_BYTES, SLOTS_OFFSET))

    def set_memory_limit(self, ordinal: int, limit_bytes: int) -> None:
        """Sets the limit of the GPU with this ordinal in the container, from the next allocation on."""
        self.write(*memory_limit_edit(ordinal, limit_bytes))

    def set_core_limit(self, ordinal: int, percent: int) -> None:
        """Sets the limit of the GPU with this ordinal in the container, for processes that start from now on."""
        self.write(*core_limit_edit(ordinal, percent))

    def write(self, offset: int, content: bytes) -> None:
        """An edit of `region_format`."""
        with renamed(self._name):
            written = os.pwrite(self._file, content, offset)
        if written != len(content):
            raise Unavailable(f"{self._name} took {written} of {len(content)} bytes")

    def _read(self, size: int, offset: int) -> bytes:
        with renamed(self._name):
            content = os.pread(self._file, size, offset)
        # The tenant cut it while it was read.
        if len(content) != size:
            raise Corrupt(f"{self._name} became shorter while it was read")
        return content


@contextmanager
def opened_region(name: str, directory: int) -> Iterator[Region | None]:
    """The cache file `name` below a directory's descriptor; None while it is empty: no process has called cuInit.

    Raises NotFound, Corrupt for what is no region (a link, another kind or size), Unavailable.
    """
    with renamed(name):
        file = os.open(name, TENANT_FILE, dir_fd=directory)
    try:
        status = os.fstat(file)
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_size not in (0, FILE_BYTES)
            or is_oversized(status, FILE_BYTES)
        ):
            raise Corrupt(f"{name} is no regular file of {FILE_BYTES} bytes but one of {occupied_bytes(status)}")
        yield Region(file, name) if status.st_size else None
    finally:
        os.close(file)
