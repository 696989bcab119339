"""Who kept a GPU busy for how long: counted from samples as drivers give them, and read through nvidia-ml-py."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from struct import Struct as RowFormat
from typing import Any, cast

import pytest

from gpushare_agent.agent.gpus.nvml import busy_time
from gpushare_agent.agent.gpus.nvml.busy_time import GpuBusyTime, NvmlBusyTime
from gpushare_agent.agent.gpus.nvml.calls import GpuCalls, ProcessUse
from gpushare_agent.agent.gpus.nvml.session import CallError, NvmlSession
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.model.usage import GpuBusy
from tests.gpus.support_nvml import ONE_GPU, running_probe
from tests.gpus.test_nvml_mig import A100, ONE_G

MS, SECOND = 1_000_000, 1_000_000_000
BOOTED_AT = 1_700_000_000 * SECOND
Activity = Callable[[float], float]
"""How much of the GPU a process has at that second."""


class Calls(GpuCalls):
    """Those of a scripted driver."""

    driver: Any = None

    def rows(self, name: str, _: RowFormat, since_us: int | None = None) -> list[tuple[int, ...]] | None:
        found: list[tuple[int, ...]] | None = self.driver.rows(name, since_us)
        return found


class Driver:
    """A GPU whose driver measures each process over `period_s`, shows it `lag_s` later, and shows nothing where that is
    nothing. `offsets` are by how much the periods of single processes are apart, `jitter_ms` by how much each sample is."""

    def __init__(
        self,
        activities: dict[int, Activity],
        *,
        period_s: float,
        lag_s: float = 0.0,
        offsets: Sequence[float] = (),
        jitter_ms: int = 0,
    ) -> None:
        self.activities, self.period_s, self.lag_s, self.jitter_ms = activities, period_s, lag_s, jitter_ms
        self.offsets = dict(zip(activities, offsets, strict=False))
        self.now = 0.0
        self.wall_shift_s = 0.0
        self.has_samples = True
        self.error: CallError | None = None
        self.reader = GpuBusyTime(
            calls=Calls(driver=self),
            clock_ns=lambda: round(self.now * SECOND),
            wall_clock_ns=lambda: BOOTED_AT + round((self.now + self.wall_shift_s) * SECOND),
        )

    def rows(self, name: str, since_us: int) -> list[tuple[int, ...]] | None:
        if name == "nvmlDeviceGetComputeRunningProcesses_v3":
            return [(pid, pid << 20, 0, 0) for pid in self.activities]
        if self.error is not None:
            raise self.error
        if not self.has_samples:
            return None
        found = [self.newest(pid) for pid in self.activities]
        return [one for one in found if one is not None and one.at_us > since_us]

    def newest(self, pid: int) -> ProcessUse | None:
        number = math.floor((self.now - self.lag_s - self.offsets.get(pid, 0.0)) / self.period_s)
        end = number * self.period_s + self.offsets.get(pid, 0.0)
        steps = 20
        busy = sum(self.activities[pid](end - self.period_s * (step + 0.5) / steps) for step in range(steps)) / steps
        jitter_us = (number * 7919 % (2 * self.jitter_ms + 1) - self.jitter_ms) * 1000
        at_us = (BOOTED_AT + round((end + self.wall_shift_s) * SECOND)) // 1000 + jitter_us
        return ProcessUse(pid, at_us, round(100 * busy), 0, 0, 0) if round(100 * busy) else None

    def read(self) -> GpuBusy:
        found = self.reader.read()
        assert found is not None
        return found

    def run(self, seconds: float, period_s: float = 0.1) -> dict[int, float]:
        """Seconds of the GPU by PID, counted in so long. The first reading is from before."""
        self.read()
        counted = dict.fromkeys(self.activities, 0.0)
        for _ in range(round(seconds / period_s)):
            self.now += period_s
            read = self.read()
            assert read.is_continued and 0 < read.busy_until_ns <= read.at_ns
            for process in read.processes:
                counted[process.pid] += process.busy_ns / SECOND
        return counted


def steady(share: float) -> Activity:
    return lambda _: share


def bursts(length_s: float, every_s: float) -> Activity:
    return lambda at: 1.0 if at >= 0 and at % every_s < length_s else 0.0


WINDOWS = [(1 / 6, 0.0), (1 / 6, 0.1), (0.25, 0.5), (0.5, 0.2), (1.0, 0.0), (1.0, 1.0), (0.1, 0.05)]


@pytest.mark.parametrize(("period_s", "lag_s"), WINDOWS)
@pytest.mark.parametrize("jitter_ms", [0, 15])
def test_a_program_that_goes_on_is_counted_whole(period_s: float, lag_s: float, jitter_ms: int) -> None:
    """Whatever the driver's period and lag, however they fall on the readings, and where those are as far apart as it."""
    driver = Driver({7: steady(0.3)}, period_s=period_s, lag_s=lag_s, jitter_ms=jitter_ms)
    driver.now = 5.0
    for reading_s in (0.1, period_s):
        assert driver.run(30.0, reading_s)[7] == pytest.approx(9.0, rel=0.07)


