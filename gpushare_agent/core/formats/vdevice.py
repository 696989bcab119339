"""The files that the in-container library reads, and the forms of the names in a request. Pure.

The files themselves: agent/isolation/vdevice/files.py. Source of the formats: docs/reference/formats.md, section 5 (they
are the library's own C structs: native, little-endian, fixed sizes).

| offset | size | vcuda.config |
|---|---|---|
| 0 | 48 | pod UID, NUL padded |
| 48 | 4 | int32 limit: the elastic ceiling, else 0 |
| 52 | 4044 | reserved |
| 4096 | 4096 | container name, NUL padded |
| 8192 | 16 | bus ID, NUL padded |
| 8208 | 8 | uint64 memory, bytes |
| 8216 | 4 + 4 | int32 utilization in percent, int32 hard limit |
| 8224 | 4 + 4 | int32 driver version, major and minor |
| 8232 | 4 + 4 | int32 enable, padding |
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable

from msgspec import Struct

from gpushare_agent.core.model.directory_names import is_container_name, is_pod_uid
from gpushare_agent.core.model.errors import Corrupt
from gpushare_agent.core.model.names import PodUid

SOCKET_NAME = "vcuda.sock"
CONFIG_NAME = "vcuda.config"
PIDS_NAME = "pids.config"
GPUSHARE_CONFIG_NAME, USAGE_NAME, USAGE_BYTES = "gpushare.config", "usage", 131072
"""Only for isolation gpushare. The tenant writes `usage`."""

CONFIG_BYTES = 8240
MAX_PIDS = 1024
"""The size of the library's array."""

_CONFIG = struct.Struct("<48si4044x4096s16sQiiiii4x")
_MAX_INT32 = 2**31 - 1

_BUS_ID = re.compile(r"[0-9A-Fa-f:.]{0,15}")
_DOCKER_NAME = re.compile(
    r"/?k8s_([0-9a-z-]{1,63})_[0-9a-z.-]{1,253}_[0-9a-z-]{1,63}_([0-9A-Za-z-]{1,47})(?:_[0-9]{1,10})?"
)
"""dockershim's `/k8s_<container>_<pod>_<namespace>_<pod UID>_<attempt>`; no part can hold an underscore."""
MAX_DOCKER_NAME_BYTES = 512


class VDeviceConfig(Struct, frozen=True, kw_only=True):
    """The fields of vcuda.config. `limit` and `utilization` are percent of one GPU."""

    pod_uid: str
    container: str
    limit: int
    memory_bytes: int
    utilization: int
    hard_limit: bool
    driver: tuple[int, int]
    enable: bool
    bus_id: str = ""


def encode_config(config: VDeviceConfig) -> bytes:
    """The 8,240 bytes of vcuda.config.

    Raises:
        ValueError: a text is no such name, or a number does not fit its field.
    """
    for what, is_valid, value in (
        ("pod UID", is_pod_uid(config.pod_uid), config.pod_uid),
        ("container name", is_container_name(config.container), config.container),
        ("bus ID", is_bus_id(config.bus_id), config.bus_id),
    ):
        if not is_valid:
            raise ValueError(f"{value[:64]!r} is no {what} that vcuda.config can hold")
    for number in (config.limit, config.utilization, *config.driver):
        if not 0 <= number <= _MAX_INT32:
            raise ValueError(f"{number} does not fit an int32 field of vcuda.config")
    if not 0 <= config.memory_bytes < 2**64:
        raise ValueError(f"{config.memory_bytes} bytes of memory do not fit vcuda.config")
    return _CONFIG.pack(
        config.pod_uid.encode(),
        config.limit,
        config.container.encode(),
        config.bus_id.encode(),
        config.memory_bytes,
        config.utilization,
        int(config.hard_limit),
        *config.driver,
        int(config.enable),
    )


def decode_config(content: bytes) -> VDeviceConfig:
    """
    Raises:
        Corrupt: not 8,240 bytes, or a text in it is no text.
    """
    if len(content) != CONFIG_BYTES:
        raise Corrupt(f"{CONFIG_NAME} has {len(content)} bytes, not {CONFIG_BYTES}: it is not what the agent writes")
    uid, limit, container, bus_id, memory, utilization, hard, major, minor, enable = _CONFIG.unpack(content)
    try:
        texts = [field.split(b"\0", 1)[0].decode() for field in (uid, container, bus_id)]
    except UnicodeDecodeError as e:
        raise Corrupt(f"{CONFIG_NAME} holds a name that is no text: {e}") from e
    return VDeviceConfig(
        pod_uid=texts[0],
        container=texts[1],
        bus_id=texts[2],
        limit=limit,
        memory_bytes=memory,
        utilization=utilization,
        hard_limit=bool(hard),
        driver=(major, minor),
        enable=bool(enable),
    )


def encode_pids(pids: Iterable[int]) -> tuple[bytes, int]:
    """pids.config, and how many PIDs did not fit: int32, ascending (the library searches by bisection), the lowest 1,024.

    A 0 in cgroup.procs is a process of another PID namespace, without a PID here: it is left out.
    """
    known = sorted({pid for pid in pids if 0 < pid <= _MAX_INT32})
    listed = known[:MAX_PIDS]
    return struct.pack(f"<{len(listed)}i", *listed), len(known) - len(listed)


def decode_pids(content: bytes) -> tuple[int, ...]:
    """
    Raises:
        Corrupt: not whole numbers of four bytes, or more than 1,024 of them.
    """
    if len(content) % 4 or len(content) > 4 * MAX_PIDS:
        raise Corrupt(f"{PIDS_NAME} has {len(content)} bytes: it is not what the agent writes")
    return struct.unpack(f"<{len(content) // 4}i", content)


def is_bus_id(text: str) -> bool:
    return _BUS_ID.fullmatch(text) is not None


def split_container_name(text: str) -> tuple[str, PodUid | None] | None:
    """The container's name, and the pod UID where the name is of dockershim's form; None where it is neither form."""
    if is_container_name(text):
        return text, None
    # By length first: the text is a tenant's.
    found = _DOCKER_NAME.fullmatch(text) if len(text) <= MAX_DOCKER_NAME_BYTES else None
    if found is None or not is_container_name(found[1]) or not is_pod_uid(found[2]):
        return None
    return found[1], PodUid(found[2])
