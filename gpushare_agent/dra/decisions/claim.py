"""A ResourceClaim from the API server's JSON: what of it is allocated by this driver. Pure, and never trusted.

Format: resource.k8s.io/v1 ResourceClaim. The opaque configuration is ShareConfig:

    apiVersion: gpushare-agent/v1alpha1
    kind: ShareConfig
    isolation: hami-core          # one that the node allows; the node's own without it
    coreLimit: 80                 # elastic ceiling of compute, percent of the GPU, not below the share's cores
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.cluster.kube.pods import EXTENDED_CLAIM
from gpushare_agent.cluster.kube.quantities import whole_number
from gpushare_agent.dra.decisions.devices import device_index
from gpushare_agent.model.allocations import ClaimRef
from gpushare_agent.model.errors import Corrupt
from gpushare_agent.model.names import CORES_PER_GPU, MIB, PodUid

DRIVER = "gpushare-agent"
"""The driver's name, the domain of its attributes, and the prefix of its sockets."""
CONFIG_API_VERSION = "gpushare-agent/v1alpha1"
CONFIG_KIND = "ShareConfig"
POD_CLAIM_ANNOTATION = "resource.kubernetes.io/pod-claim-name"
EXTENDED_RESOURCE_ANNOTATION = "resource.kubernetes.io/extended-resource-claim"
MAX_RESULTS = 32
"""resource.k8s.io's own limit of devices in one claim."""
MAX_USERS = 256
"""resource.k8s.io's own limit of status.reservedFor."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_REQUEST = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(/[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class ShareConfig(Struct, frozen=True, kw_only=True):
    """What a claim or its class asks for beyond numbers; empty and 0 stand for the node's settings."""

    isolation: str = ""
    core_limit: int = 0


class ClaimResult(Struct, frozen=True, kw_only=True):
    """One device of a claim. `request` as in the claim, `a` or `a/b` of a list of alternatives. `index` is the GPU's.
    `cores` are percent of it, 0 where the claim asks for memory alone; `memory_mib` is rounded to the slice's step by the
    scheduler. `is_admin`: by admin access, all of the GPU beside whoever has it; nothing is charged, so both are 0."""

    request: str
    device: str
    index: int
    share_id: str
    cores: int
    memory_mib: int
    config: ShareConfig = ShareConfig()
    is_admin: bool = False


class AllocatedClaim(Struct, frozen=True, kw_only=True):
    """A claim with the results that are this driver's on this node, in the claim's order. `shown_as` is its name in the
    pod that it was made for, else its own. `users` are the pods for which it is reserved, name and UID; `owner` is the
    pod that it was made for, None where it is no pod's own."""

    ref: ClaimRef
    shown_as: str
    results: tuple[ClaimResult, ...]
    users: tuple[tuple[str, PodUid], ...] = field(default=())
    owner: PodUid | None = None


def is_claim_uid(text: str) -> bool:
    """The form of every UID that the API server gives: it becomes part of paths."""
    return _UUID.fullmatch(text) is not None


def read_claim(raw: Mapping[str, Any], *, driver: str, pool: str) -> AllocatedClaim:
    """Raises Corrupt with the field that cannot be used, for the pod's Event."""
    ref = claim_ref(raw)
    allocation = _object(_object(raw, "status"), "allocation")
    devices = _object(allocation, "devices")
    raw_results = _list(devices.get("results"), "status.allocation.devices.results", MAX_RESULTS)
    mine = [one for one in raw_results if one.get("driver") == driver]
    if any(one.get("pool") != pool for one in mine):
        raise Corrupt(f"it is allocated in the pool {_shown(mine[0].get('pool'))}, and this node's pool is {pool}")
    configs = list(_configs(devices.get("config"), driver))
    results = [_result(one, configs) for one in mine]
    if not results:
        raise Corrupt(f"status.allocation has no device of driver {driver}")
    for one, times in Counter((one.request, one.device) for one in results).items():
        if times > 1:  # a CDI spec has one device of a name
            raise Corrupt(
                f"request {one[0]} is allocated the device {one[1]} {times} times, and a container has one share of a GPU;"
                f" ask for their sum once, or for different GPUs by the constraint distinctAttribute: {driver}/uuid"
            )
    return AllocatedClaim(
        ref=ref,
        shown_as=_shown_as(raw, ref),
        results=tuple(results),
        users=tuple(_users(_object(raw, "status"))),
        owner=_owner(raw),
    )


def claim_ref(raw: Mapping[str, Any]) -> ClaimRef:
    metadata = _object(raw, "metadata")
    return checked_ref(*(_text(metadata, name) for name in ("namespace", "name", "uid")))


def _shown_as(raw: Mapping[str, Any], ref: ClaimRef) -> str:
    """Stable over the pods of a StatefulSet: the names of claims that are made for a pod end at random."""
    annotations = _object(_object(raw, "metadata"), "annotations")
    if annotations.get(EXTENDED_RESOURCE_ANNOTATION) == "true":
        return EXTENDED_CLAIM
    name = annotations.get(POD_CLAIM_ANNOTATION)
    return name if isinstance(name, str) and _NAME.fullmatch(name) else ref.name


def _owner(raw: Mapping[str, Any]) -> PodUid | None:
    """As Kubernetes has it: the controller, of kind Pod."""
    for one in _list(_object(raw, "metadata").get("ownerReferences"), "metadata.ownerReferences", 64):
        if one.get("controller") is True and one.get("apiVersion") == "v1" and one.get("kind") == "Pod":
            return PodUid(_text(one, "uid"))
    return None


