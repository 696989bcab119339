"""What keeps shares real on this node: the services of the isolations in use, and the names of GPUs for CDI.
`ShareEnforcement` lets the isolation of each running share enforce its size of now, for admission/resizing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache, partial

import structlog
from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.isolation import ISOLATIONS, Isolation
from gpushare_agent.isolation.cdi.specs import CdiWatch, cdi_specs
from gpushare_agent.isolation.choice import choose_isolation
from gpushare_agent.isolation.device_lists import strategy_warnings
from gpushare_agent.isolation.driver_volume.config import driver_volumes
from gpushare_agent.isolation.driver_volume.plan import DriverVolume, VolumeName
from gpushare_agent.isolation.kept import Circumstances, IsolationFacts, Kept, ProbeResult
from gpushare_agent.isolation.part import (
    AvailabilityWatch,
    Check,
    IsolationDriver,
    IsolationHost,
    IsolationPart,
    Prepare,
    build_part,
)
from gpushare_agent.isolation.request import Follows
from gpushare_agent.isolation.vdevice.virtual_manager import VirtualManager, build_virtual_manager
from gpushare_agent.kit.supervision import Runs, Tasks, bodies
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.errors import NodeEventReason, Refused
from gpushare_agent.model.gpus import KernelModule
from gpushare_agent.model.isolation import DeviceListStrategy, Sharing, isolation_parts
from gpushare_agent.model.names import GpuUuid, PodUid
from gpushare_agent.model.pods import ContainerSpec, Pod
from gpushare_agent.model.usage import UsageRound
from gpushare_agent.node import Node
from gpushare_agent.runtime.cgroups import Cgroups
from gpushare_agent.runtime.cri import RuntimeClient, runtime_client
from gpushare_agent.runtime.machine import read_kernel_module
from gpushare_agent.settings.settings import Settings

log = structlog.get_logger(__name__)


class Isolations(Struct, frozen=True, kw_only=True):
    """`cdi_watch` is None where nothing on this node needs it."""

    node: Node
    runtime: RuntimeClient
    volumes: Mapping[VolumeName, DriverVolume]
    kernel_module: KernelModule | None
    """As it was at the agent's start: after an update of the driver the agent is restarted."""
    parts: Mapping[str, IsolationPart]
    """Of those in use, combinations by their parts."""
    watches: Mapping[str, AvailabilityWatch]
    """Of those in use that need something on the host."""
    cdi_watch: CdiWatch | None

    async def start(self) -> None:
        """What must be there before a call of the kubelet is answered: files, the daemon's state, the names of CDI."""
        for watch in self.watches.values():
            await watch.poll()
        if self.cdi_watch is not None:
            await self.cdi_watch.check()
        self._log_device_lists()

    def tasks(self) -> Tasks:
        services: dict[str, Runs | None] = {"cdi specs": self.cdi_watch}
        for part in self.parts.values():
            services |= part.services
        watches: dict[str, Runs | None] = {f"isolation {name}": watch for name, watch in self.watches.items()}
        return bodies(services | watches)

    def looks(self) -> Mapping[str, Check]:
        """What the isolations in use need on this node, by name."""
        return {f"isolation {name}": watch.look for name, watch in self.watches.items()}

    async def log_contradictions(self) -> None:
        """Logs, once, where the node contradicts the settings."""
        for part in self.parts.values():
            if part.log_contradictions is not None:
                await part.log_contradictions()

    def _log_device_lists(self) -> None:
        """What of the device lists contradicts itself or does nothing, once, in the log."""
        for text in device_list_warnings(self.node.settings, self.volumes):
            log.warning("device_list_strategy", detail=text)

    async def prepare(self, keys: Collection[ContainerKey]) -> Refused | None:
        """Everything that containers about to start need on the host. Every share is prepared for every isolation in use,
        for a pod's annotation may change; but what a pod's own isolation does not need keeps it from nothing."""
        first: Refused | None = None
        answers: dict[Prepare, Refused | None] = {}
        for name, part in self.parts.items():
            for prepare in part.prepare:
                # Under gpushare and vcuda it is the same vDevice directory: made once.
                if prepare not in answers:
                    answers[prepare] = await prepare(keys)
                if (refused := answers[prepare]) is None:
                    continue
                # The loop goes on after a refusal: the other files are there when the kubelet calls again.
                if first is None and any(
                    _uses(self.node.settings, self.node.claim_pods.get(key.pod_uid), name) for key in keys
                ):
                    first = refused
        return first

    def prepare_ahead(self, key: ContainerKey) -> None:
        """The container was allocated a moment ago and starts soon: what takes time on the disk begins now."""
        # Each once: two isolations share the vDevice directories.
        for prepare_ahead in dict.fromkeys(one for part in self.parts.values() for one in part.prepare_ahead):
            prepare_ahead(key)

    def prepares(self, isolation: str) -> bool:
        """Whether a container under it needs something on the host before it starts."""
        found = [self.parts.get(part) for part in isolation_parts(isolation)]
        return any(part is not None and part.prepare for part in found)

    def chosen(self, uid: PodUid) -> str | None:
        """The pod's isolation; None where the pod is not known, or its annotation names none that the node allows."""
        pod = self.node.claim_pods.get(uid)
        return _chosen(self.node.settings, pod.annotations) if pod is not None else None

    def isolation_of(self, allocation: Allocation) -> str | None:
        """The pod's; of replicas of GPUs under NVIDIA's names by what limits those."""
        sharing = allocation.sharing
        # By the allocation, not by the setting of now: a replica keeps the terms that it was given with.
        return (sharing.isolation if sharing is not None else "") or self.chosen(allocation.key.pod_uid)

    def kept(self, allocation: Allocation) -> Kept | None:
        """What of the container's share is kept, and by whom; None where its isolation is not known."""
        chosen = self.isolation_of(allocation)
        if chosen is None:
            return None
        pod = self.node.claim_pods.get(allocation.key.pod_uid)
        container = pod.container(allocation.key.container) if pod is not None else None
        found = self._circumstances(chosen, allocation, container)
        return ISOLATIONS[chosen].kept(found, is_whole=allocation.is_whole)

    def _circumstances(
        self, isolation: str, allocation: Allocation | None = None, container: ContainerSpec | None = None
    ) -> Circumstances:
        found = Circumstances(module=self.kernel_module)
        for name in isolation_parts(isolation):
            # An allocation from before a change of the settings may be under one that is no longer in use.
            if (part := self.parts.get(name)) is not None:
                found = part.circumstances(found, allocation, container)
        return found

    def has_limits(self, key: ContainerKey) -> bool:
        """False where the container was found to run without one."""
        return not any(part.problem(key) for part in self.parts.values())

    def facts(self) -> tuple[IsolationFacts, ...]:
        """What a share under each isolation in use has."""
        return tuple(
            IsolationFacts(
                name=name,
                unavailable_reason=self.unavailable_reason(name),
                kept=ISOLATIONS[name].kept(self._circumstances(name)),
                probe=next((found for part in isolation_parts(name) if (found := self.probed(part)) is not None), None),
            )
            for name in sorted(self.node.settings.isolations_in_use)
        )

    def probed(self, part: str) -> ProbeResult | None:
        """Whether a program of the agent's own was limited on this node by this isolation, which is no combination."""
        return self.parts[part].probed() if part in self.parts else None

    def changed(self) -> None:
        """An allocation, a pod or a GPU."""
        for part in self.parts.values():
            if part.changed is not None:
                part.changed()

    def follow_usage(
        self, subscribe: Callable[[Callable[[UsageRound | None], None]], None], request: Callable[[], None]
    ) -> None:
        """Lets those that need it hear of each round of usage sampling, and request more."""
        for part in self.parts.values():
            if part.usage_sampled is not None:
                subscribe(part.usage_sampled)
            if part.request_usage_by is not None:
                part.request_usage_by(request)

    def paid(self, key: ContainerKey, uuid: GpuUuid) -> float | None:
        """What a container pays for its launches, of the GPU's time, where an isolation counts that and there were any."""
        return next((found for part in self.parts.values() if (found := part.paid(key, uuid)) is not None), None)

    def unavailable_reason(self, isolation: str) -> str:
        """Why no share of this isolation can be had now, and the remedy; empty where it can."""
        reasons = [
            watch.unavailable_reason
            for part in isolation_parts(isolation)
            if (watch := self.watches.get(part)) is not None
        ]
        return "; ".join(reason for reason in reasons if reason)

    def max_shares_of_gpu(self) -> int | None:
        """The least of the isolations in use; None where none has a limit."""
        return min((most for part in self.parts.values() if (most := part.max_shares_of_gpu) is not None), default=None)

    def enforcement(self) -> ShareEnforcement:
        """What lets live resizes change the limits of running shares."""
        return ShareEnforcement(chosen=lambda pod: _chosen(self.node.settings, pod.annotations), parts=self.parts)

    def has_no_shares(self) -> bool:
        """Whether no isolation can be had: the kubelet sees no memory then; else admission refuses the shares whom it
        concerns. An agent that registers before it has checked holds the kubelet's calls until then."""
        # What was not checked yet is not missing: to report no memory at each start would turn pods away.
        is_checked = all(watch.is_checked for watch in self.watches.values())
        return is_checked and all(self.unavailable_reason(name) for name in self.node.settings.isolations_in_use)

    def has_no_replicas(self) -> bool:
        """What limits replicas under NVIDIA's names cannot be had."""
        sharing = self.node.settings.nvidia.sharing
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
    choose_anew: Callable[[str], None] = lambda reason: None,
) -> Isolations:
    """Joined, not started. Raises StartupError for settings that contradict each other."""
    settings = node.settings
    runtime, volumes = runtime_client(settings), driver_volumes(settings)
    # Simulated GPUs: whatever driver this machine has is not theirs.
    module = read_kernel_module(settings.runtime.proc_root) if settings.driver == "nvml" else None
    cgroups = Cgroups(settings.runtime.cgroup_root, settings.runtime.proc_root)

    # Made when the first isolation asks, and shared: two managers would bind one socket by turns.
    @cache
    def vdevices() -> VirtualManager:
        return build_virtual_manager(node, runtime, cgroups, module, volumes, warn)

    host = IsolationHost(
        node=node,
        uses=partial(_uses, settings),
        warn=warn,
        note=note,
        # Only where `auto` chose: what the operator has set is refused with the reason, never replaced.
        choose_anew=choose_anew if node.isolation_reason else lambda reason: None,
        driver=driver,
        runtime=runtime,
        cgroups=cgroups,
        module=module,
        volumes=volumes,
        vdevices=vdevices,
    )
    parts = {name: build_part(name, host) for name in ISOLATIONS if name in settings.isolation_parts_in_use}
    watches = {
        name: AvailabilityWatch(name, part.check, look=part.look, period_s=part.check_period_s)
        for name, part in parts.items()
        if part.check is not None
    }
    # An incoming instance has checked nothing yet: without a row the alert GpushareIsolationUnavailable does not fire.
    node.metrics.show_isolations(
        lambda: {name: not watch.unavailable_reason for name, watch in watches.items() if watch.is_checked}
    )
    return Isolations(
        node=node,
        runtime=runtime,
        volumes=volumes,
        kernel_module=module,
        parts=parts,
        watches=watches,
        cdi_watch=_cdi_watch(node),
    )


