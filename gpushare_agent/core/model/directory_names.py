"""The names of pods and containers that directories may be named after. Pure."""

from __future__ import annotations

import re
from functools import lru_cache

from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.errors import Rejected

_POD_UID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}")
"""A UUID, or the 32 digits of a static pod's hash. Strict, because directories of such names are removed with their pods."""
_CONTAINER_NAME = re.compile(r"[0-9a-z](?:[0-9a-z-]{0,61}[0-9a-z])?")
"""A DNS label, as the API server demands of container names."""


def is_pod_uid(text: str) -> bool:
    return _POD_UID.fullmatch(text) is not None


def is_container_name(text: str) -> bool:
    return _CONTAINER_NAME.fullmatch(text) is not None


@lru_cache(maxsize=8192)
def is_nameable(key: ContainerKey) -> bool:
    """Whether a directory may be named after the pod and the container."""
    return is_pod_uid(key.pod_uid) and is_container_name(key.container)


def require_nameable(key: ContainerKey) -> None:
    """Raises Rejected."""
    if not is_nameable(key):
        raise Rejected(
            f"pod UID {key.pod_uid[:80]!r} and container {key.container[:80]!r} are no names of Kubernetes: "
            f"no directory is named after them"
        )
