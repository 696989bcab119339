"""The sources for pydantic-settings, as layers: dotted key -> value and where it was written, in flags, variables, a file.

Only names and shape are checked here; `Settings` merges and validates the layers. Each mistake is one line in `problems`, so
that one start shows all of them. Sources of pydantic-settings' own that are not used, and why:

- `CliSettingsSource` builds an argparse parser of every setting: 35 ms at each start, against 1 ms for all of
  `load_settings`. It ends at the first unknown flag, and does not keep how a flag was spelled ("flag --query-port").
- `YamlConfigSettingsSource` ignores a missing file, and takes aliases (a few lines unfold into gigabytes) and keys given
  twice. `EnvSettingsSource` takes names in any case, and says nothing of unknown ones.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace
from pydantic_settings import BaseSettings, InitSettingsSource

from gpushare_agent.core.kit.near_names import did_you_mean
from gpushare_agent.core.settings.former_flags import ADMISSION_FIELDS, FORMER_FLAGS, FormerFlag, log_level
from gpushare_agent.core.settings.node_configuration import NamedConfiguration
from gpushare_agent.core.settings.nvidia_options import options_by_flag
from gpushare_agent.core.settings.reference import Key, all_keys
from gpushare_agent.core.settings.tree import ENVIRONMENT_PREFIX

_BOOLEAN_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "1", "0"})
_FILE_LIMIT_BYTES = 1 << 20
MAX_PROBLEMS = 50
"""The mistakes of one file that are shown, in messages and in the log: each of a hundred thousand lines may have one."""

_NOT_PER_NODE = frozenset({"node_name", "kubeconfig", "context"})
GPUSHARE_PROGRAM = "GPUSHARE_PROGRAM"
"""The variable by which this program knows that it was started by the name of GPUShare's (__main__.py)."""
_OF_COMMANDS = frozenset({"GPUSHARE_SANDBOX_CGROUPS", "GPUSHARE_VDEVICE", GPUSHARE_PROGRAM})
"""No settings: read by the sandbox, by the command vdevice in a container, and by `read_gpushare`."""
_SERVICE_LINK = re.compile(r".*_SERVICE_HOST|.*_SERVICE_PORT(_.+)?|(.+_)?PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?")
"""Variables that Kubernetes sets in every pod for each Service of the namespace: a Service named gpushare-… makes some
that begin like ours. They must not stop the agent."""


class RawSetting(Struct, frozen=True):
    """A value as it was written, and where: "flag --web.port", "variable GPUSHARE_WEB__PORT", "file /etc/x.yaml"."""

    value: object
    source: str


class MigratedKey(Struct, frozen=True):
    """A key, variable or flag of a program that this one follows, and what became of it.

    `settings` are ours that it gives a value, as text. Without any, `reason` says why it changes nothing; `is_lost` where it
    asked for something that is not so here.
    """

    name: str
    value: str
    source: str
    settings: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    is_lost: bool = False


class Layer(InitSettingsSource):
    """The settings of one place, and the mistakes there. `nvidia` are values of NVIDIA's plugin by option's name, not yet
    mapped; `migrated` what became of another program's keys."""

    def __init__(self, *problems: str, migrated: Iterable[MigratedKey] = ()) -> None:
        super().__init__(BaseSettings, {})  # without fields, which it would all walk for nothing
        self.values: dict[str, RawSetting] = {}
        self.problems, self.migrated = list(problems), list(migrated)
        self.nvidia: dict[str, RawSetting] = {}

    def put(self, name: str, value: object, source: str) -> None:
        """An empty node name is none: the next place has it."""
        if name != "node_name" or value != "":
            self.values[name] = RawSetting(value, source)

    def __call__(self) -> dict[str, Any]:
        """The values as a tree. Pairs are one value: as a plain dict they would be merged over the places."""
        tree: dict[str, Any] = {}
        for name, raw in self.values.items():
            section, dot, leaf = name.rpartition(".")
            value = MappingProxyType(raw.value) if isinstance(raw.value, dict) else raw.value
            (tree.setdefault(section, {}) if dot else tree)[leaf] = value
        return tree


@cache
def _by_flag() -> dict[str, Key]:
    return {name: key for key in all_keys() for name in key.flag_names}


