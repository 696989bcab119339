"""The keys, variables and flags of NVIDIA's device plugin, and what becomes of each here: one table.

`gpushare-agent config` prints what became of each.

Source: k8s-device-plugin v0.20.0, api/config/v1 (keys, types, allowed values), cmd/nvidia-device-plugin/main.go and
cmd/gpu-feature-discovery/main.go (flags, variables), internal/rm/health.go (DP_…). settings/nvidia_plugin.py reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from msgspec import Struct

from gpushare_agent.core.settings.values import MAX_NVIDIA_RESOURCE_NAME_CHARS

_PREFIX = "nvidia.com/"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)
_XID = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)
_TRUE = frozenset({"1", "t", "T", "true", "TRUE", "True", "yes", "Yes", "YES", "on", "On", "ON"})
_FALSE = frozenset({"0", "f", "F", "false", "FALSE", "False", "no", "No", "NO", "off", "Off", "OFF"})
STRATEGIES = ("envvar", "volume-mounts", "cdi-annotations", "cdi-cri")


class Option(Struct, frozen=True):
    """A key, variable or flag of NVIDIA's device plugin. `name` is the file's dotted key, or the first flag's or variable's
    name where the file has none; `read` takes what a file, a variable or a flag has and raises ValueError with what is
    allowed.

    `settings` are ours that it sets. Without any, `reason` says why it changes nothing here, and nothing is lost where the
    value is one of `as_here`. `own_variables` where they are not the flags in capitals; with `of_discovery` GPU Feature
    Discovery has those too, with GFD_ before.
    """

    name: str
    read: Callable[[object], Any]
    flags: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    reason: str = ""
    as_here: tuple[object, ...] = ()
    own_variables: tuple[str, ...] | None = None
    of_discovery: bool = False

    @property
    def variables(self) -> tuple[str, ...]:
        if self.own_variables is not None:
            return self.own_variables
        names = tuple(flag.replace("-", "_").upper() for flag in self.flags)
        of_discovery = tuple(f"GFD_{name}" for name in names)
        if self.name.startswith("flags.gfd."):
            return of_discovery
        return (*names, *of_discovery) if self.of_discovery else names

    @property
    def is_in_file(self) -> bool:
        return self.name.partition(".")[0] in ("version", "flags", "resources", "sharing", "imex")


def boolean(value: object) -> bool:
    """Reads a text as Go's strconv.ParseBool does, and the words of YAML 1.1, which the plugin's file is."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value in _TRUE | _FALSE:
        return value in _TRUE
    raise ValueError("true or false")


def text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("a text")
    return value


def any_value(value: object) -> object:
    return value


def words(*allowed: str) -> Callable[[object], str]:
    def read(value: object) -> str:
        if value not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return str(value)

    return read


def strategies(value: object) -> tuple[str, ...]:
    """One text, a comma list, or a list."""
    parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(parts, list) or not parts or any(part not in STRATEGIES for part in parts):
        raise ValueError(f"one or a list of {', '.join(STRATEGIES)}")
    return tuple(dict.fromkeys(parts))


def resource_name(value: object) -> str:
    """The name with the prefix, which may be left out."""
    # Their plugin puts its prefix before a name without one; another domain is no name there.
    name = value if isinstance(value, str) and value.startswith(_PREFIX) else f"{_PREFIX}{value}"
    if (
        not isinstance(value, str)
        or len(name) > MAX_NVIDIA_RESOURCE_NAME_CHARS
        or not _NAME.fullmatch(name.removeprefix(_PREFIX))
    ):
        raise ValueError(
            f"a resource name such as nvidia.com/gpu, of at most {MAX_NVIDIA_RESOURCE_NAME_CHARS} characters"
        )
    return name


def named_patterns(value: object) -> tuple[str, ...]:
    """A list of mappings with `pattern` and `name`, as PATTERN=RESOURCE."""
    if not isinstance(value, list) or any(
        not isinstance(item, dict) or not {"pattern", "name"} <= item.keys() for item in value
    ):
        raise ValueError("a list of {pattern: …, name: …}")
    return tuple(f"{item['pattern']}={resource_name(item['name'])}" for item in value)


