"""Reads the configuration of NVIDIA's device plugin into a layer of our settings, with what became of each of its keys.

A flag of theirs beats a variable, a variable beats the file, as in their plugin; settings of ours beat them all. What the
plugin would refuse is refused. What it takes and this agent cannot do changes nothing and is reported. The table is
settings/nvidia_options.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpushare_agent.core.kit.near_names import did_you_mean
from gpushare_agent.core.settings.nvidia_options import OPTIONS, Option, options_by_name, resource_name
from gpushare_agent.core.settings.reference import text_of
from gpushare_agent.core.settings.sections import HealthSettings
from gpushare_agent.core.settings.sources import Layer, MigratedKey, RawSetting, parse_into

MAX_UNKNOWN_KEYS = 50
MAX_REPLICATED = 100
_SHOWN_CHARACTERS = 200
_ALL_XIDS = range(1, 256)
"""The Xids that DP_DISABLE_HEALTHCHECKS=all stands for: more than NVIDIA's catalogue has, 1 to 172."""
_SHARINGS = {"mps": "mps", "timeSlicing": "time-slicing"}


class _Mistake(Exception):  # noqa: N818 - one line
    """The reasons why the file cannot be used."""


def read_nvidia(flags: Mapping[str, RawSetting], environ: Mapping[str, str], file: Layer | None) -> Layer:
    """The layer of all places; `flags` by option's name, `file` what `parse_nvidia` made of the file if there is one."""
    found = dict(file.nvidia) if file else {}
    for option in OPTIONS:
        variable = next((name for name in option.variables if environ.get(name)), None)
        if variable:
            found[option.name] = RawSetting(environ[variable], f"variable {variable}")
    # Flags last: theirs beat variables, which beat the file.
    found |= flags
    return _mapped(found, file or Layer(), is_given=file is not None or bool(found))


def parse_nvidia(content: bytes, place: str) -> Layer:
    """The values of YAML or JSON, by option's name in `nvidia`, with the mistakes. The plugin ignores keys that it does not
    know: here they are reported. A megabyte takes seconds: call it in a thread."""
    layer = Layer()
    tree = parse_into(layer, content, f"{place}: cannot read the configuration of NVIDIA's device plugin")
    try:
        for name, value in _keys(tree, layer, place):
            layer.nvidia[name] = RawSetting(value, place)
    except _Mistake as error:
        layer.problems.append(f"{place}: {error}")
    return layer


def _keys(tree: Mapping[object, object], layer: Layer, place: str) -> Iterator[tuple[str, object]]:
    """Option's name and value of each that is set. Null is unset."""
    for name, value in _flattened(tree, ""):
        kind = name.removeprefix("sharing.").removesuffix(".resources")
        if name in options_by_name():
            yield name, value
        elif name == f"sharing.{kind}.resources" and kind in _SHARINGS:
            yield from _replicated(name, value)
        # Each becomes a line of the log at the start.
        elif len(layer.migrated) < MAX_UNKNOWN_KEYS:
            known = [option.name for option in OPTIONS if option.is_in_file]
            reason = f"NVIDIA's plugin does not know it either{did_you_mean(name, known)}"
            unknown = MigratedKey(name[:_SHOWN_CHARACTERS], _shown(value), place, reason=reason, is_lost=True)
            layer.migrated.append(unknown)
    for kind in _SHARINGS:
        sharing = tree.get("sharing")
        section = sharing.get(kind) if isinstance(sharing, dict) else None
        if section is not None and not (isinstance(section, dict) and section.get("resources")):
            # Their plugin ends with an error here, too: an empty section is a mistake, not "no sharing".
            raise _Mistake(f"sharing.{kind} has no resources; write name and replicas of at least one, or leave it out")


def _flattened(tree: Mapping[object, object], prefix: str) -> Iterator[tuple[str, object]]:
    sections = {option.name.rpartition(".")[0] for option in OPTIONS if option.is_in_file}
    parts = {"", "flags", "sharing"} | {section for section in sections if not section.endswith(".resources")}
    known = {name.lower(): name for name in parts | options_by_name().keys() if not name.startswith("sharing.")}
    for raw_name, value in tree.items():  # Go's JSON takes the names of a struct's fields in any case
        # An unknown name stays as it was written, for the message.
        name = known.get(f"{prefix}{raw_name}".lower(), f"{prefix}{raw_name}")
        # `key:` with nothing behind it is unset in Go.
        if value is None:
            continue
        if name not in parts:
            yield name, value
        elif isinstance(value, dict):
            yield from _flattened(value, f"{name}.")
        else:
            raise _Mistake(f"{name} is {_shown(value)}, but must be a mapping")


