"""What an update may change of an object, and what it becomes. Pure; the object store keeps the result."""

from __future__ import annotations

from gpushare_agent.model.errors import Conflict, Rejected
from gpushare_agent.sandbox.api.field_validation import without_nulls
from gpushare_agent.sandbox.api.store import WITH_STATUS
from gpushare_agent.sandbox.api.workloads import completed_workload
from gpushare_agent.sandbox.pod_manifest import RawObject, check_metadata, completed_manifest

_IDENTITY = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp", "generation")
_IMMUTABLE = {"jobs": ("template", "completions"), "deployments": ("selector",), "replicasets": ("selector",)}


def updated(resource: str, old: RawObject, new: RawObject, *, is_status: bool = False) -> RawObject:
    """Keeps what the addressed part does not own: an update of the object leaves its status, one of the status the rest.

    Raises:
        Conflict: the new object names another resourceVersion or UID.
        Rejected: the change is not allowed, or the object would not be valid.
    """
    new = without_nulls(new)
    metadata, known = new.get("metadata") or {}, old["metadata"]
    check_metadata(metadata)
    for field in ("resourceVersion", "uid"):
        if metadata.get(field, known[field]) != known[field]:
            raise Conflict(
                f'Operation cannot be fulfilled on {resource} "{known["name"]}": the object has been modified; '
                "please apply your changes to the latest version and try again"
            )
    kept = {"metadata": {**metadata, **{name: known[name] for name in _IDENTITY if name in known}}}
    if is_status:
        phase = {"phase": old["status"]["phase"]} if resource == "pods" else {}
        return {**new, **kept, "spec": old.get("spec", {}), "status": {**phase, **(new.get("status") or {})}}
    if resource in WITH_STATUS:
        kept["status"] = old.get("status", {})
    if resource == "pods" and new.get("spec") != old["spec"]:
        if not _is_same_spec(new, old):
            raise Rejected(
                "spec: Forbidden: pod updates may not change these fields; delete the pod and create it again"
            )
        kept["spec"] = old["spec"]
    result = completed_workload(resource, {**new, **kept})
    for field in _IMMUTABLE.get(resource, ()):
        if result["spec"].get(field) != old["spec"].get(field):
            raise Rejected(f"spec.{field}: Invalid value: field is immutable; delete the object and create it again")
    if "generation" in known and result.get("spec") != old.get("spec"):
        result["metadata"] = {**result["metadata"], "generation": known["generation"] + 1}
    return result


def _is_same_spec(new: RawObject, old: RawObject) -> bool:
    """40 and "40" are one quantity: kubectl sends the manifest's words at each apply."""
    try:
        return bool(completed_manifest(new, namespace="", uid="", suffix="")["spec"] == old["spec"])
    except Rejected:
        return False