@pytest.mark.parametrize(("period_s", "lag_s"), WINDOWS)
def test_a_program_in_bursts_is_counted_for_its_bursts(period_s: float, lag_s: float) -> None:
    """A tenth of the time, with no sample between two: they say nothing of the pauses."""
    driver = Driver({7: bursts(0.1, 1.03)}, period_s=period_s, lag_s=lag_s)
    driver.now = 5.0
    assert driver.run(100.0)[7] == pytest.approx(100 * 0.1 / 1.03, rel=0.12)


def test_processes_whose_samples_come_at_other_times_are_each_counted() -> None:
    driver = Driver({7: steady(0.3), 8: steady(0.5), 9: bursts(1, 4)}, period_s=0.5, offsets=(0.0, 0.17, 0.31))
    driver.now = 5.0
    found = driver.run(60.0)
    assert list(found.values()) == pytest.approx([18.0, 30.0, 15.0], rel=0.06)


def test_samples_that_come_again_with_another_time_are_counted_once() -> None:
    """By a microsecond each, at every reading: they are no period of the driver's."""
    driver = Driver({7: steady(0.3)}, period_s=1.0)
    newest, calls = driver.newest, [0]

    def again(pid: int) -> ProcessUse | None:
        calls[0] += 1
        found = newest(pid)
        return None if found is None else found._replace(at_us=found.at_us + calls[0] % 10)

    driver.newest = again  # type: ignore[method-assign]
    driver.now = 5.0
    assert driver.run(30.0)[7] == pytest.approx(9.0, rel=0.07)


def test_how_far_it_is_known_stays_the_same_until_the_next_sample() -> None:
    """Though the two clocks are not read at the same moment, and not always as far apart."""
    driver = Driver({7: steady(0.3)}, period_s=0.5)
    calls = [0]

    def wall_ns() -> int:
        calls[0] += 1
        return BOOTED_AT + round(driver.now * SECOND) + calls[0] * 7919 % 50 * 1000

    driver.reader.wall_clock_ns = wall_ns
    driver.now = 5.0
    driver.run(5.0)
    known = []
    for _ in range(100):
        driver.now += 0.1
        known.append(driver.read().busy_until_ns)
    assert known == sorted(known) and len(set(known)) == 20 + 1


def test_a_pause_of_the_readings_begins_anew() -> None:
    """The driver keeps little: what was between is not known, so nothing is counted for it."""
    driver = Driver({7: steady(1.0)}, period_s=0.5)
    driver.now = 5.0
    driver.run(5.0)
    driver.now += 10.0
    read = driver.read()
    assert not read.is_continued and [process.busy_ns for process in read.processes] == [0]
    assert driver.run(5.0)[7] == pytest.approx(5.0, rel=0.1)


@pytest.mark.parametrize("step_s", [-3600.0, -5.0])
def test_a_clock_that_is_set_back_begins_anew(step_s: float) -> None:
    driver = Driver({7: steady(1.0)}, period_s=0.5)
    driver.now = 5.0
    driver.run(5.0)
    driver.wall_shift_s += step_s
    driver.now += 0.1
    assert not driver.read().is_continued
    assert driver.run(5.0)[7] == pytest.approx(5.0, rel=0.2)


def test_a_clock_that_is_set_forward_counts_a_period() -> None:
    driver = Driver({7: steady(1.0)}, period_s=0.5)
    driver.now = 5.0
    driver.run(5.0)
    driver.wall_shift_s += 3600
    assert driver.run(5.0)[7] == pytest.approx(5.0, rel=0.2)


def test_an_idle_gpu_is_known_to_be_idle() -> None:
    """Some time ago: a sample of now may yet come."""
    driver = Driver({7: steady(0.0)}, period_s=1.0)
    driver.now = 5.0
    assert driver.run(10.0)[7] == 0
    read = driver.read()
    assert read.at_ns - read.busy_until_ns == 1250 * MS


@pytest.mark.parametrize("error", [None, CallError("UNKNOWN", "Unknown Error")])
def test_a_driver_without_samples_shows_the_memory(error: CallError | None) -> None:
    """MIG, or no permission; and how far it is known is 0, which libgpushare takes for no feedback."""
    driver = Driver({7: steady(1.0)}, period_s=0.5)
    driver.has_samples, driver.error = False, error
    for _ in range(3):
        driver.now += 0.1
        read = driver.read()
        assert [(one.pid, one.memory_bytes, one.busy_ns) for one in read.processes] == [(7, 7 << 20, 0)]
        assert read.busy_until_ns == 0


