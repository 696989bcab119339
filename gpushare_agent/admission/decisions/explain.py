"""Why a container got this GPU, or none: every GPU of the node with its verdict. Pure, and decides nothing.

Read from the ledger as they were when the decision fell (admission/decisions/plan.py), so that the explanation cannot
differ from the decision. State owned: none; admission/admission.py keeps the result in admission/decision_log.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from gpushare_agent.admission.decisions import memory_share
from gpushare_agent.admission.decisions.identity import Target
from gpushare_agent.admission.decisions.ledger import (
    Ledger,
    Offer,
    Policy,
    full_of_shares,
    gpu_states,
    memory_states,
    must_gpus,
)
from gpushare_agent.admission.decisions.plan import Plan
from gpushare_agent.admission.decisions.reuse import effective_request
from gpushare_agent.model.decision_records import Asked, Candidate
from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.names import CORES_PER_GPU, DeviceId, GpuUuid
from gpushare_agent.model.resources import ResourceKind, ResourceNames

MIB = 1024 * 1024
MAX_REASON_CHARS = 200
"""Of a driver's words in a verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a plan was made from. `policy` and `why` are empty for a refusal, whose own text says it."""

    asked: Asked
    candidates: tuple[Candidate, ...]
    policy: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """A GPU as the container could have had it."""

    index: int
    uuid: GpuUuid
    is_healthy: bool
    free_cores: int
    free_bytes: int
    total_bytes: int
    is_free: bool
    """Wholly: nobody has any of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """What one GPU must have. `cards` is how many whole ones are wanted, 0 for a share."""

    cores: int
    memory_bytes: int
    gpus: int


def explain(
    target: Target,
    offer: Offer,
    free: Sequence[DeviceId],
    ledger: Ledger,
    policy: Policy,
    hint: tuple[int, ...],
    outcome: Plan | Refused,
) -> Explanation:
    """The verdict on every GPU, in order of index; none where the request makes no sense on any GPU."""
    need, rooms = _need_and_rooms(target, offer, free, ledger, policy)
    chosen = outcome.gpus if isinstance(outcome, Plan) else ()
    full = full_of_shares(target, ledger, policy)
    reasons = {gpu.uuid: gpu.unhealthy_reason for gpu in ledger.inventory.gpus}
    bound_by = (
        ResourceKind.GPU_MEM if policy.names.wanted(target.container, ResourceKind.GPU_MEM) else ResourceKind.VCORE
    )
    must = must_gpus(target, offer, ledger, bound_by)
    asked = Asked(
        cores=policy.names.wanted(target.container, ResourceKind.VCORE),
        memory_bytes=policy.names.memory_mib(target.container) * MIB,
        hint=hint,
        must_gpus=must,
    )
    if isinstance(outcome, Refused) and outcome.reason in (
        RefusalReason.INVALID_REQUEST,
        RefusalReason.SHARING_DISABLED,
    ):
        return Explanation(asked=asked, candidates=())
    candidates = tuple(
        Candidate(
            index=room.index,
            uuid=room.uuid,
            is_healthy=room.is_healthy,
            free_cores=room.free_cores,
            free_memory_bytes=room.free_bytes,
            total_memory_bytes=room.total_bytes,
            is_chosen=room.uuid in chosen,
            verdict="chosen"
            if room.uuid in chosen
            else f"{policy.max_shares_of_gpu} sharing containers, the most that one GPU serves"
            if room.uuid in full
            else _lack(room, need, reasons[room.uuid]) or _why_not(room, need, outcome, must),
        )
        for room in sorted(rooms, key=lambda room: room.index)
    )
    if isinstance(outcome, Refused):
        return Explanation(asked=asked, candidates=candidates)
    placed = outcome.placed
    return Explanation(asked=asked, candidates=candidates, policy=placed.policy, why=placed.explanation)


def with_gpus(explanation: Explanation, gpus: Collection[GpuUuid]) -> Explanation:
    """The same where the container got other GPUs than planned, which the kubelet's IDs then name, or none after all."""
    if {c.uuid for c in explanation.candidates if c.is_chosen} == set(gpus):
        return explanation
    candidates = tuple(
        replace(
            candidate,
            is_chosen=candidate.uuid in gpus,
            verdict="chosen: the kubelet allocated its IDs"
            if candidate.uuid in gpus
            else ("planned, but the kubelet allocated other IDs" if gpus else "it was planned here")
            if candidate.is_chosen
            else candidate.verdict,
        )
        for candidate in explanation.candidates
    )
    return replace(explanation, candidates=candidates)


