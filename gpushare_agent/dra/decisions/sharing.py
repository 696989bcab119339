"""Whether those who use a claim's share together can have it under its isolation. Pure.

| isolation | its limits are kept for |
|---|---|
| vcuda | all processes, of any containers and pods; those of one container under the open kernel modules from 515 |
| mps | each process |
| driver | a cgroup: a container, and where the agent sets the limits a pod |
| hami-core | the processes of one PID namespace: a container |
"""

from __future__ import annotations

from collections.abc import Sequence

from gpushare_agent.admission.decisions.container_edits import EditPolicy
from gpushare_agent.dra.decisions.claim import CONFIG_KIND, AllocatedClaim
from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.isolation import IsolationName
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod


def not_shared(
    claim: AllocatedClaim, isolation: IsolationName, pods: Sequence[Pod], policy: EditPolicy
) -> Refused | None:
    """Why those who use a share together cannot have it under the isolation; None where they can. The claim's results are
    its shares alone: what is not limited may be used by anyone."""
    together = next(filter(None, (_together(claim, pod) for pod in pods)), [])
    cure = f"choose another isolation ({CONFIG_KIND}.isolation)"
    who = f"containers {' and '.join(together)}" if together else "several pods"
    is_shared = bool(together) or len({uid for _, uid in claim.users}) > 1
    if IsolationName.HAMI_CORE in isolation.parts and is_shared:
        return _refused(
            f"{who} share it, and HAMi-core knows processes by the numbers that they have in their own container: those of"
            " several would be taken for each other, and hang. Make a claim, or a request of it, for each container, or"
            f" {cure}"
        )
    module = policy.kernel_module
    if isolation is IsolationName.VCUDA and is_shared and module is not None and module.lists_namespace_pids:
        return _refused(
            f"{who} share it, and the open kernel module {module.version} lists to a process those of its own container"
            " alone, so vcuda would give each all of the memory: make a claim, or a request of it, for each container, or"
            f" {cure}"
        )
    if IsolationName.DRIVER in isolation.parts:
        return _without_cgroup(claim, isolation, pods, together, policy)
    return None


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


def _without_cgroup(
    claim: AllocatedClaim, isolation: IsolationName, pods: Sequence[Pod], together: Sequence[str], policy: EditPolicy
) -> Refused | None:
    """The driver limits cgroups: all that use a share must be in one, a pod's or, where NVIDIA's toolkit sets the limits, a
    container's."""
    cure = f"choose another isolation ({CONFIG_KIND}.isolation)"
    if claim.owner is None or any(uid != claim.owner for _, uid in claim.users):
        return _refused(
            f"isolation {isolation} limits the memory of cgroups, and pods that share a claim have none in common: make the"
            f" claim for one pod, by a ResourceClaimTemplate, or {cure}"
        )
    if all(pod.uid != claim.owner for pod in pods):
        return Refused(reason=RefusalReason.NOT_READY, detail=f"pod {claim.owner} is not known yet: it is tried again.")
    if not together or policy.config.is_memory_limited_by_agent:
        return None
    return _refused(
        f"containers {' and '.join(together)} share it, and NVIDIA's toolkit, which sets the limits of isolation {isolation}"
        f" on this node, would give each all of its memory: let one container use it, {cure}, or have the agent set the"
        " limits (driver_limits.set_by_agent)"
    )


def _refused(why: str) -> Refused:
    return Refused(reason=RefusalReason.INVALID_REQUEST, detail=why)
