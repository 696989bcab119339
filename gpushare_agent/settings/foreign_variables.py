"""Variables of gpu-manager's and of NVIDIA's device plugin that do nothing here: who moves a manifest over should know.

Source: gpu-manager 1.1.5 (its DaemonSet and start.sh), NVIDIA's device plugin v0.20 (its command's flags).
"""

from __future__ import annotations

from collections.abc import Mapping

INSTEAD = {
    "EXTRA_FLAGS": "write the flags into the container's args",
    "LIBCUDA": "the driver directory is described by GPUSHARE_VOLUME_CONFIG's file",
    "LOG_LEVEL": "use GPUSHARE_LOG__LEVEL: debug, info, warning or error",
    "CONFIG_FILE": "use GPUSHARE_CONFIG; the file's settings are other ones (docs/settings.md)",
    "DEVICE_LIST_STRATEGY": "use GPUSHARE_DEVICE_LIST_STRATEGY",
    "DP_DISABLE_HEALTHCHECKS": "use GPUSHARE_HEALTH__IGNORED_XIDS",
    "FAIL_ON_INIT_ERROR": "use GPUSHARE_FAIL_ON_INIT_ERROR",
    "MPS_ROOT": "use GPUSHARE_MPS__PIPE_DIRECTORY",
    "PASS_DEVICE_SPECS": "use GPUSHARE_DEVICE_LIST_STRATEGY with device-nodes",
    "SHARED_DEVICES_ALLOCATION_POLICY": "use GPUSHARE_PLACEMENT__SHARE_POLICY: binpack or spread",
}
WITHOUT = (
    "CDI_ANNOTATION_PREFIX", "CDI_DISABLE_HOOKS", "CDI_FEATURE_FLAGS", "CONTAINER_DRIVER_ROOT", "DEVICE_DISCOVERY_STRATEGY",
    "DEVICE_ID_STRATEGY", "DP_ENABLE_HEALTHCHECKS", "DRIVER_ROOT_CTR_PATH", "GDRCOPY_ENABLED", "GDS_ENABLED",
    "IMEX_CHANNEL_IDS", "IMEX_REQUIRED", "KUBELET_SOCKET", "MIG_STRATEGY", "MOFED_ENABLED", "NVIDIA_CDI_HOOK_PATH",
    "NVIDIA_CTK_PATH", "NVIDIA_DEV_ROOT", "NVIDIA_DRIVER_ROOT",
)  # fmt: skip


def foreign_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Those that are set to anything: what to do instead, by name."""
    known = dict.fromkeys(WITHOUT, "there is nothing like it here: take it out") | INSTEAD
    return {name: known[name] for name in sorted(known) if environ.get(name)}
