"""Deployments, ReplicaSets and Jobs as clients write them: checks and defaults. Pure, but for the models that the first one
imports (field_validation.py); what they do is pod_controllers.py's.
"""

from __future__ import annotations

import copy
import math
import re
from typing import Any

from gpushare_agent.model.errors import Rejected
from gpushare_agent.sandbox.api.field_validation import unknown_fields
from gpushare_agent.sandbox.api.store import KINDS
from gpushare_agent.sandbox.pod_manifest import RawObject, completed_manifest

_LONGEST_NAMES = {"deployments": 200, "jobs": 200, "replicasets": 220}
"""What is made for them has a longer name: of a Deployment a ReplicaSet, of all pods."""
_NUMBERS = ("replicas", "parallelism", "completions", "backoffLimit")
_MOST_AT_ONCE = {"replicas": 1000, "parallelism": 1000}
"""All pods are objects of one process, whose controllers read them all in each pass."""
_PART = re.compile(r"[0-9]{1,9}%?")
_UID_LABEL, _NAME_LABEL = "batch.kubernetes.io/controller-uid", "batch.kubernetes.io/job-name"


def completed_workload(resource: str, raw: RawObject) -> RawObject:
    """With its defaults; an object of any other resource as it is. Raises Rejected, naming the field."""
    if resource not in _LONGEST_NAMES:
        return raw
    unknown_fields(raw, KINDS[resource])  # for the types
    name, spec = raw["metadata"]["name"], copy.deepcopy(raw.get("spec") or {})
    if len(name) > _LONGEST_NAMES[resource]:
        raise Rejected(
            f"metadata.name: Too long: {name!r:.80}: at most {_LONGEST_NAMES[resource]} characters in the sandbox"
        )
    template = spec.get("template") or {}
    template["metadata"] = {"labels": {}, **(template.get("metadata") or {})}
    spec = (_job if resource == "jobs" else _replicated)({**spec, "template": template}, raw["metadata"])
    for field in _NUMBERS:
        if spec.get(field, 0) < 0:
            raise Rejected(f"spec.{field}: Invalid value: {spec[field]}: must be greater than or equal to 0")
        if spec.get(field, 0) > (most := _MOST_AT_ONCE.get(field, math.inf)):
            raise Rejected(f"spec.{field}: Invalid value: {spec[field]}: at most {most} in the sandbox")
    for field, value in ((spec.get("strategy") or {}).get("rollingUpdate") or {}).items():
        if _PART.fullmatch(str(value)) is None:
            raise Rejected(
                f"spec.strategy.rollingUpdate.{field}: Invalid value: {value!r:.80}: a number, or a part such as 25%"
            )
    pod = {"metadata": {**template["metadata"], "name": name}, "spec": template.get("spec")}
    try:
        template["spec"] = completed_manifest(pod, namespace="", uid="", suffix="")["spec"]
    except Rejected as error:
        raise Rejected(f"spec.template.{error}") from error
    return {**raw, "spec": spec}


def _job(spec: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    template = spec["template"]
    if (template.get("spec") or {}).get("restartPolicy") not in ("Never", "OnFailure"):
        raise Rejected('spec.template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"')
    own = {_UID_LABEL: metadata["uid"], _NAME_LABEL: metadata["name"]}
    template["metadata"]["labels"] = {**template["metadata"]["labels"], **own}
    defaults = {"parallelism": 1, "completions": 1, "backoffLimit": 6}
    return {**defaults, **spec, "selector": {"matchLabels": {_UID_LABEL: metadata["uid"]}}}


def _replicated(spec: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    labels, matched = (
        spec["template"]["metadata"]["labels"],
        (spec.get("selector") or {}).get("matchLabels") or {},
    )
    if not matched:
        raise Rejected("spec.selector: Required value: matchLabels must name labels of the template")
    if not matched.items() <= labels.items():
        raise Rejected(
            f"spec.template.metadata.labels: Invalid value: {labels!r:.200}: `selector` does not match template `labels`"
        )
    return {"replicas": 1, "strategy": {"type": "RollingUpdate"}, **spec}
