"""Samples beside polls and events: the real nvidia-ml-py, on a scripted libnvidia-ml.so.1."""

from __future__ import annotations

from pathlib import Path

from tests.gpus.support_nvml import ONE_GPU, TWO_PAIRS, Probe, running_probe

LOST = "error 0 15\n"
HANGS = "value utilization 0 1 1\nhang_sample\n"
RESET = "stale 0 999\n"
"""The GPU is healthy again, and is shown so only by an NVML that was shut down wholly since."""


async def _health(probe: Probe) -> list[str]:
    return [gpu["health"] for gpu in (await probe.read())["gpus"]]


async def test_polls_and_events_go_on_while_a_sample_hangs(library_directory: Path) -> None:
    """No GPU becomes unhealthy because its usage cannot be read, and a new event comes with its GPU."""
    async with running_probe(library_directory, TWO_PAIRS, timeout_s=2.0) as probe:
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
    assert "no answer within 2 s" in late["unavailable"] and "Polls of the GPUs go on" in late["unavailable"]
    assert "still hangs" in refused["unavailable"]
    assert during == before and again == before
    assert events == [{"kind": "xid", "uuid": "GPU-cccc", "xid": 79}]
    assert threads == 1
    assert len(sample["gpus"]) == 4


async def test_a_reset_gpu_comes_back_although_sampling_goes_on(library_directory: Path) -> None:
    """Only a whole shutdown brings it back, so the poll waits for the sampler's last call."""
    async with running_probe(library_directory, ONE_GPU) as probe:
        await probe.sample()
        assert await _health(probe) == ["Healthy"]
        probe.becomes(ONE_GPU + LOST)
        assert await _health(probe) == ["Unhealthy"]
        await probe.sample()
        probe.becomes(ONE_GPU + RESET)
        assert await _health(probe) == ["Healthy"]
        assert [gpu["uuid"] for gpu in (await probe.sample())["gpus"]] == ["GPU-aaaa"]


async def test_a_reset_between_two_polls_costs_no_poll_while_sampling_goes_on(library_directory: Path) -> None:
    """The poll finds no GPU that answers, closes NVML and opens it afresh at once."""
    async with running_probe(library_directory, ONE_GPU) as probe:
        await probe.sample()
        before = await probe.read()
        probe.becomes(ONE_GPU + RESET)
        assert await probe.read() == before


async def test_a_reset_gpu_waits_for_a_sample_that_hangs(library_directory: Path) -> None:
    """It holds NVML open; the poll after its return finds the GPU, and is not kept waiting before."""
    async with running_probe(library_directory, ONE_GPU, timeout_s=2.0) as probe:
        await probe.read()
        probe.becomes(ONE_GPU + HANGS)
        hangs = await probe.sample()
        probe.becomes(ONE_GPU + RESET + HANGS)
        assert await _health(probe) == ["Unhealthy"]
        probe.becomes(ONE_GPU + RESET)
        while "unavailable" in await probe.sample():
            pass
        assert await _health(probe) == ["Healthy"]
    assert "no answer" in hangs["unavailable"]


async def test_a_gpu_that_a_poll_finds_later_enters_the_samples(library_directory: Path) -> None:
    """The sampler goes by what the last poll found."""
    async with running_probe(library_directory, TWO_PAIRS + "handle_error 1 15\n") as probe:
        await probe.read()
        assert len((await probe.sample())["gpus"]) == 3
        probe.becomes(TWO_PAIRS)
        await probe.read()
        assert len((await probe.sample())["gpus"]) == 4


async def test_a_close_waits_for_a_sample_that_hangs(library_directory: Path) -> None:
    """NVML stays open for it, and is shut down once it returns."""
    async with running_probe(library_directory, ONE_GPU, timeout_s=2.0) as probe:
        probe.becomes(ONE_GPU, logs=True)
        await probe.read()
        await probe.sample()
        await probe.ask("close")
        assert probe.calls == ["init", "shutdown"]
        probe.becomes(ONE_GPU + HANGS, logs=True)
        await probe.read()
        await probe.sample()
        await probe.ask("close")
        assert probe.calls[2:] == ["init"]
        probe.becomes(ONE_GPU, logs=True)
        while await probe.ask("threads"):
            pass
        assert probe.calls[2:] == ["init", "shutdown"]