class _Token(Struct, frozen=True):
    """A flag with its value, or one other word: the words as typed, the flag's name without dashes, what has that name here,
    the value if any."""

    words: Sequence[str]
    name: str
    meaning: Key | FormerFlag | None
    value: str | None


def _tokens(argv: Sequence[str], leave: frozenset[str]) -> Iterator[_Token]:
    position = 0
    while position < len(argv):
        flag, equals, value = argv[position].partition("=")
        name, meaning = _meaning(flag) if flag not in leave else (flag, None)
        after = argv[position + 1 : position + 2]
        # `--flag value` takes the next word, unless a setting that is true or false cannot mean it.
        is_flag = flag.startswith("--") or meaning is not None
        has_value_after = not equals and is_flag and bool(after) and _may_be_value(meaning, after[0])
        words = argv[position : position + 1 + has_value_after]
        yield _Token(words, name, meaning, words[-1] if has_value_after else value if equals else None)
        position += len(words)


def _meaning(flag: str) -> tuple[str, Key | FormerFlag | None]:
    """The name without dashes, and the setting or the former program's flag that has it."""
    if not flag.startswith("-"):
        return flag, None
    name = flag.lstrip("-").replace("_", "-")
    if flag.startswith("--") and (key := _by_flag().get(name)):
        return name, key
    # Go's own package for flags, which klog uses, takes one dash as well as two.
    return name, FORMER_FLAGS.get(name)


def _may_be_value(meaning: Key | FormerFlag | None, word: str) -> bool:
    """A true-or-false flag may stand alone. A bare word behind an unknown flag is taken for its value, not for a mistake of
    its own."""
    if meaning is None:
        return not word.startswith("-")
    # A single dash may begin a value, such as a negative number, which the setting refuses by its name.
    return word.lower() in _BOOLEAN_WORDS if meaning.is_boolean else not word.startswith("--")


def split_flags(argv: Sequence[str], leave: frozenset[str] = frozenset()) -> tuple[list[str], list[str]]:
    """Parts `argv` into the flags with their values that `read_flags` knows, and everything else.

    `leave` names flags (with their dashes) that belong to someone else although a setting has the same name.
    """
    settings: list[str] = []
    others: list[str] = []
    for token in _tokens(argv, leave):
        (others if token.meaning is None else settings).extend(token.words)
    return settings, others


def read_flags(argv: Sequence[str]) -> Layer:
    """`--flag=value`, `--flag value`, `--flag` for true. The last of two equal flags counts, as in gpu-manager.

    Flags of NVIDIA's plugin go into `nvidia`, unless a setting has the same name; those of other programs become settings
    below ours, and `migrated` has what became of them.
    """
    layer = Layer()
    former: dict[str, RawSetting] = {}
    for token in _tokens(argv, frozenset()):
        flag = token.words[0].partition("=")[0]
        value, key = token.value, token.meaning
        # Settings of ours come first: --fail-on-init-error and --device-list-strategy are flags of both programs.
        option = options_by_flag().get(flag[2:]) if key is None and flag.startswith("--") else None
        if option is not None:
            # Read later, when the file of NVIDIA's plugin is known: a flag beats it.
            layer.nvidia[option.name] = RawSetting("true" if value is None else value, f"flag {flag}")
        elif key is None:
            layer.problems.append(_unknown_token(token.words[0], {**_by_flag(), **FORMER_FLAGS}))
        elif isinstance(key, FormerFlag):
            _read_former(flag, key, value, layer, former)
        elif value is None and not key.is_boolean:
            layer.problems.append(f"flag {flag} needs a value: {flag}=… (variable {key.variable})")
        else:
            layer.put(key.name, "true" if value is None else value, f"flag {flag}")
    # A flag of ours beats another program's, wherever it stands.
    layer.values = former | layer.values
    return layer


