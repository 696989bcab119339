"""A pod that asks for GPUs by the device plugins' resources, as one that asks by ResourceClaims, on the same terms. Pure.

| a container's limits | request of its claim |
|---|---|
| vcuda-core 1 to 99, vcuda-memory | `cores`, and `memory` of that many blocks |
| vcuda-core 100·n | n whole GPUs; with vcuda-memory each has at least its part of that memory |
| gpu-mem | `cores: 0`, which is compute in proportion; `memory`, rounded up to whole blocks with a warning |
| what the agents refuse whatever is free | none: the pod is refused with their sentence |

Each container has a claim of its own, from a template named by its content. An init container that asks for what another
one of the pod asks for uses that one's claim, as the kubelet hands on its devices; else it has its own until the pod ends.
The annotations for isolation and elastic ceiling become the claim's ShareConfig. Annotations with an extender's choice of
GPUs are not carried over: the scheduler chooses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct
from msgspec.structs import replace

from gpushare_agent.core.claims.claim import CONFIG_API_VERSION, CONFIG_KIND, DRIVER
from gpushare_agent.core.claims.devices import quantity
from gpushare_agent.core.kube.claims import MAX_RESULTS
from gpushare_agent.core.kube.pods import PREDICATE_PREFIX, PodJson, PodSpec, ResourcesJson, parse_pod
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.names import (
    CORE_LIMIT_ANNOTATION,
    CORES_PER_GPU,
    GPU_CHOICE_ANNOTATIONS,
    GPUSHARE_INDEX_ANNOTATION,
    ISOLATION_ANNOTATION,
    RESIZE_ANNOTATION,
)
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.core.model.resources import ResourceNames, request_of
from gpushare_agent.core.model.shares import core_limit
from gpushare_agent.core.placement import validate_request
from gpushare_agent.core.placement.gpu_choice import choice_of
from gpushare_agent.core.settings.isolation_names import isolation_names

DEVICE_CLASS = f"gpu.{DRIVER}"
REQUEST = "gpu"


class Template(Struct, frozen=True, kw_only=True):
    """The request of one container: `count` GPUs with `cores` percent and `memory_mib` each, or whole GPUs where `cores` is
    None. Then `memory_mib` is the least that each has, 0 for any."""

    count: int = 1
    cores: int | None = None
    memory_mib: int = 0
    isolation: str = ""
    core_limit: int = 0

    @property
    def name(self) -> str:
        """The template's name, made of its content, so that equal requests share a template, and no two versions write
        one differently."""
        shape = f"gpus{self.count}" if self.cores is None else f"c{self.cores}-m{self.memory_mib}"
        # Sorted: the name must not depend on the order of fields in this version.
        content = msgspec.json.encode(self.spec(), order="sorted")
        return f"gpushare-{shape}-{hashlib.sha256(content).hexdigest()[:8]}"

    def spec(self) -> dict[str, Any]:
        """The spec of a ResourceClaim, in the form in which the API server returns it."""
        memory = quantity(self.memory_mib) if self.memory_mib else ""
        exactly: dict[str, Any] = {"deviceClassName": DEVICE_CLASS, "allocationMode": "ExactCount", "count": self.count}
        if self.cores is not None:
            exactly["capacity"] = {"requests": {"cores": str(self.cores), "memory": memory}}
        elif memory:
            expression = f"device.capacity['{DRIVER}'].memory.compareTo(quantity('{memory}')) >= 0"
            # A whole GPU has all of its memory, so a claim can only choose GPUs that have enough.
            exactly["selectors"] = [{"cel": {"expression": expression}}]
        devices: dict[str, Any] = {"requests": [{"name": REQUEST, "exactly": exactly}]}
        share = {"isolation": self.isolation, "coreLimit": self.core_limit}
        if share := {name: value for name, value in share.items() if value}:
            # This driver's opaque configuration: docs/explanation/dra.md.
            parameters = {"apiVersion": CONFIG_API_VERSION, "kind": CONFIG_KIND, **share}
            devices["config"] = [{"opaque": {"driver": DRIVER, "parameters": parameters}}]
        return {"devices": devices}


class PatchOperation(Struct, frozen=True, omit_defaults=True):
    """One of a JSON Patch (RFC 6902)."""

    op: str
    path: str
    value: object = UNSET


class Conversion(Struct, frozen=True, kw_only=True):
    """`patch` is a JSON Patch of the pod, empty where it stays as it is; `templates` are those that it then names."""

    patch: Sequence[PatchOperation] = ()
    templates: tuple[Template, ...] = ()
    warnings: tuple[str, ...] = ()


def new_pod(read: PodJson, resources: Collection[str]) -> Pod:
    """Raises Corrupt."""
    # parse_pod needs what the API server sets only after admission; none of it is used here.
    return parse_pod(replace(read, metadata=replace(read.meta, namespace="x", name="x", uid="x")), resources)


def resources_of(spec: PodSpec, container: ContainerSpec) -> tuple[str, ResourcesJson]:
    """Their path in a JSON Patch, and what is there."""
    # Sidecars stand in spec.initContainers too; positions are counted in each list.
    is_main = container.kind is ContainerKind.MAIN
    place, found = ("containers", spec.containers) if is_main else ("initContainers", spec.init_containers)
    path = f"/spec/{place}/{container.position}/resources"
    return path, (found or ())[container.position].resources or ResourcesJson()


def escaped(name: str) -> str:
    """RFC 6901: a resource's name has a slash, which would be a step of the path."""
    return name.replace("~", "~0").replace("/", "~1")


