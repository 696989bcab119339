"""A process that calls the driver on command, for test_fake_driver.py: each line is a JSON list, a name and its
arguments.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections import defaultdict
from typing import Any

import pynvml

cuda = ctypes.CDLL("libcuda.so.1")
Size, Address, Handle = ctypes.c_size_t, ctypes.c_uint64, ctypes.c_void_p
taken = Address()
free_last = "cuMemFree_v2"
handles: defaultdict[str, ctypes.c_uint64] = defaultdict(ctypes.c_uint64)
"""By the names that calls give them."""


def call(name: str, *words: int | str) -> int:
    """A function by its name: `&x` is where it writes a handle, `x` that handle, a number of any type itself."""
    places = [handles[word.lstrip("&")] if isinstance(word, str) else Address(word) for word in words]
    out = [isinstance(word, str) and word.startswith("&") for word in words]
    return int(
        getattr(cuda, name)(*(ctypes.byref(at) if is_out else at for at, is_out in zip(places, out, strict=True)))
    )


class Array(ctypes.Structure):
    _fields_ = (("width", Size), ("height", Size), ("format", ctypes.c_int), ("channels", ctypes.c_uint))


class Array3D(ctypes.Structure):
    _fields_ = (
        *(("width", Size), ("height", Size), ("depth", Size)),
        *(("format", ctypes.c_int), ("channels", ctypes.c_uint), ("flags", ctypes.c_uint)),
    )


class OnGpu(ctypes.Structure):
    """The beginning of CUmemAllocationProp and CUmemPoolProps: pinned, no handle type, location (1: a GPU, its
    number).
    """

    _fields_ = (*((name, ctypes.c_int) for name in ("type", "handle", "location", "gpu")), ("rest", ctypes.c_char * 96))


FLOAT, WIDTH = 0x20, 1 << 16


def take(kind: str, size: int) -> int:
    global free_last  # noqa: PLW0603
    out, bytes_, none = ctypes.byref(taken), Size(size), Handle()
    rows, on_gpu, pool = size // (4 * WIDTH), OnGpu(1, 0, 1, 0), Handle()
    free_last = {"vmm": "cuMemRelease", "mipmapped": "cuMipmappedArrayDestroy"}.get(kind, "cuMemFree_v2")
    if kind.startswith("array"):
        free_last = "cuArrayDestroy"
    if kind == "pool":
        cuda.cuMemPoolCreate(ctypes.byref(pool), ctypes.byref(on_gpu))
    calls = {
        "alloc": lambda: cuda.cuMemAlloc_v2(out, bytes_),
        "managed": lambda: cuda.cuMemAllocManaged(out, bytes_, 1),
        "pitch": lambda: cuda.cuMemAllocPitch_v2(out, ctypes.byref(Size()), Size(4 * WIDTH), Size(rows), 4),
        "async": lambda: cuda.cuMemAllocAsync(out, bytes_, none),
        "pool": lambda: cuda.cuMemAllocFromPoolAsync(out, bytes_, pool, none),
        "vmm": lambda: cuda.cuMemCreate(out, bytes_, ctypes.byref(on_gpu), Address(0)),
        "array": lambda: cuda.cuArrayCreate_v2(out, ctypes.byref(Array(WIDTH, rows, FLOAT, 1))),
        "array3d": lambda: cuda.cuArray3DCreate_v2(out, ctypes.byref(Array3D(WIDTH, rows, 0, FLOAT, 1, 0))),
        "mipmapped": lambda: cuda.cuMipmappedArrayCreate(out, ctypes.byref(Array3D(WIDTH, rows, 0, FLOAT, 1, 0)), 1),
    }
    return int(calls[kind]())


def context(ordinal: int) -> int:
    made = Handle()
    return int(
        cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(made), ordinal) or cuda.cuCtxSetCurrent(made)
    )


def variant(name: str, version: int) -> str | None:
    found, status = Handle(), ctypes.c_int()
    cuda.cuGetProcAddress_v2(name.encode(), ctypes.byref(found), version, Address(0), ctypes.byref(status))
    names = (name, *(f"{name}_v{number}" for number in (2, 3, 4)))
    exported = {ctypes.cast(getattr(cuda, each), Handle).value: each for each in names if hasattr(cuda, each)}
    return exported.get(found.value) if found.value else None


def pids(index: int) -> list[list[int]]:
    gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
    listed = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    sampled = pynvml.nvmlDeviceGetProcessUtilization(gpu, 0)
    return [sorted(process.pid for process in listed), sorted(sample.pid for sample in sampled)]


def kernels(count: int, blocks: int = 1) -> float:
    began = time.monotonic()
    for _ in range(count):
        cuda.cuLaunchKernel(None, blocks, 1, 1, 1, 1, 1, 0, None, None, None)
    cuda.cuCtxSynchronize()
    return time.monotonic() - began


def timed_ms(blocks: int) -> float:
    """A kernel's time on the GPU, by two events."""
    before, behind, took = Handle(), Handle(), ctypes.c_float()
    for event in (before, behind):
        cuda.cuEventCreate(ctypes.byref(event), 0)
    cuda.cuEventRecord(before, None)
    cuda.cuLaunchKernel(None, blocks, 1, 1, 1, 1, 1, 0, None, None, None)
    cuda.cuEventRecord(behind, None)
    cuda.cuEventSynchronize(behind)
    cuda.cuEventElapsedTime(ctypes.byref(took), before, behind)
    return took.value


