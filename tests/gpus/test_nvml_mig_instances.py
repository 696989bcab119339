"""MIG instances that the NVML driver makes and removes: the real nvidia-ml-py, on a libnvidia-ml.so.1 with such a cycle."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from shutil import rmtree
from typing import Any

import msgspec
import pytest

from gpushare_agent.core.formats.mig_profiles import mig_profiles
from gpushare_agent.core.model.mig import MigProfile
from tests.gpus.support_mig import Hardware, machine_of
from tests.gpus.support_nvml import Probe, fake_library, running_probe
from tests.gpus.test_nvml_mig import MINORS, PROFILES, labels

PRODUCT, MIB = "NVIDIA H100 80GB HBM3", 81559
H100 = {one.name: one for one in mig_profiles(PRODUCT, MIB)}
RIGHTS = "rights config monitor\n"
CREATE_GI, CREATE_CI = "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance"
DESTROY_CI, DESTROY_GI = "nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy"


TWO = machine_of((PRODUCT, MIB), (PRODUCT, MIB))


@pytest.fixture
def machine() -> Iterator[Path]:
    """The directory of a machine that outlives the processes on it."""
    directory = Path(tempfile.mkdtemp(prefix="gs", dir="/tmp"))
    (directory / "on-demand").write_text("all")
    yield directory
    rmtree(directory)


@asynccontextmanager
async def running(library: Path, script: str, machine: Path, **options: Any) -> AsyncIterator[Probe]:
    async with running_probe(library, script, mig_minors=MINORS, machine=machine, **options) as probe:
        yield probe


async def create(probe: Probe, profile: MigProfile, start: int, gpu: int = 0) -> Any:
    return await probe.ask(f"create GPU-{gpu} {profile.id} {start}")


async def destroy(probe: Probe, instance: Any, gpu: int = 0) -> Any:
    return await probe.ask(f"destroy GPU-{gpu} {msgspec.json.encode(instance).decode()}")


async def layout_of(probe: Probe, gpu: int = 0) -> Any:
    [layout] = [one for one in (await probe.read())["layouts"] if one["parent"] == f"GPU-{gpu}"]
    return layout


@pytest.mark.parametrize("name", PROFILES)
async def test_each_product_has_its_profiles(library_directory: Path, machine: Path, name: str) -> None:
    """With the places and counts of the driver's IDs, and the names that are computed where the driver has none."""
    mib, _, slices = PROFILES[name]
    wanted = {one.id: msgspec.to_builtins(one) for one in mig_profiles(name, mib)}
    async with running(library_directory, machine_of((name, mib), named=False) + RIGHTS, machine) as probe:
        inventory = await probe.read()
    assert inventory["gpus"] == [] and inventory["divided"] == ["GPU-0"]
    [layout] = inventory["layouts"]
    assert {one["id"]: {**one, "starts": tuple(one["starts"])} for one in layout["profiles"]} == wanted
    assert (layout["instances"], layout["problem"]) == ([], "")
    assert layout["slices"] == (12 if "RTX" in name else slices)


