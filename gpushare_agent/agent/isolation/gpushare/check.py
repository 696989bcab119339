"""The probes of `gpushare-agent check` for isolation gpushare: the library's file, and a program that runs under it."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path

from gpushare_agent.agent.isolation.check import CheckProbe, OpenDriver
from gpushare_agent.agent.isolation.gpushare.library import library_of
from gpushare_agent.agent.isolation.gpushare.probe import idle_gpu
from gpushare_agent.agent.isolation.gpushare.probing import open_probe
from gpushare_agent.agent.isolation.kept import ProbeState
from gpushare_agent.agent.isolation.vdevice.check import vdevice_probes
from gpushare_agent.core.model.errors import AgentError, file_remedy
from gpushare_agent.core.model.finding import Finding, error, ok, warning
from gpushare_agent.core.settings.settings import Settings

_USUAL_GLIBC = (2, 28)
"""The version in the oldest images for which NVIDIA publishes CUDA 12 and 13 (ubi8)."""
_HOOKS = frozenset({"dlsym", "cuInit", "cuGetProcAddress_v2"})
PROBE_TIMEOUT_S = 60.0
"""Longer than reading a driver that wakes takes, plus three runs."""
_AGAIN = "run check again where a GPU is idle; the agent probes by itself as soon as one is"
_BUILD = "take the image, which has it, or build it in a clone (python -m native.build_gpushare --help)"


async def check_gpushare(settings: Settings) -> list[Finding]:
    """The library is there for this machine, and the agent's own directory can be written."""
    config = settings.libgpushare
    library = library_of(settings)
    remedy = f"{_BUILD}; without it its shares are refused"
    try:
        await asyncio.to_thread(library.check_source)
        await asyncio.to_thread(library.content)
        remedy = _place_remedy(settings)
        await asyncio.to_thread(library.look)
    except AgentError as failure:
        return [error("gpushare", str(failure), file_remedy(failure, remedy))]
    if note := library.missing_note:
        return [warning("gpushare", note, _BUILD)]
    text = f"{config.library} is a library for this machine, {config.directory} can be written"
    return [ok("gpushare", text), await asyncio.to_thread(_library_finding, config.library)]


def _place_remedy(settings: Settings) -> str:
    """For a directory from which containers cannot get the library."""
    state = settings.state_directory
    try:
        has_programs = state is not None and not os.statvfs(state).f_flag & (os.ST_NOEXEC | os.ST_RDONLY)
    except OSError:
        has_programs = False
    below = f", such as one below {state}, which this process has" if has_programs else ""
    return (
        "let the host's directory be written, and mount its file system without noexec; or move it: the component"
        f" read-only-etc, the chart's hostDirectory, or libgpushare.directory in another directory of the host{below}"
    )


def _library_finding(library: Path) -> Finding:
    """Checks that it is ours, by the names that it takes over, and reports in which images it loads."""
    # Imported here: pyelftools is a twentieth of the agent's start, which does not need it.
    from gpushare_agent.agent.delivery.elf import read_interface

    try:
        found = read_interface(library)
    except AgentError as failure:
        # Not an error: whether the library is there and for this machine was said already.
        return warning("gpushare", str(failure), _BUILD)
    # A library under the right name that takes nothing over loads everywhere, and nobody would notice.
    if not found.defined >= _HOOKS:
        return error("gpushare", f"{library} is not libgpushare's: it would limit nobody", _BUILD)
    needed = ".".join(map(str, found.glibc)) or "of any version"
    text = f"it loads in images with glibc {needed} or newer; in those with an older one every program ends"
    return warning("gpushare", text, _BUILD) if found.glibc > _USUAL_GLIBC else ok("gpushare", text)


async def check_limits(settings: Settings, open_driver: OpenDriver) -> list[Finding]:
    """A program is limited under this driver, on a GPU that nobody uses. Nothing of simulated GPUs, or without a library."""
    library = library_of(settings)
    if settings.driver != "nvml" or not settings.libgpushare.probe:
        return []
    driver = open_driver(settings)
    try:
        await asyncio.to_thread(library.check)
        inventory, sample = await driver.read(), await driver.sample()
    except AgentError:
        return []  # the line of the library, or of the driver, has it
    finally:
        await driver.close()
    # Shares of running containers are not known here: a container that has started nothing is not in the driver's list.
    gpu = idle_gpu(inventory.gpus, {one.uuid: one for one in sample.gpus}, lambda _: False)
    if isinstance(gpu, str):
        return [warning("gpushare probe", f"not run: {gpu}", _AGAIN)]
    state, text = await open_probe(library, None).prove(gpu)
    under = f"under driver {inventory.driver_version}, GPU {gpu.label}: {text}"
    if state is ProbeState.PASSED:
        return [ok("gpushare probe", under)]
    if state is ProbeState.SKIPPED:
        return [warning("gpushare probe", f"not run {under}", _AGAIN)]
    remedy = "update the agent, whose image has the library, or choose another isolation; shares are refused"
    return [error("gpushare probe", f"the library does not limit programs {under}", remedy)]


def probes(open_driver: OpenDriver) -> tuple[CheckProbe, ...]:
    limits = partial(check_limits, open_driver=open_driver)
    return (
        CheckProbe(name="gpushare", run=check_gpushare),
        CheckProbe(name="gpushare probe", run=limits, timeout_s=PROBE_TIMEOUT_S),
        *vdevice_probes(),
    )
