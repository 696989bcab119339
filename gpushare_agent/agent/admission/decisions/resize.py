"""Reads the annotation `gpushare-agent/resize` and decides whether a running share may have that size. Pure.

    resize    = entry *( ";" entry )                 main:cores=50,memory=24;side:memory=8
    entry     = ( container / claim [ "/" request ] ) ":" amount *( "," amount )
    amount    = ( "cores" / "memory" ) "=" number    number: 1 to 9999999, without a leading zero

`cores` are 1/100 of a GPU, `memory` units of the resource that the container asked for: memory blocks, or GPUShare's units.
A claim is named as in the pod, with one of its requests where it has several. What is not named stays as the kubelet
allocated it. There is no white space, and no container or amount twice. A tenant may be able to write it, so it is bounded
before it is read.

A share stays on its GPU. Whole GPUs and init containers keep what they have. A claim's share grows at most to what the claim
was allocated: the scheduler counts that, and would give what it counts as free to the next claim.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.agent.isolation import Isolation
from gpushare_agent.core.model.allocations import Allocation, ContainerKey, ResizedShare, ShareSize
from gpushare_agent.core.model.errors import RefusalReason
from gpushare_agent.core.model.isolation import ResizeMode
from gpushare_agent.core.model.names import CORES_PER_GPU, RESIZE_ANNOTATION
from gpushare_agent.core.model.pods import ContainerKind, Pod
from gpushare_agent.core.model.resources import NOTHING, Measure, Request, ResourceKind, ResourceNames
from gpushare_agent.core.placement import GpuAccount
from gpushare_agent.core.placement.gpu_account import Cause, describe_request

MAX_CHARS = 1024
MAX_ENTRIES = 32
_SHOWN_CHARS = 60
_NAME = r"[0-9a-z](?:[0-9a-z-]{0,61}[0-9a-z])?"
_AMOUNT = r"(?:cores|memory)=[1-9][0-9]{0,6}"
_ENTRY = re.compile(rf"({_NAME}(?:/{_NAME})?):({_AMOUNT}(?:,{_AMOUNT})?)")
_EXAMPLE = "main:cores=50,memory=24;side:memory=8"


class ResizeReason(StrEnum):
    """Why a share keeps its size. The values are in the annotation `gpushare-agent/resize-status`: stable, CamelCase."""

    INVALID_REQUEST = "InvalidRequest"
    DISABLED = "ResizeDisabled"
    UNSUPPORTED = "ResizeUnsupported"
    UNHEALTHY_GPU = "UnhealthyGpu"
    NOT_ENOUGH_CORES = "NotEnoughCores"
    NOT_ENOUGH_MEMORY = "NotEnoughMemory"
    TOO_MANY = "TooManyResized"


class ResizeRefused(Struct, frozen=True):
    """`detail` says what was asked, what is free, and what to do."""

    reason: ResizeReason
    detail: str


class DesiredSize(Struct, frozen=True, kw_only=True):
    """The size of one container that its pod asks for. None: as the kubelet allocated it."""

    cores: int | None = None
    memory: int | None = None

    unknown: str = ""
    """A name in the annotation that is neither a container nor a claim of the pod."""


class ResizePolicy(Struct, frozen=True, kw_only=True):
    """The node's settings for resizing."""

    names: ResourceNames
    mode: ResizeMode = ResizeMode.DISABLED


def parse_resize(text: str) -> Mapping[str, DesiredSize] | ResizeRefused:
    """The annotation's sizes by container."""
    # Any tenant can write it: bounded before it is split.
    if len(text) > MAX_CHARS:
        return _unreadable(f"it has {len(text)} characters, more than {MAX_CHARS}")
    entries = text.split(";")
    if len(entries) > MAX_ENTRIES:
        return _unreadable(f"it names {len(entries)} containers, more than {MAX_ENTRIES}")
    found: dict[str, DesiredSize] = {}
    for entry in entries:
        match = _ENTRY.fullmatch(entry)
        if match is None:
            return _unreadable(f"{entry[:_SHOWN_CHARS]!r} is none of its entries")
        if match[1] in found:
            return _unreadable(f"it names the container {match[1]} twice")
        amounts = [amount.partition("=") for amount in match[2].split(",")]
        sizes = {name: int(number) for name, _, number in amounts}
        if len(sizes) < len(amounts):
            return _unreadable(f"{entry[:_SHOWN_CHARS]!r} has the same amount twice")
        found[match[1]] = DesiredSize(cores=sizes.get("cores"), memory=sizes.get("memory"))
    return found


