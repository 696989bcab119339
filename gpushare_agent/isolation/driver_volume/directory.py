"""Writes a planned volume beside the version in force, and switches to it by one rename.

    <base>/nvidia                          -> .versions/nvidia-535.104.5-0123456789ab   the version in force
    <base>/.versions/nvidia-…/{bin,lib,lib64}     whole and never written again once it has this name
    <base>/.versions/.staging-…            a version that is being filled; the next run removes that of a killed one
    <base>/.versions/.lock                 locked while one process works here

A container's mount of <base>/nvidia is resolved when it is made, so a running container keeps the version that it began
with. A version's name holds a hash of the content: the same content is never installed twice. Names end in .2, .3 … where
a directory of that name was damaged from outside, for it may be mounted and so is not repaired. Owns everything below
.versions and the links; the content is planned in isolation/driver_volume/plan.py.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
from msgspec import Struct

from gpushare_agent.isolation.driver_volume.plan import driver_version, driver_version_text
from gpushare_agent.isolation.driver_volume.values import DriverVolume, VolumeName, VolumePlan
from gpushare_agent.isolation.driver_volume.version import (
    Content,
    Progress,
    Taken,
    fill_version,
    is_whole,
    make_directory,
    read_contents,
    sync_directory,
    version_name,
)
from gpushare_agent.model.errors import StartupError, Unavailable

log = structlog.get_logger(__name__)

LOCK_TIMEOUT_S = 120.0
"""Longer than another run takes to copy a driver to a slow disk."""

_VERSIONS = ".versions"
_STAGING, _REMOVED, _NEW_LINK = ".staging-", ".removed-", ".link-"
_LOCK_PAUSE_S = 0.1
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class Installed(Struct, frozen=True, kw_only=True):
    """The version in force. `taken` is what this run linked and copied: nothing where the version existed already."""

    version: Path
    changed: bool
    taken: Taken


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
                version, taken = self._version(plan, contents, progress)
                changed = self._current(plan.name) != version
                if changed:
                    self._switch(plan.name, version.name)
                return Installed(version=version, changed=changed, taken=taken)

    def prune(self, name: VolumeName, is_in_use: Callable[[str], bool]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Removes the versions of a volume that are not in force. Returns names removed, and names kept as in use."""
        with _named_errors(f"removing old versions below {self._versions}"):
            if not self._versions.is_dir():
                return (), ()
            with self._locked():
                self._clear_leftovers()
                removed, kept = self._removable(name, is_in_use)
                for version in removed:
                    aside = self._versions / f"{_REMOVED}{version}"
                    (self._versions / version).rename(aside)  # a version has its name only while it is whole
                    shutil.rmtree(aside)
                return removed, kept

    def would_prune(
        self, name: VolumeName, is_in_use: Callable[[str], bool]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What prune() would remove now, and keep as in use; changes nothing."""
        with _named_errors(f"listing old versions below {self._versions}"):
            return self._removable(name, is_in_use) if self._versions.is_dir() else ((), ())

    def _removable(self, name: VolumeName, is_in_use: Callable[[str], bool]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        current = self._current(name)
        old = [
            path.name
            for path in sorted(self._versions.iterdir())
            if path.name.startswith(f"{name.value}-") and (current is None or path.name != current.name)
        ]
        kept = tuple(version for version in old if is_in_use(version))
        return tuple(version for version in old if version not in kept), kept

    def _current(self, name: VolumeName) -> Path | None:
        """The version in force; None before the first, and for a directory that is not ours."""
        link = self._base / name.value
        try:
            head, _, version = str(link.readlink()).rpartition("/")
        except OSError:
            return None
        return self._versions / version if head == _VERSIONS and (self._versions / version).is_dir() else None

    def _version(self, plan: VolumePlan, contents: list[Content], progress: Progress) -> tuple[Path, Taken]:
        """The directory with this content, and what was hard-linked and copied to make it."""
        name = version_name(plan, contents)
        for number in range(1, 100):
            version = self._versions / (name if number == 1 else f"{name}.{number}")
            if not os.path.lexists(version):
                return version, self._fill(version, plan, contents, progress)
            if is_whole(version, plan, contents):
                return version, Taken()
            log.warning("driver_version_damaged", directory=str(version), then="a new one is made beside it")
        raise StartupError(f"{self._versions} has 99 damaged directories {name}…; remove those that nobody has mounted")

    def _fill(self, version: Path, plan: VolumePlan, contents: list[Content], progress: Progress) -> Taken:
        staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=self._versions))
        try:
            taken = fill_version(staging, plan, contents, progress)
            staging.rename(version)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        sync_directory(self._versions)
        return taken

    def _switch(self, name: VolumeName, version: str) -> None:
        link, fresh = self._base / name.value, self._versions / f"{_NEW_LINK}{name.value}"
        fresh.symlink_to(f"{_VERSIONS}/{version}")  # relative, so that it holds wherever the base is mounted
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
    if code not in (errno.ENOSYS, errno.EINVAL):
        raise OSError(code, os.strerror(code), str(place))
    place.rename(aside)
    fresh.rename(place)
