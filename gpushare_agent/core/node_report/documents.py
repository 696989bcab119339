"""/api/v1/node and /api/v1/decisions: what the agent answers, and the check of what the commands read. docs/reference/api.md
has the format in words; SCHEMA grows when a reader of an older one would be misled.

`Any` is what the dashboard and programs read, and no command: it may be missing or of another shape, because an agent of
another version has other fields. What the agent writes of it is agent/observability/node_snapshot.py's; decisions are
model/decision_records.py as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, TypedDict, TypeVar, cast

from msgspec import Meta, convert

from gpushare_agent.core.kit.json_schema import UNREADABLE
from gpushare_agent.core.model.errors import Corrupt

SCHEMA: Literal[2] = 2
_LARGEST = 1 << 60
"""More than any amount here; a number of hundreds of digits cannot be divided or printed."""
Integer = Annotated[int, Meta(ge=-_LARGEST, le=_LARGEST)]
Number = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
Timestamp = Annotated[float, Meta(ge=0, lt=1 << 37)]
"""Seconds since the epoch, before the year 6400: what a datetime can hold."""
D = TypeVar("D")


class Cores(TypedDict):
    allocated: Integer
    capacity: Annotated[int, Meta(ge=0, le=_LARGEST)]


class Memory(TypedDict):
    allocated_bytes: Integer
    capacity_bytes: Integer


class Mig(TypedDict):
    label: str
    profile: NotRequired[Any]
    parent: NotRequired[Any]
    gpu_instance: NotRequired[Any]
    compute_instance: NotRequired[Any]


class GpuState(TypedDict):
    """`health_reason` is what is wrong with the GPU itself, None where that is not known; `cordoned` is why it is, None
    where it is not."""

    index: Integer
    uuid: str
    name: str
    is_healthy: bool
    health_reason: str | None
    cordoned: str | None


class ReportedGpu(GpuState):
    """One GPU as far as its node reports it to the cluster. `host_memory` is a HostMemory, or None."""

    host_memory: NotRequired[str | None]
    mig: NotRequired[Mig]
    cores: Cores
    memory: Memory


class GpuUsage(TypedDict, total=False):
    """model/usage.py has the full record."""

    sm_ratio: Number | None
    memory_used_bytes: Number | None
    temperature_celsius: Number | None
    power_watts: Number | None
    power_limit_watts: Number | None


class ContainerProcess(TypedDict):
    """`pid_in_container` and `command` are there with `?processes=true`, None where they are not known."""

    pid: Integer
    memory_bytes: Number | None
    sm_ratio: Number | None
    pid_in_container: NotRequired[Integer | None]
    command: NotRequired[str | None]


class UnattributedProcess(ContainerProcess):
    kind: str


class GpuDocument(ReportedGpu):
    minor: NotRequired[Any]
    bus_id: NotRequired[Any]
    numa: NotRequired[Any]
    usage: GpuUsage | None
    unattributed: Sequence[UnattributedProcess]


class MigInstance(TypedDict):
    """A GPU instance from slice `start` on. `state`: `in-use`, `idle` (made by the agent, to be used again), `foreign` (made
    by somebody else), or `broken` (without a compute instance)."""

    profile: str
    start: Integer
    size: Integer
    uuid: str
    state: str


class MigGpu(GpuState, total=False):
    """A GPU in MIG mode on which instances are made on demand. `fits` is how many more instances of each profile it could
    have, the largest profile first; `texts` say the same to people. To the cluster a node reports its state alone."""

    slices: Integer
    instances: Sequence[MigInstance]
    fits: Mapping[str, Integer]
    texts: Sequence[str]


class ContainerUsage(TypedDict, total=False):
    sm_ratio: Number | None
    sm_source: str
    memory_bytes: Number | None
    encoder_ratio: Any
    decoder_ratio: Any
    pids: Sequence[Integer]
    processes: Sequence[ContainerProcess]


class ContainerGpu(TypedDict):
    """`usage` is None before the first sample, and where the GPU does not list its processes."""

    index: Integer
    uuid: str
    cores: NotRequired[Any]
    memory_bytes: Integer
    usage: ContainerUsage | None


class Allocated(TypedDict):
    """What the kubelet allocated, whatever a live resize makes of it."""

    cores: Integer
    memory_bytes: Integer


class ContainerDocument(TypedDict):
    """For a claim, `pod` is the first of its pods, `container` the claim with its result."""

    namespace: str
    pod: str
    pod_uid: str
    container: str
    kind: NotRequired[Any]
    claim: NotRequired[Any]
    phase: str
    isolation: NotRequired[Any]
    kept: NotRequired[Any]
    not_limited: str
    is_whole: bool
    units: NotRequired[Any]
    cores: Integer
    core_limit: Integer | None
    memory_bytes: Integer
    allocated: Allocated
    gpus: Sequence[ContainerGpu]


class AgentDocument(TypedDict):
    version: NotRequired[Any]
    started_at: NotRequired[Any]
    is_ready: bool
    not_ready: Sequence[str]
    isolation: str
    isolation_reason: NotRequired[Any]
    isolations: NotRequired[Any]
    not_kept_texts: NotRequired[Any]
    driver: str
    driver_version: str
    sample_period_seconds: Number
    sampled_at: Timestamp | None


class NodeDocument(TypedDict):
    """/api/v1/node."""

    schema: Literal[2]
    node: str
    at: Timestamp
    agent: AgentDocument
    resources: NotRequired[Any]
    gpus: Sequence[GpuDocument]
    mig_gpus: Sequence[MigGpu]
    topology: NotRequired[Any]
    containers: Sequence[ContainerDocument]


Curve = Annotated[Sequence[Number | None], Meta(max_length=100_000)]


class GpuHistory(TypedDict, total=False):
    sm_ratio: Curve
    memory_used_bytes: Curve


class HistoryDocument(TypedDict):
    """/api/v1/history?only=gpus, by UUID, the oldest first."""

    step_seconds: Number
    gpus: Mapping[str, GpuHistory]


class Asked(TypedDict):
    cores: Integer
    memory_bytes: Integer
    hint: Sequence[Integer]
    must_gpus: Sequence[str]


class Candidate(TypedDict):
    index: Integer
    label: str
    is_healthy: bool
    free_cores: Integer
    free_memory_bytes: Integer
    total_memory_bytes: Integer
    is_chosen: bool
    verdict: str


class DecisionDocument(TypedDict):
    number: Integer
    at: Timestamp
    namespace: str
    pod: str
    pod_uid: str
    container: str
    resource: str
    outcome: str
    reason: str
    explanation: str
    policy: str
    gpus: Sequence[Integer]
    labels: Sequence[str]
    asked: Asked | None
    candidates: Sequence[Candidate]
    ignored: str
    not_limited: NotRequired[str]
    """Of the container as it is now; an agent's record has none."""


class DecisionsDocument(TypedDict):
    """/api/v1/decisions."""

    decisions: Sequence[DecisionDocument]


def check_document(shape: type[D], answer: Mapping[str, Any], agent: str) -> D:
    """The answer itself, with what the shape does not name: `-o json` prints it too. Raises Corrupt."""
    try:
        convert(answer, shape)
    except UNREADABLE as error:
        raise Corrupt(
            f"cannot use the answer of {agent}: {str(error)[:300]}; use the gpushare-agent of the agent's own version, and"
            " check that this is an agent's address"
        ) from error
    return cast(D, answer)
