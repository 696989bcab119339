"""What the containers of a claim get, and the CDI spec that says it. Pure.

A CDI device knows no container, so edits are made for the requests that a container uses together (a view): all of the
claim's, or the one that the container names. Every result of a view has the view's edits: where a container has several of
them the runtime applies the same edits again, which changes nothing (CDI: of a variable and a mount point the last counts).

The runtime applies CDI's edits after the pod's spec: a variable that they set replaces the spec's, unlike with the device
plugins, also one of a ConfigMap or of the image. So each variable that could lift a limit is set.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import count
from types import MappingProxyType

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from gpushare_agent.admission.decisions.container_edits import EditPolicy
from gpushare_agent.cluster.kube.claims import main_request
from gpushare_agent.dra.decisions.claim import CONFIG_KIND, AllocatedClaim, ClaimResult, DevicePart
from gpushare_agent.dra.decisions.gpu_config import MpsLimits
from gpushare_agent.isolation import ISOLATIONS, ClaimUse, GpuShare, IsolationRequest
from gpushare_agent.isolation.device_lists import DeviceListRequest, device_edits
from gpushare_agent.model.allocations import ClaimRef, ContainerEdits, ContainerKey, merged
from gpushare_agent.model.errors import Corrupt, RefusalReason, Refused
from gpushare_agent.model.gpus import Gpu
from gpushare_agent.model.isolation import DeviceListStrategy
from gpushare_agent.model.names import CORES_PER_GPU, ENV_LIBRARY_PATH, ENV_VISIBLE_DEVICES, PodUid
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.model.resources import cores_of_part


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
            remedy=f"choose another isolation ({CONFIG_KIND}.isolation)",
            config=policy.config,
            module=policy.kernel_module,
        )
    )


def _together(claim: AllocatedClaim, pod: Pod) -> list[str]:
    """Containers that use one request of the claim at the same time, by its name or by the claim as a whole: init containers
    run one by one, before the others but beside the sidecars."""
    names = {name for name, claim_name in pod.claims.items() if claim_name == claim.ref.name}
    every = {main_request(result.request) for result in claim.results}
    used: dict[str, list[ContainerSpec]] = {}
    for container in pod.containers:
        named = {request for name, request in container.claims if name in names}
        for request in every if "" in named else named & every:
            used.setdefault(request, []).append(container)
    for users in used.values():
        # Init containers end before the others start, so one of them beside main containers is alone; a sidecar stays.
        has_sidecar = any(one.kind is ContainerKind.SIDECAR for one in users)
        found = [one.name for one in users if has_sidecar or one.kind is not ContainerKind.INIT]
        if len(found) > 1:
            return sorted(found)
    return []


CDI_KIND = "gpushare-agent/claim"
CDI_VERSION = "0.6.0"
"""Understood by every runtime that a kubelet with resource.k8s.io/v1 runs on."""
MAX_CONTAINER_NAME = 63
"""Characters of a container's name, and of a request's; paths and annotations have names of that form."""


class PreparedResult(DevicePart, frozen=True, kw_only=True):
    """One result as it was prepared. `gpu` is a UUID; `cdi_devices` are what the kubelet hands to the runtime; `view` names
    the result under whose key the isolation keeps the files of the view. `isolation` is the view's. What is unlimited is in
    the account of no size, but uses its GPU."""

    key: ContainerKey
    gpu: str
    is_whole: bool
    cdi_devices: tuple[str, ...]
    core_limit: int = 0
    view: str
    isolation: str


class CdiNode(Struct, rename="camel"):
    path: str
    host_path: str
    permissions: str


class CdiMount(Struct, rename="camel"):
    host_path: str
    container_path: str
    options: Sequence[str]


class CdiEdits(Struct, rename="camel"):
    env: Sequence[str]
    device_nodes: Sequence[CdiNode]
    mounts: Sequence[CdiMount]


class CdiDevice(Struct, rename="camel"):
    name: str
    container_edits: CdiEdits


class CdiSpec(Struct, rename="camel"):
    """What of the CDI specification a claim's file has."""

    cdi_version: str
    kind: str
    devices: Sequence[CdiDevice]


