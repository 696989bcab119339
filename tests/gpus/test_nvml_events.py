"""What happened to GPUs, as the NVML driver reports it: the real nvidia-ml-py, on a scripted libnvidia-ml.so.1."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.agent.support_agent import poll_until
from tests.gpus.support_nvml import TWO_PAIRS, Probe, fake_library, running_probe

XID = 8
DOUBLE_BIT_ECC = 2


@pytest.fixture(scope="module")
def library_without_events() -> Iterator[Path]:
    with fake_library("NO_EVENTS") as directory:
        yield directory


def event(number: int, device: int, kind: int, xid: int) -> str:
    return f"event {number} {device} {kind} {xid}\n"


def xid_of(uuid: str | None, xid: int) -> dict[str, Any]:
    return {"kind": "xid", "uuid": uuid, "xid": xid}


async def warnings(probe: Probe) -> list[tuple[str, str | None]]:
    return [(entry["event"], entry.get("uuid")) for entry in await probe.ask("logged")]


async def test_events_are_reported_once_and_in_order(library_directory: Path) -> None:
    """Xids with their number, double-bit ECC errors, each with its GPU; what is taken is not reported again."""
    happened = event(1, 2, XID, 31) + event(2, 0, DOUBLE_BIT_ECC, 0) + event(3, 2, XID, 79)
    async with running_probe(library_directory, TWO_PAIRS) as probe:
        assert await probe.events() == []
        probe.becomes(TWO_PAIRS + happened)
        assert await probe.events() == [
            xid_of("GPU-cccc", 31),
            {"kind": "double-bit-ecc", "uuid": "GPU-aaaa", "xid": 0},
            xid_of("GPU-cccc", 79),
        ]
        assert await probe.events() == []


async def test_the_gpu_of_an_event_is_known_by_its_handle_when_it_fell_off_the_bus(library_directory: Path) -> None:
    """It answers neither for its UUID nor for anything else, yet the Xid is its own."""
    fallen = TWO_PAIRS + "error 1 15\nuuid_error 1 15\n"
    async with running_probe(library_directory, TWO_PAIRS) as probe:
        await probe.events()
        probe.becomes(fallen + event(1, 1, XID, 79))
        assert await probe.events() == [xid_of("GPU-bbbb", 79)]


async def test_the_uuid_of_an_unknown_handle_is_read(library_directory: Path) -> None:
    """A handle that is not the registered one reports its UUID; one that does not, or none, leaves the GPU unknown."""
    async with running_probe(library_directory, TWO_PAIRS) as probe:
        await probe.events()
        probe.becomes(TWO_PAIRS + event(1, 32 + 3, XID, 48))
        known = await probe.events()
        probe.becomes(TWO_PAIRS + "uuid_error 3 15\n" + event(2, 32 + 3, XID, 48) + event(3, -1, XID, 62))
        unknown = await probe.events()
    assert known == [xid_of("GPU-dddd", 48)]
    assert unknown == [xid_of(None, 48), xid_of(None, 62)]


async def test_a_gpu_is_registered_for_what_it_supports(library_directory: Path) -> None:
    """A GPU without ECC reports Xids only; one that reports nothing is named in the log, once."""
    script = TWO_PAIRS + f"event_types 0 {XID}\nevent_types 1 0\n"
    happened = event(1, 0, DOUBLE_BIT_ECC, 0) + event(2, 1, XID, 79) + event(3, 0, XID, 63)
    async with running_probe(library_directory, script) as probe:
        await probe.events()
        probe.becomes(script + happened)
        assert await probe.events() == [xid_of("GPU-aaaa", 63)]
        await probe.ask("close")
        await probe.events()
        assert await warnings(probe) == [("gpu_without_events", "GPU-bbbb")]


async def test_a_gpu_that_cannot_be_registered_leaves_the_others(library_directory: Path) -> None:
    """It is named in the log with NVML's reason, and the events of the others come."""
    script = TWO_PAIRS + "call_error nvmlDeviceRegisterEvents 1 999\n"
    async with running_probe(library_directory, script) as probe:
        await probe.events()
        probe.becomes(script + event(1, 0, XID, 48))
        assert await probe.events() == [xid_of("GPU-aaaa", 48)]
        [entry] = await probe.ask("logged")
    assert (entry["uuid"], entry["log_level"]) == ("GPU-bbbb", "warning")
    assert entry["reason"] == "Unknown Error (nvmlDeviceRegisterEvents)"


