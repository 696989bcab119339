"""Pod manifests as the embedded node reads them: checks and defaults at creation, containers and requests later.

Only what concerns extended resources is checked as strictly as in a real API server. Pure functions over raw JSON.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from gpushare_agent.core.kube import objects
from gpushare_agent.core.model.errors import Corrupt, Rejected
from gpushare_agent.core.model.names import MEMORY_BLOCK_MIB, VCORE_RESOURCE, VMEMORY_RESOURCE
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec
from gpushare_agent.core.placement.mistakes import write_instead
from gpushare_agent.core.placement.place import DEFAULT_NAMES

RawObject = dict[str, Any]
"""An object of the API as JSON has it."""

RUN_SECONDS_ANNOTATION = "sandbox.gpushare/run-seconds"
"""How long a pod's containers run before they end well; without it they run until the pod is deleted."""
IGNORE_TERM_ANNOTATION = "sandbox.gpushare/ignore-term-seconds"
"""How long a pod's processes live on after TERM (at most the grace period, as KILL follows it)."""
LOAD_ANNOTATION = "sandbox.gpushare-agent/load"
"""The constant part of its share, and of its memory, that each container of a pod uses, such as 0.5."""
MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
"""As on a cluster: the pod stands for something that runs without the API server, here an agent's process."""
_NUMBERS = {RUN_SECONDS_ANNOTATION: "seconds, such as '5'", IGNORE_TERM_ANNOTATION: "seconds, such as '5'",
            LOAD_ANNOTATION: "a part of the share, such as '0.5'"}  # fmt: skip

_REMEDIES = {VMEMORY_RESOURCE: f"Write whole blocks, of {MEMORY_BLOCK_MIB} MiB unless a setting has another size"}
_CONTAINER_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SPEC_DEFAULTS = {
    "restartPolicy": "Always", "terminationGracePeriodSeconds": 30, "schedulerName": "default-scheduler",
    "dnsPolicy": "ClusterFirst",
}  # fmt: skip


def at(raw: Mapping[str, Any], path: str, default: Any) -> Any:
    """The value at a path such as `spec.nodeName`; `default` where there is none, or an empty text."""
    value: Any = raw
    for step in path.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return default if value is None or value == "" else value


def timestamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def is_extended(resource: str) -> bool:
    return "/" in resource and not resource.partition("/")[0].endswith("kubernetes.io")


def whole_number(value: object, where: str, name: str = "") -> int:
    """Raises Rejected where `value` is no whole number as extended resources need: of the resource `name` with what to
    write, which a real API server does not say."""
    try:
        return objects.whole_number(value, where)
    except Corrupt as error:
        remedy = write_instead(name, str(value), DEFAULT_NAMES) if name == VCORE_RESOURCE else _REMEDIES.get(name, "")
        raise Rejected(
            f"{where}: Invalid value: {value!r}: must be an integer, zero or more. {remedy}".rstrip(". ")
        ) from error


def extended_requests(container: Mapping[str, Any], where: str = "") -> dict[str, int]:
    """Limits of extended resources, without the zero ones."""
    # Limits, because requests of extended resources must equal them.
    limits = (container.get("resources") or {}).get("limits") or {}
    found = {
        name: whole_number(value, f"{where}.resources.limits[{name}]", name)
        for name, value in limits.items()
        if is_extended(name)
    }
    # A request for zero is no request: the plugin is not asked.
    return {name: count for name, count in sorted(found.items()) if count > 0}


def raw_containers(raw: RawObject) -> list[dict[str, Any]]:
    """The containers as the manifest has them, init containers first."""
    return [*(raw["spec"].get("initContainers") or ()), *raw["spec"]["containers"]]


def containers_of(raw: RawObject) -> tuple[ContainerSpec, ...]:
    """The containers in the order in which the kubelet admits them: init containers (sidecars among them) first."""
    found = []
    for group in ("initContainers", "containers"):
        for position, container in enumerate(raw["spec"].get(group) or ()):
            # An init container that never ends: Kubernetes has no other mark of a sidecar.
            is_sidecar = container.get("restartPolicy") == "Always"
            of_init = ContainerKind.SIDECAR if is_sidecar else ContainerKind.INIT
            kind, requests = ContainerKind.MAIN if group == "containers" else of_init, extended_requests(container)
            found.append(ContainerSpec(name=container["name"], kind=kind, position=position, requests=requests))
    return tuple(found)


def pod_requests(raw: RawObject) -> dict[str, int]:
    """What the scheduler counts: main containers and sidecars together, or an init container with the sidecars before it,
    if that is more.
    """
    running: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in containers_of(raw):
        for resource, count in container.requests.items():
            if container.kind is ContainerKind.INIT:
                # An init container runs next to the sidecars that were started before it.
                peak[resource] = max(peak.get(resource, 0), running.get(resource, 0) + count)
            else:
                running[resource] = running.get(resource, 0) + count
    return {name: max(running.get(name, 0), peak.get(name, 0)) for name in sorted({*running, *peak})}


