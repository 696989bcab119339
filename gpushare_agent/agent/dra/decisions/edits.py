"""Makes the edits for the containers of a claim, and the CDI spec with them. Pure.

A CDI device knows no container, so edits are made for the requests that a container uses together (a view): all of the
claim's, or the one that the container names. Every result of a view has the view's edits: if a container has several
results, the runtime applies the same edits again, which changes nothing (CDI: the last value of a variable or mount counts).

The runtime applies CDI's edits after the pod's spec: a variable that they set replaces the spec's, unlike with the device
plugins, also one of a ConfigMap or of the image. So each variable that could lift a limit is set.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import chain, count
from types import MappingProxyType
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from gpushare_agent.agent.admission.decisions.container_edits import EditPolicy
from gpushare_agent.agent.delivery.device_lists import DeviceListRequest, device_edits
from gpushare_agent.agent.isolation import ISOLATIONS, ClaimUse, GpuShare, IsolationRequest
from gpushare_agent.core.claims.claim import CONFIG_KIND, AllocatedClaim, DevicePart
from gpushare_agent.core.claims.devices import is_placement_name
from gpushare_agent.core.model.allocations import ClaimRef, ContainerEdits, ContainerKey, merged
from gpushare_agent.core.model.errors import Corrupt, RefusalReason, Refused
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.isolation import DeviceListStrategy
from gpushare_agent.core.model.names import (
    CORES_PER_GPU,
    ENV_LIBRARY_PATH,
    ENV_PRELOAD,
    ENV_VISIBLE_DEVICES,
    GpuUuid,
    PodUid,
)
from gpushare_agent.core.model.pods import ClaimUser, ContainerKind, ContainerSpec, Pod
from gpushare_agent.core.model.resources import cores_of_part


def not_shared(claim: AllocatedClaim, isolation: str, pods: Sequence[Pod], policy: EditPolicy) -> Refused | None:
    """Why the users of one share cannot have it under the isolation; None if they can. The claim's results here are only
    its shares: what is not limited may be used by anyone."""
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
            remedy=f"choose another isolation ({CONFIG_KIND}.isolation)",
            config=policy.config,
            module=policy.kernel_module,
        )
    )


def _together(claim: AllocatedClaim, pod: Pod) -> list[str]:
    """Containers that use one request of the claim at the same time, by its name or by the claim as a whole: init containers
    run one by one, before the others but while the sidecars run."""
    used: dict[str, list[ContainerSpec]] = {}
    for container in pod.containers:
        for request in named_of(pod.used_claims(container).get(claim.ref.name, ()), claim.requests):
            used.setdefault(request, []).append(container)
    for users in used.values():
        # Init containers end before the others start, so one of them does not run with main containers; a sidecar does.
        has_sidecar = any(one.kind is ContainerKind.SIDECAR for one in users)
        found = [one.name for one in users if has_sidecar or one.kind is not ContainerKind.INIT]
        if len(found) > 1:
            return sorted(found)
    return []


def named_of(named: Collection[str], requests: Collection[str]) -> frozenset[str]:
    """The requests of a claim that a container names; empty text names all."""
    return frozenset(requests if "" in named else set(requests).intersection(named))


CDI_KIND = "gpushare-agent/claim"
CDI_VERSION = "0.6.0"
"""Understood by every runtime that a kubelet with resource.k8s.io/v1 runs on."""
MAX_CONTAINER_NAME = 63
"""Characters of a container's name, and of a request's; paths and annotations have names of that form."""


class PreparedResult(DevicePart, frozen=True, kw_only=True):
    """One result as it was prepared. `gpu` is a UUID; `view` names the result under whose key the isolation keeps the files
    of the view. `isolation` and `edits` are the view's, and `numbers` are what the edits were made from: the UUID and the
    minor of each GPU, in order of index; of an instance also the numbers of its nodes, and the name of its place, 0. An
    unlimited result has no size in the account, but uses its GPU."""

    key: ContainerKey
    gpu: str
    is_whole: bool
    view: str
    isolation: str
    edits: ContainerEdits = ContainerEdits()
    numbers: tuple[tuple[str, int], ...] = ()

    @property
    def core_limit(self) -> int:
        """A whole GPU's compute has no ceiling above it; by NVIDIA's names its cores do not show that it is one."""
        return 0 if self.is_whole else self.config.core_limit

    @property
    def cdi_name(self) -> str:
        """Readable, because it appears in the pod's status; unique, because a claim has a device once in a request."""
        return f"{self.device}.{self.request.replace('/', '.')}.{self.key.pod_uid}"

    @property
    def cdi_devices(self) -> tuple[str, ...]:
        """What the kubelet hands to the runtime."""
        return (f"{CDI_KIND}={self.cdi_name}", *self.edits.cdi_devices)