class PreparedClaim(Struct, frozen=True, kw_only=True):
    """A claim as it was prepared; it stays so until it is unprepared, whatever the settings become. `pod` is the name of the
    first that it is reserved for, `users` are the UIDs of all that it was reserved for then. `spec` is the CDI document."""

    ref: ClaimRef
    shown_as: str
    pod: str
    results: tuple[PreparedResult, ...]
    spec: CdiSpec
    users: tuple[PodUid, ...] = ()

    @property
    def charged(self) -> tuple[PreparedResult, ...]:
        """The results that are in the ledger: all but admin access."""
        return tuple(one for one in self.results if not one.is_admin)

    @property
    def keys_by_isolation(self) -> Mapping[str, Sequence[ContainerKey]]:
        """Of what is charged."""
        found: dict[str, list[ContainerKey]] = {}
        for one in self.charged:
            found.setdefault(one.isolation, []).append(one.key)
        return found


def prepare_claim(
    claim: AllocatedClaim,
    gpus: Mapping[int, Gpu],
    pods: Sequence[Pod],
    policy: EditPolicy,
    block_mib: int,
    beside: Mapping[str, AllocatedClaim] = MappingProxyType({}),
) -> PreparedClaim | Refused:
    """`gpus` by index has every GPU of the claim, and of those `beside` it; `pods` are those that it is reserved for.
    `beside` are other claims of these pods, by name: a container's list of GPUs has those of all its claims."""
    views = _views(claim, pods)
    if isinstance(views, Refused):
        return views
    keys = dict(zip(claim.results, _keys(claim), strict=True))
    devices, results = [], []
    for view in views:
        isolation = _isolation(claim, view, gpus, policy, block_mib)
        if isinstance(isolation, Refused):
            return isolation
        prepared = _View(claim, view, keys, gpus, policy, isolation, block_mib)
        # Only what is limited: whole GPUs and admin access need no isolation.
        if prepared.limited and (
            refused := not_shared(replace(claim, results=prepared.limited), isolation, pods, policy)
        ):
            return refused
        edits = prepared.edits(seen_beside(claim, view, beside, gpus, pods, block_mib))
        if isinstance(edits, Refused):
            return edits
        for result, _ in prepared.results:
            name = cdi_name(result, claim.ref)
            devices.append(CdiDevice(name, cdi_edits(edits)))
            results.append(prepared.result(result, (f"{CDI_KIND}={name}", *edits.cdi_devices)))
    # The views have grouped the results: here they are in the claim's order again.
    order = {one: place for place, one in enumerate((r.request, r.device) for r in claim.results)}
    return PreparedClaim(
        ref=claim.ref,
        shown_as=claim.shown_as,
        pod=claim.users[0][0] if claim.users else claim.ref.name,
        results=tuple(sorted(results, key=lambda one: order[one.request, one.device])),
        spec=CdiSpec(CDI_VERSION, CDI_KIND, devices),
        users=tuple(uid for _, uid in claim.users),
    )


def conflict(made: PreparedClaim, others: Iterable[PreparedClaim], pods: Iterable[Pod]) -> str:
    """Why a container cannot use the claim beside another one, empty where each can."""
    beside = {other.ref.name: other for other in others if other.ref.namespace == made.ref.namespace}
    for pod in pods:
        for container in pod.containers:
            used: dict[str, set[str]] = {}
            for name, request in container.claims:
                used.setdefault(pod.claims.get(name, ""), set()).add(request)
            own = _use(made, used.get(made.ref.name, set()))
            for name in sorted(used.keys() & beside.keys() - {made.ref.name}):
                if both := own.lost_beside(_use(beside[name], used[name])):
                    by_list = _OR_BY_LIST if both == [ENV_VISIBLE_DEVICES] else ""
                    return (
                        f"container {container.name} of pod {pod.name} uses the claim {name} too, and has one {both[0]}"
                        f" for both. Ask for all of a container's GPUs by requests of one claim{by_list}"
                    )
    return ""


_OR_BY_LIST = (
    "; or for whole GPUs by claims that templates make (resourceClaimTemplateName); or let the node name GPUs in another way"
    " (device_list_strategy cdi-cri), by which those of several claims add up"
)


class _Use(Struct, frozen=True):
    """What a container has of a claim: UUIDs, variables, and what is mounted in it where."""

    gpus: frozenset[str]
    variables: Mapping[str, str]
    mounts: Mapping[str, str]

    def lost_beside(self, other: _Use) -> list[str]:
        """Variables and paths of which one claim's limits or GPUs would be lost."""
        # Of one variable, or of one path, the runtime takes the last claim's.
        mine, theirs = {**self.variables, **self.mounts}, {**other.variables, **other.mounts}
        found = {what for what in mine.keys() & theirs.keys() if mine[what] != theirs[what]}
        # Variables that limit, so all but these two, know the GPUs by their order, which those of another claim change.
        for one, beside in ((self, other), (other, self)):
            if beside.gpus - one.gpus:
                found |= one.variables.keys() - {ENV_VISIBLE_DEVICES, ENV_LIBRARY_PATH}
        return sorted(found)


