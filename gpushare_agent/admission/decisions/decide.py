"""What a container gets, and why: its GPU and IDs, what is put into it, and every GPU of the node with its verdict. Pure.

The choice is plan.py's, the edits are container_edits.py's. The verdicts are read from the ledger as it was at the decision,
so that they cannot differ from it. No state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from msgspec.structs import replace

from gpushare_agent.admission.decisions.container_edits import EditPolicy, edits_for, isolation_of, units_asked
from gpushare_agent.admission.decisions.identity import Target
from gpushare_agent.admission.decisions.ledger import Ledger, Offer, Policy, free_ids, must_gpus, offer_accounts
from gpushare_agent.admission.decisions.plan import Decision, hinted_gpus, plan, plan_request, served_units
from gpushare_agent.model.allocations import ContainerEdits
from gpushare_agent.model.decision_records import Asked, Candidate
from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.isolation import Sharing
from gpushare_agent.model.names import CORES_PER_GPU, MIB, GpuUuid
from gpushare_agent.model.resources import Request, ResourceKind, ResourceNames, request_of
from gpushare_agent.placement import GpuAccount
from gpushare_agent.placement.gpu_account import capacity_of
from gpushare_agent.placement.place import why_not_chosen

MAX_REASON_CHARS = 200
"""Of a driver's text in a verdict."""
CHOSEN = "chosen"
_NEVER = (RefusalReason.INVALID_REQUEST, RefusalReason.SHARING_DISABLED)


def decide(
    target: Target,
    offer: Offer,
    ledger: Ledger,
    policy: Policy,
    edits: EditPolicy,
    unavailable_reason: Callable[[str], str],
) -> Decision:
    """What the container gets of the offer. Refused also where its isolation cannot carry it out, which is known now: the
    admission ends before anything is allocated. `unavailable_reason` is why an isolation cannot be had on the node now,
    empty where it can."""
    free = free_ids(target, offer.kind, offer.available, ledger)
    gpus = offer_accounts(target, offer, free, ledger, policy)
    outcome = plan(target, offer, free=free, ledger=ledger, policy=policy, gpus=gpus)
    if isinstance(outcome, Decision):
        made = edits_for_ids(target, outcome.gpus, outcome.ids, ledger, edits)
        if not isinstance(made, Refused):
            made = _unavailable(target, outcome, policy, edits, unavailable_reason) or made
        outcome = made if isinstance(made, Refused) else replace(outcome, edits=made)
    decision = explain(target, offer, ledger, policy, gpus, outcome)
    return replace(decision, target=target, size=offer.size, taken_ids=len(offer.available) - len(free))


def edits_for_ids(
    target: Target, gpus: Collection[GpuUuid], ids: Sequence[str], ledger: Ledger, edits: EditPolicy
) -> ContainerEdits | Refused:
    """What is put into a container that has these IDs on these GPUs; `ids` count where they are NVIDIA's units."""
    known = ledger.inventory.by_uuid()
    units = units_asked(target.container, ids, edits.names)
    return edits_for(target.pod, target.container, [known[gpu] for gpu in gpus if gpu in known], edits, units)


def _unavailable(
    target: Target, decision: Decision, policy: Policy, edits: EditPolicy, unavailable_reason: Callable[[str], str]
) -> Refused | None:
    units = units_asked(target.container, decision.ids, policy.names)
    if units is not None:
        is_share = units.sharing in (Sharing.MPS, Sharing.SHARES)
    else:
        is_share = not request_of(target.container, policy.names).whole_gpus
    name = isolation_of(target.pod.annotations, units, edits)
    if not is_share or isinstance(name, Refused) or not (reason := unavailable_reason(name)):
        return None
    return Refused(
        reason=RefusalReason.NOT_READY,
        detail=f"container {target.container.name} of pod {target.pod.namespace}/{target.pod.name} requests a share "
        f"under isolation {name}, which cannot be had on this node now: {reason}. Nothing was allocated. Create the "
        "pod again once this is cured.",
    )


