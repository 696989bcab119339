"""Isolation driver on a node: the driver's limit of each container, and the reports of missing limits."""

from __future__ import annotations

from gpushare_agent.agent.isolation.choice import Standing
from gpushare_agent.agent.isolation.container_ids import ContainerIds
from gpushare_agent.agent.isolation.driver.edits import MemoryShare, memory_shares
from gpushare_agent.agent.isolation.driver.limits import DriverLimits, check_driver_limits
from gpushare_agent.agent.isolation.part import IsolationHost, IsolationPart, NodeProbe, ProbedDriver
from gpushare_agent.agent.runtime.cgroups import Cgroups
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.settings.settings import Settings


def build(host: IsolationHost) -> IsolationPart:
    return DriverLimits(
        driver=host.driver,
        cgroups=host.cgroups,
        containers=ContainerIds(host.runtime, host.node.pods),
        shares=lambda: _shares(host),
        may_set=host.node.settings.driver_limits.set_by_agent,
        on_missing=lambda key, why: host.warn_of(key, "MemoryLimitMissing", f"runs without its memory limit: {why}"),
    )


def probe(settings: Settings, driver: ProbedDriver) -> NodeProbe:
    cgroups = Cgroups(settings.runtime.cgroup_root, settings.runtime.proc_root)
    may_set = settings.driver_limits.set_by_agent

    async def check() -> None:
        await check_driver_limits(driver, cgroups, may_set=may_set)
        if not may_set:
            # Before a container runs it is not known whether NVIDIA's toolkit sets them.
            raise Unavailable("the agent does not set the driver's limits (driver_limits.set_by_agent)")

    standing = Standing(place=50, because="the driver limits memory, nothing here limits compute")
    return NodeProbe(check=check, standing=standing)


def _shares(host: IsolationHost) -> dict[ContainerKey, list[MemoryShare]]:
    gpus, found = host.node.gpus().by_uuid(), dict[ContainerKey, list[MemoryShare]]()
    for key, allocation in host.node.cache.view().items():
        # A pod that is not known yet uses none: it is taken up in the next round.
        if not allocation.is_limited or not allocation.gpus or not host.uses(allocation, "driver"):
            continue
        sharers = host.node.claim_pods.sharers(key)
        # The driver limits cgroups: for a claim, that of each container that uses it.
        users = [key] if sharers is None else list(sharers)
        shares = memory_shares(allocation, gpus, host.node.names, users)
        for user in users:
            found.setdefault(user, []).extend(shares)
    return found
