"""The probe of `gpushare-agent check` for isolation hami-core."""

from __future__ import annotations

import asyncio
from pathlib import Path

from msgspec.structs import replace

from gpushare_agent.isolation.check import CheckProbe, OpenDriver
from gpushare_agent.isolation.driver_volume.elf import read_interface
from gpushare_agent.isolation.hami_core.edits import lifts_cores
from gpushare_agent.isolation.hami_core.part import hami_core_files
from gpushare_agent.isolation.kept import Circumstances
from gpushare_agent.model.errors import AgentError
from gpushare_agent.model.finding import Finding, error, ok, warning
from gpushare_agent.settings.settings import Settings

_HOOK = "dlsym"
"""HAMi-core's own takes the driver's functions over."""
_USUAL_GLIBC = (2, 28)
"""Of the oldest images that NVIDIA publishes CUDA 12 and 13 for (ubi8)."""


async def check_hami_core(settings: Settings) -> list[Finding]:
    """The library is there for this machine, and the agent's own directory can be written."""
    hami = settings.hami_core
    try:
        await asyncio.to_thread(hami_core_files(settings).look)
    except AgentError as failure:
        cure = "docs/explanation/isolation.md lists what hami-core needs on the node; without it its shares are refused"
        return [error("hami-core", str(failure), cure)]
    text = f"{hami.library} is a library for this machine, {hami.directory} can be written"
    return [ok("hami-core", text), await asyncio.to_thread(_library_finding, hami.library)]


def _library_finding(library: Path) -> Finding:
    """Whether it is HAMi-core's, and in which images it loads."""
    build = "build it with native/build_hami_core.py, as the Containerfile does"
    try:
        found = read_interface(library)
    except AgentError as failure:
        return warning("hami-core", str(failure), build)
    if _HOOK not in found.defined:
        return error("hami-core", f"{library} is not HAMi-core's: it would limit nobody", build)
    needed = ".".join(map(str, found.glibc)) or "of any version"
    text = f"it loads in images with glibc {needed} or newer; in others programs print a line and run without limits"
    return warning("hami-core", text, build) if found.glibc > _USUAL_GLIBC else ok("hami-core", text)


def circumstances(settings: Settings, found: Circumstances) -> Circumstances:
    return replace(found, has_core_limit=not lifts_cores(None, settings.hami_core))


def probes(open_driver: OpenDriver) -> tuple[CheckProbe, ...]:
    return (CheckProbe(name="hami-core", run=check_hami_core),)