async def test_an_instance_is_made_listed_used_again_and_removed(library_directory: Path, machine: Path) -> None:
    """It is in the layout and among the GPUs, with its place, profile and nodes; the GPU is divided and in order all the
    while; a second life has the same IDs and index, and another UUID."""
    hardware = Hardware(machine)
    (machine / "on-demand").write_text("1")
    async with running(library_directory, TWO + RIGHTS, machine) as probe:
        before = await probe.read()
        made = await create(probe, H100["1g.10gb+me"], 5, gpu=1)
        during = await probe.read()
        assert await destroy(probe, made, gpu=1) is None
        after = await probe.read()
        again = await create(probe, H100["1g.10gb"], 2, gpu=1)
        later = await probe.read()
    assert before["divided"] == ["GPU-1"] == during["divided"] == after["divided"]
    assert labels(before) == {"GPU-0": " Unhealthy"}, "not on demand: what to do is said"
    assert "mig.on_demand" in before["gpus"][0]["unhealthy_reason"]
    [uuid] = [one["uuid"] for one in made["compute"]]
    assert labels(during) == {"GPU-0": " Unhealthy", uuid: "1g.10gb+me Healthy"}
    [gpu] = [gpu for gpu in during["gpus"] if gpu["mig"]]
    place = gpu["mig"]
    assert (place["profile_id"], place["start"], place["gi"], place["ci"]) == (H100["1g.10gb+me"].id, 5, made["gi"], 0)
    assert (place["parent"], place["gi_cap"], gpu["memory_mib"]) == ("GPU-1", 3 + 9 * (15 + made["gi"]), 9984)
    [layout] = during["layouts"]
    assert layout["instances"] == [made]
    assert made["compute"] == [{"ci": 0, "uuid": uuid, "slices": 1}]
    assert [one["parent"] for one in after["layouts"]] == ["GPU-1"] and after["layouts"][0]["instances"] == []
    assert (again["gi"], later["gpus"][-1]["index"]) == (made["gi"], gpu["index"])
    assert [one["uuid"] for one in again["compute"]] != [uuid] and again["compute"][0]["uuid"].startswith("MIG-")
    assert [one[:3] for one in hardware.instances] == [(1, H100["1g.10gb"].id, 2)]


async def test_lives_leave_nothing_behind(library_directory: Path, machine: Path) -> None:
    """A hundred lives on one GPU, each with another UUID: one index, and what is remembered does not grow."""
    async with running(library_directory, TWO + RIGHTS, machine) as probe:
        sizes, indexes, uuids = set(), set(), set()
        for life in range(100):
            made = await create(probe, H100["2g.20gb"], life % 3 * 2)
            [gpu] = (await probe.read())["gpus"]
            assert await destroy(probe, made) is None
            assert (await probe.read())["gpus"] == []
            sizes.add(tuple(await probe.ask("kept")))
            indexes.add(gpu["index"])
            uuids.add(gpu["uuid"])
    assert (sizes, indexes, len(uuids)) == ({(2, 2, 2, 2, 1)}, {2}, 100)


async def test_without_the_right_the_remedy_is_said(library_directory: Path, machine: Path) -> None:
    """In the layout and by both calls; the GPU is divided and no fault of it. With the right, nothing has to start again."""
    hardware = Hardware(machine)
    async with running(library_directory, TWO, machine) as probe:
        without = await probe.read()
        hardware.make(0, 1, H100["3g.40gb"], 4, ("MIG-foreign", 3))
        foreign = await probe.read()
        refused = await create(probe, H100["1g.10gb"], 0)
        kept = await destroy(probe, {"gi": 1, "profile": 9, "start": 4, "size": 4})
        probe.becomes(TWO + "rights config\n")
        listed = await probe.read()
        made = await create(probe, H100["1g.10gb"], 0)
        own = await probe.read()
        probe.becomes(TWO + RIGHTS)
        both = await probe.read()
    for text in (
        without["layouts"][0]["problem"],
        foreign["layouts"][0]["problem"],
        refused["rejected"],
        kept["rejected"],
    ):
        assert "component driver-from-host" in text and "NO_PERMISSION" not in text
    assert without["divided"] == ["GPU-0", "GPU-1"] and without["layouts"][0]["instances"] == []
    # mig/config lists GPU instances; mig/monitor shows the MIG devices of others.
    assert [one["problem"] for one in listed["layouts"]] == ["", ""]
    assert [one["compute"][0]["uuid"] for one in listed["layouts"][0]["instances"]] == ["MIG-foreign"]
    assert [gpu["uuid"] for gpu in listed["gpus"]] == []
    assert [gpu["uuid"] for gpu in own["gpus"]] == [made["compute"][0]["uuid"]]
    assert labels(both) == {"MIG-foreign": "3g.40gb Healthy", made["compute"][0]["uuid"]: "1g.10gb Healthy"}


