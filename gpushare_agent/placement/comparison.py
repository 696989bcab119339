"""Why a GPU that fits was not chosen: a comparison of its account, or its links, with those of what was.

The order of each policy is `place`'s; what is stated here is read from the accounts, so that it is true of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gpushare_agent.model.resources import Request
from gpushare_agent.model.topology import Branch, Topology
from gpushare_agent.placement.gpu_account import GpuAccount
from gpushare_agent.placement.lack import memory_text
from gpushare_agent.placement.link import EXACT_GPUS, choose_linked, set_cost
from gpushare_agent.placement.request import Placed


def why_not_chosen(
    gpu: GpuAccount, request: Request, placed: Placed, gpus: Sequence[GpuAccount], topology: Topology
) -> str:
    """`gpus` are those of which `place` chose; `gpu` is one that the request fits."""
    chosen = [one for one in gpus if one.uuid in placed.gpus]
    match placed.policy:
        case "hint":
            return "fits, but the scheduler chose another"
        case "replicas":
            return "fits, but nvidia.replica_policy prefers the chosen one"
        case "fragment":
            free = {one.index for one in gpus if one.is_free}
            return f"free, but {_compare_branches(topology.root, free, gpu.index, chosen[0].index)}"
        case "share" | "memory":
            return f"fits, but {_compare_shares(gpu, chosen[0], request)}"
        case _ if not request.whole_gpus:
            return "fits, but the kubelet's IDs name another"
    return f"free, {_compare_links(gpu, chosen, request, gpus, topology)}"


def _compare_shares(gpu: GpuAccount, chosen: GpuAccount, request: Request) -> str:
    cores = 0 if request.units else gpu.free_cores - chosen.free_cores
    memory_mib = gpu.memory_mib_of(request)[0] - chosen.memory_mib_of(request)[0]
    if not cores and not memory_mib:
        return f"GPU {chosen.label} has as much free and comes first"
    size = f"{abs(cores)} cores" if cores else memory_text(abs(memory_mib))
    return f"has {size} {'more' if (cores or memory_mib) > 0 else 'less'} free than GPU {chosen.label}"


def _compare_branches(root: Branch, free: Collection[int], gpu: int, chosen: int) -> str:
    """Where `broken_first` left the GPU's branch aside."""
    branch = root
    while branch.children:
        own, its = (next(child for child in branch.children if index in child.gpus) for index in (gpu, chosen))
        if own is not its:
            own_free, its_free = (sum(index in free for index in child.gpus) for child in (own, its))
            if own_free != its_free:
                return f"its branch has {own_free} free GPUs, that of GPU {chosen} has {its_free}"
            if len(own.gpus) != len(its.gpus):
                sizes = f"{len(own.gpus)} GPUs, not {len(its.gpus)}"
                return f"its branch has as many free GPUs as that of GPU {chosen}, and is larger: {sizes}"
            return f"its branch is as that of GPU {chosen}, which comes first"
        branch = own
    return f"GPU {chosen} of the same branch comes first"


def _compare_links(
    gpu: GpuAccount, chosen: Sequence[GpuAccount], request: Request, gpus: Sequence[GpuAccount], topology: Topology
) -> str:
    """By the cheapest set with the GPU: it may share no other GPU with the chosen set."""
    free = [one for one in gpus if one.is_free]
    if len(free) > EXACT_GPUS:  # one search for each GPU: 5 ms in all for 16, and no truth beyond
        return "but not in the cheapest set that was tried"
    must = {one.index for one in chosen if one.uuid in request.must_gpus}
    if len(must) == len(chosen):
        return "but the kubelet's IDs name others"
    links, with_it = topology.links, frozenset({gpu.index, *must})
    best = choose_linked(links, free, len(chosen), blocks=request.blocks, must=with_it)
    cost = set_cost(links, [one.index for one in chosen])
    if best is None:
        return "but no set with it has enough memory"
    if best.cost < cost:  # the kubelet did not offer its IDs
        return f"but not every set was tried: one with it has a link cost of {best.cost}, not {cost}"
    if best.cost == cost:
        return "at the same link cost: of equals those in the branches that are broken up most are chosen"
    return f"but at a higher link cost: {best.cost} with it, {cost} without"