def channels(value: object) -> tuple[int, ...]:
    parts = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if isinstance(parts, list) and [str(part) for part in parts] in ([], ["0"]):
        return tuple(int(part) for part in parts)
    raise ValueError("[] or [0]")


def discovery(value: object) -> str:
    # The other values are for Tegra, whose GPUs NVML does not list.
    if value not in ("auto", "nvml"):
        raise ValueError("auto or nvml: GPUs of Tegra systems are not served, leave NVIDIA's plugin on their nodes")
    return str(value)


def not_required(value: object) -> bool:
    # A pod that needs a channel would start without it and fail in the middle of its work.
    if boolean(value):
        raise ValueError("false: no IMEX channel is given to containers here; keep NVIDIA's plugin where one is needed")
    return False


def kubelet_socket(value: object) -> str:
    if not isinstance(value, str) or not value.startswith("/") or not value.endswith("/kubelet.sock"):
        raise ValueError("the path of a socket named kubelet.sock")
    return value


def xids(value: object) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in str(value).lower().split(",") if part.strip())
    if any(part not in ("all", "xids") and not _XID.fullmatch(part) for part in parts):
        raise ValueError("all, xids, or a comma list of Xids")
    return parts


def _sharing(kind: str) -> Iterable[Option]:
    prefix, sets = f"sharing.{kind}.", ("nvidia.replicas", "nvidia.sharing")
    ignored = "NVIDIA's plugin ignores it too; {}"
    yield Option(f"{prefix}renameByDefault", boolean, settings=("nvidia.rename_replicas",))
    yield Option(f"{prefix}failRequestsGreaterThanOne", boolean, settings=("nvidia.refuse_several_replicas",))
    yield Option(f"{prefix}resources.name", any_value, settings=sets)
    yield Option(f"{prefix}resources.replicas", any_value, settings=sets)
    yield Option(f"{prefix}resources.rename", any_value, reason=ignored.format("renameByDefault adds .shared"))
    instead = "nvidia.replicas takes indexes, such as 0=4,1=2"
    yield Option(f"{prefix}resources.devices", any_value, reason=ignored.format(instead), as_here=("all",))


_BY_POD = "pods that need it set the variable {} themselves"
_NO_HOOKS = "the agent's CDI specs name no hooks"
_OF_GFD = "the agent writes the labels itself (nvidia.labels)"
_NAMES = "NVIDIA's plugin ignores it too; set {}"
_DRIVER_ROOT = "the RuntimeClass brings the driver, or manifests/components/driver-container"

