"""The probes that `gpushare-agent check` takes from the isolations in use, each from its module `check` if it has one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from msgspec import Struct

from gpushare_agent.agent.isolation import module_of
from gpushare_agent.core.model.finding import Finding
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.isolation import MemoryLimiter
from gpushare_agent.core.model.usage import DriverSample
from gpushare_agent.core.settings.settings import Settings


class CheckedDriver(MemoryLimiter, Protocol):
    """The GPUs' driver, as gpus/watch.py opens it."""

    async def read(self) -> GpuInventory: ...
    async def sample(self) -> DriverSample: ...
    async def close(self) -> None: ...


OpenDriver = Callable[[Settings], CheckedDriver]
"""The node's driver, for a probe that closes it."""


class CheckProbe(Struct, frozen=True):
    """One probe of `gpushare-agent check`, which changes nothing, and ends after `timeout_s`. The module `check` of an
    isolation that is no combination has its own, `probes(open_driver) -> tuple[CheckProbe, ...]`. `run` returns findings,
    or what is good about `name`. If it raises AgentError, that is an error of `name`, with `cure`."""

    name: str
    run: Callable[[Settings], Awaitable[list[Finding] | str]]
    timeout_s: float = 5.0
    cure: str = ""


def build_check_probes(isolation: str, open_driver: OpenDriver) -> tuple[CheckProbe, ...]:
    module = module_of(isolation, "check")
    found: tuple[CheckProbe, ...] = module.probes(open_driver) if module is not None else ()
    return found
