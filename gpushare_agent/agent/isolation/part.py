"""What an isolation in use does on a node in addition to its edits, and what its services are made from.

A package with something on the host has a module `part` with `build(host) -> IsolationPart`; the agent joins what it finds
there (isolations.py) and names no isolation. One that the setting `auto` may choose, or that needs what a sandbox
does not bring, has there `probe(settings, driver) -> NodeProbe` too.

`AvailabilityWatch` repeats a part's `check`. What an isolation needs belongs to the deployer (a library, a daemon, a
driver): it may go and come while the agent runs, and the agent then refuses the shares that need it and nothing else. State
owned, by the watch: why the isolation is unavailable, empty while it is available.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import NoReturn, Protocol

import structlog
from msgspec import Struct, field

from gpushare_agent.agent.delivery.volume_plan import DriverVolume, VolumeName
from gpushare_agent.agent.isolation import ISOLATIONS, module_of
from gpushare_agent.agent.isolation.choice import Standing
from gpushare_agent.agent.isolation.kept import ProbeResult
from gpushare_agent.agent.node import Node
from gpushare_agent.agent.runtime.cgroups import Cgroups
from gpushare_agent.agent.runtime.cri import RuntimeClient
from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.kit.supervision import Runs
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.errors import AgentError, NodeEventReason, Refused
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.isolation import MemoryLimiter, choose_isolation, isolation_parts
from gpushare_agent.core.model.names import GpuUuid, PodUid
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.model.usage import SamplesBusy, UsageRound
from gpushare_agent.core.settings.settings import Settings

log = structlog.get_logger(__name__)

Check = Callable[[], Awaitable[object]]
FILES_TIMEOUT_S = 5.0


class ProbedDriver(MemoryLimiter, Protocol):
    """What a look at the node asks of the GPUs' driver."""

    async def read(self) -> GpuInventory: ...


class IsolationDriver(ProbedDriver, SamplesBusy, Protocol):
    """What isolations ask of the GPUs' driver."""


class IsolationHost(Struct, frozen=True, kw_only=True):
    """The node, for the services of isolations. `warn` records an Event of a pod: its reason and its text, `note` one of
    the node: its reason, what it is about, its text. `choose_again` has `auto` choose again, for this reason; it does
    nothing where the operator chose."""

    node: Node
    warn: Callable[[Pod, str, str], None]
    note: Callable[[NodeEventReason, str, str], None]
    choose_again: Callable[[str], None]
    driver: IsolationDriver
    runtime: RuntimeClient
    cgroups: Cgroups
    volumes: Mapping[VolumeName, DriverVolume]

    def chosen(self, allocation: Allocation) -> str | None:
        """The isolation that the share's claim or pod names, else the node's; None where the node does not allow it, while
        the pod is not known, and where another program started the container."""
        settings = self.node.settings
        if allocation.claim is not None:
            name = allocation.claim.isolation
            return name if name in (settings.isolation, *settings.isolations_allowed) else None
        if allocation.started_by or (pod := self.node.pods.get(allocation.key.pod_uid)) is None:
            return None
        chosen = choose_isolation(pod.annotations, settings.isolation, settings.isolations_allowed)
        return None if isinstance(chosen, Refused) else chosen

    def uses(self, allocation: Allocation, name: str) -> bool:
        """Whether the share's isolation is the one of this name, or has it as a part."""
        return name in isolation_parts(self.chosen(allocation) or "")

    def warn_of(self, key: ContainerKey, reason: str, text: str) -> None:
        """A Warning on the pod of a container, or on those that use a claim: `text` goes on behind its name."""
        for pod in self.node.claim_pods.using(key.pod_uid):
            self.warn(pod, reason, f"{'container' if pod.uid == key.pod_uid else 'claim'} {key.container} {text}")

    def share_of(self, key: ContainerKey) -> ContainerKey:
        """The share that an allocation is part of: a container may use several results of a claim, and has one directory and
        one share for all of them."""
        allocation = self.node.cache.get(key)
        if allocation is not None and allocation.claim is not None and allocation.claim.view:
            return ContainerKey(key.pod_uid, allocation.claim.view)
        return key


