"""The probe of `gpushare-agent check` for isolation gpushare."""

from __future__ import annotations

import asyncio

from gpushare_agent.isolation.check import CheckProbe, OpenDriver, library_finding
from gpushare_agent.isolation.gpushare.part import gpushare_files
from gpushare_agent.isolation.vdevice.check import vdevice_probes
from gpushare_agent.model.errors import AgentError
from gpushare_agent.model.finding import Finding, error, ok
from gpushare_agent.settings.settings import Settings

_HOOKS = frozenset({"dlsym", "cuInit", "cuGetProcAddress_v2"})
_BUILD = "build it with python -m native.build_gpushare"


async def check_gpushare(settings: Settings) -> list[Finding]:
    """The library is there for this machine, and the agent's own directory can be written."""
    config = settings.libgpushare
    try:
        await asyncio.to_thread(gpushare_files(settings).look)
    except AgentError as failure:
        return [error("gpushare", str(failure), f"{_BUILD}; without it its shares are refused")]
    text = f"{config.library} is a library for this machine, {config.directory} can be written"
    found = await asyncio.to_thread(library_finding, "gpushare", config.library, _HOOKS, "libgpushare's", _BUILD)
    return [ok("gpushare", text), found]


def probes(open_driver: OpenDriver) -> tuple[CheckProbe, ...]:
    return (CheckProbe(name="gpushare", run=check_gpushare), *vdevice_probes())