def refused(detail: str) -> Refused:
    return Refused(reason=RefusalReason.INVALID_REQUEST, detail=detail)


def convert_pod(read: PodJson, names: ResourceNames) -> Conversion | Refused:
    """`read` is the pod as the API server shows it to a webhook, without a UID and perhaps without a name. A pod that names
    its node is left as it is: no scheduler would allocate its claims.

    Raises:
        Corrupt: what it asks for cannot be read.
    """
    pod = new_pod(read, names.names)
    asking = [container for container in pod.containers if any(container.requests.values())]
    # The API server knows a static pod as a mirror pod alone: the kubelet has started it, and no claim can be added.
    if not asking or pod.is_static:
        return Conversion()
    # A DaemonSet's pod goes by affinity and names none; this is a pod that was bound by hand.
    if pod.node_name:
        text = (
            "the pod names its node, so no scheduler would allocate claims: it keeps its limits, for the device plugins"
        )
        return Conversion(warnings=(text,))
    # Only a claim's selectors filter its GPUs: the pod would be on any GPU without a word.
    if choice_of(pod.annotations):
        written = ", ".join(name for name in GPU_CHOICE_ANNOTATIONS if name in pod.annotations)
        return refused(f"no claim follows {written}: ask by a ResourceClaim whose selector names uuid or productName")
    templates: dict[str, Template] = {}
    warnings = list(_pod_warnings(pod))
    for container in asking:
        template = _template(container, pod.annotations, names)
        if isinstance(template, Refused):
            # Refused now, with the agents' sentence, and not after the pod was scheduled.
            return Refused(reason=template.reason, detail=f"container {container.name}: {template.detail}")
        templates[container.name] = template
        warnings += _warnings(container, template, pod.annotations, names)
    claims = _claims(asking, templates, warnings)
    spec = read.spec
    taken = {one.name for one in spec.claims}
    # Two claims of one name would be refused by the API server, with a reason that names no container.
    if used := sorted(taken.intersection(claims.values())):
        return refused(f"the pod has a claim named {used[0]}, as this webhook names its own: give yours another name")
    own = {claim: templates[container] for container, claim in claims.items()}
    patch = [*_container_patches(spec, asking, claims, names), *_pod_patches(spec, own)]
    return Conversion(patch=patch, templates=tuple(dict.fromkeys(own.values())), warnings=tuple(warnings))


