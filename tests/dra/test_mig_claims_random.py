"""Claims and the owner of the instances together, over GPUs in memory: claims come and go, the agent restarts, the machine
reboots, and instances are removed by hand. After each step each prepared claim that was asked for has the instance at its
place, and nobody else has."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gpushare_agent.agent.cluster.runtime_classes import RuntimeClasses
from gpushare_agent.agent.dra.claims import Claims
from gpushare_agent.agent.dra.decisions.edits import PreparedClaim
from gpushare_agent.core.model.mig import MigPlacement
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.settings.settings import Settings
from tests.dra.support_claims import NODE, ClaimedNode, Driver, edit_policy, raw_claim, ref_of, result, using
from tests.mig.support_mig import BY_ID, Owner, gpu_uuid, named, slices_of
from tests.support_core import used_cores
from tests.support_deadline import DEADLINE_S
from tests.support_node import node_of

GPUS = 2
PLACES = [
    MigPlacement(gpu_uuid(gpu), one.id, start) for gpu in range(GPUS) for one in BY_ID.values() for start in one.starts
]


class Together:
    def __init__(self, directory: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.owner = Owner(GPUS)
        self.driver = Driver(directory)
        self.active: dict[int, MigPlacement] = {}
        self.numbers = 0
        self.claims = self.new_claims()

    def new_claims(self) -> Claims:
        self.node = node_of(
            settings=Settings(node_name=NODE),
            kind=ClaimedNode,
            pods=self.driver.store,
            claimable={GpuUuid(f"MIG-{life:04}") for life in range(1, 500)},
            inventory=self.owner.seen,
        )
        made = Claims(
            node=self.node,
            policy=lambda: edit_policy("none"),
            runtime_classes=RuntimeClasses(),
            files=self.driver.files,
            isolation=self.driver,  # type: ignore[arg-type]
            mig=self.owner.mig,
            prepare_wait_s=DEADLINE_S,
        )
        made.attach(self.driver.api)  # type: ignore[arg-type]
        self.owner.mig.on_change = made.changed
        return made

    async def restart(self) -> None:
        """Of the agent; the claims' records name the places again."""
        held = {uid: dict(one.places) for uid, one in self.claims.prepared.items()}
        await self.owner.restart()
        self.claims = self.new_claims()
        await self.claims.restore()
        assert {uid: dict(one.places) for uid, one in self.claims.prepared.items()}.keys() == held.keys()
        await self.owner.quiet()

    def fits(self, place: MigPlacement) -> bool:
        """As the scheduler has it, by the slices; engines and computing slices alone are the hardware's to say."""
        taken = {one for at in self.active.values() if at.parent == place.parent for one in slices_of(at)}
        return not taken & slices_of(place) and "+me" not in BY_ID[place.profile].name

    async def prepare(self, number: int) -> None:
        made = await self.claims.prepare(ref_of(number))
        assert isinstance(made, PreparedClaim), (made, self.active)

    async def new(self) -> None:
        free = [place for place in PLACES if self.fits(place)]
        if not free:
            return
        self.numbers += 1
        number, place = self.numbers, self.random.choice(free)
        memory = f"{BY_ID[place.profile].attributes.memory_mib}Mi"
        claim = raw_claim(result(cores=100, memory=memory, device=named(place)), number=number, users=[f"p{number}"])
        self.driver.api.claims[f"claim-{number}"] = claim
        name = f"claim-{number}"
        self.driver.pod(f"p{number}", using("c", (name, "")), claims={name: name})
        self.active[number] = place
        await self.prepare(number)

    async def end(self) -> None:
        if self.active:
            number = self.random.choice(sorted(self.active))
            await self.claims.unprepare(ref_of(number))
            del self.active[number]

    async def step(self) -> None:
        what = self.random.choices(("new", "end", "restart", "reboot", "removed"), (6, 4, 1, 1, 1))[0]
        if what in ("new", "end"):
            await (self.new if what == "new" else self.end)()
        elif what == "restart":
            await self.restart()
        elif what == "reboot":
            self.owner.hardware.reboot()
            await self.restart()
        elif mine := [one for one in self.owner.hardware.all() if one.place in self.active.values()]:
            self.owner.hardware.removed_by_hand(self.random.choice(mine))
            await self.owner.later()
            await self.claims.refresh()
        # The kubelet asks again for what runs, whenever it likes.
        for number in sorted(self.active):
            await self.prepare(number)
        self.check()

    def check(self) -> None:
        found = {one.place: one.uuid for one in self.owner.hardware.all()}
        given = {ref_of(number).uid: found[place] for number, place in self.active.items()}
        assert {uid: one.results[0].gpu for uid, one in self.claims.prepared.items()} == given
        assert used_cores(self.node.cache) == dict.fromkeys(map(GpuUuid, given.values()), 100)
        assert not self.owner.hardware.wrong


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_a_claim_has_the_instance_at_its_place(tmp_path: Path, seed: int) -> None:
    both = Together(tmp_path, seed)
    await both.owner.start()
    try:
        for _ in range(40):
            await both.step()
        for number in sorted(both.active):
            await both.claims.unprepare(ref_of(number))
        both.active.clear()
        both.check()
        assert both.driver.specs() == [] and both.driver.records() == []
    finally:
        await both.owner.stop()
