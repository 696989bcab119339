"""Simulated GPUs: what they are made of, and how their faults and their use are rehearsed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.json import encode
from structlog.testing import capture_logs

from gpushare_agent.agent.gpus.simulated.driver import SimulatedDriver
from gpushare_agent.core.formats.simulated_gpus import Faults, encode_usage, parse_faults, parse_usage
from gpushare_agent.core.model.errors import Corrupt, StartupError, Unavailable
from gpushare_agent.core.model.gpu_health import GpuEvent, GpuEventKind
from gpushare_agent.core.model.gpus import GpuInventory, Health
from gpushare_agent.core.model.usage import ProcessKind
from tests.gpus.support_gpus import shape, topology_text
from tests.gpus.support_health import simulated


async def inventory_of(driver: SimulatedDriver) -> GpuInventory:
    inventory = await driver.read()
    await driver.close()
    return inventory


@pytest.fixture
def faults(tmp_path: Path) -> Path:
    return tmp_path / "faults.json"


async def test_uuids_are_the_same_after_a_restart_and_differ_between_nodes_and_gpus() -> None:
    """The kubelet's checkpoint names GPUs by UUID, so a restarted agent must find the same ones."""
    first, again = await inventory_of(simulated(gpus=8)), await inventory_of(simulated(gpus=8))
    other = await inventory_of(simulated(gpus=8, seed="n2"))
    assert first == again
    assert len({gpu.uuid for gpu in (*first.gpus, *other.gpus)}) == 16
    assert all(gpu.uuid.startswith("GPU-") for gpu in first.gpus)


async def test_the_default_machine_has_pairs_and_numa_nodes_of_four() -> None:
    """Six GPUs: two pairs on the first node, one on the second."""
    inventory = await inventory_of(simulated(gpus=6))
    assert [gpu.numa_node for gpu in inventory.gpus] == [0, 0, 0, 0, 1, 1]
    assert shape(inventory.tree) == "SYS[PHB[PIX(0,1) PIX(2,3)] PIX(4,5)]"


async def test_a_topology_text_decides_the_number_of_gpus_and_their_numa_nodes() -> None:
    """The --gpus setting is not asked then."""
    inventory = await inventory_of(simulated(gpus=2, topology_text=topology_text("t4-x4-two-sockets")))
    assert [gpu.numa_node for gpu in inventory.gpus] == [0, 0, 1, 1]


async def test_a_short_memory_list_repeats_its_last_value() -> None:
    """GPUs may differ."""
    inventory = await inventory_of(simulated(gpus=4, gpu_memory_mib=(81920, 24576)))
    assert [gpu.memory_mib for gpu in inventory.gpus] == [81920, 24576, 24576, 24576]


async def test_gpus_are_named_by_their_memory_unless_a_name_is_given() -> None:
    """As products are: a GPU of 80 GiB is not called like one of 24."""
    sizes = (81920, 24576, 11264, 512)
    names = [gpu.name for gpu in (await inventory_of(simulated(gpus=4, gpu_memory_mib=sizes))).gpus]
    assert names == [f"NVIDIA Simulated {size}" for size in ("80GB", "24GB", "11GB", "512MB")]
    named = await inventory_of(simulated(gpu_memory_mib=(81920,), gpu_name="NVIDIA H100"))
    assert {gpu.name for gpu in named.gpus} == {"NVIDIA H100"}


async def test_nvlinks_are_those_of_the_matrix() -> None:
    """A V100 of the cube mesh has six links; eight links of an NVSwitch machine end at the switch."""
    mesh = await inventory_of(simulated(topology_text=topology_text("v100-x8-cube-mesh")))
    assert {len(gpu.nvlinks) for gpu in mesh.gpus} == {6}
    assert [link.remote_bus_id for link in mesh.gpus[0].nvlinks].count(mesh.gpus[3].bus_id) == 2
    switched = await inventory_of(simulated(topology_text=topology_text("h100-x8-nvswitch")))
    assert {len(gpu.nvlinks) for gpu in switched.gpus} == {18}
    assert len({link.remote_bus_id for gpu in switched.gpus for link in gpu.nvlinks}) == 1


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"gpus": 2, "gpu_memory_mib": (1, 2, 3)}, StartupError, "3 GPU memory sizes were given for 2 GPUs"),
        *(({"gpus": number}, StartupError, "choose 1 to 64") for number in (0, -1, 65)),
        *(({"gpu_memory_mib": sizes}, StartupError, "sizes above 0 MiB") for sizes in ((), (0,), (24576, -1))),
        ({"topology_text": "nonsense"}, Corrupt, "no line names a GPU"),
    ],
)
def test_gpus_that_cannot_be_simulated_are_refused(options: Any, error: type[Exception], text: str) -> None:
    """With what is wrong: a mistake in the settings."""
    with pytest.raises(error, match=text):
        simulated(**options)