def in_short(candidates: Sequence[Candidate], most_chars: int) -> str:
    """`card 0: 20 cores short; GPU 1: …`, for an Event. Empty where not one GPU fits into `most_chars`."""
    text = ""
    for candidate in candidates:
        more = f"{'; ' if text else ''}GPU {candidate.index}: {candidate.verdict}"
        if len(text) + len(more) > most_chars:
            return f"{text}; …" if text else ""
        text += more
    return text


def _need_and_rooms(
    target: Target, offer: Offer, free: Sequence[DeviceId], ledger: Ledger, policy: Policy
) -> tuple[_Need, list[_Room]]:
    names = policy.names
    if names.wanted(target.container, ResourceKind.GPU_MEM):
        units = memory_share.effective_request(target.pod, target.container, names)
        return _Need(cores=0, memory_bytes=units * names.gpu_mem_unit_mib * MIB, gpus=0), [
            _memory_room(state, names) for state in memory_states(target, ledger, policy)
        ]
    effective = effective_request(target.pod, target.container, names)
    cores = names.wanted(target.container, ResourceKind.VCORE) if isinstance(effective, Refused) else effective.cores
    blocks = (
        names.wanted(target.container, ResourceKind.VMEMORY) if isinstance(effective, Refused) else effective.blocks
    )
    block = names.memory_block_mib * MIB
    states = gpu_states(target, ledger, policy, offered=free if offer.kind is ResourceKind.VCORE else None)
    whole = cores // CORES_PER_GPU
    return _Need(cores=CORES_PER_GPU if whole else cores, memory_bytes=0 if whole else blocks * block, gpus=whole), [
        _Room(
            index=state.index,
            uuid=state.uuid,
            is_healthy=state.healthy,
            free_cores=state.free_cores,
            free_bytes=state.free_blocks * block,
            total_bytes=state.total_blocks * block,
            is_free=state.is_free,
        )
        for state in states
    ]


def _memory_room(state: memory_share.MemoryState, names: ResourceNames) -> _Room:
    unit = names.gpu_mem_unit_mib * MIB
    is_free = state.free_units == state.total_units
    return _Room(
        index=state.index,
        uuid=state.uuid,
        is_healthy=state.is_healthy,
        free_cores=0,
        free_bytes=state.free_units * unit,
        total_bytes=state.total_units * unit,
        is_free=is_free,
    )


def _lack(room: _Room, need: _Need, reason: str) -> str:
    """Why the GPU cannot be given, empty where it can."""
    if not room.is_healthy:
        reported = reason[:MAX_REASON_CHARS] or "no reason given"
        return reported if reported.startswith("cordoned") else f"unhealthy: {reported}"
    if need.gpus:
        if room.is_free:
            return ""
        return f"in use: {room.free_cores} cores and {room.free_bytes // MIB} MiB are free, and it must be all"
    lacks = []
    if room.free_cores < need.cores:
        lacks.append(f"{need.cores - room.free_cores} cores")
    if room.free_bytes < need.memory_bytes:
        lacks.append(f"{(need.memory_bytes - room.free_bytes) // MIB} MiB")
    return f"{' and '.join(lacks)} short" if lacks else ""


def _why_not(room: _Room, need: _Need, outcome: Plan | Refused, must: Collection[GpuUuid]) -> str:
    """The GPU has room, and yet was not chosen."""
    if isinstance(outcome, Refused):
        return "wholly free, but not enough GPUs are" if need.gpus else "has room"
    if must and room.uuid not in must:
        return "has room, but the kubelet's IDs name another"
    match outcome.placed.policy:
        case "hint":
            return "has room, but the scheduler chose another"
        case "fragment":
            return "free, but in a branch that is broken up less"
        case "link":
            return "free, but at a higher link cost"
        case _:
            return "has room, but the policy prefers the chosen one"
