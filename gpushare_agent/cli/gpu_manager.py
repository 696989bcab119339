"""What gpu-manager's start script does before its agent, where its DaemonSet runs this image (settings/sources.py).

Its pod has no RuntimeClass: the driver's files are collected from the host into the driver directory, for containers and for
this process itself, which is replaced by one that finds NVML there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path

import structlog

from gpushare_agent.cli import driver_volume
from gpushare_agent.isolation.driver_volume.config import untouched_driver
from gpushare_agent.model.errors import AgentError
from gpushare_agent.model.names import ENV_LIBRARY_PATH
from gpushare_agent.settings.reference import text_of
from gpushare_agent.settings.settings import LoadedSettings
from gpushare_agent.settings.sources import GPU_MANAGER_DAEMONSET

log = structlog.get_logger(__name__)

Execute = Callable[[str, list[str], Mapping[str, str]], object]
_MOUNTS = {
    "kubelet.pod_resources_socket": "/var/lib/kubelet/pod-resources",
    "health.state_file": "/var/lib/gpushare-agent",
}
"""Setting -> mount that manifests/base has and gpu-manager's DaemonSet lacks."""


def start(loaded: LoadedSettings, environ: Mapping[str, str], execute: Execute = os.execve) -> None:
    """Does nothing elsewhere. `execute` does not return."""
    if GPU_MANAGER_DAEMONSET not in loaded.sources.values():
        return
    for name, mount in _MOUNTS.items():
        if loaded.sources[name] == GPU_MANAGER_DAEMONSET:
            instead = f"{name}={text_of(attrgetter(name)(loaded.settings))}"
            log.warning(
                "mount_missing", mount=mount, then=instead, cure="add the volume and the mount of manifests/base"
            )
    settings = loaded.settings
    if loaded.sources["driver_volume.root"] != GPU_MANAGER_DAEMONSET or settings.driver != "nvml":
        return
    try:
        origin = untouched_driver(settings)
    except AgentError as error:
        log.warning("driver_files_not_collected", error=str(error))
        return
    libraries = str(origin / "lib64") if origin is not None else ""
    paths = environ.get(ENV_LIBRARY_PATH, "").split(":")
    if not libraries or libraries in paths:  # this is the process that was started below
        return
    driver_volume.run(settings, check=False, prune=False, form="table")
    if Path(libraries).is_dir():
        sys.stdout.flush()
        path = ":".join(filter(None, (libraries, *paths)))
        execute(sys.executable, sys.orig_argv, {**environ, ENV_LIBRARY_PATH: path})
