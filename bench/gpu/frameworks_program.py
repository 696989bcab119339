"""50 steps of training with JAX, or 50 reductions with NCCL, in a share as on the bare machine.

    python3 frameworks_program.py jax|nccl

NCCL is called by ctypes, with memory of PyTorch, in which it comes. Prints one JSON object a line; `result` is what
came out. Run by whatever Python has the framework; nothing of the project is imported.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

STEPS = 50
_UNIQUE_ID_BYTES = 128
_FLOAT, _SUM = 7, 0  # nccl.h: ncclFloat32, ncclSum


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * _UNIQUE_ID_BYTES),)


def put(action: str, **values: Any) -> None:
    print(json.dumps({"action": action, **values}), flush=True)  # noqa: T201 - its output


def jax() -> None:
    import jax  # type: ignore[import-not-found,unused-ignore]
    import jax.numpy as jnp  # type: ignore[import-not-found,unused-ignore]

    if jax.default_backend() != "gpu":
        raise SystemExit("JAX sees no GPU")
    key = jax.random.PRNGKey(0)
    inputs, weights = jax.random.normal(key, (512, 256)), jax.random.normal(key, (256, 256)) / 16

    def loss(of: Any) -> Any:
        return jnp.mean((jnp.tanh(inputs @ of) - inputs) ** 2)

    step = jax.jit(lambda of: of - 0.1 * jax.grad(loss)(of))
    started = time.monotonic()
    for _ in range(STEPS):
        weights = step(weights)
    put("jax", steps=STEPS, result=float(loss(weights)), seconds=round(time.monotonic() - started, 3))


def nccl() -> None:
    import torch  # type: ignore[import-not-found,unused-ignore]

    torch.cuda.init()
    library = ctypes.CDLL("libnccl.so.2")  # PyTorch has loaded its own: found by its name
    unique, communicator = UniqueId(), ctypes.c_void_p()
    library.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
    values = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
    code = library.ncclGetUniqueId(ctypes.byref(unique))
    code = code or library.ncclCommInitRank(ctypes.byref(communicator), 1, unique, 0)
    started, done = time.monotonic(), 0
    while not code and done < STEPS:
        at, count = ctypes.c_void_p(values.data_ptr()), ctypes.c_size_t(values.numel())
        code = library.ncclAllReduce(at, at, count, _FLOAT, _SUM, communicator, ctypes.c_void_p(0))
        done += not code
    torch.cuda.synchronize()
    result = float(values.double().sum())
    put("nccl", steps=done, code=code, result=result, seconds=round(time.monotonic() - started, 3))


if __name__ == "__main__":
    {"jax": jax, "nccl": nccl}[sys.argv[1]]()