class PreparedClaim(Struct, frozen=True, kw_only=True):
    """A claim as it was prepared; it stays so until it is unprepared, whatever the settings become. `pod` is the name of the
    first that it is reserved for, `users` are the UIDs of all that it was reserved for then, `boot_id` is the boot in which
    the host was prepared for it."""

    ref: ClaimRef
    shown_as: str
    pod: str
    results: tuple[PreparedResult, ...]
    users: tuple[PodUid, ...] = ()
    boot_id: str = ""

    @property
    def places(self) -> dict[str, GpuUuid]:
        """The instances at its places, by the devices' names: each is made when the claim is prepared. Not those of admin
        access: the scheduler does not count it, and gives their places to others."""
        return {one.device: GpuUuid(one.gpu) for one in self.charged if is_placement_name(one.device)}

    @property
    def charged(self) -> tuple[PreparedResult, ...]:
        """The results that are in the ledger: all but admin access."""
        return tuple(one for one in self.results if not one.is_admin)

    @property
    def keys_by_isolation(self) -> Mapping[str, Sequence[ContainerKey]]:
        """The keys of what is charged, by isolation."""
        found: dict[str, list[ContainerKey]] = {}
        for one in self.charged:
            found.setdefault(one.isolation, []).append(one.key)
        return found

    @property
    def spec(self) -> dict[str, Any]:
        """The CDI document."""
        devices = [{"name": one.cdi_name, "containerEdits": _cdi_edits(one.edits)} for one in self.results]
        return {"cdiVersion": CDI_VERSION, "kind": CDI_KIND, "devices": devices}


def _cdi_edits(edits: ContainerEdits) -> dict[str, Any]:
    """Annotations have no place in a CDI spec."""
    return {
        "env": [f"{name}={value}" for name, value in edits.env],
        "deviceNodes": [
            {"path": one.container_path, "hostPath": one.host_path, "permissions": one.permissions, **one.cdi_numbers}
            for one in edits.devices
        ],
        "mounts": [
            {
                "hostPath": one.host_path,
                "containerPath": one.container_path,
                "options": ["ro" if one.read_only else "rw", "nosuid", "nodev", "bind"],
            }
            for one in edits.mounts
        ],
    }


class _Part(Struct, frozen=True):
    """One result of a claim, with its GPU and the key of its allocation. `is_whole`: it has all of the memory, and all cores
    or none. Nobody else can have a share without memory, so no cores are missing."""

    result: DevicePart
    gpu: Gpu
    is_whole: bool
    key: ContainerKey

    @property
    def is_share(self) -> bool:
        """The claim has a part of what the slice offers of the GPU."""
        return not (self.is_whole or self.result.is_admin or self.result.is_unlimited)

    @property
    def is_limited(self) -> bool:
        """The container is to be limited: by its share, or of a whole GPU by the claim's own limits of MPS."""
        return self.is_share or self.result.config.mps is not None


def _parts(claim: AllocatedClaim, gpus: Mapping[str, Gpu], block_mib: int) -> list[_Part]:
    parts = []
    for result, key in zip(claim.results, _keys(claim), strict=True):
        gpu = gpus[result.device]
        result = replace(result, memory_mib=min(result.memory_mib, gpu.memory_mib))
        has_all_memory = result.memory_mib >= gpu.memory_mib // block_mib * block_mib
        is_whole = has_all_memory and result.cores in (0, CORES_PER_GPU) and not result.is_admin
        parts.append(_Part(result, gpu, is_whole, key))
    return parts


