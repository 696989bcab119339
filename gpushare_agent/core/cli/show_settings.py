"""Prints settings with the source of each: for people, for programs, as a settings file.

No setting is a secret; one that becomes so must be left out here. A configuration's texts may be anybody's: in the table and
in comments of the file they are lines without control characters.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from gpushare_agent.core.cli.command_line import Form, Invocation
from gpushare_agent.core.cli.render_text import as_json, plain
from gpushare_agent.core.settings.node_configuration import NamedConfiguration
from gpushare_agent.core.settings.reference import all_keys, text_of
from gpushare_agent.core.settings.settings import NODE_NAME_SOURCES, LoadedSettings, SettingsError
from gpushare_agent.core.settings.sources import MigratedKey


def run(call: Invocation) -> int:
    """Raises SettingsError, also for a named configuration that cannot be read, as for a file of --config."""
    path, named = call.options.node_configuration, None
    if path is not None:
        try:
            named = NamedConfiguration(name=path.name, content=path.read_bytes())
        except OSError as error:
            raise SettingsError([f"the configuration {path} cannot be read: {error.strerror}"]) from error
    print(render(call.load(named), call.options.output), end="")
    return 0


def render(loaded: LoadedSettings, output: Form) -> str:
    """The text for `gpushare-agent config`, with its last line end."""
    match output:
        case "table" | "wide":
            return _table(_settings_rows(loaded)) + (("\n" + _table(_migrated_rows(loaded))) if loaded.migrated else "")
        case "json":
            values = _plain_values(loaded)
            document: dict[str, Any] = {
                name: {"value": value, "source": loaded.sources[name]} for name, value in sorted(values.items())
            }
            if loaded.migrated:
                document["foreign"] = [_outcome(loaded, key) for key in loaded.migrated]
            return as_json(document) + "\n"
        case "yaml":
            return _yaml(loaded)


def _plain_values(loaded: LoadedSettings) -> dict[str, Any]:
    """Dotted key -> value as JSON has it."""
    # Once for all: pydantic's own texts for paths and enumerations, which a file takes again.
    tree = loaded.settings.model_dump(mode="json")
    found: dict[str, Any] = {}
    for key in all_keys():
        section, dot, leaf = key.name.rpartition(".")
        found[key.name] = (tree[section] if dot else tree)[leaf]
    return found


def _outcome(loaded: LoadedSettings, key: MigratedKey) -> dict[str, Any]:
    is_lost, text = loaded.outcome(key)
    return {"key": key.name, "value": key.value, "source": key.source, "honoured": not is_lost, "becomes": text}


def _settings_rows(loaded: LoadedSettings) -> list[tuple[str, ...]]:
    values = ((key.name, text_of(attrgetter(key.name)(loaded.settings)) or "-") for key in all_keys())
    return [("SETTING", "VALUE", "FROM"), *((name, value, loaded.sources[name]) for name, value in values)]


def _migrated_rows(loaded: LoadedSettings) -> list[tuple[str, ...]]:
    """The keys of NVIDIA's plugin and of gpu-manager."""
    rows: list[tuple[str, ...]] = [("THEIR KEY", "VALUE", "FROM", "HERE")]
    for key in loaded.migrated:
        is_lost, text = loaded.outcome(key)
        rows.append((key.name, key.value or "-", key.source, f"without effect: {text}" if is_lost else text))
    return rows


def _table(rows: list[tuple[str, ...]]) -> str:
    rows = [tuple(map(plain, row)) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "".join(
        "  ".join([*(f"{text:<{width}}" for text, width in zip(row, widths, strict=False)), row[-1]]) + "\n"
        for row in rows
    )


def _yaml(loaded: LoadedSettings) -> str:
    """A file that --config takes. A JSON value is a YAML value; the sources are comments."""
    values = _plain_values(loaded)
    lines: list[str] = []
    section = ""
    for key in all_keys():
        is_derived = key.name == "node_name" and loaded.sources[key.name] in NODE_NAME_SOURCES
        if key.name == "config" or is_derived:  # a file cannot name itself, and serves more nodes than this one
            continue
        prefix, dot, leaf = key.name.rpartition(".")
        # Keys come in the tree's order, so a section begins once.
        if prefix != section:
            section = prefix
            lines.append(f"{section}:")
        # JSON in one line is YAML too, and quotes what YAML would read as another type.
        value = as_json(values[key.name], indent=None)
        lines.append(f"{'  ' if dot else ''}{leaf}: {value}  # {plain(loaded.sources[key.name])}")
    lines += [plain("# " + "; ".join(row)) for row in _migrated_rows(loaded)] if loaded.migrated else []
    return "\n".join(lines) + "\n"
