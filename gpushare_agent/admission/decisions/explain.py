"""Why a container got this GPU, or none: every GPU of the node with its verdict. Pure, and decides nothing.

Read from the ledger as it was at the decision (admission/decisions/plan.py), so that the explanation cannot
differ from the decision. No state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from gpushare_agent.admission.decisions.identity import Target
from gpushare_agent.admission.decisions.ledger import (
    Ledger,
    Offer,
    Policy,
    must_gpus,
)
from gpushare_agent.admission.decisions.plan import Plan
from gpushare_agent.admission.decisions.reuse import effective_request
from gpushare_agent.admission.decisions.units import served_units
from gpushare_agent.model.decision_records import Asked, Candidate
from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.names import CORES_PER_GPU, MIB, GpuUuid
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.model.topology import Topology
from gpushare_agent.model.units import ServedUnits
from gpushare_agent.placement import GpuAccount, memory_share
from gpushare_agent.placement.link import EXACT_GPUS, choose_linked, set_cost
from gpushare_agent.placement.place import is_equal_fragment
from gpushare_agent.placement.request import memory_text

MAX_REASON_CHARS = 200
"""Of a driver's text in a verdict."""
_OF_EQUALS = "of equals the lowest indexes are chosen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a plan was made from. `policy` and `why` are empty for a refusal, whose own text says it."""

    asked: Asked
    candidates: tuple[Candidate, ...]
    policy: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """What one GPU must have. `gpus` is how many whole ones are wanted, 0 for a share. `is_units`: memory is asked for in
    gpu-mem units, else in blocks."""

    cores: int
    memory_bytes: int
    gpus: int
    is_units: bool
    blocks_together: int = 0
    """Memory blocks that the whole GPUs must have together."""
    served: Mapping[GpuUuid, ServedUnits] | None = None
    """Where a unit under one of NVIDIA's names is wanted: the GPUs that serve it, and on which terms."""

    def free_bytes(self, gpu: GpuAccount) -> int:
        return gpu.free_units * gpu.unit_mib * MIB if self.is_units else gpu.free_blocks * gpu.block_mib * MIB

    def total_bytes(self, gpu: GpuAccount) -> int:
        return gpu.total_units * gpu.unit_mib * MIB if self.is_units else gpu.total_blocks * gpu.block_mib * MIB


