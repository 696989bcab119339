"""MIG instances that are made on simulated GPUs: as the driver makes, keeps and refuses them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpushare_agent.agent.gpus.simulated import instances
from gpushare_agent.agent.gpus.simulated.driver import SimulatedDriver
from gpushare_agent.core.formats.mig_profiles import mig_profiles
from gpushare_agent.core.model.errors import AgentError, Conflict, NotFound, Rejected, Unavailable
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.mig import MigGpuInstance, MigLayout, MigPlacement
from gpushare_agent.core.model.names import GpuUuid
from tests.gpus.support_health import simulated

ONE, ONE_ME, TWO, THREE, FOUR, SEVEN = 19, 20, 14, 9, 5, 0
"""The driver's IDs of the profiles with seven slices."""


class Machine:
    """Two GPUs; `agent` is what runs on it, and may be another one at any time."""

    def __init__(self, faults: Path, *, name: str = "NVIDIA H100 80GB HBM3", memory: int = 81559) -> None:
        self.faults, self.name, self.memory = faults, name, memory
        self.has({"0": []})
        self.agent = self.new_agent()

    def has(self, mig: dict[str, list[str]], **faults: Any) -> None:
        self.faults.write_text(json.dumps({"mig": mig, **faults}))

    def new_agent(self, *, on_demand: Sequence[str] = ("all",), with_instances: bool = True) -> SimulatedDriver:
        self.agent = simulated(
            gpu_memory_mib=(self.memory,), gpu_name=self.name, faults_file=self.faults, on_demand=on_demand,
            with_instances=with_instances,
        )  # fmt: skip
        return self.agent

    @property
    def saved(self) -> Path:
        return self.faults.with_name(f"{self.faults.name}.mig")

    async def uuid(self, index: int = 0) -> GpuUuid:
        return next(gpu.uuid for gpu in (await self.agent.read()).known if gpu.index == index)

    async def make(self, profile: int, start: int, *, gpu: int = 0) -> MigGpuInstance:
        return await self.agent.create_instance(MigPlacement(await self.uuid(gpu), profile, start))

    async def remove(self, instance: MigGpuInstance, *, gpu: int = 0) -> None:
        await self.agent.destroy_instance(await self.uuid(gpu), instance)

    async def layout(self) -> MigLayout:
        (found,) = (await self.agent.read()).mig_layouts
        return found

    async def refusal(self, profile: int, start: int) -> type[AgentError] | None:
        try:
            await self.make(profile, start)
        except AgentError as error:
            return type(error)
        return None


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "faults.json")


def places(inventory: GpuInventory) -> dict[str, tuple[str, int | None, int | None]]:
    """Profile, its ID and start of each instance, by UUID."""
    return {gpu.uuid: (gpu.mig.profile, gpu.mig.profile_id, gpu.mig.start) for gpu in inventory.gpus if gpu.mig}


async def test_a_gpu_of_on_demand_has_a_layout_without_instances(machine: Machine) -> None:
    """It is divided, not Unhealthy. One that is not selected is out of service, with what to do."""
    found = await machine.agent.read()
    assert [gpu.index for gpu in found.mig_partitioned] == [0]
    assert [(gpu.index, gpu.is_healthy, gpu.mig_mode) for gpu in found.gpus] == [(1, True, False)]
    (layout,) = found.mig_layouts
    assert (layout.parent, layout.slices, layout.instances, layout.problem) == (
        found.mig_partitioned[0].uuid,
        8,
        (),
        "",
    )
    assert layout.profiles == mig_profiles(machine.name, machine.memory)
    assert len(layout.placements) == 7 + 7 + 4 + 3 + 2 + 1 + 1
    machine.has({"0": [], "1": []})
    found = await machine.new_agent(on_demand=("0",)).read()
    assert [(gpu.index, gpu.is_withheld) for gpu in found.gpus] == [(1, True)]
    assert [layout.parent for layout in found.mig_layouts] == [found.mig_partitioned[0].uuid]
    # Profiles of instances that claims have get no resource of the device plugin, for which the agent would reload.
    machine.has({"0": ["3g.20gb"], "1": ["1g.5gb"]})
    found = await machine.new_agent(on_demand=("0",)).read()
    assert {gpu.mig.profile for gpu in found.gpus if gpu.mig} == {"3g.20gb", "1g.5gb"}
    assert found.mig_profiles == {"1g.5gb"}
    found = await machine.new_agent(with_instances=False).read()
    assert ["mig_strategy" in gpu.unhealthy_reason for gpu in found.gpus] == [True, True]