def device_list_warnings(settings: Settings, volumes: Mapping[VolumeName, DriverVolume]) -> list[str]:
    """What of the device lists contradicts itself or does nothing under the node's isolation. `volumes`: driver_volumes'."""
    mounts_driver = settings.driver_volume.mount or ISOLATIONS[settings.isolation].mounts_driver
    return strategy_warnings(
        settings.device_list_strategy,
        mounts_driver=mounts_driver and bool(volumes),
        # Simulated GPUs have no device nodes unless a setting says so.
        has_gpu_nodes=settings.driver == "nvml" or settings.simulated.device_nodes,
    )


def _cdi_watch(node: Node) -> CdiWatch | None:
    strategies = set(node.settings.device_list_strategy)
    if not {DeviceListStrategy.CDI_ANNOTATIONS, DeviceListStrategy.CDI_CRI} & strategies:
        return None
    return CdiWatch(cdi_specs(node.settings), lambda: node.gpus().gpus)


def _chosen(settings: Settings, annotations: Mapping[str, str]) -> str | None:
    """None where the pod's annotation names none that the node allows."""
    chosen = choose_isolation(annotations, settings.isolation, settings.isolations_allowed)
    return None if isinstance(chosen, Refused) else chosen


def _uses(settings: Settings, pod: Pod | None, part: str) -> bool:
    # A pod that is not known has no annotation: it counts as one under the node's isolation.
    chosen = _chosen(settings, pod.annotations if pod is not None else {})
    return chosen is not None and part in isolation_parts(chosen)


class ShareEnforcement:
    """`chosen` is the isolation of a pod, None where it names one that the node does not allow; `parts` are those in use."""

    def __init__(self, *, chosen: Callable[[Pod], str | None], parts: Mapping[str, IsolationPart]) -> None:
        self._chosen = chosen
        self._parts = parts

    def isolation_of(self, pod: Pod) -> Isolation | None:
        name = self._chosen(pod)
        if name is None:
            return None
        if any(self._parts[part].is_memory_fixed for part in isolation_parts(name)):
            # Of a combination too: the resize is refused if one part cannot follow.
            return replace(ISOLATIONS[name], memory_follows=Follows.NOBODY)
        return ISOLATIONS[name]

    async def enforce(self, allocation: Allocation, pod: Pod) -> str:
        """Why the share's limits are not what they are to be (yet), empty where they are. Raises AgentError."""
        name = self._chosen(pod)
        if name is None:
            return "the pod's isolation is not in use on this node"
        for part in isolation_parts(name):
            if problem := await self._parts[part].enforce(allocation, pod):
                return problem
        return ""
