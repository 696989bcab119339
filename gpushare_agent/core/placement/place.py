"""Chooses a container's GPUs: `place` finds the policy for the request and applies it.

share: the fullest GPU that still fits (binpack), or the emptiest (spread). fragment: one whole GPU, from the branch of the
topology tree that is broken up most, so that large branches stay whole. link: several whole GPUs, the set whose links,
summed over all its pairs, cost least; among equally cheap sets likewise. Each first among GPUs that no other name serves.

Up to `EXACT_GPUS` free GPUs the answer to link is exact: depth-first search in lexicographic order, cut off where a lower
bound shows that no better set can follow. Above, the same search stops after `BOUNDED_STEPS` steps and gives the best set
seen, which is never worse than the greedy one it begins with.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import accumulate
from typing import Literal

from msgspec import Struct, field

from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.gpus import Branch, Link, LinkKind, Topology
from gpushare_agent.core.model.names import CORES_PER_GPU, GpuUuid
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.core.model.resources import WHOLE_GPU, Request, ResourceNames, request_of
from gpushare_agent.core.placement.gpu_account import Cause, GpuAccount, capacity_of, describe_request, memory_text

EXACT_GPUS = 16
BOUNDED_STEPS = 1_000

LINK_COSTS = {
    LinkKind.SELF: 0,
    LinkKind.PIX: 2_000,
    LinkKind.PXB: 4_000,
    LinkKind.PHB: 8_000,
    LinkKind.NODE: 16_000,
    LinkKind.SYS: 32_000,
}
"""Each further step outwards doubles the cost: a collective operation runs at the pace of its worst link, so one SYS
link must outweigh several better ones. NVLinks cost NVLINK_COST divided by their number, always below PIX."""
NVLINK_COST = 1_800
"""1,800 / n stays strictly decreasing up to 41 links; a GPU has at most 36."""


class LinkSet(Struct, frozen=True, kw_only=True):
    """The chosen indexes, sorted, the sum of their links' costs, and how many sets the search touched."""

    gpus: tuple[int, ...]
    cost: int
    is_exact: bool
    steps: int


def link_cost(link: Link) -> int:
    """The cost of one pair."""
    return NVLINK_COST // link.nvlinks if link.kind is LinkKind.NVLINK else LINK_COSTS[link.kind]


def set_cost(links: Sequence[Sequence[Link]], gpus: Sequence[int]) -> int:
    """The cost of all pairs among the indexes."""
    return sum(link_cost(links[a][b]) for n, a in enumerate(gpus) for b in gpus[n + 1 :])


def choose_linked(
    links: Sequence[Sequence[Link]], free: Sequence[GpuAccount], count: int, *, blocks: int = 0, must: frozenset[int]
) -> LinkSet | None:
    """The cheapest `count` of the free GPUs that contain `must` and have `blocks` of memory together.

    None where there is no such set. Among equally cheap sets the first is taken, in the order in which the GPUs are given.
    """
    # Positions, not indexes, from here on: the search compares sets by the order in which the caller gave the GPUs.
    gpus = list(free)
    search = _Search(
        costs=tuple(tuple(link_cost(links[a.index][b.index]) for b in gpus) for a in gpus),
        memory=tuple(gpu.total_blocks for gpu in gpus),
        count=count,
        blocks=blocks,
        must=tuple(position for position, gpu in enumerate(gpus) if gpu.index in must),
        # The number of sets grows like a binomial: at most 12,870 for 16 GPUs, for 64 far more than an admission may wait
        # for.
        max_steps=None if len(gpus) <= EXACT_GPUS else BOUNDED_STEPS,
    )
    # A GPU that must be among them is not free: no set can have it.
    if len(search.must) != len(must) or not search.run():
        return None
    return LinkSet(
        gpus=tuple(sorted(gpus[position].index for position in search.best)),
        cost=search.best_cost,
        is_exact=not search.is_stopped,
        steps=search.steps,
    )