async def test_an_instance_outlives_the_agent_and_no_reboot(machine: Machine) -> None:
    """A new agent finds it; after a reboot it is gone."""
    made = await machine.make(THREE, 4)
    assert (made.gi, made.profile, made.start, made.size, [one.slices for one in made.compute]) == (1, THREE, 4, 4, [3])
    first = await machine.agent.read()
    again = await machine.new_agent().read()
    assert places(first) == places(again) == {made.compute[0].uuid: ("3g.40gb", THREE, 4)}
    assert [gpu.memory_mib for gpu in again.gpus if gpu.mig] == [40448]
    assert again.mig_layouts[0].instances == (made,)
    machine.saved.write_text(machine.saved.read_text().replace('"boot_id":"', '"boot_id":"0'))
    assert (await machine.layout()).instances == ()
    machine.saved.write_text("{")
    assert (await machine.layout()).instances == ()


@pytest.mark.parametrize("others", [{}, {"1": []}])
async def test_a_gpu_that_leaves_mig_mode_has_no_instance_when_it_is_back(
    machine: Machine, others: dict[str, list[str]]
) -> None:
    await machine.make(ONE, 6)
    machine.has(others)
    assert places(await machine.agent.read()) == {}
    machine.has({"0": []})
    assert places(await machine.agent.read()) == {} and (await machine.layout()).instances == ()


async def test_ids_are_used_again_and_uuids_are_not(machine: Machine) -> None:
    """The UUID tells one life of an instance from the next; an order to remove the earlier one removes nothing."""
    first, other = await machine.make(ONE, 6), await machine.make(ONE, 5)
    await machine.remove(first)
    await machine.remove(first)
    again = await machine.make(ONE, 6)
    assert (first.gi, other.gi, again.gi) == (1, 2, 1)
    assert len({one.compute[0].uuid for one in (first, other, again)}) == 3
    await machine.remove(first)
    assert set((await machine.layout()).instances) == {other, again}


@pytest.mark.parametrize(
    ("name", "memory", "there", "wanted", "refused"),
    [
        ("NVIDIA H100 80GB HBM3", 81559, [(THREE, 4)], (ONE, 5), Conflict),
        ("NVIDIA H100 80GB HBM3", 81559, [(THREE, 4)], (THREE, 4), Conflict),
        ("NVIDIA H100 80GB HBM3", 81559, [(THREE, 4)], (FOUR, 0), None),
        ("NVIDIA H100 80GB HBM3", 81559, [(ONE_ME, 0)], (ONE_ME, 1), Conflict),
        ("NVIDIA H100 80GB HBM3", 81559, [(ONE, 0)], (SEVEN, 0), Conflict),
        ("NVIDIA H100 80GB HBM3", 81559, [], (TWO, 1), NotFound),
        ("NVIDIA H100 80GB HBM3", 81559, [], (TWO, 6), NotFound),
        ("NVIDIA H100 80GB HBM3", 81559, [], (77, 0), NotFound),
        ("NVIDIA A30", 24576, [(21, 0)], (6, 2), Conflict),
        ("NVIDIA A30", 24576, [(21, 0)], (5, 2), None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, [(65, 9)], (14, 0), Conflict),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, [(65, 9)], (67, 0), None),
    ],
)
async def test_a_place_without_room_is_refused(
    tmp_path: Path, name: str, memory: int, there: list[tuple[int, int]], wanted: tuple[int, int], refused: object
) -> None:
    """By slices, by the count of its profile, and by engines; a place that the product has not is not found."""
    machine = Machine(tmp_path / "faults", name=name, memory=memory)
    for profile, start in there:
        await machine.make(profile, start)
    assert await machine.refusal(*wanted) is refused
    assert len((await machine.layout()).instances) == len(there) + (refused is None)


async def test_a_gpu_that_is_not_in_mig_mode_or_lost_makes_none(machine: Machine) -> None:
    """Out of MIG mode also what was made is gone."""
    await machine.make(ONE, 0)
    with pytest.raises(NotFound):
        await machine.make(ONE, 0, gpu=1)
    with pytest.raises(NotFound):
        await machine.agent.create_instance(MigPlacement(GpuUuid("GPU-other"), ONE, 0))
    machine.has({"0": []}, lost={"0": "fell off the bus"})
    assert await machine.refusal(ONE, 1) is Unavailable
    found = await machine.agent.read()
    assert [gpu.is_healthy for gpu in found.gpus if gpu.mig] == [False]
    assert found.mig_layouts[0].problem == "fell off the bus"
    machine.has({})
    found = await machine.agent.read()
    assert (len(found.gpus), found.mig_layouts, found.mig_partitioned) == (2, (), ())


