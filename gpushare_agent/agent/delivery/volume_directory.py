"""Writes a planned volume next to the version in force, and switches to it by one rename.

    <base>/nvidia                          -> .versions/nvidia-535.104.5-0123456789ab   the version in force
    <base>/.versions/nvidia-…/{bin,lib,lib64}     whole and never written again once it has this name
    <base>/.versions/.staging-…            a version that is being filled; the next run removes that of a killed one
    <base>/.versions/.lock                 locked while one process works here

A container's mount of <base>/nvidia is resolved when it is made, so a running container keeps the version that it began
with. A version's name holds a hash of the content: the same content is never installed twice. Names end in .2, .3 … where
a directory of that name was damaged from outside, because it may be mounted and so is not repaired. Owns everything below
.versions and the links; the content is planned in delivery/volume_plan.py.

A version has copies, because an installer may overwrite the host's files in place. Files are read first: the name has
their hash; one that changes between reading and copying is an error.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
from msgspec import Struct

from gpushare_agent.agent.delivery.volume_plan import (
    DIRECTORY_OF_CLASS,
    DriverVolume,
    VolumeName,
    VolumePlan,
    driver_version,
    driver_version_text,
)
from gpushare_agent.core.kit.directories import sync_directory
from gpushare_agent.core.model.errors import StartupError, Unavailable

log = structlog.get_logger(__name__)

LOCK_TIMEOUT_S = 120.0
"""Longer than another run takes to copy a driver to a slow disk."""

_VERSIONS = ".versions"
_STAGING, _REMOVED, _NEW_LINK = ".staging-", ".removed-", ".link-"
_LOCK_PAUSE_S = 0.1
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class Installed(Struct, frozen=True, kw_only=True):
    """The version in force; `changed`: since this run."""

    version: Path
    changed: bool


class DriverDirectory:
    """The versions below one base directory, as volume.conf names it.

    Methods raise StartupError where something cannot be done (what was in force stays), and those that change anything
    Unavailable where another process works here for too long.
    """

    def __init__(self, base: Path, *, lock_timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self._base = base
        self._versions = base / _VERSIONS
        self._lock_timeout_s = lock_timeout_s

    def is_in_force(self, plan: VolumePlan, progress: Progress) -> bool:
        """Whether exactly this content is in force; changes nothing."""
        with _named_errors(f"reading the files for {self._base / plan.name}"):
            contents = read_contents(plan, progress)
            current = self._current(plan.name)
            return (
                current is not None
                and current.name.startswith(version_name(plan, contents))
                and is_whole(current, plan, contents)
            )

    def install(self, plan: VolumePlan, progress: Progress) -> Installed:
        """Puts the plan in force, unless it is. Killed at any moment it leaves what was in force before, whole."""
        with _named_errors(f"making {self._base / plan.name}"):
            make_directory(self._base)
            make_directory(self._versions)
            with self._locked():
                self._clear_leftovers()
                contents = read_contents(plan, progress)
                version = self._version(plan, contents, progress)
                changed = self._current(plan.name) != version
                if changed:
                    self._switch(plan.name, version.name)
                return Installed(version=version, changed=changed)

    def prune(
        self, name: VolumeName, is_in_use: Callable[[str], bool], *, is_asked_only: bool = False
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Removes the versions of a volume that are not in force, or says which it would, and changes nothing. Returns names
        removed, and names left as in use."""
        with _named_errors(f"removing old versions below {self._versions}"):
            if not self._versions.is_dir():
                return (), ()
            if is_asked_only:
                return self._removable(name, is_in_use)
            with self._locked():
                self._clear_leftovers()
                removed, in_use = self._removable(name, is_in_use)
                for version in removed:
                    aside = self._versions / f"{_REMOVED}{version}"
                    (self._versions / version).rename(aside)  # a version has its name only while it is whole
                    shutil.rmtree(aside)
                return removed, in_use

    def _removable(self, name: VolumeName, is_in_use: Callable[[str], bool]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        current = self._current(name)
        old = [
            path.name
            for path in sorted(self._versions.iterdir())
            if path.name.startswith(f"{name.value}-") and (current is None or path.name != current.name)
        ]
        in_use = tuple(version for version in old if is_in_use(version))
        return tuple(version for version in old if version not in in_use), in_use

    def _current(self, name: VolumeName) -> Path | None:
        """The version in force; None before the first, and for a directory that is not ours."""
        link = self._base / name.value
        try:
            # A link that leads elsewhere is not ours: nothing of ours is in force then.
            head, _, version = str(link.readlink()).rpartition("/")
        except OSError:
            return None
        return self._versions / version if head == _VERSIONS and (self._versions / version).is_dir() else None

    def _version(self, plan: VolumePlan, contents: list[Content], progress: Progress) -> Path:
        """The directory with this content."""
        name = version_name(plan, contents)
        # A damaged version is not repaired in its place: containers may have it mounted.
        for number in range(1, 100):
            version = self._versions / (name if number == 1 else f"{name}.{number}")
            if not os.path.lexists(version):
                self._fill(version, plan, contents, progress)
                return version
            if is_whole(version, plan, contents):
                return version
            log.warning("driver_version_damaged", directory=str(version), then="a new one is made next to it")
        raise StartupError(f"{self._versions} has 99 damaged directories {name}…; remove those that nobody has mounted")

    def _fill(self, version: Path, plan: VolumePlan, contents: list[Content], progress: Progress) -> None:
        staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=self._versions))
        try:
            fill_version(staging, plan, contents, progress)
            staging.rename(version)
        except BaseException:
            # Cancelled or full: half a version would take the space that the next run needs.
            shutil.rmtree(staging, ignore_errors=True)
            raise
        sync_directory(self._versions)

    def _switch(self, name: VolumeName, version: str) -> None:
        link, fresh = self._base / name.value, self._versions / f"{_NEW_LINK}{name.value}"
        fresh.symlink_to(f"{_VERSIONS}/{version}")  # relative, so that it holds wherever the base is mounted
        # gpu-manager has a directory there. One step puts the link in its place, so that a container that starts now finds
        # one or the other.
        if link.is_dir() and not link.is_symlink():
            _exchange(fresh, link, aside=self._versions / f"{_NEW_LINK}{name.value}-before")
        else:
            fresh.rename(link)
        sync_directory(self._base)
        self._clear_leftovers()

    def _clear_leftovers(self) -> None:
        """Removes those of killed runs; moves a directory that a link has replaced (gpu-manager's) among the versions."""
        for path in sorted(self._versions.iterdir()):
            if path.name.startswith((_STAGING, _REMOVED)):
                shutil.rmtree(path)
            elif path.name.startswith(_NEW_LINK) and path.is_symlink():
                path.unlink()
            elif path.name.startswith(_NEW_LINK):  # running containers may have it mounted
                volume = path.name.removeprefix(_NEW_LINK).removesuffix("-before")
                free = (f"{volume}-replaced-{number}" for number in range(1, 1000))
                path.rename(next(self._versions / n for n in free if not os.path.lexists(self._versions / n)))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # flock ends with the process that has it: a killed run leaves no lock.
        handle = os.open(self._versions / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + self._lock_timeout_s
            while not _try_lock(handle):
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"another process has worked on {self._base} for {self._lock_timeout_s:g} s; nothing was changed."
                        " Wait for it, or find it with `fuser` on .versions/.lock"
                    )
                time.sleep(_LOCK_PAUSE_S)
            yield
        finally:
            os.close(handle)


