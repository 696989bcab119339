"""The probe of `gpushare-agent check` for isolation driver."""

from __future__ import annotations

from functools import partial

from gpushare_agent.agent.isolation.check import CheckProbe, OpenDriver
from gpushare_agent.agent.isolation.driver import limits
from gpushare_agent.agent.runtime.cgroups import Cgroups
from gpushare_agent.core.settings.settings import Settings

TIMEOUT_S = 15.0
"""Without persistence mode a GPU takes a second or two to wake."""


async def check_driver_limits(open_driver: OpenDriver, settings: Settings) -> str:
    """Checks for cgroup v2, a driver that limits its cgroups' memory, and the right to set that if the agent is to."""
    driver, may_set = open_driver(settings), settings.driver_limits.set_by_agent
    cgroups = Cgroups(settings.runtime.cgroup_root, settings.runtime.proc_root)
    try:
        await limits.check_driver_limits(driver, cgroups, may_set=may_set)
    finally:
        await driver.close()
    who = "the agent sets them" if may_set else "NVIDIA's container toolkit has to set them, and the agent checks it"
    return f"the driver limits the memory of cgroups; {who}"


def probes(open_driver: OpenDriver) -> tuple[CheckProbe, ...]:
    cure = "docs/explanation/isolation.md lists what isolation driver needs; without it every share of it is refused"
    return (CheckProbe("driver limits", partial(check_driver_limits, open_driver), TIMEOUT_S, cure),)
