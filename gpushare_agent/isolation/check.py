"""What `gpushare-agent check` asks of the isolations in use; each answers in its module `check`, if it has one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from msgspec import Struct

from gpushare_agent.isolation import module_of
from gpushare_agent.isolation.kept import Circumstances
from gpushare_agent.model.finding import Finding
from gpushare_agent.model.isolation import isolation_parts
from gpushare_agent.model.memory_limits import MemoryLimiter
from gpushare_agent.settings.settings import Settings


class ClosableDriver(MemoryLimiter, Protocol):
    async def close(self) -> None: ...


OpenDriver = Callable[[Settings], ClosableDriver]
"""The node's driver, for a probe that closes it."""


class CheckProbe(Struct, frozen=True, kw_only=True):
    """One probe of `gpushare-agent check`, which only reads, and ends after `timeout_s`. The module `check` of an isolation
    that is no combination has its own, `probes(open_driver) -> tuple[CheckProbe, ...]`."""

    name: str
    run: Callable[[Settings], Awaitable[list[Finding]]]
    timeout_s: float = 5.0


def build_check_probes(isolation: str, open_driver: OpenDriver) -> tuple[CheckProbe, ...]:
    module = module_of(isolation, "check")
    found: tuple[CheckProbe, ...] = module.probes(open_driver) if module is not None else ()
    return found


def node_circumstances(isolation: str, settings: Settings, found: Circumstances) -> Circumstances:
    """With what the settings leave out of every share, as the modules `check` of its packages say."""
    for part in isolation_parts(isolation):
        if (without := getattr(module_of(part, "check"), "circumstances", None)) is not None:
            found = without(settings, found)
    return found