async def test_lost_gpus_are_unhealthy_with_the_given_reason_until_the_file_says_otherwise(faults: Path) -> None:
    """Faults come and go while the agent runs."""
    driver = simulated(gpus=3, faults_file=faults)
    before = await driver.read()
    faults.write_text(json.dumps({"lost": {"1": "fell off the bus", "9": "no such GPU"}}))
    lost = await driver.read()
    faults.unlink()
    assert [gpu.is_healthy for gpu in lost.gpus] == [True, False, True]
    assert lost.gpus[1].unhealthy_reason == "fell off the bus"
    assert lost.topology == before.topology
    assert await driver.read() == before


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"lost": []}',
        '{"lost": {"one": "x"}}',
        b"\xff\xfe",
        "[" * 100_000,
        " " * (4 * 2**20 + 1),
        '{"xids": {}}',
        '{"xids": [1]}',
        '{"xids": [{"gpu": 0, "xid": 79}]}',
        '{"xids": [{"id": true, "gpu": 0, "xid": 79}]}',
        '{"xids": [{"id": 1, "gpu": -1, "xid": 79}]}',
        '{"xids": [{"id": 1, "gpu": 0, "xid": "79"}]}',
        '{"xids": [{"id": 1, "gpu": 0, "kind": "fire"}]}',
        '{"resets": [{"id": 1}]}',
    ],
    ids=lambda text: repr(text[:60]),
)
async def test_a_malformed_faults_file_is_ignored_with_one_warning(faults: Path, text: str | bytes) -> None:
    """However often it is read: a warning each poll would bury the log."""
    faults.write_bytes(text if isinstance(text, bytes) else text.encode())
    driver = simulated(faults_file=faults)
    with capture_logs() as logs:
        inventories = [await driver.read(), await driver.read()]
    assert all(gpu.is_healthy for inventory in inventories for gpu in inventory.gpus)
    assert [entry["event"] for entry in logs] == ["faults_file_ignored"]


async def test_a_faults_file_that_is_no_file_is_ignored(faults: Path) -> None:
    """A pipe would block its reader for ever."""
    os.mkfifo(faults)
    with capture_logs() as logs:
        inventory = await simulated(faults_file=faults).read()
    assert all(gpu.health is Health.HEALTHY for gpu in inventory.gpus)
    assert ["no regular file" in entry["reason"] for entry in logs] == [True]


# --- events and resets ---

XID_79 = {"id": 1, "gpu": 1, "xid": 79}


def write(path: Path, **content: Any) -> None:
    path.write_text(json.dumps(content))


async def test_an_event_is_reported_once(faults: Path) -> None:
    """The file keeps it; the driver reports it at the next call only."""
    driver = simulated(faults_file=faults)
    uuids = [gpu.uuid for gpu in (await driver.read()).gpus]
    write(faults, xids=[XID_79])
    assert await driver.events() == [GpuEvent(kind=GpuEventKind.XID, uuid=uuids[1], xid=79)]
    assert await driver.events() == []
    write(faults, xids=[XID_79, {"id": 2, "gpu": 0, "kind": "double-bit-ecc"}, {"id": 3, "gpu": None, "xid": 48}])
    assert await driver.events() == [
        GpuEvent(kind=GpuEventKind.DOUBLE_BIT_ECC, uuid=uuids[0]),
        GpuEvent(kind=GpuEventKind.XID, uuid=None, xid=48),
    ]


@pytest.mark.parametrize("first_look", ["read", "events", "sample"])
async def test_what_was_in_the_file_at_the_first_poll_is_history(faults: Path, first_look: str) -> None:
    """An agent that starts again does not report the faults of yesterday; a driver that never polled has not started."""
    write(faults, xids=[XID_79], resets=[{"id": 2, "gpu": 0}])
    driver = simulated(faults_file=faults)
    await getattr(driver, first_look)()
    assert await driver.events() == []
    assert all(gpu.is_healthy for gpu in (await driver.read()).gpus)
    write(faults, xids=[{"id": 3, "gpu": 0, "xid": 48}])
    assert [event.xid for event in await driver.events()] == [48]


