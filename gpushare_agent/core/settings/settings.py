"""Loads the settings: one frozen tree from the command line, the environment, a YAML file and the defaults.

`load_settings` hands the sources of settings/sources.py to `Settings`, which pydantic-settings merges, and returns the tree
and where each value came from, or every mistake as one line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from msgspec import Struct
from pydantic import ValidationError

from gpushare_agent.core.model.errors import AgentError
from gpushare_agent.core.settings.node_configuration import NamedConfiguration
from gpushare_agent.core.settings.nvidia_plugin import parse_nvidia, read_nvidia
from gpushare_agent.core.settings.reference import TEXT, TEXTS, Key, all_keys, text_of
from gpushare_agent.core.settings.sources import (
    Layer,
    MigratedKey,
    RawSetting,
    read_bounded,
    read_file,
    read_flags,
    read_gpu_manager,
    read_gpushare,
    read_named,
    read_variables,
)
from gpushare_agent.core.settings.tree import SOURCES, Settings
from gpushare_agent.core.settings.values import PLACE

NODE_NAME_SOURCES = ("variable NODE_NAME", "host name")
"""Where the node's name comes from when no setting has it."""

_OF_VALIDATOR = "Value error, "
"""pydantic writes it before the words of a ValueError."""
_SHOWN_CHARACTERS = 80
_SIZE = re.compile(r"([0-9]{1,7}) ?([MGT])i?B?", re.IGNORECASE)


class SettingsError(AgentError):
    """The settings cannot be used. `problems` has one line for each mistake; exit code 2."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class LoadedSettings(Struct, frozen=True, kw_only=True):
    """The tree, and for every dotted key where its value came from ("flag --driver", "default", …). `migrated` are the keys
    of NVIDIA's plugin and of gpu-manager that were found, with what became of them."""

    settings: Settings
    sources: Mapping[str, str]
    migrated: Sequence[MigratedKey] = ()

    def outcome(self, key: MigratedKey) -> tuple[bool, str]:
        """Whether something that the key asks for is not so, and what it sets or why it sets nothing."""
        if not key.settings:
            return key.is_lost, key.reason
        # A value of theirs may have lost against one of ours: what is in effect is compared, not what was read.
        actual = {name: text_of(attrgetter(name)(self.settings)) for name in key.settings}
        others = [name for name, value in key.settings.items() if actual[name] != value]
        texts = [
            f"{name}={actual[name]} of {self.sources[name]} is in effect" if name in others else f"{name}={value}"
            for name, value in key.settings.items()
        ]
        return bool(others), ", ".join(texts)


def load_settings(
    argv: Sequence[str], environ: Mapping[str, str], named: NamedConfiguration | None = None
) -> LoadedSettings:
    """Reads all places; `argv` holds only settings flags, without the program and the command. `named` comes before the
    settings file.

    Raises:
        SettingsError: with every mistake found.
    """
    # The first layer that has a value wins.
    layers = [read_flags(argv), read_variables(environ), read_gpu_manager(environ)]
    path = _path("config", layers)
    own = read_named(named) if named is not None else None
    if named is not None:
        # A named configuration of NVIDIA's replaces the file that nvidia.config names, and comes before our own file: it is
        # meant for this node alone.
        layers.append(own or _nvidia_layer(layers, environ, parse_nvidia(named.content, named.source)))
    if path:
        layers.append(read_file(path))
    # Else it has been read above.
    if named is None or own is not None:
        layers.append(_nvidia_layer(layers, environ))
    layers.append(host := Layer())
    # Manifests set NODE_NAME from the downward API. The tree replaces an empty name by the host's.
    node_name = environ.get("NODE_NAME", "")
    host.values["node_name"] = RawSetting(node_name, NODE_NAME_SOURCES[not node_name])
    pipe = layers[0].values.get("mps.pipe_directory")
    # GPUShare's plugin has MPS by that flag alone; an isolation that any place names wins.
    if pipe is not None and pipe.source == "flag --mps-pipe":
        host.values["isolation"] = RawSetting("mps", pipe.source)
    layers.append(read_gpushare(environ))
    layers.append(_below_roots(layers))
    # Reversed, so that the layer that wins is written last.
    raw = {name: value for layer in reversed(layers) for name, value in layer.values.items()}
    problems = [problem for layer in layers for problem in layer.problems]
    arguments: dict[str, Any] = {SOURCES: layers}
    try:
        settings = Settings(**arguments)
    except ValidationError as error:
        problems += [_problem(found["loc"], found["msg"], raw) for found in error.errors(include_url=False)]
    if problems:
        # A value may break two rules with one text, and a text of YAML's may have several lines.
        raise SettingsError(list(dict.fromkeys(" ".join(problem.split()) for problem in problems)))
    sources = {key.name: raw[key.name].source if key.name in raw else "default" for key in all_keys()}
    migrated = tuple(key for layer in layers for key in layer.migrated)
    return LoadedSettings(settings=settings, sources=sources, migrated=migrated)


