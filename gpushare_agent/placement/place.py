"""Which GPU or GPUs a container gets: `place` finds the policy for the request and applies it.

share: the fullest GPU that still fits (binpack), or the emptiest (spread). fragment: one whole GPU, from the branch of the
topology tree that is broken up most, so that large branches stay whole. link: several whole GPUs (link.py), of equally cheap
sets likewise.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.model.resources import WHOLE_GPU, Request, ResourceNames
from gpushare_agent.model.topology import Branch, Topology
from gpushare_agent.placement.gpu_account import GpuAccount, capacity_of
from gpushare_agent.placement.lack import Cause, describe_request
from gpushare_agent.placement.link import LinkSet, choose_linked
from gpushare_agent.placement.request import Placed, SharePolicy

DEFAULT_NAMES = ResourceNames()


def place(
    request: Request,
    gpus: Sequence[GpuAccount],
    topology: Topology,
    *,
    share_policy: SharePolicy,
    names: ResourceNames = DEFAULT_NAMES,
) -> Placed | Refused:
    """Chooses the GPU of a share or the whole GPUs of a container, or says why there are none.

    The request is a valid one (`validate_request`). `names` are used for the texts only.
    """
    by_index = sorted(gpus, key=lambda gpu: gpu.index)
    if request.whole_gpus:
        return _place_whole(request, by_index, topology) or _refused(request, by_index, names)
    return _place_share(request, by_index, share_policy) or _refused(request, by_index, names)


def _place_share(request: Request, gpus: Sequence[GpuAccount], share_policy: SharePolicy) -> Placed | None:
    fitting = [gpu for gpu in gpus if gpu.fits(request)]
    if request.must_gpus:
        named = [gpu for gpu in fitting if {gpu.uuid} == set(request.must_gpus)]
        return _placed(named, "must-include", "the kubelet's IDs name it") if named else None
    if not fitting:
        return None
    hinted = _hinted(request, fitting, 1)
    if hinted:
        return _placed(hinted, "hint", "the scheduler chose it")
    chosen = min(fitting, key=lambda gpu: share_order(gpu, request, share_policy))
    why = explain_share([gpu.free[2:] if request.units else gpu.free[:2] for gpu in fitting], share_policy)
    return _placed([chosen], "memory" if request.units else "share", why)


def share_order(gpu: GpuAccount, request: Request, share_policy: SharePolicy) -> tuple[int, ...]:
    """The policy prefers the least: by free cores, then by free memory, and of equals the first."""
    sign = 1 if share_policy == "binpack" else -1
    cores, blocks, units = gpu.free
    return (sign * units, gpu.index) if request.units else (sign * cores, sign * blocks, gpu.index)


def explain_share(free: Sequence[tuple[int, ...]], share_policy: SharePolicy) -> str:
    """Why this one of the fitting GPUs; `free` is what each has left."""
    if len(free) == 1:
        return "the only GPU that fits"
    if len(set(free)) == 1:
        return f"the first of {len(free)} fitting GPUs with equal free capacity"
    which = "fullest" if share_policy == "binpack" else "emptiest"
    return f"the {which} of {len(free)} GPUs that fit"


def _place_whole(request: Request, gpus: Sequence[GpuAccount], topology: Topology) -> Placed | None:
    free = [gpu for gpu in gpus if gpu.is_free]
    must = frozenset(gpu.index for gpu in free if gpu.uuid in request.must_gpus)
    if len(must) != len(set(request.must_gpus)):
        return None
    hinted = _hinted(request, free, request.whole_gpus)
    if hinted and must <= {gpu.index for gpu in hinted} and _have_memory(hinted, request):
        return _placed(hinted, "hint", "the scheduler chose this")
    if request.whole_gpus == 1 and not must:
        fitting = [gpu for gpu in free if gpu.fits(request)]
        if not fitting:
            return None
        why = f"of {len(fitting)} free GPUs, the one in the branch that is broken up most"
        return _placed(broken_first(topology.root, fitting, free)[:1], "fragment", why)
    # Of link sets that cost the same, too, the one in the branches that are broken up already: whole ones stay for others.
    ordered = broken_first(topology.root, free, free)
    found = choose_linked(topology.links, ordered, request.whole_gpus, blocks=request.blocks, must=must)
    if found is None:
        return None
    policy = "must-include" if must else "link"
    return _placed([gpu for gpu in free if gpu.index in found.gpus], policy, _explain_link(found, len(free), must))


def _refused(request: Request, gpus: Sequence[GpuAccount], names: ResourceNames) -> Refused:
    """For the pod's owner: what was asked, what is free, what to do."""
    asked, lack = describe_request(request, names), capacity_of(gpus).lack(request)
    must = {uuid: next((gpu for gpu in gpus if gpu.uuid == uuid), None) for uuid in sorted(set(request.must_gpus))}
    one = WHOLE_GPU if request.whole_gpus else request
    is_must_unfit = any(gpu is None or not gpu.fits(one) for gpu in must.values())
    if lack is None or (is_must_unfit and lack.cause is not Cause.UNHEALTHY):
        named = ", ".join(_must_text(uuid, gpu, one) for uuid, gpu in must.items())
        return Refused(
            reason=RefusalReason.WRONG_GPUS,
            detail=f"no GPU for {asked}: the kubelet must include devices of {named}, which cannot be part of what is asked "
            "for. Give init containers as much as the main container, or nothing; if they have, delete the pod, so that it "
            "is admitted afresh, and restart the kubelet if that recurs.",
        )
    detail = f"no GPU for {asked}: {lack.of_node_in_detail()}"
    if lack.cause is Cause.SHORT and lack.gpus > 1:
        closest = min((gpu for gpu in gpus if gpu.is_healthy), key=lambda gpu: (_missing_part(gpu, request), gpu.index))
        if (short := closest.lack(request)) is not None:
            detail += f"; GPU {closest.label} comes closest: {short.of_gpu_in_detail()}"
    return Refused(reason=lack.reason, detail=f"{detail}. {lack.cure}")


