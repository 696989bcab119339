"""The probe of `gpushare-agent check` for isolation mps."""

from __future__ import annotations

from gpushare_agent.agent.isolation.check import CheckProbe, OpenDriver
from gpushare_agent.agent.isolation.mps.part import mps_control
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.model.finding import Finding, error, ok
from gpushare_agent.core.settings.settings import Settings

TIMEOUT_S = 130.0
"""Over the longest time limit of one command that can be set."""


async def check_mps(settings: Settings) -> list[Finding]:
    """The control daemon answers."""
    try:
        await mps_control(settings).check()
    except Unavailable as failure:
        remedy = (
            "start the daemon with this pipe directory, or run `gpushare-agent mps` (docs/explanation/mps.md); until then"
            " no share is given under isolation mps"
        )
        return [error("mps", str(failure), remedy)]
    return [ok("mps", f"the control daemon of {settings.mps.pipe_directory} answers")]


def probes(open_driver: OpenDriver) -> tuple[CheckProbe, ...]:
    return (CheckProbe(name="mps", run=check_mps, timeout_s=TIMEOUT_S),)