async def test_a_storm_comes_in_calls_of_1024_oldest_first(faults: Path) -> None:
    """However they lie in the file, and those of GPUs that are not there left out."""
    driver = simulated(faults_file=faults)
    await driver.read()
    storm = [{"id": number, "gpu": 9 if number == 7 else 0, "xid": number} for number in range(1500, 0, -1)]
    write(faults, xids=storm)
    calls = [[event.xid for event in await driver.events()] for _ in range(3)]
    assert [len(call) for call in calls] == [1023, 476, 0]
    assert calls[0] + calls[1] == [number for number in range(1, 1501) if number != 7]


async def test_a_reset_gpu_is_lost_for_one_poll(faults: Path) -> None:
    """Between two polls a reset would go unseen; so the next poll sees it, and the one after it sees the GPU back."""
    driver = simulated(faults_file=faults)
    before = await driver.read()
    write(faults, resets=[{"id": 1, "gpu": 1}])
    polls = [await driver.read() for _ in range(2)]
    assert [gpu.unhealthy_reason for gpu in polls[0].gpus] == ["", "being reset (simulated)"]
    assert polls[1] == before


async def test_a_lost_driver_is_unavailable(faults: Path) -> None:
    """As NVML is after a driver crash: each call gives the reason; what happened meanwhile is reported afterwards."""
    driver = simulated(faults_file=faults)
    await driver.read()
    write(faults, xids=[XID_79], all_lost="driver unloaded")
    for call in (driver.read, driver.events, driver.sample):
        with pytest.raises(Unavailable, match="driver unloaded"):
            await call()
    write(faults, xids=[XID_79])
    assert [event.xid for event in await driver.events()] == [79]


def test_faults_are_written_as_they_are_read() -> None:
    """The sandbox writes what the agent reads."""
    faults = parse_faults(
        json.dumps({
            "lost": {"1": "gone"}, "all_lost": "x", "resets": [{"id": 4, "gpu": 2}],
            "xids": [XID_79, {"id": 2, "gpu": None, "kind": "double-bit-ecc"}],
        })
    )  # fmt: skip
    assert parse_faults(encode(faults).decode()) == faults
    assert (faults.last_id, Faults().last_id) == (4, 0)


# --- use ---


async def test_a_gpus_use_is_the_sum_of_its_processes(tmp_path: Path) -> None:
    """Processes by PID; one on two GPUs is on each; one on a GPU that is not there is on none."""
    usage = tmp_path / "usage.json"
    write(usage, processes=[
        {"pid": 20, "gpu": 0, "sm": 0.25, "memory_bytes": 2**30, "memory": 0.1, "encoder": 0.5, "kind": "mps"},
        {"pid": 10, "gpu": 0, "sm": 0.5, "memory_bytes": 2**20},
        {"pid": 10, "gpu": 1, "sm": 1, "memory_bytes": 2**20},
        {"pid": 30, "gpu": 7, "sm": 1},
    ])  # fmt: skip
    first, second = (await simulated(usage_file=usage).sample()).gpus
    assert (first.sm_ratio, first.memory_used_bytes, first.encoder_ratio) == (0.75, 2**30 + 2**20, 0.5)
    assert first.memory_ratio == pytest.approx(0.1 + 0.5 * 0.6)
    assert first.processes is not None and second.processes is not None
    assert [(p.pid, p.kind, p.sm_ratio, p.memory_bytes) for p in first.processes] == [
        (10, ProcessKind.COMPUTE, 0.5, 2**20), (20, ProcessKind.MPS, 0.25, 2**30),
    ]  # fmt: skip
    assert [p.pid for p in second.processes] == [10]
    assert (second.temperature_celsius, second.power_watts, second.throttle_reasons) == (74, 300.0, ("power_cap",))


async def test_no_gpu_shows_more_than_all_of_itself(tmp_path: Path) -> None:
    """Whatever its processes are said to use together."""
    usage = tmp_path / "usage.json"
    write(usage, processes=[{"pid": pid, "gpu": 0, "sm": 0.9, "memory_bytes": 2**40} for pid in (1, 2)])
    gpu = (await simulated(usage_file=usage).sample()).gpus[0]
    assert (gpu.sm_ratio, gpu.memory_used_bytes) == (1.0, gpu.memory_total_bytes)


