"""Errors, named for the caller's next move, and the reasons that users read. Adapters rename foreign errors, once.

A refusal that a decision reaches is a value (`Refused`), not an exception.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from msgspec import Struct


class AgentError(Exception):
    """Base of every error that this project raises on purpose. Its text is for a person."""


class Unavailable(AgentError):  # noqa: N818 - named for the caller's next move, see CONTRIBUTING.md
    """The other side cannot answer now: try again later."""


class DriverLost(Unavailable):
    """The GPUs' driver refuses this process: it answers again, or a new container must ask it. Not one that hangs."""


class NotFound(AgentError):  # noqa: N818
    """The named thing does not exist."""


class Conflict(AgentError):  # noqa: N818
    """The state moved on (HTTP 409, 410): read again, then decide again."""


class Rejected(AgentError):  # noqa: N818
    """The other side understood and refused: do not retry."""


class Corrupt(AgentError):  # noqa: N818
    """A file or message is not in its format: stop, keep it for a person."""


class StartupError(AgentError):
    """The agent cannot start; the text names what to check. Ends in exit code 1."""


_FULL = "free space or inodes on its file system"
_FILE_REMEDIES = {
    errno.EMFILE: "the agent's open files are used up: /proc/PID/fd shows which; raise LimitNOFILE of the container runtime",
    errno.ENFILE: "the node's open files are used up: find who has them, or raise the sysctl fs.file-max",
    errno.ENOSPC: _FULL,
    errno.EDQUOT: f"{_FULL}, whose quota is used up",
    errno.EROFS: "its file system is mounted read-only: mount it writable (the kernel's log says if an error made it so), or"
    " choose a directory on another",
    errno.EIO: "its disk or device has an error: see the kernel's log",
    errno.ENOMEM: "the node or the agent's container has no memory left",
}


def file_remedy(error: BaseException, otherwise: str) -> str:
    """What to do after an error at a file, which this one is or was caused by; `otherwise` if its number does not say
    more."""
    if isinstance(error, OSError) and error.errno in _FILE_REMEDIES:
        return _FILE_REMEDIES[error.errno]
    return otherwise if error.__cause__ is None else file_remedy(error.__cause__, otherwise)


@contextmanager
def os_errors_as(kind: type[AgentError], what: str, *, otherwise: str = "") -> Iterator[None]:
    """Renames an OSError: `what`, the system's reason, and with `otherwise` what to do, as `file_remedy` says it."""
    try:
        yield
    except OSError as e:
        remedy = f"; {file_remedy(e, otherwise)}" if otherwise else ""
        raise kind(f"{what}: {e.strerror or e}{remedy}") from e


def may_pass(error: OSError) -> bool:
    """Whether the file may be usable later: the node lacks something, or its disk fails."""
    return error.errno in _FILE_REMEDIES


class RefusalReason(StrEnum):
    """Why a container gets no GPU. The values are metric labels and Event reasons: stable, CamelCase."""

    INVALID_REQUEST = "InvalidRequest"
    NO_HEALTHY_GPU = "NoHealthyGPU"
    NOT_ENOUGH_CORES = "NotEnoughCores"
    NOT_ENOUGH_MEMORY = "NotEnoughMemory"
    FRAGMENTED = "Fragmented"
    SHARING_DISABLED = "SharingDisabled"
    UNKNOWN_DEVICE = "UnknownDevice"
    DEVICE_IN_USE = "DeviceInUse"
    WRONG_GPUS = "WrongGPUs"
    POD_UNKNOWN = "PodUnknown"
    POD_AMBIGUOUS = "PodAmbiguous"
    NOT_READY = "NotReady"
    QUOTA_EXCEEDED = "QuotaExceeded"
    WRONG_POOL = "WrongPool"


TRANSIENT_REASONS = frozenset(
    {RefusalReason.POD_UNKNOWN, RefusalReason.POD_AMBIGUOUS, RefusalReason.NOT_READY, RefusalReason.DEVICE_IN_USE}
)
"""Refusals that a retry may remedy without any change of the pod (gRPC UNAVAILABLE)."""


class Refused(Struct, frozen=True):
    """A refusal that a decision reached: the reason, and a text with what was requested, what is free, and what to do."""

    reason: RefusalReason
    detail: str


class NodeEventReason(StrEnum):
    """Reasons that `kubectl get events` shows: stable, CamelCase."""

    GPU_UNHEALTHY = "GPUUnhealthy"
    GPU_RECOVERED = "GPURecovered"
    GPU_CORDONED = "GPUCordoned"
    GPU_UNCORDONED = "GPUUncordoned"
    CONFIGURATION_REFUSED = "NodeConfigurationRefused"
    ISOLATION_PROBE_FAILED = "IsolationProbeFailed"

    @property
    def type(self) -> str:
        return "Warning" if self in _WARNINGS else "Normal"


# A cordon is an operator's own act, and a recovery is good news: neither is a warning.
_WARNINGS = (
    NodeEventReason.GPU_UNHEALTHY,
    NodeEventReason.CONFIGURATION_REFUSED,
    NodeEventReason.ISOLATION_PROBE_FAILED,
)
