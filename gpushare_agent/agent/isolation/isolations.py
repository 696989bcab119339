"""Keeps shares real on this node: the parts of the isolations in use, the vDevice directories of those that mount them, and
the names of GPUs for CDI."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import structlog
from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.agent.delivery.cdi_specs import CdiWatch, cdi_specs
from gpushare_agent.agent.delivery.device_lists import strategy_warnings
from gpushare_agent.agent.delivery.volume_config import driver_volumes
from gpushare_agent.agent.delivery.volume_plan import DriverVolume, VolumeName
from gpushare_agent.agent.isolation import ISOLATIONS, Isolation, mounts_driver
from gpushare_agent.agent.isolation.kept import WHOLE_GPU, IsolationFacts, Kept, ProbeResult, kept_together
from gpushare_agent.agent.isolation.part import (
    AvailabilityWatch,
    Check,
    IsolationDriver,
    IsolationHost,
    IsolationPart,
    build_part,
    build_probes,
    pods_with_files,
)
from gpushare_agent.agent.isolation.request import Follows
from gpushare_agent.agent.isolation.vdevice.virtual_manager import VirtualManager, build_virtual_manager
from gpushare_agent.agent.node import Node
from gpushare_agent.agent.runtime.cgroups import Cgroups
from gpushare_agent.agent.runtime.cri import runtime_client
from gpushare_agent.agent.runtime.machine import read_kernel_module
from gpushare_agent.core.kit.supervision import Runs, Tasks, bodies
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.errors import NodeEventReason, Refused
from gpushare_agent.core.model.gpus import KernelModule
from gpushare_agent.core.model.isolation import DeviceListStrategy, Sharing, isolation_parts
from gpushare_agent.core.model.names import ISOLATION_ANNOTATION, GpuUuid, PodUid
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.model.usage import UsageRound
from gpushare_agent.core.settings.settings import Settings

log = structlog.get_logger(__name__)


class Isolations(Struct, kw_only=True, eq=False):
    """`vdevices` and `cdi_watch` are None where nothing on this node needs them. `former`, from `start` on, are the parts
    that are not in use any more, with the pods that still have their files: these are prepared as before, until they end."""

    host: IsolationHost
    kernel_module: KernelModule | None
    """As it was at the agent's start: after an update of the driver the agent is restarted."""
    parts: Mapping[str, IsolationPart]
    """Of those in use that need something on the host, combinations by their parts."""
    watches: Mapping[str, AvailabilityWatch]
    """Of the same."""
    vdevices: VirtualManager | None
    cdi_watch: CdiWatch | None
    former: Sequence[tuple[IsolationPart, frozenset[PodUid]]] = ()

    async def start(self) -> None:
        """What must be there before a call of the kubelet is answered: files, the daemon's state, the names of CDI."""
        # Not at the build: until now another agent may have given shares under its own isolation.
        await self._find_former()
        for watch in self.watches.values():
            await watch.poll()
        if self.cdi_watch is not None:
            await self.cdi_watch.check()
        for text in device_list_warnings(self.host.node.settings, self.host.volumes):
            log.warning("device_list_strategy", detail=text)

    async def _find_former(self) -> None:
        settings, host = self.host.node.settings, self.host
        probes = build_probes(settings, host.driver)
        of_before = await pods_with_files({n: p for n, p in probes.items() if n not in settings.isolation_parts_in_use})
        self.former = [(part, pods) for n, pods in of_before.items() if (part := build_part(n, host)) is not None]
        # One for all: two managers would bind one socket by turns. Where none is in use, only for who has a directory.
        if self.vdevices is None and of_before:
            only = frozenset[PodUid]().union(*of_before.values())
            self.vdevices = build_virtual_manager(host, self.kernel_module, only)

    def tasks(self) -> Tasks:
        services: dict[str, Runs | None] = {"cdi specs": self.cdi_watch, "virtual manager": self.vdevices}
        for part in self.parts.values():
            services |= part.services
        return bodies(services | {f"isolation {name}": watch for name, watch in self.watches.items()})

    def looks(self) -> Mapping[str, Check]:
        """What the isolations in use need on this node, by name."""
        return {f"isolation {name}": watch.look for name, watch in self.watches.items()}

    async def log_contradictions(self) -> None:
        """Logs, once, where the node contradicts the settings."""
        for part in self.parts.values():
            await part.log_contradictions()

    async def prepare(self, keys: Collection[ContainerKey]) -> Refused | None:
        """Everything that containers about to start need on the host. Every share is prepared for every isolation in use,
        for a pod's annotation may change; but what a pod's own isolation does not need keeps it from nothing."""
        cache = self.host.node.cache
        keys = [key for key in keys if (found := cache.get(key)) is None or not found.started_by]
        # All before the answer: the other files are there when the kubelet calls again.
        answers = {name: await part.prepare(keys) for name, part in self.parts.items()}
        for part, pods in self.former:
            if (refused := await part.prepare([key for key in keys if key.pod_uid in pods])) is not None:
                return refused
        # Last: a part may have replaced a container's directory.
        of_vdevices = await self.vdevices.prepare(keys) if self.vdevices is not None else None
        needed = {name for key in keys for name in self._needed(key)}
        for name in self.parts:
            refused = (of_vdevices if ISOLATIONS[name].mounts_vdevice else None) or answers[name]
            if refused is not None and name in needed:
                return refused
        return None

    def prepare_ahead(self, key: ContainerKey) -> None:
        """The container was allocated a moment ago and starts soon: what takes time on the disk begins now."""
        if self.vdevices is not None:
            self.vdevices.ahead.add(key)
        for part in self.parts.values():
            part.prepare_ahead(key)

    def isolation_name(self, allocation: Allocation) -> str | None:
        """The pod's, None where the pod is not known, names none that the node allows, or names none and has run since the
        node had another; of replicas of GPUs under NVIDIA's names what limits those."""
        sharing = allocation.sharing
        # By the allocation, not by the setting of now: a replica keeps the terms that it was given with.
        if sharing is not None and sharing.isolation:
            return sharing.isolation
        pod = self.host.node.pods.get(allocation.key.pod_uid)
        # No file tells which it was created under, of those that were in use before.
        if pod is not None and ISOLATION_ANNOTATION not in pod.annotations and self._former(allocation):
            return None
        return self.host.chosen(allocation)

    def _former(self, allocation: Allocation) -> list[IsolationPart]:
        is_limited, uid = allocation.is_limited, allocation.key.pod_uid
        return [part for part, pods in self.former if is_limited and uid in pods]

    def kept(self, allocation: Allocation) -> Kept | None:
        """What of the container's share is kept, and by whom; None if its isolation is not known."""
        chosen = self.isolation_name(allocation)
        if chosen is None:
            return None
        if allocation.is_whole:
            return WHOLE_GPU
        # An allocation from before a change of the settings may be under one that is no longer in use.
        failing = {name for name, part in self.parts.items() if part.problem(allocation.key)}
        return kept_together([ISOLATIONS[name].keeps for name in isolation_parts(chosen) if name not in failing])

    def problem(self, key: ContainerKey) -> str:
        """Why the container was found to run without a limit, empty if it has all of them."""
        return next((why for part in self.parts.values() if (why := part.problem(key))), "")

    def facts(self) -> tuple[IsolationFacts, ...]:
        """What a share under each isolation in use has."""
        return tuple(
            IsolationFacts(
                name=name,
                unavailable_reason=self.unavailable_reason(name),
                kept=ISOLATIONS[name].keeps,
                probe=next(filter(None, map(self.probed, isolation_parts(name))), None),
            )
            for name in sorted(self.host.node.settings.isolations_in_use)
        )

    def probed(self, part: str) -> ProbeResult | None:
        """The result of the agent's own program under this isolation, which is no combination: was it limited?"""
        return self.parts[part].probed() if part in self.parts else None

    def changed(self, uid: PodUid | None = None) -> None:
        """The pod or claim, an allocation of it, or (None) a GPU."""
        if self.vdevices is not None:
            self.vdevices.changed(uid)
        for part in self.parts.values():
            part.changed(uid)

    def follow_usage(
        self, subscribe: Callable[[Callable[[UsageRound | None], None]], None], request: Callable[[], None]
    ) -> None:
        """Lets them hear of each round of usage sampling, and request more."""
        for part in self.parts.values():
            subscribe(part.usage_sampled)
            part.request_usage = request

    def paid(self, key: ContainerKey, uuid: GpuUuid) -> float | None:
        """What a container pays for its launches, of the GPU's time, if an isolation counts that and there were any."""
        return next((found for part in self.parts.values() if (found := part.paid(key, uuid)) is not None), None)

    def unavailable_reason(self, isolation: str) -> str:
        """Why no share of this isolation is available now, and the remedy; empty if it is."""
        watches = [self.watches[part] for part in isolation_parts(isolation) if part in self.watches]
        return "; ".join(watch.unavailable_reason for watch in watches if watch.unavailable_reason)

    def max_shares_of_gpu(self) -> int | None:
        """The least of the isolations in use; None if none has a limit."""
        return min((most for part in self.parts.values() if (most := part.max_shares_of_gpu) is not None), default=None)

    def isolation_of(self, allocation: Allocation) -> Isolation | None:
        """What is to follow a resize of the share; None where `IsolationHost.chosen` has none."""
        chosen = self.host.chosen(allocation)
        if chosen is None:
            return None
        if any(self.parts[name].is_memory_fixed for name in isolation_parts(chosen) if name in self.parts):
            # Of a combination too: the resize is refused if one part cannot follow.
            return replace(ISOLATIONS[chosen], memory_follows=Follows.NOBODY)
        return ISOLATIONS[chosen]

    async def enforce(self, allocation: Allocation) -> str:
        """Why a resized share's limits are not what they are to be (yet), empty where they are. Raises AgentError."""
        if (chosen := self.host.chosen(allocation)) is None:
            return "the pod's isolation is not in use on this node"
        names, former = isolation_parts(chosen), self._former(allocation)
        if self.vdevices is not None and (former or any(ISOLATIONS[name].mounts_vdevice for name in names)):
            await self.vdevices.enforce(self.host.share_of(allocation.key))
        # A program that runs has the library that was there when its container was created.
        for part in [*former, *(self.parts[name] for name in names if name in self.parts)]:
            if problem := await part.enforce(allocation):
                return problem
        return ""

    def _needed(self, key: ContainerKey) -> tuple[str, ...]:
        allocation, node = self.host.node.cache.get(key), self.host.node
        # A pod that is not known has no annotation: it counts as one under the node's.
        is_known = allocation is not None and (allocation.claim is not None or node.pods.get(key.pod_uid) is not None)
        chosen = self.host.chosen(allocation) if allocation is not None and is_known else node.settings.isolation
        return isolation_parts(chosen) if chosen is not None else ()

    def has_no_shares(self) -> bool:
        """Whether no isolation can be had: the kubelet sees no memory then; else admission refuses the shares whom it
        concerns. An agent that registers before it has checked holds the kubelet's calls until then."""
        # What was not checked yet is not missing: to report no memory at each start would turn pods away.
        is_checked = all(watch.is_checked for watch in self.watches.values())
        return is_checked and all(map(self.unavailable_reason, self.host.node.settings.isolations_in_use))

    def has_no_replicas(self) -> bool:
        """True if what limits replicas under NVIDIA's names is not available."""
        sharing = self.host.node.settings.nvidia.sharing
        if sharing is Sharing.SHARES:
            return self.has_no_shares()
        watch = self.watches.get(sharing.isolation)
        return watch is not None and watch.is_checked and bool(watch.unavailable_reason)