class _Search(Struct, kw_only=True):
    """Branch and bound over positions 0..n-1. Its state lives for one decision: the best set, its cost, the steps."""

    costs: tuple[tuple[int, ...], ...]
    memory: tuple[int, ...]
    count: int
    blocks: int
    must: tuple[int, ...]
    max_steps: int | None
    best: tuple[int, ...] = ()
    best_cost: int = 0
    limit: int = 0
    """Sets of this cost or more are of no interest."""
    steps: int = 0
    is_stopped: bool = False
    _cheapest: list[list[int]] = field(default_factory=list)

    def run(self) -> bool:
        """Finds the best set; False where no set is feasible."""
        positions = range(len(self.costs))
        start = self._first_set()
        if start is None:
            return False
        self.best, self.best_cost = start, self._cost(start)
        self.limit = self.best_cost + 1  # so that an equally cheap set that comes earlier still replaces this one
        self._cheapest = [self._cheapest_sums(position) for position in positions]
        self._descend(
            self.must,
            self._cost(self.must),
            [position for position in positions if position not in self.must],
            [self._added(position, self.must) for position in positions],
        )
        return True

    def _descend(self, chosen: tuple[int, ...], cost: int, candidates: Sequence[int], added: Sequence[int]) -> None:
        """Completes `chosen` from `candidates` (ascending); `added[c]` is the cost of c's links to the chosen."""
        self.steps += 1
        missing = self.count - len(chosen)
        if missing == 0:
            # Memory is checked at the end, too: `_can_improve` asks only whether the largest candidates could suffice.
            if cost < self.limit and self._has_memory(chosen):
                self.best, self.best_cost, self.limit = chosen, cost, cost
            return
        for number in range(len(candidates) - missing + 1):
            # The best set so far stands, which is at least the greedy one.
            if self.max_steps is not None and self.steps >= self.max_steps:
                self.is_stopped = True
                return
            rest = candidates[number:]
            if not self._can_improve(chosen, cost, rest, added):
                return  # nor can what is left of it
            pick = rest[0]
            row = self.costs[pick]
            self._descend(
                (*chosen, pick), cost + added[pick], rest[1:], [a + b for a, b in zip(added, row, strict=True)]
            )

    def _can_improve(self, chosen: tuple[int, ...], cost: int, candidates: Sequence[int], added: Sequence[int]) -> bool:
        """Whether the cheapest that any completion can cost is below the limit, and the memory can suffice.

        Each further GPU pays its links to the chosen, and at least its cheapest links to as many others as are still
        missing; those count half, because the other end pays them too.
        """
        missing = self.count - len(chosen)
        doubled = sorted(2 * added[c] + self._cheapest[c][missing - 1] for c in candidates)
        if 2 * cost + sum(doubled[:missing]) >= 2 * self.limit:
            return False
        return self.blocks == 0 or self._has_memory(self._largest(chosen, candidates))

    def _first_set(self) -> tuple[int, ...] | None:
        """A good feasible set to begin with, None where there is none."""
        positions = [position for position in range(len(self.costs)) if position not in self.must]
        if len(positions) + len(self.must) < self.count or len(self.must) > self.count:
            return None
        largest = self._largest(self.must, positions)
        # Greedy growth depends on where it starts: without a GPU that must be in, every GPU is tried as the first.
        starts = [self.must] if self.must or self.count == 0 else [(position,) for position in positions]
        # The largest GPUs too: where memory is short they may be the only feasible set that greedy growth misses.
        sets = [largest, *(self._grow(start, positions) for start in starts)]
        return min((s for s in sets if self._has_memory(s)), key=lambda s: (self._cost(s), sorted(s)), default=None)

    def _grow(self, chosen: tuple[int, ...], positions: Sequence[int]) -> tuple[int, ...]:
        """Greedy: always the GPU that adds least, the first among equals."""
        left = [position for position in positions if position not in chosen]
        added = {position: self._added(position, chosen) for position in left}
        while len(chosen) < self.count:
            pick = min(left, key=lambda position: (added[position], position))
            left.remove(pick)
            chosen = (*chosen, pick)
            for position in left:
                added[position] += self.costs[position][pick]
        return chosen

    def _largest(self, chosen: tuple[int, ...], candidates: Sequence[int]) -> tuple[int, ...]:
        by_memory = sorted(candidates, key=lambda position: (-self.memory[position], position))
        return (*chosen, *by_memory[: self.count - len(chosen)])

    def _has_memory(self, chosen: tuple[int, ...]) -> bool:
        return sum(self.memory[position] for position in chosen) >= self.blocks

    def _added(self, position: int, chosen: tuple[int, ...]) -> int:
        return sum(self.costs[position][member] for member in chosen)

    def _cost(self, chosen: tuple[int, ...]) -> int:
        return sum(self.costs[a][b] for n, a in enumerate(chosen) for b in chosen[n + 1 :])

    def _cheapest_sums(self, position: int) -> list[int]:
        """Entry m: what the m cheapest links of a GPU cost."""
        ordered = sorted(cost for other, cost in enumerate(self.costs[position]) if other != position)
        return [0, *accumulate(ordered)]