def checked_ref(namespace: str, name: str, uid: str) -> ClaimRef:
    """Raises Corrupt: one of the three is not what the API server admits."""
    if not _NAME.fullmatch(namespace) or not _NAME.fullmatch(name) or not is_claim_uid(uid):
        raise Corrupt(f"namespace {_shown(namespace)}, name {_shown(name)} and UID {_shown(uid)} name no claim")
    return ClaimRef(namespace, name, uid)


def _users(status: Mapping[str, Any]) -> Iterable[tuple[str, PodUid]]:
    for one in _list(status.get("reservedFor"), "status.reservedFor", MAX_USERS):
        if one.get("resource") == "pods" and not one.get("apiGroup"):
            yield _text(one, "name"), PodUid(_text(one, "uid"))


def _result(raw: Mapping[str, Any], configs: Sequence[tuple[frozenset[str], ShareConfig]]) -> ClaimResult:
    request, device = _text(raw, "request"), _text(raw, "device")
    index = device_index(device)
    if not _REQUEST.fullmatch(request):
        raise Corrupt(f"request {_shown(request)} has no name of a request")
    if index is None:
        raise Corrupt(f"request {request} is allocated the device {_shown(device)}, which this driver does not publish")
    share_id = raw.get("shareID") or ""
    if not isinstance(share_id, str) or (share_id and not is_claim_uid(share_id)):
        raise Corrupt(f"request {request}: shareID is no UUID")
    if raw.get("adminAccess") is True:  # consumedCapacity is there all the same, and no scheduler counts it
        return ClaimResult(
            request=request,
            device=device,
            index=index,
            share_id=share_id,
            cores=0,
            memory_mib=0,
            config=replace(_config_of(request, 0, configs), core_limit=0),
            is_admin=True,
        )
    consumed = _object(raw, "consumedCapacity")
    cores = whole_number(consumed.get("cores", str(CORES_PER_GPU)), f"request {request}, cores")
    if "memory" not in consumed:
        raise Corrupt(
            f"request {request} has no consumedCapacity.memory: the API server has not the gate DRAConsumableCapacity"
            " (on from Kubernetes 1.36)"
        )
    memory = whole_number(consumed["memory"], f"request {request}, memory")
    if cores > CORES_PER_GPU or memory < MIB:
        raise Corrupt(f"request {request} has {cores} cores and {memory} bytes of one GPU, which is no share of it")
    return ClaimResult(
        request=request,
        device=device,
        index=index,
        share_id=share_id,
        cores=cores,
        memory_mib=memory // MIB,
        config=_config_of(request, cores, configs),
    )


def _config_of(request: str, cores: int, configs: Sequence[tuple[frozenset[str], ShareConfig]]) -> ShareConfig:
    """The last that concerns the request, field by field: those of the class come before the claim's own."""
    found = ShareConfig()
    for requests, config in configs:
        if requests and not {request, request.partition("/")[0]} & requests:
            continue
        found = ShareConfig(
            isolation=config.isolation or found.isolation, core_limit=config.core_limit or found.core_limit
        )
    if found.core_limit and found.core_limit < cores:
        raise Corrupt(
            f"coreLimit of request {request} is {found.core_limit}, below its {cores} cores: it is a ceiling and must be at"
            " least as high"
        )
    return found if cores < CORES_PER_GPU else replace(found, core_limit=0)


def _configs(raw: Any, driver: str) -> Iterable[tuple[frozenset[str], ShareConfig]]:
    entries = _list(raw, "status.allocation.devices.config", 64)
    for source in ("FromClass", "FromClaim"):
        for one in entries:
            opaque = one.get("opaque")
            if one.get("source") != source or not isinstance(opaque, Mapping) or opaque.get("driver") != driver:
                continue
            requests = one.get("requests") or []
            if not isinstance(requests, list) or not all(isinstance(name, str) for name in requests):
                raise Corrupt("the requests of a configuration are no list of names")
            yield frozenset(requests), read_config(opaque.get("parameters"))


def read_config(raw: Any) -> ShareConfig:
    """Raises Corrupt with what to write instead; an unknown field is a mistake of spelling that nobody would notice."""
    if not isinstance(raw, Mapping):
        raise Corrupt("the opaque parameters are no object")
    if raw.get("apiVersion") != CONFIG_API_VERSION or raw.get("kind") != CONFIG_KIND:
        raise Corrupt(
            f"the opaque parameters are {_shown(raw.get('apiVersion'))} {_shown(raw.get('kind'))}, and this driver reads"
            f" {CONFIG_API_VERSION} {CONFIG_KIND}"
        )
    unknown = sorted(str(name) for name in raw.keys() - {"apiVersion", "kind", "isolation", "coreLimit"})
    if unknown:
        raise Corrupt(f"{CONFIG_KIND} has no field {_shown(unknown[0])}; it has isolation and coreLimit")
    isolation, limit = raw.get("isolation", ""), raw.get("coreLimit", 0)
    if not isinstance(isolation, str):
        raise Corrupt(f"{CONFIG_KIND}.isolation must be the name of an isolation")
    if isinstance(limit, bool) or not isinstance(limit, int) or not 0 <= limit <= CORES_PER_GPU:
        raise Corrupt(f"{CONFIG_KIND}.coreLimit must be a whole number from 0 to {CORES_PER_GPU}")
    return ShareConfig(isolation=isolation, core_limit=limit)


def _object(raw: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """The object in a field, empty where it is absent."""
    value = raw.get(field)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise Corrupt(f"{field} is no object")
    return value


def _list(value: Any, what: str, limit: int) -> list[Mapping[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > limit or not all(isinstance(one, Mapping) for one in value):
        raise Corrupt(f"{what} is no list of at most {limit} objects")
    return value


def _text(raw: Mapping[str, Any], field: str) -> str:
    value = raw.get(field)
    if not isinstance(value, str):
        raise Corrupt(f"{field} is no text")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