def annotation_number(raw: RawObject, name: str) -> float | None:
    text = (raw["metadata"].get("annotations") or {}).get(name)
    try:
        return None if text is None else max(0.0, float(text))
    except ValueError:
        return None


def grace_s(raw: RawObject) -> float:
    """The grace period of the deletion under way, else that of the spec."""
    # Of a deletion under way: a client may have shortened it.
    chosen = raw["metadata"].get("deletionGracePeriodSeconds")
    return float(chosen if chosen is not None else raw["spec"].get("terminationGracePeriodSeconds", 30))


def is_mirror(raw: RawObject) -> bool:
    return MIRROR_ANNOTATION in (raw["metadata"].get("annotations") or {})


def is_terminal(raw: RawObject) -> bool:
    return (raw.get("status") or {}).get("phase") in ("Succeeded", "Failed")


_EXTENDED = "<extended-resources>"
"""The scheduler's name of the claim that it makes for extended resources; nobody else can give it."""


def claim_names(pod: RawObject) -> dict[str, str]:
    """The ResourceClaim's name by the claim's name in the pod; without those that are not made yet."""
    made = {one["name"]: one.get("resourceClaimName") for one in pod["status"].get("resourceClaimStatuses") or ()}
    names = {
        one["name"]: one.get("resourceClaimName") or made.get(one["name"])
        for one in pod["spec"].get("resourceClaims") or ()
    }
    names[_EXTENDED] = (pod["status"].get("extendedResourceClaimStatus") or {}).get("resourceClaimName")
    return {name: claim for name, claim in names.items() if claim}


def container_claims(pod: RawObject, container: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The claims that a container uses, each by its name in the pod, with the request; empty for all requests."""
    named = (container.get("resources") or {}).get("claims") or ()
    mappings = (pod["status"].get("extendedResourceClaimStatus") or {}).get("requestMappings") or ()
    return [(one["name"], one.get("request") or "") for one in named] + [
        (_EXTENDED, one["requestName"]) for one in mappings if one["containerName"] == container["name"]
    ]


def owner_reference(raw: RawObject) -> RawObject:
    """The owner reference that names the object as the controller of another."""
    identity = {"apiVersion": raw["apiVersion"], "kind": raw["kind"]}
    identity |= {name: raw["metadata"][name] for name in ("name", "uid")}
    return {**identity, "controller": True, "blockOwnerDeletion": True}


def check_annotations(metadata: Mapping[str, Any]) -> None:
    """Those of the sandbox. Raises Rejected."""
    annotations = metadata.get("annotations") or {}
    for name, what in _NUMBERS.items():
        try:
            number = float(annotations.get(name, 0))
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number) or number < 0:
            raise Rejected(f"metadata.annotations[{name}]: Invalid value: {annotations[name]!r}: must be {what}")


def completed_spec(raw: Mapping[str, Any] | None) -> dict[str, Any]:
    """A pod's spec with its defaults. Raises Rejected, naming the field, for one that a real API server would refuse too."""
    # The caller's object stays as it is: a manifest may be applied again.
    spec = copy.deepcopy(dict(raw or {}))
    if not spec.get("containers"):
        raise Rejected("spec.containers: Required value: at least one container is needed")
    names: set[str] = set()
    for group in ("initContainers", "containers"):
        for position, container in enumerate(spec.get(group) or ()):
            name, where = container.get("name") or "", f"spec.{group}[{position}]"
            if not _CONTAINER_NAME.fullmatch(name):
                raise Rejected(f"{where}.name: Invalid value: {name!r}: must be lower case letters, digits or '-'")
            if name in names:
                raise Rejected(f"{where}.name: Duplicate value: {name!r}")
            names.add(name)
            container["resources"] = _completed_resources(container, where)
    return {**_SPEC_DEFAULTS, **spec}


def _completed_resources(container: dict[str, Any], where: str) -> dict[str, Any]:
    resources = container.get("resources") or {}
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    extended = extended_requests(container, where)
    for name, value in requests.items():
        path = f"{where}.resources.requests[{name}]"
        if is_extended(name) and whole_number(value, path) != extended.get(name, 0):
            raise Rejected(f"{path}: Invalid value: {value!r}: must be equal to {name} limit")
    if not limits:
        return dict(resources)
    # As texts: quantities are written as numbers by people, and read as texts by clients.
    return {
        **resources, "limits": {name: str(value) for name, value in limits.items()},
        "requests": {name: str(value) for name, value in {**limits, **requests}.items()},
    }  # fmt: skip