async def test_what_is_used_is_not_removed(library_directory: Path, machine: Path) -> None:
    """A process in the instance: both parts stay. A program that has the GPU instance open: half of it is gone, is listed
    so, and is made whole again or removed."""
    hardware = Hardware(machine)
    async with running(library_directory, TWO + RIGHTS, machine) as probe:
        made = await create(probe, H100["3g.40gb"], 0)
        hardware.use(0, made["gi"], 0)
        in_use = await destroy(probe, made)
        whole = await layout_of(probe)
        hardware.end_use()
        hardware.use(0, made["gi"])
        half_gone = await destroy(probe, made)
        half = await probe.read()
        [left] = half["layouts"][0]["instances"]
        taken = await create(probe, H100["1g.10gb"], 1)
        again = await create(probe, H100["3g.40gb"], 0)
        assert "conflict" in await destroy(probe, again)
        hardware.end_use()
        assert await destroy(probe, left) is None
        after = await layout_of(probe)
    assert "has it open" in in_use["conflict"] and "has it open" in half_gone["conflict"]
    assert whole["instances"] == [made]
    assert left == {**made, "compute": []} and half["gpus"] == [] and half["divided"] == ["GPU-0", "GPU-1"]
    assert "another instance lies there" in taken["conflict"]
    assert again["gi"] == made["gi"] and again["compute"][0]["uuid"] != made["compute"][0]["uuid"]
    assert after["instances"] == []


async def test_what_is_another_instance_now_stays(library_directory: Path, machine: Path) -> None:
    """IDs and places are used again: an instance that others removed is removed already, whatever has its ID; one that
    they made at its place is theirs."""
    hardware = Hardware(machine)
    async with running(library_directory, TWO + RIGHTS, machine) as probe:
        made = await create(probe, H100["3g.40gb"], 0)
        hardware.remove(0, made["gi"])
        assert await destroy(probe, made) is None, "gone"
        hardware.make(0, made["gi"], H100["3g.40gb"], 4, ("MIG-else", 3))
        assert await destroy(probe, made) is None, "its ID is another's"
        hardware.remove(0, made["gi"])
        hardware.make(0, made["gi"], H100["3g.40gb"], 0, ("MIG-life", 3))
        again = await destroy(probe, made)
        probe.becomes(TWO.replace(" 81559 1 ", " 81559 0 ") + RIGHTS)
        assert await destroy(probe, made) is None, "no instance outlives MIG mode"
        off = await create(probe, H100["3g.40gb"], 0)
        undivided = await probe.read()
    assert "MIG-life" in again["conflict"]
    assert hardware.instances == [(0, 9, 0, ["MIG-life"])]
    assert "MIG mode is off" in off["notfound"]
    assert (labels(undivided), undivided["layouts"]) == ({"GPU-0": " Healthy", "GPU-1": " Healthy"}, [])


async def test_a_new_instance_is_none_that_was_there(library_directory: Path, machine: Path) -> None:
    """Others may have made it, whole or half, in the moment before."""
    hardware = Hardware(machine)
    hardware.make(0, 1, H100["3g.40gb"], 0, ("MIG-else", 3))
    hardware.make(0, 2, H100["3g.40gb"], 4)
    before = hardware.instances
    async with running(library_directory, TWO + RIGHTS, machine) as probe:
        for start in (0, 4):
            assert "another instance lies there" in (await probe.ask(f"create_new GPU-0 9 {start}"))["conflict"]
        assert hardware.instances == before
        assert (await probe.ask("create_new GPU-1 9 4"))["start"] == 4


async def test_parts_of_an_instance_stay_as_they_are(library_directory: Path, machine: Path) -> None:
    """Several compute instances in one GPU instance are each a device; nothing of ours is made among them."""
    hardware = Hardware(machine)
    hardware.make(0, 2, H100["3g.40gb"], 4, ("MIG-one", 1), ("MIG-two", 2))
    async with running(library_directory, TWO + RIGHTS, machine) as probe:
        inventory = await probe.read()
        refused = await create(probe, H100["3g.40gb"], 4)
    assert labels(inventory) == {"MIG-one": "1c.3g.40gb Healthy", "MIG-two": "2c.3g.40gb Healthy"}
    [instance] = inventory["layouts"][0]["instances"]
    assert [(one["uuid"], one["slices"]) for one in instance["compute"]] == [("MIG-one", 1), ("MIG-two", 2)]
    assert "others have divided" in refused["conflict"]
    assert hardware.instances == [(0, 9, 4, ["MIG-one", "MIG-two"])]


