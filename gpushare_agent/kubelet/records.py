"""The kubelet's records of device allocations: its PodResources API and its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpushare_agent.model.names import PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedContainer:
    """`devices` maps resource name to the IDs, the several entries of one resource merged."""

    name: str
    devices: Mapping[str, frozenset[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedPod:
    """A pod in a PodResources answer. Ordinary init containers are never listed; sidecars are, from 1.30 on."""

    namespace: str
    name: str
    containers: tuple[ListedContainer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """One entry of kubelet_internal_checkpoint: it has the UID but not the name, and may be stale."""

    pod_uid: PodUid
    container: str
    resource: str
    device_ids: frozenset[str]
