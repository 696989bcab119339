"""Checks what clients write into the embedded API server: unknown fields and wrong types, workloads, changes by an
update.

The schema is that of the models of kubernetes-asyncio, which are generated from Kubernetes' own OpenAPI document.
Duplicate fields are not found: JSON's reader drops them. State owned: the models read so far. Not for the event loop: the
first object of a kind imports its models. What workloads do is pod_controllers.py's.
"""

from __future__ import annotations

import copy
import math
import re
import uuid
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

from gpushare_agent.core.kube.configuration import load_library
from gpushare_agent.core.model.errors import Conflict, Rejected
from gpushare_agent.sandbox.api.kinds import KINDS, Kind
from gpushare_agent.sandbox.pod_manifest import RawObject, check_annotations, completed_spec, timestamp

_MODELS = "kubernetes_asyncio.client.models"
_OTHER_NAMES = {"Event": "CoreV1Event", "ResourceClaim": "ResourceV1ResourceClaim"}
"""Kinds with a longer model name than V1<kind>, because other groups have a kind of the same name."""
CONTAINER = re.compile(r"(?:list\[(?P<item>.*)\]|dict\(str, (?P<value>.*)\))")
_TYPES: dict[str, tuple[type, str]] = {"int": (int, "int32"), "bool": (bool, "bool"), "str": (str, "string")}
_QUANTITY = re.compile(r"\.(limits|requests|capacity|allocatable|overhead|hard|sizeLimit|divisor)\b")
"""In the path of a text that may be written as a number."""
_REQUIRED = {
    "conditions": ("type",), "initContainerStatuses": ("name",), "containerStatuses": ("name",),
    "ownerReferences": ("kind", "name", "uid"),
}  # fmt: skip
"""The fields that each item of the list must have. Readers rely on them; without them controllers ended."""
_JSON_NAMES = {str: "string", bool: "bool", int: "number", float: "number", list: "array", dict: "object"}


