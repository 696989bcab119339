"""Fills the directory of one version of a driver volume: by hard links where possible, else by copies.

Where that directory lies and whether it is in force is decided in directory.py. Files are read first, for the directory's
name has a hash of the content; a file that changes between reading and copying is an error.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from gpushare_agent.isolation.driver_volume.values import DIRECTORY_OF_CLASS, PlannedFile, VolumePlan
from gpushare_agent.model.errors import StartupError

Progress = Callable[[str, int, int], None]
"""Called with "reading" or "copying", bytes done, bytes in all."""

_CHUNK_BYTES = 4 * 1024 * 1024
_COPY_INSTEAD = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES}
)  # another device or mount, immutable, too many links, a file system without them


class Content(Struct, frozen=True, kw_only=True):
    """A file's content and the state in which it was read."""

    file: PlannedFile
    digest: str
    size: int
    mode: int
    stamp: tuple[int, int, int, int]


class Taken(Struct, frozen=True, kw_only=True):
    """Targets, sorted: how each file got into a version."""

    hard_linked: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()


def read_contents(plan: VolumePlan, progress: Progress) -> list[Content]:
    total = sum(file.source.stat().st_size for file in plan.files)
    contents: list[Content] = []
    done = 0
    for file in plan.files:
        with file.source.open("rb") as opened:
            state = os.fstat(opened.fileno())
            digest = hashlib.blake2b(digest_size=16)
            while chunk := opened.read(_CHUNK_BYTES):
                digest.update(chunk)
                done += len(chunk)
                progress("reading", done, total)
        content = Content(
            file=file, digest=digest.hexdigest(), size=state.st_size, mode=state.st_mode, stamp=_stamp(state)
        )
        contents.append(content)
    return contents


def _stamp(state: os.stat_result) -> tuple[int, int, int, int]:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def version_name(plan: VolumePlan, contents: list[Content]) -> str:
    rows = [f"{item.file.target}\0{item.digest}\0{bool(item.mode & 0o111)}" for item in contents]
    rows += [f"{link.target}\0->{link.points_to}" for link in plan.links]
    content_hash = hashlib.blake2b("\n".join(rows).encode(errors="surrogateescape"), digest_size=6).hexdigest()
    version = ".".join(map(str, plan.driver_version)) if plan.driver_version else "unknown"
    return f"{plan.name.value}-{version}-{content_hash}"


def is_whole(version: Path, plan: VolumePlan, contents: list[Content]) -> bool:
    try:
        for item in contents:
            state = (version / item.file.target).lstat()
            if not stat.S_ISREG(state.st_mode) or state.st_size != item.size:
                return False
        return all(str((version / link.target).readlink()) == link.points_to for link in plan.links)
    except OSError:
        return False


def fill_version(directory: Path, plan: VolumePlan, contents: list[Content], progress: Progress) -> Taken:
    """Puts everything into an empty directory, readable for everyone and safe on the disk."""
    directories = [directory / name for name in ("bin", *DIRECTORY_OF_CLASS.values())]
    for each in directories:
        make_directory(each)
    linked: list[str] = []
    copied: list[str] = []
    total, done = sum(item.size for item in contents), 0
    for item in contents:
        if _hard_link(item, directory):
            linked.append(item.file.target)
        else:
            _copy(item, directory, progress, done, total)
            copied.append(item.file.target)
        done += item.size
    for link in plan.links:
        (directory / link.target).symlink_to(link.points_to)
    directory.chmod(0o755)
    for each in (*directories, directory):
        sync_directory(each)
    return Taken(hard_linked=tuple(linked), copied=tuple(copied))


def _hard_link(item: Content, directory: Path) -> bool:
    """False where it must be a copy. A file with set-uid, or closed to others, is one: containers get it without."""
    if item.mode & (stat.S_ISUID | stat.S_ISGID) or item.mode & 0o444 != 0o444:
        return False
    target = directory / item.file.target
    try:
        os.link(item.file.source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno in _COPY_INSTEAD:
            return False
        raise
    if _stamp(target.stat()) != item.stamp:
        raise _changed(item)
    return True


def _copy(item: Content, directory: Path, progress: Progress, done: int, total: int) -> None:
    digest = hashlib.blake2b(digest_size=16)
    with item.file.source.open("rb") as source, (directory / item.file.target).open("xb") as target:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            target.write(chunk)
            done += len(chunk)
            progress("copying", done, total)
        if digest.hexdigest() != item.digest:
            raise _changed(item)
        target.flush()
        os.fchmod(target.fileno(), 0o755 if item.mode & 0o111 else 0o644)
        os.fsync(target.fileno())


def _changed(item: Content) -> StartupError:
    return StartupError(
        f"{item.file.source} changed while it was collected, perhaps by an installation of the driver. What was in force"
        " stays; run again when that has ended"
    )


def make_directory(path: Path) -> None:
    """With open rights whatever the umask is: programs in containers need not be root."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o755)


def sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
