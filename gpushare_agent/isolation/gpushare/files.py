"""What a container has in its vDevice directory (isolation/vdevice) under isolation gpushare alone: gpushare.config, which
the agent writes through a map, for it stays the same file while programs have it mapped, and `usage`, which the tenant
writes.

Both are made anew before each start that the kubelet announces; to a claim's container that starts again `usage` shows
processes that have ended, which the library finds by their locks. State owned: the files, and the maps of those configs
that are written all the time.
"""

from __future__ import annotations

import mmap
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gpushare_agent.isolation.directories import opened_container, opened_root, put_aside
from gpushare_agent.isolation.gpushare.edits import LIBRARY_NAME, LIBRARY_PATH
from gpushare_agent.isolation.gpushare.format import (
    CONFIG_BYTES,
    CONFIG_NAME,
    MOST_GPUS,
    USAGE_BYTES,
    USAGE_NAME,
    GpuLimits,
    Observed,
    Paid,
    encode_config,
    encode_usage,
    gpu_uuids,
    read_paid,
    read_usage,
    usage_head_bytes,
    write_limits,
    write_observed,
)
from gpushare_agent.isolation.names import is_nameable, require_nameable
from gpushare_agent.isolation.tenant_files import (
    TENANT_FILE,
    PreloadedLibrary,
    TenantFiles,
    make_tenant_file,
    renamed,
)
from gpushare_agent.kit.directories import DIRECTORY, DIRECTORY_MODE, opened, replace_file, status_of
from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.errors import Corrupt, NotFound, Unavailable
from gpushare_agent.model.names import GpuUuid, PodUid

LIBRARY = PreloadedLibrary(
    isolation="gpushare",
    owner="libgpushare's",
    name=LIBRARY_NAME,
    path_in_container=LIBRARY_PATH,
    mark=b"/etc/vcuda/gpushare.config\0",
    file_bytes=USAGE_BYTES,
    setting="libgpushare.directory",
    cure="Build it with `python -m native.build_gpushare`, put it at the path that --libgpushare.library names, or choose"
    " another isolation",
)


