"""A process that owns the MIG instances of a node, on the NVML that LD_LIBRARY_PATH has, so that a test can kill it.

Started by test_kills.py with the directory of its files. Each line on stdin is a command in JSON, each answer a line:
`{"hold": UID, "places": [NAME…]}` answers the UUIDs of the instances, or why not, and records them first, as claims are;
`{"release": UID}` removes the record first and answers `ended`; `{"drain": true}` answers once no instance is idle any more. All run at the same
time; the answer has the command's `id`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import structlog

from gpushare_agent.agent.gpus.inventory import GpuInventoryState
from gpushare_agent.agent.gpus.nvml.driver import NvmlDriver
from gpushare_agent.agent.gpus.watch import GpuWatch
from gpushare_agent.agent.mig.instances import MigInstances
from gpushare_agent.agent.mig.records import InstanceRecords
from gpushare_agent.core.settings.settings import Settings
from tests.support_node import node_of


async def run(directory: Path) -> None:
    (directory / "boot_id").write_text("boot-1\n")
    claims, inventory = directory / "claims.json", GpuInventoryState()
    driver = NvmlDriver(
        pci_devices=directory / "pci",
        proc=directory / "proc",
        with_instances=True,
        on_demand=["all"],
        mig_minors=directory / "mig-minors",
    )
    settings = Settings.model_validate({"node_name": "node", "mig": {"on_demand": ["all"]}, "state_directory": directory})
    node = node_of(settings=settings, inventory=inventory)
    records = InstanceRecords(directory / "mig.json", boot_id=directory / "boot_id")
    mig = MigInstances(node, driver, GpuWatch(node, driver).poll, records)
    mig.own_node.is_known = True
    inventory.subscribe(lambda _: mig.changed())
    inventory.read(await driver.read())
    await mig.load()
    held = json.loads(claims.read_text()) if claims.exists() else {}
    mig.restore(held)

    def record() -> None:
        fresh = claims.with_suffix(".new")
        fresh.write_text(json.dumps(held))
        fresh.replace(claims)

    async def answer(command: dict[str, Any]) -> object:
        match command:
            case {"hold": str(uid), "places": places}:
                if refused := await mig.hold(uid, places):
                    return refused.detail
                held[uid] = {name: mig.gpus[name].uuid for name in places}
                record()
                return held[uid]
            case {"release": str(uid)}:
                held.pop(uid, None)
                record()
                mig.release(uid)
                return "ended"
            case _:
                mig.own_node.is_draining = True
                mig.changed()
                gone = asyncio.Event()
                mig.on_change = lambda: None if mig._made else gone.set()
                mig.on_change()
                await gone.wait()
                return None

    async def tell(command: dict[str, Any]) -> None:
        said = {"id": command["id"], "answer": await answer(command)}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()

    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(mig.run())
        sys.stdout.write("{}\n")
        sys.stdout.flush()
        while line := await reader.readline():
            group.create_task(tell(json.loads(line)))
        task.cancel()
    await driver.close()


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for the answers
    asyncio.run(run(Path(sys.argv[1])))
