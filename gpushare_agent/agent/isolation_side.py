"""What keeps shares real on this node: the services of the isolations in use, and the names of GPUs for CDI."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

import structlog

from gpushare_agent.admission.decisions.container_edits import choose_isolation
from gpushare_agent.agent.claim_pods import ClaimPods
from gpushare_agent.agent.share_readiness import Look
from gpushare_agent.agent.state import NodeState
from gpushare_agent.agent.values import (
    cdi_specs,
    driver_version,
    driver_volumes,
    hami_core_config,
    hami_core_files,
    mps_control,
    runtime_client,
)
from gpushare_agent.cluster.events import PodEvents
from gpushare_agent.isolation import ISOLATIONS, HamiCoreConfig, Preparation
from gpushare_agent.isolation.availability import AvailabilityWatch
from gpushare_agent.isolation.cdi.specs import CdiWatch
from gpushare_agent.isolation.device_lists import strategy_warnings
from gpushare_agent.isolation.driver.edits import MemoryShare, memory_shares
from gpushare_agent.isolation.driver.limits import DriverLimits, MemoryLimiter
from gpushare_agent.isolation.driver_volume.check import SharedVolumeCheck
from gpushare_agent.isolation.driver_volume.values import DriverVolume, VolumeName
from gpushare_agent.isolation.enforcement import ShareEnforcement
from gpushare_agent.isolation.hami_core.caches import PrivateCaches
from gpushare_agent.isolation.hami_core.edits import lifts_cores, opts_out
from gpushare_agent.isolation.hami_core.limits import RegionLimits
from gpushare_agent.isolation.hami_core.region_watch import RegionWatch
from gpushare_agent.isolation.kept import Kept
from gpushare_agent.isolation.vcuda.configs import VDeviceConfigs
from gpushare_agent.isolation.vcuda.container_ids import ContainerIds
from gpushare_agent.isolation.vcuda.container_processes import ContainerProcesses
from gpushare_agent.isolation.vcuda.files import VDeviceFiles
from gpushare_agent.isolation.vcuda.virtual_manager import VirtualManager
from gpushare_agent.kit.supervision import Runs, Tasks, bodies
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.errors import Refused, Unavailable
from gpushare_agent.model.gpus import KernelModule
from gpushare_agent.model.isolation import DeviceListStrategy, IsolationName, Sharing
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod
from gpushare_agent.observability.node_snapshot import IsolationFacts
from gpushare_agent.runtime.cgroups import Cgroups
from gpushare_agent.runtime.cri import RuntimeClient
from gpushare_agent.runtime.kernel_module import read_kernel_module
from gpushare_agent.settings.settings import Settings

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationSide:
    """A part is None where nothing on this node needs it."""

    settings: Settings
    hami_core: HamiCoreConfig
    store: ClaimPods
    runtime: RuntimeClient
    volumes: Mapping[VolumeName, DriverVolume]
    kernel_module: KernelModule | None
    """As it was at the agent's start: after an update of the driver the agent is restarted."""
    cgroups: Cgroups
    virtual_manager: VirtualManager | None
    private_caches: PrivateCaches | None
    driver_limits: DriverLimits | None
    watches: Mapping[IsolationName, AvailabilityWatch]
    """Of those in use that need something on the host."""
    region_limits: RegionLimits | None
    region_watch: RegionWatch | None
    cdi_watch: CdiWatch | None

    async def start(self) -> None:
        """What must be there before a call of the kubelet is answered: files, the daemon's state, the names of CDI."""
        for watch in self.watches.values():
            await watch.poll()
        if self.cdi_watch is not None:
            await self.cdi_watch.check()
        self._log_contradictions()

    def tasks(self) -> Tasks:
        services: dict[str, Runs | None] = {
            "cdi specs": self.cdi_watch,
            "virtual manager": self.virtual_manager,
            "private caches": self.private_caches,
            "region limits": self.region_limits,
            "region watch": self.region_watch,
            "driver limits": self.driver_limits,
        }
        watches: dict[str, Runs | None] = {f"isolation {name}": watch for name, watch in self.watches.items()}
        return bodies(services | watches)

    def looks(self) -> Mapping[str, Look]:
        """What the isolations in use need on this node, by name."""
        return {f"isolation {name}": watch.look for name, watch in self.watches.items()}

    async def log_cgroup_driver(self) -> None:
        """Where the setting contradicts the pods' cgroups, once, in the log."""
        if self.virtual_manager is None:
            return
        try:
            difference = await self.cgroups.check_driver_in_thread(self.settings.runtime.cgroup_driver)
        except Unavailable as e:
            difference = str(e)
        if difference:
            log.warning("cgroup_driver_differs", detail=difference)

    def _log_contradictions(self) -> None:
        """What of the device lists contradicts itself or does nothing, once, in the log."""
        settings = self.settings
        has_nodes = settings.driver == "nvml" or settings.simulated.device_nodes
        mounts_driver = settings.isolation is IsolationName.VCUDA and bool(self.volumes)
        strategies = settings.device_list_strategy
        for text in strategy_warnings(strategies, mounts_driver=mounts_driver, has_gpu_nodes=has_nodes):
            log.warning("device_list_strategy", detail=text)

    async def prepare(self, keys: Collection[ContainerKey]) -> Refused | None:
        """Everything that containers about to start need on the host. Every share is prepared for every isolation in use,
        for a pod's annotation may change; but what a pod's own isolation does not need keeps it from nothing."""
        first: Refused | None = None
        for kind, part in (
            (Preparation.VDEVICE, self.virtual_manager),
            (Preparation.PRIVATE_CACHE, self.private_caches),
            (Preparation.MEMORY_LIMIT, self.driver_limits),
        ):
            if part is None or (refused := await part.prepare(keys)) is None:
                continue
            if first is None and any(self._needs(key, kind) for key in keys):
                first = refused
        return first

    def prepare_ahead(self, key: ContainerKey) -> None:
        """The container was allocated a moment ago and starts soon: what takes time on the disk begins now."""
        for part in (self.virtual_manager, self.private_caches):
            if part is not None:
                part.prepare_ahead(key)

    def _needs(self, key: ContainerKey, kind: Preparation) -> bool:
        pod = self.store.get(key.pod_uid)
        chosen = _chosen(self.settings, pod.annotations if pod is not None else {})
        return chosen is not None and kind in ISOLATIONS[chosen].preparations

    def chosen(self, uid: PodUid) -> IsolationName | None:
        """The pod's isolation; None where the pod is not known, or its annotation names none that the node allows."""
        pod = self.store.get(uid)
        return _chosen(self.settings, pod.annotations) if pod is not None else None

    def isolation_of(self, allocation: Allocation) -> IsolationName | None:
        """The pod's; of replicas of GPUs under NVIDIA's names by what limits those."""
        match allocation.sharing:
            case Sharing.TIME_SLICING:
                return IsolationName.NONE
            case Sharing.MPS:
                return IsolationName.MPS
            case _:
                return self.chosen(allocation.key.pod_uid)

    def kept(self, allocation: Allocation) -> Kept | None:
        """What of the container's share is kept, and by whom; None where its isolation is not known."""
        chosen = self.isolation_of(allocation)
        if chosen is None:
            return None
        pod, config = self.store.get(allocation.key.pod_uid), self.hami_core
        container = pod.container(allocation.key.container) if pod is not None else None
        return ISOLATIONS[chosen].kept(
            is_whole=allocation.is_whole,
            module=self.kernel_module,
            has_driver_limit=self.has_driver_limit(allocation.key),
            has_library=(container is None or not opts_out(container, config)) and not self._is_shared(allocation),
            has_core_limit=not lifts_cores(container, config),
        )

    def _is_shared(self, allocation: Allocation) -> bool:
        """By containers that run: HAMi-core mistakes their processes for each other's. Such a claim is refused where they
        are known when it is prepared; a pod that comes later is not."""
        return sum(map(bool, (self.store.sharers(allocation.key) or {}).values())) > 1

    def has_driver_limit(self, key: ContainerKey) -> bool:
        """False where the container was found to run without it."""
        return self.driver_limits is None or not self.driver_limits.problem(key)

    def facts(self) -> tuple[IsolationFacts, ...]:
        """Of each isolation in use, what a share under it has."""
        return tuple(
            IsolationFacts(
                name=name.value,
                unavailable_reason=self.unavailable_reason(name),
                kept=ISOLATIONS[name].kept(
                    is_whole=False,
                    module=self.kernel_module,
                    has_core_limit=not lifts_cores(None, self.hami_core),
                ),
            )
            for name in sorted(self.settings.isolations_in_use)
        )

    def changed(self) -> None:
        """An allocation, a pod or a GPU."""
        if self.virtual_manager is not None:
            self.virtual_manager.changed()

    def unavailable_reason(self, isolation: IsolationName) -> str:
        """Why no share of this isolation can be had now, and the cure; empty where it can."""
        reasons = [
            watch.unavailable_reason for part in isolation.parts if (watch := self.watches.get(part)) is not None
        ]
        return "; ".join(reason for reason in reasons if reason)

    def enforcement(self) -> ShareEnforcement:
        """Of live resizes."""
        return ShareEnforcement(
            chosen=lambda pod: _chosen(self.settings, pod.annotations),
            virtual_manager=self.virtual_manager,
            region_limits=self.region_limits,
            driver_limits=self.driver_limits,
        )

    def has_no_shares(self) -> bool:
        """Where no isolation can be had the kubelet sees no memory; else admission refuses the shares whom it concerns. An
        agent that registers before it has checked holds the kubelet's calls until then."""
        is_checked = all(watch.is_checked for watch in self.watches.values())
        return is_checked and all(self.unavailable_reason(name) for name in self.settings.isolations_in_use)

    def has_no_replicas(self) -> bool:
        """What limits replicas under NVIDIA's names cannot be had."""
        match self.settings.nvidia.sharing:
            case Sharing.TIME_SLICING:
                return False
            case Sharing.MPS:
                watch = self.watches.get(IsolationName.MPS)
                return watch is not None and watch.is_checked and bool(watch.unavailable_reason)
            case Sharing.SHARES:
                return self.has_no_shares()


