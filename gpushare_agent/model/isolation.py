"""The names of isolations as settings and annotations spell them, and the device-list strategies.

What each does is in isolation/<name>/ and isolation/device_lists.py; settings/isolation_names.py has which there are.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

AUTO = "auto"
"""A value of the node's setting alone: the agent puts an isolation in its place at its start."""


def isolation_parts(name: str) -> tuple[str, ...]:
    """The two of a combination, which is spelled `A+B`, else itself alone."""
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


CorePolicy = Literal["default", "force", "disable"]
"""Whether HAMi-core limits compute, in its own words: isolation/hami_core/edits.py."""


class ResizeMode(StrEnum):
    """How far the annotation `gpushare-agent/resize` may change a running share."""

    DISABLED = "disabled"
    WITHIN_REQUEST = "within-request"
    FREE_CAPACITY = "free-capacity"
