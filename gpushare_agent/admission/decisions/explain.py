"""Why a container got this GPU, or none: every GPU of the node with its verdict. Pure, and decides nothing.

Read from the ledger as it was at the decision (admission/decisions/plan.py), so that the explanation cannot
differ from the decision. No state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.admission.decisions.identity import Target
from gpushare_agent.admission.decisions.ledger import (
    Ledger,
    Offer,
    Policy,
    must_gpus,
)
from gpushare_agent.admission.decisions.plan import Plan, plan_request
from gpushare_agent.admission.decisions.units import served_units
from gpushare_agent.model.decision_records import Asked, Candidate
from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.names import CORES_PER_GPU, MIB, GpuUuid
from gpushare_agent.model.requests import Request
from gpushare_agent.model.resources import ResourceKind, ResourceNames
from gpushare_agent.placement import GpuAccount
from gpushare_agent.placement.comparison import why_not_chosen
from gpushare_agent.placement.gpu_account import capacity_of

MAX_REASON_CHARS = 200
"""Of a driver's text in a verdict."""
CHOSEN = "chosen"
_NEVER = (RefusalReason.INVALID_REQUEST, RefusalReason.SHARING_DISABLED)


class Explanation(Struct, frozen=True, kw_only=True):
    """What a plan was made from. `policy` and `why` are empty for a refusal, whose own text says it."""

    asked: Asked
    candidates: tuple[Candidate, ...]
    policy: str = ""
    why: str = ""


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
    names, kind = policy.names, policy.names.part_kind(target.container)
    asked = Asked(
        cores=names.wanted(target.container, ResourceKind.VCORE),
        memory_bytes=names.memory_mib(target.container) * MIB,
        hint=hint,
        must_gpus=must_gpus(target, offer, ledger, names),
    )
    request: Request | Refused
    if kind is None:
        request = plan_request(target, offer, ledger, names, hint)
    else:
        request = Request(cores=CORES_PER_GPU * names.wanted(target.container, kind), must_gpus=asked.must_gpus)
    if isinstance(request, Refused) or (isinstance(outcome, Refused) and outcome.reason in _NEVER):
        return Explanation(asked=asked, candidates=())
    by_index = sorted(gpus, key=lambda gpu: gpu.index)
    verdict = _verdicts(target, request, ledger, names, by_index, outcome)
    candidates = []
    for gpu in by_index:
        free_mib, total_mib = gpu.memory_mib_of(request)
        candidates.append(
            Candidate(
                index=gpu.index,
                label=gpu.label,
                uuid=gpu.uuid,
                is_healthy=gpu.is_healthy,
                free_cores=gpu.free_cores,
                free_memory_bytes=free_mib * MIB,
                total_memory_bytes=total_mib * MIB,
                is_chosen=verdict[gpu.uuid] == CHOSEN,
                verdict=verdict[gpu.uuid],
            )
        )
    if isinstance(outcome, Refused):
        return Explanation(asked=asked, candidates=tuple(candidates))
    placed = outcome.placed
    return Explanation(asked=asked, candidates=tuple(candidates), policy=placed.policy, why=placed.explanation)


def _verdicts(
    target: Target,
    request: Request,
    ledger: Ledger,
    names: ResourceNames,
    gpus: Sequence[GpuAccount],
    outcome: Plan | Refused,
) -> dict[GpuUuid, str]:
    kind = names.part_kind(target.container)
    served = served_units(target, kind, ledger, names) if kind is not None else {}
    of_node = capacity_of(gpus).lack(request) if request.whole_gpus and kind is None else None
    reasons = {gpu.uuid: gpu.unhealthy_reason for gpu in ledger.inventory.gpus}
    found = {}
    for gpu in gpus:
        lack = gpu.lack(Request(part=served[gpu.uuid].terms.part) if gpu.uuid in served else request)
        if isinstance(outcome, Plan) and gpu.uuid in outcome.gpus:
            verdict = CHOSEN
        elif kind is not None and gpu.is_healthy and gpu.uuid not in served:
            verdict = "serves another resource"
        elif lack is not None:
            verdict = lack.of_gpu(_unhealthy(reasons[gpu.uuid]))
        elif isinstance(outcome, Plan):
            usable = [one for one in gpus if kind is None or one.uuid in served]
            verdict = why_not_chosen(gpu, request, outcome.placed, usable, ledger.inventory.topology)
        elif outcome.reason is RefusalReason.WRONG_GPUS and gpu.uuid not in request.must_gpus:
            verdict = "fits, but the kubelet's IDs name another"
        else:
            verdict = f"wholly free; {of_node.of_node()}" if of_node is not None else "fits"
        found[gpu.uuid] = verdict
    return found


def _unhealthy(reason: str) -> str:
    reported = reason[:MAX_REASON_CHARS] or "no reason given"
    return reported if reported.startswith("cordoned") else f"unhealthy: {reported}"


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