def build_isolation_side(state: NodeState, events: PodEvents, driver: MemoryLimiter) -> IsolationSide:
    """Joined, not started. Raises StartupError for settings that contradict each other."""
    settings = state.settings
    in_use = settings.isolation_parts_in_use
    runtime, volumes = runtime_client(settings), driver_volumes(settings)
    cgroups = Cgroups(settings.runtime.cgroup_root, settings.runtime.proc_root)
    module = read_kernel_module(settings.runtime.proc_root) if settings.driver == "nvml" else None
    virtual_manager = None
    if IsolationName.VCUDA in in_use:
        virtual_manager = VirtualManager(
            files=VDeviceFiles(settings.virtual_manager.path),
            allocations=state.claim_pods.shares,
            pods=state.claim_pods,
            configs=VDeviceConfigs(
                inventory=state.gpus,
                driver_version=driver_version(volumes, state.inventory),
                names=state.names,
                on_problem=lambda pod, text: events.warned(pod, "CoreLimitIgnored", text),
            ),
            processes=ContainerProcesses(
                ContainerIds(runtime, state.store),
                cgroups,
                clock=time.monotonic,
                module=module,
                sharers=state.claim_pods.sharers,
            ),
            identify=cgroups.identify_in_thread,
            metrics=state.metrics,
            clock=time.monotonic,
        )
    private_caches = _private_caches(state) if IsolationName.HAMI_CORE in in_use else None
    driver_limits = None
    if IsolationName.DRIVER in in_use:
        driver_limits = _driver_limits(state, events, driver, cgroups, ContainerIds(runtime, state.store))
    return IsolationSide(
        settings=settings,
        hami_core=hami_core_config(settings),
        store=state.claim_pods,
        runtime=runtime,
        volumes=volumes,
        kernel_module=module,
        cgroups=cgroups,
        virtual_manager=virtual_manager,
        private_caches=private_caches,
        driver_limits=driver_limits,
        watches=_watches(settings, volumes, private_caches, driver_limits, virtual_manager),
        region_limits=_region_limits(state) if IsolationName.HAMI_CORE in in_use else None,
        region_watch=_region_watch(state, cgroups, module) if IsolationName.HAMI_CORE in in_use else None,
        cdi_watch=_cdi_watch(state),
    )


