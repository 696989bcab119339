"""The four libraries that keep shares from within a container, each as its own project puts it there, but without an
agent: what they do to programs on the fake driver, side by side.

A program runs with a root of its own: the machine's /usr, an /etc with the library's files, and the driver where its version
names it. Processes have the host's PIDs, which is what every one of the libraries can follow. Needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpushare_agent.agent.isolation.gpushare.format import GpuLimits, encode_usage
from gpushare_agent.agent.isolation.gpushare.format import encode_config as encode_gpushare_config
from gpushare_agent.core.formats.vdevice import VDeviceConfig, encode_config
from tests.native.build import NATIVE, install_driver, proc_version
from tests.native.gpu_program import DEADLINE_S, Ended, end_of
from tests.real_isolation.support_isolation import Built

VERSION = "580.95.05"
UUIDS = [f"GPU-00000000-0000-4000-8000-{index:012x}" for index in range(2)]
POD, CONTAINER = "11111111-2222-3333-4444-555555555555", "main"
MIB = 1 << 20

_GPU_CLIENT = r"""#!/bin/sh
# Registers its parent, as the agent would: four bytes of pids.config.
unset LD_PRELOAD
for shift in 0 8 16 24; do
    printf "\\$(printf %03o $((PPID >> shift & 255)))"
done >>/etc/vcuda/pids.config
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of each GPU."""

    memory_mib: int
    cores: int
    gpus: int = 1


def _fill_gpushare(etc: Path, limits: Limits) -> dict[str, str]:
    each = {"memory_bytes": limits.memory_mib * MIB, "cores": 100 * limits.cores}
    gpus = [GpuLimits(uuid=uuid, **each) for uuid in UUIDS[: limits.gpus]]
    (etc / "vcuda").mkdir()
    (etc / "vcuda/gpushare.config").write_bytes(encode_gpushare_config(POD, CONTAINER, gpus))
    (etc / "vcuda/usage").write_bytes(encode_usage())
    return {}


def _fill_hami_core(etc: Path, limits: Limits) -> dict[str, str]:
    (etc / "hami").mkdir()
    return {
        **{f"CUDA_DEVICE_MEMORY_LIMIT_{gpu}": f"{limits.memory_mib}m" for gpu in range(limits.gpus)},
        "CUDA_DEVICE_SM_LIMIT": str(limits.cores),
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": "/etc/hami/cache",
        "LIBCUDA_LOG_LEVEL": "0",
    }


def _fill_vcuda(etc: Path, limits: Limits) -> dict[str, str]:
    (etc / "vcuda").mkdir()
    config = VDeviceConfig(
        pod_uid=POD, container=CONTAINER, limit=0, memory_bytes=limits.memory_mib * MIB, utilization=limits.cores,
        hard_limit=True, driver=(580, 95), enable=True,
    )  # fmt: skip
    (etc / "vcuda/vcuda.config").write_bytes(encode_config(config))
    (etc / "vcuda/pids.config").touch()
    client = etc.parent / "gpu-client"
    client.write_text(_GPU_CLIENT)
    client.chmod(0o755)
    return {"LOGGER_LEVEL": "1"}


def _fill_vgpu_manager(etc: Path, limits: Limits) -> dict[str, str]:
    (etc / "vgpu-manager").mkdir()
    return {
        **{f"CUDA_MEM_LIMIT_{gpu}": f"{limits.memory_mib}m" for gpu in range(limits.gpus)},
        **{f"CUDA_CORE_LIMIT_{gpu}": str(limits.cores) for gpu in range(limits.gpus)},
        "MANAGER_VISIBLE_DEVICES": ",".join(UUIDS[: limits.gpus]),
        "MANAGER_COMPATIBILITY_MODE": "0",
        "CUDA_SM_SHARED_BUCKET": "true",
        "VMEMORY_NODE_ENABLED": "true",
        "VGPU_POD_UID": POD,
        "VGPU_CONTAINER_NAME": CONTAINER,
        "LOGGER_LEVEL": "1",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """`fill` makes its files in the container's /etc, and answers the container's variables. One that is not preloaded
    stands in the driver's place, under its names."""

    name: str
    is_preloaded: bool = True
    fill: Callable[[Path, Limits], dict[str, str]]


