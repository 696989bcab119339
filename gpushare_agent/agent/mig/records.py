"""mig.json in state_directory: the instances that were made here, over a restart of the agent.

    {"version": 1, "boot_id": "…", "instances": [{"place": {"parent": "GPU-…", "profile": 19, "start": 6},
     "profile": "1g.10gb", "state": "ready", "gi": 7, "uuid": "MIG-…"}]}

It is written before the driver is called, so an instance that is not in it is another's. A reboot ends all
instances. State owned: the file, by kit/state_file.py, which also says what becomes of one that is not this format.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal

import structlog
from msgspec import Meta, Struct

from gpushare_agent.agent.mig.decisions.plan import MadeInstance
from gpushare_agent.agent.runtime.machine import BOOT_ID, this_boot
from gpushare_agent.core.kit.state_file import StateFile

log = structlog.get_logger(__name__)

_LOST = "instances made on demand count as made by hand, but for those of prepared claims; remove them by hand"


class _Document(Struct, kw_only=True):
    version: Literal[1]
    boot_id: str = ""
    instances: Annotated[list[MadeInstance], Meta(max_length=4096)]


class InstanceRecords:
    """`boot_id` is the kernel's file with the identity of this boot."""

    def __init__(self, path: Path, *, boot_id: Path = BOOT_ID) -> None:
        self._boot_id = boot_id
        self._file = StateFile(path, "MIG instances' records", _Document, event="mig_records_corrupt", lost=_LOST)

    async def load(self) -> list[MadeInstance]:
        """Those of this boot; none without a file. Raises Unavailable."""
        return await self._file.load(self._read, list)

    async def save(self, made: Collection[MadeInstance]) -> None:
        """Replaces the file, whole and on the disk when this returns. Raises Unavailable."""
        await self._file.save(lambda: self._document(made))

    def _read(self, document: _Document) -> list[MadeInstance]:
        boot_id = this_boot(self._boot_id)
        if boot_id and document.boot_id and document.boot_id != boot_id:
            log.info("mig_records_dropped", instances=len(document.instances), why="the node was rebooted since")
            return []
        return document.instances

    def _document(self, made: Collection[MadeInstance]) -> _Document:
        return _Document(version=1, boot_id=this_boot(self._boot_id), instances=list(made))
