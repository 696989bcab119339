"""What isolation hami-core has on the host besides isolation/tenant_files.py: one cache file per container.

    <directory>/containers/<pod uid>/<container>/<container>.cache    mounted read-write, for that container alone
    … of a claim also <container>.cache.<container ID>                 that of the container that runs; see `keep_started`

The tenant owns the cache file from the container's start on. The agent makes it anew before each start, for the library
would count processes of an earlier instance, whose PIDs recur, as using the GPU. region.py reads and edits it.
The file is open to all (0666, as the library itself would make it), and `containers`, of mode 0700, keeps other users away:
the only access is the mount. The mount is of the file, not of its directory, so a tenant cannot place other files there. No
sticky bit anywhere: behind one the kernel (fs.protected_regular) refuses the file to the second user of a container.

State owned: none but the files.
Source of the layout: docs/reference/formats.md, section 7, and isolation/hami_core/edits.py, which names the same paths.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from msgspec.structs import replace

from gpushare_agent.isolation.directories import opened_container, put_aside
from gpushare_agent.isolation.hami_core.region import Region, opened_region
from gpushare_agent.isolation.hami_core.region_format import FILE_BYTES
from gpushare_agent.isolation.tenant_files import (
    PreloadedLibrary,
    TenantFiles,
    is_oversized,
    make_tenant_file,
)
from gpushare_agent.kit.directories import names_in, status_of
from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.errors import NotFound, Unavailable
from gpushare_agent.model.names import ENV_HAMI_CORE_CACHE

LIBRARY = PreloadedLibrary(
    isolation="hami-core",
    owner="HAMi-core's",
    name="libvgpu.so",
    path_in_container="",
    mark=ENV_HAMI_CORE_CACHE.encode(),
    file_bytes=FILE_BYTES,
    setting="hami_core.directory",
    cure="Build the image with HAMi-core's source (docs/explanation/isolation.md), put a libvgpu.so at the path that"
    " --hami-core.library names, or choose another isolation",
)
_FRESH = ".new"


class HamiCoreFiles(TenantFiles):
    """`path_in_container` is what the preload file names."""

    def __init__(self, library: Path, directory: Path, path_in_container: str) -> None:
        super().__init__(library, directory)
        self.kind = replace(LIBRARY, path_in_container=path_in_container)

    def cache_file(self, key: ContainerKey) -> Path:
        """What is mounted into the container. Raises Rejected for a name that cannot be part of a path."""
        return self.container_directory(key) / f"{key.container}.cache"

    def _fill(self, key: ContainerKey, directory: int) -> None:
        make_tenant_file(directory, f"{key.container}.cache")

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
            if any(is_oversized(os.lstat(name, dir_fd=directory), FILE_BYTES) for name in present):
                raise Unavailable(f"{path} is kept once it is shortened")
            for name in present:
                if name != path.name:
                    put_aside(containers, directory, name)
            make_tenant_file(directory, fresh)
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