def unknown_name(pod: Pod, desired: Iterable[str]) -> str:
    """The first name in the annotation that is neither a container nor a claim of the pod; empty if there is none."""
    known = {container.name for container in pod.containers}
    return min((name for name in desired if name not in known and name.partition("/")[0] not in pod.claims), default="")


def asked_size(allocation: Allocation, pods: Iterable[Pod]) -> DesiredSize | ResizeRefused | None:
    """What annotations ask for the share: its pod's, or those of the pods that use its claim. Of several that concern the
    share, the first by pod name counts. One that cannot be read, or names what the pod does not have, concerns all shares
    of the pod. None without one."""
    claim = allocation.claim
    for pod in sorted(pods, key=lambda pod: (pod.name, pod.uid)):
        if (text := pod.annotations.get(RESIZE_ANNOTATION)) is None:
            continue
        if isinstance(parsed := parse_resize(text), ResizeRefused):
            return parsed
        unknown = unknown_name(pod, parsed)
        if claim is None:
            return replace(parsed.get(allocation.key.container, DesiredSize()), unknown=unknown)
        for name, size in parsed.items():
            own, _, request = name.partition("/")
            if pod.claims.get(own) == claim.ref.name and request in ("", claim.request):
                return replace(size, unknown=unknown)
        if unknown:
            return DesiredSize(unknown=unknown)
    return None


def is_ending(allocation: Allocation, pods: Collection[Pod]) -> bool:
    """Whether its pod, or each that uses its claim, is to end, or its pod is not known. A claim may be there before its
    pods, and outlives those that have ended."""
    if allocation.claim is not None:
        return bool(pods) and all(pod.is_deleting for pod in pods)
    return all(pod.is_deleting or pod.is_terminal for pod in pods)


def is_resizable(allocation: Allocation, pods: Iterable[Pod], names: ResourceNames) -> bool:
    """A share all of whose devices the kubelet has allocated; a claim's has them at once. A replica of a GPU has the size
    that its resource says."""
    if allocation.is_whole or allocation.unit_ids or allocation.kind is ContainerKind.INIT or not allocation.gpus:
        return False
    if allocation.started_by:
        return False
    if allocation.claim is not None:
        return True
    # Between the Allocates of its two resources it is not whole yet: what is missing would look like a change.
    given = {kind: len(ids) for kind, ids in allocation.ids.items()}
    containers = [pod.container(allocation.key.container) for pod in pods]
    return any(one is not None and given == names.asked(one) for one in containers)


def target_of(allocation: Allocation, desired: DesiredSize) -> ShareSize:
    allocated = allocation.allocated_size
    # 0 counts as left out, as None does.
    return ShareSize(cores=desired.cores or allocated.cores, memory=desired.memory or allocated.memory)


def mode_refusal(allocation: Allocation, desired: DesiredSize, policy: ResizePolicy) -> ResizeRefused | None:
    """Why the node's setting does not allow the size. What the kubelet allocated is always allowed."""
    allocated, target = allocation.allocated_size, target_of(allocation, desired)
    if target == allocated or policy.mode is ResizeMode.FREE_CAPACITY:
        return None
    if policy.mode is ResizeMode.DISABLED:
        return ResizeRefused(
            ResizeReason.DISABLED,
            "this node does not resize running shares. Leave the annotation out, or have the node's setting"
            " resize.mode changed (docs/explanation/resize.md).",
        )
    # Smaller in both: that takes nothing from anybody.
    if target.at_least(allocated) == allocated:
        return None
    return ResizeRefused(
        ResizeReason.DISABLED,
        f"this node's shares may not grow beyond what their pod requests, here {allocated.cores} cores and"
        f" {allocated.memory} of memory (setting resize.mode). Ask for no more, or create the pod again with a larger"
        " request.",
    )


