"""What an isolation in use does on a node besides its edits, as one value, and what its services are made from.

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

from gpushare_agent.isolation import ISOLATIONS, module_of
from gpushare_agent.isolation.choice import Standing
from gpushare_agent.isolation.driver_volume.plan import DriverVolume, VolumeName
from gpushare_agent.isolation.kept import Circumstances, ProbeResult
from gpushare_agent.isolation.vdevice.virtual_manager import VirtualManager
from gpushare_agent.kit.supervision import Runs
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.errors import AgentError, NodeEventReason, Refused
from gpushare_agent.model.gpus import GpuInventory, KernelModule
from gpushare_agent.model.isolation import MemoryLimiter, isolation_parts
from gpushare_agent.model.names import GpuUuid, PodUid
from gpushare_agent.model.pods import ContainerSpec, Pod
from gpushare_agent.model.usage import SamplesBusy, UsageRound
from gpushare_agent.node import Node
from gpushare_agent.runtime.cgroups import Cgroups
from gpushare_agent.runtime.cri import RuntimeClient
from gpushare_agent.settings.settings import Settings

log = structlog.get_logger(__name__)

CHECK_PERIOD_S = 5.0

Check = Callable[[], Awaitable[object]]
Prepare = Callable[[Collection[ContainerKey]], Awaitable[Refused | None]]


class IsolationDriver(MemoryLimiter, SamplesBusy, Protocol):
    """What isolations ask of the GPUs' driver."""


class IsolationHost(Struct, frozen=True, kw_only=True):
    """The node, for the services of isolations. `uses` is whether a pod's isolation is the one of this name, or has it
    as a part; `warn` records an Event of a pod: its reason and its text, `note` one of the node: its reason, what it is
    about, its text. `choose_anew` has `auto` choose again, for this reason; it does nothing where the operator chose.
    `module` is the driver's as it was at the agent's start: after an update of the driver the agent is restarted. `vdevices`
    makes the vDevice directories, one service for all isolations whose containers mount them."""

    node: Node
    uses: Callable[[Pod, str], bool]
    warn: Callable[[Pod, str, str], None]
    note: Callable[[NodeEventReason, str, str], None]
    choose_anew: Callable[[str], None]
    driver: IsolationDriver
    runtime: RuntimeClient
    cgroups: Cgroups
    module: KernelModule | None
    volumes: Mapping[VolumeName, DriverVolume]
    vdevices: Callable[[], VirtualManager]


async def _nothing_to_enforce(allocation: Allocation, pod: Pod) -> str:
    """Nothing of a running container can be changed, so nothing was."""
    return ""


class IsolationPart(Struct, frozen=True, kw_only=True):
    """An isolation that needs nothing on the host has all of the defaults.

    `check` is bounded, and raises AgentError with what is missing on the node and the remedy; `look` does the same without
    putting anything in its place, for an agent beside the one that serves, and is `check` where that is None. `prepare`
    makes what containers that are about to start need, in this order; `prepare_ahead` begins with it for one that was
    allocated now. A function that several isolations have there is called once for all of them.
    `enforce` answers why a resized share's limits are not what they are to be (yet), empty where they are, and raises
    AgentError; `is_memory_fixed` where nobody changes the memory of a container that runs. `problem` is why a container
    runs without its limit. `circumstances` adds what is known of one share (None: of any) to what is kept of it.
    """

    services: Mapping[str, Runs] = field(default_factory=dict)
    check: Check | None = None
    look: Check | None = None
    check_period_s: float = CHECK_PERIOD_S
    prepare: tuple[Prepare, ...] = ()
    prepare_ahead: tuple[Callable[[ContainerKey], None], ...] = ()
    enforce: Callable[[Allocation, Pod], Awaitable[str]] = _nothing_to_enforce
    is_memory_fixed: bool = False
    max_shares_of_gpu: int | None = None
    """None: as many as fit."""
    changed: Callable[[], None] | None = None
    """An allocation, a pod or a GPU."""
    usage_sampled: Callable[[UsageRound | None], None] | None = None
    request_usage_by: Callable[[Callable[[], None]], None] | None = None
    """It is handed what requests further rounds, which may else be rare."""
    paid: Callable[[ContainerKey, GpuUuid], float | None] = lambda key, uuid: None
    """What a container pays for its launches, of the GPU's time, where the isolation counts that and there were any."""
    problem: Callable[[ContainerKey], str] = lambda _: ""
    circumstances: Callable[[Circumstances, Allocation | None, ContainerSpec | None], Circumstances] = (
        lambda found, allocation, container: found
    )
    probed: Callable[[], ProbeResult | None] = lambda: None
    """Whether a program of the agent's own was limited on this node."""
    log_contradictions: Callable[[], Awaitable[None]] | None = None
    """Where the node contradicts the settings, once, in the log."""