class GpushareFiles(TenantFiles):
    """`containers` are the vDevice directories (setting virtual_manager.path), which isolation/vdevice removes. `limits` are
    those of a container's GPUs as they are to be now, None where they are not known; `is_claims` is whether the share is a
    claim's."""

    kind = LIBRARY

    def __init__(
        self,
        library: Path,
        directory: Path,
        containers: Path,
        limits: Callable[[ContainerKey], Sequence[GpuLimits] | None] = lambda _: None,
        is_claims: Callable[[ContainerKey], bool] = lambda _: False,
        *,
        is_library_optional: bool = False,
    ) -> None:
        super().__init__(library, directory, is_library_optional=is_library_optional)
        self._writing = threading.Lock()
        self._mapped: dict[ContainerKey, tuple[mmap.mmap, dict[str, int]]] = {}
        self.containers = containers
        self._containers_text = str(containers)
        self._limits = limits
        self._is_claims = is_claims

    def prepare(self, key: ContainerKey) -> None:
        """Makes the files as the other isolations do, but what a claim has stays: containers of several pods may run with
        it."""
        if self._is_claims(key):
            # What cannot be read as the two files is made anew: a tenant can shorten `usage`.
            with suppress(NotFound, Corrupt):
                self.paid(key)
                if not self._is_from_before_boot(key):
                    self.write_limits(key, self._known_limits(key))
                    return
        super().prepare(key)

    def list_pods(self) -> tuple[PodUid, ...]:
        """Those that have a gpushare.config; beside them may be pods of isolation vcuda. Raises Unavailable."""
        return tuple(uid for uid in super().list_pods() if any(self.containers.glob(f"{uid}/*/{CONFIG_NAME}")))

    def _known_limits(self, key: ContainerKey) -> Sequence[GpuLimits]:
        if (limits := self._limits(key)) is None:
            raise Unavailable(f"a GPU of container {key.container} is not in the inventory, or its memory is not known")
        return limits

    def _is_from_before_boot(self, key: ContainerKey) -> bool:
        """Times in the files are of the monotonic clock: after a reboot the library would wait for those to come."""
        booted_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        with self._opened(key, CONFIG_NAME, CONFIG_BYTES) as file:
            return os.fstat(file).st_mtime < booted_at

    @contextmanager
    def _opened_containers(self, root: int, *, make: bool) -> Iterator[int]:
        if make:
            self.containers.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        with opened_root(self.containers) as containers:
            yield containers

    def _put_previous_aside(self, containers: int, pod: int, name: str) -> None:
        """The socket and the other files in the directory stay."""
        with suppress(FileNotFoundError, NotADirectoryError), opened(name, pod, DIRECTORY) as directory:
            # Renamed, not removed: to free what a tenant has written may take half a minute, and the start waits here.
            if status_of(directory, USAGE_NAME) is not None:
                put_aside(containers, directory, USAGE_NAME)

    def _statuses(self, containers: int, key: ContainerKey) -> list[os.stat_result]:
        # The tenant writes one file, and of its path the last part alone is the tenant's: one call for each container.
        if not is_nameable(key):
            return []
        return [os.lstat(f"{key.pod_uid}/{key.container}/{USAGE_NAME}", dir_fd=containers)]

    def _fill(self, key: ContainerKey, directory: int) -> None:
        replace_file(directory, CONFIG_NAME, encode_config(key.pod_uid, key.container, self._known_limits(key)))
        with self._writing:
            # The map is of the file that was replaced, which nobody reads any more.
            self._mapped.pop(key, None)
        make_tenant_file(directory, USAGE_NAME, encode_usage())

    def write_limits(self, key: ContainerKey, limits: Sequence[GpuLimits]) -> tuple[GpuUuid, ...]:
        """Writes the limits, for processes that run, too; answers the GPUs in the order of both files. Raises NotFound where
        the container was not prepared, or for other GPUs; Corrupt, Unavailable."""
        with self._opened_config(key) as config:
            uuids = gpu_uuids(config)
            places = [_place(uuids, one.uuid) for one in limits]
            for place, one in zip(places, limits, strict=True):
                write_limits(config, place, one)
            return tuple(map(GpuUuid, uuids))

    def write_observed(self, key: ContainerKey, seen: Mapping[GpuUuid, Observed]) -> None:
        """Writes what the driver shows of the container on each GPU. Raises as `write_limits`.

        Asked ten times a second, so the map stays for the next time: the file is the agent's alone, and what takes its
        place is made here.
        """
        with self._writing:
            found = self._mapped.get(key)
            if found is None:
                with self._opened(key, CONFIG_NAME, CONFIG_BYTES) as file:
                    mapped = mmap.mmap(file, CONFIG_BYTES)
                places = {uuid: place for place, uuid in enumerate(gpu_uuids(mapped[:]))}
                found = self._mapped[key] = mapped, places
            if found[0].size() < CONFIG_BYTES:  # somebody has cut it: a write behind its end is a signal
                raise Corrupt(f"{CONFIG_NAME} of container {key.container} became shorter while it was used")
            with memoryview(found[0]) as view:
                for uuid, one in seen.items():
                    if (place := found[1].get(uuid)) is not None:
                        write_observed(view, place, one)

    def release(self, keys: Collection[ContainerKey]) -> None:
        """Keeps the maps of these containers alone."""
        with self._writing:
            for key in self._mapped.keys() - set(keys):
                self._mapped.pop(key)[0].close()

    def paid(self, key: ContainerKey, gpus: int = MOST_GPUS) -> list[Paid]:
        """What its processes say that they have paid, on the first `gpus`. Raises as `write_limits`.

        Asked of 100 containers ten times a second, so by its path: of that the last part alone is the tenant's. And opened
        each time: the tenant may shorten a file that is mapped, and a start puts another one in its place.
        """
        require_nameable(key)
        path = f"{self._containers_text}/{key.pod_uid}/{key.container}/{USAGE_NAME}"
        try:
            file = os.open(path, TENANT_FILE)
            try:
                _require_file(file, path, USAGE_BYTES)
                return read_paid(_read(file, usage_head_bytes(gpus), 0))
            finally:
                os.close(file)
        except OSError:
            with renamed(path):  # here alone: a context for each file would be a tenth of what it costs to read it
                raise

    def held_bytes(self, key: ContainerKey) -> dict[str, int]:
        """What its processes say that they have, by the GPU's UUID. Raises as `write_limits`."""
        with self._opened(key, CONFIG_NAME, CONFIG_BYTES) as file:
            uuids = gpu_uuids(_read(file, CONFIG_BYTES, 0))
        with self._opened(key, USAGE_NAME, USAGE_BYTES) as file:
            gpus, _ = read_usage(_read(file, USAGE_BYTES, 0), len(uuids))
        return {uuid: gpu.held_bytes for uuid, gpu in zip(uuids, gpus, strict=True)}

    @contextmanager
    def _opened_config(self, key: ContainerKey) -> Iterator[memoryview]:
        # A resize and a round of usage write in threads of their own, and a sequence lock is for one writer: two at once
        # would leave the sequence odd, which the library takes for a write that does not end.
        with (
            self._writing,
            self._opened(key, CONFIG_NAME, CONFIG_BYTES) as file,
            mmap.mmap(file, CONFIG_BYTES) as mapped,
        ):
            view = memoryview(mapped)
            try:
                yield view
            finally:
                view.release()

    @contextmanager
    def _opened(self, key: ContainerKey, name: str, size: int) -> Iterator[int]:
        path = self.container_directory(key)
        with (
            self._step("opening", path),
            self._open_containers(make=False) as containers,
            opened_container(containers, key) as directory,
            renamed(name),
            opened(name, directory, TENANT_FILE) as file,
        ):
            _require_file(file, str(path / name), size)
            yield file


def _place(uuids: Sequence[str], uuid: str) -> int:
    try:
        return uuids.index(uuid)
    except ValueError as e:
        raise NotFound(f"{CONFIG_NAME} was prepared for other GPUs than {uuid}") from e


def _require_file(file: int, path: str, size: int) -> None:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_size != size:
        raise Corrupt(f"{path} is no regular file of {size} bytes")


def _read(file: int, size: int, offset: int) -> bytes:
    content = os.pread(file, size, offset)
    if len(content) != size:
        raise Corrupt(f"{USAGE_NAME} became shorter while it was read")
    return content
