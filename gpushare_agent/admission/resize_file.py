"""resize.state_file: the shares whose size was changed while they run, over a restart of the agent.

    {"version": 1, "shares": [{"pod_uid": "…", "container": "main", "gpu": "GPU-…", "resource": "vmemory",
                               "allocated": "30,8", "target": "50,24", "booked": "50,24", "instance": "…"}]}

Sizes are cores and memory units; the fields are those of `ResizedShare`. Written before a share grows, so that no restart
gives the same capacity away twice. A file that is not this format is set aside as `<name>.corrupt`, and every share then has
what the kubelet allocated, in the ledger and by its isolation. Owns the file, no state in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import structlog

from gpushare_agent.kit.state_file import StateFile
from gpushare_agent.model.allocations import ContainerKey, ResizedShare, ShareSize
from gpushare_agent.model.errors import Corrupt
from gpushare_agent.model.names import CORES_PER_GPU, GpuUuid, PodUid, is_container_id
from gpushare_agent.model.resources import KINDS, Measure

log = structlog.get_logger(__name__)

VERSION = 1
MAX_SHARES = 1024
"""Such a file is below the megabyte that is read. Further shares are not resized."""
_NAME = re.compile(r"[0-9A-Za-z:._-]{1,128}")
_MEMORY_KINDS = tuple(kind for kind in KINDS if kind.measure in (Measure.BLOCKS, Measure.UNITS))
_SIZE = re.compile(r"([0-9]{1,7}),([0-9]{1,7})")


class ResizeFile:
    def __init__(self, path: Path) -> None:
        self._file = StateFile(path, "the resized shares", on_corrupt=_report_corrupt)

    async def load(self) -> tuple[ResizedShare, ...]:
        """What was saved; nothing where there is no file, or one that had to be set aside. Raises Unavailable."""
        return await self._file.load(_parsed, tuple)

    async def save(self, shares: Iterable[ResizedShare]) -> None:
        """Replaces the file, whole and on the disk when this returns. Raises Unavailable."""
        kept = sorted(shares, key=lambda share: share.key)
        await self._file.save(lambda: {"version": VERSION, "shares": [_document(share) for share in kept]})


def _report_corrupt(why: str, kept_as: Path) -> None:
    log.error(
        "resize_state_corrupt",
        why=why,
        kept_as=str(kept_as),
        then="every share gets what the kubelet allocated; those whose pods ask for another size are resized anew",
    )


def _document(share: ResizedShare) -> dict[str, str]:
    sizes = {"allocated": share.allocated, "target": share.target, "booked": share.booked}
    return {
        "pod_uid": share.key.pod_uid,
        "container": share.key.container,
        "gpu": share.gpu,
        "resource": share.kind.value,
        **{name: f"{size.cores},{size.memory}" for name, size in sizes.items()},
        "instance": share.instance,
    }


def _parsed(raw: Any) -> tuple[ResizedShare, ...]:
    """Raises Corrupt."""
    raw_shares = raw.get("shares") if isinstance(raw, dict) else None
    if not isinstance(raw_shares, list) or len(raw_shares) > MAX_SHARES or raw.get("version") != VERSION:
        raise Corrupt(f"it is no object of version {VERSION} with a list of at most {MAX_SHARES} shares")
    found = {share.key: share for share in map(_share, raw_shares)}
    if len(found) < len(raw_shares):
        raise Corrupt("a container is in it twice")
    return tuple(found.values())


def _share(raw: Any) -> ResizedShare:
    fields = raw if isinstance(raw, dict) else {}
    instance = fields.get("instance")
    kind = next((kind for kind in _MEMORY_KINDS if kind.value == fields.get("resource")), None)
    target, booked, allocated = (_size(fields.get(name)) for name in ("target", "booked", "allocated"))
    if kind is None:
        raise Corrupt("a share in it has no memory")
    if not (isinstance(instance, str) and (not instance or is_container_id(instance))):
        raise Corrupt("the container ID of a share in it is none")
    if booked.at_least(target) != booked or not target.memory:
        raise Corrupt("a share in it has more than is booked, or nothing")
    return ResizedShare(
        key=ContainerKey(PodUid(_name(fields.get("pod_uid"))), _name(fields.get("container"))),
        gpu=GpuUuid(_name(fields.get("gpu"))),
        kind=kind,
        allocated=allocated,
        target=target,
        booked=booked,
        instance=instance,
    )


def _name(raw: Any) -> str:
    if not isinstance(raw, str) or not _NAME.fullmatch(raw):
        raise Corrupt("a name in it is none")
    return raw


def _size(raw: Any) -> ShareSize:
    match = _SIZE.fullmatch(raw) if isinstance(raw, str) else None
    if match is None or int(match[1]) >= CORES_PER_GPU:
        raise Corrupt("a size in it is none of a share")
    return ShareSize(cores=int(match[1]), memory=int(match[2]))