async def test_a_place_that_there_is_not(library_directory: Path, machine: Path) -> None:
    """A start or a profile that the GPU has not, and a GPU that the node has not."""
    async with running(library_directory, TWO + RIGHTS, machine) as probe:
        answers = [
            await create(probe, H100["2g.20gb"], 3),
            await probe.ask("create GPU-0 77 0"),
            await probe.ask("create GPU-9 19 0"),
            await probe.ask('destroy GPU-9 {"gi":1,"profile":19,"start":0,"size":1}'),
        ]
    assert ["notfound" in answer for answer in answers] == [True] * 4
    assert Hardware(machine).instances == []


async def test_a_driver_that_names_the_gpu_instead_of_the_mig_device(library_directory: Path, machine: Path) -> None:
    """Its UUID is then found among the GPU's MIG devices, and an instance is removed by it."""
    async with running(library_directory, TWO + RIGHTS + "ci_device parent\n", machine) as probe:
        made = [await create(probe, H100["1g.10gb"], start) for start in (0, 1)]
        layout = await layout_of(probe)
        assert await destroy(probe, made[0]) is None
    uuids = [one["compute"][0]["uuid"] for one in made]
    assert len(set(uuids)) == 2 and all(uuid.startswith("MIG-") for uuid in uuids)
    assert layout["instances"] == made
    assert [one[3] for one in Hardware(machine).instances] == [[uuids[1]]]


async def test_a_driver_without_the_newer_calls(machine: Path) -> None:
    """The first versions of the profiles have no names: those are computed, and instances are made as ever."""
    with fake_library("OLD_DRIVER") as library:
        async with running(library, TWO + RIGHTS, machine) as probe:
            made = await create(probe, H100["1g.20gb"], 6)
            inventory = await probe.read()
    assert labels(inventory) == {made["compute"][0]["uuid"]: "1g.20gb Healthy"}
    assert {one["name"] for one in inventory["layouts"][0]["profiles"]} == set(H100)


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("MIG 1g.99gb", "1g.99gb"),
        ("1g.99gb", "1g.99gb"),
        *((name, "1g.10gb") for name in ("1g.10gb/../x", "MIG 1g.10gb", "\udcf8", "MIG 1g.10gb+" + "m" * 60, "-")),
    ],
)
async def test_the_drivers_name_counts_where_it_is_one(
    library_directory: Path, machine: Path, name: str, profile: str
) -> None:
    """In the layout and of the instance. It becomes a part of resource names: what can be none is computed."""
    script = TWO.replace("MIG 1g.10gb\n", f"{name}\n")
    async with running(library_directory, script + RIGHTS, machine) as probe:
        made = await create(probe, H100["1g.10gb"], 6)
        inventory = await probe.read()
    assert labels(inventory) == {made["compute"][0]["uuid"]: f"{profile} Healthy"}
    assert {one["name"] for one in inventory["layouts"][0]["profiles"]} == {*H100} - {"1g.10gb"} | {profile}


async def test_a_slow_gpu_delays_no_other(library_directory: Path, machine: Path) -> None:
    """While a call for one GPU does not return, the other one's are answered, and polls go on; then it is made."""
    pipe = machine / "slow"
    os.mkfifo(pipe)
    slow = f"slow {CREATE_GI} 0 {pipe}\n"
    # For writing as well: so that opening and reading wait for nobody.
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        async with running(library_directory, TWO + RIGHTS + slow, machine) as probe:
            assert await probe.ask("begin_create GPU-0 9 0") is None
            await readable(reader)
            others = [await create(probe, H100["1g.10gb"], start, gpu=1) for start in (6, 5)]
            assert await destroy(probe, others[0], gpu=1) is None
            meanwhile = await probe.read()
            probe.becomes(TWO + RIGHTS)
            made = await probe.ask("end_wait")
            after = await probe.read()
    finally:
        os.close(reader)
    assert [[one["gi"] for one in layout["instances"]] for layout in meanwhile["layouts"]] == [[], [others[1]["gi"]]]
    assert after["layouts"][0]["instances"] == [made]


async def readable(descriptor: int) -> None:
    loop, is_readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(descriptor)


