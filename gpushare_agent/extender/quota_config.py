"""Reads gpu-admission's configuration file, for a migration from it.

Format: JSON, docs/reference/formats.md, section 9. Its SkipBindTime is accepted and not used: there is no such wait here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpushare_agent.model.errors import StartupError

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
        raw: Any = json.loads(content)
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
