"""One table of the flags that other programs have and no setting here has, and what becomes of each.

Flags that mean the same are aliases of settings (settings/tree.py); NVIDIA's plugin has its own table (nvidia_options.py).
settings/sources.py reads them, on the command line and in EXTRA_FLAGS. Sources: gpu-manager v1.1.5, cmd/manager/options and
build; gpu-admission, main.go and build, in the versions with and without quota; klog, of both; GPUShare's device plugin,
cmd/nvidia/main.go of 45fb8b8; HAMi's, cmd/device-plugin/nvidia of 4707fb0; vgpu-manager's, cmd/device-plugin of 3d7f66d.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from msgspec import Struct

_DEBUG_FROM = 5
"""klog's verbosity from which gpu-manager logs each step; 4 is its manifest's."""
_LEVELS = {"debug": "debug", "info": "info", "warn": "warning", "warning": "warning", "error": "error"}
"""A word of LOG_LEVEL -> ours; `warn` is that of GPUShare's extender."""
_STANDARD_ERROR = "logs go to standard error"


class FormerFlag(Struct, frozen=True, kw_only=True):
    """The meaning of a flag here: settings (`read`), nothing (`reason`), or a mistake with what to write instead (`hint`).

    `read` takes the value and returns settings by their dotted names, as texts; it raises ValueError with what is allowed.
    With a `reason` something is lost, unless the value is one of `as_here`. A boolean flag may stand without a value; a
    secret's is not shown.
    """

    read: Callable[[str], Mapping[str, str]] | None = None
    reason: str = ""
    hint: str = ""
    as_here: tuple[str, ...] = ()
    is_boolean: bool = False
    is_secret: bool = False


def log_level(value: str) -> Mapping[str, str]:
    """klog's number, or a word."""
    if value.isascii() and value.isdigit() and len(value) < 4:
        return {"log.level": "debug" if int(value) >= _DEBUG_FROM else "info"}
    if (word := value.lower()) in _LEVELS:
        return {"log.level": _LEVELS[word]}
    raise ValueError("klog's number, or debug, info, warning, error")


def _extender_address(value: str) -> Mapping[str, str]:
    """HOST:PORT as Go's net.Listen takes it; a host in brackets is IPv6, an empty one every address."""
    host, colon, port = value.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()):
        raise ValueError("an address such as 127.0.0.1:3456")
    return {"extender.addr": host.removeprefix("[").removesuffix("]"), "extender.port": port}


def _gpushare_unit(value: str) -> Mapping[str, str]:
    """A node with this unit serves the resource: GPUShare's plugin has no other."""
    if value not in ("GiB", "MiB"):
        raise ValueError("GiB or MiB")
    return {"gpushare.enabled": "true", "gpushare.unit": value}


_RANGE = re.compile(r"([0-9]{1,3})(?:-|\.\.)([0-9]{1,3})")


def _excluded_gpus(value: str) -> Mapping[str, str]:
    """Indexes, UUIDs and ranges of indexes such as 0-2 or 0..2, between commas."""
    found: list[str] = []
    for part in value.split(","):
        ends = _RANGE.fullmatch(part)
        found += map(str, range(int(ends[1]), int(ends[2]) + 1)) if ends else [part]
    return {"excluded_gpus": ",".join(found)}


_KUBELET = "pods are read from the kubelet's sockets and the API server, with the pod's service account"
_BOTH = ("true", "false")

ADMISSION_FIELDS = {
    "QuotaConfigMapName": "quota_name",
    "QuotaConfigMapNamespace": "quota_namespace",
    "GPUModelLabel": "model_label",
    "GPUPoolLabel": "pool_label",
}
"""Field of gpu-admission's configuration file, its `--config` -> name of the setting in `extender` that it replaces."""

FORMER_FLAGS: Mapping[str, FormerFlag] = {
    # klog, in all of them
    "v": FormerFlag(read=log_level),
    "logtostderr": FormerFlag(reason=_STANDARD_ERROR, as_here=("true",), is_boolean=True),
    "alsologtostderr": FormerFlag(reason=_STANDARD_ERROR, as_here=_BOTH, is_boolean=True),
    "log-dir": FormerFlag(reason=_STANDARD_ERROR),
    "log-flush-frequency": FormerFlag(reason="each line is written at once"),
    "log-backtrace-at": FormerFlag(reason="docs/how-to/debug.md shows where an agent is"),
    "stderrthreshold": FormerFlag(reason="log.level counts"),
    "vmodule": FormerFlag(reason="log.level counts"),
    # gpu-manager: its service of systemd names the socket of its display
    "addr": FormerFlag(read=lambda value: {"display.socket": value}),
    "wait-timeout": FormerFlag(reason="nothing waits by it here", as_here=("1m", "1m0s", "60s")),
    "checkpoint-path": FormerFlag(reason="the kubelet's records count", as_here=("/etc/gpu-manager/checkpoint",)),
    # gpu-admission
    "address": FormerFlag(read=_extender_address),
    "incluster-mode": FormerFlag(
        reason="without kubeconfig the pod's service account is used", as_here=_BOTH, is_boolean=True
    ),
    "master": FormerFlag(hint="write the API server's address into a kubeconfig and name it by --kubeconfig"),
    "pprofAddress": FormerFlag(reason="/metrics and /debug/state are on the extender's own port"),
    # GPUShare's device plugin
    "memory-unit": FormerFlag(read=_gpushare_unit),
    "mps": FormerFlag(read=lambda value: {"isolation": "mps"} if value.lower() == "true" else {},
                      reason="isolation counts", as_here=("false",), is_boolean=True),
    "health-check": FormerFlag(reason="the health of GPUs is always watched", as_here=("true",), is_boolean=True),
    "query-kubelet": FormerFlag(reason=_KUBELET, as_here=_BOTH, is_boolean=True),
    **dict.fromkeys(("kubelet-address", "kubelet-port", "client-cert", "client-key"), FormerFlag(reason=_KUBELET)),
    "token": FormerFlag(reason=_KUBELET, is_secret=True),
    "timeout": FormerFlag(reason="kubelet.pod_lookup_timeout_s bounds an admission"),
    # HAMi
    "device-split-count": FormerFlag(reason="a GPU has as many shares as its cores and memory are enough for"),
    "device-memory-scaling": FormerFlag(reason="limits are not scaled here", as_here=("1", "1.0")),
    "device-cores-scaling": FormerFlag(reason="limits are not scaled here", as_here=("1", "1.0")),
    "disable-core-limit": FormerFlag(
        reason="the annotation tencent.com/vcuda-core-limit lets a share use more", as_here=("false",), is_boolean=True
    ),
    "resource-name": FormerFlag(reason="HAMi's names become vcuda's in new pods: docs/how-to/migrate-from-hami.md"),
    # vgpu-manager
    "exclude-devices": FormerFlag(read=_excluded_gpus),
    "device-memory-factor": FormerFlag(reason="a pod's memory is in MiB", as_here=("1",)),
    "node-config-path": FormerFlag(hint="name a file of settings by --config, or those of single nodes by their label"),
    "open-kernel-modules": FormerFlag(reason="the kernel modules are looked at", as_here=_BOTH, is_boolean=True),
    "feature-gates": FormerFlag(reason="what can be chosen here is a setting of its own"),
    "domain": FormerFlag(reason="the names that become vcuda's are those of nvidia.com", as_here=("nvidia.com",)),
}  # fmt: skip
