"""A container's two files in its vDevice directory (isolation/vdevice) under isolation gpushare. The agent writes
gpushare.config through a map, because it stays the same file while programs have it mapped. The tenant writes `usage`.

Both are made again before each start that the kubelet announces; a claim's container that starts again sees ended
processes in `usage`, which the library finds by their locks.

A tenant can make `usage` as large as the file system allows: `cut` shortens one that is larger than the library makes it. A
container that starts again gets another directory, because nobody may wait for the old file (tenant_files.py).

Every step is relative to a descriptor and follows no link. State owned: the files, the maps of those configs that are
written all the time, descriptors of `usage` files and maps of those at rest, whether these were slow, of which of them the
size was seen last and when, and the containers whose files no start has had yet.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from gpushare_agent.agent.isolation import tenant_files
from gpushare_agent.agent.isolation.directories import (
    CLOSED_MODE,
    container_path,
    has_file,
    listed,
    opened_container,
    opened_root,
    pods_in,
    step,
)
from gpushare_agent.agent.isolation.gpushare.format import (
    CONFIG_BYTES,
    CONFIG_NAME,
    FIRST_LOCKED_BYTE,
    MOST_GPUS,
    USAGE_BYTES,
    USAGE_NAME,
    GpuLimits,
    Observed,
    Slot,
    boot_of,
    encode_config,
    encode_usage,
    gpu_uuids,
    read_held,
    read_slots,
    usage_head_bytes,
    write_limits,
    write_observed,
)
from gpushare_agent.agent.isolation.gpushare.library import Library
from gpushare_agent.agent.runtime.machine import is_before_boot, this_boot
from gpushare_agent.core.kit.directories import DIRECTORY_MODE, made_directory, opened, replace_file, status_of
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.directory_names import is_nameable, require_nameable
from gpushare_agent.core.model.errors import AgentError, Corrupt, NotFound, Unavailable
from gpushare_agent.core.model.names import GpuUuid, PodUid

_CONFIG_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
T = TypeVar("T")

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of madvise(2)."""
_MOST_OPEN = 128
"""Files kept open for `usage_head`, at rest by two descriptors: a process may have 1,024, and containers have sockets."""
SEEN_FOR_S = 4.0
"""For so long after `changed_heads` has seen a file's size it is not looked at again."""
_SIZE_PERIOD_S = 2.5
"""Between two looks at the sizes of files at rest."""
_SLOW_S = 0.5
"""Copying the heads of 100 takes a thousandth of it."""
_LOCK = struct.Struct("@hhqqi4x")
"""struct flock: type, whence, start, length, PID."""


class _Resting(NamedTuple):
    """The first bytes of files by maps, which only the kernel may read: where a tenant has shortened its file, others get a
    SIGBUS. And what is in them."""

    places: Sequence[mmap.mmap]
    heads: bytes


