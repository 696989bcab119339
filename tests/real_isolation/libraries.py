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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gpushare_agent.agent.isolation.gpushare.format import GpuLimits, encode_usage
from gpushare_agent.agent.isolation.gpushare.format import encode_config as encode_gpushare_config
from gpushare_agent.core.formats.vdevice import VDeviceConfig, encode_config
from native.build_gpushare import build_gpushare
from tests.native.build import (
    NATIVE,
    CannotBuildError,
    build_fake_driver,
    build_vcuda,
    build_vgpu,
    build_vgpu_manager,
    cuda_include,
    install_driver,
    proc_version,
)
from tests.native.gpu_program import DEADLINE_S, Ended, build_gpu_program, end_of

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
    build: Callable[[Path], object]
    fill: Callable[[Path, Limits], dict[str, str]]


LIBRARIES = (
    Library(name="hami-core", build=build_vgpu, fill=_fill_hami_core),
    Library(name="vcuda", is_preloaded=False, build=build_vcuda, fill=_fill_vcuda),
    Library(name="vgpu-manager", build=build_vgpu_manager, fill=_fill_vgpu_manager),
    Library(name="gpushare", build=lambda output: build_gpushare(cuda_include(), output), fill=_fill_gpushare),
)


@dataclass(slots=True, kw_only=True)
class BuiltLibraries:
    """In one directory: driver, programs, and each library that could be built, else the reason."""

    directory: Path
    why_not: dict[str, str] = field(default_factory=dict)
    containers: int = 0

    def machine(self, **settings: object) -> Machine:
        """With a state of its own, below the directory that containers see."""
        self.containers += 1
        state = self.directory / f"machine-{self.containers}"
        state.mkdir()
        return Machine(state=state, settings=settings)

    def container(self, library: Library, machine: Machine, limits: Limits) -> LibraryContainer:
        self.containers += 1
        own = self.directory / f"container-{self.containers}"
        for name in ("root", "etc", "tmp"):
            (own / name).mkdir(parents=True)
        for name in ("passwd", "group"):
            shutil.copy(f"/etc/{name}", own / "etc")
        env = library.fill(own / "etc", limits)
        return LibraryContainer(built=self, machine=machine, library=library, own=own, env=env)


def build_libraries(directory: Path) -> BuiltLibraries:
    """Raises CannotBuildError where there is no driver or no program: then nothing can be run."""
    built = BuiltLibraries(directory=directory)
    driver = build_fake_driver(directory / "built")
    install_driver(driver, directory / "driver", VERSION)
    (directory / "proc/nvidia").mkdir(parents=True)
    (directory / "proc/nvidia/version").write_text(proc_version("proprietary", VERSION))
    (directory / "libraries").mkdir()
    build_gpu_program(directory, driver)
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # each build is a compiler's process
        for library, reason in zip(LIBRARIES, threads.map(partial(_build, directory), LIBRARIES), strict=True):
            if reason:
                built.why_not[library.name] = reason
            elif not library.is_preloaded:
                _put_in_driver_s_place(library, install_driver(driver, directory / library.name, VERSION))
    return built


def _build(directory: Path, library: Library) -> str:
    """Why it could not be built; empty where it could."""
    try:
        library.build(directory / "libraries" / f"{library.name}.so")
    except CannotBuildError as error:
        return str(error)
    return ""


def _put_in_driver_s_place(library: Library, directory: Path) -> None:
    for stem in ("libcuda", "libnvidia-ml"):
        link = directory / f"{stem}.so.1"
        link.unlink()
        link.symlink_to(directory.parent / "libraries" / f"{library.name}.so")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A GPU, by the fake driver's settings (fake_driver/machine.h); its state is a file of its own."""

    state: Path
    settings: Mapping[str, object] = field(default_factory=dict)

    def env(self) -> dict[str, str]:
        own = {"GPUS": 1, "DEVICES": "all", "DRIVER_VERSION": VERSION, "STATE": self.state / "state"}
        own |= {name.upper(): value for name, value in self.settings.items()}
        return {f"FAKE_GPU_{name}": str(value) for name, value in own.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryContainer:
    """`is_bare`: without the library."""

    built: BuiltLibraries
    machine: Machine
    library: Library
    own: Path
    env: Mapping[str, str]
    is_bare: bool = False

    def start(self, *actions: str, way: str = "dlsym", version: int = 12080) -> subprocess.Popen[str]:
        name = "gpu_program_linked" if way == "link" else "gpu_program"
        return self.start_command([str(self.built.directory / name), way, str(version), *actions])

    def start_command(self, command: Sequence[str]) -> subprocess.Popen[str]:
        base = self.built.directory
        variables = self.machine.env() | dict(self.env)
        variables |= {"LD_LIBRARY_PATH": str(base / "driver"), "PATH": "/usr/bin"}
        if self.is_bare:
            pass
        elif self.library.is_preloaded:
            variables["LD_PRELOAD"] = str(base / "libraries" / f"{self.library.name}.so")
        else:
            variables["LD_LIBRARY_PATH"] = str(base / self.library.name)
        words = ["unshare", "--mount", "sh", str(NATIVE / "enter_library_container.sh"), str(self.own), str(base)]
        words += [*(f"{name}={value}" for name, value in variables.items()), *command]
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PATH": os.environ["PATH"] + ":/usr/sbin"},
        )

    def run(self, *actions: str, deadline_s: float = DEADLINE_S, **how: Any) -> Ended:
        return end_of(self.start(*actions, **how), deadline_s)