def prepare_claim(
    claim: AllocatedClaim,
    gpus: Mapping[str, Gpu],
    pods: Sequence[Pod],
    policy: EditPolicy,
    block_mib: int,
    others: Mapping[str, AllocatedClaim] = MappingProxyType({}),
) -> PreparedClaim | Refused:
    """`gpus` by device has every GPU of the claim and of the `others`; `pods` are those it is reserved for. `others` are
    claims of these pods, by name: a container's list of GPUs has those of all its claims."""
    views = _views(claim, pods)
    if isinstance(views, Refused):
        return views
    try:
        parts = _with_own_limits(_parts(claim, gpus, block_mib))
    except Corrupt as e:
        return _refused(str(e))
    parts_of_others = {name: _parts(one, gpus, block_mib) for name, one in others.items()}
    found: dict[ContainerKey, PreparedResult] = {}
    for requests in views:
        mine = sorted((one for one in parts if one.result.name in requests), key=lambda one: one.gpu.number)
        isolation = _isolation(mine, policy)
        if isinstance(isolation, Refused):
            return isolation
        limited = tuple(one.result for one in mine if one.is_limited)
        # Only what is limited: whole GPUs and admin access need no isolation.
        if limited and (refused := not_shared(replace(claim, results=limited), isolation, pods, policy)):
            return refused
        seen = frozenset[Gpu]()
        # Claims that are not the pod's own are not added: the kubelet prepares a claim once for all its pods and names none
        # of them, so one that comes later would find the other claim's GPUs in the specification.
        if claim.owner is not None and all(one.owner == claim.owner for one in others.values()) and not limited:
            seen = _seen_of_others(claim.ref.name, requests, parts_of_others, pods)
        # The isolation's files for the view are those of its first share, because what is not limited has none.
        view = next((one.key for one in mine if one.is_limited), mine[0].key)
        shown = _in_order([*seen, *(one.gpu for one in mine)])
        users = [container for _, container in _users(claim.ref.name, requests, pods)]
        edits = _view_edits(view, mine, shown, isolation, policy, policy.handlers_of(pods), users)
        if isinstance(edits, Refused):
            return edits
        numbers = _numbers(shown, gpus)
        for one in mine:
            # By NVIDIA's names nobody asks for cores: all the memory means the whole GPU.
            result = replace(one.result, cores=CORES_PER_GPU) if one.is_whole else one.result
            found[one.key] = PreparedResult(
                **asdict(result), key=one.key, gpu=one.gpu.uuid, is_whole=one.is_whole, view=view.container,
                isolation=isolation, edits=edits, numbers=numbers,
            )  # fmt: skip
    return PreparedClaim(
        ref=claim.ref,
        shown_as=claim.shown_as,
        pod=claim.users[0][0] if claim.users else claim.ref.name,
        # The views have grouped the results: here they are in the claim's order again.
        results=tuple(found[one.key] for one in parts),
        users=tuple(uid for _, uid in claim.users),
    )


def prepare_again(
    claim: PreparedClaim, gpus: Mapping[GpuUuid, Gpu], policy: EditPolicy, places: Mapping[str, Gpu]
) -> PreparedClaim | Refused:
    """The claim with the driver's numbers of now, which are others after a reboot: unchanged where each view's GPUs have the
    numbers and the order that its edits were made from, whatever the settings are now. `places` has the instances by the
    names of their places: one that was made again is another one, with another UUID."""
    recorded = claim
    if names := {name for one in claim.results for name in (one.device, *dict(one.numbers)) if is_placement_name(name)}:
        # Its own, or of another claim of the container, whose list has the instances of all.
        if missing := sorted(names - places.keys()):
            why = f"the MIG instance at {missing[0]} is gone, and not made again yet. The kubelet tries again."
            return Refused(RefusalReason.NOT_READY, why)
        moved = (replace(one, gpu=places[one.device].uuid) if one.device in names else one for one in claim.results)
        claim = replace(claim, results=tuple(moved))
    for one in claim.results:
        # Whoever has its number now is another GPU.
        if (gpu := gpus.get(GpuUuid(one.gpu))) is None or (gpu.minor < 0 and not gpu.is_healthy):
            return gone(one.gpu, gpu)
    made = []
    for one in claim.results:
        of_view = (other for other in claim.results if other.view == one.view)
        view = [_Part(other, gpus[GpuUuid(other.gpu)], other.is_whole, other.key) for other in of_view]
        # GPUs of another claim too; that one is refused where its GPU is gone.
        known = [gpus[GpuUuid(name)] for name, _ in one.numbers if name in gpus]
        known += [places[name] for name, _ in one.numbers if name in places]
        shown = _in_order([*known, *(part.gpu for part in view)])
        if one.numbers != _numbers(shown, places):
            view.sort(key=lambda part: part.gpu.number)
            edits = _view_edits(ContainerKey(one.key.pod_uid, one.view), view, shown, one.isolation, policy)
            if isinstance(edits, Refused):
                return edits
            one = replace(one, edits=edits, numbers=_numbers(shown, places))
        made.append(one)
    return recorded if made == [*recorded.results] else replace(claim, results=tuple(made))


