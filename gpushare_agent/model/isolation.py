"""The isolations and device-list strategies by name, as settings and annotations spell them.

What each does is in decisions/isolation/ and isolation/decisions/device_lists.py. A new isolation is one file there and
one line here.
"""

from __future__ import annotations

from enum import StrEnum


class IsolationName(StrEnum):
    """What makes a share real inside a container."""

    VCUDA = "vcuda"
    MPS = "mps"
    HAMI_CORE = "hami-core"
    NONE = "none"


class DeviceListStrategy(StrEnum):
    """How a container gets its GPUs' devices; several may be combined."""

    ENVVAR = "envvar"
    VOLUME_MOUNTS = "volume-mounts"
    DEVICE_NODES = "device-nodes"
    CDI_ANNOTATIONS = "cdi-annotations"
    CDI_CRI = "cdi-cri"


class ResizeMode(StrEnum):
    """How far the annotation `gpushare-agent/resize` may change a running share."""

    DISABLED = "disabled"
    WITHIN_REQUEST = "within-request"
    FREE_CAPACITY = "free-capacity"