class GpushareFiles:
    """`containers` are the vDevice directories (setting virtual_manager.path), which isolation/vdevice removes. `limits` are
    the present limits of a container's GPUs, None if they are not known; `is_claims` is true if the share is a claim's."""

    def __init__(
        self,
        library: Library,
        containers: Path,
        limits: Callable[[ContainerKey], Sequence[GpuLimits] | None] = lambda _: None,
        is_claims: Callable[[ContainerKey], bool] = lambda _: False,
    ) -> None:
        self.library = library
        self.containers = containers
        self._containers_text = str(containers)
        self._limits = limits
        self._is_claims = is_claims
        self.boot_id = this_boot()
        self._writing = threading.Lock()
        self._mapped: dict[ContainerKey, tuple[mmap.mmap, dict[str, int]]] = {}
        self._usages: dict[ContainerKey, int] = {}
        weakref.finalize(self, _close_all, self._usages)
        self._seen: tuple[float, Collection[ContainerKey]] = (0.0, ())
        self._before: Mapping[ContainerKey, tuple[int, bytes]] = {}
        self._resting: _Resting | None = None
        """Those of `_before`, once it was given twice and nothing had changed."""
        self._may_map = True
        self._copies: int | None = None
        self.replaced: set[ContainerKey] = set()
        """Those whose `usage` may be another file than the open one, which `usage_head` then closes."""
        self.unused: set[ContainerKey] = set()
        """Those whose files were made ahead, for a start that has not begun."""

    def container_directory(self, key: ContainerKey) -> Path:
        """Raises Rejected for a name that cannot be part of a path."""
        return container_path(self.containers, key)

    def prepare(self, key: ContainerKey) -> None:
        """Makes new files instead of what a previous instance left; puts library and preload file back if need be. A claim's
        files stay: containers of several pods may run with them.

        Raises:
            Rejected: a name that cannot be part of a path.
            NotFound, Unavailable: the file system refuses, the limits are not known, or the library is gone from both
                places.
        """
        if self._is_claims(key) and self._has_claims_files(key):
            return
        with step("making", self.container_directory(key)):
            self.library.put_back()
            self.containers.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            with opened_root(self.containers) as root, made_directory(root, key.pod_uid, CLOSED_MODE) as pod:
                limits = self._known_limits(key)
                if key not in self.unused:
                    # With the socket and all else in it, which isolation/vdevice makes again.
                    tenant_files.put_usage_aside(pod, key.container)
                    self.replaced.add(key)
                self.unused.discard(key)
                with made_directory(pod, key.container) as directory:
                    replace_file(
                        directory, CONFIG_NAME, encode_config(key.pod_uid, key.container, limits, self.boot_id)
                    )
                    with self._writing:
                        # The map is of the replaced file, which nobody reads any more.
                        self._mapped.pop(key, None)
                    if status_of(directory, USAGE_NAME) is None:
                        tenant_files.make_usage(directory, encode_usage())

    def prepare_ahead(self, key: ContainerKey) -> None:
        """As `prepare`: the next one, which is the start's if it overtakes this, keeps `usage`. Raises as that."""
        self.prepare(key)
        self.unused.add(key)

    def _has_claims_files(self, key: ContainerKey) -> bool:
        """True if they also have its present limits. Unreadable files are made again: a tenant can shorten `usage`."""
        with suppress(NotFound, Corrupt):
            self._in_usage(key, partial(_read, size=usage_head_bytes(MOST_GPUS)))
            if not self._is_from_before_boot(key):
                self.write_limits(key, self._known_limits(key))
                return True
        return False

    def _known_limits(self, key: ContainerKey) -> Sequence[GpuLimits]:
        if (limits := self._limits(key)) is None:
            raise Unavailable(f"a GPU of container {key.container} is not in the inventory, or its memory is not known")
        return limits

    def _is_from_before_boot(self, key: ContainerKey) -> bool:
        """Times in the files are of the monotonic clock: after a reboot the library would wait for them to come. Not by the
        file's own time, if it says its boot: the clock may be set after the boot, while containers run with the file."""
        with self._opened(key) as file:
            if boot_id := boot_of(_read(file, CONFIG_BYTES)):
                return boot_id != self.boot_id
            # Of an earlier agent, or one that could not read the ID: containers may run with it.
            return is_before_boot(os.fstat(file))

    def list_pods(self) -> tuple[PodUid, ...]:
        """The containers that have a gpushare.config; others may be of isolation vcuda. Raises Unavailable."""
        return listed(
            self.containers, lambda root: tuple(uid for uid in pods_in(root) if has_file(root, uid, CONFIG_NAME))
        )

    def unseen(self, keys: Iterable[ContainerKey]) -> list[ContainerKey]:
        """Those of which the last call of `changed_heads` has not seen, or not lately, that their `usage` is as large as it
        should be: all while others compute, or while the reading of one file hangs; those of another isolation; one that
        cannot be read."""
        at, seen = self._seen
        is_old = time.monotonic() - at >= SEEN_FOR_S
        return [key for key in keys if is_old or key not in seen]

    def oversized(self, keys: Iterable[ContainerKey]) -> list[tuple[ContainerKey, int]]:
        """The containers with a `usage` larger than the library makes it, and its size in bytes, the largest first. One that
        cannot be read is left out: its tenant may have done that, or it is gone. Raises Unavailable."""
        found = []
        with suppress(NotFound), step("listing", self.containers), opened_root(self.containers) as root:
            for key in filter(is_nameable, keys):
                with suppress(OSError):
                    # By its path: only its last part is the tenant's.
                    status = os.lstat(f"{key.pod_uid}/{key.container}/{USAGE_NAME}", dir_fd=root)
                    if tenant_files.is_oversized(status):
                        found.append((key, max(status.st_size, status.st_blocks * tenant_files.BLOCK_BYTES)))
        return sorted(found, key=lambda one: one[1], reverse=True)

    def cut(self, key: ContainerKey) -> None:
        """Shortens an oversized `usage`; processes that have it mapped keep it. May take half a minute, and wait for a
        lease, 45 s as kernels are set. Raises NotFound, Corrupt if it is no regular file, Unavailable."""
        with self._container(key) as directory, renamed(USAGE_NAME):
            tenant_files.cut(directory)

    def write_limits(self, key: ContainerKey, limits: Sequence[GpuLimits]) -> tuple[GpuUuid, ...]:
        """Writes the limits, also for running processes; returns the GPUs in the order of both files. Raises NotFound if the
        container was not prepared, or for other GPUs; Corrupt, Unavailable."""
        # A resize and a round of usage write in threads of their own, and a sequence lock is for one writer: two at once
        # would leave the sequence odd, which the library takes for a write that does not end.
        with (
            self._writing,
            self._opened(key) as file,
            mmap.mmap(file, CONFIG_BYTES) as mapped,
            memoryview(mapped) as config,
        ):
            _make_writable(mapped)
            uuids = gpu_uuids(config)
            if missing := [one.uuid for one in limits if one.uuid not in uuids]:
                raise NotFound(f"{CONFIG_NAME} was prepared for other GPUs than {missing[0]}")
            for one in limits:
                write_limits(config, uuids.index(one.uuid), one)
            return tuple(map(GpuUuid, uuids))

    def write_observed(self, key: ContainerKey, seen: Mapping[GpuUuid, Observed]) -> None:
        """Writes what the driver shows of the container on each GPU. Raises as `write_limits`.

        Called ten times a second, so the map stays for the next time: the file is the agent's alone, and is only replaced
        here.
        """
        with self._writing:
            found = self._mapped.get(key)
            if found is None:
                with self._opened(key) as file:
                    mapped = mmap.mmap(file, CONFIG_BYTES)
                _make_writable(mapped)
                places = {uuid: place for place, uuid in enumerate(gpu_uuids(mapped[:]))}
                found = self._mapped[key] = mapped, places
            _make_writable(found[0])
            with memoryview(found[0]) as view:
                for uuid, one in seen.items():
                    if (place := found[1].get(uuid)) is not None:
                        write_observed(view, place, one)

    def keeps_others(self, running: Collection[ContainerKey], shares: Collection[ContainerKey]) -> bool:
        """Whether `release` would close anything."""
        return not (set(self._mapped).issubset(running) and set(self._usages).issubset(shares))

    def release(self, running: Collection[ContainerKey], shares: Collection[ContainerKey]) -> None:
        """Keeps only the maps of those that run, and the open files of those that have a share. In the thread of
        `usage_head`."""
        with self._writing:
            for key in self._mapped.keys() - set(running):
                self._mapped.pop(key)[0].close()
        for key in self._usages.keys() - set(shares):
            self._close(key)

    def changed_heads(self, before: Mapping[ContainerKey, tuple[int, bytes]]) -> dict[ContainerKey, bytes | AgentError]:
        """Of these containers, each with its number of GPUs and its last head, those that have another head, or whose file
        cannot be used. In the thread of `usage_head`."""
        now, is_again, self._before = time.monotonic(), before is self._before, before
        # Little of what 100 look-ups need is in the processor's caches after a second.
        may_rest = is_again and not self.replaced and now - self._seen[0] < _SIZE_PERIOD_S
        if may_rest and self._resting is not None:
            is_same = self._copied(self._resting.places) == self._resting.heads
            # Until their sizes are seen a tenant can make its file of thousands of pieces and a hole in all of them, for
            # which the copy waits, as a reading by `usage_head` would not. It can do so once.
            if time.monotonic() - now >= _SLOW_S:
                self._may_map, self._resting = False, None
            if is_same:
                return {}
        found: dict[ContainerKey, bytes | AgentError] = {}
        for key, (gpus, head) in before.items():
            try:
                if (new := self.usage_head(key, gpus)) != head:
                    found[key] = new
            except AgentError as e:
                found[key] = e
        self._seen = now, before.keys() - {key for key, one in found.items() if isinstance(one, AgentError)}
        if found or not is_again:
            self._resting = None
        elif self._may_map and self._resting is None and before.keys() <= self._usages.keys():
            with suppress(OSError, ValueError):  # one became shorter: the next reading says so
                places = [
                    mmap.mmap(self._usages[key], len(head), prot=mmap.PROT_READ) for key, (_, head) in before.items()
                ]
                self._resting = _Resting(places, b"".join(head for _, head in before.values()))
        return found

    def _copied(self, places: Sequence[mmap.mmap]) -> bytes:
        """What is in these maps, by two calls of the kernel for all of them; empty where one of the files became shorter."""
        size = sum(map(len, places))
        try:
            if self._copies is None:
                self._copies = os.memfd_create("usage")
                weakref.finalize(self, os.close, self._copies)
            # The kernel copies: of a page behind the end of its file it says EFAULT, or ends there.
            is_whole = os.pwritev(self._copies, places, 0) == size
            return os.pread(self._copies, size, 0) if is_whole else b""
        except OSError:
            return b""

    def _close(self, key: ContainerKey) -> None:
        self._resting = None
        os.close(self._usages.pop(key))

    def usage_head(self, key: ContainerKey, gpus: int) -> bytes:
        """What its processes say that they have paid, on the first `gpus`: for read_paid. Called for 100 containers ten
        times a second, always in the same thread: the file stays open, which takes a third of the time. Raises as
        `write_limits`."""
        if key in self.replaced:
            self.replaced.discard(key)
            if key in self._usages:
                self._close(key)
        if (file := self._usages.get(key)) is None:
            if len(self._usages) == _MOST_OPEN:
                return self._in_usage(key, partial(_read, size=usage_head_bytes(gpus)))
            file = self._usages[key] = self._in_usage(key, os.dup)
        try:
            _require_file(file, USAGE_NAME, USAGE_BYTES)
            return _read(file, usage_head_bytes(gpus))
        except (OSError, Corrupt):
            self.replaced.add(key)
            with renamed(USAGE_NAME):
                raise

    def _in_usage(self, key: ContainerKey, read: Callable[[int], T]) -> T:
        """By its path, of which only the last part is the tenant's. Read, not mapped: the tenant may shorten it. Raises as
        `write_limits`."""
        require_nameable(key)
        path = f"{self._containers_text}/{key.pod_uid}/{key.container}/{USAGE_NAME}"
        try:
            file = os.open(path, tenant_files.READ)
            try:
                _require_file(file, path, USAGE_BYTES)
                return read(file)
            finally:
                os.close(file)
        except OSError:
            with renamed(path):  # here alone: a context for each file would be a tenth of what it costs to read it
                raise

    def held_bytes(self, key: ContainerKey) -> dict[str, int]:
        """What its processes say that they have, by the GPU's UUID. Raises as `write_limits`."""
        with self._opened(key) as file:
            uuids = gpu_uuids(_read(file, CONFIG_BYTES))
        usage = self._in_usage(key, partial(_read, size=USAGE_BYTES))
        return dict(zip(uuids, read_held(usage, len(uuids)), strict=True))

    def slots(self, key: ContainerKey) -> list[Slot] | None:
        """Its processes that have a slot and live; none where the container has no files; None where those cannot be read,
        as of another version of the agent, or as the tenant may have made them."""
        try:
            return self._in_usage(key, _living_slots)
        except NotFound:
            return []
        except AgentError:
            return None

    @contextmanager
    def _opened(self, key: ContainerKey) -> Iterator[int]:
        with (
            self._container(key) as directory,
            renamed(CONFIG_NAME),
            opened(CONFIG_NAME, directory, _CONFIG_FILE) as file,
        ):
            _require_file(file, str(self.container_directory(key) / CONFIG_NAME), CONFIG_BYTES)
            yield file

    @contextmanager
    def _container(self, key: ContainerKey) -> Iterator[int]:
        path = self.container_directory(key)
        with (
            step("opening", path),
            opened_root(self.containers) as root,
            opened_container(root, key) as directory,
        ):
            yield directory


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


