"""Which GPU or GPUs a container gets: `place` finds the policy for the request and applies it.

share: the fullest GPU that still fits (binpack), or the emptiest (spread). fragment: one whole GPU, from the branch of the
topology tree that is broken up most, so that large branches stay whole. link: several whole GPUs (link.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gpushare_agent.model.errors import Refused
from gpushare_agent.model.names import MEMORY_BLOCK_MIB
from gpushare_agent.model.topology import Branch, Topology
from gpushare_agent.placement.gpu_account import GpuAccount
from gpushare_agent.placement.link import LinkSet, choose_linked
from gpushare_agent.placement.refusals import Refusals
from gpushare_agent.placement.request import GpuRequest, Placed, SharePolicy, validate_request


def place(
    request: GpuRequest,
    gpus: Sequence[GpuAccount],
    topology: Topology,
    *,
    share_policy: SharePolicy,
    share_mode: bool = True,
    memory_block_mib: int = MEMORY_BLOCK_MIB,
) -> Placed | Refused:
    """Chooses the GPU of a share or the whole GPUs of a container, or says why there are none.

    `memory_block_mib` is used for the texts only.
    """
    invalid = validate_request(request.cores, request.blocks, share_mode=share_mode, memory_block_mib=memory_block_mib)
    if invalid is not None:
        return invalid
    healthy = sorted((gpu for gpu in gpus if gpu.is_healthy), key=lambda gpu: gpu.index)
    refusals = Refusals(request=request, healthy=healthy, number_of_gpus=len(gpus), memory_block_mib=memory_block_mib)
    if not healthy:
        return refusals.no_healthy_gpu()
    if request.whole_gpus:
        return _place_whole(request, healthy, topology, refusals)
    return _place_share(request, healthy, share_policy, refusals)


def _place_share(
    request: GpuRequest, healthy: Sequence[GpuAccount], share_policy: SharePolicy, refusals: Refusals
) -> Placed | Refused:
    fitting = [gpu for gpu in healthy if _fits(gpu, request)]
    if request.must_gpus:
        named = [gpu for gpu in fitting if {gpu.uuid} == set(request.must_gpus)]
        return _placed(named, "must-include", "the kubelet's IDs name it") if named else refusals.wrong_gpus()
    if not fitting:
        return refusals.no_gpu_for_share()
    hinted = _hinted(request, fitting, 1)
    if hinted:
        return _placed(hinted, "hint", "the scheduler chose it")
    chosen = choose_share(fitting, share_policy)
    return _placed([chosen], "share", explain_share(len(fitting), [_free(gpu) for gpu in fitting], share_policy))


def _fits(gpu: GpuAccount, request: GpuRequest) -> bool:
    return gpu.free_cores >= request.cores and gpu.free_blocks >= request.blocks


def choose_share(fitting: Sequence[GpuAccount], share_policy: SharePolicy) -> GpuAccount:
    """The GPU of a non-empty list that the policy prefers: by free cores, then by free memory, then by index."""
    sign = 1 if share_policy == "binpack" else -1
    return min(fitting, key=lambda gpu: (sign * gpu.free_cores, sign * gpu.free_blocks, gpu.index))


def explain_share(count: int, free: Sequence[tuple[int, ...]], share_policy: SharePolicy) -> str:
    """Why this one of the fitting GPUs; `free` is what each has left."""
    if count == 1:
        return "the only GPU that fits"
    if len(set(free)) == 1:
        return f"the first of {count} fitting GPUs with equal free capacity"
    which = "fullest" if share_policy == "binpack" else "emptiest"
    return f"the {which} of {count} GPUs that fit"


def _free(gpu: GpuAccount) -> tuple[int, int]:
    return gpu.free_cores, gpu.free_blocks


def _place_whole(
    request: GpuRequest, healthy: Sequence[GpuAccount], topology: Topology, refusals: Refusals
) -> Placed | Refused:
    free = [gpu for gpu in healthy if gpu.is_free]
    must = frozenset(gpu.index for gpu in free if gpu.uuid in request.must_gpus)
    if len(must) != len(set(request.must_gpus)):
        return refusals.wrong_gpus()
    hinted = _hinted(request, free, request.whole_gpus)
    if hinted and must <= {gpu.index for gpu in hinted} and _have_memory(hinted, request):
        return _placed(hinted, "hint", "the scheduler chose this")
    if request.whole_gpus == 1 and not must:
        return _place_fragment(request, free, topology, refusals)
    found = choose_linked(
        topology.links,
        free,
        request.whole_gpus,
        blocks=request.blocks,
        must=must,
    )
    if found is None:
        return refusals.wrong_gpus() if must and len(free) >= request.whole_gpus else refusals.no_whole_gpus()
    policy = "must-include" if must else "link"
    return _placed([gpu for gpu in free if gpu.index in found.gpus], policy, _explain_link(found, len(free), must))


def _place_fragment(
    request: GpuRequest, free: Sequence[GpuAccount], topology: Topology, refusals: Refusals
) -> Placed | Refused:
    fitting = [gpu for gpu in free if _have_memory([gpu], request)]
    if not fitting:
        return refusals.no_whole_gpus()
    index = choose_fragment(topology.root, {gpu.index for gpu in free}, {gpu.index for gpu in fitting})
    why = f"of {len(fitting)} free GPUs, the one in the branch that is broken up most"
    return _placed([gpu for gpu in free if gpu.index == index], "fragment", why)


def choose_fragment(root: Branch, free: Collection[int], fitting: Collection[int]) -> int:
    """The index of the GPU to allocate; `fitting` is a non-empty part of `free`.

    Descends from the root: at each level into the child with the fewest free GPUs among those that hold a fitting one;
    of equals into the smaller one (the larger can become whole again), then the one with the lowest index.
    """

    branch = root
    while branch.children:
        holding = [child for child in branch.children if any(gpu in fitting for gpu in child.gpus)]
        branch = min(holding, key=lambda child: (*_broken_up(child, free), child.gpus[0]))
    return min(gpu for gpu in branch.gpus if gpu in fitting)


def is_equal_fragment(root: Branch, free: Collection[int], gpu: int, chosen: int) -> bool:
    """Whether only its index decided against `gpu`: it is beside the chosen GPU, or in a branch broken up as much."""
    branch = root
    while branch.children:
        own, other = (next(child for child in branch.children if one in child.gpus) for one in (chosen, gpu))
        if own is not other:
            return _broken_up(own, free) == _broken_up(other, free)
        branch = own
    return True


def _broken_up(branch: Branch, free: Collection[int]) -> tuple[int, int]:
    return sum(gpu in free for gpu in branch.gpus), len(branch.gpus)


def _hinted(request: GpuRequest, usable: Sequence[GpuAccount], count: int) -> list[GpuAccount]:
    """The GPUs that the hint names, empty where it is not `count` different usable ones: a hint may say anything."""
    if len(request.hint) != count:
        return []
    named = [gpu for gpu in usable if gpu.index in request.hint]
    return named if len(named) == count else []


def _have_memory(gpus: Sequence[GpuAccount], request: GpuRequest) -> bool:
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
