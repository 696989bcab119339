"""A CUDA program by ctypes, which probe.py runs under libgpushare in a process of its own. Standard library alone.

    python -I -S probe_program.py start|all

It prints one JSON object a line, and ends at the first that has an `error`:

    {"step": "driver"}    libcuda.so.1 is loaded; `libraries` are the files of this process whose name has gpushare
    {"step": "start"}     the GPU has a context and the kernel, which has run once; `cuda` is the driver's version
    {"step": "memory"}    `blocks` of `block_bytes` were given until one was refused, with `code` and `code_by_dlsym`;
                          `total_bytes` is the GPU's memory as this program is shown it
    {"step": "compute"}   twice: for `busy_s` of `seconds` the GPU computed for this program, which for `waited_s` waited
                          for a processor, and had `peak_mib` of the host's memory at most

and reads a line from its standard input before each `compute`, for the limit to be changed meanwhile. The first compute
finds the driver's functions by cuGetProcAddress, as the CUDA runtime does, the second by dlsym, as other programs do.

Source: NVIDIA's CUDA driver API. The kernel is PTX, which the driver compiles for the GPU at hand: no toolkit is needed.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

LONGEST_S = 20
"""The longest life of the process, if nobody is left to end it."""
BLOCK_BYTES = 64 << 20
MOST_BLOCKS = 256
KERNEL_NS = 10_000_000
COMPUTE_S = 0.8
_NEWEST = 12000
"""The functions of this version of CUDA are asked for, if the driver has it."""
_V2 = ("cuMemAlloc", "cuMemFree", "cuMemGetInfo")
"""Their first variants have 32 bits."""

# spin(nanoseconds): returns when so much time has passed by the GPU's timer.
_PTX = b"""
.version 6.0
.target sm_52
.address_size 64
.visible .entry spin(.param .u64 nanoseconds)
{
	.reg .pred %p<2>;
	.reg .b64 %rd<5>;
	ld.param.u64 %rd1, [nanoseconds];
	mov.u64 %rd2, %globaltimer;
SPIN:
	mov.u64 %rd3, %globaltimer;
	sub.u64 %rd4, %rd3, %rd2;
	setp.lt.u64 %p1, %rd4, %rd1;
	@%p1 bra SPIN;
	ret;
}
"""

Function = Callable[..., int]


def put(step: str, **values: object) -> None:
    print(json.dumps({"step": step, **values}), flush=True)  # noqa: T201 - its output


def fail(step: str, error: str) -> NoReturn:
    put(step, error=error)
    sys.exit(0)


class Cuda:
    """The driver's functions, each found in both ways. `must` ends the program if one fails."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            fail("driver", str(error))
        self.version = 0
        self._step = "start"

    def by_dlsym(self, name: str) -> Function:
        try:
            found: Function = self._library[f"{name}_v2" if name in _V2 else name]
        except AttributeError:
            fail(self._step, f"the driver's library has no {name}")
        return found

    def by_address(self, name: str) -> Function:
        """The function by cuGetProcAddress in the form that the driver has; by dlsym if the driver is from before CUDA 11.3,
        which has none."""
        address, status = ctypes.c_void_p(), ctypes.c_int()
        version, flags = min(self.version, _NEWEST), ctypes.c_uint64(0)
        question = (name.encode(), ctypes.byref(address), version, flags)
        if hasattr(self._library, "cuGetProcAddress_v2"):
            code = self._library.cuGetProcAddress_v2(*question, ctypes.byref(status))
        elif hasattr(self._library, "cuGetProcAddress"):
            code = self._library.cuGetProcAddress(*question)
        else:
            return self.by_dlsym(name)
        if code or not address.value:
            fail(self._step, f"cuGetProcAddress finds no {name} of CUDA {version}, error {code}, status {status.value}")
        return ctypes.CFUNCTYPE(ctypes.c_int)(address.value)

    def must(self, name: str, *arguments: object) -> None:
        if code := self.by_dlsym(name)(*arguments):
            fail(self._step, f"{name} fails with CUDA error {code}")

    def start(self) -> Launch:
        """A context on the first GPU that this process sees, and the kernel, compiled."""
        version, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.must("cuInit", 0)
        self.must("cuDriverGetVersion", ctypes.byref(version))
        self.version = version.value
        self.must("cuDeviceGet", ctypes.byref(device), 0)
        self.must("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.must("cuCtxSetCurrent", context)
        self.must("cuModuleLoadData", ctypes.byref(module), _PTX)
        self.must("cuModuleGetFunction", ctypes.byref(function), module, b"spin")
        launch = Launch(self, function)
        # Of the same length as all others: the library takes the shortest time of a kernel for what it costs.
        launch.run(self.by_dlsym)
        put("start", cuda=self.version)
        return launch

    def take_memory(self) -> None:
        """Allocates until it is refused, then once more by the other way; gives it back."""
        self._step = "memory"
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.must("cuMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        allocate, by_dlsym, code = self.by_address("cuMemAlloc"), self.by_dlsym("cuMemAlloc"), 0
        blocks: list[ctypes.c_uint64] = []
        while not code and len(blocks) < MOST_BLOCKS:
            address = ctypes.c_uint64()
            code = allocate(ctypes.byref(address), ctypes.c_size_t(BLOCK_BYTES))
            blocks += [] if code else [address]
        further = ctypes.c_uint64()
        code_by_dlsym = by_dlsym(ctypes.byref(further), ctypes.c_size_t(BLOCK_BYTES))
        for address in (*blocks, *(() if code_by_dlsym else (further,))):
            self.must("cuMemFree", address)
        put(
            self._step, blocks=len(blocks), block_bytes=BLOCK_BYTES, code=code, code_by_dlsym=code_by_dlsym,
            free_bytes=free.value, total_bytes=total.value,
        )  # fmt: skip


class Launch:
    """Runs the kernel, and waits for its end."""

    def __init__(self, cuda: Cuda, function: ctypes.c_void_p) -> None:
        self._cuda, self._function = cuda, function
        self._nanoseconds = ctypes.c_uint64(KERNEL_NS)
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._nanoseconds))

    def run(self, find: Callable[[str], Function], seconds: float = 0.0) -> None:
        """Runs once, or for so long; then says how much of that time the GPU computed."""
        launch, wait = find("cuLaunchKernel"), find("cuCtxSynchronize")
        kernel = (self._function, 1, 1, 1, 32, 1, 1, 0, None, self._parameters, None)
        count, began, before_s = 0, time.monotonic(), waited_s()
        while not count or time.monotonic() - began < seconds:
            if code := launch(*kernel) or wait():
                fail("compute" if seconds else "start", f"a launch fails with CUDA error {code}")
            count += 1
        if seconds:
            put(
                "compute",
                peak_mib=peak_mib(),
                busy_s=round(count * KERNEL_NS / 1e9, 4),
                seconds=round(time.monotonic() - began, 4),
                waited_s=round(waited_s() - before_s, 4),
            )


def own_libraries() -> list[str]:
    with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as maps:
        return sorted({line.split(None, 5)[5].strip() for line in maps if "gpushare" in line and line.count("/")})


def peak_mib() -> int:
    """The peak of this process's memory. Not by getrusage, which also has that of the process that started it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) >> 10


def waited_s(process: int | str = "thread-self") -> float:
    """Seconds for which a process's first thread, or this thread, could run and others had the processors; 0 where it has
    ended, or the kernel does not count them."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except OSError:
        return 0.0


def main() -> None:
    signal.alarm(LONGEST_S)
    cuda = Cuda()
    put("driver", libraries=own_libraries())
    launch = cuda.start()
    if sys.argv[1] == "start":
        return
    cuda.take_memory()
    for find in (cuda.by_address, cuda.by_dlsym):
        sys.stdin.readline()
        launch.run(find, COMPUTE_S)


if __name__ == "__main__":
    main()
