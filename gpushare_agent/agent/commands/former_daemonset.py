"""What is done before the agent where another program's DaemonSet runs this image (settings/sources.py): it says what its
manifest lacks.

gpu-manager's pod has no RuntimeClass: as by its start script the driver's files are collected from the host into the driver
directory, for containers and for this process itself, which is replaced by one that finds NVML there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path

import structlog

from gpushare_agent.agent.commands import driver_volume
from gpushare_agent.agent.delivery.volume_config import untouched_driver
from gpushare_agent.agent.delivery.volume_plan import VolumeName
from gpushare_agent.agent.isolation import isolations_in_use
from gpushare_agent.core.model.errors import AgentError
from gpushare_agent.core.model.names import ENV_LIBRARY_PATH
from gpushare_agent.core.settings.reference import text_of
from gpushare_agent.core.settings.settings import LoadedSettings
from gpushare_agent.core.settings.sources import GPU_MANAGER_DAEMONSET, GPUSHARE_DAEMONSET

log = structlog.get_logger(__name__)

STATELESS = "cordons and the sizes of resized shares are lost when the agent's container ends"
Execute = Callable[[str, list[str], Mapping[str, str]], object]
_MOUNTS = (
    ("kubelet.pod_resources_socket", "mount", "/var/lib/kubelet/pod-resources"),
    ("state_directory", "mount", "/var/lib/gpushare-agent"),
)
_LACKED = {
    GPU_MANAGER_DAEMONSET: _MOUNTS,
    GPUSHARE_DAEMONSET: (
        *_MOUNTS,
        ("isolation", "mount", "/etc/gpu-manager"),
        ("facts.is_written", "right", "patch nodes"),
        ("allocation.cleanup_rejected_pods", "right", "delete pods"),
    ),
}
"""What a DaemonSet and its account lack of manifests/base, each behind the setting that does without."""
_CURES = {
    "mount": "add the volume and the mount of manifests/base",
    "right": "give the account the role of manifests/base, and set this to true",
}


def start(loaded: LoadedSettings, environ: Mapping[str, str], execute: Execute = os.execve) -> None:
    """`execute` does not return."""
    for program, lacked in _LACKED.items():
        for name, kind, what in lacked:
            if loaded.sources[name] == program:
                instead = f"{name}={text_of(attrgetter(name)(loaded.settings))}"
                if name == "state_directory" and loaded.settings.state_directory is None:
                    instead += f", so {STATELESS}"
                log.warning(f"{kind}_missing", **{kind: what, "then": instead, "cure": _CURES[kind]})
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
    # Volume nvidia is of an isolation that mounts it, and fails in an image without the control library.
    is_limited_by_it = any(isolation.mounts_driver for isolation in isolations_in_use(settings))
    only = None if is_limited_by_it else VolumeName.ORIGIN
    driver_volume.collect(settings, only=only)
    if Path(libraries).is_dir():
        sys.stdout.flush()
        path = ":".join(filter(None, (libraries, *paths)))
        execute(sys.executable, sys.orig_argv, {**environ, ENV_LIBRARY_PATH: path})