async def test_instances_of_the_file_lie_at_the_first_place_with_room_and_stay(machine: Machine) -> None:
    """Whatever the agent makes and removes next to them; they are not the agent's to remove."""
    machine.has({"0": ["1g.10gb", "3g.40gb"]})
    assert sorted(places(await machine.agent.read()).values()) == [("1g.10gb", ONE, 0), ("3g.40gb", THREE, 4)]
    made = await machine.make(ONE, 1)
    machine.has({"0": ["1g.10gb", "3g.40gb", "1g.10gb", "2g.20gb"]})
    found = await machine.agent.read()
    expected = [("1g.10gb", ONE, 0), ("1g.10gb", ONE, 1), ("1g.10gb", ONE, 2), ("3g.40gb", THREE, 4)]
    # No room is left for 2g.20gb: it is shown as the file has it, and lies nowhere.
    assert sorted(places(found).values(), key=str) == sorted([*expected, ("2g.20gb", None, None)], key=str)
    assert [gpu.mig.number for gpu in found.gpus if gpu.mig and gpu.uuid == made.compute[0].uuid] == [4]
    await machine.remove(made)
    for agent in (machine.agent, machine.new_agent()):
        assert sorted(places(await agent.read()).values(), key=str)[1] == ("1g.10gb", ONE, 2)
        assert [one.start for one in (await agent.read()).mig_layouts[0].instances] == [0, 4, 2]
    static = (await machine.layout()).instances[0]
    with pytest.raises(Rejected, match="faults file"):
        await machine.remove(static)
    machine.has({"0": ["3g.40gb"]})
    assert list(places(await machine.agent.read()).values()) == [("3g.40gb", THREE, 0)]


async def test_a_missing_right_is_in_the_layout_and_in_each_call(machine: Machine) -> None:
    """As without mig/config."""
    made = await machine.make(ONE, 0)
    machine.has({"0": []}, mig_faults={"0": {"refused": "no right to mig/config"}})
    assert (await machine.layout()).problem == "no right to mig/config"
    assert await machine.refusal(ONE, 1) is Rejected
    with pytest.raises(Rejected, match="mig/config"):
        await machine.remove(made)
    assert (await machine.layout()).instances == (made,)


async def test_what_is_in_use_is_not_removed_or_half(machine: Machine) -> None:
    """Half destroyed it is no MIG device, keeps its place, can be made whole again under its ID, and removed later."""
    made = await machine.make(TWO, 2)
    machine.has({"0": []}, mig_faults={"0": {"in_use": "compute"}})
    with pytest.raises(Conflict):
        await machine.remove(made)
    assert (await machine.layout()).instances == (made,)
    machine.has({"0": []}, mig_faults={"0": {"in_use": "gpu"}})
    with pytest.raises(Conflict):
        await machine.remove(made)
    (half,) = (await machine.layout()).instances
    assert (half.gi, half.start, half.compute, places(await machine.agent.read())) == (made.gi, 2, (), {})
    assert await machine.refusal(ONE, 3) is Conflict
    again = await machine.make(TWO, 2)
    assert again.gi == made.gi
    assert again.compute[0].uuid != made.compute[0].uuid
    with pytest.raises(Conflict):
        await machine.remove(again)
    machine.has({"0": []})
    await machine.remove(half)
    assert (await machine.layout()).instances == ()


async def test_a_slow_gpu_delays_no_other_and_goes_on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that nobody waits for any more makes its instance all the same."""
    machine.has({"0": [], "1": []}, mig_faults={"0": {"create_s": 5}})
    may_go_on, waits = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        if seconds:
            waits.set()
            may_go_on.wait(30)

    monkeypatch.setattr(instances.time, "sleep", sleep)
    first, second = await machine.uuid(0), await machine.uuid(1)
    async with asyncio.TaskGroup() as tasks:
        slow = tasks.create_task(machine.agent.create_instance(MigPlacement(first, ONE, 0)))
        await asyncio.to_thread(waits.wait, 30)
        await machine.agent.create_instance(MigPlacement(second, ONE, 0))
        slow.cancel()
    assert [len(one.instances) for one in (await machine.agent.read()).mig_layouts] == [0, 1]
    may_go_on.set()
    # The same place again: its thread answers after the call before.
    machine.has({"0": [], "1": []})
    with pytest.raises(Conflict):
        await machine.agent.create_instance(MigPlacement(first, ONE, 0))
    assert [len(one.instances) for one in (await machine.agent.read()).mig_layouts] == [1, 1]