def without_nulls(value: Any) -> Any:
    """A field that is null is not there, as for the real server."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value if item is not None] if isinstance(value, list) else value


def unknown_fields(raw: RawObject, kind: str) -> list[str]:
    """The unknown fields of the object, each as the real server names it: `unknown field "spec.containers[0].resorces"`.

    Raises Rejected for a value of a type that the field cannot have.
    """
    return [f'unknown field "{path}"' for path in _walk(raw, model_of(kind), "")]


def model_of(kind: str) -> str:
    return _OTHER_NAMES.get(kind, f"V1{kind}")


def _walk(value: Any, kind: str, path: str) -> Iterator[str]:
    """The paths of unknown fields. `kind` is a type as the models write it: `V1PodSpec`, `list[str]`, `dict(str, str)`."""
    # Null is an absent field, of whatever type.
    if value is None:
        return
    if (match := CONTAINER.fullmatch(kind)) is not None:
        is_list, inner = match["item"] is not None, match["item"] or match["value"]
        _check(value, list if is_list else dict, kind, path)
        items = enumerate(value) if is_list else value.items()
        for key, item in items:
            where = f"{path}[{key}]" if is_list else f"{path}.{key}"
            for name in _REQUIRED.get(path.rpartition(".")[2], ()) if is_list else ():
                if not isinstance(item, dict) or name not in item:
                    raise Rejected(f"{where}.{name}: Required value")
            yield from _walk(item, inner, where)
    elif kind in _TYPES:
        # `cpu: 1` is a number for a text; a real API server takes it in quantities alone.
        if _QUANTITY.search(path) is None:
            _check(value, *_TYPES[kind], path)
    elif (fields := fields_of_model(kind)) is not None:
        _check(value, dict, kind, path)
        for name, item in value.items():
            where = f"{path}.{name}".removeprefix(".")
            if name in fields:
                yield from _walk(item, fields[name], where)
            else:
                yield where


def _check(value: Any, kind: type, name: str, path: str) -> None:
    # bool is an int in Python, and none in JSON.
    is_right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not is_right:
        raise Rejected(f"json: cannot unmarshal {_JSON_NAMES[type(value)]} into field {path} of type {name}")


@cache
def fields_of_model(kind: str) -> dict[str, str] | None:
    """The type of each field, by name; None for a type without a model: `object`, `datetime`."""
    words = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", kind)).lower()
    # Its top module loads 1,259 others unless it is kept from it.
    load_library()
    try:
        model = getattr(import_module(f"{_MODELS}.{words}"), kind)
    # Types without a model, such as `object`: anything may stand there.
    except (ImportError, AttributeError):
        return None
    return {model.attribute_map[name]: kind for name, kind in model.openapi_types.items()}


_LONGEST_NAMES = {"deployments": 200, "jobs": 200, "replicasets": 220, "statefulsets": 200}
"""The objects that they make have longer names: a Deployment makes a ReplicaSet, all make pods."""
_NUMBERS = ("replicas", "parallelism", "completions", "backoffLimit")
_MOST_AT_ONCE = {"replicas": 1000, "parallelism": 1000}
"""All pods are objects of one process, and its controllers read them all in each pass."""
_PART = re.compile(r"[0-9]{1,9}%?")
_UID_LABEL, _NAME_LABEL = "batch.kubernetes.io/controller-uid", "batch.kubernetes.io/job-name"


_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_OF_THE_SERVER = ("resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds", "managedFields")


def completed(kind: Kind, raw: Any, namespace: str = "default", suffix: str = "00000") -> RawObject:
    """The object to store: checked, with its identity and its defaults. `suffix` completes generateName.

    Raises Rejected, naming the field, for an object that a real API server would refuse too.
    """
    given_kind = (
        (raw.get("apiVersion", kind.group_version), raw.get("kind", kind.name)) if isinstance(raw, dict) else ()
    )
    if given_kind != (kind.group_version, kind.name):
        raise Rejected(f"the object is not a {kind.name} (apiVersion: {kind.group_version}, kind: {kind.name})")
    raw = without_nulls(raw)
    unknown_fields(raw, kind.name)  # for the types, on which all that follows relies
    given = raw.get("metadata") or {}
    name = given.get("name") or (f"{given['generateName']}{suffix}" if given.get("generateName") else "")
    if not name:
        raise Rejected("metadata.name: Required value: name or generateName is required")
    if not _NAME.fullmatch(name):
        raise Rejected(f"metadata.name: Invalid value: {name!r}: must be lower case letters, digits, '-' or '.'")
    if "applied" in kind.marks and kind.name not in ("ConfigMap", "Namespace") and "spec" not in raw:
        raise Rejected(f"spec: Required value: the {kind.name} has no spec")
    # From a manifest that was read from a cluster: some fields are the server's to set.
    metadata = {key: value for key, value in given.items() if key not in _OF_THE_SERVER}
    metadata |= {"name": name, "uid": str(uuid.uuid4()), "creationTimestamp": timestamp()}
    metadata |= {"generation": 1} if "status" in kind.marks else {}
    metadata |= {"namespace": given.get("namespace") or namespace} if kind.is_namespaced else {}
    made = {"apiVersion": kind.group_version, "kind": kind.name, **raw, "metadata": metadata}
    if kind.name == "Pod":
        check_annotations(metadata)
        return {**made, "spec": completed_spec(raw["spec"]), "status": {"phase": "Pending", "qosClass": "BestEffort"}}
    if kind.name == "Namespace":
        labels = {**(given.get("labels") or {}), "kubernetes.io/metadata.name": name}
        status = {"spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"}}
        return {**made, "metadata": {**metadata, "labels": labels}, **status}
    return completed_workload(kind.resource, made)


def completed_workload(resource: str, raw: RawObject) -> RawObject:
    """The workload with its defaults; an object of any other resource as it is. Raises Rejected, naming the field."""
    if resource == "resourceslices":
        _check_slice(raw["spec"])
    if resource not in _LONGEST_NAMES:
        return raw
    unknown_fields(raw, KINDS[resource].name)  # for the types
    name, spec = raw["metadata"]["name"], copy.deepcopy(raw.get("spec") or {})
    # A Deployment of a longer name would be taken, and then never have a pod.
    if len(name) > _LONGEST_NAMES[resource]:
        raise Rejected(
            f"metadata.name: Too long: {name!r:.80}: at most {_LONGEST_NAMES[resource]} characters in the sandbox"
        )
    template = spec.get("template") or {}
    template["metadata"] = {"labels": {}, **(template.get("metadata") or {})}
    spec = (_job if resource == "jobs" else _replicated)({**spec, "template": template}, raw["metadata"])
    if resource == "statefulsets":
        spec = {"podManagementPolicy": "OrderedReady", "updateStrategy": {"type": "RollingUpdate"}, **spec}
    elif resource == "deployments":
        spec = {"strategy": {"type": "RollingUpdate"}, **spec}
    for field in _NUMBERS:
        value, most = spec.get(field, 0), _MOST_AT_ONCE.get(field, math.inf)
        if not 0 <= value <= most:
            why = "must be greater than or equal to 0" if value < 0 else f"at most {most} in the sandbox"
            raise Rejected(f"spec.{field}: Invalid value: {value}: {why}")
    for field, value in ((spec.get("strategy") or {}).get("rollingUpdate") or {}).items():
        if _PART.fullmatch(str(value)) is None:
            raise Rejected(
                f"spec.strategy.rollingUpdate.{field}: Invalid value: {value!r:.80}: a number, or a part such as 25%"
            )
    # Its pods are made by a controller, which nobody sees fail: a template that gives no valid pod is refused here.
    try:
        check_annotations(template["metadata"])
        template["spec"] = completed_spec(template.get("spec"))
    except Rejected as error:
        raise Rejected(f"spec.template.{error}") from error
    return {**raw, "spec": spec}


def _check_slice(spec: dict[str, Any]) -> None:
    """The limits of resource.k8s.io/v1, with which a driver has to divide its pool. Raises Rejected."""
    devices, sets = spec.get("devices") or (), spec.get("sharedCounters") or ()
    most = 64 if any(one.get("taints") or one.get("consumesCounters") for one in devices) else 128
    consumed = max((len(one.get("consumesCounters") or ()) for one in devices), default=0)
    counters = max((len(one.get("counters") or ()) for one in sets), default=0)
    if devices and sets:
        raise Rejected("spec: Invalid value: only one of `sharedCounters` or `devices` is allowed")
    for path, count, limit in (
        ("spec.devices", len(devices), most), ("spec.devices[].consumesCounters", consumed, 2),
        ("spec.sharedCounters", len(sets), 8), ("spec.sharedCounters[].counters", counters, 32),
    ):  # fmt: skip
        if count > limit:
            raise Rejected(f"{path}: Too many: {count}: must have at most {limit} items")


def _job(spec: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    template = spec["template"]
    if (template.get("spec") or {}).get("restartPolicy") not in ("Never", "OnFailure"):
        raise Rejected('spec.template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"')
    own = {_UID_LABEL: metadata["uid"], _NAME_LABEL: metadata["name"]}
    template["metadata"]["labels"] = {**template["metadata"]["labels"], **own}
    defaults = {"parallelism": 1, "completions": 1, "backoffLimit": 6}
    return {**defaults, **spec, "selector": {"matchLabels": {_UID_LABEL: metadata["uid"]}}}


def _replicated(spec: dict[str, Any], _metadata: dict[str, Any]) -> dict[str, Any]:
    labels = spec["template"]["metadata"]["labels"]
    matched = (spec.get("selector") or {}).get("matchLabels") or {}
    if not matched:
        raise Rejected("spec.selector: Required value: matchLabels must name labels of the template")
    if not matched.items() <= labels.items():
        raise Rejected(
            f"spec.template.metadata.labels: Invalid value: {labels!r:.200}: `selector` does not match template `labels`"
        )
    return {"replicas": 1, **spec}


_IDENTITY = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp", "generation")
_IMMUTABLE = {
    "jobs": ("template", "completions"),
    **dict.fromkeys(("deployments", "replicasets"), ("selector",)),
    "statefulsets": ("selector", "serviceName", "podManagementPolicy"),
}


def updated(resource: str, old: RawObject, new: RawObject, *, is_status: bool = False) -> RawObject:
    """The new object with the parts of the old one that the address does not own: an update of the object leaves its
    status, one of the status the rest.

    Raises:
        Conflict: the new object names another resourceVersion or UID.
        Rejected: the change is not allowed, or the object would not be valid.
    """
    # The real server never stores a null. Stored nulls ended controllers.
    new = without_nulls(new)
    metadata, known = new.get("metadata") or {}, old["metadata"]
    # A client that sends the version that it has read must not overwrite a newer one.
    for field in ("resourceVersion", "uid"):
        if metadata.get(field, known[field]) != known[field]:
            raise Conflict(
                f'Operation cannot be fulfilled on {resource} "{known["name"]}": the object has been modified; '
                "please apply your changes to the latest version and try again"
            )
    unchanged = {"metadata": {**metadata, **{name: known[name] for name in _IDENTITY if name in known}}}
    # The status has an address of its own, and its writer owns nothing else.
    if is_status:
        # A client may replace the status by one without a phase, which controllers read of every pod.
        phase = {"phase": old["status"]["phase"]} if resource == "pods" else {}
        return {**new, **unchanged, "spec": old.get("spec", {}), "status": {**phase, **(new.get("status") or {})}}
    if "status" in KINDS[resource].marks:
        unchanged["status"] = old.get("status", {})
    if resource == "pods" and new.get("spec") != old["spec"]:
        # A running pod's spec cannot change, except between two forms of one quantity.
        if not _is_same_spec(new, old):
            raise Rejected(
                "spec: Forbidden: pod updates may not change these fields; delete the pod and create it again"
            )
        unchanged["spec"] = old["spec"]
    result = completed_workload(resource, {**new, **unchanged})
    for field in _IMMUTABLE.get(resource, ()):
        if result["spec"].get(field) != old["spec"].get(field):
            raise Rejected(f"spec.{field}: Invalid value: field is immutable; delete the object and create it again")
    # It counts changes of the spec: controllers tell by it what their status is about.
    if "generation" in known and result.get("spec") != old.get("spec"):
        result["metadata"] = {**result["metadata"], "generation": known["generation"] + 1}
    return result


def _is_same_spec(new: RawObject, old: RawObject) -> bool:
    """40 and "40" are one quantity: kubectl sends the manifest's words at each apply."""
    try:
        return bool(completed_spec(new.get("spec")) == old["spec"])
    except Rejected:
        return False
