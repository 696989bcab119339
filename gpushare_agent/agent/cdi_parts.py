"""Builds the keeper of CDI names from the settings; for the agent and for the command cdi."""

from __future__ import annotations

from pathlib import Path

from gpushare_agent.isolation.cdi.files import CdiFiles
from gpushare_agent.isolation.cdi.specs import CdiSpecs
from gpushare_agent.isolation.decisions.cdi_spec import SPEC_CONTROL_NODES, SpecNodes
from gpushare_agent.isolation.decisions.device_lists import CONTROL_NODES
from gpushare_agent.isolation.driver_volume.config import read_volume_config
from gpushare_agent.isolation.driver_volume.values import VolumeName
from gpushare_agent.model.isolation import IsolationName
from gpushare_agent.settings.settings import Settings


def cdi_specs(settings: Settings) -> CdiSpecs:
    """The keeper of the node's names, as the settings say.

    Raises:
        StartupError: volume.conf is wrong.
    """
    is_real = settings.driver == "nvml"
    directory = _driver_directory(settings)
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


def _driver_directory(settings: Settings) -> Path | None:
    """Of the untouched driver, where no isolation mounts a directory of its own choice.

    CDI's mount would take the place of the isolation's: a share under vcuda would get the libraries without limits.
    """
    if settings.volume_config is None or IsolationName.VCUDA in settings.isolations_in_use:
        return None
    volumes = read_volume_config(settings.volume_config)
    return next((volume.directory for volume in volumes if volume.name is VolumeName.ORIGIN), None)
