"""What a program finds through one version of the CUDA runtime: 50 steps of memory and copies, then memory until refused.

    python3 cudart_program.py LIBCUDART MOST_MIB

The runtime asks the driver for everything by cuGetProcAddress, each version in its own way. Prints one JSON object a line.
`digest` is that of what was copied back: the same on the bare machine and in a share.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

STEPS, PIECE = 50, 1 << 20
BLOCK_MIB = 64
_TO_HOST = 2


def put(action: str, **values: Any) -> None:
    print(json.dumps({"action": action, **values}), flush=True)  # noqa: T201 - its output


def main(path: str, most_mib: int) -> None:
    runtime = ctypes.CDLL(path)
    version, free, total = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_size_t()
    code = runtime.cudaSetDevice(0) or runtime.cudaRuntimeGetVersion(ctypes.byref(version))
    code = code or runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    digest, done = hashlib.sha256(), 0
    while not code and done < STEPS:
        code = step(runtime, done, digest)
        done += not code
    put(
        "cudart", version=version.value, steps=done, code=code, digest=digest.hexdigest()[:16],
        total_mib=total.value >> 20,
    )  # fmt: skip
    got = 0
    while not code and got < most_mib:
        pointer = ctypes.c_void_p()
        code = runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(BLOCK_MIB << 20))
        got += 0 if code else BLOCK_MIB
    put("allocate", got_mib=got, most_mib=most_mib, code=code)


def step(runtime: ctypes.CDLL, number: int, digest: Any) -> int:
    """Two pieces, one of them from the pool; set, copied to the host, given back."""
    first, second, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(0)
    size, back = ctypes.c_size_t(PIECE), ctypes.create_string_buffer(PIECE)
    calls: tuple[Callable[[], int], ...] = (
        lambda: runtime.cudaMalloc(ctypes.byref(first), size),
        lambda: runtime.cudaMallocAsync(ctypes.byref(second), size, stream),
        lambda: runtime.cudaMemsetAsync(first, number, size, stream),
        lambda: runtime.cudaMemcpyAsync(second, first, size, 3, stream),
        lambda: runtime.cudaMemcpy(back, second, size, _TO_HOST),
        lambda: runtime.cudaFreeAsync(second, stream),
        lambda: int(runtime.cudaDeviceSynchronize()),
        lambda: runtime.cudaFree(first),
    )
    code = next((found for call in calls if (found := call())), 0)
    digest.update(back.raw)
    return int(code)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
