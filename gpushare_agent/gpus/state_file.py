"""health.state_file: which GPUs are cordoned and which wait for a reset, over a restart of the agent.

    {"version": 1, "boot_id": "…", "cards": [{"uuid": "GPU-…", "cordoned": "why", "waits_for_reset": "what happened"}]}

with one or both of the last two for each GPU, sorted by UUID. A reboot resets the GPUs: the waits of another boot are
dropped, the cordons stay. A file that is not this format is set aside as `<name>.corrupt`. Every step is in a daemon thread
and bounded in time. Owns the file, no state in memory.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from gpushare_agent.gpus.decisions.values import NOTHING_SAVED, SavedHealth
from gpushare_agent.kit.daemon_thread import DaemonThread
from gpushare_agent.model.errors import Corrupt, Unavailable
from gpushare_agent.model.names import GpuUuid

log = structlog.get_logger(__name__)

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
VERSION = 1
MAX_BYTES = 1 << 20
MAX_GPUS = 1024
MAX_TEXT_CHARS = 1024
READ_TIMEOUT_S = 2.0
WRITE_TIMEOUT_S = 5.0


class HealthStateFile:
    """`boot_id` is the kernel's file with the identity of this boot."""

    def __init__(self, path: Path, *, boot_id: Path = BOOT_ID) -> None:
        self._path = path
        self._boot_id = boot_id
        self._thread = DaemonThread("health-state", advice=f"Check the file system of {path}.")

    async def load(self) -> SavedHealth:
        """What was saved; nothing where there is no file, or one that had to be set aside. Raises Unavailable."""
        what = f"reading the GPUs' saved health from {self._path}"
        return await self._thread.call(self._load, what, READ_TIMEOUT_S)

    async def save(self, saved: SavedHealth) -> None:
        """Replaces the file, whole and on the disk when this returns. Raises Unavailable."""
        what = f"saving the GPUs' health to {self._path}"
        await self._thread.call(partial(self._save, saved), what, WRITE_TIMEOUT_S)

    def _load(self) -> SavedHealth:
        try:
            content = _content(self._path)
            saved, saved_in = _parsed(content) if content is not None else (NOTHING_SAVED, "")
        except OSError as e:
            raise Unavailable(f"{self._path} cannot be read: {e.strerror or e}") from e
        except Corrupt as e:
            self._set_aside(str(e))
            return NOTHING_SAVED
        boot_id = self._this_boot()
        if not saved.waits or not boot_id or saved_in in ("", boot_id):
            return saved
        log.info("health_waits_dropped", gpus=sorted(saved.waits), why="the node was rebooted since")
        return SavedHealth(cordons=saved.cordons, waits={})

    def _set_aside(self, why: str) -> None:
        aside = self._path.with_name(self._path.name + ".corrupt")
        try:
            self._path.replace(aside)
        except OSError as e:
            raise Unavailable(f"{self._path} is not usable ({why}) and cannot be set aside: {e.strerror}") from e
        log.error(
            "health_state_corrupt",
            why=why,
            kept_as=str(aside),
            then="cordons and waits for a reset are forgotten; cordon the GPUs again that need it",
        )

    def _save(self, saved: SavedHealth) -> None:
        content = _rendered(saved, self._this_boot())
        new = self._path.with_name(self._path.name + ".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(new, content)
            new.replace(self._path)
            _sync_directory(self._path.parent)
        except OSError as e:
            with suppress(OSError):
                new.unlink()
            raise Unavailable(f"{self._path} cannot be written: {e.strerror or e}") from e

    def _this_boot(self) -> str:
        """Empty where it cannot be read; then no wait is dropped."""
        try:
            return self._boot_id.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return ""


def _content(path: Path) -> bytes | None:
    """None where there is no file. Raises Corrupt where it is too large or no file at all."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Corrupt("it is no regular file")
        content = os.read(descriptor, MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MAX_BYTES:
        raise Corrupt(f"it has more than {MAX_BYTES} bytes")
    return content


def _parsed(content: bytes) -> tuple[SavedHealth, str]:
    """What was saved, and in which boot (empty: not known). Raises Corrupt."""
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError) as e:
        raise Corrupt(f"it is no JSON: {e}") from e
    raw_gpus = raw.get("cards") if isinstance(raw, dict) else None
    if not isinstance(raw_gpus, list) or len(raw_gpus) > MAX_GPUS or raw.get("version") != VERSION:
        raise Corrupt(f"it is no object of version {VERSION} with a list of at most {MAX_GPUS} GPUs")
    cordons: dict[GpuUuid, str] = {}
    waits: dict[GpuUuid, str] = {}
    for raw_gpu in raw_gpus:
        uuid = _text(raw_gpu, "uuid")
        if not uuid:
            raise Corrupt("a GPU in it has no UUID")
        for name, found in (("cordoned", cordons), ("waits_for_reset", waits)):
            if (text := _text(raw_gpu, name)) is not None:
                found[GpuUuid(uuid)] = text
    return SavedHealth(cordons=cordons, waits=waits), _text(raw, "boot_id") or ""


def _text(raw: Any, name: str) -> str | None:
    if not isinstance(raw, dict):
        raise Corrupt("a GPU in it is no object")
    value = raw.get(name)
    if value is not None and (not isinstance(value, str) or len(value) > MAX_TEXT_CHARS):
        raise Corrupt(f"{name!r} in it is no text of at most {MAX_TEXT_CHARS} characters")
    return value


def _rendered(saved: SavedHealth, boot_id: str) -> bytes:
    gpus: list[dict[str, str]] = []
    for uuid in sorted({*saved.cordons, *saved.waits})[:MAX_GPUS]:
        gpu = {"uuid": str(uuid)}
        for name, texts in (("cordoned", saved.cordons), ("waits_for_reset", saved.waits)):
            if uuid in texts:
                gpu[name] = texts[uuid][:MAX_TEXT_CHARS]
        gpus.append(gpu)
    return json.dumps({"version": VERSION, "boot_id": boot_id, "cards": gpus}, indent=2).encode() + b"\n"


def _write_whole(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
