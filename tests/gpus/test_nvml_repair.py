"""GPUs that say that they need repair, as the NVML driver reads it, on a scripted libnvidia-ml.so.1."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpushare_agent.agent.gpus.nvml.reader import POLLS_OF_KIND
from tests.gpus.support_nvml import ONE_GPU, TWO_PAIRS, read_once, reads, running_probe

RECOVERY_ACTION = 230


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (1, ("reset of the GPU", "nvidia-smi --gpu-reset", "gpu_reset")),
        (2, ("reboot of the node", "node_reboot")),
        (3, ("end of all programs", "drain_p2p")),
        (4, ("once the GPU is idle", "drain_and_reset")),
    ],
)
async def test_a_gpu_whose_driver_asks_for_recovery_is_unhealthy(
    library_directory: Path, action: int, words: tuple[str, ...]
) -> None:
    """The reason names what the driver asks for; the other GPUs and the GPU's own facts stay, and it comes back."""
    script = TWO_PAIRS + f"field 1 {RECOVERY_ACTION} 0 0 1 {action}\n"
    asks_no_more = script.replace(f"1 {action}\n", "1 0\n")
    before, asking, after = await reads(library_directory, TWO_PAIRS, script, asks_no_more)
    assert [gpu["health"] for gpu in asking["gpus"]] == ["Healthy", "Unhealthy", "Healthy", "Healthy"]
    gpu = asking["gpus"][1]
    assert gpu["unhealthy_reason"].startswith("the driver asks for")
    assert all(name in gpu["unhealthy_reason"] for name in words)
    assert (gpu["minor"], gpu["memory_mib"], asking["links"]) == (0, 24576, before["links"])
    assert after == before


@pytest.mark.parametrize("field", ["0 1 0", "0 1 5", "3 1 1", "10 1 1"])
async def test_a_gpu_without_a_wish_is_healthy(library_directory: Path, field: str) -> None:
    """None, an action for memory between nodes, an older driver's not supported, and a failure to report."""
    [gpu] = (await read_once(library_directory, ONE_GPU + f"field 0 {RECOVERY_ACTION} 0 {field}\n"))["gpus"]
    assert gpu["health"] == "Healthy"


async def test_a_gpu_whose_rows_cannot_be_remapped_is_unhealthy(library_directory: Path) -> None:
    """Its memory needs replacement; rows that only wait for a reset to be remapped are no reason."""
    script = TWO_PAIRS + "value remapped 0 1 0\nvalue remapped 1 0 1\n"
    waiting, failed, *_ = (await read_once(library_directory, script))["gpus"]
    assert waiting["health"] == "Healthy"
    assert (failed["health"], "row remapping failed" in failed["unhealthy_reason"]) == ("Unhealthy", True)


async def test_nvml_stays_open_while_all_gpus_ask_for_a_reset(library_directory: Path) -> None:
    """They answer, so NVML is not lost: a poll opens nothing anew, and the GPUs' use is still sampled."""
    script = ONE_GPU + f"field 0 {RECOVERY_ACTION} 0 0 1 1\n"
    async with running_probe(library_directory, ONE_GPU) as probe:
        await probe.read()
        probe.becomes(script, logs=True)
        [gpu] = (await probe.read())["gpus"]
        assert probe.calls == []
        assert len((await probe.sample())["gpus"]) == 1
    assert gpu["health"] == "Unhealthy"


async def test_a_gpu_that_asks_for_a_reset_from_the_start_has_its_place_in_the_topology(
    library_directory: Path,
) -> None:
    """It answers, so its connections are read although it is not given."""
    script = (
        TWO_PAIRS + f"field 1 {RECOVERY_ACTION} 0 0 1 1\nnvlink 1 0 0 00000000:3B:00.0\nnvlink 0 0 0 00000000:3C:00.0\n"
    )
    inventory = await read_once(library_directory, script)
    assert inventory["gpus"][1]["health"] == "Unhealthy"
    assert inventory["links"][1] == ["NVLINK1", "SELF", "SYS", "SYS"]
    assert len(inventory["gpus"][1]["nvlinks"]) == 1


async def test_compute_capability_and_brand_are_read_where_the_driver_has_them(library_directory: Path) -> None:
    """Major and minor; a number that has a name, which a later driver's may not have. None where it does not report."""
    values = "value capability 0 6 1\nvalue brand 0 14\nvalue brand 1 2\nvalue brand 2 99\n"
    gpus = (await read_once(library_directory, TWO_PAIRS + values))["gpus"]
    assert [gpu["compute_capability"] for gpu in gpus] == [[6, 1], None, None, None]
    assert [gpu["brand"] for gpu in gpus] == ["Nvidia", "Tesla", "", ""]


async def test_what_kind_a_gpu_is_is_read_again_when_it_may_be_another(library_directory: Path) -> None:
    """After polls that it did not answer, in another opening of NVML, and sometimes; not at each poll."""
    async with running_probe(library_directory, TWO_PAIRS) as probe:

        async def brand_by(number: int, more: str = "") -> str:
            probe.becomes(f"{TWO_PAIRS}value capability 1 8 0\nvalue brand 1 {number}\n{more}")
            return str((await probe.read())["gpus"][1]["brand"])

        assert [await brand_by(number) for number in (2, 3)] == ["Tesla", "Tesla"]
        await brand_by(3, "error 1 999\n")
        assert [await brand_by(number) for number in (4, 5)] == ["Grid", "Grid"]
        await probe.ask("close")
        assert await brand_by(6) == "Titan"
        later = [await brand_by(5) for _ in range(POLLS_OF_KIND)]
        assert later == [*["Titan"] * (POLLS_OF_KIND - 1), "GeForce"]


async def test_what_a_gpu_is_and_where_is_read_with_its_kind(library_directory: Path) -> None:
    """Most polls ask a GPU only for what may change, and for what fails where it is lost."""
    script = f"{ONE_GPU}value capability 0 8 0\nvalue brand 0 2\n"
    async with running_probe(library_directory, script) as probe:
        [before] = (await probe.read())["gpus"]
        probe.becomes(script.replace(before["bus_id"], "00000000:99:00.0").replace(before["name"], "Another"))
        for _ in range(POLLS_OF_KIND - 1):
            assert (await probe.read())["gpus"] == [before]
        [after] = (await probe.read())["gpus"]
    assert (after["bus_id"], after["name"]) == ("00000000:99:00.0", "Another")


@pytest.mark.parametrize("value", ["capability 0 8 0", "brand 0 2"])
async def test_a_kind_that_could_not_be_read_is_read_at_the_next_poll(library_directory: Path, value: str) -> None:
    """The GPU would lack the label for a minute, and with it pods that ask for it their node."""
    both = ONE_GPU + "value capability 0 8 0\nvalue brand 0 2\n"
    one = both.replace(f"value {value}\n", "")
    _, after = [reading["gpus"][0] for reading in await reads(library_directory, one, both)]
    assert (after["compute_capability"], after["brand"]) == ([8, 0], "Tesla")