def build_part(name: str, host: IsolationHost) -> IsolationPart:
    """The part of an isolation that is no combination; without a module `part` it needs nothing on the host."""
    module = module_of(name, "part")
    found: IsolationPart = module.build(host) if module is not None else IsolationPart()
    return found


async def all_of(*checks: Check | None) -> None:
    """Runs the checks in order; the first that raises ends it."""
    for check in checks:
        if check is not None:
            await check()


class NodeProbe(Struct, frozen=True, kw_only=True):
    """Whether an isolation can be had on a node where its part does not run: `check` is bounded, and raises AgentError with
    the remedy. `pods` are those with files of it, for it must stay theirs while they run; bounded by the caller.
    `is_for_sandbox`: simulated GPUs need the same; `note` is what they do without, empty where nothing is missing.
    `standing` is when `auto` takes it."""

    check: Check
    standing: Standing
    pods: Callable[[], Sequence[PodUid]] | None = None
    is_for_sandbox: bool = False
    note: str = ""


class ProbedDriver(MemoryLimiter, Protocol):
    """What a look at the node asks of the GPUs' driver."""

    async def read(self) -> GpuInventory: ...


def build_probes(settings: Settings, driver: ProbedDriver) -> dict[str, NodeProbe]:
    """The probe of every isolation that has one, by name."""
    # A combination needs what its parts need, and `auto` combines by itself (choice.py).
    single = [name for name in ISOLATIONS if len(isolation_parts(name)) == 1]
    makers = {name: getattr(module_of(name, "part"), "probe", None) for name in single}
    return {name: make(settings, driver) for name, make in makers.items() if make is not None}


class AvailabilityWatch:
    """`check` is bounded, and raises AgentError with what is missing and the remedy. `period_s` is from the end of one to
    the beginning of the next; they never overlap. `look` does the same without putting anything in its place on the node,
    for an agent beside the one that serves; None where `check` does not either."""

    def __init__(
        self,
        isolation: str,
        check: Callable[[], Awaitable[object]],
        *,
        look: Callable[[], Awaitable[object]] | None = None,
        period_s: float = CHECK_PERIOD_S,
    ) -> None:
        self._isolation = isolation
        self._check = check
        self.look = look or check
        self._period_s = period_s
        self.is_checked = False
        self._unavailable_reason = f"isolation {isolation} has not been checked yet"
        self._callbacks: list[Callable[[], None]] = []

    @property
    def unavailable_reason(self) -> str:
        """Why no share can be had now, and the remedy; empty when it can."""
        return self._unavailable_reason

    def subscribe(self, callback: Callable[[], None]) -> None:
        """`callback` is called after each change of `unavailable_reason`."""
        self._callbacks.append(callback)

    async def run(self) -> NoReturn:
        """Until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(self._period_s)

    async def poll(self) -> None:
        reason = ""
        try:
            await self._check()
        # Any other exception is a bug and ends the agent; Kubernetes restarts it.
        except AgentError as error:
            reason = str(error)
        self.is_checked = True
        before, self._unavailable_reason = self._unavailable_reason, reason
        # The text alone decides: a reason that stays is logged once, not every five seconds.
        if reason == before:
            return
        if not reason:
            log.info("isolation_available", isolation=self._isolation, then="its shares are allocated")
        else:
            log.error(
                "isolation_unavailable",
                isolation=self._isolation,
                reason=reason,
                then="no share of it is allocated; checked again",
                period_s=self._period_s,
            )
        for callback in self._callbacks:
            callback()
