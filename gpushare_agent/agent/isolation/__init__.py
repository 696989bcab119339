"""What enforces a container's share: one pure function per isolation, and the services that prepare the host for it.

An isolation is one package here with a module `edits` (CONTRIBUTING.md has the steps): its `ISOLATION` turns a container's
allocation and the node's settings into container edits, and says what of a share is kept. What it does on the host is its
module `part` (part.py): services such as `VirtualManager`, `Preparation`, `DriverLimits`, and a check of what the deployer
supplies, which `AvailabilityWatch` repeats. The package's name, `_` as `-`, is what settings and annotations say.

State owned: `VirtualManager`, `ContainerProcesses` (vDevice directories and sockets, the processes in
them), `AvailabilityWatch` (why an isolation cannot be had), `MpsSupervision` (the MPS daemon). Devices, CDI and the driver's
files are delivery/'s.
Called by: admission (edits), agent (services), commands. Open first: request.py, part.py.
Who removes vDevice directories: `VirtualManager.remove_stale` in vdevice/virtual_manager.py, once their pod is gone.

Others import: check, choice, container_ids, isolations, kept, mps.check, mps.control, mps.part, mps.supervision, part,
resource_names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

from gpushare_agent.agent.isolation.request import (
    ClaimUse,
    GpuShare,
    Isolation,
    IsolationConfig,
    IsolationRequest,
    combined,
    mounted_driver,
)
from gpushare_agent.core.model.isolation import AUTO, isolation_parts
from gpushare_agent.core.settings.isolation_names import isolation_names

if TYPE_CHECKING:  # it takes pydantic
    from gpushare_agent.core.settings.settings import Settings


class _Isolations(Mapping[str, Isolation]):
    """The isolations by name, combinations too. A package is imported when it is asked for: a node uses one or two."""

    def __getitem__(self, name: str) -> Isolation:
        # A name comes from settings and annotations: only one of a package with `edits` is imported.
        if name not in isolation_names():
            raise KeyError(name)
        return _load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(isolation_names())

    def __len__(self) -> int:
        return len(isolation_names())


@cache
def _load(name: str) -> Isolation:
    parts = isolation_parts(name)
    if len(parts) > 1:
        return combined(name, [_load(part) for part in parts])
    found: Isolation = import_module(f"{_package(name)}.edits").ISOLATION
    return found


def _package(name: str) -> str:
    return f"{__name__}.{name.replace('-', '_')}"


def module_of(name: str, module: str) -> ModuleType | None:
    """A further module of the package of an isolation that is no combination; None if it has none."""
    full = f"{_package(name)}.{module}"
    # By find_spec, not by catching ImportError: a module that fails to import must not count as missing.
    return import_module(full) if find_spec(full) is not None else None


ISOLATIONS: Mapping[str, Isolation] = _Isolations()


def isolations_in_use(settings: Settings) -> tuple[Isolation, ...]:
    """The isolations of the node and those that its pods may choose, without auto, which stands for none yet."""
    return tuple(ISOLATIONS[name] for name in sorted(settings.isolations_in_use) if name != AUTO)


def mounts_driver(settings: Settings) -> bool:
    """True if containers get a driver directory, by the setting or by an isolation in use."""
    return settings.driver_volume.mount or any(isolation.mounts_driver for isolation in isolations_in_use(settings))


__all__ = [
    "ISOLATIONS",
    "ClaimUse",
    "GpuShare",
    "Isolation",
    "IsolationConfig",
    "IsolationRequest",
    "isolations_in_use",
    "module_of",
    "mounted_driver",
    "mounts_driver",
]