OPTIONS: tuple[Option, ...] = (
    Option("version", words("v1"), reason="the only version there is", as_here=("v1",)),
    Option("flags.migStrategy", words("none", "single", "mixed"), ("mig-strategy",), ("nvidia.mig_strategy",),
           of_discovery=True),
    Option("flags.failOnInitError", boolean, ("fail-on-init-error",), ("fail_on_init_error",), of_discovery=True),
    Option("flags.mpsRoot", text, ("mps-root",), as_here=("", "/run/nvidia/mps"),
           reason="the MPS daemon is manifests/mps-daemon, with its pipes in mps.pipe_directory"),
    Option("flags.nvidiaDriverRoot", text, ("driver-root", "nvidia-driver-root"), own_variables=("NVIDIA_DRIVER_ROOT",),
           as_here=("", "/"), reason=_DRIVER_ROOT),
    Option("flags.nvidiaDevRoot", text, ("dev-root", "nvidia-dev-root"), own_variables=("NVIDIA_DEV_ROOT",),
           as_here=("", "/"), reason="the device nodes are those of the host's /dev"),
    Option("flags.gdrcopyEnabled", boolean, ("gdrcopy-enabled",), reason=_BY_POD.format("NVIDIA_GDRCOPY=enabled"),
           as_here=(False,)),
    Option("flags.gdsEnabled", boolean, ("gds-enabled",), reason=_BY_POD.format("NVIDIA_GDS=enabled"), as_here=(False,)),
    Option("flags.mofedEnabled", boolean, ("mofed-enabled",), reason=_BY_POD.format("NVIDIA_MOFED=enabled"),
           as_here=(False,)),
    Option("flags.useNodeFeatureAPI", boolean, ("use-node-feature-api",), reason=_OF_GFD, as_here=(False,),
           of_discovery=True),
    Option("flags.deviceDiscoveryStrategy", discovery, ("device-discovery-strategy",), reason="GPUs are found by NVML",
           as_here=("auto", "nvml")),
    Option("flags.plugin.passDeviceSpecs", boolean, ("pass-device-specs",), ("device_list_strategy",)),
    Option("flags.plugin.deviceListStrategy", strategies, ("device-list-strategy",), ("device_list_strategy",)),
    Option("flags.plugin.deviceIDStrategy", words("uuid", "index"), ("device-id-strategy",), ("nvidia.device_ids",)),
    Option("flags.plugin.cdiAnnotationPrefix", text, ("cdi-annotation-prefix",), as_here=("", "cdi.k8s.io/"),
           reason="the prefix is always cdi.k8s.io/"),
    Option("flags.plugin.nvidiaCTKPath", text, ("nvidia-cdi-hook-path", "nvidia-ctk-path"), reason=_NO_HOOKS,
           as_here=("", "/usr/bin/nvidia-ctk")),
    Option("flags.plugin.containerDriverRoot", text, ("driver-root-ctr-path", "container-driver-root"),
           reason=_DRIVER_ROOT, as_here=("", "/driver-root")),
    Option("flags.plugin.sharedDevicesAllocationPolicy", words("distributed", "packed"),
           ("shared-devices-allocation-policy",), ("nvidia.replica_policy",)),
    Option("flags.gfd.oneshot", boolean, ("oneshot",), reason=_OF_GFD, as_here=(False,)),
    Option("flags.gfd.noTimestamp", boolean, ("no-timestamp",), as_here=(False,),
           reason="nvidia.com/gfd.timestamp is written with nvidia.labels"),
    Option("flags.gfd.sleepInterval", any_value, ("sleep-interval",),
           reason="labels are written as soon as something changes"),
    Option("flags.gfd.outputFile", text, ("output-file",), reason=_OF_GFD),
    Option("flags.gfd.machineTypeFile", text, ("machine-type-file",), as_here=("", "/sys/class/dmi/id/product_name"),
           reason="the machine is that of /sys/class/dmi/id/product_name"),
    Option("resources.gpus", named_patterns, reason=_NAMES.format("nvidia.names"), as_here=((),)),
    Option("resources.mig", named_patterns, reason=_NAMES.format("nvidia.mig_names"), as_here=((),)),
    *_sharing("timeSlicing"),
    *_sharing("mps"),
    Option("imex.channelIDs", channels, ("imex-channel-ids",), as_here=((),),
           reason="extra_config takes the device node of a channel"),
    Option("imex.required", not_required, ("imex-required",), reason="true is refused", as_here=(False,)),
    Option("config-file", text, ("config-file",), ("nvidia.config",), of_discovery=True),
    Option("kubelet-socket", kubelet_socket, ("kubelet-socket",), ("kubelet.device_plugin_path",)),
    Option("cdi-feature-flags", text, ("cdi-feature-flags",), reason=_NO_HOOKS),
    Option("cdi-disable-hooks", text, ("cdi-disable-hooks",), reason=_NO_HOOKS),
    Option("DP_DISABLE_HEALTHCHECKS", xids, settings=("health.ignored_xids",), own_variables=("DP_DISABLE_HEALTHCHECKS",)),
    Option("DP_ENABLE_HEALTHCHECKS", xids, settings=("health.ignored_xids",), own_variables=("DP_ENABLE_HEALTHCHECKS",)),
)  # fmt: skip


@cache
def options_by_flag() -> dict[str, Option]:
    return {flag: option for option in OPTIONS for flag in option.flags}


@cache
def options_by_name() -> dict[str, Option]:
    return {option.name: option for option in OPTIONS}