def _template(container: ContainerSpec, annotations: Mapping[str, str], names: ResourceNames) -> Template | Refused:
    isolation = annotations.get(ISOLATION_ANNOTATION, "")
    # The agent would refuse it at the claim's preparation, on a node that was chosen in vain.
    if ISOLATION_ANNOTATION in annotations and isolation not in isolation_names():
        known = ", ".join(isolation_names())
        return refused(f"the annotation {ISOLATION_ANNOTATION} is {isolation[:40]!r}. Name one of {known}")
    request = request_of(container, names)
    # As an agent with sharing: which node it will be, and whether that one shares, is not known yet.
    if (invalid := validate_request(request, names, share_mode=True)) is not None:
        return invalid
    cores, blocks = request.cores, request.blocks
    # GPUShare's memory has no cores: with 0 the agent limits compute in proportion to the memory.
    if request.units:
        # Whole blocks, rounded up, as kube-scheduler rounds what a claim asks for.
        whole_blocks = -(-names.memory_mib(container) // names.memory_block_mib)
        return Template(cores=0, memory_mib=whole_blocks * names.memory_block_mib, isolation=isolation)
    if cores < CORES_PER_GPU:
        ceiling = core_limit(annotations, cores).percent
        memory_mib = blocks * names.memory_block_mib
        return Template(cores=cores, memory_mib=memory_mib, isolation=isolation, core_limit=ceiling)
    count = cores // CORES_PER_GPU
    # The API server allows no more devices in one claim.
    if count > MAX_RESULTS:
        return refused(f"{count} GPUs are more than the {MAX_RESULTS} that one claim can have")
    # Rounded up: the GPUs together must have at least what was asked for.
    least_mib = -(-blocks // count) * names.memory_block_mib
    return Template(count=count, memory_mib=least_mib, isolation=isolation)


def _pod_warnings(pod: Pod) -> Iterator[str]:
    if any(name == GPUSHARE_INDEX_ANNOTATION or name.startswith(PREDICATE_PREFIX) for name in pod.annotations):
        yield "annotations with an extender's choice of GPUs are not carried over to claims: the scheduler chooses the GPUs"
    if RESIZE_ANNOTATION in pod.annotations:
        yield f"{RESIZE_ANNOTATION} names containers: of a claim's share it must name the claim, such as gpushare-0"


def _warnings(
    container: ContainerSpec, template: Template, annotations: Mapping[str, str], names: ResourceNames
) -> Iterator[str]:
    who, has_ceiling = f"container {container.name}", CORE_LIMIT_ANNOTATION in annotations
    if request_of(container, names).units:
        asked_mib = names.memory_mib(container)
        # More than asked for is counted against the GPU: who asks in odd sizes should know.
        if template.memory_mib != asked_mib:
            yield f"{who}: {asked_mib} MiB become {template.memory_mib}, in blocks of {names.memory_block_mib}"
        yield f"{who}: its claim sets no variables ALIYUN_COM_GPU_MEM_…"
        if has_ceiling:
            yield f"{who}: {CORE_LIMIT_ANNOTATION} does not count for memory alone by a claim"
    elif has_ceiling and template.cores is not None:
        if problem := core_limit(annotations, template.cores).problem:
            yield f"{who}: {problem}; it is ignored"
        else:
            yield f"{who}: {CORE_LIMIT_ANNOTATION} counts as it is now; a later change does not reach the claim"


def _claims(asking: Sequence[ContainerSpec], templates: Mapping[str, Template], warnings: list[str]) -> dict[str, str]:
    """The claim of each container, by name. Containers that run at the same time never share one."""
    claims = {one.name: _claim_name(one) for one in asking if one.kind is not ContainerKind.INIT}
    reusable: dict[Template, str] = {}
    # Main containers and sidecars have claims of their own first: they run at the same time. Then init containers,
    # which have ended before, find one to use.
    for one in asking:
        if one.kind is ContainerKind.MAIN:
            # Sidecars are not among them: one runs next to the init containers after it.
            reusable.setdefault(templates[one.name], claims[one.name])
    for one in asking:
        if one.kind is ContainerKind.INIT:
            if templates[one.name] not in reusable:
                warnings.append(
                    f"init container {one.name} asks for what no other one does: its claim lasts as the pod does"
                )
            claims[one.name] = reusable.setdefault(templates[one.name], _claim_name(one))
    return claims


def _claim_name(container: ContainerSpec) -> str:
    return f"gpushare-{'' if container.kind is ContainerKind.MAIN else 'init-'}{container.position}"


def _container_patches(
    spec: PodSpec, asking: Sequence[ContainerSpec], claims: Mapping[str, str], names: ResourceNames
) -> Iterator[PatchOperation]:
    """A request that differs from its limit stays, and the API server refuses it as it would have."""
    for container in asking:
        path, resources = resources_of(spec, container)
        limits, requests = resources.limits or {}, resources.requests or {}
        for name in names.names:
            if name in limits:
                yield PatchOperation("remove", f"{path}/limits/{escaped(name)}")
                # The API server has set requests to the limits already.
                if requests.get(name) == limits[name]:
                    yield PatchOperation("remove", f"{path}/requests/{escaped(name)}")
        claim = {"name": claims[container.name]}
        # `add` at `-` needs the list to be there.
        if resources.claims:
            yield PatchOperation("add", f"{path}/claims/-", claim)
        else:
            yield PatchOperation("add", f"{path}/claims", [claim])


def _pod_patches(spec: PodSpec, own: Mapping[str, Template]) -> Iterator[PatchOperation]:
    claims = [{"name": name, "resourceClaimTemplateName": template.name} for name, template in sorted(own.items())]
    if spec.claims:
        yield from (PatchOperation("add", "/spec/resourceClaims/-", claim) for claim in claims)
    else:
        yield PatchOperation("add", "/spec/resourceClaims", claims)
