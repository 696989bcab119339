"""Whoever comes from NVIDIA's chart."""

from __future__ import annotations

from gpushare_agent.core.settings.nvidia_options import OPTIONS

CHART_VARIABLES = (
    "MPS_ROOT", "MIG_STRATEGY", "FAIL_ON_INIT_ERROR", "PASS_DEVICE_SPECS", "DEVICE_LIST_STRATEGY", "DEVICE_ID_STRATEGY",
    "NVIDIA_DRIVER_ROOT", "NVIDIA_DEV_ROOT", "NVIDIA_CDI_HOOK_PATH", "CDI_FEATURE_FLAGS", "GDRCOPY_ENABLED", "GDS_ENABLED",
    "MOFED_ENABLED", "CONFIG_FILE", "DEVICE_DISCOVERY_STRATEGY",
)  # fmt: skip
"""Which templates/daemonset-device-plugin.yml of the chart v0.20.0 can write, without those of the container runtime."""


def test_every_variable_of_the_chart_is_known() -> None:
    """So that a rendered manifest's environment can be taken over as it is."""
    assert set(CHART_VARIABLES) <= {name for option in OPTIONS for name in option.variables}