LIBRARIES = (
    Library(name="hami-core", fill=_fill_hami_core),
    Library(name="vcuda", is_preloaded=False, fill=_fill_vcuda),
    Library(name="vgpu-manager", fill=_fill_vgpu_manager),
    Library(name="gpushare", fill=_fill_gpushare),
)


class Libraries:
    """Containers with one of the libraries each. All that they see lies below the directory of what was built."""

    def __init__(self, built: Built) -> None:
        self.built, self.directory = built, built.directory
        self._made = 0
        self.driver = install_driver(built.driver, self.directory / f"driver-{VERSION}", VERSION)
        self.in_its_place = install_driver(built.driver, self.directory / "in-its-place", VERSION)
        if isinstance(control := built.libraries["vcuda"], Path):
            for link in (self.in_its_place / "libcuda.so.1", self.in_its_place / "libnvidia-ml.so.1"):
                link.unlink()
                link.symlink_to(control)
        (self.directory / "proc/nvidia").mkdir(parents=True)
        (self.directory / "proc/nvidia/version").write_text(proc_version("proprietary", VERSION))

    def _directory(self) -> Path:
        self._made += 1
        made = self.directory / f"made-{self._made}"
        made.mkdir()
        return made

    def machine(self, **settings: object) -> dict[str, str]:
        """A GPU with a state of its own, as the variables of the fake driver's settings (fake_driver/machine.h)."""
        own = {"GPUS": 1, "DEVICES": "all", "DRIVER_VERSION": VERSION, "STATE": self._directory() / "state"}
        own |= {name.upper(): value for name, value in settings.items()}
        return {f"FAKE_GPU_{name}": str(value) for name, value in own.items()}

    def container(self, library: Library, machine: Mapping[str, str], limits: Limits) -> LibraryContainer:
        """Skips the test where the library could not be built."""
        if isinstance(reason := self.built.libraries[library.name], str):
            pytest.skip(reason)
        own = self._directory()
        for name in ("root", "etc", "tmp"):
            (own / name).mkdir()
        for name in ("passwd", "group"):
            shutil.copy(f"/etc/{name}", own / "etc")
        return LibraryContainer(self, library, own, {**machine, **library.fill(own / "etc", limits)})


@dataclass(frozen=True, slots=True)
class LibraryContainer:
    """`is_bare`: without the library."""

    libraries: Libraries
    library: Library
    own: Path
    env: Mapping[str, str]
    is_bare: bool = False

    def start(self, *actions: str, way: str = "dlsym", version: int = 12080) -> subprocess.Popen[str]:
        name = "gpu_program_linked" if way == "link" else "gpu_program"
        return self.start_command([str(self.libraries.built.programs / name), way, str(version), *actions])

    def start_command(self, command: Sequence[str]) -> subprocess.Popen[str]:
        base, driver, preload = self.libraries.directory, self.libraries.driver, {}
        if self.library.is_preloaded and not self.is_bare:
            preload = {"LD_PRELOAD": self.libraries.built.libraries[self.library.name]}
        elif not self.is_bare:
            driver = self.libraries.in_its_place
        variables = {**self.env, "LD_LIBRARY_PATH": driver, "PATH": "/usr/bin", **preload}
        words = ["unshare", "--mount", "sh", str(NATIVE / "enter_library_container.sh"), str(self.own), str(base)]
        words += [*(f"{name}={value}" for name, value in variables.items()), *command]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(words, **pipes, text=True, env={"PATH": os.environ["PATH"] + ":/usr/sbin"})

    def run(self, *actions: str, deadline_s: float = DEADLINE_S, **how: Any) -> Ended:
        return end_of(self.start(*actions, **how), deadline_s)