class IsolationPart:
    """As it is: an isolation that needs nothing on the host. The vDevice directories are not a part's: isolations.py has
    them for all whose containers mount them."""

    check_period_s = 5.0
    is_memory_fixed = False
    """Nobody changes the memory of a container that runs."""
    max_shares_of_gpu: int | None = None
    """None: as many as fit."""
    services: Mapping[str, Runs] = {}
    request_usage: Callable[[], None] = staticmethod(lambda: None)
    """Requests a further round of usage sampling, which may else be rare."""

    async def check(self) -> None:
        """Bounded. Raises AgentError with what is missing on the node and the remedy."""

    async def look(self) -> None:
        """Like `check`, but changes nothing: for an agent next to the one that serves."""
        await self.check()

    async def prepare(self, keys: Collection[ContainerKey]) -> Refused | None:
        """Makes what containers need that are about to start."""
        return None

    def prepare_ahead(self, key: ContainerKey) -> None:
        """Begins with that for one that was allocated now."""

    async def enforce(self, allocation: Allocation) -> str:
        """Why a resized share's limits are not what they are to be (yet), empty where they are. Raises AgentError."""
        return ""

    def changed(self, uid: PodUid | None) -> None:
        """A pod or an allocation of it, a claim's, or (None) a GPU."""

    def usage_sampled(self, usage: UsageRound | None) -> None:
        """A round, as UsageSampling tells it."""

    def paid(self, key: ContainerKey, uuid: GpuUuid) -> float | None:
        """What a container pays for its launches, of the GPU's time, where the isolation counts that and there were any."""
        return None

    def problem(self, key: ContainerKey) -> str:
        """Why the container was found to run without its limit, the same object while it does; empty if it has it."""
        return ""

    def probed(self) -> ProbeResult | None:
        """Whether a program of the agent's own was limited on this node."""
        return None

    async def log_contradictions(self) -> None:
        """Where the node contradicts the settings, once, in the log."""


def build_part(name: str, host: IsolationHost) -> IsolationPart | None:
    """The part of an isolation that is no combination; None of one that needs nothing on the host."""
    module = module_of(name, "part")
    found: IsolationPart | None = module.build(host) if module is not None else None
    return found


class NodeProbe(Struct, frozen=True, kw_only=True):
    """Whether an isolation can be had on a node where its part does not run: `check` is bounded, and raises AgentError with
    the remedy. `pods` are those with files of it, because it must stay theirs while they run; bounded by the caller.
    `is_for_sandbox`: simulated GPUs need the same; `note` is what they do without, empty where nothing is missing.
    `standing` is when `auto` takes it."""

    check: Check
    standing: Standing
    pods: Callable[[], Sequence[PodUid]] | None = None
    is_for_sandbox: bool = False
    note: str = ""


def build_probes(settings: Settings, driver: ProbedDriver) -> dict[str, NodeProbe]:
    """The probe of every isolation that has one, by name."""
    # A combination needs what its parts need, and `auto` combines by itself (choice.py).
    single = [name for name in ISOLATIONS if len(isolation_parts(name)) == 1]
    makers = {name: getattr(module_of(name, "part"), "probe", None) for name in single}
    return {name: make(settings, driver) for name, make in makers.items() if make is not None}


async def pods_with_files(probes: Mapping[str, NodeProbe]) -> dict[str, frozenset[PodUid]]:
    """By isolation, the pods with files of it, where there are any. What does not answer is logged and left out: an agent
    that waits for a slow disk serves nobody."""
    thread = DaemonThread("isolation-files", advice="Check the disks of the isolations' directories.")
    found = dict[str, frozenset[PodUid]]()
    for name, list_pods in ((name, probe.pods) for name, probe in probes.items() if probe.pods is not None):
        try:
            found[name] = frozenset(await thread.call(list_pods, "listing the isolations' files", FILES_TIMEOUT_S))
        except AgentError as e:
            log.warning("running_shares_unknown", isolation=name, error=str(e))
    return {name: pods for name, pods in found.items() if pods}


class AvailabilityWatch(Struct, eq=False):
    """`checks` are bounded, and raise AgentError with what is missing and the remedy; the first that raises counts.
    `period_s` is from the end of one round to the beginning of the next; they never overlap. `looks` do the same without
    putting anything in its place on the node."""

    isolation: str
    checks: Sequence[Check]
    looks: Sequence[Check]
    period_s: float
    is_checked: bool = False
    unavailable_reason: str = ""
    """Why no share can be had now, and the remedy; empty when it can."""
    _callbacks: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unavailable_reason = f"isolation {self.isolation} has not been checked yet"

    def subscribe(self, callback: Callable[[], None]) -> None:
        """`callback` is called after each change of `unavailable_reason`."""
        self._callbacks.append(callback)

    async def look(self) -> None:
        """For an agent next to the one that serves. Raises AgentError."""
        for look in self.looks:
            await look()

    async def run(self) -> NoReturn:
        """Until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(self.period_s)

    async def poll(self) -> None:
        reason = ""
        try:
            for check in self.checks:
                await check()
        # Any other exception is a bug and ends the agent; Kubernetes restarts it.
        except AgentError as error:
            reason = str(error)
        self.is_checked = True
        before, self.unavailable_reason = self.unavailable_reason, reason
        # The text alone decides: a reason that stays is logged once, not every five seconds.
        if reason == before:
            return
        if not reason:
            log.info("isolation_available", isolation=self.isolation, then="its shares are allocated")
        else:
            then = "no share of it is allocated; checked again"
            log.error(
                "isolation_unavailable", isolation=self.isolation, reason=reason, then=then, period_s=self.period_s
            )
        for callback in self._callbacks:
            callback()
