"""Cards that fail and come back, and a driver that goes away."""

from __future__ import annotations

from dataclasses import replace

from gpushare_agent.model.errors import Unavailable
from gpushare_agent.model.gpus import GpuInventory, Health
from gpushare_agent.services.gpu_watch import GpuWatch
from gpushare_agent.state.gpu_inventory import GpuInventoryState
from tests.support_core import inventory


class Driver:
    """Shows what it is told to show; an exception is raised."""

    def __init__(self, *looks: GpuInventory | Exception) -> None:
        self._looks = list(looks)

    async def read(self) -> GpuInventory:
        look = self._looks.pop(0)
        if isinstance(look, Exception):
            raise look
        return look

    async def close(self) -> None:
        pass


def health(state: GpuInventoryState) -> list[str]:
    return [card.health.value for card in state.current.cards]


def sick(found: GpuInventory, index: int) -> GpuInventory:
    cards = list(found.cards)
    cards[index] = replace(cards[index], health=Health.UNHEALTHY, unhealthy_reason="fell off the bus")
    return replace(found, cards=tuple(cards))


async def test_one_card_fails_and_returns() -> None:
    """The other one is not touched; each change is told once."""
    state, told = GpuInventoryState(), []
    state.subscribe(lambda found: told.append([c.is_healthy for c in found.cards]))
    whole = inventory()
    watch = GpuWatch(Driver(whole, whole, sick(whole, 1), sick(whole, 1), whole), state, period_s=1)
    for _ in range(5):
        await watch.look()
    assert told == [[True, True], [True, False], [True, True]]


async def test_a_driver_that_cannot_be_read_makes_every_card_unhealthy() -> None:
    """With the reason, until it can be read again."""
    state = GpuInventoryState()
    watch = GpuWatch(Driver(inventory(), Unavailable("NVML is gone"), inventory()), state, period_s=1)
    await watch.look()
    await watch.look()
    assert health(state) == ["Unhealthy", "Unhealthy"]
    assert state.current.cards[0].unhealthy_reason == "NVML is gone"
    await watch.look()
    assert health(state) == ["Healthy", "Healthy"]


async def test_a_card_that_is_not_shown_any_more_stays_unhealthy_in_its_place() -> None:
    """Containers may hold its IDs; the topology keeps its rows."""
    state = GpuInventoryState()
    three = inventory(3)
    two = replace(three, cards=(three.cards[0], replace(three.cards[2], index=1)), topology=inventory(2).topology)
    watch = GpuWatch(Driver(three, two, three), state, period_s=1)
    await watch.look()
    await watch.look()
    assert [(c.index, c.uuid, c.is_healthy) for c in state.current.cards] == [
        (0, "GPU-0", True),
        (1, "GPU-1", False),
        (2, "GPU-2", True),
    ]
    assert state.current.topology == three.topology
    await watch.look()
    assert health(state) == ["Healthy"] * 3


async def test_a_node_without_cards_waits_for_them() -> None:
    """fail_on_init_error=false: nothing is offered, and they appear later."""
    state = GpuInventoryState()
    watch = GpuWatch(Driver(Unavailable("no driver"), inventory()), state, period_s=1)
    await watch.look()
    assert state.current.cards == ()
    await watch.look()
    assert len(state.current.cards) == 2
