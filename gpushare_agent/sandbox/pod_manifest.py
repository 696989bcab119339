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

from gpushare_agent.model.errors import Rejected
from gpushare_agent.model.pods import ContainerKind, ContainerSpec

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

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_CONTAINER_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUFFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_QUANTITY = re.compile(r"(\d{1,15})(k|M|G|Ki|Mi|Gi)?")


def timestamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def is_extended(resource: str) -> bool:
    return "/" in resource and not resource.partition("/")[0].endswith("kubernetes.io")


def whole_number(value: object, where: str) -> int:
    """Raises Rejected where `value` is no whole number as extended resources need."""
    # No fractions: extended resources are counted in whole devices.
    match = _QUANTITY.fullmatch(str(value).strip()) if isinstance(value, (str, int)) else None
    if match is None or isinstance(value, bool):
        raise Rejected(f"{where}: Invalid value: {value!r}: must be an integer, zero or more")
    return int(match[1]) * _SUFFIXES[match[2] or ""]


def extended_requests(container: Mapping[str, Any], where: str = "") -> dict[str, int]:
    """Limits of extended resources, without the zero ones."""
    # Limits, for requests of extended resources must equal them.
    limits = (container.get("resources") or {}).get("limits") or {}
    found = {
        name: whole_number(value, f"{where}.resources.limits[{name}]")
        for name, value in limits.items()
        if is_extended(name)
    }
    # A request for none is no request: the plugin is not asked.
    return {name: count for name, count in sorted(found.items()) if count > 0}


def raw_containers(raw: RawObject) -> list[dict[str, Any]]:
    """The containers as the manifest has them, init containers first."""
    return [*(raw["spec"].get("initContainers") or ()), *raw["spec"]["containers"]]


def containers_of(raw: RawObject) -> tuple[ContainerSpec, ...]:
    """The containers in the order in which the kubelet admits them: init containers (sidecars among them) first."""
    spec = raw["spec"]
    found = []
    for position, container in enumerate(spec.get("initContainers") or ()):
        # An init container that never ends: Kubernetes has no other mark of a sidecar.
        is_sidecar = container.get("restartPolicy") == "Always"
        found.append(_container(container, ContainerKind.SIDECAR if is_sidecar else ContainerKind.INIT, position))
    for position, container in enumerate(spec["containers"]):
        found.append(_container(container, ContainerKind.MAIN, position))
    return tuple(found)


def _container(raw: Mapping[str, Any], kind: ContainerKind, position: int) -> ContainerSpec:
    return ContainerSpec(name=raw["name"], kind=kind, position=position, requests=extended_requests(raw))


def pod_requests(raw: RawObject) -> dict[str, int]:
    """What the scheduler counts: main containers and sidecars together, or an init container with the sidecars before it
    where that is more.
    """
    running: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in containers_of(raw):
        for resource, count in container.requests.items():
            if container.kind is ContainerKind.INIT:
                # An init container runs beside the sidecars that were started before it.
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


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """What others read of every object. Raises Rejected, naming the field."""
    for name in ("labels", "annotations"):
        texts = metadata.get(name) or {}
        if not isinstance(texts, dict) or not all(isinstance(value, str) for value in texts.values()):
            raise Rejected(f"metadata.{name}: Invalid value: must be a mapping of texts")
    owners = metadata.get("ownerReferences") or []
    if not isinstance(owners, list) or not all(
        isinstance(one, dict) and all(isinstance(one.get(field), str) for field in ("kind", "name", "uid"))
        for one in owners
    ):
        raise Rejected("metadata.ownerReferences: Invalid value: must be a list of objects with kind, name and uid")


