"""What `gpushare-agent check` asks of the isolations in use; each answers in its module `check`, if it has one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Set
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from gpushare_agent.isolation import module_of
from gpushare_agent.isolation.kept import Circumstances
from gpushare_agent.model.errors import AgentError
from gpushare_agent.model.finding import Finding, error, ok, warning
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.isolation import MemoryLimiter, isolation_parts
from gpushare_agent.model.usage import DriverSample
from gpushare_agent.settings.settings import Settings


class CheckedDriver(MemoryLimiter, Protocol):
    """The GPUs' driver, as gpus/watch.py opens it."""

    async def read(self) -> GpuInventory: ...
    async def sample(self) -> DriverSample: ...
    async def close(self) -> None: ...


_USUAL_GLIBC = (2, 28)
"""Of the oldest images that NVIDIA publishes CUDA 12 and 13 for (ubi8)."""

OpenDriver = Callable[[Settings], CheckedDriver]
"""The node's driver, for a probe that closes it."""


class CheckProbe(Struct, frozen=True):
    """One probe of `gpushare-agent check`, which changes nothing, and ends after `timeout_s`. The module `check` of an
    isolation that is no combination has its own, `probes(open_driver) -> tuple[CheckProbe, ...]`. `run` returns findings,
    or what is good of `name`; where it raises AgentError that is an error of `name`, with `cure`."""

    name: str
    run: Callable[[Settings], Awaitable[list[Finding] | str]]
    timeout_s: float = 5.0
    cure: str = ""


def library_finding(isolation: str, library: Path, hooks: Set[str], owner: str, build: str) -> Finding:
    """Whether a library for programs is whose it should be, by the names that it takes over, and in which images
    it loads."""
    # Here: pyelftools is a twentieth of the agent's start, which does not need it.
    from gpushare_agent.isolation.driver_volume.elf import read_interface

    try:
        found = read_interface(library)
    except AgentError as failure:
        # Not an error: whether the library is there and for this machine was said by the isolation already.
        return warning(isolation, str(failure), build)
    # A library under the right name that takes nothing over loads everywhere, and nobody would notice.
    if not hooks <= found.defined:
        return error(isolation, f"{library} is not {owner}: it would limit nobody", build)
    needed = ".".join(map(str, found.glibc)) or "of any version"
    text = f"it loads in images with glibc {needed} or newer; in others programs print a line and run without limits"
    return warning(isolation, text, build) if found.glibc > _USUAL_GLIBC else ok(isolation, text)


def build_check_probes(isolation: str, open_driver: OpenDriver) -> tuple[CheckProbe, ...]:
    module = module_of(isolation, "check")
    found: tuple[CheckProbe, ...] = module.probes(open_driver) if module is not None else ()
    return found


def node_circumstances(isolation: str, settings: Settings, found: Circumstances) -> Circumstances:
    """`found` with what the settings leave out of every share, as the modules `check` say."""
    for part in isolation_parts(isolation):
        if (without := getattr(module_of(part, "check"), "circumstances", None)) is not None:
            found = without(settings, found)
    return found
