"""The sources of other projects that tests build: a directory, a tar archive, or a git URL with `#` and a commit or tag."""

from __future__ import annotations

import contextlib
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from native.build_gpushare import CannotBuildError, run

_MAX_ARCHIVE_BYTES = 256 * 1024 * 1024


@contextlib.contextmanager
def opened_source(source: str) -> Iterator[Path]:
    """The directory with the sources of a directory, an archive or a git URL; what was unpacked is removed behind it.

    Raises CannotBuildError.
    """
    if Path(source).is_dir():
        yield Path(source)
        return
    with tempfile.TemporaryDirectory(prefix="gpushare-source-") as name:
        directory = Path(name)
        if Path(source).is_file():
            yield _unpack(Path(source), directory)
        elif "://" in source:
            _fetch(source, directory)
            yield directory
        else:
            raise CannotBuildError(f"{source} is no directory, no archive and no git URL")


def _unpack(archive: Path, directory: Path) -> Path:
    """The directory with the sources, which is the archive's one folder where all is in that. Files and folders alone are
    written, below the directory: `extractall(filter="data")` is not to be had in Debian 12's Python 3.11.2.
    """
    try:
        with tarfile.open(archive) as opened:
            members = opened.getmembers()
            if sum(member.size for member in members) > _MAX_ARCHIVE_BYTES:
                raise CannotBuildError(f"{archive} holds more than {_MAX_ARCHIVE_BYTES} bytes")
            for member in members:
                _write_member(opened, member, directory)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise CannotBuildError(f"unpacking {archive} failed: {error}") from error
    entries = list(directory.iterdir())
    return entries[0] if len(entries) == 1 and entries[0].is_dir() else directory


def _write_member(archive: tarfile.TarFile, member: tarfile.TarInfo, directory: Path) -> None:
    """Raises OSError for a member that is no file and no folder, or that leads out; a leading `/` is left out."""
    path = directory / member.name.lstrip("/")
    content = archive.extractfile(member) if member.isreg() else None
    if ".." in path.parts or not (member.isdir() or content is not None):
        raise OSError(f"{member.name!r} leads out of the archive, or is neither a file nor a folder")
    if content is None:
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with content, path.open("wb") as written:
        shutil.copyfileobj(content, written)


def _fetch(source: str, directory: Path) -> None:
    url, _, revision = source.partition("#")
    run(["git", "init", "--quiet", str(directory)])
    run(["git", "-C", str(directory), "fetch", "--quiet", "--depth=1", "--", url, revision or "HEAD"])
    run(["git", "-C", str(directory), "checkout", "--quiet", "--detach", "FETCH_HEAD"])