DEFAULT_NAMES = ResourceNames()

SharePolicy = Literal["binpack", "spread"]
"""A share goes to the fullest GPU that still fits, or to the emptiest."""

_VALID = f"Ask for 1 to {CORES_PER_GPU - 1} cores with memory (a share of one GPU), or a multiple of {CORES_PER_GPU}"
_VALID_SHARING = f"{_VALID} (whole GPUs, memory optional)."
_VALID_WHOLE = f"Ask for a multiple of {CORES_PER_GPU} cores (whole GPUs), or use a node that shares its GPUs."


class Placed(Struct, frozen=True, kw_only=True):
    """The chosen GPUs by index. `policy` is one of share, memory, fragment, link, hint, must-include."""

    gpus: tuple[GpuUuid, ...]
    policy: str
    explanation: str


def validate_request(request: Request, names: ResourceNames, *, share_mode: bool) -> Refused | None:
    """What is wrong with a request on any node; None where nothing is."""
    cores, blocks = request.cores, request.blocks
    reason, remedy = RefusalReason.INVALID_REQUEST, _VALID_SHARING if share_mode else _VALID_WHOLE
    if request.units and (cores or blocks):
        others = " and ".join(name for name, count in ((names.vcore, cores), (names.vmemory, blocks)) if count)
        problem = (
            f"and {others} cannot be asked for by one container: the first is memory alone, the others are a share of"
        )
        problem, remedy = f"{problem} compute and memory", "Ask for one or the other."
    elif cores < 0 or blocks < 0:
        problem = "is not possible: amounts cannot be negative"
    # Cores bind the GPU: memory blocks alone are counters, which say nothing of where they are.
    elif not cores and not request.units:
        problem = f"asks for memory without cores: add {names.vcore}" if blocks else "asks for nothing of a GPU"
    elif cores > CORES_PER_GPU and cores % CORES_PER_GPU:
        lower = cores // CORES_PER_GPU * CORES_PER_GPU
        problem = "is neither a share of one GPU nor whole GPUs; the next valid numbers of cores are"
        problem = f"{problem} {lower} and {lower + CORES_PER_GPU}"
    elif cores < CORES_PER_GPU and not share_mode:
        problem, remedy = "is a share of a GPU, and sharing is switched off on this node", _VALID_WHOLE
        reason = RefusalReason.SHARING_DISABLED
    elif 0 < cores < CORES_PER_GPU and not blocks:
        problem = f"is a share of a GPU without memory: add {names.vmemory}, in blocks of {names.memory_block_mib} MiB"
    else:
        return None
    return Refused(reason, f"{describe_request(request, names)} {problem}. {remedy}")


def effective_request(pod: Pod, container: ContainerSpec, names: ResourceNames) -> Request | Refused:
    """The container's own request, enlarged for an init container by what the containers after it need on the same GPU.

    The kubelet passes an ordinary init container's device IDs on to the containers after it before it asks for new ones
    (measured). A share must stay on one GPU, so an init container is placed where those containers fit too. When an init
    container has more whole GPUs than one of them requests, the kubelet picks among their IDs at random, over all the GPUs,
    which no placement can prevent: such a pod is refused before it starts.
    """
    own = request_of(container, names)
    if container.kind is not ContainerKind.INIT:
        return own
    pool = need = _amounts(own, own)
    for following in pod.containers[pod.containers.index(container) + 1 :]:
        requested = _amounts(request_of(following, names), own)
        if not requested[0] or not pool[0]:
            continue  # the kubelet hands it nothing, so it may be on another GPU
        if own.cores > CORES_PER_GPU and requested[0] < own.cores:
            return Refused(
                RefusalReason.INVALID_REQUEST,
                f"pod {pod.namespace}/{pod.name}: init container {container.name} asks for {own.cores} cores and "
                f"container {following.name} after it for {requested[0]}. The kubelet would hand on devices from several of "
                f"the init container's GPUs at random. Give the init container at most {CORES_PER_GPU} cores, or as many "
                f"as {following.name}.",
            )
        # It takes what the pool has and needs the rest on top. An init container puts back what it took when it ends.
        need = tuple(sum_ + max(0, more - had) for sum_, more, had in zip(need, requested, pool, strict=True))
        is_init = following.kind is ContainerKind.INIT
        pool = tuple(
            max(had, more) if is_init else max(0, had - more) for had, more in zip(pool, requested, strict=True)
        )
    if own.units:
        return own._replace(units=need[0])
    if need[0] > CORES_PER_GPU:
        # The next container requests whole GPUs: this container's GPU becomes one of them; its own call checks the others.
        return own._replace(cores=max(own.cores, CORES_PER_GPU))
    return own._replace(cores=need[0], blocks=need[1])


