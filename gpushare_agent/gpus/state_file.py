"""health.state_file: which GPUs are cordoned and which wait for a reset, over a restart of the agent.

    {"version": 1, "boot_id": "…", "cards": [{"uuid": "GPU-…", "cordoned": "why", "waits_for_reset": "what happened"}]}

with one or both of the last two for each GPU, sorted by UUID. A reboot resets the GPUs: the waits of another boot are
dropped, the cordons stay. A file that is not this format is set aside as `<name>.corrupt`. Every step is in a daemon thread
and bounded in time. Owns the file, no state in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog

from gpushare_agent.gpus.decisions.values import NOTHING_SAVED, SavedHealth
from gpushare_agent.kit.state_file import StateFile
from gpushare_agent.model.errors import Corrupt
from gpushare_agent.model.names import GpuUuid

log = structlog.get_logger(__name__)

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
VERSION = 1
MAX_GPUS = 1024
MAX_TEXT_CHARS = 1024


class HealthStateFile:
    """`boot_id` is the kernel's file with the identity of this boot."""

    def __init__(self, path: Path, *, boot_id: Path = BOOT_ID) -> None:
        self._boot_id = boot_id
        self._file = StateFile(path, "the GPUs' saved health", on_corrupt=_report_corrupt)

    async def load(self) -> SavedHealth:
        """What was saved; nothing where there is no file, or one that had to be set aside. Raises Unavailable."""
        return await self._file.load(self._parsed, lambda: NOTHING_SAVED)

    async def save(self, saved: SavedHealth) -> None:
        """Replaces the file, whole and on the disk when this returns. Raises Unavailable."""
        await self._file.save(lambda: _document(saved, self._this_boot()))

    def _parsed(self, raw: Any) -> SavedHealth:
        """Raises Corrupt."""
        saved, saved_in = _saved(raw)
        boot_id = self._this_boot()
        if not saved.waits or not boot_id or saved_in in ("", boot_id):
            return saved
        log.info("health_waits_dropped", gpus=sorted(saved.waits), why="the node was rebooted since")
        return SavedHealth(cordons=saved.cordons, waits={})

    def _this_boot(self) -> str:
        """Empty where it cannot be read; then no wait is dropped."""
        try:
            return self._boot_id.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return ""


def _report_corrupt(why: str, kept_as: Path) -> None:
    log.error(
        "health_state_corrupt",
        why=why,
        kept_as=str(kept_as),
        then="cordons and waits for a reset are forgotten; cordon the GPUs again that need it",
    )


def _saved(raw: Any) -> tuple[SavedHealth, str]:
    """What was saved, and in which boot (empty: not known). Raises Corrupt."""
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


def _document(saved: SavedHealth, boot_id: str) -> dict[str, Any]:
    gpus: list[dict[str, str]] = []
    for uuid in sorted({*saved.cordons, *saved.waits})[:MAX_GPUS]:
        gpu = {"uuid": str(uuid)}
        for name, texts in (("cordoned", saved.cordons), ("waits_for_reset", saved.waits)):
            if uuid in texts:
                gpu[name] = texts[uuid][:MAX_TEXT_CHARS]
        gpus.append(gpu)
    return {"version": VERSION, "boot_id": boot_id, "cards": gpus}