async def test_a_call_that_hangs_is_said(library_directory: Path, machine: Path) -> None:
    """After its time; the next one on this GPU is refused at once, and the other GPU is answered."""
    slow = f"slow {CREATE_GI} 0 {machine / 'slow'}\n"
    async with running(library_directory, TWO + RIGHTS + slow, machine, timeout_s=0.2) as probe:
        hangs = await create(probe, H100["3g.40gb"], 0)
        refused = await create(probe, H100["3g.40gb"], 4)
        inventory = await probe.read()
        probe.becomes(TWO + RIGHTS)
    assert "got no answer within 0.2 s" in hangs["unavailable"]
    assert "earlier call still hangs" in refused["unavailable"]
    assert [one["problem"] for one in inventory["layouts"]] == ["", ""]


@pytest.mark.parametrize(("when", "function"), [*product(("before", "after"), (CREATE_GI, CREATE_CI))])
async def test_killed_while_it_is_made(library_directory: Path, machine: Path, when: str, function: str) -> None:
    """The next process lists what there is: nothing, half of it, or all; it makes the rest, or removes it."""
    half = (when, function) in (("after", CREATE_GI), ("before", CREATE_CI))
    whole = (when, function) == ("after", CREATE_CI)
    async with running(library_directory, TWO + RIGHTS + f"kill {when} {function} 2\n", machine) as probe:
        first = await create(probe, H100["1g.10gb"], 6)
        await probe.ask_fatal(f"create GPU-0 {H100['2g.20gb'].id} 0")
    async with running(library_directory, TWO + RIGHTS, machine) as probe:
        found = [one for one in (await layout_of(probe))["instances"] if one["gi"] != first["gi"]]
        assert [len(one["compute"]) for one in found] == ([0] if half else [1] if whole else [])
        made = await create(probe, H100["2g.20gb"], 0)
        assert not found or made["gi"] == found[0]["gi"]
        assert not whole or [made] == found
        assert await destroy(probe, made) is None
        assert (await layout_of(probe))["instances"] == [first]


@pytest.mark.parametrize(("when", "function"), [*product(("before", "after"), (DESTROY_CI, DESTROY_GI))])
async def test_killed_while_it_is_removed(library_directory: Path, machine: Path, when: str, function: str) -> None:
    """The next process lists what is left of it, and removes that."""
    is_whole = (when, function) == ("before", DESTROY_CI)
    async with running(library_directory, TWO + RIGHTS + f"kill {when} {function} 1\n", machine) as probe:
        other = await create(probe, H100["1g.10gb"], 6)
        made = await create(probe, H100["2g.20gb"], 0)
        await probe.ask_fatal(f"destroy GPU-0 {msgspec.json.encode(made).decode()}")
    async with running(library_directory, TWO + RIGHTS, machine) as probe:
        found = [one for one in (await layout_of(probe))["instances"] if one["gi"] != other["gi"]]
        left = [made] if is_whole else [] if (when, function) == ("after", DESTROY_GI) else [{**made, "compute": []}]
        assert found == left
        assert await destroy(probe, made) is None
        assert (await layout_of(probe))["instances"] == [other]