def claim_refusal(
    allocation: Allocation, desired: DesiredSize, siblings: Iterable[Allocation], policy: ResizePolicy
) -> ResizeRefused | None:
    """Why a claim's share cannot have the size; `siblings` are the claim's allocations."""
    claim, allocated, target = allocation.claim, allocation.allocated_size, target_of(allocation, desired)
    if claim is None or target == allocated:
        return None
    # An isolation limits what a container has in one number for all devices of a view: one of them cannot be changed
    # alone.
    if sum(one.claim is not None and one.claim.view == claim.view for one in siblings) > 1:
        why = (
            "its containers use several of the claim's devices together, and only a share that is used alone is resized"
        )
    elif allocated.cores >= CORES_PER_GPU:
        why = f"it has all {CORES_PER_GPU} cores of its GPU, and only a share of them is resized"
    elif target.at_least(allocated) != allocated:
        had = describe(allocated, ResourceKind.VMEMORY, policy.names)
        why = (
            f"the scheduler counts what the claim was allocated, {had}, and gives the rest to other claims. Ask for no more,"
            " or make a claim for more"
        )
    else:
        return None
    return ResizeRefused(ResizeReason.UNSUPPORTED, f"{why}.")


def shown_name(allocation: Allocation, siblings: Collection[Allocation]) -> str:
    """The name of the container or claim, with the request if it has several devices; `siblings` as in `claim_refusal`."""
    if (claim := allocation.claim) is None:
        return allocation.key.container
    return claim.shown_as if len(siblings) == 1 else f"{claim.shown_as}/{claim.request}"


def unchanged_size(allocation: Allocation, known: ResizedShare | None, policy: ResizePolicy) -> DesiredSize:
    """The size of a share whose annotation is refused: the size that it has. The setting may have been another when it was
    resized: if it no longer allows that size, the share gets what the kubelet allocated."""
    if known is None:
        return DesiredSize()
    unchanged = DesiredSize(cores=known.target.cores or None, memory=known.target.memory)
    return unchanged if mode_refusal(allocation, unchanged, policy) is None else DesiredSize()


def decide_resize(
    allocation: Allocation,
    desired: DesiredSize,
    known: ResizedShare | None,
    account: GpuAccount,
    isolation: Isolation,
    policy: ResizePolicy,
) -> ResizedShare | ResizeRefused | None:
    """The share as it is to be charged, before the isolation sees it; None if nothing is to change.

    `account` is its GPU as charged for all others. Growth must fit there. What is given back stays charged until the
    isolation has enforced it.
    """
    allocated, target = allocation.allocated_size, target_of(allocation, desired)
    before = known.target if known is not None else allocated
    if target == before:
        return None
    refused = _contradiction(allocation, desired, target, policy) or _not_possible(before, target, isolation)
    charged = known.charged if known is not None else allocated
    refused = refused or _lack(charged, target, allocation, account)
    if refused is not None:
        return refused
    return ResizedShare(
        key=allocation.key,
        gpu=allocation.gpus[0],
        kind=allocation.memory_kind,
        allocated=allocated,
        target=target,
        # Growth counts at once, shrinking once it is enforced: capacity is never given away twice.
        charged=charged.at_least(target),
    )


def enforced(share: ResizedShare, isolation: Isolation, instance: str, *, uses_no_more: bool) -> ResizedShare:
    """The share once the isolation enforces its target. `instance` is the container that runs now, empty where that is not
    known; `uses_no_more`: its processes were seen to have no more memory than the target since.

    Amounts that running processes follow are charged less at once, the others when every process is of a later container.
    Processes keep memory that they have allocated, whatever the limit, so it stays charged.
    """
    since = share.instance or instance
    # If the runtime's ID is not known, nothing is concluded: processes of the old container may still run.
    is_new = bool(since) and bool(instance) and instance != since
    cores = share.target.cores if is_new or isolation.cores_follow.is_live else share.charged.cores
    is_within = isolation.memory_follows.is_live and uses_no_more
    memory = share.target.memory if is_new or is_within else share.charged.memory
    charged = ShareSize(cores=cores, memory=memory).at_least(share.target)
    return replace(share, charged=charged, instance=since)


def describe(size: ShareSize, kind: ResourceKind, names: ResourceNames) -> str:
    """`50 cores with 24 memory blocks (6 GiB)`."""
    return describe_request(_request(size.cores, size.memory, kind), names)


def _request(cores: int, memory: int, kind: ResourceKind) -> Request:
    is_units = kind.measure is Measure.UNITS
    return Request(cores=cores, units=memory) if is_units else Request(cores=cores, blocks=memory)


