"""The input of every isolation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpushare_agent.model.gpus import Card
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import ContainerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationPaths:
    """Directories on the host: of the virtual manager, and of the driver's files for shares and for whole cards (None:
    no driver directory is configured, and none is mounted)."""

    virtual_manager: Path
    shared_driver: Path | None = None
    whole_driver: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationRequest:
    """One container and what it holds. `memory_mib` is its share, 0 where it has whole cards and asked for none.

    `container.name` and `pod_uid` come from the API server, which admits only DNS labels and UUIDs; the virtual manager
    checks them again before they reach a path.
    """

    pod_uid: PodUid
    container: ContainerSpec
    cards: tuple[Card, ...]
    cores: int
    memory_mib: int
    is_whole: bool
    paths: IsolationPaths
