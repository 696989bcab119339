"""PyTorch programs that compute for some seconds, as those of tenants do: bare and in a share.

    python3 torch_work.py ACTION...

    wait             prints {"action": "wait"} and reads a line
    first            a model with many kinds of kernels: the seconds of each of its first iterations
    KIND:SECONDS     iterations of one of WORKS, counted in windows of half a second

Prints one JSON object a line. Run by whatever Python has PyTorch; nothing of the project is imported.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

WINDOW_S = 0.5
FIRST_ITERATIONS = 4
_STREAMS, _BUSY_HOST_S = 4, 0.0005
_Step = Callable[[], Any]


def put(action: str, **values: Any) -> None:
    print(json.dumps({"action": action, **values}), flush=True)  # noqa: T201 - its output


def gemm(torch: Any) -> tuple[_Step, int]:
    """As large as a training's: 1.7 ms each on an H200, limited by its power."""
    one, other = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: one @ other, 5


def small(torch: Any) -> tuple[_Step, int]:
    """Forty kernels of some microseconds: the host is the slower one."""
    values = torch.randn(4096, device="cuda")

    def step() -> None:
        for _ in range(40):
            values.mul_(1.0)

    return step, 4


def mem(torch: Any) -> tuple[_Step, int]:
    """Reads and writes 512 MiB."""
    values = torch.zeros(128 << 20, device="cuda")
    return lambda: values.mul_(1.0), 10


def train(torch: Any) -> tuple[_Step, int]:
    """A transformer of four layers with Adam."""
    layer = torch.nn.TransformerEncoderLayer(512, 8, 1024, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.randn(16, 128, 512, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        (model(inputs) - inputs).square().mean().backward()
        optimizer.step()

    return step, 2


def streams(torch: Any) -> tuple[_Step, int]:
    """Four streams with a product each, and a host that is busy in between."""
    made = [torch.cuda.Stream() for _ in range(_STREAMS)]
    pieces = [torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) for _ in made]

    def step() -> None:
        for stream, piece in zip(made, pieces, strict=True):
            with torch.cuda.stream(stream):
                piece @ piece
        until = time.monotonic() + _BUSY_HOST_S
        while time.monotonic() < until:
            pass

    return step, 4


WORKS = {"gemm": gemm, "small": small, "mem": mem, "train": train, "streams": streams}


def first(torch: Any) -> None:
    """Convolutions, norms, attention and elementwise functions in several sizes: some hundred kinds of kernels."""
    layers: list[Any] = []
    for width in (32, 64, 96, 128):
        before = layers[-1].out_channels if layers else 3
        layers += [torch.nn.BatchNorm2d(before), torch.nn.Conv2d(before, width, 3, padding=1)]
    body = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(16), torch.nn.Flatten(2)).cuda()
    attention = torch.nn.TransformerEncoderLayer(256, 8, 512, batch_first=True).cuda()
    functions = (
        "sin",
        "cos",
        "tanh",
        "sigmoid",
        "exp",
        "erf",
        "abs",
        "floor",
        "relu",
        "square",
        "atan",
        "sinh",
        "sign",
    )
    optimizer = torch.optim.Adam([*body.parameters(), *attention.parameters()])
    images = torch.randn(32, 3, 64, 64, device="cuda")
    lasted: list[float] = []
    for _ in range(FIRST_ITERATIONS):
        torch.cuda.synchronize()
        started = time.monotonic()
        optimizer.zero_grad(set_to_none=True)
        found = attention(body(images))
        for name in functions:
            for columns in (64, 128, 256):
                found = found + 0.01 * getattr(torch, name)(found[..., :columns].sort().values).mean()
        found.square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
        lasted.append(round(time.monotonic() - started, 4))
    put("first", seconds=lasted)


def work(torch: Any, kind: str, seconds: float) -> None:
    step, batch = WORKS[kind](torch)
    torch.cuda.synchronize()
    windows = [0] * (int(seconds / WINDOW_S) + 1)
    count, started = 0, time.monotonic()
    while (passed := time.monotonic() - started) < seconds:
        for _ in range(batch):
            step()
        torch.cuda.synchronize()
        count += batch
        windows[min(len(windows) - 1, int(passed / WINDOW_S))] += batch
    lasted = time.monotonic() - started
    put("work", kind=kind, count=count, seconds=round(lasted, 3), windows=windows[: int(seconds / WINDOW_S)])
    del step
    torch.cuda.empty_cache()


def main(actions: list[str]) -> None:
    import torch  # type: ignore[import-not-found,unused-ignore]

    torch.cuda.init()
    for action in actions:
        if action == "wait":
            put("wait")
            if not sys.stdin.readline():
                return
        elif action == "first":
            first(torch)
            torch.cuda.empty_cache()
        else:
            kind, _, seconds = action.partition(":")
            work(torch, kind, float(seconds))


if __name__ == "__main__":
    main(sys.argv[1:])