def installed_driver_version(volume: DriverVolume) -> tuple[int, ...] | None:
    """The driver version of the volume in force; None if there is none, or its libcuda's name has none."""
    return max(
        (version for name in _library_names(volume) if (version := driver_version(name)) is not None), default=None
    )


def installed_driver_text(volume: DriverVolume) -> str:
    """The same as text, as the file's name has it, such as 535.104.05; empty where it is not known."""
    return driver_version_text(_library_names(volume))


def _library_names(volume: DriverVolume) -> list[str]:
    try:
        return [path.name for path in (volume.directory / "lib64").iterdir()]
    except OSError:
        return []


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _named_errors(attempt: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        place = f" at {e.filename}" if e.filename else ""
        raise StartupError(
            f"{attempt} failed{place}: {e.strerror or e}. What was in force stays; repair this and run again"
        ) from e


def _exchange(fresh: Path, place: Path, *, aside: Path) -> None:
    """Swaps a link and a directory in one step; file systems that cannot get two, with nothing in force between them."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(fresh), os.fsencode(place)
    if renameat2 is not None and renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return
    code = ctypes.get_errno() if renameat2 is not None else errno.ENOSYS
    # Other errors are the disk's; these two say that the kernel, or this file system, cannot exchange names.
    if code not in (errno.ENOSYS, errno.EINVAL):
        raise OSError(code, os.strerror(code), str(place))
    place.rename(aside)
    fresh.rename(place)


Progress = Callable[[str, int, int], None]
"""Called with "reading" or "copying", bytes done, bytes in all."""

_CHUNK_BYTES = 4 * 1024 * 1024


class Content(Struct, frozen=True, kw_only=True):
    """What was read of a file."""

    target: str
    source: Path
    digest: str
    size: int
    is_executable: bool


def read_contents(plan: VolumePlan, progress: Progress) -> list[Content]:
    # For the progress alone.
    total = sum(source.stat().st_size for source in plan.files.values())
    contents: list[Content] = []
    done = 0
    for target, source in plan.files.items():
        with source.open("rb") as file:
            state = os.fstat(file.fileno())
            digest = hashlib.blake2b(digest_size=16)
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                done += len(chunk)
                progress("reading", done, total)
        contents.append(
            Content(
                target=target,
                source=source,
                digest=digest.hexdigest(),
                size=state.st_size,
                is_executable=bool(state.st_mode & 0o111),
            )
        )
    return contents


def version_name(plan: VolumePlan, contents: list[Content]) -> str:
    rows = [f"{item.target}\0{item.digest}\0{item.is_executable}" for item in contents]
    rows += [f"{target}\0->{points_to}" for target, points_to in plan.links.items()]
    content_hash = hashlib.blake2b("\n".join(rows).encode(errors="surrogateescape"), digest_size=6).hexdigest()
    version = ".".join(map(str, plan.driver_version)) if plan.driver_version else "unknown"
    return f"{plan.name.value}-{version}-{content_hash}"


def is_whole(version: Path, plan: VolumePlan, contents: list[Content]) -> bool:
    try:
        for item in contents:
            state = (version / item.target).lstat()
            if not stat.S_ISREG(state.st_mode) or state.st_size != item.size:
                return False
        return all(str((version / target).readlink()) == name for target, name in plan.links.items())
    except OSError:
        return False


def fill_version(directory: Path, plan: VolumePlan, contents: list[Content], progress: Progress) -> None:
    """Puts everything into an empty directory, readable for everyone and safe on the disk."""
    directories = [directory / name for name in ("bin", *DIRECTORY_OF_CLASS.values())]
    for each in directories:
        make_directory(each)
    total, done = sum(item.size for item in contents), 0
    for item in contents:
        _copy(item, directory, progress, done, total)
        done += item.size
    for target, points_to in plan.links.items():
        (directory / target).symlink_to(points_to)
    directory.chmod(0o755)
    for each in (*directories, directory):
        sync_directory(each)


def _copy(item: Content, directory: Path, progress: Progress, done: int, total: int) -> None:
    """Readable for everyone, and without set-uid."""
    digest = hashlib.blake2b(digest_size=16)
    with item.source.open("rb") as source, (directory / item.target).open("xb") as target:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            target.write(chunk)
            done += len(chunk)
            progress("copying", done, total)
        if digest.hexdigest() != item.digest:
            raise StartupError(
                f"{item.source} changed while it was collected, perhaps by an installation of the driver. What was in force"
                " stays; run again when that has ended"
            )
        target.flush()
        os.fchmod(target.fileno(), 0o755 if item.is_executable else 0o644)
        os.fsync(target.fileno())


def make_directory(path: Path) -> None:
    """Makes a directory with open rights whatever the umask is: programs in containers need not be root."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o755)