def _path(key: str, layers: Sequence[Layer]) -> RawSetting | None:
    """The file that the first of the layers names, if it names one."""
    path = next((layer.values[key] for layer in layers if key in layer.values), None)
    return path if path and path.value else None


def _below_roots(layers: Sequence[Layer]) -> Layer:
    """The node's places that no layer names, where one names a root of them."""
    layer, given = Layer(), {name: raw for one in reversed(layers) for name, raw in one.values.items()}
    # The kubelet's first, because it is below the other.
    roots = [key for name in ("kubelet.root_dir", "root") for key in all_keys() if key.name == name]
    moved = [(key, raw) for key in roots if (raw := given.get(key.name)) and raw.value]
    for key in all_keys() if moved else ():
        if PLACE in key.field.metadata:
            paths = key.default if isinstance(key.default, tuple) else (key.default,)
            for root, raw in moved:
                base = root.default
                # A kubelet keeps its device plugins below /var/lib/kubelet whatever its --root-dir is.
                if (root.name, key.name) == ("kubelet.root_dir", "kubelet.device_plugin_path"):
                    continue
                if all(path.is_relative_to(base) for path in paths):
                    texts = [str(Path(str(raw.value), path.relative_to(base))) for path in paths]
                    layer.put(key.name, ",".join(texts), raw.source)
                    break
    return layer


def _nvidia_layer(layers: Sequence[Layer], environ: Mapping[str, str], named: Layer | None = None) -> Layer:
    """The configuration of NVIDIA's plugin. It is the last layer, because our own settings win. `named` is a single node's
    configuration and replaces the plugin's file."""
    flags = {name: raw for layer in reversed(layers) for name, raw in layer.nvidia.items()}
    if named is not None:
        return read_nvidia(flags, environ, named)
    # Their own flag and variable for the file are read without the file, to learn its path.
    path = _path("nvidia.config", [*layers, read_nvidia(flags, environ, None)])
    return read_nvidia(flags, environ, read_bounded(path, parse_nvidia) if path else None)


def _problem(location: tuple[int | str, ...], message: str, raw: Mapping[str, RawSetting]) -> str:
    """One line that names the place, the value, the setting, and what is allowed."""
    parts = [part for part in location if isinstance(part, str)]
    # pydantic's place goes on into the items of a list; a setting has at most a section and a name.
    key = next((key for n in (2, 1) for key in all_keys() if key.name == ".".join(parts[:n])), None)
    reason = message.removeprefix(_OF_VALIDATOR)
    # A rule between settings names no key: the values that break it may come from several places.
    if key is None:
        name = ".".join(parts) or "settings"
        places = sorted({found.source for key_name, found in raw.items() if key_name.startswith(name + ".")})
        return f"{name}: {reason} (set by {', '.join(places) or 'default'})"
    found = raw.get(key.name, RawSetting(key.default, "default"))
    value = repr(found.value)
    if len(value) > _SHOWN_CHARACTERS:
        value = value[:_SHOWN_CHARACTERS] + "…"
    return (
        f"{found.source}: {value} is not allowed for --{key.flag} (variable {key.variable});"
        f" allowed: {_allowed(key, message)}{_in_mib(key, str(found.value))}"
    )


def _in_mib(key: Key, text: str) -> str:
    """The number for a size that was written with its unit."""
    size = _SIZE.fullmatch(text) if key.name.endswith("_mib") else None
    return f"; {text} is {int(size[1]) << 10 * 'MGT'.index(size[2].upper())}" if size is not None else ""


def _allowed(key: Key, message: str) -> str:
    """The words of a validator of a text or a list of them, which say more than the type; else the type's."""
    reason = message.removeprefix(_OF_VALIDATOR)
    is_ours = reason != message and key.kind.allowed in (TEXT, TEXTS)
    return reason.removeprefix("is no ") if is_ours else key.kind.allowed


__all__ = ["NODE_NAME_SOURCES", "LoadedSettings", "Settings", "SettingsError", "load_settings"]