def _replicated(name: str, value: object) -> Iterator[tuple[str, object]]:
    """`resources` of a kind of sharing, as one value for each of its keys."""
    if not isinstance(value, list) or len(value) > MAX_REPLICATED:
        raise _Mistake(f"{name} must be a list of at most {MAX_REPLICATED} resources")
    counts: list[str] = []
    for item in value:
        if not isinstance(item, dict) or not {"name", "replicas"} <= item.keys():
            raise _Mistake(f"{name}: each must have name and replicas")
        count = item["replicas"]
        # One replica is no sharing; their plugin refuses it.
        if isinstance(count, bool) or not isinstance(count, int) or count < 2:
            raise _Mistake(f"{name}: replicas is {_shown(count)}, but must be a whole number of at least 2")
        try:
            counts.append(f"{resource_name(item['name'])}={count}")
        except ValueError as error:
            raise _Mistake(f"{name}: name is {_shown(item['name'])}, but must be {error}") from error
    unknown = {str(key) for item in value for key in item} - {"name", "replicas", "rename", "devices"}
    yield from ((f"{name}.{key}", "") for key in sorted(unknown))
    yield f"{name}.name", [pair.partition("=")[0] for pair in counts]
    yield f"{name}.replicas", counts
    for key, ignored in (("rename", ""), ("devices", "all")):
        others = [item[key] for item in value if item.get(key, ignored) != ignored]
        if others:
            yield f"{name}.{key}", others


def _mapped(found: Mapping[str, RawSetting], file: Layer, *, is_given: bool) -> Layer:
    layer = Layer(*file.problems, migrated=file.migrated)
    values: dict[str, Any] = {}
    for option in OPTIONS:
        raw = found.get(option.name)
        if raw is None:
            continue
        try:
            values[option.name] = option.read(raw.value)
        except ValueError as error:
            layer.problems.append(f"{raw.source}: {option.name} is {_shown(raw.value)}, but must be {error}")
    # A rule of their plugin between two keys that are valid by themselves.
    if values.get("flags.migStrategy") == "mixed" and "sharing.mps.resources.replicas" in values:
        layer.problems.append(
            f"{found['flags.migStrategy'].source}: flags.migStrategy mixed does not go with sharing.mps, as in NVIDIA's"
            " plugin; take single or none, or sharing.timeSlicing"
        )
    ours = _settings(values)
    for name, (value, option_name) in ours.items():
        layer.put(name, value, f"{found[option_name].source} ({option_name})")
    if is_given:
        # A configuration of theirs means that these resources are wanted: nothing in it says so.
        layer.put("nvidia.enabled", True, "NVIDIA's configuration")
    layer.migrated += [
        _outcome(option, found[option.name], values[option.name], ours) for option in OPTIONS if option.name in values
    ]
    return layer


def _settings(values: Mapping[str, Any]) -> dict[str, tuple[object, str]]:
    """Our dotted key -> value, and the option that decides it."""
    ours: dict[str, tuple[object, str]] = {}
    # Where both are given, their plugin takes MPS.
    used = next((kind for kind in _SHARINGS if f"sharing.{kind}.resources.replicas" in values), None)
    for option in OPTIONS:
        kind = option.name.split(".")[1] if option.name.startswith("sharing.") else used
        if option.name in values and len(option.settings) == 1 and kind == used:
            ours[option.settings[0]] = (values[option.name], option.name)
    if used:
        name = f"sharing.{used}.resources.replicas"
        ours |= {"nvidia.replicas": (tuple(values[name]), name), "nvidia.sharing": (_SHARINGS[used], name)}
    passes, listed = "flags.plugin.passDeviceSpecs", "flags.plugin.deviceListStrategy"
    if passes in values or listed in values:
        # The default of theirs, not ours: passDeviceSpecs alone was given to their plugin.
        strategies = values.get(listed, ("envvar",))
        # With CDI alone their plugin names the devices and passes no nodes (getAllocateResponse in server.go).
        if values.get(passes) and not all(strategy.startswith("cdi-") for strategy in strategies):
            strategies = (*strategies, "device-nodes")
        ours["device_list_strategy"] = (strategies, listed if listed in values else passes)
    if "kubelet-socket" in values:
        ours["kubelet.device_plugin_path"] = (str(Path(values["kubelet-socket"]).parent), "kubelet-socket")
    without, enabled = "DP_DISABLE_HEALTHCHECKS", "DP_ENABLE_HEALTHCHECKS"
    if without in values or enabled in values:
        # An enabled Xid beats a disabled one, and ours stay ignored unless enabled.
        ignored = {*_xids(values.get(without, ())), *HealthSettings().ignored_xids} - _xids(values.get(enabled, ()))
        ours["health.ignored_xids"] = (tuple(sorted(ignored)), without if without in values else enabled)
    return ours


def _xids(words: tuple[str, ...]) -> set[int]:
    return set(_ALL_XIDS) if {"all", "xids"} & set(words) else {int(word) for word in words}


def _outcome(option: Option, raw: RawSetting, value: object, ours: Mapping[str, tuple[object, str]]) -> MigratedKey:
    shown = _shown(raw.value)
    if not option.settings:
        return MigratedKey(option.name, shown, raw.source, {}, option.reason, is_lost=value not in option.as_here)
    settings = {name: text_of(ours[name][0]) for name in option.settings if name in ours}
    kind = option.name.split(".")[1] if option.name.startswith("sharing.") else ""
    # The section that loses has read settings too, but none of them is in effect.
    is_used = not kind or any(source.startswith(f"sharing.{kind}.") for _, source in ours.values())
    if is_used and settings:
        return MigratedKey(option.name, shown, raw.source, settings)
    reason = "sharing.mps is used in its place, as by NVIDIA's plugin"
    return MigratedKey(option.name, shown, raw.source, reason=reason, is_lost=True)


def _shown(value: object) -> str:
    """A file's value as JSON; a text as it is."""
    return (value if isinstance(value, str) else json.dumps(value, default=str))[:_SHOWN_CHARACTERS]
