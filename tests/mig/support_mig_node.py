"""A process that prepares claims of MIG instances and owns these, on the NVML that LD_LIBRARY_PATH has, so that a test can
kill it.

Started by test_kills.py with the directory of its files. Each line on stdin is a command in JSON, each answer a line:
`{"prepare": NUMBER, "device": NAME, "memory": TEXT}` answers the UUID of the claim's instance, or why not;
`{"unprepare": NUMBER}` answers `ended`; `{"drain": true}` answers once no instance is idle any more. All run at the same
time; the answer has the command's `id`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import structlog
from msgspec.structs import replace

from gpushare_agent.agent.cluster.runtime_classes import RuntimeClasses
from gpushare_agent.agent.dra.claim_files import ClaimFiles
from gpushare_agent.agent.dra.claims import Claims
from gpushare_agent.agent.gpus.inventory import GpuInventoryState
from gpushare_agent.agent.gpus.nvml.driver import NvmlDriver
from gpushare_agent.agent.gpus.watch import GpuWatch
from gpushare_agent.agent.mig.instances import MigInstances
from gpushare_agent.agent.mig.records import InstanceRecords
from gpushare_agent.core.model.errors import Refused
from gpushare_agent.core.model.isolation import DeviceListStrategy
from gpushare_agent.core.settings.settings import Settings
from tests.dra.support_claims import FakeClaimApi, edit_policy, raw_claim, ref_of, result, using
from tests.support_core import pod
from tests.support_node import FreeIsolations, node_of


class Isolations(FreeIsolations):
    cdi_watch = None


class Owner:
    def __init__(self, directory: Path) -> None:
        (directory / "boot_id").write_text("boot-1\n")
        self.inventory = GpuInventoryState()
        self.driver = NvmlDriver(
            pci_devices=directory / "pci",
            proc=directory / "proc",
            with_instances=True,
            on_demand=["all"],
            mig_minors=directory / "mig-minors",
        )
        settings = {"node_name": "node", "mig": {"on_demand": ["all"]}, "state_directory": directory}
        self.node = node_of(settings=Settings.model_validate(settings), inventory=self.inventory, has_claims=True)
        records = InstanceRecords(directory / "mig.json", boot_id=directory / "boot_id")
        self.mig = MigInstances(self.node, self.driver, GpuWatch(self.node, self.driver).poll, records)
        self.mig.own_node.is_known = True
        self.api = FakeClaimApi()
        strategies = (DeviceListStrategy.DEVICE_NODES, DeviceListStrategy.ENVVAR)
        self.claims = Claims(
            node=self.node,
            policy=lambda: replace(edit_policy("none"), strategies=strategies),
            runtime_classes=RuntimeClasses(),
            files=ClaimFiles(directory / "claims", directory / "cdi"),
            isolation=Isolations(),  # type: ignore[arg-type]
            mig=self.mig,
        )
        self.claims.attach(self.api)  # type: ignore[arg-type]
        self.inventory.subscribe(lambda _: self.changed())
        self.node.cache.subscribe(lambda _old, _new: self.claims.changed())
        self.mig.on_change = self.claims.changed

    def changed(self) -> None:
        self.mig.changed()
        self.claims.changed()

    async def run(self) -> None:
        self.inventory.read(await self.driver.read())
        await self.mig.load()
        await self.claims.restore()
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        async with asyncio.TaskGroup() as group:
            services = [group.create_task(self.mig.run()), group.create_task(self.claims.run())]
            tell({})
            while line := await reader.readline():
                group.create_task(self.obey(json.loads(line)))
            for one in services:
                one.cancel()
        await self.driver.close()

    async def obey(self, command: dict[str, Any]) -> None:
        tell({"id": command["id"], "answer": await self.answer(command)})

    async def answer(self, command: dict[str, Any]) -> str:
        if "drain" in command:
            gone = asyncio.Event()
            self.mig.on_change = lambda: None if self.mig._made else gone.set()
            self.mig.own_node.is_draining = True
            self.mig.changed()
            self.mig.on_change()
            await gone.wait()
            await self.mig._save()  # the step that found it may still write, and the process ends with the answer
            return "drained"
        if "unprepare" in command:
            await self.claims.unprepare(ref_of(command["unprepare"]))
            return "ended"
        number, device = command["prepare"], command["device"]
        asked = result(cores=100, memory=command["memory"], device=device)
        self.api.claims[f"claim-{number}"] = raw_claim(asked, number=number, users=(f"pod-{number}",))
        self.node.pods.upsert(pod(f"pod-{number}", using("main", ("gpu", "")), claims={"gpu": f"claim-{number}"}))
        made = await self.claims.prepare(ref_of(number))
        return made.detail if isinstance(made, Refused) else made.places[device]


def tell(said: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for the answers
    asyncio.run(Owner(Path(sys.argv[1])).run())
