"""The input files of simulated GPUs, JSON: read at every poll, written by a person, a test or the sandbox.

A file that is absent, no regular file, too large or malformed is ignored, with one warning in the log. State owned: the
warning that was logged last. The formats are in faults.py and usage.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog

from gpushare_agent.kit import regular_file
from gpushare_agent.kit.report_once import ReportOnce
from gpushare_agent.model.errors import Unavailable

log = structlog.get_logger(__name__)

MAX_FILE_BYTES = 4 * 2**20
"""Some 200 containers with 200 processes each."""
_READ_TIMEOUT_S = 5.0

T = TypeVar("T")


class SimulatedInput(Generic[T]):
    """`parse` gets the file's text and raises ValueError; `default` stands for an absent or ignored file."""

    def __init__(self, path: Path | None, *, name: str, parse: Callable[[str], T], default: T) -> None:
        self._path = path
        self._name = name
        self._parse = parse
        self._default = default
        self._ignored = ReportOnce()

    async def read(self) -> tuple[T, bool]:
        """The file's content, and whether it could be read; an absent file counts as read.

        Raises:
            Unavailable: it cannot be read in time.
        """
        if self._path is None:
            return self._default, True
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                return await asyncio.to_thread(self._read, self._path)
        except TimeoutError as error:
            text = f"reading the simulated GPUs' {self._name} file {self._path} took longer than {_READ_TIMEOUT_S:g} s"
            raise Unavailable(f"{text}; it is read again at the next poll. Check its file system.") from error

    def _read(self, path: Path) -> tuple[T, bool]:
        try:
            return self._parse(read_regular(path)), True
        except FileNotFoundError:
            return self._default, True
        except (OSError, ValueError, RecursionError) as error:
            if self._ignored.is_new(str(error)):
                log.warning(f"{self._name}_file_ignored", path=str(path), reason=str(error))
            return self._default, False


def read_regular(path: Path) -> str:
    """The file's text. Raises OSError, also for a pipe, which would block its reader for ever; ValueError for what is too
    large or no text."""
    content = regular_file.read_regular(path, MAX_FILE_BYTES + 1, follow=True)  # a ConfigMap's files are links
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    return content.decode()


def whole_number(entry: dict[str, Any], field: str, low: int, high: int, default: int | None = None) -> int:
    """Raises ValueError, naming the field; a bool is no number."""
    value = entry.get(field, default)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f'"{field}" must be a whole number from {low} to {high}, not {value!r:.40}')
    return value


def ratio(entry: dict[str, Any], field: str) -> float | None:
    """None where it is not given. Raises ValueError, naming the field."""
    value = entry.get(field)
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError(f'"{field}" must be a number from 0 to 1, not {value!r:.40}')
    return float(value)


def entries(raw: dict[str, Any], field: str, most: int) -> list[dict[str, Any]]:
    """A list of objects, empty where the field is not given. Raises ValueError."""
    found = raw.get(field, [])
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise ValueError(f'"{field}" must be a list of objects')
    if len(found) > most:
        raise ValueError(f'"{field}" has {len(found)} entries, {most} are possible')
    return found
