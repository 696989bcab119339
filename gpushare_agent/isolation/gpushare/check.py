"""The probes of `gpushare-agent check` for isolation gpushare: the library's file, and a program that runs under it."""

from __future__ import annotations

import asyncio
from functools import partial

from gpushare_agent.isolation.check import CheckProbe, OpenDriver, library_finding
from gpushare_agent.isolation.gpushare.part import gpushare_files
from gpushare_agent.isolation.gpushare.probe import idle_gpu
from gpushare_agent.isolation.gpushare.probing import open_probe
from gpushare_agent.isolation.kept import ProbeState
from gpushare_agent.isolation.vdevice.check import vdevice_probes
from gpushare_agent.model.errors import AgentError
from gpushare_agent.model.finding import Finding, error, ok, warning
from gpushare_agent.settings.settings import Settings

_HOOKS = frozenset({"dlsym", "cuInit", "cuGetProcAddress_v2"})
PROBE_TIMEOUT_S = 60.0
"""Over that of reading a driver that wakes, and of three runs."""
_AGAIN = "run check again where a GPU is idle; the agent probes by itself as soon as one is"
_BUILD = "take the image, which has it, or build it in a clone (python -m native.build_gpushare --help)"


async def check_gpushare(settings: Settings) -> list[Finding]:
    """The library is there for this machine, and the agent's own directory can be written."""
    config = settings.libgpushare
    files = gpushare_files(settings)
    try:
        await asyncio.to_thread(files.look)
    except AgentError as failure:
        return [error("gpushare", str(failure), f"{_BUILD}; without it its shares are refused")]
    if note := files.without_library:
        return [warning("gpushare", note, _BUILD)]
    text = f"{config.library} is a library for this machine, {config.directory} can be written"
    found = await asyncio.to_thread(library_finding, "gpushare", config.library, _HOOKS, "libgpushare's", _BUILD)
    return [ok("gpushare", text), found]


async def check_limits(settings: Settings, open_driver: OpenDriver) -> list[Finding]:
    """A program is limited under this driver, on a GPU that nobody uses. Nothing of simulated GPUs, or without a library."""
    files = gpushare_files(settings)
    if settings.driver != "nvml" or not settings.libgpushare.probe:
        return []
    driver = open_driver(settings)
    try:
        await asyncio.to_thread(files.check_library)
        inventory, sample = await driver.read(), await driver.sample()
    except AgentError:
        return []  # the line of the library, or of the driver, has it
    finally:
        await driver.close()
    # Shares of running containers are not known here: who has started nothing yet is not in the driver's list.
    gpu = idle_gpu(inventory.gpus, {one.uuid: one for one in sample.gpus}, lambda _: False)
    if isinstance(gpu, str):
        return [warning("gpushare probe", f"not run: {gpu}", _AGAIN)]
    state, text = await open_probe(files, None).prove(gpu)
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
