"""The processes on a GPU, as the NVML driver samples them: the real nvidia-ml-py, on a scripted libnvidia-ml.so.1."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpus.support_nvml import ONE_GPU, TWO_PAIRS, running_probe, samples

MIB = 1024 * 1024
IDLE = (0.0, 0.0, 0.0, 0.0)
UNKNOWN = (None, None, None, None)
TRAINING = f"process compute 0 100 {512 * MIB}\n"


@pytest.fixture
def now_us() -> int:
    return time.time_ns() // 1000


def listed(gpu: Any) -> list[tuple[int, str, int | None]]:
    return [(process["pid"], process["kind"], process["memory_bytes"]) for process in gpu["processes"]]


def use(gpu: Any, pid: int) -> tuple[float | None, ...]:
    [process] = [process for process in gpu["processes"] if process["pid"] == pid]
    return tuple(process[f"{part}_ratio"] for part in ("sm", "memory", "encoder", "decoder"))


async def test_the_three_lists_become_one_by_pid(library_directory: Path) -> None:
    """A PID in two lists is one process, of the kind that reports more, with the larger memory and not the sum."""
    script = ONE_GPU + (
        "process compute 0 300 1000\nprocess compute 0 100 2000\nprocess graphics 0 100 3000\n"
        "process graphics 0 200 400\nprocess compute 0 400 50\nprocess mps 0 400 40\nprocess mps 0 500 60\n"
    )
    [sample] = await samples(library_directory, script)
    assert listed(sample["gpus"][0]) == [
        (100, "compute", 3000),
        (200, "graphics", 400),
        (300, "compute", 1000),
        (400, "mps", 50),
        (500, "mps", 60),
    ]


async def test_memory_that_the_driver_does_not_report_is_none(library_directory: Path) -> None:
    """Not available is not 18 exabytes, and no zero; nor is what no GPU has. One list that reports it is enough."""
    script = ONE_GPU + "process compute 0 100 -\nprocess compute 0 200 -\nprocess graphics 0 200 70\n"
    script += f"process compute 0 300 {1 << 63}\n"
    [sample] = await samples(library_directory, script)
    assert listed(sample["gpus"][0]) == [(100, "compute", None), (200, "compute", 70), (300, "compute", None)]


async def test_a_list_that_never_stops_growing_is_given_up(library_directory: Path) -> None:
    """After three readings the processes of this round are unknown, counted once; the GPU's values are there."""
    script = ONE_GPU + TRAINING + "value power 0 90000\ngrows compute 0 1000\n"
    sample, later = await samples(library_directory, script, ONE_GPU + TRAINING)
    [gpu] = sample["gpus"]
    assert (gpu["processes"], gpu["power_watts"], sample["errors"]) == (None, 90.0, {"insufficient_size": 1})
    assert len(later["gpus"][0]["processes"]) == 1


async def test_a_failing_list_makes_the_processes_unknown(library_directory: Path) -> None:
    """A process that one list would have reported must not poll ended."""
    script = ONE_GPU + TRAINING + "call_error nvmlDeviceGetMPSComputeRunningProcesses_v3 0 10\n"
    [sample] = await samples(library_directory, script)
    assert (sample["gpus"][0]["processes"], sample["errors"]) == (None, {"timeout": 1})


async def test_a_list_that_the_gpu_does_not_have_is_an_empty_one(library_directory: Path) -> None:
    """A GPU without graphics lists its compute processes; one without any list cannot list them."""
    without = "call_error nvmlDeviceGetGraphicsRunningProcesses_v3 0 3\n"
    without_any = without + "".join(
        f"call_error nvmlDeviceGet{kind}RunningProcesses_v3 0 3\n" for kind in ("Compute", "MPSCompute")
    )
    some, none = await samples(library_directory, *(ONE_GPU + TRAINING + lacking for lacking in (without, without_any)))
    assert listed(some["gpus"][0]) == [(100, "compute", 512 * MIB)]
    assert (none["gpus"][0]["processes"], none["errors"]) == (None, {})


