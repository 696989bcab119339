"""Reads settings from flags, variables and a YAML file into layers: dotted key -> value and where it was written.

Nothing is validated here beyond names and shape; settings/settings.py gives the layers to the tree. Each mistake becomes one
readable line in `problems`, so that one start shows all of them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpushare_agent.settings.reference import ENVIRONMENT_PREFIX, Key, all_keys

_BOOLEAN_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "1", "0"})
_FILE_LIMIT_BYTES = 1 << 20

_OF_COMMANDS = frozenset({"GPUSHARE_SANDBOX_CGROUPS", "GPUSHARE_VDEVICE"})
"""No settings: read by the sandbox, and by the command vdevice in a container."""
_SERVICE_LINK = re.compile(r".*_SERVICE_HOST|.*_SERVICE_PORT(_.+)?|(.+_)?PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?")
"""Variables that Kubernetes sets in every pod for each Service of the namespace: a Service named gpushare-… makes some
that begin like ours. They must not stop the agent."""

_FORMER_FLAGS = {
    "v": "gpu-manager's log level is --log.level (debug, info, warning, error) here",
    "log-dir": "logs go to standard error; leave it out",
    "logtostderr": "logs go to standard error; leave it out",
    "alsologtostderr": "logs go to standard error; leave it out",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSetting:
    """A value as it was written, and where: "flag --web.port", "variable GPUSHARE_WEB__PORT", "file /etc/x.yaml"."""

    value: object
    source: str


@dataclass(slots=True, kw_only=True)
class Layer:
    """What one place says. Filled while it is read, then left alone."""

    given: dict[str, RawSetting] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def _by_flag() -> dict[str, Key]:
    return {name: key for key in all_keys() for name in key.flag_names}


def _nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f" (did you mean {prefix}{found[0]}?)" if found else ""


def _flag_name(token: str) -> str:
    return token[2:].partition("=")[0].replace("_", "-")


def _value_follows(key: Key, argv: Sequence[str], position: int) -> bool:
    """Whether the token after a flag is its value. A true-or-false flag may stand alone."""
    if "=" in argv[position] or position + 1 >= len(argv):
        return False
    after = argv[position + 1]
    return after.lower() in _BOOLEAN_WORDS if key.is_boolean else not after.startswith("--")


def split_flags(argv: Sequence[str], leave: frozenset[str] = frozenset()) -> tuple[list[str], list[str]]:
    """Parts `argv` into the settings' flags with their values, and everything else.

    `leave` names flags (with their dashes) that belong to someone else although a setting has the same name.
    """
    known = _by_flag()
    mine: list[str] = []
    others: list[str] = []
    position = 0
    while position < len(argv):
        token = argv[position]
        key = known.get(_flag_name(token)) if token.startswith("--") and token.partition("=")[0] not in leave else None
        taken = 1 if key is None else 1 + _value_follows(key, argv, position)
        (others if key is None else mine).extend(argv[position : position + taken])
        position += taken
    return mine, others


def read_flags(argv: Sequence[str]) -> Layer:
    """`--flag=value`, `--flag value`, `--flag` for true. A flag given twice counts the last time, as in gpu-manager."""
    layer = Layer()
    known = _by_flag()
    position = 0
    while position < len(argv):
        token = argv[position]
        key = known.get(_flag_name(token)) if token.startswith("--") else None
        if key is None:
            layer.problems.append(_unknown_token(token, known))
            position += 1 + _has_bare_word_behind(argv, position)
            continue
        name, equals, value = token.partition("=")
        follows = _value_follows(key, argv, position)
        if follows:
            value = argv[position + 1]
        elif not equals and key.is_boolean:
            value = "true"
        elif not equals:
            layer.problems.append(f"flag {name} needs a value: {name}=… (variable {key.variable})")
        if follows or equals or key.is_boolean:
            layer.given[key.name] = RawSetting(value=value, source=f"flag {name}")
        position += 1 + follows
    return layer


def _has_bare_word_behind(argv: Sequence[str], position: int) -> bool:
    """Whether an unknown flag seems to be followed by its value, which is then no mistake of its own."""
    is_flag = argv[position].startswith("--") and "=" not in argv[position]
    return is_flag and position + 1 < len(argv) and not argv[position + 1].startswith("-")


def _unknown_token(token: str, known: Mapping[str, Key]) -> str:
    if not token.startswith("--") or token == "--":  # noqa: S105 - a word of the command line
        return f"{token!r} is not understood; flags begin with two dashes, see --help"
    name = _flag_name(token)
    hint = _FORMER_FLAGS.get(name)
    if hint is not None:
        return f"flag --{name} is unknown; {hint}"
    return f"flag --{name} is unknown{_nearest(name, known, '--')}; --help lists all flags"


def read_variables(environ: Mapping[str, str]) -> Layer:
    """Every `GPUSHARE_…` variable. Kubernetes' service links that begin so are passed over."""
    layer = Layer()
    known = {key.variable: key for key in all_keys()}
    for name in sorted(environ):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        key = known.get(name)
        if key is not None:
            layer.given[key.name] = RawSetting(value=environ[name], source=f"variable {name}")
        elif name not in _OF_COMMANDS and not _is_service_link(name, environ[name]):
            layer.problems.append(
                f"variable {name} is unknown{_nearest(name, known)}; docs/settings.md lists all variables"
            )
    return layer


def _is_service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK.fullmatch(name)) or (name.endswith("_PORT") and "://" in value)


def read_file(path: Path, named_by: str) -> Layer:
    """A YAML file; `named_by` says who asked for it, for the messages."""
    layer = Layer()
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_LIMIT_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        layer.problems.append(f"{named_by}: cannot read the settings file {path}: {reason}; give an existing YAML file")
        return layer
    if len(content) > _FILE_LIMIT_BYTES:
        layer.problems.append(f"{named_by}: the settings file {path} is larger than 1 MiB; this is no settings file")
        return layer

    from gpushare_agent.settings.yaml import UnreadableYaml, parse_yaml  # only who has a file pays for the parser

    try:
        tree = parse_yaml(content)
    except UnreadableYaml as error:
        layer.problems.append(f"{named_by}: cannot read the settings file {path}: {error}")
        return layer
    _flatten(tree, "", path, layer)
    return layer


def _flatten(tree: Mapping[object, object], prefix: str, path: Path, layer: Layer) -> None:
    known = {key.name for key in all_keys()} - {"config"}
    sections = {name.partition(".")[0] for name in known if "." in name}
    for raw_name, value in tree.items():
        name = prefix + str(raw_name).replace("-", "_")
        if name in known:
            if value is not None:  # `key:` with nothing behind it means the default
                layer.given[name] = RawSetting(value=value, source=f"file {path}")
        elif name in sections and isinstance(value, Mapping):
            _flatten(value, name + ".", path, layer)
        elif name in sections and value is None:
            continue
        elif name in sections:
            layer.problems.append(f"file {path}: {name} is {str(value)[:40]!r}, but must be a mapping of settings")
        elif name == "config":
            layer.problems.append(
                f"file {path}: config cannot be set in a file; use --config or {ENVIRONMENT_PREFIX}CONFIG"
            )
        else:
            layer.problems.append(
                f"file {path}: key {name} is unknown{_nearest(name, known | sections)}; see docs/settings.md"
            )
