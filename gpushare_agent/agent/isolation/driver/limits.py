"""Keeps the driver's memory limit on the cgroup of every container with a share under isolation driver.

Level-triggered: each round compares the running containers with the driver's limits, so it does not matter who set a limit:
the agent before a restart, NVIDIA's container toolkit, or nobody. If the agent may set limits
(driver_limits.set_by_agent) it sets what differs; else it only reads, and reports containers without.

A container's cgroup is made after PreStartContainer, and found a moment later. So the agent limits the pod's cgroup too,
which is there before, to the sum of the pod's shares: with one share in the pod it holds from the first instruction on.
The containers of a pod that use one ResourceClaim each have its limit, and together the pod's.

State owned: the IDs of the containers, which of them run without their limit and why, and which use more than it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NoReturn

import structlog
from msgspec import Struct, field

from gpushare_agent.agent.isolation.container_ids import ContainerIds
from gpushare_agent.agent.isolation.driver.edits import MemoryShare, pod_memory
from gpushare_agent.agent.isolation.part import IsolationPart
from gpushare_agent.agent.runtime.cgroups import CgroupDir, Cgroups, CgroupVersion
from gpushare_agent.core.kit.supervision import Reconciler, ReportOnce
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.errors import AgentError, RefusalReason, Refused, Unavailable
from gpushare_agent.core.model.isolation import MemoryLimit, MemoryLimiter
from gpushare_agent.core.model.names import PodUid

log = structlog.get_logger(__name__)

PERIOD_S = 5.0
NEW_PERIOD_S = 0.5
"""The period while a container with a share is not known to run yet."""
NEW_FOR_S = 60.0
"""The time after the last start of a container or the agent. A container that is unknown for longer, such as an init
container that has ended, is looked for at each PERIOD_S only."""


async def check_driver_limits(driver: MemoryLimiter, cgroups: Cgroups, *, may_set: bool) -> None:
    """Cgroup v2, a driver that limits its cgroups' memory, and the right to set that where the agent `may_set` it. Raises
    AgentError with the remedy."""
    version = await cgroups.version_in_thread()
    if version is not CgroupVersion.V2:
        raise Unavailable(
            f"{cgroups.root} has cgroup {version}, and the driver limits cgroups of v2 alone: move the node to cgroup v2, "
            "or choose another isolation"
        )
    await driver.check_memory_limits(cgroups.root, may_set=may_set)


Shares = Mapping[ContainerKey, Sequence[MemoryShare]]
"""By container."""


class DriverLimits(Struct, IsolationPart, kw_only=True, eq=False):
    """`check` first, `prepare` at any time, `run` once. `on_missing` hears of a container that runs without its limit."""

    driver: MemoryLimiter
    cgroups: Cgroups
    containers: ContainerIds
    shares: Callable[[], Shares]
    may_set: bool
    on_missing: Callable[[ContainerKey, str], None]
    _ids: dict[ContainerKey, str] = field(default_factory=dict)
    _problems: dict[ContainerKey, str] = field(default_factory=dict)
    _excess_bytes: dict[ContainerKey, int] = field(default_factory=dict)
    _one_round: asyncio.Lock = field(default_factory=asyncio.Lock)
    _reconciler: Reconciler = field(default_factory=Reconciler)
    _new_until: float = float("-inf")
    _failure: ReportOnce = field(default_factory=ReportOnce)

    def __post_init__(self) -> None:
        self.services = {"driver limits": self}
        self.is_memory_fixed = not self.may_set  # a limit that NVIDIA's toolkit sets is not changed afterwards

    def problem(self, key: ContainerKey) -> str:
        """Why the container, or one that uses the claim, runs without its limit; empty if it has it or does not run."""
        # Asked of every share at each scrape.
        if not self._problems:
            return ""
        return next((why for user in self._users(self.shares(), key) if (why := self._problems.get(user))), "")

    async def check(self) -> None:
        """Checks that the node has what the isolation needs. Raises AgentError with the remedy."""
        await check_driver_limits(self.driver, self.cgroups, may_set=self.may_set)

    async def prepare(self, keys: Collection[ContainerKey]) -> Refused | None:
        """Limits the pods' cgroups of containers that are about to start, if the agent may."""
        shares = self.shares()
        uids = {user.pod_uid for key in keys for user in self._users(shares, key)}
        if not uids:
            return None
        self._expect_new()
        # The container's cgroup comes after PreStartContainer: the rounds look for it more often for a minute.
        self._reconciler.request()
        if not self.may_set:
            return None
        try:
            # The pod's cgroup is there already: with one share in the pod its limit holds from the first instruction on.
            limits = await self._pod_limits(shares, uids)
            outcomes = await self.driver.keep_memory_limits(limits, may_set=True) if limits else []
        except AgentError as e:
            return _not_set(str(e))
        problem = next((one.problem for one in outcomes if one.problem and not one.has_no_controller), "")
        return _not_set(problem) if problem else None

    async def run(self) -> NoReturn:
        """Until cancelled. A round that fails is logged, once for each error, and repeated."""
        self._expect_new()
        self._reconciler.request()
        await self._reconciler.run(self._try, self._period_s)

    async def _try(self) -> None:
        try:
            await self.reconcile()
            if self._failure.is_over():
                log.info("memory_limits_read_again")
        except AgentError as e:
            if self._failure.is_new(str(e)):
                log.warning("memory_limits_not_read", error=str(e), then="the next round tries again")

    def _expect_new(self) -> None:
        self._new_until = asyncio.get_running_loop().time() + NEW_FOR_S

    def _period_s(self) -> float:
        # Only for a minute: an init container that has ended stays without an ID for as long as its pod lives.
        has_unknown = any(key not in self._ids for key in self.shares())
        return NEW_PERIOD_S if has_unknown and asyncio.get_running_loop().time() < self._new_until else PERIOD_S

    async def enforce(self, allocation: Allocation) -> str:
        """Sets the limits after a resize: why the container has not its limit of now, or still uses more; empty where all is
        well. Raises AgentError."""
        key = allocation.key
        await self.reconcile()
        users = [user for user in self._users(self.shares(), key) if user in self._ids]
        if not users:
            return "the container is not known to run yet"
        if excess := sum(self._excess_bytes.get(user, 0) for user in users):
            return f"its processes still have {excess >> 20} MiB more"
        return self.problem(key)

    async def reconcile(self) -> None:
        """One round over all containers with a share. Raises AgentError."""
        # A resize also calls `reconcile`, between the rounds: of two at once the slower would set the old limit.
        async with self._one_round:
            await self._reconcile()

    async def _reconcile(self) -> None:
        shares = self.shares()
        places = await self._find(shares)
        limits = [
            (key, MemoryLimit(gpu=gpu, cgroup=places[key].path, limit_bytes=limit_bytes))
            for key in sorted(places)
            for gpu, limit_bytes in sorted(pod_memory(shares[key]).items())
        ]
        desired = [limit for _, limit in limits]
        pods = await self._pod_limits(shares, {key.pod_uid for key in places}) if self.may_set else []
        outcomes = await self.driver.keep_memory_limits([*pods, *desired], may_set=self.may_set) if desired else []
        self._excess_bytes = {}
        problems = dict.fromkeys(places, "")
        for (key, limit), outcome in zip(limits, outcomes[len(pods) :], strict=True):
            if (excess := outcome.used_bytes - limit.limit_bytes) > 0:
                self._excess_bytes[key] = self._excess_bytes.get(key, 0) + excess
            # The first problem of a container counts. A container without its cgroup has ended, which is no problem.
            problems[key] = problems[key] or ("" if outcome.is_gone else outcome.problem)
        before, self._problems = self._problems, {key: why for key, why in problems.items() if why}
        for key, why in sorted(self._problems.items()):
            if why != before.get(key):
                self.on_missing(key, why)  # an Event of the pod, once for each problem

    def _users(self, shares: Shares, key: ContainerKey) -> list[ContainerKey]:
        """The containers with this allocation."""
        return sorted(user for user, parts in shares.items() if any(part.key == key for part in parts))

    async def _find(self, shares: Shares) -> dict[ContainerKey, CgroupDir]:
        """The cgroups of running containers. The runtime is asked while one of them is not known."""
        self._ids = {key: id_ for key, id_ in self._ids.items() if key in shares}
        # The runtime is asked only then: an ID stays a container's until its cgroup is gone.
        if any(key not in self._ids for key in shares):
            running = await self.containers.running()
            self._ids |= {key: id_ for key, id_ in running.items() if key in shares}
        if not self._ids:
            return {}
        found = await self.cgroups.find_many_in_thread([(id_, key.pod_uid) for key, id_ in self._ids.items()])
        self._ids = {key: id_ for key, id_ in self._ids.items() if id_ in found}  # the others have ended
        return {key: found[id_] for key, id_ in self._ids.items()}

    async def _pod_limits(self, shares: Shares, uids: Collection[PodUid]) -> list[MemoryLimit]:
        """The limits of these pods, if they have a cgroup. Raises Unavailable."""
        if not uids:
            return []
        directories = await self.cgroups.find_pod_directories_in_thread(uids)
        return [
            MemoryLimit(gpu=gpu, cgroup=directories[uid], limit_bytes=limit_bytes)
            for uid in sorted(directories)
            for gpu, limit_bytes in sorted(
                pod_memory(s for key, parts in shares.items() if key.pod_uid == uid for s in parts).items()
            )
        ]


def _not_set(why: str) -> Refused:
    return Refused(
        reason=RefusalReason.NOT_READY,
        detail=f"the driver's memory limit of the pod's cgroup cannot be set: {why}. The kubelet tries again.",
    )