async def test_the_first_round_does_not_know_what_processes_use(library_directory: Path, now_us: int) -> None:
    """The driver's buffer may be full of old samples: the first round only notes where it ends."""
    script = ONE_GPU + TRAINING + f"sample 0 100 {now_us - 3_600_000_000} 90 40 0 0\n"
    first, second = await samples(library_directory, script, script)
    assert use(first["gpus"][0], 100) == UNKNOWN
    assert use(second["gpus"][0], 100) == IDLE


async def test_a_process_uses_the_mean_of_its_new_samples(library_directory: Path, now_us: int) -> None:
    """Samples of the same process since the last round are averaged, older ones are not counted twice."""
    two = f"sample 0 100 {now_us} 80 40 10 0\nsample 0 100 {now_us + 1000} 40 20 0 30\n"
    three = two + f"sample 0 100 {now_us + 2000} 10 6 0 0\n"
    _, both, newest = await samples(library_directory, *(ONE_GPU + TRAINING + taken for taken in ("", two, three)))
    assert use(both["gpus"][0], 100) == (0.6, 0.3, 0.05, 0.15)
    assert use(newest["gpus"][0], 100) == (0.1, 0.06, 0.0, 0.0)


@pytest.mark.parametrize("answer", ["", "no_sample 0 0\n"])
async def test_a_busy_process_without_a_new_sample_keeps_its_use_for_one_round(
    library_directory: Path, now_us: int, answer: str
) -> None:
    """Our rounds may be quicker than the driver's; then it is idle. Not found and a success of zero entries are alike."""
    script = ONE_GPU + TRAINING + answer
    _, *later = await samples(library_directory, script, *[script + f"sample 0 100 {now_us} 80 40 0 0\n"] * 3)
    rounds = [use(one["gpus"][0], 100) for one in later]
    assert rounds == [(0.8, 0.4, 0.0, 0.0), (0.8, 0.4, 0.0, 0.0), IDLE]


async def test_a_client_of_mps_without_samples_is_not_called_idle(library_directory: Path, now_us: int) -> None:
    """Some drivers sample no clients of MPS: one that never had a sample is unknown, one that had is idle without."""
    script = ONE_GPU + "process mps 0 100 1\nprocess mps 0 200 1\n"
    _, *later = await samples(library_directory, script, *[script + f"sample 0 200 {now_us} 80 40 0 0\n"] * 3)
    first, _, last = (one["gpus"][0] for one in later)
    assert use(first, 200) == (0.8, 0.4, 0.0, 0.0)
    assert (use(last, 200), use(last, 100)) == (IDLE, UNKNOWN)


async def test_a_process_that_worked_and_is_in_no_list_counts_for_its_round(
    library_directory: Path, now_us: int
) -> None:
    """It has ended within the round: it is reported once, without memory, and is gone with the next."""
    worked = ONE_GPU + TRAINING + f"sample 0 900 {now_us} 50 5 0 0\n"
    found = await samples(library_directory, ONE_GPU + TRAINING, worked, worked)
    _, fresh, gone = (one["gpus"][0] for one in found)
    assert listed(fresh) == [(100, "compute", 512 * MIB), (900, "compute", None)]
    assert use(fresh, 900) == (0.5, 0.05, 0.0, 0.0)
    assert listed(gone) == [(100, "compute", 512 * MIB)]


async def test_entries_that_the_driver_left_unfilled_are_no_samples(library_directory: Path, now_us: int) -> None:
    """No PID, more than the whole GPU, a time far ahead: none of them is believed, nor moves the time to ask from."""
    rubbish = (
        f"sample 0 0 {now_us} 50 5 0 0\nsample 0 100 {now_us} 4000 5 0 0\n"
        f"sample 0 100 {now_us + 3_600_000_000} 70 5 0 0\n"
    )
    true = rubbish + f"sample 0 100 {now_us + 1000} 20 10 0 0\n"
    _, first, second = await samples(library_directory, *(ONE_GPU + TRAINING + one for one in ("", rubbish, true)))
    assert use(first["gpus"][0], 100) == IDLE
    assert use(second["gpus"][0], 100) == (0.2, 0.1, 0.0, 0.0)