async def test_a_failing_wait_is_reported_once_and_the_set_is_made_again(library_directory: Path) -> None:
    """One Unavailable, then a new event set, which fails, too, while waiting goes on failing."""
    async with running_probe(library_directory, TWO_PAIRS) as probe:
        await probe.events()
        probe.becomes(TWO_PAIRS + "wait 999\n", logs=True)
        failed, fails_on = await probe.events(), await probe.events()
        assert probe.calls == ["event_set_free", "event_set", "event_set_free"]
        probe.becomes(TWO_PAIRS)
        assert await probe.events() == []
        probe.becomes(TWO_PAIRS + event(1, 0, XID, 48))
        assert await probe.events() == [xid_of("GPU-aaaa", 48)]
    assert "waiting for events of the GPUs failed: NVML: Unknown Error" in failed["unavailable"]
    assert fails_on == failed


async def test_events_before_a_failing_wait_are_reported_before_the_failure(library_directory: Path) -> None:
    """The Xid comes with this call and the failure with the next one: neither is lost."""
    async with running_probe(library_directory, TWO_PAIRS) as probe:
        await probe.events()
        probe.becomes(TWO_PAIRS + event(1, 0, XID, 79) + "wait 15\n")
        assert await probe.events() == [xid_of("GPU-aaaa", 79)]
        probe.becomes(TWO_PAIRS)
        failed = await probe.events()
        assert await probe.events() == []
    assert "GPU is lost" in failed["unavailable"]


async def test_the_set_is_made_again_after_nvml_was_reopened(library_directory: Path) -> None:
    """Events come again after the driver was gone, with whichever call opened NVML."""
    async with running_probe(library_directory, TWO_PAIRS) as probe:
        await probe.events()
        probe.becomes("init 9\ndriver 9\n")
        gone = await probe.events()
        still_gone = await probe.events()
        probe.becomes(TWO_PAIRS)
        await probe.read()
        assert await probe.events() == []
        probe.becomes(TWO_PAIRS + event(1, 3, XID, 48))
        assert await probe.events() == [xid_of("GPU-dddd", 48)]
    assert "Driver Not Loaded" in gone["unavailable"] and "opening NVML failed" in still_gone["unavailable"]


async def test_a_gpu_that_comes_back_is_registered_again(library_directory: Path) -> None:
    """A loss alone keeps the set, so that the last Xid is not missed; the return makes a new one."""
    lost = TWO_PAIRS + "error 1 15\n"
    async with running_probe(library_directory, TWO_PAIRS) as probe:
        await probe.read()
        await probe.events()
        probe.becomes(lost, logs=True)
        await probe.read()
        probe.becomes(lost + event(1, 1, XID, 79), logs=True)
        assert await probe.events() == [xid_of("GPU-bbbb", 79)]
        assert probe.calls == []
        probe.becomes(TWO_PAIRS + event(1, 1, XID, 79), logs=True)
        await probe.read()
        assert await probe.events() == []
        assert probe.calls == ["event_set_free", "event_set"]
        probe.becomes(TWO_PAIRS + event(1, 1, XID, 79) + event(2, 1, XID, 48))
        assert await probe.events() == [xid_of("GPU-bbbb", 48)]