def explain(
    target: Target,
    offer: Offer,
    ledger: Ledger,
    policy: Policy,
    hint: tuple[int, ...],
    gpus: Sequence[GpuAccount],
    outcome: Plan | Refused,
) -> Explanation:
    """The verdict on every one of `gpus`, in order of index; none where the request makes no sense on any GPU."""
    need = _need(target, policy.names, ledger)
    chosen = outcome.gpus if isinstance(outcome, Plan) else ()
    reasons = {gpu.uuid: gpu.unhealthy_reason for gpu in ledger.inventory.gpus}
    others = (ResourceKind.GPU_MEM, ResourceKind.GPU)
    bound_by = next((kind for kind in others if policy.names.wanted(target.container, kind)), ResourceKind.VCORE)
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
    fitting = [gpu for gpu in gpus if gpu.uuid in chosen or not _lack(gpu, need, reasons[gpu.uuid])]
    candidates = tuple(
        Candidate(
            index=gpu.index,
            label=gpu.label,
            uuid=gpu.uuid,
            is_healthy=gpu.is_healthy,
            free_cores=gpu.free_cores,
            free_memory_bytes=need.free_bytes(gpu),
            total_memory_bytes=need.total_bytes(gpu),
            is_chosen=gpu.uuid in chosen,
            verdict="chosen"
            if gpu.uuid in chosen
            else f"{policy.max_shares_of_gpu} sharing containers, the most that one GPU serves"
            if gpu.is_full
            else _lack(gpu, need, reasons[gpu.uuid])
            or _why_not(gpu, need, outcome, must, fitting, ledger.inventory.topology),
        )
        for gpu in sorted(gpus, key=lambda gpu: gpu.index)
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
    """`GPU 0: 20 cores short; GPU 1: …`, for an Event. Empty where not one GPU fits into `most_chars`."""
    text = ""
    for candidate in candidates:
        more = f"{'; ' if text else ''}GPU {candidate.label}: {candidate.verdict}"
        if len(text) + len(more) > most_chars:
            return f"{text}; …" if text else ""
        text += more
    return text


def _need(target: Target, names: ResourceNames, ledger: Ledger) -> _Need:
    if names.wanted(target.container, ResourceKind.GPU):
        served = served_units(ledger, names, names.name_in(target.container, ResourceKind.GPU))
        return _Need(cores=0, memory_bytes=0, gpus=0, is_units=False, served=served)
    if names.wanted(target.container, ResourceKind.GPU_MEM):
        units = memory_share.effective_request(target.pod, target.container, names)
        return _Need(cores=0, memory_bytes=units * names.gpu_mem_unit_mib * MIB, gpus=0, is_units=True)
    cores = names.wanted(target.container, ResourceKind.VCORE)
    blocks = names.wanted(target.container, ResourceKind.VMEMORY)
    effective = effective_request(target.pod, target.container, names)
    if not isinstance(effective, Refused):
        cores, blocks = effective.cores, effective.blocks
    if whole := cores // CORES_PER_GPU:
        return _Need(cores=CORES_PER_GPU, memory_bytes=0, gpus=whole, is_units=False, blocks_together=blocks)
    return _Need(cores=cores, memory_bytes=blocks * names.memory_block_mib * MIB, gpus=0, is_units=False)


def _lack(gpu: GpuAccount, need: _Need, reason: str) -> str:
    """Why the GPU cannot be allocated, empty where it can."""
    if not gpu.is_healthy:
        reported = reason[:MAX_REASON_CHARS] or "no reason given"
        return reported if reported.startswith("cordoned") else f"unhealthy: {reported}"
    if need.served is not None:
        return _lack_of_units(gpu, need.served.get(gpu.uuid))
    if need.gpus:
        if gpu.is_instance:
            return "a MIG instance, and no whole GPU"
        if gpu.is_free:
            return ""
        free = memory_text(need.free_bytes(gpu) // MIB)
        return f"in use: {gpu.free_cores} cores and {free} are free, and all of both are needed"
    lacks = []
    if gpu.free_cores < need.cores:
        lacks.append(f"{need.cores - gpu.free_cores} cores")
    if need.free_bytes(gpu) < need.memory_bytes:
        lacks.append(memory_text((need.memory_bytes - need.free_bytes(gpu)) // MIB))
    return f"{' and '.join(lacks)} short" if lacks else ""


def _lack_of_units(gpu: GpuAccount, served: ServedUnits | None) -> str:
    if served is None:
        return "serves another resource"
    if gpu.free_units_of(served.terms.of):
        return ""
    free = f"{gpu.free_cores} cores and {memory_text(gpu.free_blocks * gpu.block_mib)} are free"
    return f"in use: {free}, and {'all' if served.terms.is_whole else f'1/{served.terms.of}'} of both are needed"


def _why_not(
    gpu: GpuAccount,
    need: _Need,
    outcome: Plan | Refused,
    must: Collection[GpuUuid],
    fitting: Sequence[GpuAccount],
    topology: Topology,
) -> str:
    """Why a GPU that fits was not chosen. `fitting` are all that fit."""
    if isinstance(outcome, Refused):
        return "wholly free, but not enough GPUs are" if need.gpus else "fits"
    if must and gpu.uuid not in must:
        return "fits, but the kubelet's IDs name another"
    chosen = [one.index for one in fitting if one.uuid in outcome.gpus]
    match outcome.placed.policy:
        case "hint":
            return "fits, but the scheduler chose another"
        case "fragment" if is_equal_fragment(topology.root, {one.index for one in fitting}, gpu.index, *chosen):
            return f"free, in a branch broken up as much: {_OF_EQUALS}"
        case "fragment":
            return "free, but in a branch that is broken up less"
        case "link":
            return _why_not_linked(gpu, need, fitting, chosen, topology)
        case _:
            return "fits, but the policy prefers the chosen one"


def _why_not_linked(
    gpu: GpuAccount, need: _Need, fitting: Sequence[GpuAccount], chosen: Sequence[int], topology: Topology
) -> str:
    """By the cheapest set with the GPU: it may share no other GPU with the chosen set."""
    if len(fitting) > EXACT_GPUS:  # one search for each GPU: 5 ms in all for 16, and no truth beyond
        return "free, but not in the cheapest set that was tried"
    best = choose_linked(topology.links, fitting, len(chosen), blocks=need.blocks_together, must=frozenset({gpu.index}))
    cost = set_cost(topology.links, chosen)
    if best is None:
        return "free, but no set with it has enough memory"
    if best.cost <= cost:
        return f"free, at the same link cost: {_OF_EQUALS}"
    return f"free, but at a higher link cost: {best.cost} with it, {cost} without"