def explain(
    target: Target,
    offer: Offer,
    ledger: Ledger,
    policy: Policy,
    gpus: Sequence[GpuAccount],
    outcome: Decision | Refused,
) -> Decision:
    """The outcome with the verdict on every one of `gpus`, in order of index; none where the request makes no sense on any
    GPU."""
    decision = Decision(refused=outcome) if isinstance(outcome, Refused) else outcome
    names, kind = policy.names, policy.names.part_kind(target.container)
    asked = Asked(
        cores=names.wanted(target.container, ResourceKind.VCORE),
        memory_bytes=names.memory_mib(target.container) * MIB,
        hint=hinted_gpus(target.pod.annotations, target.container, policy),
        must_gpus=must_gpus(target, offer, ledger, names),
    )
    request: Request | Refused
    if kind is None:
        request = plan_request(target, offer, ledger, policy)
    else:
        request = Request(cores=CORES_PER_GPU * names.wanted(target.container, kind), must_gpus=asked.must_gpus)
    if isinstance(request, Refused) or (isinstance(outcome, Refused) and outcome.reason in _NEVER):
        return replace(decision, asked=asked)
    by_index = sorted(gpus, key=lambda gpu: gpu.index)
    verdict = _verdicts(target, request, ledger, names, by_index, decision)
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
    return replace(decision, asked=asked, candidates=tuple(candidates))


def _verdicts(
    target: Target,
    request: Request,
    ledger: Ledger,
    names: ResourceNames,
    gpus: Sequence[GpuAccount],
    decision: Decision,
) -> dict[GpuUuid, str]:
    kind = names.part_kind(target.container)
    served = served_units(target, kind, ledger, names) if kind is not None else {}
    of_node = capacity_of(gpus).lack(request) if request.whole_gpus and kind is None else None
    reasons = {gpu.uuid: gpu.unhealthy_reason for gpu in ledger.inventory.gpus}
    found = {}
    for gpu in gpus:
        lack = gpu.lack(Request(part=served[gpu.uuid].terms.part) if gpu.uuid in served else request)
        if gpu.uuid in decision.gpus:
            verdict = CHOSEN
        elif kind is not None and gpu.is_healthy and gpu.uuid not in served:
            verdict = "serves another resource"
        elif lack is not None:
            verdict = lack.of_gpu(_unhealthy(reasons[gpu.uuid]))
        elif decision.placed is not None:
            usable = [one for one in gpus if kind is None or one.uuid in served]
            verdict = why_not_chosen(gpu, request, decision.placed, usable, ledger.inventory.topology)
        elif (
            decision.refused
            and decision.refused.reason is RefusalReason.WRONG_GPUS
            and gpu.uuid not in request.must_gpus
        ):
            verdict = "fits, but the kubelet's IDs name another"
        else:
            verdict = f"wholly free; {of_node.of_node()}" if of_node is not None else "fits"
        found[gpu.uuid] = verdict
    return found


def _unhealthy(reason: str) -> str:
    reported = reason[:MAX_REASON_CHARS] or "no reason given"
    return reported if reported.startswith("cordoned") else f"unhealthy: {reported}"


def with_gpus(decision: Decision, gpus: Collection[GpuUuid]) -> Decision:
    """The same where the container got other GPUs than planned, which the kubelet's IDs then name, or none after all."""
    if {c.uuid for c in decision.candidates if c.is_chosen} == set(gpus):
        return decision
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
        for candidate in decision.candidates
    )
    return replace(decision, candidates=candidates)


def in_short(candidates: Sequence[Candidate], most_chars: int) -> str:
    """`GPU 0: 20 cores short; GPU 1: …`, for an Event. Empty where not one GPU fits into `most_chars`."""
    text = ""
    for candidate in candidates:
        more = f"{'; ' if text else ''}GPU {candidate.label}: {candidate.verdict}"
        if len(text) + len(more) > most_chars:
            return f"{text}; …" if text else ""
        text += more
    return text