def status_text(
    allocations: Collection[Allocation],
    resized: Mapping[ContainerKey, ResizedShare],
    refused: Mapping[ContainerKey, str],
    unenforced: Collection[ContainerKey],
) -> str | None:
    """The annotation `gpushare-agent/resize-status` of one pod: `main:cores=50,memory=24,in-force;side:…`, the containers
    that are resized or refused, with the size that their isolation is to enforce. None if there are none.

    | word | the size |
    |---|---|
    | in-force | is what the isolation enforces |
    | shrinking | the same, and what running processes have or may use beyond it stays charged |
    | pending | is not enforced yet |
    | refused=<reason> | is what it was: the annotation was refused |
    """
    entries = []
    for allocation in sorted(allocations, key=lambda one: one.key):
        key, share = allocation.key, resized.get(allocation.key)
        if share is None and key not in refused:
            continue
        if key in refused:
            state = f"refused={refused[key]}"
        elif share is None or allocation.resized_to != share.target or key in unenforced:
            state = "pending"
        else:
            state = "shrinking" if share.charged != share.target else "in-force"
        size = allocation.size
        cores = f"cores={size.cores}," if size.cores else ""
        entries.append(f"{shown_name(allocation, allocations)}:{cores}memory={size.memory},{state}")
    return bounded_status(entries)


def bounded_status(entries: list[str]) -> str | None:
    """The status with as many whole entries as the agent reads of an annotation; None without any."""
    # Whole entries: half an entry would be read as another size.
    while len(";".join(entries)) >= MAX_CHARS:
        entries.pop()
    return ";".join(entries) or None


def _contradiction(
    allocation: Allocation, desired: DesiredSize, target: ShareSize, policy: ResizePolicy
) -> ResizeRefused | None:
    """Refuses what no node could do."""
    if allocation.memory_kind.measure is Measure.UNITS and desired.cores is not None:
        return ResizeRefused(
            ResizeReason.INVALID_REQUEST,
            f"it asked for {policy.names.gpu_mem}, whose compute follows the memory: leave cores out.",
        )
    if target.cores >= CORES_PER_GPU:
        return ResizeRefused(
            ResizeReason.INVALID_REQUEST,
            f"{target.cores} cores are no share of one GPU: at most {CORES_PER_GPU - 1} are. For whole GPUs create"
            " the pod again.",
        )
    return None


def _not_possible(before: ShareSize, target: ShareSize, isolation: Isolation) -> ResizeRefused | None:
    """Why the isolation cannot make the change once the container is created."""
    for is_changed, follows, what in (
        (target.cores != before.cores, isolation.cores_follow, "cores"),
        (target.memory != before.memory, isolation.memory_follows, "memory"),
    ):
        if is_changed and not follows.can_change:
            return ResizeRefused(
                ResizeReason.UNSUPPORTED,
                f"isolation {isolation.name} fixes a container's {what} when the container is created. Create the pod"
                " again with another request, or use an isolation that can change it (docs/explanation/resize.md).",
            )
    return None


def _lack(charged: ShareSize, target: ShareSize, allocation: Allocation, account: GpuAccount) -> ResizeRefused | None:
    """What the GPU lacks. What is charged for the share already needs no free capacity."""
    cores = target.cores if target.cores > charged.cores else 0
    request = _request(cores, target.memory if target.memory > charged.memory else 0, allocation.memory_kind)
    if request == NOTHING or (lack := account.lack(request)) is None:
        return None
    reason = {
        RefusalReason.NO_HEALTHY_GPU: ResizeReason.UNHEALTHY_GPU,
        RefusalReason.NOT_ENOUGH_CORES: ResizeReason.NOT_ENOUGH_CORES,
    }.get(lack.reason, ResizeReason.NOT_ENOUGH_MEMORY)
    cure = "It is done as soon as the GPU can serve it; or ask" if lack.cause is not Cause.TOO_LARGE else "Ask"
    return ResizeRefused(
        reason,
        f"GPU {account.label} cannot serve the size next to its other containers: {lack.of_gpu_in_detail()}. A share"
        f" cannot move to another GPU. {cure} for less.",
    )


def _unreadable(why: str) -> ResizeRefused:
    return ResizeRefused(
        ResizeReason.INVALID_REQUEST,
        f"the annotation {RESIZE_ANNOTATION} cannot be read: {why}. Nothing was changed. Write it like {_EXAMPLE}.",
    )
