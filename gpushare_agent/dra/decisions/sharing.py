"""Who uses a claim's share together, for its isolation to say whether they can have it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gpushare_agent.admission.decisions.container_edits import EditPolicy
from gpushare_agent.dra.decisions.claim import CONFIG_KIND, AllocatedClaim
from gpushare_agent.isolation import ISOLATIONS, ClaimUse
from gpushare_agent.model.errors import Refused
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod


def not_shared(claim: AllocatedClaim, isolation: str, pods: Sequence[Pod], policy: EditPolicy) -> Refused | None:
    """Why those who use a share together cannot have it under the isolation; None where they can. The claim's results are
    its shares alone: what is not limited may be used by anyone."""
    together = next(filter(None, (_together(claim, pod) for pod in pods)), [])
    users = {uid for _, uid in claim.users}
    return ISOLATIONS[isolation].not_shared(
        ClaimUse(
            isolation=isolation,
            together=tuple(together),
            is_shared=bool(together) or len(users) > 1,
            who=f"containers {' and '.join(together)}" if together else "several pods",
            owner=claim.owner if users <= {claim.owner} else None,
            is_owner_known=any(pod.uid == claim.owner for pod in pods),
            cure=f"choose another isolation ({CONFIG_KIND}.isolation)",
            config=policy.config,
            module=policy.kernel_module,
        )
    )


def _together(claim: AllocatedClaim, pod: Pod) -> list[str]:
    """Containers that use one request of the claim at the same time, by its name or by the claim as a whole: init containers
    run one by one, before the others but beside the sidecars."""
    names = {name for name, claim_name in pod.claims.items() if claim_name == claim.ref.name}
    every = {result.request.partition("/")[0] for result in claim.results}
    used: dict[str, list[ContainerSpec]] = {}
    for container in pod.containers:
        named = {request for name, request in container.claims if name in names}
        for request in every if "" in named else named & every:
            used.setdefault(request, []).append(container)
    for users in used.values():
        has_sidecar = any(one.kind is ContainerKind.SIDECAR for one in users)
        found = [one.name for one in users if has_sidecar or one.kind is not ContainerKind.INIT]
        if len(found) > 1:
            return sorted(found)
    return []
