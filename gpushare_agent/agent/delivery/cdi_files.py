"""The CDI spec directories of the host: reads everybody's specs, writes and removes the agent's own.

Reading follows links, as container runtimes do; it is bounded in size and number, and a file that is no spec is reported and
skipped, as they do. Writing is by rename below the directory's descriptor and follows no link there. The calls block
for some milliseconds; a YAML file of nvidia-ctk that changed takes a second. State owned: the parsed files by their
identity, so that an unchanged file costs one stat.

Source of the format: the CDI specification 1.1.0 and its reference library.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import DecodeError, Meta, Struct, ValidationError, field

from gpushare_agent.core.kit.directories import (
    DIRECTORY_MODE,
    holds,
    opened,
    remove_left_behind,
    replace_file,
    status_of,
)
from gpushare_agent.core.model.errors import Unavailable, os_errors_as
from gpushare_agent.core.model.isolation import DEVICE_NAME, KIND, OWN_SPEC_NAME, SpecFile

MAX_BYTES = 1024 * 1024
"""A spec of nvidia-ctk for eight GPUs has some 60 KB."""
MAX_YAML_BYTES = 512 * 1024
"""The reader in Python takes 6.6 s of processor time for a mebibyte of short values, and 3.3 s for this (measured)."""
MAX_FILES = 200
"""Of one directory, in order of name."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
"""The directory itself may be reached by a link: /var/run is one."""

_Identity = tuple[int, int, int, int]


class _NoSpecError(Exception):
    """Why a runtime skips a file."""


class _Device(Struct):
    name: Annotated[str, Meta(pattern=rf"^(?:{DEVICE_NAME.pattern})\Z")]
    edits: Annotated[dict[str, Any], Meta(min_length=1)] = field(name="containerEdits")


class _Spec(Struct):
    """What the reference library would not load gives no GPU a name: a file of which half can be read counts as none."""

    version: str = field(name="cdiVersion")
    kind: Annotated[str, Meta(pattern=rf"^(?:{KIND.pattern})\Z")]
    devices: Annotated[list[_Device], Meta(min_length=1, max_length=4096)]