def _missing_part(gpu: GpuAccount, request: Request) -> float:
    """How far the GPU is from serving a share: 1 each where no cores, or no memory, are free."""
    asked = (request.cores, request.blocks, request.units)
    return sum(max(0, wanted - free) / wanted for wanted, free in zip(asked, gpu.free, strict=True) if wanted)


def _must_text(uuid: GpuUuid, gpu: GpuAccount | None, request: Request) -> str:
    if gpu is None:
        return f"{uuid} (no GPU of this node)"
    lack = gpu.lack(request)
    return f"GPU {gpu.label}" + (f" ({lack.of_gpu()})" if lack is not None else "")


def broken_first(root: Branch, gpus: Sequence[GpuAccount], free: Sequence[GpuAccount]) -> list[GpuAccount]:
    """Those in the branches that are broken up most come first; `gpus` is a part of `free`.

    Descending from the root, at each level the child with the fewest free GPUs; of equals the smaller one (the larger can
    become whole again), then the one with the lowest index.
    """
    indexes = {gpu.index for gpu in free}

    def rank(gpu: GpuAccount) -> tuple[tuple[int, int, int], ...]:
        branch, path = root, []
        while branch.children:
            branch = next(child for child in branch.children if gpu.index in child.gpus)
            path.append((len(indexes.intersection(branch.gpus)), len(branch.gpus), branch.gpus[0]))
        return *path, (0, 0, gpu.index)

    return sorted(gpus, key=rank)


def _hinted(request: Request, usable: Sequence[GpuAccount], count: int) -> list[GpuAccount]:
    """The GPUs that the hint names, empty where it is not `count` different usable ones: a hint may say anything."""
    if len(request.hint) != count:
        return []
    named = [gpu for gpu in usable if gpu.index in request.hint]
    return named if len(named) == count else []


def _have_memory(gpus: Sequence[GpuAccount], request: Request) -> bool:
    return sum(gpu.total_blocks for gpu in gpus) >= request.blocks


def _explain_link(found: LinkSet, free: int, must: frozenset[int]) -> str:
    among = f"all sets with {sorted(must)}, which the kubelet's IDs name" if must else "all sets"
    how = f"the least of {among}" if found.is_exact else f"the best of {found.steps} sets tried"
    return f"of {free} free GPUs, at a total link cost of {found.cost}, {how}"


def _placed(gpus: Sequence[GpuAccount], policy: str, why: str) -> Placed:
    names = ", ".join(gpu.label for gpu in gpus)
    return Placed(
        gpus=tuple(gpu.uuid for gpu in gpus),
        policy=policy,
        explanation=f"{'GPU' if len(gpus) == 1 else 'GPUs'} {names}: {why}",
    )
