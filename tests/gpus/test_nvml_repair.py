"""Cards that say that they need repair, as the NVML driver reads it, on a scripted libnvidia-ml.so.1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support_nvml import ONE_CARD, TWO_PAIRS, fake_library, running_probe

RECOVERY_ACTION = 230


@pytest.fixture(scope="module")
def library_directory() -> Iterator[Path]:
    with fake_library() as directory:
        yield directory


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (1, ("reset of the card", "nvidia-smi --gpu-reset", "gpu_reset")),
        (2, ("reboot of the node", "node_reboot")),
        (3, ("end of all programs", "drain_p2p")),
        (4, ("once the card is idle", "drain_and_reset")),
    ],
)
async def test_a_card_whose_driver_asks_for_recovery_is_unhealthy(
    library_directory: Path, action: int, words: tuple[str, ...]
) -> None:
    """The reason says what the driver asks for; the other cards and the card's own facts stay, and it comes back."""
    script = TWO_PAIRS + f"field 1 {RECOVERY_ACTION} 0 0 1 {action}\n"
    async with running_probe(library_directory, TWO_PAIRS) as probe:
        before = await probe.read()
        probe.becomes(script)
        asking = await probe.read()
        probe.becomes(script.replace(f"1 {action}\n", "1 0\n"))
        after = await probe.read()
    assert [card["health"] for card in asking["cards"]] == ["Healthy", "Unhealthy", "Healthy", "Healthy"]
    card = asking["cards"][1]
    assert card["unhealthy_reason"].startswith("the driver asks for")
    assert all(word in card["unhealthy_reason"] for word in words)
    assert (card["minor"], card["memory_mib"], asking["links"]) == (0, 24576, before["links"])
    assert after == before


@pytest.mark.parametrize("field", ["0 1 0", "0 1 5", "3 1 1", "10 1 1"])
async def test_a_card_without_a_wish_is_healthy(library_directory: Path, field: str) -> None:
    """None, an action for memory between nodes, an older driver's not supported, and a failure to tell."""
    async with running_probe(library_directory, ONE_CARD + f"field 0 {RECOVERY_ACTION} 0 {field}\n") as probe:
        [card] = (await probe.read())["cards"]
    assert card["health"] == "Healthy"


async def test_a_card_whose_rows_cannot_be_remapped_is_unhealthy(library_directory: Path) -> None:
    """Its memory needs replacement; rows that only wait for a reset to be remapped are no reason."""
    async with running_probe(library_directory, TWO_PAIRS + "value remapped 0 1 0\nvalue remapped 1 0 1\n") as probe:
        waiting, failed, *_ = (await probe.read())["cards"]
    assert waiting["health"] == "Healthy"
    assert (failed["health"], "row remapping failed" in failed["unhealthy_reason"]) == ("Unhealthy", True)


async def test_nvml_stays_open_while_all_cards_ask_for_a_reset(library_directory: Path) -> None:
    """They answer, so NVML is not lost: a look opens nothing anew, and the cards' use is still sampled."""
    script = ONE_CARD + f"field 0 {RECOVERY_ACTION} 0 0 1 1\n"
    async with running_probe(library_directory, ONE_CARD) as probe:
        await probe.read()
        calls = probe.directory / "calls"
        probe.becomes(script + f"log {calls}\n")
        [card] = (await probe.read())["cards"]
        assert not calls.exists()
        assert len((await probe.sample())["cards"]) == 1
    assert card["health"] == "Unhealthy"


async def test_a_card_that_asks_for_a_reset_from_the_start_has_its_place_in_the_topology(
    library_directory: Path,
) -> None:
    """It answers, so its connections are read although it is not given."""
    script = (
        TWO_PAIRS + f"field 1 {RECOVERY_ACTION} 0 0 1 1\nnvlink 1 0 0 00000000:3B:00.0\nnvlink 0 0 0 00000000:3C:00.0\n"
    )
    async with running_probe(library_directory, script) as probe:
        inventory = await probe.read()
    assert inventory["cards"][1]["health"] == "Unhealthy"
    assert inventory["links"][1] == ["NVLINK1", "SELF", "SYS", "SYS"]
    assert len(inventory["cards"][1]["nvlinks"]) == 1


async def test_the_compute_capability_is_read_where_the_driver_tells_it(library_directory: Path) -> None:
    """Major and minor; none where it does not tell."""
    async with running_probe(library_directory, TWO_PAIRS + "value capability 0 6 1\n") as probe:
        cards = (await probe.read())["cards"]
    assert [card["compute_capability"] for card in cards] == [[6, 1], None, None, None]
