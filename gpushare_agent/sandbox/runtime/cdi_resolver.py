"""CDI in the embedded node's container runtime: it turns device names into what a container gets.

It is separate from the agent's own code for specs (agent/delivery/cdi_files.py), so that each can show the other's mistakes.
The rules are those of the reference library: a file that is no spec is skipped; the later of two directories counts;
two files of one directory that name a device make it unknown; one unknown name prevents the container. Nothing is opened
in /dev: whether a device node exists is not checked. State owned: none; the files are read at each start.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct

from gpushare_agent.core.kit.shallow_yaml import ShallowLoader
from gpushare_agent.core.model.errors import Rejected

MAX_BYTES = 1024 * 1024
MAX_YAML_BYTES = 512 * 1024
"""The agent's own limits. It takes seconds to read a spec of this size."""


ANNOTATION_PREFIX = "cdi.k8s.io/"
_SPEC_KEYS = frozenset({"cdiVersion", "kind", "annotations", "devices", "containerEdits"})
_DEVICE_KEYS = frozenset({"name", "annotations", "containerEdits"})
_EDIT_KEYS = frozenset({"env", "deviceNodes", "netDevices", "mounts", "hooks", "intelRdt", "additionalGids"})


class ResolvedEdits(Struct, frozen=True, kw_only=True):
    """What the names bring: variables, device nodes by their path in the container, mounts (host path, container path)."""

    env: tuple[tuple[str, str], ...] = ()
    device_nodes: tuple[str, ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()


class _Device(Struct, frozen=True, kw_only=True):
    path: Path
    edits: Mapping[str, Any]
    common: Mapping[str, Any]


def resolve_cdi(directories: Iterable[Path], names: Iterable[str]) -> ResolvedEdits:
    """The edits of all names together; `directories` in rising order of precedence.

    Raises:
        Rejected: a name that no spec has, or that two of one directory have.
    """
    # A name that comes twice, by field and by annotation, is injected once.
    requested = list(dict.fromkeys(names))
    # No file is read for the many containers without CDI devices.
    if not requested:
        return ResolvedEdits()
    known = _known(directories)
    missing = [name for name in requested if name not in known]
    if missing:
        raise Rejected(f"CDI device injection failed: unresolvable CDI devices {', '.join(missing)}")
    found = [known[name] for name in requested]
    # A file's edits for all its devices come once, however many devices are requested.
    commons = {device.path: device.common for device in found}
    return _together([*commons.values(), *(device.edits for device in found)])


def _known(directories: Iterable[Path]) -> dict[str, _Device]:
    known: dict[str, _Device] = {}
    ambiguous: set[str] = set()
    for directory in directories:
        for path in sorted(directory.glob("*")):
            for name, device in _devices(path).items():
                # Two files of one directory contradict each other. With two directories the later one is meant to win.
                if name in known and known[name].path.parent == directory:
                    ambiguous.add(name)
                known[name] = device
    return {name: device for name, device in known.items() if name not in ambiguous}


def requested_names(cdi_devices: Iterable[str], annotations: Iterable[tuple[str, str]]) -> list[str]:
    """The CDI names of one Allocate answer: the field's, then the annotations'."""
    by_annotation = [value.split(",") for key, value in sorted(annotations) if key.startswith(ANNOTATION_PREFIX)]
    return [*cdi_devices, *(name for names in by_annotation for name in names)]


def _devices(path: Path) -> dict[str, _Device]:
    """The devices of a file by qualified name; none for what is no spec."""
    if path.suffix not in (".json", ".yaml"):
        return {}
    # As the reference library: a file that is no spec does not keep others from being used.
    with suppress(Exception):
        if path.stat().st_size > (MAX_BYTES if path.suffix == ".json" else MAX_YAML_BYTES):
            raise ValueError(path)  # the agent leaves it out too
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text) if path.suffix == ".json" else yaml.load(text, ShallowLoader)  # noqa: S506 - a SafeLoader
        common = raw.get("containerEdits") or {}
        # Strict as the reference library: a field that it does not know makes the spec invalid.
        _require_known(raw, _SPEC_KEYS)
        _require_known(common, _EDIT_KEYS)
        devices: dict[str, _Device] = {}
        for device in raw["devices"]:
            _require_known(device, _DEVICE_KEYS)
            _require_known(device["containerEdits"], _EDIT_KEYS)
            # A device without edits is invalid by the specification.
            if not device["containerEdits"] or device["name"] in devices:
                raise ValueError(device["name"])
            devices[device["name"]] = _Device(path=path, edits=device["containerEdits"], common=common)
        return {f"{raw['kind']}={name}": device for name, device in devices.items()}
    return {}


def _require_known(raw: Mapping[str, Any], keys: frozenset[str]) -> None:
    if not set(raw) <= keys:
        raise ValueError(sorted(set(raw) - keys))


def _together(parts: Sequence[Mapping[str, Any]]) -> ResolvedEdits:
    env = [entry.partition("=") for part in parts for entry in part.get("env") or ()]
    nodes = [node["path"] for part in parts for node in part.get("deviceNodes") or ()]
    # By the path in the container: a later mount hides the earlier.
    mounts = {m["containerPath"]: m["hostPath"] for part in parts for m in part.get("mounts") or ()}
    return ResolvedEdits(
        env=tuple((name, value) for name, _, value in env),
        device_nodes=tuple(dict.fromkeys(nodes)),
        mounts=tuple((host, inner) for inner, host in sorted(mounts.items())),
    )
