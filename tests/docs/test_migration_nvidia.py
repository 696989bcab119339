"""docs/how-to/migrate-from-nvidia.md: its table of the plugin's keys is the code's."""

from __future__ import annotations

import re
from pathlib import Path

from gpushare_agent.settings.nvidia_options import OPTIONS

PAGE = Path(__file__).parents[2] / "docs/how-to/migrate-from-nvidia.md"
CHART_VARIABLES = (
    "MPS_ROOT", "MIG_STRATEGY", "FAIL_ON_INIT_ERROR", "PASS_DEVICE_SPECS", "DEVICE_LIST_STRATEGY", "DEVICE_ID_STRATEGY",
    "NVIDIA_DRIVER_ROOT", "NVIDIA_DEV_ROOT", "NVIDIA_CDI_HOOK_PATH", "CDI_FEATURE_FLAGS", "GDRCOPY_ENABLED", "GDS_ENABLED",
    "MOFED_ENABLED", "CONFIG_FILE", "DEVICE_DISCOVERY_STRATEGY",
)  # fmt: skip
"""Which templates/daemonset-device-plugin.yml of the chart v0.20.0 can write, without those of the container runtime."""


def rows(heading: str) -> list[list[str]]:
    table = PAGE.read_text().split(heading, 1)[1].split("|---", 1)[1]
    lines = [line for line in table.split("\n\n", 1)[0].splitlines()[1:] if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def in_code(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", cell))


def test_the_table_of_keys_is_the_codes() -> None:
    """Each key with its variables, flags, and the settings that it sets or the reason why it sets none."""
    written = {}
    for key, variables, flags, here in rows("| key of the file |"):
        is_setting = here.startswith("`") and not re.sub(r"`[^`]+`,? ?", "", here)
        written[in_code(key)[0]] = (
            in_code(variables), tuple(flag.removeprefix("--") for flag in in_code(flags)),
            in_code(here) if is_setting else here,
        )  # fmt: skip
    assert written == {
        option.name: (option.variables, option.flags, option.settings or option.reason) for option in OPTIONS
    }


def test_every_variable_of_the_chart_is_known() -> None:
    """So that a rendered manifest's environment can be taken over as it is."""
    assert set(CHART_VARIABLES) <= {name for option in OPTIONS for name in option.variables}


def test_the_page_is_short_beside_its_tables() -> None:
    """At most 1,200 words."""
    prose = [line for line in PAGE.read_text().splitlines() if not line.startswith("|")]
    assert len(" ".join(prose).split()) <= 1200