def _amounts(request: Request, of: Request) -> tuple[int, ...]:
    """What is handed on where a container asks by the resources of `of`: the one that binds the GPU, then its memory."""
    return (request.units,) if of.units else (request.cores, request.blocks)


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
    # Ties go to the first: the result must not depend on the order in which the caller has them.
    by_index = sorted(gpus, key=lambda gpu: gpu.index)
    if request.whole_gpus:
        return _place_whole(request, by_index, topology) or _refused(request, by_index, names)
    return _place_share(request, by_index, share_policy) or _refused(request, by_index, names)


def _place_share(request: Request, gpus: Sequence[GpuAccount], share_policy: SharePolicy) -> Placed | None:
    fitting = [gpu for gpu in gpus if gpu.fits(request)]
    # Before the hint: the kubelet fills in its must-include IDs whatever is preferred, so any other GPU would be
    # refused.
    if request.must_gpus:
        named = [gpu for gpu in fitting if {gpu.uuid} == set(request.must_gpus)]
        return _placed(named, "must-include", "the kubelet's IDs name it") if named else None
    if not fitting:
        return None
    # Only among those that fit: any tenant can write the annotation.
    hinted = _hinted(request, fitting, 1)
    if hinted:
        return _placed(hinted, "hint", "the scheduler chose it")
    among = [gpu for gpu in fitting if not gpu.serves_parts] or fitting
    chosen = min(among, key=lambda gpu: share_order(gpu, request, share_policy))
    why = explain_share([gpu.free[2:] if request.units else gpu.free[:2] for gpu in among], share_policy)
    return _placed([chosen], "memory" if request.units else "share", why + _unserved(among, fitting))


def _unserved(among: Sequence[GpuAccount], fitting: Sequence[GpuAccount]) -> str:
    return ", of those that no other name serves" if len(among) < len(fitting) else ""


def share_order(gpu: GpuAccount, request: Request, share_policy: SharePolicy) -> tuple[int, ...]:
    """The policy prefers the least: by free cores, then by free memory, and the first among equals."""
    # The index is not negated: among equals both policies take the first.
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
    # One of them is in use or unhealthy: no choice of the others helps.
    if len(must) != len(set(request.must_gpus)):
        return None
    hinted = _hinted(request, free, request.whole_gpus)
    # A hint may be older than the node's state, or forged: it counts where it is feasible, else placement decides.
    has_memory = sum(gpu.total_blocks for gpu in hinted) >= request.blocks
    if hinted and has_memory and must <= {gpu.index for gpu in hinted}:
        return _placed(hinted, "hint", "the scheduler chose this")
    # One GPU has no links to compare: what counts is which branches stay whole for others.
    if request.whole_gpus == 1 and not must:
        fitting = [gpu for gpu in free if gpu.fits(request)]
        if not fitting:
            return None
        among = [gpu for gpu in fitting if not gpu.serves_parts] or fitting
        why = f"of {len(fitting)} free GPUs, the one in the branch that is broken up most{_unserved(among, fitting)}"
        return _placed(broken_first(topology.root, among, free)[:1], "fragment", why)
    # Among link sets of equal cost, too, the one in branches that are broken up already: whole ones stay for others.
    ordered = broken_first(topology.root, free, free)
    choose = partial(choose_linked, topology.links, count=request.whole_gpus, blocks=request.blocks)
    # As few as can be of those that other names serve: none, or only what the others lack.
    unserved = must.union(gpu.index for gpu in free if not gpu.serves_parts)
    if len(unserved) < request.whole_gpus:
        found = choose(ordered, must=unserved)
    else:
        found = choose([gpu for gpu in ordered if gpu.index in unserved], must=must)
    # Those may have too little memory together.
    found = found or choose(ordered, must=must)
    if found is None:
        return None
    policy = "must-include" if must else "link"
    return _placed([gpu for gpu in free if gpu.index in found.gpus], policy, _explain_link(found, len(free), must))