def _cdi_watch(state: NodeState) -> CdiWatch | None:
    strategies = set(state.settings.device_list_strategy)
    if not {DeviceListStrategy.CDI_ANNOTATIONS, DeviceListStrategy.CDI_CRI} & strategies:
        return None
    return CdiWatch(cdi_specs(state.settings), lambda: state.gpus().gpus)


def _watches(
    settings: Settings,
    volumes: Mapping[VolumeName, DriverVolume],
    private_caches: PrivateCaches | None,
    driver_limits: DriverLimits | None,
    virtual_manager: VirtualManager | None,
) -> dict[IsolationName, AvailabilityWatch]:
    in_use = settings.isolation_parts_in_use
    watches = {}
    if private_caches is not None:
        watches[IsolationName.HAMI_CORE] = AvailabilityWatch(
            IsolationName.HAMI_CORE, private_caches.check, look=private_caches.look
        )
    if driver_limits is not None:
        watches[IsolationName.DRIVER] = AvailabilityWatch(IsolationName.DRIVER, driver_limits.check)
    if IsolationName.MPS in in_use:
        check, period_s = mps_control(settings).check, settings.mps.probe_period_s
        watches[IsolationName.MPS] = AvailabilityWatch(IsolationName.MPS, check, period_s=period_s)
    if virtual_manager is not None:
        # simulated GPUs have no driver to mount
        shared = SharedVolumeCheck(volumes.get(VolumeName.SHARED)).check if settings.driver == "nvml" else None
        watches[IsolationName.VCUDA] = AvailabilityWatch(
            IsolationName.VCUDA,
            partial(_both, virtual_manager.check, shared),
            look=partial(_both, virtual_manager.look, shared),
        )
    return watches


