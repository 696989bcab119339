"""A process that uses the NVML driver on command, so that a test can put a library of its own in its way.

Started by tests/adapters/test_nvml.py. Each line on stdin is a command, each answer one line of JSON:
`read` answers the inventory or the error, `threads` the number of NVML threads alive, `close` nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import threading
from pathlib import Path

import structlog

from gpushare_agent.adapters.nvml import NvmlDriver
from gpushare_agent.model.errors import Unavailable
from gpushare_agent.model.topology_tree import render_tree


async def answer(driver: NvmlDriver, command: str) -> object:
    if command == "threads":
        return sum(thread.name == "nvml" for thread in threading.enumerate())
    if command == "close":
        return await driver.close()
    try:
        inventory = await driver.read()
    except Unavailable as error:
        return {"unavailable": str(error)}
    return {
        "cards": [dataclasses.asdict(card) for card in inventory.cards],
        "links": [[f"{link.kind.name}{link.nvlinks or ''}" for link in row] for row in inventory.topology.links],
        "tree": render_tree(inventory.topology),
        "driver_version": inventory.driver_version,
        "unreadable": inventory.unreadable,
    }


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for the answers
    with asyncio.Runner() as runner:
        driver = NvmlDriver(pci_devices=Path(sys.argv[1]), timeout_s=float(sys.argv[2]))
        for line in sys.stdin:
            sys.stdout.write(json.dumps(runner.run(answer(driver, line.strip()))) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