def build(
    node: Node,
    warn: Callable[[Pod, str, str], None],
    driver: IsolationDriver,
    *,
    note: Callable[[NodeEventReason, str, str], None] = lambda reason, about, text: None,
    choose_again: Callable[[str], None] = lambda reason: None,
) -> Isolations:
    """Joined, not started. Raises StartupError for settings that contradict each other."""
    settings = node.settings
    # Simulated GPUs: whatever driver this machine has is not theirs.
    module = read_kernel_module(settings.runtime.proc_root) if settings.driver == "nvml" else None
    host = IsolationHost(
        node=node,
        warn=warn,
        note=note,
        # Only where `auto` chose: what the operator has set is refused with the reason, never replaced.
        choose_again=choose_again if node.isolation_reason else lambda reason: None,
        driver=driver,
        runtime=runtime_client(settings),
        cgroups=Cgroups(settings.runtime.cgroup_root, settings.runtime.proc_root),
        volumes=driver_volumes(settings, is_mounted=mounts_driver(settings)),
    )
    in_use = [name for name in ISOLATIONS if name in settings.isolation_parts_in_use]
    parts = {name: part for name in in_use if (part := build_part(name, host)) is not None}
    is_mounted = any(ISOLATIONS[name].mounts_vdevice for name in in_use)
    vdevices = build_virtual_manager(host, module) if is_mounted else None
    watches = {name: _watch(name, part, vdevices) for name, part in parts.items()}
    # An incoming instance has checked nothing yet: without a row the alert GpushareIsolationUnavailable does not fire.
    node.metrics.show_isolations(
        lambda: {name: not watch.unavailable_reason for name, watch in watches.items() if watch.is_checked}
    )
    return Isolations(
        host=host,
        kernel_module=module,
        parts=parts,
        watches=watches,
        vdevices=vdevices,
        cdi_watch=CdiWatch(cdi_specs(settings, mounts_driver=mounts_driver(settings)), lambda: node.gpus().gpus)
        if {DeviceListStrategy.CDI_ANNOTATIONS, DeviceListStrategy.CDI_CRI}.intersection(settings.device_list_strategy)
        else None,
    )


def _watch(name: str, part: IsolationPart, vdevices: VirtualManager | None) -> AvailabilityWatch:
    checks, looks = [part.check], [part.look]
    if vdevices is not None and ISOLATIONS[name].mounts_vdevice:
        checks, looks = [vdevices.check, *checks], [vdevices.look, *looks]
    return AvailabilityWatch(name, checks, looks, part.check_period_s)


def device_list_warnings(settings: Settings, volumes: Mapping[VolumeName, DriverVolume]) -> list[str]:
    """What of the device lists contradicts itself or does nothing under the node's isolation. `volumes`: driver_volumes'."""
    mounts_driver = settings.driver_volume.mount or ISOLATIONS[settings.isolation].mounts_driver
    return strategy_warnings(
        settings.device_list_strategy,
        mounts_driver=mounts_driver and bool(volumes),
        # Simulated GPUs have no device nodes unless a setting says so.
        has_gpu_nodes=settings.driver == "nvml" or settings.simulated.device_nodes,
    )