class CdiFiles:
    """`directories` in the order in which the runtime reads them; ours is written to the last."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.directories = tuple(dict.fromkeys(directories))
        self._known: dict[str, tuple[_Identity, SpecFile]] = {}

    @property
    def own_path(self) -> Path:
        return self.directories[-1] / OWN_SPEC_NAME

    def read(self) -> tuple[SpecFile, ...]:
        """Every spec file, the agent's own among them, by directory and name. A missing directory counts as empty; of two
        names for one directory (/run is often /var/run) the last counts."""
        # Read twice, every device would be named twice, and so be ambiguous.
        real = {os.path.realpath(directory): directory for directory in self.directories}
        files = [file for directory in real.values() for file in self._read_directory(directory)]
        paths = {file.path for file in files}
        self._known = {path: known for path, known in self._known.items() if path in paths}
        return tuple(files)

    def holds(self, content: bytes) -> bool:
        """Whether the agent's own spec is a regular file with exactly this content, readable for everybody."""
        try:
            return holds(None, self.own_path, content)
        except OSError:
            return False

    def write(self, content: bytes) -> None:
        """Puts the agent's own spec in place. Raises Unavailable; what was there stays then."""
        directory = self.directories[-1]
        with self._renamed("writing"):
            directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            remove_left_behind(directory)
            with opened(directory, None, _DIRECTORY) as opened_directory:
                # A link or a socket under our name is replaced; a directory may hold what somebody needs.
                status = status_of(opened_directory, OWN_SPEC_NAME)
                if status is not None and stat.S_ISDIR(status.st_mode):
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
                replace_file(opened_directory, OWN_SPEC_NAME, content)

    def remove(self) -> None:
        """Removes the agent's own spec, if it is there. Raises Unavailable."""
        with (
            self._renamed("removing"),
            suppress(FileNotFoundError, NotADirectoryError),
            opened(self.directories[-1], None, _DIRECTORY) as directory,
        ):
            os.unlink(OWN_SPEC_NAME, dir_fd=directory)

    def _renamed(self, what: str) -> AbstractContextManager[None]:
        remedy = (
            "containers that get GPUs by CDI do not start without it: make the directory writable, or choose another with"
            " --cdi.spec-directories, one that the runtime reads"
        )
        return os_errors_as(Unavailable, f"{what} the CDI spec {self.own_path} failed", otherwise=remedy)

    def _read_directory(self, directory: Path) -> list[SpecFile]:
        try:
            names = sorted(path.name for path in directory.iterdir() if path.suffix in (".json", ".yaml"))
        except FileNotFoundError:
            return []
        except OSError as e:
            return [SpecFile(path=str(directory), directory=str(directory), problem=f"cannot be listed: {e.strerror}")]
        files = [file for name in names[:MAX_FILES] if (file := self._read_file(directory, name)) is not None]
        # Said, not silent: a GPU that a later file names would get a second name of ours.
        if len(names) > MAX_FILES:
            problem = f"has {len(names)} files; the agent reads the first {MAX_FILES}"
            files.append(SpecFile(path=str(directory), directory=str(directory), problem=problem))
        return files

    def _read_file(self, directory: Path, name: str) -> SpecFile | None:
        """None for a directory."""
        path = directory / name
        try:
            if stat.S_ISDIR(path.stat().st_mode):
                return None
            identity, content = self._content(path)
            if content is None:
                return self._known[str(path)][1]
            kind, devices = _spec(content, is_json=name.endswith(".json"))
            file = SpecFile(path=str(path), directory=str(directory), kind=kind, devices=devices)
        except OSError as e:
            return SpecFile(path=str(path), directory=str(directory), problem=f"cannot be read: {e.strerror or e}")
        # Remembered too, by its identity: a bad file is not parsed again at each check.
        except _NoSpecError as e:
            file = SpecFile(path=str(path), directory=str(directory), problem=str(e))
        self._known[str(path)] = (identity, file)
        return file

    def _content(self, path: Path) -> tuple[_Identity, bytes | None]:
        """None where the file is the one that was read before."""
        with opened(path, None, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) as file:
            status = os.fstat(file)
            # Opened with O_NONBLOCK: to open a FIFO waits for its writer.
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            identity = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
            known = self._known.get(str(path))
            if known is not None and known[0] == identity:
                return identity, None
            content = b""
            while len(content) <= MAX_BYTES and (part := os.read(file, MAX_BYTES + 1 - len(content))):
                content += part
            return identity, content


def _spec(content: bytes, *, is_json: bool) -> tuple[str, tuple[str, ...]]:
    """Kind and device names; raises _NoSpecError for what the reference library would not load."""
    most = MAX_BYTES if is_json else MAX_YAML_BYTES
    # Before it is parsed, because the parser of YAML takes seconds for each mebibyte.
    if len(content) > most:
        raise _NoSpecError(f"is larger than {most} bytes, which the agent does not read")
    try:
        if is_json:
            spec = msgspec.json.decode(content, type=_Spec)
        else:
            from gpushare_agent.agent.delivery.plain_yaml import parse_yaml  # PyYAML: 7 ms of the start, 2 MiB

            raw = parse_yaml(content, _NoSpecError("uses YAML aliases, which no spec needs"))
            spec = msgspec.convert(raw, _Spec)
    except RecursionError as e:
        raise _NoSpecError("is nested too deeply") from e
    except ValidationError as e:
        raise _NoSpecError(f"is no CDI spec: {e}") from e
    except (DecodeError, ValueError, TypeError, OverflowError) as e:
        raise _NoSpecError(f"is no {'JSON' if is_json else 'YAML'}: {' '.join(str(e).split())[:200]}") from e
    names = tuple(device.name for device in spec.devices)
    if len(set(names)) < len(names):
        raise _NoSpecError("is no CDI spec: it lists a device twice")
    return spec.kind, names
