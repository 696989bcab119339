"""Records of decisions about containers and their reasons, for `explain`, the dashboard and an Event's text.

A record is a value; agent/admission/outcomes.py keeps the last ones. Sizes are bytes, `at` is seconds since the epoch.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from gpushare_agent.core.model.names import GpuUuid, PodUid

CLAIMS_RESOURCE = "resourceclaims.resource.k8s.io"
"""Stands for a resource's name where a ResourceClaim was decided about."""


class Outcome(StrEnum):
    ALLOCATED = "allocated"
    REFUSED = "refused"


class Candidate(Struct, frozen=True, kw_only=True):
    """One GPU as the container could have had it. `label` is its name for people, as Gpu has it; `verdict` is a short text:
    `chosen`, `fits`, or what it lacks."""

    index: int
    label: str
    uuid: GpuUuid
    is_healthy: bool
    free_cores: int
    free_memory_bytes: int
    total_memory_bytes: int
    is_chosen: bool
    verdict: str


class Asked(Struct, frozen=True, kw_only=True):
    """The container's request, and what bound the choice: the scheduler's hint, GPUs that could not be avoided."""

    cores: int
    memory_bytes: int
    hint: tuple[int, ...] = ()
    must_gpus: tuple[GpuUuid, ...] = ()


class DecisionRecord(Struct, frozen=True, kw_only=True):
    """One container's decision. `number` grows by one with each. `pod_uid` and names are empty where the pod could not be
    identified. `policy` is share, fragment, link, hint, must-include, memory or scheduler, empty for a refusal.
    `container` is `claim:<name>` where it is about a ResourceClaim."""

    number: int = 0
    at: float = 0.0
    namespace: str = ""
    pod: str = ""
    pod_uid: PodUid | str = ""
    container: str = ""
    resource: str
    """The resource of the call in which it was decided."""
    outcome: Outcome
    reason: str = ""
    """RefusalReason's value, empty where it was allocated."""
    explanation: str
    """Why this GPU, or the refusal's whole text."""
    policy: str = ""
    gpus: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    """The same GPUs for people: a MIG instance is `0:1`."""
    asked: Asked | None = None
    candidates: tuple[Candidate, ...] = ()
    ignored: str = ""
    """A text about the pod's annotations that nothing reads though they look like one of the agent's."""
