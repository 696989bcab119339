"""Reads the quota's ConfigMap as the informer delivers it, and puts it in force (quota_state.py).

A ConfigMap that cannot be read leaves the last good one in force; where there never was one, pods that ask for GPUs are
refused until it is corrected, as in gpu-admission. An absent ConfigMap is no quota. Format and table:
docs/reference/quota.md. State owned: whether the quota in force was read from a good ConfigMap.

Here gpu-admission's configuration file is read too, for a migration from it: JSON, docs/reference/formats.md, section 9.
Its SkipBindTime is accepted and not used: there is no such wait here.
"""

from __future__ import annotations

import json
from pathlib import Path

import structlog
from msgspec import Raw
from msgspec.json import Decoder

from gpushare_agent.cluster.events import EventRecorder
from gpushare_agent.cluster.informer import Handler
from gpushare_agent.cluster.kube.objects import KubeObject, ObjectReference, object_meta, object_name
from gpushare_agent.extender.decisions.quota import QUOTA_KEY, Quota, parse_quota
from gpushare_agent.extender.metrics import ExtenderMetrics
from gpushare_agent.extender.quota_state import QuotaState
from gpushare_agent.kit.json_schema import decoded
from gpushare_agent.model.errors import Corrupt, StartupError

MAX_BYTES = 64 << 10
FIELDS = {
    "QuotaConfigMapName": "quota_name",
    "QuotaConfigMapNamespace": "quota_namespace",
    "GPUModelLabel": "model_label",
    "GPUPoolLabel": "pool_label",
}
"""Field of the file -> name of the setting that it replaces."""
_UNUSED = frozenset({"SkipBindTime"})


def read_admission_config(path: Path) -> dict[str, str]:
    """What the file says, by the names of our settings. Raises StartupError."""
    what = f"cannot use gpu-admission's configuration {path}"
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as e:
        raise StartupError(f"{what}: {e.strerror or e}; correct extender.config or leave it out") from e
    if len(content) > MAX_BYTES:
        raise StartupError(f"{what}: it is longer than {MAX_BYTES} bytes")
    try:
        raw: object = json.loads(content)
    except (ValueError, RecursionError) as e:
        raise StartupError(f"{what}: it is no JSON ({e})") from e
    if not isinstance(raw, dict):
        raise StartupError(f"{what}: it is no JSON object")
    unknown = sorted(raw.keys() - FIELDS.keys() - _UNUSED)
    if unknown:
        raise StartupError(f"{what}: {unknown[0][:80]!r} is no field of it; the fields are {', '.join(sorted(FIELDS))}")
    found = {field: raw[field] for field in sorted(FIELDS) if raw.get(field)}
    for field, value in found.items():
        if not isinstance(value, str):
            raise StartupError(f"{what}: {field} is no text")
    return {FIELDS[field]: value for field, value in found.items()}


log = structlog.get_logger(__name__)

MALFORMED = "QuotaMalformed"


class _ConfigMap(KubeObject):
    data: dict[str, str] | None = None


_CONFIG_MAP = Decoder(_ConfigMap)


class QuotaFeed(Handler):
    """The informer's handler of the one ConfigMap."""

    def __init__(self, *, state: QuotaState, events: EventRecorder, metrics: ExtenderMetrics) -> None:
        self._state = state
        self._events = events
        self._metrics = metrics
        self._was_good = False

    def key(self, raw: Raw) -> str:
        return object_name(raw, "ConfigMap")

    def put(self, raw: Raw) -> bool:
        try:
            self._state.quota = parse_quota(decoded(_CONFIG_MAP, raw, "quota: the ConfigMap").data or {})
        except Corrupt as e:
            self._report_malformed(raw, str(e))
        else:
            self._was_good = True
            self._metrics.quota_loaded("good")
            log.info(
                "quota_loaded",
                namespaces=len(self._state.quota.namespaces),
                version=object_meta(raw, "ConfigMap").version,
            )
        return True

    def remove(self, key: str) -> None:
        self._state.quota = Quota()
        self._was_good = False
        self._metrics.quota_loaded("absent")
        log.warning("quota_gone", config_map=key, then="no namespace is limited")

    def _report_malformed(self, raw: Raw, error: str) -> None:
        self._metrics.quota_loaded("malformed")
        then = "the last good one stays in force"
        if not self._was_good:
            self._state.quota = None
            then = "pods that ask for GPUs are refused, for there was no good one before"
        log.error("quota_malformed", error=error, then=then, cure=f"correct the key {QUOTA_KEY} of the ConfigMap")
        meta = object_meta(raw, "ConfigMap")
        name, namespace = self.key(raw), meta.namespace or "default"
        involved = ObjectReference(
            api_version="v1",
            kind="ConfigMap",
            namespace=namespace,
            name=name,
            uid=meta.uid or "",
            resource_version=meta.version,
        )
        message = f"{error}. Meanwhile {then}."
        self._events.record(involved, MALFORMED, message, key=(MALFORMED, namespace, name, error))