def _use(claim: PreparedClaim, requests: Collection[str]) -> _Use:
    """Of a container that names these requests, the empty one for all."""
    mine = [one for one in claim.results if {"", main_request(one.request)} & set(requests)]
    names = {name for one in mine for name in one.cdi_devices}
    edits = [one.container_edits for one in claim.spec.devices if f"{CDI_KIND}={one.name}" in names]
    return _Use(
        frozenset(one.gpu for one in mine),
        dict(pair.split("=", 1) for one in edits for pair in one.env),
        {mount.container_path: mount.host_path for one in edits for mount in one.mounts},
    )


def cdi_name(result: ClaimResult, ref: ClaimRef) -> str:
    """Readable, for it appears in the pod's status; unique, for a claim has a device once in a request."""
    return f"{result.device}.{result.request.replace('/', '.')}.{ref.uid}"


def cdi_edits(edits: ContainerEdits) -> CdiEdits:
    """Annotations have no place in a CDI spec."""
    return CdiEdits(
        env=[f"{name}={value}" for name, value in edits.env],
        device_nodes=[CdiNode(one.container_path, one.host_path, one.permissions) for one in edits.devices],
        mounts=[
            CdiMount(one.host_path, one.container_path, ["ro" if one.read_only else "rw", "nosuid", "nodev", "bind"])
            for one in edits.mounts
        ],
    )


def encode_spec(spec: CdiSpec) -> bytes:
    return json.dumps(to_builtins(spec), indent=1).encode() + b"\n"


