"""A process that uses the NVML driver on command, so that a test can put a library of its own in its way.

Started by tests/gpus/support_nvml.py. Each line on stdin is a command, each answer one line of JSON: `read` answers the
inventory, `sample` what is used (`sample_600` after 600 rounds more), `busy UUID…` who keeps GPUs busy, `events` what
happened, each of them the error instead; `begin_wait` begins to wait an hour for the first event and answers nothing, while
other commands are answered, and `end_wait` answers what it brought; `check_limits PATH MAY_SET` and
`keep_limit UUID PATH MIB MAY_SET` (0 or 1) ask for a cgroup's memory limit; `create UUID PROFILE START` and
`destroy UUID JSON` make and remove a MIG instance, `create_new` makes one that must not be there, `begin_create` begins to
and `end_wait` answers its result; `held UUID…` names the GPUs that containers have; `threads` answers the number of NVML
threads alive, `kept` how much the reader remembers, `logged` the log's events so far, `close` nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import warnings
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from msgspec import json as msgspec_json
from msgspec import to_builtins
from structlog.testing import LogCapture

from gpushare_agent.agent.gpus.nvml.driver import NvmlDriver
from gpushare_agent.core.kit import daemon_thread
from gpushare_agent.core.model.errors import AgentError, Rejected, Unavailable
from gpushare_agent.core.model.isolation import MemoryLimit
from gpushare_agent.core.model.mig import MigGpuInstance, MigPlacement
from gpushare_agent.core.model.names import GpuUuid
from tests.gpus.support_gpus import shape


async def answer(driver: NvmlDriver, log: LogCapture, waiting: list[asyncio.Task[object]], command: str) -> object:
    if command == "begin_wait":
        waiting.append(asyncio.create_task(events(driver, 3600.0)))  # noqa: TID251 - outlives this run of the loop
        await asyncio.sleep(0)  # its thread is called: the loop stands still until the next command
        return None
    if command == "end_wait":
        return await waiting.pop()
    if command == "threads":
        return sum(thread.name.startswith("nvml") for thread in threading.enumerate())
    if command == "kept":
        layouts = driver._reader.layouts
        kept = (driver._reader._known, layouts._last, layouts._profiles, layouts._placed, layouts._compute_profiles)
        return [len(one) for one in kept]
    if command == "logged":
        return log.entries
    if command.startswith("held"):
        driver.in_use = lambda: [GpuUuid(uuid) for uuid in command.split()[1:]]
        return None
    if command == "close":
        await driver.close()
        return None
    if command.startswith(("check_limits ", "keep_limit ")):
        return await limits(driver, command.split())
    if command.startswith(("create ", "create_new ", "destroy ", "begin_create ")):
        return await instance(driver, waiting, command)
    name, *words = command.split()
    calls = {"read": read, "sample": sample, "sample_600": sample_600, "events": events}
    call = partial(busy, uuids=words) if name == "busy" else calls[name]
    before = set(threading.enumerate())
    try:
        result = await call(driver)
    except Unavailable as error:
        return {"unavailable": str(error)}
    for thread in set(threading.enumerate()) - before:
        thread.join()  # it has delivered its answer: `threads` counts only those that hang
    return result


async def read(driver: NvmlDriver) -> dict[str, Any]:
    inventory = await driver.read()
    return {
        "gpus": [to_builtins(gpu) for gpu in inventory.gpus],
        "divided": [gpu.uuid for gpu in inventory.mig_partitioned],
        "layouts": to_builtins(inventory.mig_layouts),
        "links": [[f"{link.kind.name}{link.nvlinks or ''}" for link in row] for row in inventory.topology.links],
        "tree": shape(inventory.tree),
        "driver_version": inventory.driver_version,
        "cuda_version": inventory.cuda_version,
        "unreadable": inventory.unreadable,
    }


async def sample(driver: NvmlDriver) -> dict[str, Any]:
    return to_builtins(await driver.sample())


async def sample_600(driver: NvmlDriver) -> dict[str, Any]:
    for _ in range(600):
        await driver.sample()
    return await sample(driver)


async def busy(driver: NvmlDriver, uuids: list[str]) -> dict[str, Any]:
    return to_builtins(await driver.sample_busy([GpuUuid(uuid) for uuid in uuids]))


async def limits(driver: NvmlDriver, words: list[str]) -> dict[str, Any] | None:
    may_set = words[-1] == "1"
    try:
        if words[0] == "check_limits":
            await driver.check_memory_limits(Path(words[1]), may_set=may_set)
            return None
        wanted = MemoryLimit(gpu=GpuUuid(words[1]), cgroup=Path(words[2]), limit_bytes=int(words[3]) << 20)
        [outcome] = await driver.keep_memory_limits([wanted], may_set=may_set)
    except (Rejected, Unavailable) as error:
        return {type(error).__name__.lower(): str(error)}
    return to_builtins(outcome)


async def instance(driver: NvmlDriver, waiting: list[asyncio.Task[object]], command: str) -> object:
    name, parent, *words = command.split(maxsplit=2)
    if name == "destroy":
        call = driver.destroy_instance(GpuUuid(parent), msgspec_json.decode(words[0], type=MigGpuInstance))
    else:
        profile, start = words[0].split()
        place = MigPlacement(GpuUuid(parent), int(profile), int(start))
        call = driver.create_instance(place, is_new=name == "create_new")
    if name == "begin_create":
        waiting.append(asyncio.create_task(answered(call)))  # noqa: TID251 - outlives this run of the loop
        await asyncio.sleep(0)
        return None
    return await answered(call)


async def answered(call: Coroutine[Any, Any, MigGpuInstance | None]) -> object:
    """The error by its name, or what was made."""
    try:
        return to_builtins(await call)
    except AgentError as error:
        return {type(error).__name__.lower(): str(error)}


async def events(driver: NvmlDriver, wait_s: float = 0.0) -> list[dict[str, Any]]:
    """Without the IDs of MIG instances where an event has none."""
    found = [to_builtins(event) for event in await driver.events(wait_s)]
    return [{key: value for key, value in event.items() if value is not None or key == "uuid"} for event in found]


def main() -> None:
    warnings.simplefilter("error")
    log = LogCapture()
    structlog.configure(processors=[log])  # stdout is for the answers
    daemon_thread.KEEP_S = 0.0  # `answer` waits for the end of each thread
    with asyncio.Runner() as runner:
        directory = Path(sys.argv[1])
        on_demand = directory / "on-demand"
        driver = NvmlDriver(
            pci_devices=directory / "pci",
            proc=directory / "proc",
            timeout_s=float(sys.argv[2]),
            with_instances=(directory / "mig-minors").exists(),
            on_demand=on_demand.read_text().split() if on_demand.exists() else (),
            mig_minors=directory / "mig-minors",
            unified_memory_mib=int(sys.argv[3]),
        )
        waiting: list[asyncio.Task[object]] = []
        for line in sys.stdin:
            sys.stdout.write(json.dumps(runner.run(answer(driver, log, waiting, line.strip()))) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
