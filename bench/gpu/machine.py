"""The machine of a run: where the driver's libraries are, what NVML says of the GPU, and what else the report names.

NVML through pynvml (wheel nvidia-ml-py), which the run has installed by then; numbers are in MiB and percent.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MIB = 1024 * 1024
WAYS = ("nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo")
"""To ask for the use of each process."""
_DRIVER_DIRECTORIES = (
    "/usr/local/nvidia/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib",
    "/usr/lib/wsl/lib", "/run/nvidia/driver/usr/lib/x86_64-linux-gnu", "/run/nvidia/driver/usr/lib64",
)  # fmt: skip
_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
_XID_CRITICAL_ERROR = 8
_MOST_EVENTS = 100


def library_path(given: Path | None) -> str:
    """What LD_LIBRARY_PATH must have for the driver's libraries to be found; empty where the loader finds them.

    Raises FileNotFoundError, with where it was searched.
    """
    if given is not None:
        _check_directory(given)
        return str(given.resolve())
    inherited = os.environ.get("LD_LIBRARY_PATH", "")
    if all(map(_loads, _LIBRARIES)):
        return inherited
    for directory in map(Path, _DRIVER_DIRECTORIES):
        if all((directory / name).exists() for name in _LIBRARIES):
            return ":".join(filter(None, (str(directory), inherited)))
    searched = ", ".join(("the loader's own places", *_DRIVER_DIRECTORIES))
    raise FileNotFoundError(
        f"no {' and '.join(_LIBRARIES)}: this machine has no NVIDIA driver, or it is elsewhere (searched: {searched}); "
        "name its directory with --driver-libraries"
    )


def _check_directory(directory: Path) -> None:
    for name in _LIBRARIES:
        if not (directory / name).exists():
            raise FileNotFoundError(f"--driver-libraries: {directory} has no {name}")


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


class Nvml:
    """One GPU, by NVML's index. Raises pynvml.NVMLError in `open` where there is none; later what fails is None."""

    def __init__(self, path: str, index: int) -> None:
        self._path, self._index = path, index
        self._nvml: Any = None
        self._handle: Any = None
        self._events: Any = None

    def open(self) -> None:
        for directory in filter(None, self._path.split(":")):
            if (library := Path(directory, _LIBRARIES[1])).exists():
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # pynvml then finds it by its name
                break
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(self._index)

    def close(self) -> None:
        if self._handle is not None:
            self._ask("nvmlShutdown")

    def facts(self) -> dict[str, Any]:
        memory = self._of_gpu("nvmlDeviceGetMemoryInfo")
        cuda = self._ask("nvmlSystemGetCudaDriverVersion_v2") or 0
        return {
            "gpu": _text(self._of_gpu("nvmlDeviceGetName")),
            "uuid": _text(self._of_gpu("nvmlDeviceGetUUID")),
            "memory_mib": memory.total // MIB if memory is not None else None,
            "gpus": self._ask("nvmlDeviceGetCount"),
            "driver": _text(self._ask("nvmlSystemGetDriverVersion")),
            "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
            "compute_mode": self._of_gpu("nvmlDeviceGetComputeMode"),
            "has_memory_limits": hasattr(ctypes.CDLL(_LIBRARIES[1]), "nvmlDeviceSetMemoryLimits_v1"),
        }

    def used_mib(self) -> float | None:
        """Of the whole GPU."""
        memory = self._of_gpu("nvmlDeviceGetMemoryInfo")
        return None if memory is None else round(memory.used / MIB, 1)

    def processes(self) -> dict[int, float | None]:
        """Memory by PID, as the driver counts PIDs."""
        found = self._of_gpu("nvmlDeviceGetComputeRunningProcesses") or ()
        return {one.pid: None if one.usedGpuMemory is None else round(one.usedGpuMemory / MIB, 1) for one in found}

    def utilization(self) -> int | None:
        rates = self._of_gpu("nvmlDeviceGetUtilizationRates")
        return None if rates is None else int(rates.gpu)

    def process_utilization(self, seconds: float) -> dict[int, float]:
        """Mean percent of the multiprocessors by PID over the driver's samples of the last seconds."""
        since = int((time.time() - seconds) * 1e6)
        samples: dict[int, list[int]] = {}
        for one in self._of_gpu("nvmlDeviceGetProcessUtilization", since) or ():
            if one.timeStamp >= since:
                samples.setdefault(one.pid, []).append(one.smUtil)
        return {pid: round(sum(values) / len(values), 1) for pid, values in sorted(samples.items())}

    def utilization_samples(self, since_us: int) -> list[tuple[int, int, int]]:
        """The driver's samples since then as they are: PID, microseconds since the epoch, percent."""
        found = self._of_gpu("nvmlDeviceGetProcessUtilization", since_us) or ()
        return [(int(one.pid), int(one.timeStamp), int(one.smUtil)) for one in found]

    def utilization_by(self, way: str, since_us: int) -> list[tuple[int, int, int]] | str:
        """The same by one of WAYS; the driver's error where it refuses."""
        try:
            found = getattr(self._nvml, way)(self._handle, since_us)
        except (self._nvml.NVMLError, AttributeError) as error:
            return str(error)
        return [(int(one.pid), int(one.timeStamp), int(one.smUtil)) for one in found]

    def watch_xids(self) -> None:
        """From now on; `xids` has them."""
        if (events := self._ask("nvmlEventSetCreate")) is not None:
            self._events = events
            self._of_gpu("nvmlDeviceRegisterEvents", _XID_CRITICAL_ERROR, events)

    def xids(self, timeout_s: float) -> list[int]:
        """Those since `watch_xids`; waits for the first one so long."""
        found: list[int] = []
        events, self._events = self._events, None
        wait_ms = int(timeout_s * 1000)
        while events is not None and len(found) < _MOST_EVENTS:
            event = self._ask("nvmlEventSetWait_v2", events, wait_ms)
            if event is None:
                break
            found.append(int(event.eventData))
            wait_ms = 200
        if events is not None:
            self._ask("nvmlEventSetFree", events)
        return found

    def _of_gpu(self, name: str, *arguments: Any) -> Any:
        """NVML's functions take the handle first, but for those that register events."""
        return self._ask(name, self._handle, *arguments)

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, name)(*arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None


def _text(value: str | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def system_facts(environment: dict[str, str]) -> dict[str, Any]:
    """What of the machine bears on the results."""
    return {
        "kernel": platform.release(),
        "kernel_module": _kernel_module(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "glibc": " ".join(platform.libc_ver()),
        "is_root": os.geteuid() == 0,
        "cgroups": "v2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "v1 or none",
        "nvidia_smi": (shutil.which("nvidia-smi", path=environment["PATH"]) or ""),
        "mps_control": (shutil.which("nvidia-cuda-mps-control", path=environment["PATH"]) or ""),
        "torch": _torch_version(environment),
        "jax": python_with("jax", environment) or "",
    }


def _kernel_module() -> str:
    """The first line of the driver's file: it says whether the module is the open one."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return "/proc/driver/nvidia/version is not there"
    return re.sub(r"\s+", " ", line.removeprefix("NVRM version:")).strip()


def torch_python(environment: dict[str, str]) -> str | None:
    return python_with("torch", environment)


def python_with(package: str, environment: dict[str, str]) -> str | None:
    """The first Python of PATH that has the package, such as PyTorch: nox's own, which comes first there, seldom has it."""
    script = f"import importlib.util as u; print(u.find_spec('{package}') is not None)"
    for directory in dict.fromkeys(environment["PATH"].split(os.pathsep)):
        found = shutil.which("python3", path=directory)
        if found and _output([found, "-c", script]) == "True":
            return found
    return None


def _torch_version(environment: dict[str, str]) -> str:
    python = torch_python(environment)
    return (
        ""
        if python is None
        else _output([python, "-c", "from importlib.metadata import version as v; print(v('torch'))"])
    )


def _output(command: Sequence[str]) -> str:
    try:
        return subprocess.run(list(command), capture_output=True, text=True, timeout=20, check=False).stdout.strip()  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""


def smi_memory_mib(text: str) -> int | None:
    """What `nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits` printed of the first GPU."""
    match = re.match(r"\s*(\d+)", text)
    return int(match[1]) if match else None
