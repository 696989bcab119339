"""The probe of `gpushare-agent check` for isolation hami-core."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from gpushare_agent.isolation.check import CheckProbe, OpenDriver, library_finding
from gpushare_agent.isolation.hami_core.edits import lifts_cores
from gpushare_agent.isolation.hami_core.part import hami_core_files
from gpushare_agent.isolation.kept import Circumstances
from gpushare_agent.model.errors import AgentError
from gpushare_agent.model.finding import Finding, error, ok
from gpushare_agent.settings.settings import Settings

_HOOKS = frozenset({"dlsym"})
"""HAMi-core's own takes the driver's functions over."""
_BUILD = "build it with native/build_hami_core.py, as the Containerfile does"


async def check_hami_core(settings: Settings) -> list[Finding]:
    """The library is there for this machine, and the agent's own directory can be written."""
    hami = settings.hami_core
    try:
        await asyncio.to_thread(hami_core_files(settings).look)
    except AgentError as failure:
        remedy = (
            "docs/explanation/isolation.md lists what hami-core needs on the node; without it its shares are refused"
        )
        return [error("hami-core", str(failure), remedy)]
    text = f"{hami.library} is a library for this machine, {hami.directory} can be written"
    found = await asyncio.to_thread(library_finding, "hami-core", hami.library, _HOOKS, "HAMi-core's", _BUILD)
    return [ok("hami-core", text), found]


def circumstances(settings: Settings, found: Circumstances) -> Circumstances:
    return replace(found, has_core_limit=not lifts_cores(None, settings.hami_core))


def probes(open_driver: OpenDriver) -> tuple[CheckProbe, ...]:
    return (CheckProbe(name="hami-core", run=check_hami_core),)