def _refused(request: Request, gpus: Sequence[GpuAccount], names: ResourceNames) -> Refused:
    """The refusal for the pod's owner: what was asked, what is free, what to do."""
    asked, lack = describe_request(request, names), capacity_of(gpus).lack(request)
    must = {uuid: next((gpu for gpu in gpus if gpu.uuid == uuid), None) for uuid in sorted(set(request.must_gpus))}
    one = WHOLE_GPU if request.whole_gpus else request
    is_must_unfit = any(gpu is None or not gpu.fits(one) for gpu in must.values())
    # There is room, only not on the GPUs that the kubelet insists on; with no healthy GPU at all that is the better
    # reason.
    if lack is None or (is_must_unfit and lack.cause is not Cause.UNHEALTHY):
        named = ", ".join(_must_text(uuid, gpu, one) for uuid, gpu in must.items())
        return Refused(
            RefusalReason.WRONG_GPUS,
            f"no GPU for {asked}: the kubelet must include devices of {named}, which cannot be part of what is asked "
            "for. Give init containers as much as the main container, or nothing; if they have, delete the pod, so that it "
            "is admitted afresh, and restart the kubelet if that recurs.",
        )
    detail = f"no GPU for {asked}: {lack.of_node_in_detail()}"
    # With one GPU `of_node_in_detail` has said it all.
    if lack.cause is Cause.SHORT and lack.gpus > 1:
        usable = (gpu for gpu in gpus if gpu.is_healthy and gpu.is_accepted)
        closest = min(usable, key=lambda gpu: (_missing_part(gpu, request), gpu.index))
        if (short := closest.lack(request)) is not None:
            detail += f"; GPU {closest.label} comes closest: {short.of_gpu_in_detail()}"
    return Refused(lack.reason, f"{detail}. {lack.remedy}")


def _missing_part(gpu: GpuAccount, request: Request) -> float:
    """How far the GPU is from serving a share: 1 each where no cores, or no memory, are free."""
    asked = (request.cores, request.blocks, request.units)
    return sum(
        max(0, requested - free) / requested for requested, free in zip(asked, gpu.free, strict=True) if requested
    )


def _must_text(uuid: GpuUuid, gpu: GpuAccount | None, request: Request) -> str:
    if gpu is None:
        return f"{uuid} (no GPU of this node)"
    lack = gpu.lack(request)
    return f"GPU {gpu.label}" + (f" ({lack.of_gpu()})" if lack is not None else "")


def broken_first(root: Branch, gpus: Sequence[GpuAccount], free: Sequence[GpuAccount]) -> list[GpuAccount]:
    """The `gpus`, a part of `free`. Those in the branches that are broken up most come first.

    It descends from the root. Each level takes the child with the fewest free GPUs; among equals the smaller one (the larger
    can become whole again), then the one with the lowest index.
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


# --- why a GPU that fits was not chosen: read from the accounts, so that it is true of them ---


def why_not_chosen(
    gpu: GpuAccount, request: Request, placed: Placed, gpus: Sequence[GpuAccount], topology: Topology
) -> str:
    """`place` chose among `gpus`; `gpu` is one that the request fits."""
    chosen = [one for one in gpus if one.uuid in placed.gpus]
    is_second = gpu.serves_parts and not all(one.serves_parts for one in chosen)
    match placed.policy:
        case "hint":
            return "fits, but the scheduler chose another"
        case "replicas":
            return "fits, but nvidia.replica_policy prefers the chosen one"
        case "share" | "memory" | "fragment" | "link" if is_second:
            return "fits, but another name serves it too"
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
    """The level at which `broken_first` left the GPU's branch aside."""
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
    """A comparison with the cheapest set that has the GPU: it may share no other GPU with the chosen set."""
    is_any_served = any(one.serves_parts for one in chosen)
    free = [one for one in gpus if one.is_free and (is_any_served or not one.serves_parts)]
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