def _read_former(flag: str, former: FormerFlag, value: str | None, layer: Layer, values: dict[str, RawSetting]) -> None:
    source = f"flag {flag}"
    if former.hint:
        layer.problems.append(f"{source} is unknown; {former.hint}")
        return
    if value is None and not former.is_boolean:
        layer.problems.append(f"{source} needs a value: {flag}=…")
        return
    value = "true" if value is None else value
    settings: Mapping[str, str] = {}
    if former.read is not None:
        try:
            settings = former.read(value)
        except ValueError as error:
            layer.problems.append(f"{source}: {value[:80]!r} is not allowed; allowed: {error}")
            return
    values |= {name: RawSetting(text, source) for name, text in settings.items()}
    shown = "…" if former.is_secret else value[:200]
    is_lost = bool(former.reason) and value.lower() not in former.as_here
    layer.migrated.append(MigratedKey(flag, shown, source, settings, former.reason, is_lost))


def _unknown_token(token: str, known: Iterable[str]) -> str:
    if not token.startswith("--") or token == "--":  # noqa: S105 - a word of the command line
        return f"{token!r} is not understood here; see --help"
    name = token[2:].partition("=")[0].replace("_", "-")
    return f"flag --{name} is unknown{did_you_mean(name, known, '--')}; --help lists all flags"


def read_variables(environ: Mapping[str, str]) -> Layer:
    """Every `GPUSHARE_…` variable. Kubernetes' service links that begin so are ignored."""
    layer = Layer()
    known = {key.variable: key for key in all_keys()}
    for name in sorted(environ):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        # A Service named gpushare makes GPUSHARE_PORT=tcp://10.0.0.1:80. What ends in _PORT and is no URL is more
        # likely a setting that was mistyped.
        is_service_link = _SERVICE_LINK.fullmatch(name) or (name.endswith("_PORT") and "://" in environ[name])
        if key := known.get(name):
            layer.put(key.name, environ[name], f"variable {name}")
        elif name not in _OF_COMMANDS and not is_service_link:
            near = did_you_mean(name, known)
            layer.problems.append(f"variable {name} is unknown{near}; docs/reference/settings.md lists all variables")
    return layer


