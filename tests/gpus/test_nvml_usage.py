"""What GPUs use, as the NVML driver samples it: the real nvidia-ml-py, on a scripted libnvidia-ml.so.1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from tests.gpus.support_nvml import ONE_GPU, TWO_PAIRS, Probe, fake_library, running_probe, samples

MIB = 1024 * 1024

BUSY = f"""\
value utilization 0 87 34
value encoder 0 12
value decoder 0 5
value memory_used 0 {1300 * MIB} {1000 * MIB}
value temperature 0 61
value power 0 142500
value power_limit 0 150000
value clock_1 0 1695
value clock_2 0 6251
value clock_reasons 0 {0x4 | 0x40 | 0x1}
value pcie_0 0 1500
value pcie_1 0 2500
field 0 3 0 0 3 7
field 0 4 0 0 3 1
field 0 138 4294967295 0 3 2048
field 0 139 4294967295 0 3 4096
"""
"""For GPU 0: everything that a GPU can report, apart from processes."""

ALL = {
    "sm_ratio": 0.87,
    "memory_ratio": 0.34,
    "encoder_ratio": 0.12,
    "decoder_ratio": 0.05,
    "memory_used_bytes": 1000 * MIB,
    "memory_total_bytes": 24576 * MIB,
    "memory_free_bytes": 23276 * MIB,  # without the 300 that the driver keeps for itself
    "temperature_celsius": 61.0,
    "power_watts": 142.5,
    "power_limit_watts": 150.0,
    "sm_clock_hertz": 1_695_000_000,
    "memory_clock_hertz": 6_251_000_000,
    "ecc_corrected_total": 7,
    "ecc_uncorrected_total": 1,
    "throttle_reasons": ["hw_thermal", "power_cap"],
    "pcie_received_bytes_per_second": 2_500_000,
    "pcie_sent_bytes_per_second": 1_500_000,
    "nvlink_received_bytes_total": 4096 * 1024,
    "nvlink_sent_bytes_total": 2048 * 1024,
}
"""What is sampled of it."""


@pytest.fixture(scope="module")
def old_library_directory() -> Iterator[Path]:
    with fake_library("OLD_DRIVER") as directory:
        yield directory


def traced(probe: Probe) -> list[str]:
    """The calls since the last time, each as function and GPU."""
    path = probe.directory / "trace"
    lines = path.read_text().splitlines()
    path.unlink()
    return lines


async def test_every_value_of_a_gpu_comes_in_its_unit(library_directory: Path) -> None:
    """Percent become ratios, milliwatts watts, MHz hertz, KB/s and KiB bytes; idle is no throttling."""
    [sample] = await samples(library_directory, ONE_GPU + BUSY)
    [gpu] = sample["gpus"]
    assert {name: gpu[name] for name in ALL} == ALL
    assert (gpu["uuid"], gpu["processes"], sample["errors"]) == ("GPU-aaaa", [], {})


async def test_a_gpu_that_supports_nothing_is_sampled_without_an_error(library_directory: Path) -> None:
    """Each value is None, never zero; its memory and its empty process list are known all the same."""
    [sample] = await samples(library_directory, ONE_GPU)
    [gpu] = sample["gpus"]
    reported = {name: gpu[name] for name in ALL if gpu[name] is not None}
    memory = {"memory_used_bytes": 0, "memory_total_bytes": 24576 * MIB, "memory_free_bytes": 24576 * MIB}
    assert reported == memory
    assert sample["errors"] == {}


async def test_what_a_gpu_does_not_support_is_called_once(library_directory: Path) -> None:
    """The second round asks only what the first one had an answer to, and always for processes; so does each GPU."""
    script = TWO_PAIRS + "value power 1 90000\n"
    async with running_probe(library_directory, script) as probe:
        probe.becomes(script + f"trace {probe.directory / 'trace'}\n")
        await probe.sample()
        first = traced(probe)
        for _ in range(3):  # each GPU has had its turn at PCIe
            await probe.sample()
        traced(probe)
        await probe.sample()
        later = traced(probe)
    processes = [
        "nvmlDeviceGetGraphicsRunningProcesses_v3",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        "nvmlDeviceGetProcessUtilization",
    ]
    assert "nvmlDeviceGetUtilizationRates 0" in first and "nvmlDeviceGetPowerUsage 0" in first
    assert [call for call in later if call.endswith(" 0")] == [f"{name} 0" for name in processes]
    assert [call for call in later if call.endswith(" 1")] == [
        "nvmlDeviceGetPowerUsage 1",
        *(f"{name} 1" for name in processes),
    ]


@pytest.mark.parametrize("again", ["close", "sample_600"])
async def test_what_a_gpu_does_not_support_is_called_again(library_directory: Path, again: str) -> None:
    """In another opening, and after 600 rounds: MIG mode and permissions change while NVML stays open."""
    async with running_probe(library_directory, ONE_GPU) as probe:
        before = await probe.sample_gpu()
        probe.becomes(ONE_GPU + BUSY)
        still = await probe.sample_gpu()
        await probe.ask(again)
        after = await probe.sample_gpu()
    assert [one["sm_ratio"] for one in (before, still, after)] == [None, None, 0.87]


async def test_pcie_is_measured_on_one_gpu_a_round_and_kept(library_directory: Path) -> None:
    """NVML measures for 20 ms each way, so the GPUs take turns; a GPU keeps its value until its next turn."""
    script = TWO_PAIRS + "".join(f"value pcie_0 {gpu} {gpu + 1}\nvalue pcie_1 {gpu} {gpu + 1}\n" for gpu in range(4))
    async with running_probe(library_directory, script) as probe:
        probe.becomes(script + f"trace {probe.directory / 'trace'}\n")
        known, measured = [], []
        for _ in range(4):
            gpus = (await probe.sample())["gpus"]
            known.append(sum(gpu["pcie_sent_bytes_per_second"] is not None for gpu in gpus))
            measured.append([call.split()[1] for call in traced(probe) if "PcieThroughput" in call])
    assert known == [1, 2, 3, 4]
    assert sorted(measured) == [["0", "0"], ["1", "1"], ["2", "2"], ["3", "3"]]
    assert [gpu["pcie_sent_bytes_per_second"] for gpu in gpus] == [1000, 2000, 3000, 4000]


async def test_an_error_of_one_value_is_counted_and_leaves_the_others(library_directory: Path) -> None:
    """A failing power sensor costs the power; the error has NVML's name."""
    errors = "call_error nvmlDeviceGetPowerUsage 0 10\ncall_error nvmlDeviceGetClockInfo 0 999\n"
    sample, again = await samples(library_directory, *[ONE_GPU + BUSY + errors] * 2)
    [gpu] = sample["gpus"]
    assert (gpu["power_watts"], gpu["sm_clock_hertz"], gpu["temperature_celsius"]) == (None, None, 61.0)
    assert sample["errors"] == {"timeout": 1, "unknown": 2}
    assert again["errors"] == sample["errors"]


