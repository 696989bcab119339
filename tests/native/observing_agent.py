"""What the agent does for libgpushare while programs run, by its own code: every $OBSERVING_PERIOD_S, a tenth of a second,
it reads the driver, and writes into each container's gpushare.config what its processes have and how long they kept the GPU
busy.

    python observing_agent.py DIRECTORY...

A container is a directory: its processes are those that have it as their working directory; with $OBSERVING_NOBODY none are
anybody's, as to an agent without the host's PID namespace. Ends when no process uses the
GPU any more, or after $OBSERVING_FOR_S, as an agent that is killed. Under virtual_time.c it takes part in that clock.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from pathlib import Path

from gpushare_agent.agent.gpus.nvml.busy_time import NvmlBusyTime
from gpushare_agent.agent.gpus.nvml.session import NvmlSession
from gpushare_agent.agent.isolation.gpushare.claims import Claims
from gpushare_agent.agent.isolation.gpushare.format import (
    CONFIG_BYTES,
    CONFIG_NAME,
    USAGE_NAME,
    GpuLimits,
    Observed,
    gpu_uuids,
    read_paid,
    usage_head_bytes,
    write_observed,
)
from gpushare_agent.agent.isolation.gpushare.observed import PERIOD_S as LOOK_PERIOD_S
from gpushare_agent.agent.isolation.gpushare.observed import RUNS_FOR_S, BusyCount, Owners, used_bytes
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.names import GpuUuid, PodUid
from gpushare_agent.core.model.usage import GpuBusy

PERIOD_S = float(os.environ.get("OBSERVING_PERIOD_S", "0.1"))
ENDS_AFTER_S = float(os.environ.get("OBSERVING_FOR_S", "inf"))
KNOWS_NOBODY = bool(os.environ.get("OBSERVING_NOBODY"))
PATIENCE_S = 20.0


def owners_of(read: GpuBusy, configs: dict[ContainerKey, memoryview]) -> Owners:
    found: dict[int, ContainerKey | None] = {}
    if KNOWS_NOBODY:
        return {process.pid: None for process in read.processes}
    for process in read.processes:
        try:
            key = ContainerKey(PodUid(os.readlink(f"/proc/{process.pid}/cwd")), "main")
        except OSError:  # it has ended
            continue
        found[process.pid] = key if key in configs else None
    return found


def limits_of(config: memoryview) -> GpuLimits:
    flags, cores, ceiling = *struct.unpack_from("I", config, 516), *struct.unpack_from("II", config, 576)
    return GpuLimits(uuid="", cores=cores if flags & 2 else None, ceiling=ceiling if flags & 4 else None)


def main() -> None:
    configs, seen, usages, launched, on_gpu = {}, {}, {}, {}, {}
    for directory in sys.argv[1:]:
        key = ContainerKey(PodUid(os.path.realpath(directory)), "main")
        with (Path(directory) / CONFIG_NAME).open("r+b") as file:
            configs[key] = memoryview(mmap.mmap(file.fileno(), CONFIG_BYTES))
        seen[key], launched[key] = Observed(), (0, float("-inf"), 0)
        on_gpu.setdefault(GpuUuid(gpu_uuids(configs[key])[0]), []).append(key)
        usages[key] = (Path(directory) / USAGE_NAME).open("rb")
    driver, counts, claims = NvmlBusyTime(NvmlSession()), {}, {}
    began, last_used, looked_at = time.monotonic(), None, float("-inf")
    while (last_used is None or time.monotonic() - last_used < 1) and time.monotonic() - began < ENDS_AFTER_S:
        time.sleep(PERIOD_S)
        found = driver.read(on_gpu)
        now, at_ns = time.monotonic(), time.monotonic_ns()
        is_look = now - looked_at >= LOOK_PERIOD_S
        looked_at = now if is_look else looked_at
        for uuid, key in ((uuid, key) for uuid, keys in on_gpu.items() for key in keys):
            file, of_gpu = usages[key], claims.setdefault(uuid, Claims())
            if not is_look and now - launched[key][1] >= RUNS_FOR_S:
                continue
            [paid] = read_paid(os.pread(file.fileno(), usage_head_bytes(1), 0))
            if paid.launches < launched[key][0]:
                of_gpu.of.pop(key, None)
            if (paid.launches, paid.changed_at_ns) != launched[key][::2]:
                launched[key] = paid.launches, now, paid.changed_at_ns
            of_gpu.note(key, limits_of(configs[key]), at_ns, paid)
        for uuid, read in found.items():
            owners, count = owners_of(read, configs), counts.setdefault(uuid, BusyCount())
            count.add(read, owners)
            used = used_bytes(read, owners)
            running = [key for key in on_gpu[uuid] if now - launched[key][1] < RUNS_FOR_S]
            published = claims[uuid].publish(
                {key: count.observed(key, seen[key], read.at_ns, used.get(key)) for key in running}, at_ns, count.busy
            )
            for key, one in published.items():
                seen[key] = one
                write_observed(configs[key], 0, one)
        if any(read.processes for read in found.values()):
            last_used = time.monotonic()
        if last_used is None and time.monotonic() - began > PATIENCE_S:
            raise SystemExit("no process has used the GPU")


if __name__ == "__main__":
    main()
