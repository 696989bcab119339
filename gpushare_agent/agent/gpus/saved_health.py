"""health.json in state_directory: which GPUs are cordoned and which wait for a reset, over a restart of the agent.

    {"version": 1, "boot_id": "…", "gpus": [{"uuid": "GPU-…", "cordoned": "why", "waits_for_reset": "what happened"}]}

with one or both of the last two for each GPU, sorted by UUID. A reboot resets the GPUs: the waits of another boot are
dropped, the cordons stay. A file that is not this format is set aside as kit/state_file.py says. Every step is in a daemon
thread and bounded in time. `HealthStateFile` owns the file; `HealthStateWriter`, which writes as soon as something
changes, owns what is in it and why the last write failed.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import structlog
from msgspec import Meta, Struct

from gpushare_agent.agent.gpus.inventory import GpuInventoryState
from gpushare_agent.agent.runtime.machine import BOOT_ID, this_boot
from gpushare_agent.core.kit.backoff import Backoff
from gpushare_agent.core.kit.state_file import StateFile
from gpushare_agent.core.kit.supervision import Reconciler, ReportOnce
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.model.gpu_health import NOTHING_SAVED, SavedHealth
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.names import GpuUuid

log = structlog.get_logger(__name__)

MAX_GPUS = 1024
MAX_TEXT_CHARS = 1024


_Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]


_LOST = "cordons and waits for a reset are forgotten; cordon the GPUs again that need it"


class _Gpu(Struct, kw_only=True, omit_defaults=True):
    uuid: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARS)]
    cordoned: _Text | None = None
    waits_for_reset: _Text | None = None


class _Document(Struct, kw_only=True):
    version: Literal[1]
    boot_id: _Text | None = None
    gpus: Annotated[list[_Gpu], Meta(max_length=MAX_GPUS)]


class HealthStateFile:
    """`boot_id` is the kernel's file with the identity of this boot."""

    def __init__(self, path: Path, *, boot_id: Path = BOOT_ID) -> None:
        self._boot_id = boot_id
        self._file = StateFile(path, "the GPUs' saved health", _Document, event="health_state_corrupt", lost=_LOST)

    async def load(self) -> SavedHealth:
        """What was saved; nothing where there is no file, nor a good copy of one that was set aside. Raises Unavailable."""
        return await self._file.load(self._read, lambda: NOTHING_SAVED)

    async def save(self, saved: SavedHealth) -> None:
        """Replaces the file, whole and on the disk when this returns. Raises Unavailable."""
        await self._file.save(lambda: self._document(saved))

    def _read(self, document: _Document) -> SavedHealth:
        saved = SavedHealth(
            cordons={GpuUuid(gpu.uuid): gpu.cordoned for gpu in document.gpus if gpu.cordoned is not None},
            waits={GpuUuid(gpu.uuid): gpu.waits_for_reset for gpu in document.gpus if gpu.waits_for_reset is not None},
        )
        boot_id = this_boot(self._boot_id)
        # Without a boot ID to compare nothing is dropped: a GPU that needs a reset must not come back by a missing file.
        if not saved.waits or not boot_id or (document.boot_id or boot_id) == boot_id:
            return saved
        log.info("health_waits_dropped", gpus=sorted(saved.waits), why="the node was rebooted since")
        return SavedHealth(cordons=saved.cordons, waits={})

    def _document(self, saved: SavedHealth) -> _Document:
        # Cut to what the schema takes: a text that is too long must not cost all of the file at the next start.
        gpus = [
            _Gpu(uuid=uuid, cordoned=_cut(saved.cordons.get(uuid)), waits_for_reset=_cut(saved.waits.get(uuid)))
            # Sorted: an unchanged state is the same text.
            for uuid in sorted({*saved.cordons, *saved.waits})[:MAX_GPUS]
        ]
        return _Document(version=1, boot_id=this_boot(self._boot_id), gpus=gpus)


def _cut(text: str | None) -> str | None:
    return None if text is None else text[:MAX_TEXT_CHARS]


NO_FILE = "state_directory is empty"
RETRY = Backoff(base_s=5.0, cap_s=300.0)


class HealthStateWriter:
    """`restore` before the GPUs are read, and again when another agent that served has ended (`is_newest`); then `run`
    once, which restores where that failed. Subscribe `inventory_changed` to the inventory. Without a `file` nothing is
    saved."""

    def __init__(self, inventory: GpuInventoryState, file: HealthStateFile | None, *, backoff: Backoff = RETRY) -> None:
        self._inventory = inventory
        self._file = file
        self._backoff = backoff
        self._written: SavedHealth | None = None
        self._failure = ReportOnce()
        self._lock = asyncio.Lock()
        self._reconciler = Reconciler()
        self._failures = 0

    async def restore(self, *, is_newest: bool = False) -> str:
        """Returns the error where the file cannot be read now, else empty."""
        if self._file is None:
            return ""
        try:
            saved = await self._file.load()
        except Unavailable as e:
            if self._failure.is_new("cannot be read"):
                then = "cordons and waits for a reset of an earlier run are unknown until it is read again"
                log.warning("health_state_not_read", error=str(e), then=then)
            if is_newest:  # what was read before is no longer all of it
                self._written, self._inventory.is_restored = None, False
            self._reconciler.request()
            return str(e)
        self._written = saved
        self._inventory.restore(saved, is_newest=is_newest)
        if saved != NOTHING_SAVED:
            log.info("health_restored", cordoned=sorted(saved.cordons), wait_for_reset=sorted(saved.waits))
        return ""

    async def save_now(self) -> str:
        """Writes the state if it differs from the file; the error where that failed, else empty."""
        if self._file is None:
            return NO_FILE
        # The command's save and the loop's must not write at once: the older could end last.
        async with self._lock:
            # Not over what nobody has read.
            if self._written is None and (unread := await self.restore()):
                return unread
            saved = self._inventory.saved
            # Changes of GPUs come by the hundred; of them few concern what is saved.
            if saved == self._written:
                return ""
            try:
                await self._file.save(saved)
            except Unavailable as e:
                # One text for all errors: a full disk alternates between several.
                if self._failure.is_new("cannot be written"):
                    then = "cordons and waits for a reset last until the agent ends; the write is retried"
                    log.warning("health_state_not_saved", error=str(e), then=then)
                return str(e)
            self._written = saved
            if self._failure.is_over():
                log.info("health_state_saved_again")
            return ""

    async def run(self) -> NoReturn:
        """Saves what changes, until cancelled."""
        await self._reconciler.run(self._save, lambda: None)

    async def _save(self) -> None:
        # Without a file there is nothing to try again.
        self._failures = self._failures + 1 if await self.save_now() and self._file is not None else 0
        if self._failures:
            # In the step: requests of meanwhile are answered by the retry.
            await asyncio.sleep(self._backoff.delay_s(self._failures))
            self._reconciler.request()

    def inventory_changed(self, inventory: GpuInventory) -> None:
        if self._inventory.saved != self._written:
            self._reconciler.request()