def gone(name: str, gpu: Gpu | None = None) -> Refused:
    """The refusal of a claim whose GPU, or instance, the driver does not show."""
    kind, then = "GPU", "bring that GPU back, or delete"
    why = "it was removed or replaced, or MIG divides it" if gpu is None else gpu.unhealthy_reason.rstrip(".")
    if name.startswith("MIG-"):
        # One that is made again, after a reboot too, has another UUID.
        kind, then = "MIG instance", "delete"
        why = "it was removed, and one that is made again is another one"
    return Refused(
        RefusalReason.UNKNOWN_DEVICE,
        f"{kind} {name}, which the claim has, is not shown by the driver of this node now: {why}. Nothing else is given for"
        f" it: {then} the pod, and the claim too if no template made it, and create them again.",
    )


def _in_order(gpus: Iterable[Gpu]) -> tuple[Gpu, ...]:
    return tuple(sorted(set(gpus), key=lambda gpu: gpu.number))


def _numbers(gpus: Iterable[Gpu], places: Mapping[str, Gpu]) -> tuple[tuple[str, int], ...]:
    at = {gpu.uuid: [(name, 0)] for name, gpu in places.items() if is_placement_name(name)}
    found: list[tuple[str, int]] = []
    for gpu in gpus:
        found += [(gpu.uuid, number) for number in (gpu.minor, *chain(*gpu.cap_nodes.values()))]
        found += at.get(gpu.uuid, [])
    return tuple(found)


def conflict(made: PreparedClaim, others: Iterable[PreparedClaim], pods: Iterable[Pod]) -> str:
    """Why a container cannot use the claim together with another one; empty where each can."""
    by_name = {other.ref.name: other for other in others if other.ref.namespace == made.ref.namespace}
    for pod, container in _users(made.ref.name, {one.name for one in made.results}, pods):
        used = pod.used_claims(container)
        own = _use(made, used[made.ref.name])
        for name in sorted(used.keys() & by_name.keys() - {made.ref.name}):
            if both := own.lost_with(_use(by_name[name], used[name])):
                by_list = _OR_BY_LIST if both == [ENV_VISIBLE_DEVICES] else ""
                return (
                    f"container {container.name} of pod {pod.name} uses the claim {name} too, and has one {both[0]} for"
                    f" both. Ask for all of a container's GPUs by requests of one claim{by_list}"
                )
    return ""


_OR_BY_LIST = (
    "; or for whole GPUs by claims that templates make (resourceClaimTemplateName); or let the node name GPUs in another way"
    " (device_list_strategy cdi-cri), by which those of several claims add up"
)


class _Use(Struct, frozen=True):
    """What a container has of a claim: UUIDs, variables, and mounts by path."""

    gpus: frozenset[str]
    variables: Mapping[str, str]
    mounts: Mapping[str, str]

    def lost_with(self, other: _Use) -> list[str]:
        """Variables and paths by which one claim's limits or GPUs would be lost."""
        # The runtime takes the last claim's value of a variable or a path.
        mine, theirs = {**self.variables, **self.mounts}, {**other.variables, **other.mounts}
        found = {what for what in mine.keys() & theirs.keys() if mine[what] != theirs[what]}
        # Variables that limit (all but these two) know the GPUs by their order, which another claim's GPUs change.
        for one, another in ((self, other), (other, self)):
            if another.gpus - one.gpus:
                found |= one.variables.keys() - {ENV_VISIBLE_DEVICES, ENV_LIBRARY_PATH}
        return sorted(found)


def _use(claim: PreparedClaim, named: Collection[str]) -> _Use:
    """What a container that names these requests has; an empty name stands for all."""
    mine = [one for one in claim.results if {"", one.name} & set(named)]
    return _Use(
        frozenset(one.gpu for one in mine),
        {name: value for one in mine for name, value in one.edits.env},
        {mount.container_path: mount.host_path for one in mine for mount in one.edits.mounts},
    )


def encode_spec(claim: PreparedClaim) -> bytes:
    return json.dumps(claim.spec, indent=1).encode() + b"\n"