async def test_a_storm_is_reported_wholly_before_the_set_is_made_again(library_directory: Path) -> None:
    """At most 1,024 events come in one call, and none is lost. A GPU came back meanwhile, which asks for a new set: it waits
    until the old one is empty."""
    async with running_probe(library_directory, TWO_PAIRS) as probe:
        await probe.events()
        probe.becomes(TWO_PAIRS + "error 1 15\n")
        await probe.read()
        await probe.events()
        storm = "".join(event(number, 0, XID, number) for number in range(1, 1501))
        probe.becomes(TWO_PAIRS + storm, logs=True)
        await probe.read()
        first = await probe.events()
        assert probe.calls == []
        second = await probe.events()
        assert probe.calls == ["event_set_free", "event_set"]
    assert (len(first), [one["xid"] for one in first + second]) == (1024, [*range(1, 1501)])


async def test_a_library_without_events_is_reported_once_and_has_none(library_without_events: Path) -> None:
    """Missing symbols are no failure to repeat: the log says that Xids are not seen, and polls and samples go on."""
    async with running_probe(library_without_events, TWO_PAIRS) as probe:
        assert [await probe.events() for _ in range(3)] == [[], [], []]
        assert [event for event, _ in await warnings(probe)] == ["nvml_has_no_events"]
        assert len((await probe.sample())["gpus"]) == 4


async def test_a_driver_that_waits_in_an_older_way_is_one_whose_events_fail() -> None:
    """Drivers before 450, and libraries that stand in for one: polls and samples go on."""
    with fake_library("nvmlEventSetWait_v2=nvmlEventSetWait") as library:
        async with running_probe(library, TWO_PAIRS) as probe:
            failed = await probe.events()
            assert len((await probe.sample())["gpus"]) == 4
    assert "Function Not Found (nvmlEventSetWait_v2)" in failed["unavailable"]


@asynccontextmanager
async def waiting_probe(library_directory: Path) -> AsyncIterator[Probe]:
    """A probe whose driver has begun to wait in NVML for the first event, for an hour: no test waits for that."""
    async with running_probe(library_directory, TWO_PAIRS, timeout_s=3600) as probe:
        await probe.read()
        await probe.events()
        waits = probe.directory / "waits"
        probe.becomes(f"{TWO_PAIRS}waits {waits}\n")
        await probe.ask("begin_wait")
        await poll_until(waits.exists, "a wait in NVML")
        yield probe


async def test_a_poll_that_finds_another_machine_ends_the_wait_for_events(library_directory: Path) -> None:
    """A GPU that was lost is to be registered anew when it is back. A poll that finds the same ends nothing: the event
    after it comes with the same wait."""
    async with waiting_probe(library_directory) as probe:
        probe.becomes(TWO_PAIRS + "error 1 15\n")
        await probe.read()
        assert await probe.ask("end_wait") == []
    async with waiting_probe(library_directory) as probe:
        await probe.read()
        probe.becomes(TWO_PAIRS + event(1, 1, XID, 79))
        assert await probe.ask("end_wait") == [xid_of("GPU-bbbb", 79)]


async def test_a_close_ends_the_wait_for_events(library_directory: Path) -> None:
    """Its thread frees the set and closes the opening that it waited in: NVML shuts down. The next call opens both."""
    async with waiting_probe(library_directory) as probe:
        probe.becomes(TWO_PAIRS, logs=True)
        await probe.ask("close")
        assert await probe.ask("end_wait") == []
        assert probe.calls[-2:] == ["event_set_free", "shutdown"]
        await probe.events()
        assert probe.calls[-2:] == ["init", "event_set"]


async def test_a_loss_between_two_calls_has_the_set_made_again(library_directory: Path) -> None:
    """The GPU was lost and is back when events are taken again: its registration was void all the same."""
    async with running_probe(library_directory, TWO_PAIRS) as probe:
        await probe.read()
        await probe.events()
        probe.becomes(TWO_PAIRS + "error 1 15\n")
        await probe.read()
        probe.becomes(TWO_PAIRS, logs=True)
        await probe.read()
        await probe.events()
        assert probe.calls == ["event_set_free", "event_set"]
