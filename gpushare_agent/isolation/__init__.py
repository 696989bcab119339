"""What enforces a container's share: one pure function per isolation, and the services that prepare the host for it.

An isolation is one package here, named like its line in model/isolation.py (CONTRIBUTING.md has the steps): its `edits`
turn a container's allocation and the node's settings into container edits, and say what of a share is kept. What it does on
the host is its `part` (part.py): services such as `VirtualManager`, `PrivateCaches`, `DriverLimits`, and a check of what the
deployer supplies, which `AvailabilityWatch` repeats.

State owned: `VirtualManager`, `DirectoryReconciler`, `ContainerProcesses` (vDevice directories and sockets, the processes in
them), `CdiWatch` (the CDI spec), `AvailabilityWatch` (why an isolation cannot be had), `MpsSupervision` (the MPS daemon),
`DriverDirectory` (driver volumes on disk).
Called by: admission (edits), agent (services), cli. Open first: request.py, part.py.
Who removes vDevice directories: `VirtualManager.remove_stale` in vcuda/virtual_manager.py, once their pod is gone.

Others import: availability, cdi.files, cdi.own_spec, cdi.specs, choice, container_ids, device_lists, device_nodes,
driver.limits, driver_volume.check, driver_volume.config, driver_volume.directory, driver_volume.elf,
driver_volume.libraries, driver_volume.mounts, driver_volume.plan, driver_volume.values, enforcement, hami_core.edits,
hami_core.part, kept, mps.daemon, mps.part, mps.supervision, part, shares, vcuda.client, vcuda.edits, vcuda.files,
vcuda.format.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gpushare_agent.isolation.request import (
    GpuShare,
    HamiCoreConfig,
    Isolation,
    IsolationConfig,
    IsolationRequest,
    MpsConfig,
    combined,
)
from gpushare_agent.model.isolation import IsolationName

if TYPE_CHECKING:  # the services' imports are for the agent alone
    from gpushare_agent.isolation.part import IsolationHost, IsolationPart


def _package(name: IsolationName) -> str:
    return f"{__name__}.{name.replace('-', '_')}"


def _load(name: IsolationName) -> Isolation:
    if len(name.parts) > 1:
        return combined(name, [_load(part) for part in name.parts])
    found: Isolation = import_module(_package(name)).ISOLATION
    return found


def build_part(name: IsolationName, host: IsolationHost) -> IsolationPart:
    """What an isolation that is no combination does on the node; without a module `part` it needs nothing there."""
    module = f"{_package(name)}.part"
    if find_spec(module) is None:
        from gpushare_agent.isolation.part import IsolationPart

        return IsolationPart()
    part: IsolationPart = import_module(module).build(host)
    return part


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
    "build_part",
]