@pytest.mark.parametrize("code", [3, 4, 6, 13, 21])
async def test_an_answer_that_there_is_nothing_is_no_error(library_directory: Path, code: int) -> None:
    """Not supported, no permission, not found, function not found, no data: the value is None and nothing is counted."""
    functions = ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetFieldValues")
    errors = "".join(f"call_error {function} 0 {code}\n" for function in functions)
    [sample] = await samples(library_directory, ONE_GPU + BUSY + errors)
    [gpu] = sample["gpus"]
    assert (gpu["sm_ratio"], gpu["power_watts"], gpu["ecc_corrected_total"]) == (None, None, None)
    assert (gpu["temperature_celsius"], sample["errors"]) == (61.0, {})


async def test_a_counter_that_the_gpu_lacks_leaves_the_others(library_directory: Path) -> None:
    """One call asks for all counters; the answer is per counter, and only a true error of one is counted."""
    script = ONE_GPU + "field 0 3 0 0 3 7\nfield 0 4 0 2 3 0\nfield 0 138 4294967295 10 3 0\n"
    [sample] = await samples(library_directory, script)
    [gpu] = sample["gpus"]
    assert (gpu["ecc_corrected_total"], gpu["ecc_uncorrected_total"]) == (7, None)
    assert (gpu["nvlink_sent_bytes_total"], gpu["nvlink_received_bytes_total"]) == (None, None)
    assert sample["errors"] == {"timeout": 1}


