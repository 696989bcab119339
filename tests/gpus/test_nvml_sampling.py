"""Samples beside looks and events: the real nvidia-ml-py, on a scripted libnvidia-ml.so.1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support_nvml import ONE_CARD, TWO_PAIRS, Probe, fake_library, running_probe

LOST = "error 0 15\n"
HANGS = "value utilization 0 1 1\nhang_sample\n"
RESET = "stale 0 999\n"
"""The card is well again, and is shown so only by an NVML that was shut down wholly since."""


@pytest.fixture(scope="module")
def library_directory() -> Iterator[Path]:
    with fake_library() as directory:
        yield directory


async def _health(probe: Probe) -> list[str]:
    return [card["health"] for card in (await probe.read())["cards"]]


async def test_looks_and_events_go_on_while_a_sample_hangs(library_directory: Path) -> None:
    """No card is called ill because its use cannot be told, and a new event comes with its card."""
    async with running_probe(library_directory, TWO_PAIRS, timeout_s=0.5) as probe:
        before = await probe.read()
        await probe.events()
        probe.becomes(TWO_PAIRS + HANGS)
        late = await probe.sample()
        during = await probe.read()
        probe.becomes(TWO_PAIRS + HANGS + "event 1 2 8 79\n")
        events = await probe.events()
        refused = await probe.sample()
        again = await probe.read()
        threads = await probe.ask("threads")
        probe.becomes(TWO_PAIRS)
        while "unavailable" in (sample := await probe.sample()):
            pass
    assert "no answer within 0.5 s" in late["unavailable"] and "The looks at the cards go on" in late["unavailable"]
    assert "still hangs" in refused["unavailable"]
    assert during == before and again == before
    assert events == [{"kind": "xid", "uuid": "GPU-cccc", "xid": 79}]
    assert threads == 1
    assert len(sample["cards"]) == 4


async def test_a_reset_card_comes_back_although_sampling_goes_on(library_directory: Path) -> None:
    """Only a whole shutdown brings it back, so the look makes the sampler close its opening as well."""
    async with running_probe(library_directory, ONE_CARD) as probe:
        await probe.sample()
        assert await _health(probe) == ["Healthy"]
        probe.becomes(ONE_CARD + LOST)
        assert await _health(probe) == ["Unhealthy"]
        await probe.sample()
        probe.becomes(ONE_CARD + RESET)
        assert await _health(probe) == ["Healthy"]
        assert [card["uuid"] for card in (await probe.sample())["cards"]] == ["GPU-aaaa"]


async def test_a_reset_between_two_looks_costs_no_look_while_sampling_goes_on(library_directory: Path) -> None:
    """The look finds no card that answers, closes both openings and opens NVML afresh at once."""
    async with running_probe(library_directory, ONE_CARD) as probe:
        await probe.sample()
        before = await probe.read()
        probe.becomes(ONE_CARD + RESET)
        assert await probe.read() == before


async def test_a_reset_card_waits_for_a_sample_that_hangs(library_directory: Path) -> None:
    """It holds NVML open; the look after its return finds the card, and is not kept waiting before."""
    async with running_probe(library_directory, ONE_CARD, timeout_s=2.0) as probe:
        await probe.read()
        probe.becomes(ONE_CARD + HANGS)
        hangs = await probe.sample()
        probe.becomes(ONE_CARD + RESET + HANGS)
        assert await _health(probe) == ["Unhealthy"]
        probe.becomes(ONE_CARD + RESET)
        while "unavailable" in await probe.sample():
            pass
        assert await _health(probe) == ["Healthy"]
    assert "no answer" in hangs["unavailable"]


async def test_a_card_that_the_looks_find_later_enters_the_samples(library_directory: Path) -> None:
    """The sampler has its own list of cards; a look that finds others makes it ask again."""
    async with running_probe(library_directory, TWO_PAIRS + "handle_error 1 15\n") as probe:
        await probe.read()
        assert len((await probe.sample())["cards"]) == 3
        probe.becomes(TWO_PAIRS)
        await probe.read()
        assert len((await probe.sample())["cards"]) == 4


async def test_a_close_takes_both_openings(library_directory: Path) -> None:
    """And that of a sample that hangs once it returns."""
    async with running_probe(library_directory, ONE_CARD, timeout_s=2.0) as probe:
        calls = probe.directory / "calls"
        log = f"log {calls}\n"
        probe.becomes(ONE_CARD + log)
        await probe.read()
        await probe.sample()
        await probe.ask("close")
        assert calls.read_text().split() == ["init", "init", "shutdown", "shutdown"]
        probe.becomes(ONE_CARD + log + HANGS)
        await probe.read()
        await probe.sample()
        await probe.ask("close")
        assert calls.read_text().split()[4:] == ["init", "init", "shutdown"]
        probe.becomes(ONE_CARD + log)
        while await probe.ask("threads"):
            pass
        assert calls.read_text().split()[4:] == ["init", "init", "shutdown", "shutdown"]
