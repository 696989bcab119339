"""A ResourceClaim from the API server's JSON: what this driver allocated of it. Pure, and never trusted.

Format: resource.k8s.io/v1 ResourceClaim. The opaque configuration is ShareConfig, or NVIDIA's (gpu_config.py):

    apiVersion: gpushare-agent/v1alpha1
    kind: ShareConfig
    isolation: gpushare           # one that the node allows; the node's own without it
    coreLimit: 80                 # elastic ceiling of compute, percent of the GPU, not below the share's cores
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Annotated, NamedTuple

from msgspec import Meta, Raw, Struct, field
from msgspec.json import Decoder
from msgspec.structs import replace

from gpushare_agent.core.claims.devices import (
    NVIDIA_DRIVER,
    NVIDIA_MEMORY,
    is_device_name,
    is_instance_name,
    is_placement_name,
)
from gpushare_agent.core.claims.gpu_config import TYPED, ShareConfig, Typed, read_gpu_config
from gpushare_agent.core.kit.json_schema import decoded
from gpushare_agent.core.kube.claims import Allocation, ClaimJson, ClaimStatus, DeviceConfig, DeviceResult, main_request
from gpushare_agent.core.kube.objects import ObjectMeta, shown, whole_number
from gpushare_agent.core.kube.pods import EXTENDED_CLAIM
from gpushare_agent.core.model.allocations import ClaimRef
from gpushare_agent.core.model.errors import Corrupt
from gpushare_agent.core.model.names import CORES_PER_GPU, MIB, PodUid

DRIVER = "gpushare-agent"
"""The driver's name, the domain of its attributes, and the prefix of its sockets."""
CONFIG_API_VERSION = "gpushare-agent/v1alpha1"
CONFIG_KIND = "ShareConfig"
POD_CLAIM_ANNOTATION = "resource.kubernetes.io/pod-claim-name"
EXTENDED_RESOURCE_ANNOTATION = "resource.kubernetes.io/extended-resource-claim"
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_REQUEST = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(/[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class DevicePart(Struct, frozen=True, kw_only=True):
    """A claim's part of one device. `request` as in the claim, `a` or `a/b` of a list of alternatives. `cores` are percent
    of the GPU, 0 where the claim asks for memory alone; `memory_mib` is rounded to the slice's step by the scheduler.
    `is_admin`: by admin access, all of the GPU next to whoever has it; nothing is charged, so both are 0.
    `is_unlimited`: by the setting dra.consumable_shares, without a size of its own; both are 0 too."""

    request: str
    device: str
    share_id: str
    cores: int
    memory_mib: int
    is_admin: bool = False
    config: ShareConfig = ShareConfig()

    @property
    def name(self) -> str:
        """The request as a pod names it."""
        return main_request(self.request)

    @property
    def is_unlimited(self) -> bool:
        return not (self.is_admin or self.cores or self.memory_mib)


class AllocatedClaim(Struct, frozen=True, kw_only=True):
    """A claim with the results that are this driver's on this node, in the claim's order. `shown_as` is its name in the
    pod that it was made for, else its own name. `users` are the pods for which it is reserved, name and UID; `owner` is the
    pod that it was made for, None where it is no pod's own."""

    ref: ClaimRef
    shown_as: str
    results: tuple[DevicePart, ...]
    users: tuple[tuple[str, PodUid], ...] = field(default=())
    owner: PodUid | None = None

    @property
    def requests(self) -> frozenset[str]:
        return frozenset(result.name for result in self.results)


def is_claim_uid(text: str) -> bool:
    """The form of every UID that the API server gives: it becomes part of paths."""
    return _UUID.fullmatch(text) is not None


class ClaimPolicy(Struct, frozen=True, kw_only=True):
    """The settings that concern a claim: NVIDIA's configuration is read, and a claim may be without a size."""

    nvidia_names: bool = False
    has_unlimited: bool = False


def read_claim(raw: Raw, *, pool: str, policy: ClaimPolicy = ClaimPolicy()) -> AllocatedClaim:  # noqa: B008 - frozen
    """Raises Corrupt with the field that cannot be used, for the pod's Event."""
    claim = decoded(_CLAIM, raw, "the claim")
    ref = _ref(claim)
    status = claim.status or ClaimStatus()
    devices = (status.allocation or Allocation()).devices
    results, entries, consumers = devices.results or (), devices.config or (), status.reserved_for or ()
    # A claim may be of several drivers: the others prepare their own devices.
    mine = [one for one in results if one.driver == DRIVER]
    # The kubelet calls the driver of the pod's node: a device of another pool is not this node's to prepare.
    if any(one.pool != pool for one in mine):
        raise Corrupt(f"it is allocated in the pool {shown(mine[0].pool)}, and this node's pool is {pool}")
    requests = {name for one in mine for name in (one.request, main_request(one.request))}
    configs = list(_configs(entries, requests, policy))
    made = [_result(one, configs, policy) for one in mine]
    if not made:
        raise Corrupt(f"status.allocation has no device of driver {DRIVER}")
    for (request, device), times in Counter((one.request, one.device) for one in made).items():
        if times > 1:  # a CDI spec has one device of a name
            raise Corrupt(
                f"request {request} is allocated the device {device} {times} times, and a container has one share of a GPU;"
                f" ask for their sum once, or for different GPUs by the constraint distinctAttribute: {DRIVER}/uuid"
            )
    pods = (one for one in consumers if one.resource == "pods" and not one.api_group)
    return AllocatedClaim(
        ref=ref,
        shown_as=_shown_as(claim.meta.annotations, ref),
        results=tuple(made),
        users=tuple((one.name, PodUid(one.uid)) for one in pods),
        owner=_owner(claim.meta),
    )


def claim_ref(raw: Raw) -> ClaimRef:
    """Raises Corrupt."""
    return _ref(decoded(_CLAIM, raw, "the claim"))


def _ref(claim: ClaimJson) -> ClaimRef:
    meta = claim.meta
    return checked_ref(meta.namespace or "", meta.name or "", meta.uid or "")


def _shown_as(annotations: Mapping[str, str], ref: ClaimRef) -> str:
    """Stable over the pods of a StatefulSet: the names of claims that are made for a pod end at random."""
    if annotations.get(EXTENDED_RESOURCE_ANNOTATION) == "true":
        return EXTENDED_CLAIM
    name = annotations.get(POD_CLAIM_ANNOTATION, "")
    return name if _NAME.fullmatch(name) else ref.name


def _owner(meta: ObjectMeta) -> PodUid | None:
    """The owner as Kubernetes has it: the controller, of kind Pod."""
    pods = (one for one in meta.owners if one.controller and one.api_version == "v1" and one.kind == "Pod" and one.uid)
    return next((PodUid(one.uid or "") for one in pods), None)


def checked_ref(namespace: str, name: str, uid: str) -> ClaimRef:
    """Raises Corrupt: one of the three is not what the API server admits."""
    if not _NAME.fullmatch(namespace) or not _NAME.fullmatch(name) or not is_claim_uid(uid):
        raise Corrupt(f"namespace {shown(namespace)}, name {shown(name)} and UID {shown(uid)} name no claim")
    return ClaimRef(namespace, name, uid)


def _result(one: DeviceResult, configs: Sequence[_Config], policy: ClaimPolicy) -> DevicePart:
    request, device, share_id = one.request, one.device, one.share_id or ""
    if not _REQUEST.fullmatch(request):
        raise Corrupt(f"request {shown(request)} has no name of a request")
    if not is_device_name(device):
        raise Corrupt(f"request {request} is allocated the device {shown(device)}, which this driver does not publish")
    if share_id and not is_claim_uid(share_id):
        raise Corrupt(f"request {request}: shareID is no UUID")
    found = DevicePart(request=request, device=device, share_id=share_id, cores=0, memory_mib=0)
    if one.admin_access:  # consumedCapacity is there all the same, and no scheduler counts it
        config = replace(_config_of(found, configs), core_limit=0, mps=None)
        return replace(found, config=config, is_admin=True)
    consumed = one.consumed_capacity or {}
    # Without the capacity cores the device is taken whole, as by the default of the slice's request policy.
    cores = whole_number(consumed.get("cores", str(CORES_PER_GPU)), f"request {request}, cores")
    if is_placement_name(device) and one.consumed_capacity is None:  # no shareable device: as much as it has
        consumed = {"memory": str(1 << 60)}
    if "memory" not in consumed:
        raise Corrupt(
            f"request {request} has no consumedCapacity.memory: the API server has not the gate DRAConsumableCapacity"
            " (on from Kubernetes 1.36)"
        )
    memory = whole_number(consumed["memory"], f"request {request}, memory")
    # A selector's capacity, which a claim may name all the same: read as nothing, its limit would be lost.
    if policy.nvidia_names and whole_number(consumed.get(NVIDIA_MEMORY, "0"), f"request {request}, {NVIDIA_MEMORY}"):
        raise Corrupt(
            f"request {request} asks for {NVIDIA_MEMORY}, which is for selectors: write memory in capacity.requests"
        )
    is_unlimited = policy.has_unlimited and not cores and not memory
    if cores > CORES_PER_GPU or (memory < MIB and not is_unlimited):
        raise Corrupt(f"request {request} has {cores} cores and {memory} bytes of one GPU, which is no share of it")
    config = _config_of(replace(found, cores=cores), configs)
    if is_unlimited:
        if config.isolation not in ("", "none"):
            raise Corrupt(
                f"request {request} asks for {config.isolation}, and on this node what names no memory is not limited"
                " (setting dra.consumable_shares). Name cores and memory, or remove the configuration"
            )
        config = ShareConfig(isolation="none")
    return replace(found, cores=cores, memory_mib=memory // MIB, config=config)


class _Config(NamedTuple):
    """`requests` are those that it names, empty for all; `of_instances` is None where it is for GPUs and instances."""

    requests: frozenset[str]
    config: ShareConfig
    of_instances: bool | None = None


def _config_of(part: DevicePart, configs: Sequence[_Config]) -> ShareConfig:
    """The last that concerns the request, field by field: those of the class come before the claim's own."""
    request, cores, found = part.request, part.cores, ShareConfig()
    for requests, config, of_instances in configs:
        if requests and not {request, main_request(request)} & requests:
            continue
        if of_instances is not None and of_instances != is_instance_name(part.device):
            if not requests:  # it may be for another of the claim's devices
                continue
            ours, theirs = ("MigDeviceConfig", "a GPU") if of_instances else ("GpuConfig", "a MIG instance")
            raise Corrupt(f"{ours} names the request {request}, which has {theirs}")
        found = ShareConfig(
            isolation=config.isolation or found.isolation,
            core_limit=config.core_limit or found.core_limit,
            # The limits belong to that isolation.
            mps=config.mps if config.isolation else found.mps,
        )
    if found.core_limit and found.core_limit < cores:
        raise Corrupt(
            f"coreLimit of request {request} is {found.core_limit}, below its {cores} cores: it is a ceiling and must be at"
            " least as high"
        )
    # A whole GPU's compute has no ceiling above it.
    return found if cores < CORES_PER_GPU else replace(found, core_limit=0)


def _configs(entries: Sequence[DeviceConfig], mine: Set[str], policy: ClaimPolicy) -> Iterable[_Config]:
    # The class first, whatever the order in the status: the claim's own configuration overrides it.
    for source in ("FromClass", "FromClaim"):
        for one in entries:
            requests = frozenset(one.requests or ())
            if one.source != source or one.opaque is None:
                continue
            if one.opaque.driver == DRIVER:
                yield _Config(requests, read_config(one.opaque.parameters))
            # NVIDIA's own driver may read it for another request's device: a claim can be of both.
            elif policy.nvidia_names and one.opaque.driver == NVIDIA_DRIVER and (not requests or requests & mine):
                yield _Config(requests, *read_gpu_config(one.opaque.parameters))


class _Parameters(Typed, rename="camel", forbid_unknown_fields=True):
    isolation: str = ""
    core_limit: Annotated[int, Meta(ge=0, le=CORES_PER_GPU)] = 0


_CLAIM, _PARAMETERS = Decoder(ClaimJson), Decoder(_Parameters)


def read_config(raw: Raw) -> ShareConfig:
    """Raises Corrupt with what to write instead; an unknown field is a mistake of spelling that nobody would notice."""
    typed = decoded(TYPED, raw, "the opaque parameters")
    if typed.api_version != CONFIG_API_VERSION or typed.kind != CONFIG_KIND:
        raise Corrupt(f"{typed}, and this driver reads {CONFIG_API_VERSION} {CONFIG_KIND}")
    try:
        found = decoded(_PARAMETERS, raw, CONFIG_KIND)
    except Corrupt as e:
        raise Corrupt(
            f"{str(e)[:300]}; it has isolation, the name of one, and coreLimit, a whole number from 0 to {CORES_PER_GPU}"
        ) from e
    return ShareConfig(isolation=found.isolation, core_limit=found.core_limit)
