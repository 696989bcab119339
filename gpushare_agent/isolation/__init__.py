"""What enforces a container's share: one pure function per isolation, and the services that prepare the host for it.

An isolation is one package here, named like its line in model/isolation.py (CONTRIBUTING.md has the steps): its `edits`
turn a container's allocation and the node's settings into container edits. What must exist on the host before the container
starts is made by a service beside them: `VirtualManager`, `PrivateCaches`, `DriverLimits`.
`AvailabilityWatch` checks what the deployer supplies.

State owned: `VirtualManager`, `DirectoryReconciler`, `ContainerProcesses` (vDevice directories and sockets, the processes in
them), `CdiWatch` (the CDI spec), `AvailabilityWatch` (why an isolation cannot be had), `MpsSupervision` (the MPS daemon),
`DriverDirectory` (driver volumes on disk).
Called by: admission (edits), agent (services), cli. Open first: request.py.
Who removes vDevice directories: `VirtualManager.remove_stale` in vcuda/virtual_manager.py, once their pod is gone.

Others import: availability, cdi.files, cdi.own_spec, cdi.specs, choice, device_lists, device_nodes, driver.edits,
driver.limits, driver_volume.check, driver_volume.config, driver_volume.directory, driver_volume.elf,
driver_volume.libraries, driver_volume.mounts, driver_volume.plan, driver_volume.values, enforcement, hami_core.caches,
hami_core.edits, hami_core.files, hami_core.limits, hami_core.region_watch, kept, mps.control, mps.daemon, mps.supervision,
shares, vcuda.client, vcuda.configs, vcuda.container_ids, vcuda.container_processes, vcuda.edits, vcuda.files, vcuda.format,
vcuda.virtual_manager.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from gpushare_agent.isolation.request import (
    GpuShare,
    HamiCoreConfig,
    Isolation,
    IsolationConfig,
    IsolationRequest,
    MpsConfig,
    Preparation,
    combined,
)
from gpushare_agent.model.isolation import IsolationName


def _load(name: IsolationName) -> Isolation:
    if len(name.parts) > 1:
        return combined(name, [_load(part) for part in name.parts])
    found: Isolation = import_module(f"{__name__}.{name.replace('-', '_')}").ISOLATION
    return found


ISOLATIONS: Mapping[IsolationName, Isolation] = {
    name: _load(name) for name in IsolationName if name is not IsolationName.AUTO
}

__all__ = [
    "ISOLATIONS",
    "GpuShare",
    "HamiCoreConfig",
    "Isolation",
    "IsolationConfig",
    "IsolationRequest",
    "MpsConfig",
    "Preparation",
]
