"""What a PyTorch program finds in its share: imports, allocates until it is refused, multiplies matrices.

    python3 torch_program.py MOST_MIB SECONDS

Prints one JSON object a line. Run by whatever Python has PyTorch; nothing of the project is imported.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

PIECE_MIB = 64
SIZE = 4096
STEPS = 50


def put(action: str, **values: Any) -> None:
    print(json.dumps({"action": action, **values}), flush=True)  # noqa: T201 - its output


def main(most_mib: int, seconds: float) -> None:
    started = time.monotonic()
    import torch  # type: ignore[import-not-found,unused-ignore]

    imported = time.monotonic()
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info()
    put(
        "torch", version=torch.__version__, cuda=torch.version.cuda, import_s=round(imported - started, 3),
        init_s=round(time.monotonic() - imported, 3), total_mib=total >> 20, free_mib=free >> 20,
    )  # fmt: skip
    pieces: list[Any] = []
    error = ""
    while len(pieces) * PIECE_MIB < most_mib:
        try:
            pieces.append(torch.empty(PIECE_MIB << 20, dtype=torch.uint8, device="cuda"))
        except (RuntimeError, torch.cuda.OutOfMemoryError) as raised:  # a library before the driver may answer anything
            error = f"{type(raised).__name__}: {str(raised).splitlines()[0][:200]}"
            break
    put("allocate", got_mib=len(pieces) * PIECE_MIB, most_mib=most_mib, error=error)
    del pieces
    torch.cuda.empty_cache()
    multiply(torch, seconds)
    replay(torch, seconds / 2)
    train(torch)


def multiply(torch: Any, seconds: float) -> None:
    """bf16 where the GPU has it, else fp16. Random numbers: zeros are faster than real data."""
    kind = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    one, other = (torch.randn(SIZE, SIZE, device="cuda").to(kind) for _ in range(2))
    for _ in range(3):
        one @ other
    torch.cuda.synchronize()
    count, started = 0, time.monotonic()
    while time.monotonic() - started < seconds:
        for _ in range(10):
            one @ other
        torch.cuda.synchronize()
        count += 10
    lasted = time.monotonic() - started
    put(
        "matmul",
        count=count,
        seconds=round(lasted, 3),
        tflops=round(2e-12 * SIZE**3 * count / lasted, 2),
        dtype=str(kind),
    )


def replay(torch: Any, seconds: float) -> None:
    """The same, ten of them in a CUDA graph."""
    one, other = (torch.randn(SIZE, SIZE, device="cuda").to(torch.float16) for _ in range(2))
    one @ other
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            one @ other
    count, started = 0, time.monotonic()
    while time.monotonic() - started < seconds:
        graph.replay()
        torch.cuda.synchronize()
        count += 10
    lasted = time.monotonic() - started
    put("graph", count=count, seconds=round(lasted, 3), tflops=round(2e-12 * SIZE**3 * count / lasted, 2))


def train(torch: Any) -> None:
    """50 steps, all in one captured graph; `result` is the last loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(512, 256, device="cuda")

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()  # as PyTorch's guide has it: the first steps, on another stream, allocate what stays
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(STEPS):
        graph.replay()
    torch.cuda.synchronize()
    put("train", steps=STEPS, result=float(loss))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
