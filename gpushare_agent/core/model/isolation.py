"""Values of isolations and device lists that settings, drivers and isolations share: names, CDI names, limits of a cgroup.

What each isolation does is in agent/isolation/<name>/ and agent/delivery/device_lists.py; settings/isolation_names.py lists
them. Sources: the specification of the Container Device Interface and what its reference library accepts, because every
common runtime gives containers devices through that library (a name is `<kind>=<device>`, a kind `<vendor>/<class>`); for
the driver's limits nvml.h of CUDA 13.4, `nvmlSetMemoryLimits_v1_t`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.names import ISOLATION_ANNOTATION, GpuUuid

AUTO = "auto"
"""A value of the node's setting alone: the agent replaces it by an isolation at its start."""
NO_ISOLATION = "none"
"""The isolation that enforces nothing."""


def isolation_parts(name: str) -> tuple[str, ...]:
    """The two parts of a combination, which is spelled `A+B`; else the isolation itself."""
    return tuple(name.split("+"))


class DeviceListStrategy(StrEnum):
    """How a container gets its GPUs' devices; several may be combined."""

    ENVVAR = "envvar"
    VOLUME_MOUNTS = "volume-mounts"
    DEVICE_NODES = "device-nodes"
    CDI_ANNOTATIONS = "cdi-annotations"
    CDI_CRI = "cdi-cri"


class Sharing(StrEnum):
    """What limits a replica of a GPU, in the words of the setting nvidia.sharing: nothing, MPS, the node's isolation."""

    TIME_SLICING = "time-slicing"
    MPS = "mps"
    SHARES = "shares"

    @property
    def isolation(self) -> str:
        """What limits such a replica; empty where it is the node's isolation, or the pod's."""
        return {Sharing.TIME_SLICING: "none", Sharing.MPS: "mps"}.get(self, "")


class ResizeMode(StrEnum):
    """How far the annotation `gpushare-agent/resize` may change a running share."""

    DISABLED = "disabled"
    WITHIN_REQUEST = "within-request"
    FREE_CAPACITY = "free-capacity"


OWN_SPEC_NAME = "gpushare-agent.json"
"""The agent's own file, in the last spec directory; no other program's may have this name there."""

KIND = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?/[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
DEVICE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")


class SpecFile(Struct, frozen=True, kw_only=True):
    """One file of a spec directory. `problem` is why a runtime ignores it (then kind and devices are empty)."""

    path: str
    directory: str
    kind: str = ""
    devices: tuple[str, ...] = ()
    problem: str = ""


class MemoryLimit(Struct, frozen=True, kw_only=True):
    """How much of a GPU's memory the processes in a cgroup and below may have. `cgroup` is its directory, in cgroup v2."""

    gpu: GpuUuid
    cgroup: Path
    limit_bytes: int


class LimitOutcome(Struct, frozen=True, kw_only=True):
    """`problem` says why the limit is not in force and what to do, empty where it is. `is_gone`: the cgroup has ended.
    `has_no_controller`: the kernel's dmem controller is not enabled for this cgroup, so the driver takes no limit for it.
    `used_bytes` is what its processes have; a limit below it takes nothing from them."""

    problem: str = ""
    used_bytes: int = 0
    is_gone: bool = False
    has_no_controller: bool = False


class MemoryLimiter(Protocol):
    """The GPUs' driver."""

    async def check_memory_limits(self, cgroup: Path, *, may_set: bool) -> None:
        """Raises AgentError with the remedy where limits cannot be had here."""

    async def keep_memory_limits(self, desired: Sequence[MemoryLimit], *, may_set: bool) -> list[LimitOutcome]:
        """Reads, sets what differs where `may_set`; one outcome for each of `desired`. Raises Unavailable."""


_SHOWN_CHARS = 40


def choose_isolation(annotations: Mapping[str, str], node: str, allowed: Collection[str]) -> str | Refused:
    """An annotation selects only among the isolations that the node's settings allow. Any other value is refused, not
    ignored: the pod was written for another isolation."""
    text = annotations.get(ISOLATION_ANNOTATION)
    if text is None:
        return node
    known = sorted({node, *allowed})
    if text in known:
        return text
    # The value is a tenant's, of any length, and goes into an Event.
    shown = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
    return Refused(
        reason=RefusalReason.INVALID_REQUEST,
        detail=f"the annotation {ISOLATION_ANNOTATION} is {shown!r}, but this node allows {', '.join(known)}. Name one of"
        f" these, leave the annotation out for {node}, or have the setting isolations_allowed changed.",
    )