def _view_edits(
    key: ContainerKey,
    parts: Sequence[_Part],
    gpus: tuple[Gpu, ...],
    isolation: str,
    policy: EditPolicy,
    handlers: tuple[str, ...] = (),
    users: Sequence[ContainerSpec] = (),
) -> ContainerEdits | Refused:
    """What a container gets that has these results, in order of GPU index. `gpus` are theirs, and those of other claims that
    the containers of the view see too; `users` are these containers."""
    shares = _shares(parts)
    container = ContainerSpec(name=key.container, kind=ContainerKind.MAIN, position=0)
    request = IsolationRequest(
        pod_uid=key.pod_uid,
        container=container,
        shares=shares,
        config=policy.config,
        core_limit=max(0 if one.is_whole else one.result.config.core_limit for one in parts),
        pod_memory_mib=sum(share.memory_mib for share in shares),
        memory_unit_mib=policy.names.gpu_mem_unit_mib,
        handlers=handlers,
    )
    isolated = ISOLATIONS[isolation].edits(request)
    if isinstance(isolated, Refused):
        return isolated
    # The spec of each may lift the limit, but not by a variable that the edits set.
    for user in users:
        user = replace(user, env={name: value for name, value in user.env.items() if name == ENV_PRELOAD})
        if isinstance(checked := ISOLATIONS[isolation].edits(replace(request, container=user)), Refused):
            return checked
    listed = DeviceListRequest(gpus=gpus, node=policy.devices, cdi_kind=policy.cdi_kind, unique="claim")
    devices = device_edits(listed, tuple(map(_by_cdi, policy.strategies)))
    return merged(devices, ISOLATIONS[isolation].driver_files(container, policy.config), isolated)


def _with_own_limits(parts: Sequence[_Part]) -> list[_Part]:
    """The parts with the limits of MPS that concern each: a configuration has them for all of its GPUs. Raises Corrupt."""
    found = []
    for part in parts:
        config = part.result.config
        if (mps := config.mps) is not None:
            # The GPUs of one configuration: two may say the same, each for its own requests.
            uuids = list({one.gpu.uuid for one in parts if one.result.config.mps is mps})
            own = replace(mps, memory_mib=mps.memory_of(part.gpu.uuid, uuids), memory_mib_of=())
            part = replace(part, result=replace(part.result, config=replace(config, mps=own)))
        found.append(part)
    return found


def _shares(parts: Sequence[_Part]) -> tuple[GpuShare, ...]:
    """Two results on one GPU make one share of it, because the container cannot distinguish them: all of it if one is admin
    access."""
    found: dict[str, GpuShare] = {}
    for part in parts:
        result, gpu, mps = part.result, part.gpu, part.result.config.mps
        is_all = result.is_admin or result.is_unlimited
        memory_mib, cores = (gpu.memory_mib, CORES_PER_GPU) if is_all else (result.memory_mib, result.cores)
        if mps is not None:
            memory_mib, cores = mps.memory_mib or gpu.memory_mib, mps.thread_percentage
        share = GpuShare(
            gpu=gpu,
            # A claim for memory alone: compute follows it, as with GPUShare's resource.
            cores=cores or cores_of_part(Fraction(memory_mib, gpu.memory_mib)),
            memory_mib=min(memory_mib, gpu.memory_mib),
            is_whole=not part.is_limited,
        )
        if (known := found.get(gpu.uuid)) is not None:
            share = replace(
                known,
                cores=min(CORES_PER_GPU, known.cores + share.cores),
                memory_mib=min(gpu.memory_mib, known.memory_mib + share.memory_mib),
                is_whole=known.is_whole or share.is_whole,
            )
        found[gpu.uuid] = share
    return tuple(found.values())


def other_claims(name: str, pods: Iterable[Pod]) -> list[str]:
    """The names of the other claims of containers that use the claim of this name."""
    uses = [pod.used_claims(one).keys() for pod in pods for one in pod.containers]
    return sorted(set().union(*(claims for claims in uses if name in claims)) - {name})


def _seen_of_others(
    name: str, requests: Collection[str], others: Mapping[str, Sequence[_Part]], pods: Iterable[Pod]
) -> frozenset[Gpu]:
    """The GPUs of other claims that every container of a view has too, if none of them is limited: limits know the GPUs by
    their order, which another claim would change. One specification is for all containers of a view. If they differ, or a
    claim limits, nothing is added, and `conflict` refuses them."""
    found: set[frozenset[Gpu]] = set()
    for pod, container in _users(name, requests, pods):
        used = pod.used_claims(container)
        mine = used.keys() & others.keys()
        seen = [one for other in mine for one in others[other] if {"", one.result.name} & used[other]]
        found.add(frozenset() if any(one.is_limited for one in seen) else frozenset(one.gpu for one in seen))
    return found.pop() if len(found) == 1 else frozenset()