def completed_manifest(raw: Any, *, namespace: str, uid: str, suffix: str) -> RawObject:
    """The object to store: checked, with defaults, identity and a Pending status. `suffix` completes generateName.

    Raises Rejected, naming the field, for a manifest that a real API server would refuse too.
    """
    if not isinstance(raw, dict) or raw.get("kind", "Pod") != "Pod" or raw.get("apiVersion", "v1") != "v1":
        raise Rejected("the object is not a v1 Pod (apiVersion: v1, kind: Pod)")
    # The caller's object stays as it is: a manifest may be applied again.
    pod = copy.deepcopy(raw)
    metadata = _section(pod, "metadata")
    name = metadata.get("name") or (f"{metadata['generateName']}{suffix}" if metadata.get("generateName") else "")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Rejected(f"metadata.name: Invalid value: {name!r}: must be lower case letters, digits, '-' or '.'")
    check_metadata(metadata)
    _check_annotations(metadata)
    _check_spec(_section(pod, "spec"))
    metadata.update(
        {"name": name, "namespace": metadata.get("namespace") or namespace or "default", "uid": uid, "generation": 1}
    )
    metadata["creationTimestamp"] = timestamp()
    # From a manifest that was read from a cluster: they are the server's to set.
    for key in ("resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds", "managedFields"):
        metadata.pop(key, None)
    _default_spec(pod)
    phase = {"phase": "Pending", "qosClass": "BestEffort"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"], "status": phase}


def _section(pod: RawObject, name: str) -> dict[str, Any]:
    section = pod.get(name)
    if not isinstance(section, dict):
        raise Rejected(f"{name}: Required value: the pod has no {name}")
    return section


def _check_annotations(metadata: dict[str, Any]) -> None:
    annotations = metadata.get("annotations") or {}
    for name, what in _NUMBERS.items():
        if name not in annotations:
            continue
        try:
            number = float(annotations[name])
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number) or number < 0:
            raise Rejected(f"metadata.annotations[{name}]: Invalid value: {annotations[name]!r}: must be {what}")


def _check_spec(spec: dict[str, Any]) -> None:
    names: set[str] = set()
    if not isinstance(spec.get("containers"), list) or not spec["containers"]:
        raise Rejected("spec.containers: Required value: at least one container is needed")
    if not isinstance(spec.get("initContainers") or [], list):
        raise Rejected("spec.initContainers: Invalid value: must be a list")
    for group in ("initContainers", "containers"):
        for position, container in enumerate(spec.get(group) or ()):
            where = f"spec.{group}[{position}]"
            if not isinstance(container, dict):
                raise Rejected(f"{where}: Invalid value: must be a mapping")
            name = container.get("name")
            if not isinstance(name, str) or not _CONTAINER_NAME.fullmatch(name):
                raise Rejected(f"{where}.name: Invalid value: {name!r}: must be lower case letters, digits or '-'")
            if name in names:
                raise Rejected(f"{where}.name: Duplicate value: {name!r}")
            names.add(name)
            _check_resources(container, where)


def _check_resources(container: dict[str, Any], where: str) -> None:
    resources = container.get("resources") or {}
    if not isinstance(resources, dict) or not all(
        isinstance(resources.get(k) or {}, dict) for k in ("limits", "requests")
    ):
        raise Rejected(f"{where}.resources: Invalid value: limits and requests must be mappings")
    limits = extended_requests(container, where)
    for name, value in (resources.get("requests") or {}).items():
        if is_extended(name) and whole_number(value, f"{where}.resources.requests[{name}]") != limits.get(name, 0):
            raise Rejected(
                f"{where}.resources.requests[{name}]: Invalid value: {value!r}: must be equal to {name} limit"
            )


def _default_spec(pod: RawObject) -> None:
    spec = pod["spec"]
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("schedulerName", "default-scheduler")
    spec.setdefault("dnsPolicy", "ClusterFirst")
    for container in raw_containers(pod):
        resources = container.setdefault("resources", {}) or {}
        container["resources"] = resources
        if resources.get("limits"):
            # As texts: quantities are written as numbers by people, and read as texts by clients.
            resources["limits"] = {name: str(value) for name, value in resources["limits"].items()}
            resources["requests"] = {**resources["limits"], **(resources.get("requests") or {})}
            resources["requests"] = {name: str(value) for name, value in resources["requests"].items()}
