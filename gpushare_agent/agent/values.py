"""From the settings to the values and small adapters that the node agent's parts are built from. Nothing here runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from msgspec.structs import replace

from gpushare_agent.admission.decisions.container_edits import EditPolicy
from gpushare_agent.isolation import ISOLATIONS, IsolationConfig, MpsConfig
from gpushare_agent.isolation.cdi.files import CdiFiles
from gpushare_agent.isolation.cdi.own_spec import SPEC_CONTROL_NODES, SpecNodes
from gpushare_agent.isolation.cdi.specs import CdiSpecs
from gpushare_agent.isolation.device_lists import CONTROL_NODES, NodeDevices
from gpushare_agent.isolation.device_nodes import ControlNodes, read_extra_devices
from gpushare_agent.isolation.driver_volume.config import untouched_driver_directory
from gpushare_agent.isolation.driver_volume.values import DriverVolume, VolumeName
from gpushare_agent.isolation.hami_core.part import hami_core_config
from gpushare_agent.model.errors import Rejected, StartupError
from gpushare_agent.model.gpus import KernelModule
from gpushare_agent.model.isolation import AUTO
from gpushare_agent.model.resources import ResourceNames
from gpushare_agent.model.units import NvidiaNames
from gpushare_agent.runtime.cri import RuntimeClient, runtime_endpoints
from gpushare_agent.runtime.node_probes import RUNTIME_SOCKETS
from gpushare_agent.settings.settings import Settings


def resource_names(settings: Settings, mig_profiles: Collection[str] = ()) -> ResourceNames:
    """The resources that the node offers, with MIG instances of these profiles."""
    gpushare, nvidia = settings.gpushare, nvidia_names(settings)
    return ResourceNames(
        vcore=settings.resources.vcore,
        vmemory=settings.resources.vmemory,
        gpu_mem=gpushare.resource if gpushare.enabled else "",
        memory_block_mib=settings.resources.memory_block_mib,
        gpu_mem_unit_mib=1024 if gpushare.unit == "GiB" else 1,
        gpu=nvidia.resources(mig_profiles) if settings.nvidia.enabled else (),
        nvidia=nvidia,
        shares_in_mig=settings.isolation != AUTO and not ISOLATIONS[settings.isolation].why_not_in_mig,
    )


def nvidia_names(settings: Settings) -> NvidiaNames:
    """Which GPU serves which resource of NVIDIA's."""
    nvidia = settings.nvidia
    return NvidiaNames(
        resource=nvidia.resource,
        gpus=nvidia.gpus,
        names=nvidia.name_pairs,
        mig_strategy=nvidia.mig_strategy,
        mig_names=nvidia.mig_name_pairs,
        replicas=nvidia.replica_counts,
        sharing=nvidia.sharing,
        is_renamed=nvidia.rename_replicas,
        refuses_several=nvidia.refuses_several_replicas,
        is_packed=nvidia.replica_policy == "packed",
    )


def runtime_client(settings: Settings) -> RuntimeClient:
    try:
        endpoints = runtime_endpoints(settings.runtime.endpoint, RUNTIME_SOCKETS)
    except Rejected as e:
        raise StartupError(str(e)) from e
    return RuntimeClient(endpoints, timeout_s=settings.runtime.request_timeout_s)


def edit_policy(
    settings: Settings,
    names: ResourceNames,
    volumes: Mapping[VolumeName, DriverVolume],
    module: KernelModule | None = None,
) -> Callable[[], EditPolicy]:
    """The driver directory is mounted where volume.conf says it is."""
    shared, whole = volumes.get(VolumeName.SHARED), volumes.get(VolumeName.ORIGIN)
    is_real = settings.driver == "nvml"
    policy = EditPolicy(
        names=names,
        config=IsolationConfig(
            virtual_manager=settings.virtual_manager.path,
            shared_driver=shared.directory if shared is not None else None,
            whole_driver=whole.directory if whole is not None else None,
            mps=MpsConfig(
                pipe_directory=settings.mps.pipe_directory,
                shm_directory=settings.mps.shm_directory,
                exclusive_process=settings.mps.exclusive_process,
            ),
            hami_core=hami_core_config(settings),
            is_memory_limited_by_agent=settings.driver_limits.set_by_agent,
        ),
        isolation=settings.isolation,
        allowed=settings.isolations_allowed,
        strategies=settings.device_list_strategy,
        devices=NodeDevices(
            extra=read_extra_devices(settings.extra_config),
            has_gpu_nodes=is_real or settings.simulated.device_nodes,
        ),
        cdi_kind=settings.cdi.kind,
        is_named_by_index=settings.nvidia.device_ids == "index",
        kernel_module=module,
    )
    nodes = ControlNodes(CONTROL_NODES)
    if not is_real:
        return lambda: policy
    return lambda: replace(policy, devices=replace(policy.devices, control=nodes.present()))


def cdi_specs(settings: Settings) -> CdiSpecs:
    """The keeper of the node's names, as the settings say.

    Raises:
        StartupError: volume.conf is wrong.
    """
    is_real = settings.driver == "nvml"
    directory = untouched_driver_directory(settings)
    control = SPEC_CONTROL_NODES if is_real else CONTROL_NODES

    def nodes() -> SpecNodes:
        absent = [path for path in control if is_real and not Path(path).exists()]
        has_directory = directory is not None and directory.is_dir()
        return SpecNodes(
            control=tuple(path for path in control if path not in absent),
            has_gpu_nodes=is_real or settings.simulated.device_nodes,
            driver_directory=directory if has_directory else None,
            absent=(*absent, *([str(directory)] if directory is not None and not has_directory else [])),
        )

    return CdiSpecs(CdiFiles(settings.cdi.spec_directories), kind=settings.cdi.kind, nodes=nodes)
