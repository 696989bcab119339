"""Settings: one frozen tree, read once from the command line, the environment, a YAML file and the defaults.

The tree is settings/tree.py, the reading of the places settings/sources.py, the texts settings/reference.py. This module
joins them: `load_settings` returns the tree and where each value came from, or every mistake as one line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import InitSettingsSource

from gpushare_agent.model.errors import AgentError
from gpushare_agent.settings.observation import HealthSettings
from gpushare_agent.settings.reference import Key, all_keys, allowed_text
from gpushare_agent.settings.sources import Layer, RawSetting, read_file, read_flags, read_variables
from gpushare_agent.settings.tree import (
    AllocationSettings,
    KubeletSettings,
    LogSettings,
    PlacementSettings,
    ResourceSettings,
    RuntimeSettings,
    Settings,
    SimulatedSettings,
    VirtualManagerSettings,
    WebSettings,
)

NODE_NAME_SOURCES = ("variable NODE_NAME", "host name")
"""Where the node's name comes from when no setting gives it."""

_SHOWN_CHARACTERS = 80


class SettingsError(AgentError):
    """The settings cannot be used. `problems` has one line for each mistake; exit code 2."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSettings:
    """The tree, and for every dotted key where its value came from ("flag --driver", "default", …)."""

    settings: Settings
    sources: Mapping[str, str]


def load_settings(argv: Sequence[str], environ: Mapping[str, str]) -> LoadedSettings:
    """Reads all places; `argv` holds only settings flags, without the program and the command.

    Raises:
        SettingsError: with every mistake found.
    """
    flags, variables = read_flags(argv), read_variables(environ)
    path = flags.given.get("config") or variables.given.get("config")
    layers = [flags, variables]
    if path is not None and path.value:
        layers.append(read_file(Path(str(path.value)), path.source))
    layers.append(_node_name_layer(environ, layers))

    problems = [problem for layer in layers for problem in layer.problems]
    given: dict[str, RawSetting] = {}
    for layer in reversed(layers):
        given |= layer.given
    try:
        settings = Settings(_build_sources=(tuple(_source(layer) for layer in layers), {}))  # type: ignore[call-arg]  # hidden by dataclass_transform
    except ValidationError as error:
        problems += [_problem(raw["loc"], raw["msg"], given) for raw in error.errors(include_url=False)]
    if problems:
        raise SettingsError(list(dict.fromkeys(problems)))
    sources = {key.name: given[key.name].source if key.name in given else "default" for key in all_keys()}
    return LoadedSettings(settings=settings, sources=sources)


def _node_name_layer(environ: Mapping[str, str], layers: Sequence[Layer]) -> Layer:
    """The node's name where nobody gives one: NODE_NAME, which manifests set from the downward API, else the host's."""
    for layer in layers:
        if (named := layer.given.get("node_name")) is not None and named.value == "":
            del layer.given["node_name"]
    name = environ.get("NODE_NAME", "")
    variable, host = NODE_NAME_SOURCES
    return Layer(given={"node_name": RawSetting(value=name, source=variable if name else host)})


def _source(layer: Layer) -> InitSettingsSource:
    """A layer as pydantic-settings merges it: nested at the dots."""
    tree: dict[str, Any] = {}
    for name, given in layer.given.items():
        section, dot, leaf = name.rpartition(".")
        target = tree.setdefault(section, {}) if dot else tree
        target[leaf] = given.value
    return InitSettingsSource(Settings, tree)


def _problem(location: tuple[int | str, ...], message: str, given: Mapping[str, RawSetting]) -> str:
    """One line that names the place, the value, the setting, and what is allowed."""
    parts = [part for part in location if isinstance(part, str)]
    key = _key_at(parts)
    reason = message.removeprefix("Value error, ")
    if key is None:
        name = ".".join(parts)
        places = sorted({g.source for n, g in given.items() if n.startswith(name + ".")})
        return f"{name}: {reason} (set by {', '.join(places) or 'default'})"
    found = given.get(key.name, RawSetting(value=key.default, source="default"))
    value = repr(found.value)
    if len(value) > _SHOWN_CHARACTERS:
        value = value[:_SHOWN_CHARACTERS] + "…"
    spelled = f"--{key.flag} (variable {key.variable})"
    return f"{found.source}: {value} is not allowed for {spelled}; allowed: {_allowed(key, reason)}"


def _allowed(key: Key, reason: str) -> str:
    """Some fields' rules are in their validator's words, which say more than the type."""
    return (
        reason.removeprefix("is no ")
        if reason.startswith(("is no node name", "is no CDI kind")) or "resource name" in reason
        else allowed_text(key)
    )


def _key_at(parts: Sequence[str]) -> Key | None:
    by_name = {key.name: key for key in all_keys()}
    return next((by_name[name] for n in (2, 1) if (name := ".".join(parts[:n])) in by_name), None)


__all__ = [
    "NODE_NAME_SOURCES",
    "AllocationSettings",
    "HealthSettings",
    "KubeletSettings",
    "LoadedSettings",
    "LogSettings",
    "PlacementSettings",
    "ResourceSettings",
    "RuntimeSettings",
    "Settings",
    "SettingsError",
    "SimulatedSettings",
    "VirtualManagerSettings",
    "WebSettings",
    "load_settings",
]
