"""Unknown fields and wrong types in objects that clients write, as the real API server names them (`fieldValidation`).

The schema is that of the models of kubernetes-asyncio, which are generated from Kubernetes' own OpenAPI document. Duplicate
fields are not found: JSON's reader drops them. State owned: the models read so far. Not for the event loop: the first object
of a kind imports its models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

from gpushare_agent.cluster.kube.library import load_library
from gpushare_agent.model.errors import Rejected
from gpushare_agent.sandbox.pod_manifest import RawObject

_MODELS = "kubernetes_asyncio.client.models"
_OTHER_NAMES = {"Event": "CoreV1Event", "ResourceClaim": "ResourceV1ResourceClaim"}
"""Of kinds whose model has a longer name than V1<kind>: other groups have a kind of the same name."""
_CONTAINER = re.compile(r"(?:list\[(?P<item>.*)\]|dict\(str, (?P<value>.*)\))")
_TYPES: dict[str, tuple[type, str]] = {"int": (int, "int32"), "bool": (bool, "bool"), "str": (str, "string")}
_QUANTITY = re.compile(r"\.(limits|requests|capacity|allocatable|overhead|hard|sizeLimit|divisor)\b")
"""In the path of a text that may be written as a number."""
_NAMED_BY = {"conditions": "type", "initContainerStatuses": "name", "containerStatuses": "name"}
"""The field that each item of the list must have."""
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
    return [f'unknown field "{path}"' for path in _walk(raw, _OTHER_NAMES.get(kind, f"V1{kind}"), "")]


def _walk(value: Any, kind: str, path: str) -> Iterator[str]:
    """The paths of unknown fields. `kind` is a type as the models write it: `V1PodSpec`, `list[str]`, `dict(str, str)`."""
    if value is None:
        return
    if (match := _CONTAINER.fullmatch(kind)) is not None:
        is_list, inner = match["item"] is not None, match["item"] or match["value"]
        _check(value, list if is_list else dict, kind, path)
        items = enumerate(value) if is_list else value.items()
        named_by = _NAMED_BY.get(path.rpartition(".")[2])
        for key, item in items:
            if named_by and is_list and not (isinstance(item, dict) and named_by in item):
                raise Rejected(f"{path}[{key}].{named_by}: Required value")
            yield from _walk(item, inner, f"{path}[{key}]" if is_list else f"{path}.{key}")
    elif kind in _TYPES:
        if _QUANTITY.search(path) is None:
            _check(value, *_TYPES[kind], path)
    elif (fields := _fields(kind)) is not None:
        _check(value, dict, kind, path)
        for name, item in value.items():
            where = f"{path}.{name}".removeprefix(".")
            if name in fields:
                yield from _walk(item, fields[name], where)
            else:
                yield where


def _check(value: Any, wanted: type, name: str, path: str) -> None:
    is_right = isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
    if not is_right:
        raise Rejected(f"json: cannot unmarshal {_JSON_NAMES[type(value)]} into field {path} of type {name}")


@cache
def _fields(kind: str) -> dict[str, str] | None:
    """By field name its type; None for a type without a model: `object`, `datetime`."""
    words = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", kind)).lower()
    load_library()
    try:
        model = getattr(import_module(f"{_MODELS}.{words}"), kind)
    except (ImportError, AttributeError):
        return None
    return {model.attribute_map[name]: kind for name, kind in model.openapi_types.items()}