def _make_writable(mapped: mmap.mmap) -> None:
    """A store into the map may be a signal, which ends the agent. Raises Corrupt: behind the end of a file that somebody has
    cut; Unavailable: the file system refuses it, as a full one that writes each change elsewhere. Before Linux 5.14 that is
    not known."""
    if mapped.size() < CONFIG_BYTES:
        raise Corrupt(f"{CONFIG_NAME} became shorter while it was used")
    try:
        mapped.madvise(_POPULATE_WRITE)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise Unavailable(f"{CONFIG_NAME} cannot be written: {e.strerror}; it is tried again") from e


def _close_all(files: Mapping[ContainerKey, int]) -> None:
    for file in files.values():
        os.close(file)


def _require_file(file: int, path: str, size: int) -> None:
    status = os.fstat(file)
    # One that is still being shortened is not read: on XFS the read would wait.
    is_sound = stat.S_ISREG(status.st_mode) and status.st_size == size and status.st_nlink
    if not is_sound or tenant_files.is_oversized(status):
        raise Corrupt(f"{path} is no regular file of {size} bytes")


def _living_slots(file: int) -> list[Slot] | None:
    found = read_slots(_read(file, USAGE_BYTES))
    return found and [one for place, one in enumerate(found) if one[0] > 0 and _is_locked(file, place)]


def _is_locked(file: int, slot: int) -> bool:
    """Whether a process lives that holds the slot: its end, however it comes, releases the lock."""
    asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, FIRST_LOCKED_BYTE + slot, 1, 0)
    return bool(_LOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK)


def _read(file: int, size: int) -> bytes:
    content = os.pread(file, size, 0)
    if len(content) != size:
        raise Corrupt(f"{USAGE_NAME} became shorter while it was read")
    return content