def mapped(size: int) -> int:
    """Virtual memory whose handle is released while it is mapped."""
    handle, on_gpu = Address(), OnGpu(1, 0, 1, 0)
    return int(
        cuda.cuMemCreate(ctypes.byref(handle), Size(size), ctypes.byref(on_gpu), Address(0))
        or cuda.cuMemAddressReserve(ctypes.byref(taken), Size(size), Size(0), Address(0), Address(0))
        or cuda.cuMemMap(taken, Size(size), Size(0), handle, Address(0))
        or cuda.cuMemRelease(handle)
    )


def default_pool() -> Handle:
    pool = Handle()
    cuda.cuDeviceGetDefaultMemPool(ctypes.byref(pool), 0)
    return pool


def gpus() -> list[str]:
    count = pynvml.nvmlDeviceGetCount()
    return [pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]


def answer(name: str, *arguments: Any) -> object:
    if name in ("alloc", "managed", "pitch", "async", "pool", "vmm", "array", "array3d", "mipmapped"):
        return take(name, arguments[0])
    others = {
        "call": call,
        "function": lambda name: int(
            cuda.cuModuleGetFunction(ctypes.byref(handles["function"]), handles["module"], name.encode())
        ),
        "context": context,
        "variant": variant,
        "pids": pids,
        "kernels": kernels,
        "timed_ms": timed_ms,
        "mapped": mapped,
        "unmap": lambda size: int(cuda.cuMemUnmap(taken, Size(size))),
        "keep": lambda size: int(cuda.cuMemPoolSetAttribute(default_pool(), 4, ctypes.byref(Address(size)))),
        "trim": lambda: int(cuda.cuMemPoolTrimTo(default_pool(), Size(0))),
        "gpus": gpus,
        "wait": lambda: int(cuda.cuStreamSynchronize(None)),
        "free": lambda: int(getattr(cuda, free_last)(taken)),
        "pid": os.getpid,
        "driver_version": pynvml.nvmlSystemGetDriverVersion,
        "used": lambda index: pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).used,
        "busy": lambda index: pynvml.nvmlDeviceGetUtilizationRates(pynvml.nvmlDeviceGetHandleByIndex(index)).gpu,
    }
    return others[name](*arguments)


if __name__ == "__main__":
    pynvml.nvmlInit()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(*json.loads(line))) + "\n")
        sys.stdout.flush()
