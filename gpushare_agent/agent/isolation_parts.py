"""Builds what keeps shares real on this node: the services of the isolations in use, and the names of GPUs for CDI."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gpushare_agent.admission.allocation_cache import AllocationCache
from gpushare_agent.admission.decisions.isolation_choice import choose_isolation
from gpushare_agent.agent.cdi_parts import cdi_specs
from gpushare_agent.agent.node_values import driver_version
from gpushare_agent.cluster.pod_events import PodEvents
from gpushare_agent.cluster.pod_store import PodStore
from gpushare_agent.gpus.inventory import GpuInventoryState
from gpushare_agent.isolation import ISOLATIONS, Preparation
from gpushare_agent.isolation.cdi.specs import CdiWatch
from gpushare_agent.isolation.decisions.hami_core import LIBRARY_PATH
from gpushare_agent.isolation.driver_volume.values import DriverVolume, VolumeName
from gpushare_agent.isolation.hami_core.caches import PrivateCaches
from gpushare_agent.isolation.hami_core.files import HamiCoreFiles
from gpushare_agent.isolation.mps.control import MpsControl
from gpushare_agent.isolation.mps.watch import MpsWatch
from gpushare_agent.isolation.vcuda.configs import VDeviceConfigs
from gpushare_agent.isolation.vcuda.container_ids import ContainerIds
from gpushare_agent.isolation.vcuda.container_processes import ContainerProcesses
from gpushare_agent.isolation.vcuda.files import VDeviceFiles
from gpushare_agent.isolation.vcuda.virtual_manager import VirtualManager
from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.errors import Refused
from gpushare_agent.model.isolation import DeviceListStrategy, IsolationName
from gpushare_agent.model.resources import ResourceNames
from gpushare_agent.observability.metrics.agent import AgentMetrics
from gpushare_agent.runtime.cgroups import Cgroups
from gpushare_agent.runtime.cri import RuntimeClient
from gpushare_agent.settings.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationParts:
    """A part is None where nothing on this node needs it."""

    settings: Settings
    store: PodStore
    cgroups: Cgroups
    virtual_manager: VirtualManager | None
    private_caches: PrivateCaches | None
    mps_watch: MpsWatch | None
    cdi_watch: CdiWatch | None

    async def prepare(self, keys: Collection[ContainerKey]) -> Refused | None:
        """Everything that containers about to start need on the host. Every share is prepared for every isolation in use,
        for a pod's annotation may change; but what a pod's own isolation does not need keeps it from nothing."""
        first: Refused | None = None
        for kind, part in (
            (Preparation.VDEVICE, self.virtual_manager),
            (Preparation.PRIVATE_CACHE, self.private_caches),
        ):
            if part is None or (refused := await part.prepare(keys)) is None:
                continue
            if first is None and any(self._needs(key, kind) for key in keys):
                first = refused
        return first

    def _needs(self, key: ContainerKey, kind: Preparation) -> bool:
        pod = self.store.get(key.pod_uid)
        annotations = pod.annotations if pod is not None else {}
        chosen = choose_isolation(annotations, self.settings.isolation, self.settings.isolations_allowed)
        return not isinstance(chosen, Refused) and ISOLATIONS[chosen].preparation is kind

    def daemon_trouble(self) -> str:
        """Why no share can be had of an isolation that needs a daemon, empty where it can."""
        return self.mps_watch.unavailable_reason if self.mps_watch is not None else ""

    def no_shares(self) -> bool:
        """Where every share needs the daemon, the kubelet is told too; else the admission tells those whom it concerns."""
        return self.settings.isolation is IsolationName.MPS and bool(self.daemon_trouble())


def build_isolation(  # noqa: PLR0913 - the composition hands in every collaborator by name
    settings: Settings,
    *,
    names: ResourceNames,
    cache: AllocationCache,
    store: PodStore,
    inventory: GpuInventoryState,
    runtime: RuntimeClient,
    volumes: Mapping[VolumeName, DriverVolume],
    metrics: AgentMetrics,
    events: PodEvents,
) -> IsolationParts:
    """Raises StartupError where an isolation lacks what it needs on the host."""
    in_use = settings.isolations_in_use
    cgroups = Cgroups(settings.runtime.cgroup_root, settings.runtime.proc_root)
    virtual_manager = None
    if IsolationName.VCUDA in in_use:
        virtual_manager = VirtualManager(
            files=VDeviceFiles(settings.virtual_manager.path),
            allocations=cache.view,
            pods=store,
            configs=VDeviceConfigs(
                inventory=lambda: inventory.current,
                driver_version=driver_version(volumes, inventory),
                names=names,
                on_problem=lambda pod, text: events.warned(pod, "CoreLimitIgnored", text),
            ),
            processes=ContainerProcesses(ContainerIds(runtime, store), cgroups, clock=time.monotonic),
            identify=cgroups.identify_in_thread,
            metrics=metrics,
            clock=time.monotonic,
        )
    return IsolationParts(
        settings=settings,
        store=store,
        cgroups=cgroups,
        virtual_manager=virtual_manager,
        private_caches=_private_caches(settings, cache, store) if IsolationName.HAMI_CORE in in_use else None,
        mps_watch=_mps_watch(settings) if IsolationName.MPS in in_use else None,
        cdi_watch=_cdi_watch(settings, inventory),
    )


def _cdi_watch(settings: Settings, inventory: GpuInventoryState) -> CdiWatch | None:
    if not {DeviceListStrategy.CDI_ANNOTATIONS, DeviceListStrategy.CDI_CRI} & set(settings.device_list_strategy):
        return None
    watch = CdiWatch(cdi_specs(settings), lambda: inventory.current.gpus)
    inventory.subscribe(lambda _: watch.gpus_changed())
    return watch


def _mps_watch(settings: Settings) -> MpsWatch:
    mps = settings.mps
    control = MpsControl(mps.control, mps.pipe_directory, mps.log_directory, timeout_s=mps.command_timeout_s)
    return MpsWatch(control, period_s=mps.probe_period_s)


def _private_caches(settings: Settings, cache: AllocationCache, store: PodStore) -> PrivateCaches:
    """Raises StartupError where HAMi-core's library is missing or none."""
    files = HamiCoreFiles(settings.hami_core.library, settings.hami_core.directory, LIBRARY_PATH)
    files.check_library()
    return PrivateCaches(files=files, allocations=cache.view, pods=store)
