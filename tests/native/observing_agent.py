"""What the agent does for libgpushare while programs run: every $OBSERVING_PERIOD_S, a tenth of a second, it reads the
driver, and writes into each container's gpushare.config what its processes have and how busy they keep the GPU.

    python observing_agent.py DIRECTORY...

A container is a directory: its processes are those that have it as their working directory. Ends when no process uses the
GPU any more. Under virtual_time.c it takes part in that clock.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from pathlib import Path

import pynvml

from gpushare_agent.isolation.gpushare.format import CONFIG_BYTES, CONFIG_NAME, Observed, write_observed

PERIOD_S = float(os.environ.get("OBSERVING_PERIOD_S", "0.1"))
PATIENCE_S = 20.0


def containers_of_pids(pids: list[int]) -> dict[int, str]:
    found = {}
    for pid in pids:
        try:
            found[pid] = os.readlink(f"/proc/{pid}/cwd")
        except OSError:  # it has ended
            continue
    return found


def observe(gpu: object, configs: dict[str, memoryview], samples: int) -> bool:
    """Whether any process uses the GPU."""
    used = {one.pid: one.usedGpuMemory or 0 for one in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
    try:
        busy = {one.pid: one.smUtil * 10 for one in pynvml.nvmlDeviceGetProcessUtilization(gpu, 0)}
    except pynvml.NVMLError_NotFound:
        busy = {}
    homes = containers_of_pids(list(used))
    for directory, config in configs.items():
        own = {pid for pid, home in homes.items() if home == directory}
        observed = Observed(
            at_ns=time.monotonic_ns(),
            used_bytes=sum(used[pid] for pid in own),
            busy=min(1000, sum(busy.get(pid, 0) for pid in own)),
            busy_others=min(1000, sum(percent for pid, percent in busy.items() if pid not in own)),
            samples=samples,
        )
        write_observed(config, 0, observed)
    return bool(used)


def main() -> None:
    configs = {}
    for directory in sys.argv[1:]:
        with (Path(directory) / CONFIG_NAME).open("r+b") as file:
            configs[os.path.realpath(directory)] = memoryview(mmap.mmap(file.fileno(), CONFIG_BYTES))
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    began, samples, last_used = time.monotonic(), 0, None
    while last_used is None or time.monotonic() - last_used < 1:
        time.sleep(PERIOD_S)
        samples += 1
        if observe(gpu, configs, samples):
            last_used = time.monotonic()
        if last_used is None and time.monotonic() - began > PATIENCE_S:
            raise SystemExit("no process has used the GPU")


if __name__ == "__main__":
    main()
