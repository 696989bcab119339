"""The isolations and device-list strategies by name, as settings and annotations spell them.

What each does is in isolation/<name>/ and isolation/device_lists.py. A new isolation is a package there and a line here.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal


class IsolationName(StrEnum):
    """What makes a share real inside a container. `A+driver` is A for compute, with the driver's own limit of memory."""

    VCUDA = "vcuda"
    MPS = "mps"
    HAMI_CORE = "hami-core"
    DRIVER = "driver"
    HAMI_CORE_DRIVER = "hami-core+driver"
    MPS_DRIVER = "mps+driver"
    NONE = "none"
    AUTO = "auto"
    """A value of the node's setting alone: the agent puts another one in its place at its start."""

    @property
    def parts(self) -> tuple[IsolationName, ...]:
        """The two of a combination, else itself alone."""
        return tuple(map(IsolationName, self.value.split("+")))


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


CorePolicy = Literal["default", "force", "disable"]
"""Whether HAMi-core limits compute, in its own words: isolation/hami_core/edits.py."""


class ResizeMode(StrEnum):
    """How far the annotation `gpushare-agent/resize` may change a running share."""

    DISABLED = "disabled"
    WITHIN_REQUEST = "within-request"
    FREE_CAPACITY = "free-capacity"