async def test_a_reboot_takes_instances_and_leaves_the_mode(library_directory: Path, machine: Path) -> None:
    """An instance that was made before is gone; one at its place is another one."""
    async with running(library_directory, TWO + RIGHTS, machine) as probe:
        made = await create(probe, H100["7g.80gb"], 0)
    Hardware(machine).reboot()
    async with running(library_directory, TWO + RIGHTS, machine) as probe:
        inventory = await probe.read()
        again = await create(probe, H100["7g.80gb"], 0)
    assert (inventory["gpus"], inventory["divided"]) == ([], ["GPU-0", "GPU-1"])
    assert [one["instances"] for one in inventory["layouts"]] == [[], []]
    assert (again["gi"], again["compute"][0]["uuid"] == made["compute"][0]["uuid"]) == (made["gi"], False)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("error 0 15\n", "GPU is lost"),
        ("error 1 15\n", "GPU is lost"),
        ("handle_error 1 15\n", "GPU is lost"),
        ("handle_error 0 15\n", "GPU is lost"),
        ("call_error nvmlDeviceGetGpuInstances 0 999\n", "nvmlDeviceGetGpuInstances"),
        ("call_error nvmlGpuInstanceGetInfo 0 999\n", "nvmlGpuInstanceGetInfo"),
    ],
)
async def test_what_cannot_be_read_is_not_gone(library_directory: Path, machine: Path, fault: str, why: str) -> None:
    """The layout stays, with the reason, and the GPU is divided, with instances or without; then it is read again."""
    faulty = int(fault.split()[-2])
    async with running(library_directory, TWO + RIGHTS, machine) as probe:
        await create(probe, H100["1g.10gb"], 0)
        before = await probe.read()
        probe.becomes(TWO + RIGHTS + fault)
        during = await probe.read()
        probe.becomes(TWO + RIGHTS)
        after = await probe.read()
    assert during["divided"] == ["GPU-0", "GPU-1"]
    assert why in during["layouts"][faulty]["problem"]
    assert {**during["layouts"][faulty], "problem": ""} == before["layouts"][faulty]
    assert during["layouts"][1 - faulty] == before["layouts"][1 - faulty]
    assert after == before


async def test_an_instance_that_goes_away_while_it_is_read(library_directory: Path, machine: Path) -> None:
    """It is left out, and the others are listed."""
    async with running(library_directory, TWO + RIGHTS, machine) as probe:
        await create(probe, H100["1g.10gb"], 0)
        probe.becomes(TWO + RIGHTS + "call_error nvmlGpuInstanceGetInfo 0 2\n")
        layout = await layout_of(probe)
    assert (layout["instances"], layout["problem"]) == ([], "")


async def test_a_new_opening_of_nvml_reads_all_again(library_directory: Path, machine: Path) -> None:
    """The driver was loaded again with other profiles: handles and profiles of before are void."""
    other = machine_of(("NVIDIA A100-SXM4-40GB", 40536), (PRODUCT, MIB)) + RIGHTS
    async with running(library_directory, TWO + RIGHTS, machine) as probe:
        await create(probe, H100["1g.10gb"], 0)
        await probe.read()
        probe.becomes("init 9\ndriver 9\n")
        assert "unavailable" in await probe.read()
        assert "driverlost" in await create(probe, H100["1g.10gb"], 1)
        Hardware(machine).reboot()
        probe.becomes(other)
        made = await probe.ask("create GPU-0 19 1")
        layout = await layout_of(probe)
    assert (layout["instances"], layout["problem"]) == ([made], "")
    assert {one["name"] for one in layout["profiles"]} >= {"1g.5gb", "7g.40gb"}


async def test_a_gpu_that_lists_nonsense(library_directory: Path, machine: Path) -> None:
    """Places beyond all GPUs become no counters of a ResourceSlice; a GPU without profiles says so."""
    script = TWO.replace("gi_profile 0 0 19 1 1 7", "gi_profile 0 0 19 4000000000 1 7") + RIGHTS
    async with running(library_directory, script, machine) as probe:
        far = await layout_of(probe)
        # Profiles are read once for each opening.
        probe.becomes("driver 9\n")
        await probe.read()
        probe.becomes("".join(line for line in script.splitlines(keepends=True) if not line.startswith("gi_profile 0")))
        none = await layout_of(probe)
    assert "no GPU has more than 64 memory slices" in far["problem"] and far["profiles"] == []
    assert "has no profiles" in none["problem"]


async def test_nvml_is_opened_again_for_a_divided_gpu(library_directory: Path, machine: Path) -> None:
    """A node whose only GPU is divided and was reset: NVML brings it back after a complete shutdown alone."""
    one = machine_of((PRODUCT, MIB)) + RIGHTS
    async with running(library_directory, one, machine) as probe:
        made = await create(probe, H100["1g.10gb"], 0)
        before = await probe.read()
        probe.becomes(one + "stale 0 15\n")
        assert await probe.read() == before
        assert await destroy(probe, made) is None
        empty = await probe.read()
        probe.becomes(one + "stale 0 16\n")
        assert await probe.read() == empty
