"""The kubelet's records of device allocations: its PodResources API and its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from gpushare_agent.model.names import PodUid


class ListedContainer(Struct, frozen=True, kw_only=True):
    """`devices` maps resource name to the IDs, the several entries of one resource merged."""

    name: str
    devices: Mapping[str, frozenset[str]]


class ListedPod(Struct, frozen=True, kw_only=True):
    """A pod in a PodResources answer. Ordinary init containers are never listed; sidecars are, from 1.30 on."""

    namespace: str
    name: str
    containers: tuple[ListedContainer, ...]


class CheckpointEntry(Struct, frozen=True, kw_only=True):
    """One entry of kubelet_internal_checkpoint: it has the UID but not the name, and may be stale."""

    pod_uid: PodUid
    container: str
    resource: str
    device_ids: frozenset[str]
