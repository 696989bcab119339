"""Simulated cards: what they are made of, and how their faults are rehearsed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpushare_agent.adapters.simulated_gpus import SimulatedDriver
from gpushare_agent.model.errors import Corrupt, StartupError, Unavailable
from gpushare_agent.model.gpus import GpuInventory, Health
from gpushare_agent.model.topology_tree import render_tree
from tests.support_gpus import topology_text


def simulated(
    *,
    cards: int = 2,
    memory: tuple[int, ...] = (24576,),
    topology: str | None = None,
    seed: str = "n1",
    faults: Path | None = None,
) -> SimulatedDriver:
    return SimulatedDriver(
        cards=cards,
        card_memory_mib=memory,
        topology_text=topology,
        card_name="NVIDIA Simulated 24GB",
        seed=seed,
        faults_file=faults,
    )


async def inventory_of(driver: SimulatedDriver) -> GpuInventory:
    inventory = await driver.read()
    await driver.close()
    return inventory


async def test_uuids_are_the_same_after_a_restart_and_differ_between_nodes_and_cards() -> None:
    """The kubelet's checkpoint names cards by UUID, so a restarted agent must find the same ones."""
    first, again = await inventory_of(simulated(cards=8)), await inventory_of(simulated(cards=8))
    other = await inventory_of(simulated(cards=8, seed="n2"))
    assert first == again
    assert len({card.uuid for card in (*first.cards, *other.cards)}) == 16
    assert all(card.uuid.startswith("GPU-") for card in first.cards)


async def test_bus_ids_differ_and_minors_are_the_indexes() -> None:
    """Also for the largest number of cards."""
    cards = (await inventory_of(simulated(cards=64))).cards
    assert len({card.bus_id for card in cards}) == 64
    assert [card.minor for card in cards] == [card.index for card in cards] == list(range(64))
    assert all(len(card.bus_id) == len("00000000:3B:00.0") for card in cards)


async def test_the_default_machine_has_pairs_and_numa_nodes_of_four() -> None:
    """Six cards: two pairs on the first node, one on the second."""
    inventory = await inventory_of(simulated(cards=6))
    assert [card.numa_node for card in inventory.cards] == [0, 0, 0, 0, 1, 1]
    assert render_tree(inventory.topology).splitlines() == [
        "ROOT:6",
        "|--SYS:6",
        "|  |--PHB:4",
        "|  |  |--PIX:2",
        "|  |  |  |--GPU0",
        "|  |  |  |--GPU1",
        "|  |  |--PIX:2",
        "|  |  |  |--GPU2",
        "|  |  |  |--GPU3",
        "|  |--PIX:2",
        "|  |  |--GPU4",
        "|  |  |--GPU5",
    ]


async def test_a_topology_text_decides_the_number_of_cards_and_their_numa_nodes() -> None:
    """The --cards setting is not asked then."""
    inventory = await inventory_of(simulated(cards=2, topology=topology_text("t4-x4-two-sockets")))
    assert [card.numa_node for card in inventory.cards] == [0, 0, 1, 1]


async def test_a_short_memory_list_repeats_its_last_value() -> None:
    """Cards may differ."""
    inventory = await inventory_of(simulated(cards=4, memory=(81920, 24576)))
    assert [card.memory_mib for card in inventory.cards] == [81920, 24576, 24576, 24576]


async def test_nvlinks_are_those_of_the_matrix() -> None:
    """A V100 of the cube mesh has six links; eight links of an NVSwitch machine end at the switch."""
    mesh = await inventory_of(simulated(topology=topology_text("v100-x8-cube-mesh")))
    assert {len(card.nvlinks) for card in mesh.cards} == {6}
    assert [link.remote_bus_id for link in mesh.cards[0].nvlinks].count(mesh.cards[3].bus_id) == 2
    switched = await inventory_of(simulated(topology=topology_text("h100-x8-nvswitch")))
    assert {len(card.nvlinks) for card in switched.cards} == {18}
    assert len({link.remote_bus_id for card in switched.cards for link in card.nvlinks}) == 1


def test_more_memory_sizes_than_cards_are_refused_naming_both_numbers() -> None:
    """A size too many is a mistake in the settings."""
    with pytest.raises(StartupError, match="3 card memory sizes were given for 2 cards"):
        simulated(cards=2, memory=(1, 2, 3))


@pytest.mark.parametrize("cards", [0, -1, 65])
def test_an_impossible_number_of_cards_is_refused(cards: int) -> None:
    """One to 64 cards can be simulated."""
    with pytest.raises(StartupError, match="choose 1 to 64"):
        simulated(cards=cards)


@pytest.mark.parametrize("memory", [(), (0,), (24576, -1)])
def test_impossible_memory_sizes_are_refused(memory: tuple[int, ...]) -> None:
    """Every card has some memory."""
    with pytest.raises(StartupError, match="sizes above 0 MiB"):
        simulated(memory=memory)


def test_a_faulty_topology_text_is_refused() -> None:
    """The error is that of the text."""
    with pytest.raises(Corrupt, match="no line names a GPU"):
        simulated(topology="nonsense")


async def test_lost_cards_are_unhealthy_with_the_given_reason_until_the_file_says_otherwise(tmp_path: Path) -> None:
    """Faults come and go while the agent runs."""
    faults = tmp_path / "faults.json"
    driver = simulated(cards=3, faults=faults)
    before = await driver.read()
    faults.write_text(json.dumps({"lost": {"1": "fell off the bus", "9": "no such card"}}))
    lost = await driver.read()
    faults.unlink()
    assert [card.is_healthy for card in lost.cards] == [True, False, True]
    assert lost.cards[1].unhealthy_reason == "fell off the bus"
    assert lost.topology == before.topology
    assert await driver.read() == before


async def test_a_lost_driver_is_unavailable(tmp_path: Path) -> None:
    """As NVML is after a driver crash."""
    faults = tmp_path / "faults.json"
    faults.write_text('{"all_lost": "driver unloaded"}')
    with pytest.raises(Unavailable, match="driver unloaded"):
        await simulated(faults=faults).read()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"lost": []}', '{"lost": {"one": "x"}}', b"\xff\xfe"])
async def test_a_malformed_faults_file_is_ignored_with_one_warning(tmp_path: Path, text: str | bytes) -> None:
    """However often it is read: a warning each look would bury the log."""
    faults = tmp_path / "faults.json"
    faults.write_bytes(text if isinstance(text, bytes) else text.encode())
    driver = simulated(faults=faults)
    with capture_logs() as logs:
        inventories = [await driver.read(), await driver.read()]
    assert all(card.is_healthy for inventory in inventories for card in inventory.cards)
    assert [entry["event"] for entry in logs] == ["faults_file_ignored"]


async def test_a_faults_file_that_is_no_file_is_ignored(tmp_path: Path) -> None:
    """A pipe would block its reader for ever."""
    faults = tmp_path / "faults.json"
    os.mkfifo(faults)
    with capture_logs() as logs:
        inventory = await simulated(faults=faults).read()
    assert all(card.health is Health.HEALTHY for card in inventory.cards)
    assert ["no regular file" in entry["reason"] for entry in logs] == [True]