async def test_samples_are_seen_after_the_clock_was_set_back(library_directory: Path) -> None:
    """The newest sample is ahead of the clock: what comes after it has an earlier time and counts all the same."""
    async with running_probe(library_directory, ONE_GPU + TRAINING) as probe:
        await probe.sample_gpu()
        now_us = time.time_ns() // 1000
        ahead = f"sample 0 100 {now_us + 5_000_000} 50 5 0 0\n"
        probe.becomes(ONE_GPU + TRAINING + ahead)
        first = await probe.sample_gpu()
        probe.becomes(ONE_GPU + TRAINING + ahead + f"sample 0 200 {now_us + 4_900_000} 20 10 0 0\n")
        second = await probe.sample_gpu()
    assert use(first, 100) == (0.5, 0.05, 0.0, 0.0)
    assert use(second, 200) == (0.2, 0.1, 0.0, 0.0)


async def test_samples_that_cannot_be_read_leave_the_processes_listed(library_directory: Path, now_us: int) -> None:
    """Their use is unknown then, whether the GPU does not support it, there is no permission (no errors), or it fails."""
    function = "nvmlDeviceGetProcessUtilization"
    taken = ONE_GPU + TRAINING + f"sample 0 100 {now_us} 50 5 0 0\n"
    failing = [taken + f"call_error {function} 0 {code}\n" for code in (3, 4, 10)]
    _, *answers = await samples(library_directory, ONE_GPU + TRAINING, *failing)
    for answer in answers:
        assert use(answer["gpus"][0], 100) == UNKNOWN
    assert [answer["errors"] for answer in answers] == [{}, {}, {"timeout": 1}]


async def test_lists_that_grow_while_they_are_read_are_read_again(library_directory: Path, now_us: int) -> None:
    """The list of processes was longer than its buffer twice, that of samples longer than was said: nothing is counted."""
    grows = f"sample 0 100 {now_us} 50 5 0 0\ngrows compute 0 2\ngrows samples 0 1\n"
    _, sample = await samples(library_directory, ONE_GPU + TRAINING, ONE_GPU + TRAINING + grows)
    assert [process["pid"] for process in sample["gpus"][0]["processes"]] == [100]
    assert use(sample["gpus"][0], 100) == (0.5, 0.05, 0.0, 0.0)
    assert sample["errors"] == {}


async def test_lists_of_any_length_are_read_whole(library_directory: Path, now_us: int) -> None:
    """More processes, and more samples, than the agent has set memory aside for."""
    script = ONE_GPU + "processes compute 0 1000 300 7\n"
    busy = "".join(f"sample 0 {1000 + n} {now_us} 50 5 0 0\n" for n in range(300))
    _, sample = await samples(library_directory, script, script + busy)
    [gpu] = sample["gpus"]
    assert listed(gpu) == [(1000 + n, "compute", 7) for n in range(300)]
    assert all(use(gpu, 1000 + n) == (0.5, 0.05, 0.0, 0.0) for n in (0, 127, 128, 299))
    assert sample["errors"] == {}


async def test_entries_that_a_driver_leaves_unfilled_are_no_processes(library_directory: Path, now_us: int) -> None:
    """Nor those of the GPU that was read before."""
    busy = f"sample 0 100 {now_us} 50 5 0 0\nsample 0 101 {now_us} 20 5 0 0\nsample 1 200 {now_us} 30 5 0 0\n"
    _, sample = await samples(library_directory, TWO_PAIRS, TWO_PAIRS + busy + "unfilled samples 1 5\n")
    first, second, *_ = sample["gpus"]
    assert [pid for pid, _, _ in listed(first)] == [100, 101]
    assert [pid for pid, _, _ in listed(second)] == [200]
