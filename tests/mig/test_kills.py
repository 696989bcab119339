"""Claims and the owner of their instances in a process of their own, on the fake libnvidia-ml.so.1, which kills it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count, product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gpushare_agent.core.claims.devices import placement_device_name
from gpushare_agent.core.formats.mig_profiles import has_room, mig_profiles
from gpushare_agent.core.kit.directories import NEW_PREFIX
from gpushare_agent.core.model.mig import MigPlacement, MigProfile
from gpushare_agent.core.model.names import GpuUuid
from tests.gpus.support_mig import Hardware, machine_of
from tests.gpus.support_nvml import ROOT, becomes, fake_library
from tests.gpus.test_nvml_mig import MINORS
from tests.support_deadline import DEADLINE_S
from tests.support_process import running_process

BLOCK_MIB = 256
PRODUCT, MIB, GPUS = "NVIDIA H100 80GB HBM3", 81559, 2
PROFILES = mig_profiles(PRODUCT, MIB)
MACHINE = machine_of(*[(PRODUCT, MIB)] * GPUS) + "rights config monitor\n"
CREATES = ("nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance")
DESTROYS = ("nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy")
POINTS = [*product(("before", "after"), (*CREATES, *DESTROYS))]
FOREIGN = next(one for one in PROFILES if one.name == "1g.10gb+me")
Place = tuple[int, MigProfile, int]


@pytest.fixture(scope="module")
def library() -> Iterator[Path]:
    with fake_library() as directory:
        yield directory


class Process:
    """One life of the owner."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._ids = count()
        self.is_dead = False

    async def ask(self, **command: Any) -> Any:
        """None where the process was killed before it answered."""
        if self.is_dead:
            return None
        number = next(self._ids)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": number, **command}).encode() + b"\n")
        return await answer

    async def read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            said = json.loads(line)
            self._waiting.pop(said["id"]).set_result(said["answer"])
        self.is_dead = True
        for answer in self._waiting.values():
            answer.set_result(None)


@asynccontextmanager
async def running(library: Path, directory: Path) -> AsyncIterator[Process]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(library)}
    environment["FAKE_NVML_SCRIPT"] = str(directory / "script")
    program = ROOT / "tests" / "mig" / "support_mig_node.py"
    async with running_process(
        sys.executable, program, directory, stdin=PIPE, stdout=PIPE, stderr=asyncio.subprocess.DEVNULL, env=environment
    ) as child:
        assert child.stdout is not None and child.stdin is not None
        assert await child.stdout.readline() == b"{}\n"
        made = Process(child)
        async with asyncio.TaskGroup() as group:
            group.create_task(made.read())
            yield made
            child.stdin.close()


class Cluster:
    """Claims as a scheduler places them: on the first place that is free, from the end of each GPU."""

    def __init__(self, random: Random, hardware: Hardware) -> None:
        self.random, self.hardware = random, hardware
        self.claims: dict[str, Place] = {}
        self.prepared: dict[str, str] = {}
        self.ending: set[str] = set()
        self.made = 0

    def place(self, profile: MigProfile) -> Place | None:
        for gpu in range(GPUS):
            placed = [(one, start) for at, one, start in self.claims.values() if at == gpu]
            placed += [(FOREIGN, 0)] if gpu == 0 else []
            for start in sorted(profile.starts, reverse=True):
                if has_room(PROFILES, placed, profile, start):
                    return gpu, profile, start
        return None

    def new(self) -> None:
        if (where := self.place(self.random.choice(PROFILES))) is not None:
            self.claims[f"claim-{self.made}"] = where
            self.made += 1

    async def step(self, process: Process) -> None:
        """Some claims end while others are prepared."""
        self.ending = {uid for uid in self.claims if uid in self.ending or self.random.random() < 0.4}
        ended, self.ending = self.ending, set()
        for uid in ended:
            self.prepared.pop(uid, None)
        waiting = [uid for uid in self.claims if uid not in self.prepared and uid not in ended]
        async with asyncio.TaskGroup() as group:
            for uid in ended:
                group.create_task(self.end(process, uid))
            for uid in waiting:
                group.create_task(self.prepare(process, uid))
        self.check()

    async def end(self, process: Process, uid: str) -> None:
        # The kubelet asks again until it is answered.
        if await process.ask(unprepare=number_of(uid)):
            del self.claims[uid]
        else:
            self.ending.add(uid)

    async def prepare(self, process: Process, uid: str) -> None:
        _, profile, _ = self.claims[uid]
        memory = f"{profile.attributes.memory_mib // BLOCK_MIB * BLOCK_MIB}Mi"
        answer = await process.ask(prepare=number_of(uid), device=name_of(self.claims[uid]), memory=memory)
        if answer is not None:
            assert answer.startswith("MIG-"), answer
            self.prepared[uid] = answer

    def check(self) -> None:
        """Each prepared claim has the instance that it was given, at its place, and nothing overlaps."""
        there = {(gpu, profile, start): uuids for gpu, profile, start, uuids in self.hardware.instances}
        for uid, uuid in self.prepared.items():
            gpu, profile, start = self.claims[uid]
            assert there.get((gpu, profile.id, start)) == [uuid], uid
        assert there[0, FOREIGN.id, 0] == ["MIG-foreign"]
        for gpu in range(GPUS):
            slices: list[int] = []
            for at, number, start in there:
                size = next(one.size for one in PROFILES if one.id == number)
                slices += range(start, start + size) if at == gpu else ()
            assert len(slices) == len(set(slices))


def number_of(uid: str) -> int:
    return int(uid.removeprefix("claim-"))


def name_of(place: Place) -> str:
    gpu, profile, start = place
    return placement_device_name(MigPlacement(GpuUuid(f"GPU-{gpu}"), profile.id, start), profile.name)


@pytest.mark.slow
async def test_two_hundred_claims_under_twenty_kills(library: Path, tmp_path: Path) -> None:
    (tmp_path / "mig-minors").write_text(MINORS)
    becomes(tmp_path / "script", MACHINE)
    random, hardware = Random(50), Hardware(tmp_path)
    hardware.make(0, 9, FOREIGN, 0, ("MIG-foreign", 1))
    cluster, kills = Cluster(random, hardware), 0
    async with asyncio.timeout(5 * DEADLINE_S):
        while cluster.made < 200 or kills < 20:
            if kills < 20:
                when, function = POINTS[kills % len(POINTS)]
                becomes(tmp_path / "script", f"{MACHINE}kill {when} {function} {random.randint(1, 4)}\n")
            async with running(library, tmp_path) as process:
                before = cluster.made
                while not process.is_dead and (kills < 20 or cluster.made < 200) and cluster.made < before + 40:
                    cluster.new()
                    cluster.new()
                    await cluster.step(process)
                kills += process.is_dead
            becomes(tmp_path / "script", MACHINE)
        async with running(library, tmp_path) as process:
            while cluster.claims:
                await cluster.step(process)
            await process.ask(drain=True)
    assert (kills, cluster.made >= 200) == (20, True)
    assert hardware.instances == [(0, FOREIGN.id, 0, ["MIG-foreign"])]
    assert json.loads((tmp_path / "mig.json").read_text())["instances"] == []
    # Of a writer that was killed there may be its new file.
    left = [*os.listdir(tmp_path / "claims"), *os.listdir(tmp_path / "cdi")]
    assert [name for name in left if not name.startswith(NEW_PREFIX)] == []