async def _both(first: Look, second: Look | None) -> None:
    await first()
    if second is not None:
        await second()


def _driver_limits(
    state: NodeState, events: PodEvents, driver: MemoryLimiter, cgroups: Cgroups, containers: ContainerIds
) -> DriverLimits:
    settings = state.settings

    def shares() -> dict[ContainerKey, list[MemoryShare]]:
        gpus, found = state.inventory.current.by_uuid(), dict[ContainerKey, list[MemoryShare]]()
        for key, allocation in state.cache.view().items():
            pod = state.claim_pods.get(key.pod_uid)
            if pod is None or not allocation.is_limited or not allocation.gpus:
                continue
            if not _uses(settings, pod, IsolationName.DRIVER):
                continue
            sharers = state.claim_pods.sharers(key)
            users = [key] if sharers is None else list(sharers)
            shares = memory_shares(allocation, pod.annotations, gpus, state.names, users)
            for user in users:
                found.setdefault(user, []).extend(shares)
        return found

    def missing(key: ContainerKey, why: str) -> None:
        if (pod := state.store.get(key.pod_uid)) is not None:
            events.warned(pod, "MemoryLimitMissing", f"container {key.container} runs without its memory limit: {why}")

    return DriverLimits(
        driver=driver,
        cgroups=cgroups,
        containers=containers,
        shares=shares,
        may_set=settings.driver_limits.set_by_agent,
        on_missing=missing,
    )


def _private_caches(state: NodeState) -> PrivateCaches:
    files = hami_core_files(state.settings)
    running = state.claim_pods.running
    return PrivateCaches(files=files, allocations=state.cache.view, pods=state.store, running_claims=running)


def _region_limits(state: NodeState) -> RegionLimits:
    settings = state.settings
    return RegionLimits(
        files=hami_core_files(settings),
        config=hami_core_config(settings),
        names=state.names,
        inventory=state.gpus,
        allocations=state.cache.view,
        resized=lambda: state.cache.resized,
        pods=state.claim_pods,
        is_in_use=lambda pod: _uses(settings, pod, IsolationName.HAMI_CORE),
    )


def _region_watch(state: NodeState, cgroups: Cgroups, module: KernelModule | None) -> RegionWatch:
    settings = state.settings
    return RegionWatch(
        files=hami_core_files(settings),
        allocations=state.cache.view,
        pods=state.claim_pods,
        is_in_use=lambda pod: _uses(settings, pod, IsolationName.HAMI_CORE),
        cgroups=cgroups,
        clock=time.monotonic,
        users=state.claim_pods.containers_of,
        module=module,
    )


def _chosen(settings: Settings, annotations: Mapping[str, str]) -> IsolationName | None:
    """None where the pod's annotation names none that the node allows."""
    chosen = choose_isolation(annotations, settings.isolation, settings.isolations_allowed)
    return None if isinstance(chosen, Refused) else chosen


def _uses(settings: Settings, pod: Pod, part: IsolationName) -> bool:
    chosen = _chosen(settings, pod.annotations)
    return chosen is not None and part in chosen.parts