@pytest.mark.parametrize(("code", "errors"), [(15, {"gpu_is_lost": 1}), (999, {"unknown": 3})])
async def test_a_lost_gpu_leaves_the_sample(library_directory: Path, code: int, errors: dict[str, int]) -> None:
    """The others are sampled; the loss is counted, and the GPU comes back with a later round. After a reset under an open
    NVML the handle answers only Unknown Error: that is a lost GPU and no bad sensor."""
    _, lost, back = await samples(library_directory, TWO_PAIRS, TWO_PAIRS + f"error 1 {code}\n", TWO_PAIRS)
    assert [gpu["uuid"] for gpu in lost["gpus"]] == ["GPU-aaaa", "GPU-cccc", "GPU-dddd"]
    assert lost["errors"] == errors
    assert len(back["gpus"]) == 4 and back["errors"] == {}


async def test_all_gpus_lost_is_an_empty_sample(library_directory: Path) -> None:
    """The driver itself answers, so it is no failure of the sample; the polls deal with the GPUs."""
    async with running_probe(library_directory, TWO_PAIRS) as probe:
        await probe.sample()
        probe.becomes(TWO_PAIRS + "".join(f"error {gpu} 15\n" for gpu in range(4)))
        lost = await probe.sample()
        polled = await probe.read()
        probe.becomes(TWO_PAIRS)
        back = await probe.sample()
    assert lost == {"gpus": [], "errors": {"gpu_is_lost": 4}}
    assert {gpu["health"] for gpu in polled["gpus"]} == {"Unhealthy"}
    assert len(back["gpus"]) == 4


async def test_a_node_without_gpus_has_an_empty_sample(library_directory: Path) -> None:
    """A driver that counts no GPU is no error."""
    assert await samples(library_directory, "count 0\n") == [{"gpus": [], "errors": {}}]


async def test_a_driver_lost_as_a_whole_is_unavailable_and_comes_back(library_directory: Path) -> None:
    """Uninitialized costs one sample, a driver that is not loaded each until it is: NVML is opened anew each time."""
    scripts = (ONE_GPU + BUSY, "driver 1\n" + ONE_GPU + BUSY, "init 9\ndriver 9\n", ONE_GPU + BUSY)
    _, lost, gone, back = await samples(library_directory, *scripts)
    assert "sampling the GPUs through NVML failed: Uninitialized" in lost["unavailable"]
    assert "opening NVML failed: Driver Not Loaded" in gone["unavailable"]
    assert back["gpus"][0]["sm_ratio"] == 0.87


async def test_an_older_driver_is_called_by_the_older_names(old_library_directory: Path) -> None:
    """Without the newer symbols memory, temperature and throttling still come; what has no older name is None."""
    async with running_probe(old_library_directory, ONE_GPU + BUSY + "process compute 0 77 1048576\n") as probe:
        polled = await probe.read()
        sample = await probe.sample()
    [gpu] = sample["gpus"]
    assert gpu["memory_used_bytes"] == 1300 * MIB  # the older call counts the reserved bytes too
    assert (gpu["temperature_celsius"], gpu["throttle_reasons"]) == (61.0, ["hw_thermal", "power_cap"])
    assert (gpu["ecc_corrected_total"], gpu["nvlink_sent_bytes_total"]) == (None, None)
    assert [(process["pid"], process["kind"]) for process in gpu["processes"]] == [(77, "compute")]
    assert sample["errors"] == {} and polled["gpus"][0]["health"] == "Healthy"


@pytest.mark.parametrize("code", [0, 7])
@pytest.mark.parametrize("name", ["compute", "samples"])
async def test_a_list_that_claims_any_length_is_left_out(library_directory: Path, name: str, code: int) -> None:
    """Longer than what was asked for, and than memory: the GPU's other values, and the other GPUs, are sampled as ever."""
    script = TWO_PAIRS + f"value power 0 90000\nprocess compute 0 4711 1048576\nsample 0 4711 {1 << 50} 5 5 0 0\n"
    async with running_probe(library_directory, script + f"claims {name} 0 4294967295 {code}\n") as probe:
        sample = await probe.sample()
        busy = await probe.busy("GPU-aaaa", "GPU-bbbb")
    gpus = {gpu["uuid"]: gpu for gpu in sample["gpus"]}
    assert len(gpus) == 4 and gpus["GPU-aaaa"]["power_watts"] == 90 and "GPU-bbbb" in busy


async def test_a_counter_that_is_no_number_is_left_out(library_directory: Path) -> None:
    """A double may be no number at all; the largest number stands for it in the script."""
    not_a_number = f"field 0 {pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL} 0 0 0 {2**64 - 1}\n"
    [sample] = await samples(library_directory, TWO_PAIRS + not_a_number)
    assert len(sample["gpus"]) == 4