class _View:
    """The results that one container sees, by GPU index."""

    def __init__(
        self,
        claim: AllocatedClaim,
        requests: frozenset[str],
        keys: Mapping[ClaimResult, ContainerKey],
        gpus: Mapping[int, Gpu],
        policy: EditPolicy,
        isolation: str,
        block_mib: int,
    ) -> None:
        self._claim = claim
        self._keys = keys
        self._gpus = gpus
        self._policy = policy
        self._isolation = isolation
        self._block_mib = block_mib
        mine = [result for result in claim.results if main_request(result.request) in requests]
        self.results = sorted(((r, gpus[r.index]) for r in mine), key=lambda pair: pair[0].index)

    @property
    def limited(self) -> tuple[ClaimResult, ...]:
        return tuple(one for one, gpu in self.results if _is_limited(one, gpu, self._block_mib))

    def edits(self, beside: Collection[Gpu]) -> ContainerEdits | Refused:
        """`beside` are GPUs of other claims that the containers of the view see too."""
        gpus = tuple(sorted({*beside, *(gpu for _, gpu in self.results)}, key=lambda gpu: gpu.index))
        policy, isolation = self._policy, ISOLATIONS[self._isolation]
        try:
            shares = self._shares()
        except Corrupt as e:
            return _refused(str(e))
        container = ContainerSpec(name=self._key.container, kind=ContainerKind.MAIN, position=0)
        isolated = isolation.edits(
            IsolationRequest(
                pod_uid=PodUid(self._claim.ref.uid),
                container=container,
                shares=shares,
                config=policy.config,
                core_limit=max(self._core_limit(result, gpu) for result, gpu in self.results),
                pod_memory_mib=sum(share.memory_mib for share in shares),
                memory_unit_mib=policy.names.gpu_mem_unit_mib,
                is_claim=True,
            )
        )
        if isinstance(isolated, Refused):
            return isolated
        request = DeviceListRequest(gpus=gpus, node=policy.devices, cdi_kind=policy.cdi_kind, unique="claim")
        devices = device_edits(request, tuple(map(_by_cdi, policy.strategies)))
        return merged(devices, isolation.driver_beside(container, policy.config), isolated)

    def result(self, result: ClaimResult, cdi_devices: tuple[str, ...]) -> PreparedResult:
        gpu = next(gpu for one, gpu in self.results if one is result)
        is_whole = _is_whole(result, gpu, self._block_mib)
        return PreparedResult(
            key=self._keys[result],
            request=result.request,
            device=result.device,
            share_id=result.share_id,
            gpu=gpu.uuid,
            # By NVIDIA's names nobody asks for cores, and who has all the memory has the GPU.
            cores=CORES_PER_GPU if is_whole else result.cores,
            memory_mib=result.memory_mib,
            is_whole=is_whole,
            cdi_devices=cdi_devices,
            core_limit=self._core_limit(result, gpu),
            view=self._key.container,
            isolation=self._isolation,
            is_admin=result.is_admin,
        )

    def _core_limit(self, result: ClaimResult, gpu: Gpu) -> int:
        """A whole GPU's compute has no ceiling above it; by NVIDIA's names its cores do not show that it is one."""
        return 0 if _is_whole(result, gpu, self._block_mib) else result.config.core_limit

    @property
    def _key(self) -> ContainerKey:
        """The key of the files that the isolation has for the view: its first share's, for what is not limited has none."""
        return self._keys[(*self.limited, self.results[0][0])[0]]

    def _shares(self) -> tuple[GpuShare, ...]:
        """Two results on one GPU make one share of it, for the container cannot distinguish them: all of it where one is
        admin access."""
        found: dict[str, GpuShare] = {}
        for result, gpu in self.results:
            is_all = result.is_admin or result.is_unlimited
            memory_mib, cores = (gpu.memory_mib, CORES_PER_GPU) if is_all else (result.memory_mib, result.cores)
            if (mps := result.config.mps) is not None:
                memory_mib, cores = (
                    mps.memory_of(gpu.uuid, self._uuids_of(mps)) or gpu.memory_mib,
                    mps.thread_percentage,
                )
            share = GpuShare(
                gpu=gpu,
                # A claim for memory alone: compute follows it, as with GPUShare's resource.
                cores=cores or cores_of_part(Fraction(memory_mib, gpu.memory_mib)),
                memory_mib=min(memory_mib, gpu.memory_mib),
                is_whole=not _is_limited(result, gpu, self._block_mib),
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

    def _uuids_of(self, limits: MpsLimits) -> list[str]:
        """The GPUs of one configuration: two may say the same, each of its own requests."""
        mine = [one.index for one in self._claim.results if one.config.mps is limits]
        return [gpu.uuid for gpu in self._gpus.values() if gpu.index in mine]


def claims_beside(name: str, pods: Iterable[Pod]) -> list[str]:
    """The names of the other claims of containers that use the claim of this name."""
    uses = [{pod.claims.get(own, "") for own, _ in one.claims} for pod in pods for one in pod.containers]
    return sorted(set().union(*(claims for claims in uses if name in claims)) - {"", name})


def seen_beside(
    claim: AllocatedClaim,
    requests: frozenset[str],
    beside: Mapping[str, AllocatedClaim],
    gpus: Mapping[int, Gpu],
    pods: Iterable[Pod],
    block_mib: int,
) -> frozenset[Gpu]:
    """The GPUs of other claims that every container of a view has too, where none of all these is limited: limits know the
    GPUs by their order, which another claim would change. One specification is for all containers of a view, so where they
    differ, or a claim limits, nothing is added, and `conflict` refuses them. So it is with claims that are not the pod's
    own: the kubelet prepares a claim once for all its pods and names none of them, so one that comes later would find the
    other claim's GPUs in the specification."""

    def unlimited(one: AllocatedClaim, named: Collection[str]) -> frozenset[Gpu] | None:
        mine = [result for result in one.results if "" in named or main_request(result.request) in named]
        limited = any(_is_limited(result, gpus[result.index], block_mib) for result in mine)
        return None if limited else frozenset(gpus[result.index] for result in mine)

    are_own = claim.owner is not None and all(one.owner == claim.owner for one in beside.values())
    if not are_own or unlimited(claim, requests) is None:
        return frozenset()
    found: set[frozenset[Gpu]] = set()
    for pod in pods:
        for container in pod.containers:
            used: dict[str, set[str]] = {}
            for name, request in container.claims:
                used.setdefault(pod.claims.get(name, ""), set()).add(request)
            own = used.get(claim.ref.name, set())
            if "" not in own and not own & requests:
                continue
            others = [unlimited(beside[name], used[name]) for name in sorted(used.keys() & beside.keys())]
            seen = [one for one in others if one is not None]
            found.add(frozenset().union(*seen) if len(seen) == len(others) else frozenset())
    return found.pop() if len(found) == 1 else frozenset()


def _isolation(
    claim: AllocatedClaim, view: Collection[str], gpus: Mapping[int, Gpu], policy: EditPolicy, block_mib: int
) -> str | Refused:
    mine = [result for result in claim.results if main_request(result.request) in view]
    # What is not limited decides only where nothing else does: of a whole GPU the device plugins' isolation, of admin access
    # anything.
    limited = [result for result in mine if _is_limited(result, gpus[result.index], block_mib)]
    charged = [result for result in mine if not (result.is_admin or result.is_unlimited)]
    asked = {result.config.isolation for result in limited or charged or mine}
    if len(asked) > 1:
        return _refused(
            "its requests ask for several isolations, and a container has one. Ask for the same in all of them"
        )
    text = asked.pop()
    both = {result.index for result in limited} & {result.index for result in mine if result.is_unlimited}
    if both:
        # The container cannot tell them apart: the limit would be lost.
        return _refused(
            f"a container has GPU {min(both)} by a request with a limit and by one without. Ask once for each GPU, or let"
            " different containers use the requests"
        )
    for result in limited:
        if result.config.mps is not None and _is_share(result, gpus[result.index], block_mib):
            return _refused(
                f"GpuConfig asks for MPS, and request {result.request} has a share, whose limits are its own. Ask for the"
                f" whole GPU, or by {CONFIG_KIND} for isolation mps"
            )
    allowed = sorted({policy.isolation, *policy.allowed, *(() if limited else ("none",))})
    if text and text not in allowed:
        return _refused(f"its isolation is {text[:40]!r}, and this node allows {', '.join(allowed)}. Name one of these")
    return text or policy.isolation


def _views(claim: AllocatedClaim, pods: Iterable[Pod]) -> list[frozenset[str]] | Refused:
    """The sets of requests that containers use together. Requests that none of them names are one view, all of them
    together; of a claim that the scheduler made for an extended resource each is its own, for no container names it."""
    every = frozenset(main_request(result.request) for result in claim.results)
    found: dict[frozenset[str], str] = {}
    is_named = False
    for pod in pods:
        names = {name for name, claim_name in pod.claims.items() if claim_name == claim.ref.name}
        is_named = is_named or bool(names)
        for container in pod.containers:
            used = [request for name, request in container.claims if name in names]
            if used:
                view = every if "" in used else frozenset(used) & every
                found.setdefault(view, f"{pod.name}/{container.name}")
    for view, user in found.items():
        # A CDI device is one for all containers: two limits for one request cannot both be written.
        other = next((one for one in found if one != view and one & view), None)
        if other is not None:
            return _refused(
                f"containers {user} and {found[other]} use different sets of its requests that have one in common, and the"
                " limits are for all GPUs of a container. Let each container use the whole claim, or requests of its own"
            )
    rest = every.difference(*found)
    if rest:
        found |= {rest: ""} if is_named or not pods else {frozenset({name}): "" for name in rest}
    return [view for view in found if view]


def _keys(claim: AllocatedClaim) -> list[ContainerKey]:
    """One for each result, in their order: the request's name, with the device where the request has several."""
    devices = Counter(main_request(one.request) for one in claim.results)
    names = []
    for one in claim.results:
        main = main_request(one.request)
        suffix = f"-{one.device}" if devices[main] > 1 else ""
        names.append(main[: MAX_CONTAINER_NAME - len(suffix)].rstrip("-") + suffix)
    return [ContainerKey(PodUid(claim.ref.uid), name) for name in distinct_names(names)]


def distinct_names(names: Sequence[str]) -> list[str]:
    """No two alike, each as long as a container's name may be: one that an earlier result has gets a number. A request may
    be named as another's result (`a-gpu-0`), and two long requests may differ where they were cut."""
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


def _is_share(result: ClaimResult, gpu: Gpu, block_mib: int) -> bool:
    """The claim has a part of what the slice offers of the GPU."""
    return not (_is_whole(result, gpu, block_mib) or result.is_admin or result.is_unlimited)


def _is_whole(result: ClaimResult, gpu: Gpu, block_mib: int) -> bool:
    """All of the memory, with all cores or none: without memory nobody else can have a share, so none lack."""
    has_all_memory = result.memory_mib >= gpu.memory_mib // block_mib * block_mib
    return has_all_memory and result.cores in (0, CORES_PER_GPU) and not result.is_admin


def _is_limited(result: ClaimResult, gpu: Gpu, block_mib: int) -> bool:
    """The container is to be limited: by its share, or of a whole GPU by the claim's own limits of MPS."""
    return _is_share(result, gpu, block_mib) or result.config.mps is not None


def _by_cdi(strategy: DeviceListStrategy) -> DeviceListStrategy:
    """The annotation's way is the device plugins' alone; what it names the kubelet takes from the answer too."""
    return DeviceListStrategy.CDI_CRI if strategy is DeviceListStrategy.CDI_ANNOTATIONS else strategy


def _refused(why: str) -> Refused:
    return Refused(reason=RefusalReason.INVALID_REQUEST, detail=why)
