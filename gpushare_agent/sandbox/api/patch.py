"""Patches of the embedded API server: merge (RFC 7386), JSON patch (RFC 6902: add, replace, remove, test), and the
strategic merge of Kubernetes.

Strategic merge is a merge in which the lists of `_MERGE_KEYS` are merged by key instead of being replaced, with
directives: `$patch: delete` and `replace`, `$retainKeys`, `$setElementOrder/LIST`, `$deleteFromPrimitiveList/LIST`.
"""

from __future__ import annotations

import copy
from typing import Any, Literal, cast

from msgspec import UNSET, Struct, ValidationError, convert

from gpushare_agent.core.model.errors import Rejected
from gpushare_agent.sandbox.pod_manifest import RawObject

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY = "application/apply-patch+yaml"

_MERGE_KEYS = {
    **dict.fromkeys(("containers", "initContainers", "env", "volumes", "imagePullSecrets", "resourceClaims"), "name"),
    "conditions": "type", "addresses": "type", "ownerReferences": "uid", "ports": "containerPort",
    "volumeMounts": "mountPath", "volumeDevices": "devicePath", "hostAliases": "ip", "finalizers": "",
}  # fmt: skip
"""`patchMergeKey` of the API's types; empty for texts, which are a set."""


def patched(raw: RawObject, patch: object, content_type: str) -> RawObject:
    """A new object. Raises Rejected where the patch cannot be applied."""
    if content_type == JSON_PATCH:
        return _json_patched(raw, patch)
    if not isinstance(patch, dict):
        raise Rejected(f"a {content_type} body must be a JSON object, got {type(patch).__name__}")
    try:
        made = _strategic(raw, patch) if content_type == STRATEGIC else _merged(raw, patch)
    except (TypeError, AttributeError) as error:  # a directive of a type that it cannot have
        raise Rejected(f"the patch cannot be applied: {error}") from error
    return cast(RawObject, made)


def _merged(old: object, patch: object) -> object:
    """By RFC 7386: null removes, lists are replaced as a whole."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return result


def _strategic(old: object, patch: object, name: str = "") -> object:
    if isinstance(patch, list) and isinstance(old, list) and name in _MERGE_KEYS:
        return _merged_by_key(old, patch, _MERGE_KEYS[name])
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    if patch.get("$patch") == "replace":
        return copy.deepcopy({key: value for key, value in patch.items() if key != "$patch"})
    # kubectl sends it with a union, such as a strategy: fields of the other kind must go.
    retained = patch.get("$retainKeys")
    known = old.items() if isinstance(old, dict) else ()
    result: dict[str, Any] = {key: value for key, value in known if retained is None or key in retained}
    orders = {}
    for key, value in patch.items():
        directive, _, target = key.partition("/")
        if directive == "$setElementOrder":
            orders[target] = value
        elif directive == "$deleteFromPrimitiveList":
            result[target] = [one for one in result.get(target) or () if one not in value]
        elif value is None:
            result.pop(key, None)
        elif key not in ("$retainKeys", "$patch"):
            result[key] = _strategic(result.get(key), value, key)
    # Last: it orders what the patch has merged.
    for target, order in orders.items():
        if isinstance(result.get(target), list):
            result[target] = _ordered(result[target], order, _MERGE_KEYS.get(target, ""))
    return result


def apply_patch(last: object, desired: object, name: str = "") -> object:
    """The strategic patch that turns an object to which `last` was applied into one to which `desired` is applied. It
    removes what only `last` has."""
    if isinstance(desired, dict):
        known = last if isinstance(last, dict) else {}
        # With the value None, which a merge takes for a removal.
        removed = dict.fromkeys(known.keys() - desired.keys())
        return {**removed, **{key: apply_patch(known.get(key), value, key) for key, value in desired.items()}}
    key = _MERGE_KEYS.get(name, "")
    if not isinstance(desired, list) or not isinstance(last, list) or not key:
        return desired
    before = {_identity(item, key): item for item in last}
    now = [_identity(item, key) for item in desired]
    removed_items = [{key: one, "$patch": "delete"} for one in before if one not in now]
    return [*removed_items, *(apply_patch(before.get(one), item) for one, item in zip(now, desired, strict=True))]


def _identity(item: object, key: str) -> object:
    return item.get(key) if key and isinstance(item, dict) else item


def _merged_by_key(old: list[object], patch: list[object], key: str) -> list[object]:
    result = list(old)
    for item in patch:
        desired = _identity(item, key)
        position = next((i for i, known in enumerate(result) if _identity(known, key) == desired), None)
        is_deleted = isinstance(item, dict) and item.get("$patch") == "delete"
        # A deletion of what is not there is done already.
        if position is None:
            result += [] if is_deleted else [_strategic(None, item)]
        elif is_deleted:
            del result[position]
        else:
            result[position] = _strategic(result[position], item)
    return result


def _ordered(items: list[object], order: list[object], key: str) -> list[object]:
    """Items that the order does not name stay behind those that it names."""
    desired = [_identity(item, key) for item in order]
    return sorted(
        items, key=lambda i: desired.index(_identity(i, key)) if _identity(i, key) in desired else len(desired)
    )


def _json_patched(raw: RawObject, patch: object) -> RawObject:
    if not isinstance(patch, list):
        raise Rejected("a JSON patch must be a list of operations")
    result = copy.deepcopy(raw)
    for operation in patch:
        try:
            _apply_operation(result, convert(operation, _Operation))
        except (KeyError, IndexError, ValueError, ValidationError) as error:
            raise Rejected(f"the JSON patch operation {operation!r} cannot be applied: {error!r}") from error
    return result


class _Operation(Struct):
    op: Literal["add", "replace", "remove", "test"]
    path: str
    value: object = UNSET


def _apply_operation(root: RawObject, operation: _Operation) -> None:
    # ~1 before ~0: RFC 6901 has them undone in this order.
    *steps, last = [step.replace("~1", "/").replace("~0", "~") for step in operation.path.split("/")[1:]]
    target: Any = root
    for step in steps:
        target = target[_key(target, step)]
    key = _key(target, last)
    if operation.op != "remove" and operation.value is UNSET:
        raise KeyError("value")
    if operation.op == "add" and isinstance(target, list):
        target.insert(key, operation.value)
    # Read first: what is not there can be neither replaced nor removed, which the KeyError shows.
    elif operation.op == "add" or (operation.op == "replace" and target[key] != operation.value):
        target[key] = operation.value
    elif operation.op == "remove":
        del target[key]
    elif target[key] != operation.value:
        raise ValueError("the tested value differs")


def _key(target: object, step: str) -> Any:
    if isinstance(target, list):
        # `-` is the place behind the last item.
        return len(target) if step == "-" else int(step)
    if not isinstance(target, dict):
        raise ValueError(f"{target!r:.80} has no fields")
    return step