def read_bounded(path: RawSetting, parse: Callable[[bytes, str], Layer]) -> Layer:
    """The file that a setting names: `parse` makes the layer from its content and its place. A file that cannot be read is a
    mistake of the setting's place."""
    named = f"{path.source}: cannot read the settings file {path.value}"
    try:
        with Path(str(path.value)).open("rb") as file:
            # One byte more tells a longer file without reading all of it: the path may name a device.
            content = file.read(_FILE_LIMIT_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return Layer(f"{named}: {reason}; give an existing YAML file")
    if len(content) > _FILE_LIMIT_BYTES:
        named = f"{path.source}: the settings file {path.value}"
        return Layer(f"{named} is larger than 1 MiB; this is no settings file")
    return parse(content, f"file {path.value}")


def read_file(path: RawSetting) -> Layer:
    """A YAML file of ours, or gpu-admission's configuration, which its command line names by the same flag."""

    def parse(content: bytes, place: str) -> Layer:
        layer = Layer()
        tree = parse_into(layer, content, f"{path.source}: cannot read the settings {place}")
        if not tree.keys().isdisjoint(ADMISSION_FIELDS):
            # The extender reads it, and the same path also where extender.config names it.
            layer.put("extender.config", path.value, path.source)
            name = str(path.value)
            layer.migrated.append(MigratedKey("--config", name, path.source, {"extender.config": name}))
        else:
            _flatten(tree, "", place, layer)
        return layer

    return read_bounded(path, parse)


def read_named(named: NamedConfiguration) -> Layer | None:
    """A node's configuration, None where it is one of NVIDIA's plugin, which has a version. It may not set what is read
    before it, nor what names the node."""
    layer = Layer()
    tree = parse_into(layer, named.content, f"{named.source}: cannot be read")
    # NVIDIA's config-manager hands its plugin files of the same directory; no setting of ours has that name.
    if "version" in tree:
        return None
    _flatten(tree, "", named.source, layer)
    for name in sorted(layer.values):
        if name in _NOT_PER_NODE or name.startswith("node_configuration."):
            del layer.values[name]
            layer.problems.append(f"{named.source}: {name} cannot be set for a single node; set it for all of them")
    return layer


def parse_into(layer: Layer, content: bytes, problem: str) -> Mapping[object, object]:
    """The mapping in a file's content; where it is none, an empty one, and the layer has a mistake that begins with
    `problem`."""
    from gpushare_agent.core.settings.yaml import UnreadableYaml, parse_yaml  # imported only where there is a file

    try:
        return parse_yaml(content)
    except UnreadableYaml as error:
        layer.problems.append(f"{problem}: {error}")
        return {}


def _flatten(tree: Mapping[object, object], prefix: str, source: str, layer: Layer) -> None:
    # The file is named from outside: one that named another would need an order among files.
    known = {key.name for key in all_keys()} - {"config"}
    sections = {name.partition(".")[0] for name in known if "." in name}
    for raw_name, value in tree.items():
        if len(layer.problems) >= MAX_PROBLEMS:
            layer.problems[MAX_PROBLEMS:] = [f"{source}: there may be more mistakes; correct these first"]
            return
        # Keys are accepted as flags write them, too.
        name = prefix + str(raw_name).replace("-", "_")
        if value is None and name in known | sections:
            continue  # `key:` with nothing behind it means the default
        if name in known:
            layer.put(name, value, source)
        elif name in sections and isinstance(value, Mapping):
            _flatten(value, name + ".", source, layer)
        elif name in sections:
            layer.problems.append(f"{source}: {name} is {str(value)[:40]!r}, but must be a mapping of settings")
        elif name == "config":
            instead = f"use --config or {ENVIRONMENT_PREFIX}CONFIG"
            layer.problems.append(f"{source}: config cannot be set in a file; {instead}")
        else:
            near = did_you_mean(name, known | sections)
            layer.problems.append(f"{source}: key {name} is unknown{near}; see docs/reference/settings.md")


# --- DaemonSets of other programs with this image: gpu-manager 1.1.5 and its start.sh (EXTRA_FLAGS end its command line,
# LOG_LEVEL is klog's), GPUShare 45fb8b8 ---

_LIBCUDA = "the driver directory is described by the file of volume_config"
GPU_MANAGER_DAEMONSET = "gpu-manager's DaemonSet"
"""The source of the settings that follow from gpu-manager's start script and mounts, where its manifest runs this image."""
GPUSHARE_DAEMONSET = "GPUShare's DaemonSet"
"""The same for GPUShare's manifest, which starts this program by the name of its own."""
DAEMONSETS = frozenset({GPU_MANAGER_DAEMONSET, GPUSHARE_DAEMONSET})
_HOST = Path("/proc/1/root")
"""The host's file system in a privileged container of the host's PID namespace, which gpu-manager's is."""
_CHECKPOINT = "etc/gpu-manager/checkpoint"
_STATE = "var/lib/gpushare-agent"
_MOUNT_POINT = 4
"""Its field in a line of /proc/self/mountinfo (proc(5))."""


def read_gpu_manager(environ: Mapping[str, str], root: Path = Path("/"), host: Path = _HOST) -> Layer:
    """The variables LOG_LEVEL, EXTRA_FLAGS and LIBCUDA of gpu-manager's image, a layer below our own variables.

    EXTRA_FLAGS, which its manifest always has, stands for its start script too; `root` is this container's file system.
    """
    layer = Layer()
    if (words := environ.get("EXTRA_FLAGS")) is not None:
        # Before LOG_LEVEL: they end gpu-manager's command line, so their level beats it.
        _read_extra_flags(words, layer)
        for name, text in _start_script(root, host).items():
            layer.values.setdefault(name, RawSetting(text, GPU_MANAGER_DAEMONSET))
    if level := environ.get("LOG_LEVEL"):
        source = "variable LOG_LEVEL"
        try:
            settings = log_level(level)
        except ValueError as error:
            layer.problems.append(f"{source}: {level[:80]!r} is no log level; write {error}")
        else:
            layer.values = {name: RawSetting(text, source) for name, text in settings.items()} | layer.values
            layer.migrated.append(MigratedKey("LOG_LEVEL", level, source, settings))
    if value := environ.get("LIBCUDA"):
        source = "variable LIBCUDA"
        layer.migrated.append(MigratedKey("LIBCUDA", value[:200], source, reason=_LIBCUDA, is_lost=True))
    return layer


def _start_script(root: Path, host: Path) -> Mapping[str, str]:
    """The settings that gpu-manager's start script passes, and the paths that its mounts have elsewhere than ours.

    | missing mount | what serves instead |
    |---|---|
    | the kubelet's pod-resources | the host's own, by `host`; where that is closed, none: the API server alone |
    | /var/lib/gpushare-agent | gpu-manager's checkpoint directory, which v1.1.0 has not: none |
    | /host/usr, for the driver's files | the host's own |
    """
    found = {"web.addr": "", **_pod_resources(root, host)}
    extra = root / "etc/gpu-manager/extra-config.json"
    if _is_there(extra):
        found["extra_config"] = str(extra)
    if not _is_there(root / _STATE):
        place = root / _CHECKPOINT
        found["state_directory"] = str(place / "gpushare-agent") if _is_there(place) else ""
    if _is_there(root / "usr/local/host") and _is_there(host / "usr"):
        # Its pods have no RuntimeClass: containers get the driver's files by the driver directory.
        found["driver_volume.root"], found["driver_volume.mount"] = str(host), "true"
        if _is_there(root / "usr/lib64/libcuda-control.so"):
            found["isolation"] = "vcuda"
    return found


def read_gpushare(environ: Mapping[str, str], root: Path = Path("/"), host: Path = _HOST) -> Layer:
    """The settings that follow from GPUShare's DaemonSet, the layer below all others. It mounts the kubelet's plugin
    directory alone.

    | missing mount or right | what serves instead |
    |---|---|
    | the kubelet's pod-resources | as in gpu-manager's |
    | /etc/gpu-manager | isolation none: GPUShare limits nothing either |
    | /var/lib/gpushare-agent | cordons and sizes last as long as the process |
    | patch nodes, delete pods | no labels and annotations of the node, no cleanup |
    """
    layer = Layer()
    if GPUSHARE_PROGRAM not in environ:
        return layer
    found = {
        "gpushare.enabled": "true",
        "facts.is_written": "false",
        "allocation.cleanup_rejected_pods": "false",
        **_pod_resources(root, host),
    }
    if not _is_there(root / _STATE):
        found["state_directory"] = ""
    if not _is_mounted(root, "/etc/gpu-manager"):
        found["isolation"] = "none"
    for name, text in found.items():
        layer.put(name, text, GPUSHARE_DAEMONSET)
    return layer


def _pod_resources(root: Path, host: Path) -> Mapping[str, str]:
    path = "var/lib/kubelet/pod-resources"
    if _is_there(root / path):
        return {}
    reached = host / path
    return {"kubelet.pod_resources_socket": str(reached / "kubelet.sock") if _is_there(reached) else ""}


def _is_mounted(root: Path, place: str) -> bool:
    """Whether a volume is mounted there; the image itself has that directory."""
    try:
        lines = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return any(line.split(" ", _MOUNT_POINT + 1)[_MOUNT_POINT] == place for line in lines)


def _is_there(path: Path) -> bool:
    """False also where it may not be looked for: /proc/1/root is closed to a container without privileges."""
    return os.path.exists(path)  # noqa: PTH110 - Path.exists raises there


def _read_extra_flags(text: str, layer: Layer) -> None:
    """A command line of ours: gpu-manager's flags are aliases of settings, or in settings/former_flags.py."""
    try:
        argv = shlex.split(text)
    except ValueError as error:
        layer.problems.append(f"variable EXTRA_FLAGS: {text[:80]!r} cannot be parted into words: {error}")
        return
    read = read_flags(argv)
    layer.problems += [f"variable EXTRA_FLAGS: {problem}" for problem in read.problems]
    layer.nvidia |= read.nvidia
    place = "variable EXTRA_FLAGS, "
    layer.migrated += [replace(key, name=f"EXTRA_FLAGS {key.name}", source=place + key.source) for key in read.migrated]
    reported = {name for key in read.migrated for name in key.settings}
    for name, raw in read.values.items():
        layer.put(name, raw.value, place + raw.source)
        shown, flag = str(raw.value)[:200], raw.source.removeprefix("flag ")
        if name not in reported:
            layer.migrated.append(MigratedKey(f"EXTRA_FLAGS {flag}", shown, place + raw.source, {name: shown}))