async def test_a_lost_gpu_is_not_sampled_but_counted(faults: Path) -> None:
    """As NVML's error name."""
    write(faults, lost={"0": "gone"})
    driver = simulated(gpus=3, faults_file=faults)
    sample = await driver.sample()
    assert [gpu.uuid for gpu in sample.gpus] == [gpu.uuid for gpu in (await driver.read()).gpus[1:]]
    assert sample.errors == {"gpu_is_lost": 1}


@pytest.mark.parametrize(
    "processes",
    [
        {}, [1], [{"gpu": 0}], [{"pid": 0, "gpu": 0}], [{"pid": True, "gpu": 0}], [{"pid": 2**40, "gpu": 0}],
        [{"pid": 1}], [{"pid": 1, "gpu": 64}], [{"pid": 1, "gpu": 0, "sm": 1.01}], [{"pid": 1, "gpu": 0, "sm": -0.1}],
        [{"pid": 1, "gpu": 0, "sm": "1"}], [{"pid": 1, "gpu": 0, "sm": float("nan")}],
        [{"pid": 1, "gpu": 0, "memory_bytes": 1.5}], [{"pid": 1, "gpu": 0, "memory_bytes": -1}],
        [{"pid": 1, "gpu": 0, "kind": "other"}], [{"pid": 1, "gpu": 0}, {"pid": 1, "gpu": 0}],
        [{"pid": number + 1, "gpu": 0} for number in range(50_001)],
    ],
    ids=lambda processes: repr(processes)[:60],
)  # fmt: skip
async def test_a_malformed_usage_file_is_ignored_with_one_warning(tmp_path: Path, processes: Any) -> None:
    """The GPUs idle then, all of them: half a file would be believed."""
    usage = tmp_path / "usage.json"
    write(usage, processes=processes)
    driver = simulated(usage_file=usage)
    with capture_logs() as logs:
        samples = [await driver.sample() for _ in range(2)]
    assert {gpu.processes for sample in samples for gpu in sample.gpus} == {()}
    assert [entry["event"] for entry in logs] == ["usage_file_ignored"]


def test_use_is_written_as_it_is_read() -> None:
    """By GPU and PID."""
    first, second = {"pid": 9, "gpu": 1, "sm": 0.5, "memory_bytes": 7}, {"pid": 3, "gpu": 0, "sm": 1.0}
    text = json.dumps({"processes": [first, second]})
    written = encode_usage(parse_usage(text))
    assert [(p["gpu"], p["pid"]) for p in json.loads(written)["processes"]] == [(0, 3), (1, 9)]
    assert set(parse_usage(written)) == set(parse_usage(text))


async def test_mig_instances_come_and_go_with_the_file(tmp_path: Path) -> None:
    """As on real GPUs: their parent is not offered, one that a container has stays, and its index is not given again."""
    faults = tmp_path / "faults"
    driver = simulated(gpu_memory_mib=(81920,), faults_file=faults, with_instances=True)

    async def after(**mig: list[str]) -> dict[str, tuple[int, bool]]:
        faults.write_text(json.dumps({"mig": {index[1:]: profiles for index, profiles in mig.items()}}))
        found = await driver.read()
        return {gpu.mig.profile if gpu.mig else gpu.uuid: (gpu.index, gpu.is_healthy) for gpu in found.gpus}

    first, second = (gpu.uuid for gpu in (await driver.read()).gpus)
    assert await after(_0=["1g.10gb", "3g.40gb"]) == {second: (1, True), "1g.10gb": (2, True), "3g.40gb": (3, True)}
    held = next(gpu for gpu in (await driver.read()).gpus if gpu.mig and gpu.mig.number == 1)
    assert (held.memory_mib, held.label) == (40192, "0:1")
    driver.in_use = lambda: [held.uuid]
    assert await after(_0=["1g.10gb"]) == {second: (1, True), "1g.10gb": (2, True), "3g.40gb": (3, False)}
    driver.in_use = tuple
    assert await after(_0=["1g.10gb", "2g.20gb"]) == {second: (1, True), "1g.10gb": (2, True), "2g.20gb": (4, True)}
    assert (await after(_0=[]))[first] == (0, False)
    assert await after() == {first: (0, True), second: (1, True)}
    assert parse_faults(encode(Faults(mig={0: ("1g.10gb+me",)})).decode()).mig == {0: ("1g.10gb+me",)}
    with pytest.raises(ValueError, match="profile"):
        parse_faults('{"mig": {"0": ["../../x"]}}')