def _users(name: str, requests: Collection[str], pods: Iterable[Pod]) -> Iterator[ClaimUser]:
    """The containers that use one of these requests of the claim of this name."""
    for pod in pods:
        for container in pod.containers:
            if {"", *requests}.intersection(pod.used_claims(container).get(name, ())):
                yield pod, container


def _isolation(parts: Sequence[_Part], policy: EditPolicy) -> str | Refused:
    """The isolation of a container that has these results."""
    # What is not limited decides only if nothing else does: for a whole GPU the device plugins' isolation, for admin access
    # anything.
    limited = [one for one in parts if one.is_limited]
    charged = [one for one in parts if not (one.result.is_admin or one.result.is_unlimited)]
    asked = {one.result.config.isolation for one in limited or charged or parts}
    if len(asked) > 1:
        return _refused(
            "its requests ask for several isolations, and a container has one. Ask for the same in all of them"
        )
    text = asked.pop()
    both = {one.gpu.index for one in limited} & {one.gpu.index for one in parts if one.result.is_unlimited}
    if both:
        # The container cannot tell them apart: the limit would be lost.
        return _refused(
            f"a container has GPU {min(both)} by a request with a limit and by one without. Ask once for each GPU, or let"
            " different containers use the requests"
        )
    for one in limited:
        if one.result.config.mps is not None and one.is_share:
            return _refused(
                f"GpuConfig asks for MPS, and request {one.result.request} has a share, whose limits are its own. Ask for"
                f" the whole GPU, or by {CONFIG_KIND} for isolation mps"
            )
    allowed = sorted({policy.isolation, *policy.allowed, *(() if limited else ("none",))})
    if text and text not in allowed:
        return _refused(f"its isolation is {text[:40]!r}, and this node allows {', '.join(allowed)}. Name one of these")
    return text or policy.isolation


def _views(claim: AllocatedClaim, pods: Sequence[Pod]) -> list[frozenset[str]] | Refused:
    """The sets of requests that containers use together. All requests that no container names are one view. In a claim that
    the scheduler made for an extended resource, each is a view of its own, because no container names it."""
    found: dict[frozenset[str], str] = {}
    is_named = any(claim.ref.name in pod.claims.values() for pod in pods)
    for pod, container in _users(claim.ref.name, claim.requests, pods):
        named = pod.used_claims(container)[claim.ref.name]
        found.setdefault(named_of(named, claim.requests), f"{pod.name}/{container.name}")
    for view, user in found.items():
        # A CDI device is one for all containers: two limits for one request cannot both be written.
        other = next((one for one in found if one != view and one & view), None)
        if other is not None:
            return _refused(
                f"containers {user} and {found[other]} use different sets of its requests that have one in common, and the"
                " limits are for all GPUs of a container. Let each container use the whole claim, or requests of its own"
            )
    rest = claim.requests.difference(*found)
    if rest:
        found |= {rest: ""} if is_named or not pods else {frozenset({name}): "" for name in rest}
    return [view for view in found if view]


def _keys(claim: AllocatedClaim) -> list[ContainerKey]:
    """One for each result, in their order: the request's name, with a number if the request has several."""
    devices, numbered = Counter(one.name for one in claim.results), Counter[str]()
    names = []
    for one in claim.results:
        suffix = f"-{numbered[one.name]}" if devices[one.name] > 1 else ""
        numbered[one.name] += 1
        names.append(one.name[: MAX_CONTAINER_NAME - len(suffix)].rstrip("-") + suffix)
    return [ContainerKey(PodUid(claim.ref.uid), name) for name in distinct_names(names)]


def distinct_names(names: Sequence[str]) -> list[str]:
    """No two alike, each as long as a container's name may be: one that an earlier result has gets a number. A request may
    be named as another's result (`a-0`), and two long requests may differ where they were cut."""
    taken, found = set(names), list[str]()
    for name in names:
        unique = name
        if name in found:
            numbered = (f"{name[: MAX_CONTAINER_NAME - len(str(n)) - 1].rstrip('-')}-{n}" for n in count(2))
            unique = next(one for one in numbered if one not in taken)
            # A numbered name must not be another result's: `a-2` may be a request of its own.
            taken.add(unique)
        found.append(unique)
    return found


def _by_cdi(strategy: DeviceListStrategy) -> DeviceListStrategy:
    """Only device plugins use the annotation; the kubelet also takes what it names from the answer."""
    return DeviceListStrategy.CDI_CRI if strategy is DeviceListStrategy.CDI_ANNOTATIONS else strategy


def _refused(why: str) -> Refused:
    return Refused(RefusalReason.INVALID_REQUEST, why)
