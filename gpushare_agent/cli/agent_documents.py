"""What the commands read of an agent's answers, and the check of it. The whole format is docs/reference/api.md.

What no command reads may be missing or of another shape: an agent of another version has other fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from gpushare_agent.model.errors import Corrupt

_LARGEST = 1 << 60
"""More than any amount here; a number of hundreds of digits cannot be divided or printed."""
Integer = Annotated[int, Field(ge=-_LARGEST, le=_LARGEST)]
Number = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST, allow_inf_nan=False)]
Timestamp = Annotated[float, Field(ge=0, lt=1 << 37, allow_inf_nan=False)]
"""Seconds since the epoch, before the year 6400: what a datetime can hold."""
D = TypeVar("D")
_KEYS_OF_SCHEMA_1 = {"cards": "gpus", "must_cards": "must_gpus", "strangers": "unattributed"}
_REASONS_OF_SCHEMA_1 = {"NoHealthyCard": "NoHealthyGPU", "WrongCards": "WrongGPUs"}
_MAX_DEPTH = 40
"""Of the node's document: the branches of its topology are nested."""


class Cores(TypedDict):
    allocated: Integer
    capacity: Annotated[int, Field(ge=0, le=_LARGEST)]


class Memory(TypedDict):
    allocated_bytes: Integer
    capacity_bytes: Integer


class Mig(TypedDict):
    label: str


class GpuUsage(TypedDict, total=False):
    sm_ratio: Number | None
    memory_used_bytes: Number | None
    temperature_celsius: Number | None
    power_watts: Number | None
    power_limit_watts: Number | None


class UnattributedProcess(TypedDict):
    pid: Integer
    kind: str
    memory_bytes: Number | None
    sm_ratio: Number | None


class GpuDocument(TypedDict):
    index: Integer
    uuid: str
    name: str
    mig: NotRequired[Mig]
    is_healthy: bool
    health_reason: str
    cordoned: str | None
    cores: Cores
    memory: Memory
    usage: GpuUsage | None
    unattributed: list[UnattributedProcess]


class ContainerUsage(TypedDict, total=False):
    sm_ratio: Number | None
    sm_source: str
    memory_bytes: Number | None
    pids: list[Integer]


class ContainerGpu(TypedDict):
    index: Integer
    uuid: str
    memory_bytes: Integer
    usage: ContainerUsage | None


class ContainerDocument(TypedDict):
    namespace: str
    pod: str
    container: str
    phase: str
    is_whole: bool
    cores: Integer
    core_limit: Integer | None
    memory_bytes: Integer
    gpus: list[ContainerGpu]


class AgentDocument(TypedDict):
    is_ready: bool
    not_ready: list[str]
    isolation: str
    driver: str
    driver_version: str
    sample_period_seconds: Number
    sampled_at: Timestamp | None


class BranchDocument(TypedDict):
    kind: str
    gpus: list[Integer]
    children: list[BranchDocument]


class TopologyDocument(TypedDict):
    links: list[list[str]]
    tree: BranchDocument


class NodeDocument(TypedDict):
    """/api/v1/node."""

    schema: Literal[2]
    node: str
    at: Timestamp
    agent: AgentDocument
    gpus: list[GpuDocument]
    topology: TopologyDocument
    containers: list[ContainerDocument]


class AskedDocument(TypedDict):
    cores: Integer
    memory_bytes: Integer
    hint: list[Integer]
    must_gpus: list[str]


class CandidateDocument(TypedDict):
    index: Integer
    label: NotRequired[str]
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
    gpus: list[Integer]
    labels: NotRequired[list[str]]
    asked: AskedDocument | None
    candidates: list[CandidateDocument]
    ignored: NotRequired[str]


class DecisionsDocument(TypedDict):
    """/api/v1/decisions."""

    decisions: list[DecisionDocument]


NODE: TypeAdapter[NodeDocument] = TypeAdapter(NodeDocument)
DECISIONS: TypeAdapter[DecisionsDocument] = TypeAdapter(DecisionsDocument)


def check_document(shape: TypeAdapter[D], answer: Any, agent: str) -> D:
    """The answer, with what the shape does not name; of schema 1 in the words of schema 2. Raises Corrupt."""
    answer = _in_schema_2(answer)
    try:
        # Strict, for JSON has types: lax reading would take "1" and true for numbers.
        shape.validate_python(answer, strict=True)
    except ValidationError as error:
        # One is enough: an answer of another program has hundreds.
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise Corrupt(
            f"cannot use the answer of {agent}: {'.'.join(map(str, first['loc']))[:200]}: {first['msg']}; use the"
            " gpushare-agent of the agent's own version, and check that this is an agent's address"
        ) from error
    # The answer itself: `-o json` prints also the fields that this program does not know.
    document: D = answer
    return document


def _in_schema_2(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """What earlier builds answer, until 2.0: remove with the release after it. Decisions have no number of a schema."""
    if not depth:
        return value  # far deeper than any shape: the check says what is wrong
    if isinstance(value, list):
        return [_in_schema_2(one, depth - 1) for one in value]
    if not isinstance(value, dict):
        return value
    found = {_KEYS_OF_SCHEMA_1.get(key, key): _in_schema_2(one, depth - 1) for key, one in value.items()}
    # Only 1 is translated: of a later schema the check must say that this program is too old.
    if found.get("schema") == 1:
        found["schema"] = 2
    if isinstance(reason := found.get("reason"), str):
        found["reason"] = _REASONS_OF_SCHEMA_1.get(reason, reason)
    return found