# ---- through nvidia-ml-py ----

BUSY = f"process compute 0 100 {1 << 20}\nprocess compute 0 200 -\n"


def sample(pid: int, at_us: int, percent: int) -> str:
    return f"sample 0 {pid} {at_us} {percent} 0 0 0\n"


async def test_the_driver_is_asked_for_these_gpus_alone(library_directory: Path, tmp_path: Path) -> None:
    """Two questions with two calls each, and a GPU that there is not is left out."""
    trace = tmp_path / "trace"
    async with running_probe(library_directory, ONE_GPU + BUSY) as probe:
        await probe.busy("GPU-aaaa")
        now_us = time.time_ns() // 1000  # not before: a sample from a second and more before the first question is old
        probe.becomes(ONE_GPU + BUSY + sample(100, now_us, 60) + sample(300, now_us, 20) + f"trace {trace}\n")
        found = await probe.busy("GPU-aaaa", "GPU-none")
        assert await probe.busy() == {}
    [(uuid, read)] = found.items()
    assert uuid == "GPU-aaaa" and read["is_continued"]
    assert [(one["pid"], one["memory_bytes"], one["busy_ns"] > 0) for one in read["processes"]] == [
        (100, 1 << 20, True),
        (300, 0, True),  # it has ended since
        (200, None, False),
    ]
    assert {line.split()[0] for line in trace.read_text().splitlines()} == {
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetProcessUtilization",
    }


async def test_a_gpu_that_is_lost_or_has_no_list_is_left_out(library_directory: Path) -> None:
    async with running_probe(library_directory, ONE_GPU + BUSY) as probe:
        assert await probe.busy("GPU-aaaa") != {}
        for lost in ("call_error nvmlDeviceGetComputeRunningProcesses_v3 0 15\n", "error 0 15\n"):
            probe.becomes(ONE_GPU + BUSY + lost)
            assert await probe.busy("GPU-aaaa") == {}
        probe.becomes(ONE_GPU + BUSY)
        assert not (await probe.busy("GPU-aaaa"))["GPU-aaaa"]["is_continued"]


def test_instances_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """On demand a node has another one every minute."""

    class Session:
        openings = 1

        def used(self, _what: str) -> AbstractContextManager[None]:
            return nullcontext()

        def handles(self) -> dict[GpuUuid, object]:
            return {}

    asked: list[str] = []
    monkeypatch.setattr(busy_time, "ask", lambda _name, uuid: asked.append(uuid) or object())
    monkeypatch.setattr(GpuBusyTime, "read", lambda _self: None)
    read = NvmlBusyTime(cast("NvmlSession", Session()))
    for number in range(1000):
        read.read([GpuUuid("MIG-stays"), GpuUuid(f"MIG-{number}")])
        assert len(read._gpus) <= 2
    assert asked.count("MIG-stays") == 1, "a handle is asked for once"


async def test_of_a_mig_instance_the_memory_of_its_processes_is_known(library_directory: Path) -> None:
    """NVML has no utilisation there; one that there is not, or that does not answer, is left out."""
    use = "process compute 1000 4711 2097152\ncall_error nvmlDeviceGetProcessUtilization 1000 3\n"
    async with running_probe(library_directory, A100 + ONE_G + use) as probe:
        found = [await probe.busy("MIG-1111", "MIG-none") for _ in range(2)]
        for lost in ("call_error nvmlDeviceGetComputeRunningProcesses_v3 1000 2\n", "error 1000 15\n"):
            probe.becomes(A100 + ONE_G + use + lost)
            assert await probe.busy("MIG-1111") == {}
        probe.becomes(A100 + ONE_G + use)
        found.append(await probe.busy("MIG-1111"))
    for one in found:
        assert one.keys() == {"MIG-1111"} and one["MIG-1111"]["busy_until_ns"] == 0
        assert [(each["pid"], each["memory_bytes"]) for each in one["MIG-1111"]["processes"]] == [(4711, 2097152)]


async def test_nothing_is_kept_of_what_nobody_asks_for_any_more(library_directory: Path) -> None:
    """MIG instances come and go, each with a UUID of its own."""
    async with running_probe(library_directory, ONE_GPU + BUSY) as probe:
        found = [await probe.busy(uuid) for uuid in ("GPU-aaaa", "GPU-aaaa", "MIG-none", "GPU-aaaa")]
    assert [one["GPU-aaaa"]["is_continued"] if one else None for one in found] == [False, True, None, False]
