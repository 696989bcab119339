"""The keys, variables and flags of NVIDIA's device plugin, and what becomes of each here: one table.

The table of docs/how-to/migrate-from-nvidia.md is generated from it (tests/docs/generated.py).

Source: k8s-device-plugin v0.20.0, api/config/v1 (keys, types, allowed values), cmd/nvidia-device-plugin/main.go and
cmd/gpu-feature-discovery/main.go (flags, variables), internal/rm/health.go (DP_…). settings/nvidia_plugin.py reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from msgspec import Struct

from gpushare_agent.settings.values import MAX_NVIDIA_RESOURCE_NAME_CHARS

_PREFIX = "nvidia.com/"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)
_XID = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)
_TRUE = frozenset({"1", "t", "T", "true", "TRUE", "True", "yes", "Yes", "YES", "on", "On", "ON"})
_FALSE = frozenset({"0", "f", "F", "false", "FALSE", "False", "no", "No", "NO", "off", "Off", "OFF"})
STRATEGIES = ("envvar", "volume-mounts", "cdi-annotations", "cdi-cri")


class Option(Struct, frozen=True, kw_only=True):
    """A key, variable or flag of NVIDIA's device plugin. `name` is the file's dotted key, or the first flag's or variable's
    name where the file has none; `read` takes what a file, a variable or a flag has and raises ValueError with what is
    allowed.

    `settings` are ours that it sets. Without any, `reason` says why it changes nothing here, and nothing is lost where the
    value is one of `as_here`.
    """

    name: str
    read: Callable[[object], Any]
    flags: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    reason: str = ""
    as_here: tuple[object, ...] = ()

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


def _sharing(kind: str, instead: str) -> Iterable[Option]:
    prefix = f"sharing.{kind}."
    yield Option(name=f"{prefix}renameByDefault", read=boolean, settings=("nvidia.rename_replicas",))
    yield Option(name=f"{prefix}failRequestsGreaterThanOne", read=boolean, settings=("nvidia.refuse_several_replicas",))
    yield Option(name=f"{prefix}resources.name", read=any_value, settings=("nvidia.replicas", "nvidia.sharing"))
    yield Option(name=f"{prefix}resources.replicas", read=any_value, settings=("nvidia.replicas", "nvidia.sharing"))
    yield Option(
        name=f"{prefix}resources.rename",
        read=any_value,
        reason="NVIDIA's plugin ignores it too; renameByDefault adds .shared",
    )
    yield Option(name=f"{prefix}resources.devices", read=any_value, as_here=("all",), reason=instead)


_BY_POD = "pods that need it set the variable {} themselves"
_NO_HOOKS = "the agent's CDI specs name no hooks"
_OF_GFD = "the agent writes the labels itself (nvidia.labels)"
_DEVICES = "NVIDIA's plugin ignores it too; nvidia.replicas takes indexes, such as 0=4,1=2"
_NAMES = "NVIDIA's plugin ignores it too; set {}"
_DRIVER_ROOT = "the RuntimeClass brings the driver, or manifests/components/driver-container"

OPTIONS: tuple[Option, ...] = (
    Option(name="version", read=words("v1"), as_here=("v1",), reason="the only version there is"),
    Option(
        name="flags.migStrategy", read=words("none", "single", "mixed"), settings=("nvidia.mig_strategy",),
        flags=("mig-strategy",), variables=("MIG_STRATEGY", "GFD_MIG_STRATEGY"),
    ),
    Option(
        name="flags.failOnInitError", read=boolean, settings=("fail_on_init_error",),
        flags=("fail-on-init-error",), variables=("FAIL_ON_INIT_ERROR", "GFD_FAIL_ON_INIT_ERROR"),
    ),
    Option(
        name="flags.mpsRoot", read=text, flags=("mps-root",), variables=("MPS_ROOT",), as_here=("", "/run/nvidia/mps"),
        reason="the MPS daemon is manifests/mps-daemon, with its pipes in mps.pipe_directory",
    ),
    Option(
        name="flags.nvidiaDriverRoot", read=text, flags=("driver-root", "nvidia-driver-root"),
        variables=("NVIDIA_DRIVER_ROOT",), as_here=("", "/"), reason=_DRIVER_ROOT,
    ),
    Option(
        name="flags.nvidiaDevRoot", read=text, flags=("dev-root", "nvidia-dev-root"), variables=("NVIDIA_DEV_ROOT",),
        as_here=("", "/"), reason="the device nodes are those of the host's /dev",
    ),
    Option(
        name="flags.gdrcopyEnabled", read=boolean, flags=("gdrcopy-enabled",), variables=("GDRCOPY_ENABLED",),
        as_here=(False,), reason=_BY_POD.format("NVIDIA_GDRCOPY=enabled"),
    ),
    Option(
        name="flags.gdsEnabled", read=boolean, flags=("gds-enabled",), variables=("GDS_ENABLED",),
        as_here=(False,), reason=_BY_POD.format("NVIDIA_GDS=enabled"),
    ),
    Option(
        name="flags.mofedEnabled", read=boolean, flags=("mofed-enabled",), variables=("MOFED_ENABLED",),
        as_here=(False,), reason=_BY_POD.format("NVIDIA_MOFED=enabled"),
    ),
    Option(
        name="flags.useNodeFeatureAPI", read=boolean, flags=("use-node-feature-api",),
        variables=("USE_NODE_FEATURE_API", "GFD_USE_NODE_FEATURE_API"), as_here=(False,), reason=_OF_GFD,
    ),
    Option(
        name="flags.deviceDiscoveryStrategy", read=discovery, flags=("device-discovery-strategy",),
        variables=("DEVICE_DISCOVERY_STRATEGY",), as_here=("auto", "nvml"), reason="GPUs are found by NVML",
    ),
    Option(
        name="flags.plugin.passDeviceSpecs", read=boolean, settings=("device_list_strategy",),
        flags=("pass-device-specs",), variables=("PASS_DEVICE_SPECS",),
    ),
    Option(
        name="flags.plugin.deviceListStrategy", read=strategies, settings=("device_list_strategy",),
        flags=("device-list-strategy",), variables=("DEVICE_LIST_STRATEGY",),
    ),
    Option(
        name="flags.plugin.deviceIDStrategy", read=words("uuid", "index"), settings=("nvidia.device_ids",),
        flags=("device-id-strategy",), variables=("DEVICE_ID_STRATEGY",),
    ),
    Option(
        name="flags.plugin.cdiAnnotationPrefix", read=text, flags=("cdi-annotation-prefix",),
        variables=("CDI_ANNOTATION_PREFIX",), as_here=("", "cdi.k8s.io/"), reason="the prefix is always cdi.k8s.io/",
    ),
    Option(
        name="flags.plugin.nvidiaCTKPath", read=text, flags=("nvidia-cdi-hook-path", "nvidia-ctk-path"),
        variables=("NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"), as_here=("", "/usr/bin/nvidia-ctk"), reason=_NO_HOOKS,
    ),
    Option(
        name="flags.plugin.containerDriverRoot", read=text, flags=("driver-root-ctr-path", "container-driver-root"),
        variables=("DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"), as_here=("", "/driver-root"), reason=_DRIVER_ROOT,
    ),
    Option(
        name="flags.plugin.sharedDevicesAllocationPolicy", read=words("distributed", "packed"),
        settings=("nvidia.replica_policy",), flags=("shared-devices-allocation-policy",),
        variables=("SHARED_DEVICES_ALLOCATION_POLICY",),
    ),
    Option(
        name="flags.gfd.oneshot", read=boolean, flags=("oneshot",), variables=("GFD_ONESHOT",), as_here=(False,),
        reason=_OF_GFD,
    ),
    Option(
        name="flags.gfd.noTimestamp", read=boolean, flags=("no-timestamp",), variables=("GFD_NO_TIMESTAMP",),
        as_here=(False,), reason="nvidia.com/gfd.timestamp is written with nvidia.labels",
    ),
    Option(
        name="flags.gfd.sleepInterval", read=any_value, flags=("sleep-interval",), variables=("GFD_SLEEP_INTERVAL",),
        reason="labels are written as soon as something changes",
    ),
    Option(
        name="flags.gfd.outputFile", read=text, flags=("output-file",), variables=("GFD_OUTPUT_FILE",), reason=_OF_GFD,
    ),
    Option(
        name="flags.gfd.machineTypeFile", read=text, flags=("machine-type-file",), variables=("GFD_MACHINE_TYPE_FILE",),
        as_here=("", "/sys/class/dmi/id/product_name"), reason="the machine is that of /sys/class/dmi/id/product_name",
    ),
    Option(name="resources.gpus", read=named_patterns, as_here=((),), reason=_NAMES.format("nvidia.names")),
    Option(name="resources.mig", read=named_patterns, as_here=((),), reason=_NAMES.format("nvidia.mig_names")),
    *_sharing("timeSlicing", _DEVICES),
    *_sharing("mps", _DEVICES),
    Option(
        name="imex.channelIDs", read=channels, flags=("imex-channel-ids",), variables=("IMEX_CHANNEL_IDS",), as_here=((),),
        reason="extra_config takes the device node of a channel",
    ),
    Option(
        name="imex.required", read=not_required, flags=("imex-required",), variables=("IMEX_REQUIRED",), as_here=(False,),
        reason="true is refused",
    ),
    Option(
        name="config-file", read=text, settings=("nvidia.config",), flags=("config-file",),
        variables=("CONFIG_FILE", "GFD_CONFIG_FILE"),
    ),
    Option(
        name="kubelet-socket", read=kubelet_socket, settings=("kubelet.device_plugin_path",), flags=("kubelet-socket",),
        variables=("KUBELET_SOCKET",),
    ),
    Option(
        name="cdi-feature-flags", read=text, flags=("cdi-feature-flags",), variables=("CDI_FEATURE_FLAGS",),
        reason=_NO_HOOKS,
    ),
    Option(
        name="cdi-disable-hooks", read=text, flags=("cdi-disable-hooks",), variables=("CDI_DISABLE_HOOKS",),
        reason=_NO_HOOKS,
    ),
    Option(
        name="DP_DISABLE_HEALTHCHECKS", read=xids, settings=("health.ignored_xids",), variables=("DP_DISABLE_HEALTHCHECKS",),
    ),
    Option(
        name="DP_ENABLE_HEALTHCHECKS", read=xids, settings=("health.ignored_xids",), variables=("DP_ENABLE_HEALTHCHECKS",),
    ),
)  # fmt: skip


@cache
def options_by_flag() -> dict[str, Option]:
    return {flag: option for option in OPTIONS for flag in option.flags}


@cache
def options_by_name() -> dict[str, Option]:
    return {option.name: option for option in OPTIONS}
