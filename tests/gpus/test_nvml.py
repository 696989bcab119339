"""The GPUs as the NVML driver reads them: the real nvidia-ml-py, on a scripted libnvidia-ml.so.1."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.gpus.support_nvml import ONE_GPU, ROOT, TWO_PAIRS, read_once, reads, running_probe


async def test_gpus_are_read_with_their_minor_numbers_names_and_memory(library_directory: Path) -> None:
    """The minor number is the driver's and not the index; names, memory, bus IDs and the version come along."""
    inventory = await read_once(library_directory, TWO_PAIRS)
    gpus = inventory["gpus"]
    assert [(gpu["index"], gpu["minor"], gpu["uuid"]) for gpu in gpus] == [
        (0, 2, "GPU-aaaa"),
        (1, 0, "GPU-bbbb"),
        (2, 3, "GPU-cccc"),
        (3, 1, "GPU-dddd"),
    ]
    assert [gpu["name"] for gpu in gpus] == ["Tesla P40", "Tesla P40", "NVIDIA A10", "NVIDIA A10"]
    assert [gpu["memory_mib"] for gpu in gpus] == [24576, 24576, 16384, 16384]
    assert gpus[2]["bus_id"] == "00000000:AF:00.0"
    assert {gpu["health"] for gpu in gpus} == {"Healthy"}
    assert (inventory["driver_version"], inventory["cuda_version"]) == ("580.1.2", "13.1")


async def test_the_tree_follows_the_common_ancestors(library_directory: Path) -> None:
    """Single switch, internal board switch, host bridge and system become PIX, PIX, PHB and SYS."""
    inventory = await read_once(library_directory, TWO_PAIRS.replace("ancestor 0 1 10", "ancestor 0 1 0"))
    assert inventory["links"][0] == ["SELF", "PIX", "SYS", "SYS"]
    assert inventory["links"][3] == ["SYS", "SYS", "PHB", "SELF"]
    assert inventory["tree"] == "SYS[PIX(0,1) PHB(2,3)]"


async def test_nvlinks_between_two_gpus_are_counted(library_directory: Path) -> None:
    """Two active links to the same GPU are NV2, whatever form the remote bus ID has; PCIe still shapes the tree."""
    links = (
        "nvlink 0 0 0 0000:3c:00.0\nnvlink 0 3 0 0000:3c:00.0\n"
        "nvlink 1 0 0 00000000:3B:00.0\nnvlink 1 1 0 00000000:3B:00.0\n"
        "nvlink 1 2 0 00000000:AF:00.0\nnvlink 2 5 0 00000000:3C:00.0\n"
    )
    inventory = await read_once(library_directory, TWO_PAIRS + links)
    assert inventory["links"][0] == ["SELF", "NVLINK2", "SYS", "SYS"]
    assert inventory["links"][1] == ["NVLINK2", "SELF", "NVLINK1", "SYS"]
    assert inventory["links"][2] == ["SYS", "NVLINK1", "SELF", "PHB"]
    assert inventory["gpus"][0]["nvlinks"] == [
        {"number": 0, "remote_bus_id": "00000000:3C:00.0"},
        {"number": 3, "remote_bus_id": "00000000:3C:00.0"},
    ]
    assert "PIX(0,1)" in inventory["tree"]


async def test_links_through_an_nvswitch_join_all_gpus_that_have_them(library_directory: Path) -> None:
    """GPUs whose links end at switches reach each other with all of them; a GPU without keeps its PCIe links."""
    links = "".join(f"nvlink {gpu} {n} 2 00000000:{5 + n:02X}:00.0\n" for gpu in (0, 1, 2) for n in range(6))
    inventory = await read_once(library_directory, TWO_PAIRS + links)
    assert inventory["links"][0] == ["SELF", "NVLINK6", "NVLINK6", "SYS"]
    assert inventory["links"][2] == ["NVLINK6", "NVLINK6", "SELF", "PHB"]


async def test_links_that_come_up_otherwise_change_the_topology(library_directory: Path) -> None:
    """The driver was loaded anew, and the links' far ends are switches no more; nothing else differs."""
    links = "".join(f"nvlink {gpu} 0 {{}} 00000000:05:00.0\n" for gpu in (0, 1))
    switched, direct = (TWO_PAIRS + links.format(end, end) for end in (2, 0))
    before, gone, after = await reads(library_directory, switched, "init 9\ndriver 9\n", direct)
    assert "unavailable" in gone
    assert (before["links"][0][1], after["links"][0][1]) == ("NVLINK1", "PIX")


async def test_numa_nodes_and_pcie_roots_come_from_the_kernel(library_directory: Path) -> None:
    """The entry of a device is a link to its place below its root. A number is its NUMA node; -1 and an absent file mean
    that the host reports none. They are read once."""
    async with running_probe(library_directory, TWO_PAIRS) as probe:
        (probe.directory / "pci").mkdir()
        for bus_id, place, node in (
            ("0000:3b:00.0", "pci0000:3a/0000:3a:00.0/0000:3b:00.0", "0\n"),
            ("0000:3c:00.0", "0000:3c:00.0", "-1\n"),
            ("0000:af:00.0", "pci0000:ae/x", "1\n"),
        ):
            (target := probe.directory / "devices" / place).mkdir(parents=True)
            (target / "numa_node").write_text(node)
            (probe.directory / "pci" / bus_id).symlink_to(target)
        inventory = await probe.read()
        (probe.directory / "pci" / "0000:3b:00.0" / "numa_node").unlink()
        assert await probe.read() == inventory
    found = [(gpu["numa_node"], gpu["pcie_root"]) for gpu in inventory["gpus"]]
    assert found == [(0, "pci0000:3a"), (None, ""), (1, "pci0000:ae"), (None, "")]


async def test_lost_gpus_leave_the_others_working(library_directory: Path) -> None:
    """GPUs lost between two polls stay in the list, Unhealthy with NVML's reason, their places in the tree unchanged; also
    one of which there is not even a handle."""
    lost = TWO_PAIRS + "error 1 15\nhandle_error 2 15\n"
    before, after, back = await reads(library_directory, TWO_PAIRS, lost, TWO_PAIRS)
    reasons = ["", "NVML: GPU is lost", "NVML: GPU is lost", ""]
    assert [gpu["unhealthy_reason"] for gpu in after["gpus"]] == reasons
    assert [gpu["health"] for gpu in after["gpus"]] == ["Healthy", "Unhealthy", "Unhealthy", "Healthy"]
    assert (after["gpus"][1]["minor"], after["tree"], after["unreadable"]) == (0, before["tree"], [])
    assert back == before


async def test_gpus_lost_from_the_start_are_known_by_what_they_answer(library_directory: Path) -> None:
    """With a UUID but nothing else one is listed, with unknown minor and no memory. Of one without a handle only its index
    and the reason are known, and the others keep their indexes."""
    inventory = await read_once(library_directory, TWO_PAIRS + "handle_error 1 15\nerror 2 15\n")
    assert inventory["unreadable"] == [[1, "NVML: GPU is lost"]]
    assert [gpu["index"] for gpu in inventory["gpus"]] == [0, 2, 3]
    lost = inventory["gpus"][1]
    assert (lost["uuid"], lost["health"], lost["minor"], lost["memory_mib"]) == ("GPU-cccc", "Unhealthy", -1, 0)
    assert inventory["links"][0][1] == "SYS"


async def test_gpus_keep_their_index_when_the_driver_numbers_them_anew(library_directory: Path) -> None:
    """A GPU off the bus shifts NVML's indexes; ours stay, and the GPU that is gone is Unhealthy. It has
    no number that another one has now."""
    fewer = """\
count 3
GPU 0 GPU-aaaa 2 00000000:3B:00.0 24576 0 Tesla P40
GPU 1 GPU-cccc 0 00000000:AF:00.0 16384 0 NVIDIA A10
GPU 2 GPU-dddd 1 00000000:D8:00.0 16384 0 NVIDIA A10
ancestor 1 2 30
"""
    before, after = await reads(library_directory, TWO_PAIRS, fewer)
    assert [(gpu["index"], gpu["uuid"]) for gpu in after["gpus"]] == [
        (gpu["index"], gpu["uuid"]) for gpu in before["gpus"]
    ]
    assert [gpu["health"] for gpu in after["gpus"]] == ["Healthy", "Unhealthy", "Healthy", "Healthy"]
    assert "does not list it" in after["gpus"][1]["unhealthy_reason"]
    assert [gpu["driver_index"] for gpu in after["gpus"]] == [0, -1, 1, 2]
    assert [gpu["minor"] for gpu in after["gpus"]] == [2, -1, 0, 1]
    assert after["links"] == before["links"]


async def test_all_gpus_lost_are_unhealthy_and_come_back(library_directory: Path) -> None:
    """While all are lost NVML is opened once at each poll, whoever else uses it; the first poll after the recovery sees them
    healthy."""
    script = TWO_PAIRS + "nvlink 0 0 0 00000000:3C:00.0\nnvlink 1 0 0 00000000:3B:00.0\n"
    async with running_probe(library_directory, script) as probe:
        before = await probe.read()
        probe.becomes(script + "".join(f"error {gpu} 15\n" for gpu in range(4)), logs=True)
        lost = await probe.read()
        await probe.sample()
        await probe.events()
        assert [call for call in probe.calls if "event" not in call] == ["shutdown", "init"]
        await probe.read()
        assert probe.calls.count("init") == 2
        probe.becomes(script)
        back = await probe.read()
    assert lost["links"] == before["links"]
    assert lost["links"][0][1] == "NVLINK1"
    assert [gpu["health"] for gpu in lost["gpus"]] == ["Unhealthy"] * 4
    assert back == before


async def test_a_driver_that_is_gone_is_unavailable_and_comes_back(library_directory: Path) -> None:
    """Driver unloaded: the poll fails and names what to check. Loaded again: the next poll opens NVML and works."""
    unloaded = "init 9\ndriver 9\n"
    before, gone, still_gone, back = await reads(library_directory, TWO_PAIRS, unloaded, unloaded, TWO_PAIRS)
    assert "opening NVML failed: Driver Not Loaded" in gone["unavailable"]
    assert still_gone == gone
    assert back == before


async def test_a_driver_lost_under_an_open_nvml_is_opened_again_at_once(library_directory: Path) -> None:
    """NVML that answers Uninitialized after a driver restart costs no poll: it is opened again within the same one."""
    async with running_probe(library_directory, TWO_PAIRS) as probe:
        before = await probe.read()
        probe.becomes(TWO_PAIRS + "driver 1\n", logs=True)
        failing = await probe.read()
        assert probe.calls == ["shutdown", "init", "shutdown"]
        probe.becomes(TWO_PAIRS)
        back = await probe.read()
    assert "NVML opens, but does not answer: Uninitialized" in failing["unavailable"]
    assert back == before


async def test_an_absent_library_is_unavailable_with_a_checklist() -> None:
    """Without libnvidia-ml.so.1 the error names the library, the device nodes and the runtime class."""
    answer = await read_once(None, TWO_PAIRS)
    if "unavailable" not in answer:
        pytest.skip("this machine has a real libnvidia-ml.so.1")
    assert "NVML Shared Library Not Found" in answer["unavailable"]
    for hint in ("nvidia-smi", "libnvidia-ml.so.1", "/dev/nvidiactl", "runtime class", "nodeSelector", "taint"):
        assert hint in answer["unavailable"]


async def test_a_hung_driver_costs_one_thread_and_is_unavailable(library_directory: Path) -> None:
    """The first poll times out, later ones are refused without a further thread, and all is healthy when it returns."""
    async with running_probe(library_directory, TWO_PAIRS + "hang\n", timeout_s=0.5) as probe:
        first = await probe.read()
        second = await probe.read()
        threads = await probe.ask("threads")
        probe.becomes(TWO_PAIRS)
        while "unavailable" in (answer := await probe.read()):
            pass  # it still hangs, or a busy machine took more than half a second
    assert "no answer within 0.5 s" in first["unavailable"]
    assert "still hangs" in second["unavailable"]
    assert threads == 1
    assert len(answer["gpus"]) == 4


async def test_a_hung_driver_does_not_keep_the_process_from_ending(library_directory: Path) -> None:
    """The process ends by itself with exit code 0 while an NVML call hangs, also after a close that could not be done."""
    async with running_probe(library_directory, TWO_PAIRS + "hang\n", timeout_s=0.2) as probe:
        assert "unavailable" in await probe.read()
        await probe.ask("close")
        process = probe.process
    assert process.returncode == 0


async def test_reading_after_a_close_opens_nvml_again(library_directory: Path) -> None:
    """Close shuts NVML down; the next poll initialises it once more."""
    async with running_probe(library_directory, TWO_PAIRS) as probe:
        probe.becomes(TWO_PAIRS, logs=True)
        before = await probe.read()
        await probe.ask("close")
        after = await probe.read()
        assert probe.calls == ["init", "shutdown", "init"]
    assert after == before


NO_UTF8 = "\udcf8\udc95\udca0\udc81"
"""As bytes F8 95 A0 81, which a driver gave as a name."""


@pytest.mark.parametrize(
    ("before", "after", "call"),
    [
        ("Tesla P40\nGPU 2", f"{NO_UTF8}\nGPU 2", "nvmlDeviceGetName"),
        ("00000000:3C:00.0", NO_UTF8, "nvmlDeviceGetPciInfo"),
        ("00000000:3C:00.0", "../../../../etc", "nvmlDeviceGetPciInfo"),
        (" 0 00000000:3C:00.0 24576", " 0 00000000:3C:00.0 4294967295", "nvmlDeviceGetMemoryInfo"),
        (" 0 00000000:3C:00.0", " 4294967295 00000000:3C:00.0", "nvmlDeviceGetMinorNumber"),
    ],
)
async def test_an_answer_that_cannot_be_used_takes_its_gpu_out_of_service(
    library_directory: Path, before: str, after: str, call: str
) -> None:
    """The reason names the call, the other GPUs go on, from the start and later; NVML is not opened again for it."""
    script = TWO_PAIRS.replace(before, after)
    async with running_probe(library_directory, TWO_PAIRS) as probe:
        whole = await probe.read()
        probe.becomes(script, logs=True)
        inventory = await probe.read()
        assert probe.calls == []
        probe.becomes(TWO_PAIRS)
        assert await probe.read() == whole
    async with running_probe(library_directory, script) as probe:
        at_start = await probe.read()
        await probe.sample()
        await probe.events()
    for found in (inventory, at_start):
        assert [gpu["health"] for gpu in found["gpus"]] == ["Healthy", "Unhealthy", "Healthy", "Healthy"]
        assert f"NVML: the answer of {call} cannot be used: " in found["gpus"][1]["unhealthy_reason"]


@pytest.mark.parametrize("uuid", [NO_UTF8, "GPU-aaaa", "GPU=b,GPU-c"])
async def test_a_gpu_whose_uuid_names_no_one_is_unreadable(library_directory: Path, uuid: str) -> None:
    """A UUID of other bytes, or one that another GPU has: the others are offered, each once."""
    inventory = await read_once(library_directory, TWO_PAIRS.replace("GPU-bbbb", uuid))
    [[index, reason]] = inventory["unreadable"]
    assert index == 1 and "nvmlDeviceGetUUID" in reason
    assert {gpu["uuid"]: gpu["index"] for gpu in inventory["gpus"]} == {"GPU-aaaa": 0, "GPU-cccc": 2, "GPU-dddd": 3}


async def test_what_is_no_gpus_own_costs_no_gpu(library_directory: Path) -> None:
    """The driver's version and the far end of a link are left out where they are no text, and a count of millions ends."""
    script = TWO_PAIRS.replace("count 4", "count 4000000000") + f"version {NO_UTF8}\nnvlink 0 0 0 {NO_UTF8}\n"
    inventory = await read_once(library_directory, script)
    assert {gpu["health"] for gpu in inventory["gpus"]} == {"Healthy"} and len(inventory["gpus"]) == 4
    assert inventory["driver_version"] == ""


CALLS = (
    "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMigMode", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetBrand",
    "nvmlDeviceGetGpuFabricInfo", "nvmlDeviceGetFieldValues", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents", "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetProcessUtilization", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetAddressingMode", "nvmlDeviceGetNumaNodeId",
)  # fmt: skip
NEEDED = {"nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetName"}
NOT_SUPPORTED = 3


@pytest.mark.parametrize("code", [1, 2, 3, 4, 7, 9, 15, 18, 999, 77777])
async def test_no_error_of_one_call_ends_the_driver_or_takes_another_gpu(library_directory: Path, code: int) -> None:
    """Codes that NVML has not had so far, and texts of them that are no text, too."""
    async with running_probe(library_directory, TWO_PAIRS) as probe:
        for call in CALLS:
            probe.becomes(TWO_PAIRS + f"call_error {call} 1 {code}\n")
            inventory = await probe.read()
            assert [gpu["health"] for gpu in inventory["gpus"] if gpu["index"] != 1] == ["Healthy"] * 3, call
            if call in NEEDED and code != NOT_SUPPORTED:
                assert inventory["gpus"][1]["health"] == "Unhealthy"
                is_named = code == 15 or call.removesuffix("_v3") in inventory["gpus"][1]["unhealthy_reason"]
                assert is_named, inventory["gpus"][1]
            sample = await probe.sample()
            assert {gpu["uuid"] for gpu in sample["gpus"]} >= {"GPU-aaaa", "GPU-cccc", "GPU-dddd"}, call
            assert {"GPU-aaaa"} <= (await probe.busy("GPU-aaaa", "GPU-bbbb")).keys()
            assert isinstance(await probe.events(), list)


EXPORTED = re.compile(r"^int (nvmlDevice(?:Get|Register)\w+)\(", re.MULTILINE)
IDENTIFIES = {
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetUUID",
}


@pytest.mark.parametrize("code", [3, 13])
async def test_a_gpu_may_lack_every_value_but_its_uuid(library_directory: Path, code: int) -> None:
    """NOT_SUPPORTED, or a driver without the function, as of integrated GPUs and WSL2: of each call alone, and of all."""
    calls = set(EXPORTED.findall((ROOT / "tests/native/fake_nvml.c").read_text())) - IDENTIFIES
    script = "count 1\nGPU 0 GPU-aaaa 0 0000000F:01:00.0 122566 2 NVIDIA Thor\n"
    lines = [f"call_error {call} 0 {code}\n" for call in sorted(calls)]
    async with running_probe(library_directory, script) as probe:
        for lacking in [*lines, "".join(lines)]:
            probe.becomes(script + lacking)
            [gpu] = (await probe.read())["gpus"]
            assert (gpu["health"], gpu["unhealthy_reason"]) == ("Healthy", ""), lacking
            assert {one["uuid"] for one in (await probe.sample())["gpus"]} == {"GPU-aaaa"}, lacking
            assert isinstance(await probe.events(), list)
    assert (gpu["name"], gpu["minor"], gpu["bus_id"], gpu["memory_mib"]) == ("NVIDIA GPU", -1, "", 0)
    assert len(calls) > 30


GB10 = "count 1\nGPU 0 GPU-aaaa 0 0000000F:01:00.0 {0} 2 NVIDIA GB10\ncall_error nvmlDeviceGetMemoryInfo 0 {1}\n"


@pytest.mark.parametrize(
    ("script", "size_mib"), [(GB10.format(0, 3), 0), (GB10.format(0, 0), 0), (GB10.format(0, 3), 98304)]
)
async def test_a_gpu_without_memory_of_its_own_has_what_the_operator_set(
    library_directory: Path, script: str, size_mib: int
) -> None:
    """GB10 uses the machine's memory: without a size it is offered as a whole."""
    [gpu] = (await read_once(library_directory, script, unified_memory_mib=size_mib))["gpus"]
    assert (gpu["health"], gpu["memory_mib"], gpu["host_memory"]) == ("Healthy", size_mib, "unified")


async def test_an_error_of_the_memory_is_one(library_directory: Path) -> None:
    """And the operator's size is of no GPU whose driver names one."""
    scripts = (GB10.format(24576, 17), GB10.format(24576, 0))
    found = await reads(library_directory, *scripts, unified_memory_mib=98304)
    [failing], [gpu] = (one["gpus"] for one in found)
    assert failing["unhealthy_reason"] == (
        "NVML: The operating system has blocked the request. (nvmlDeviceGetMemoryInfo)"
    )
    assert (gpu["memory_mib"], gpu["host_memory"]) == (24576, None)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ("value addressing 0 2\nvalue numa_node 0 2\n", "numa-node"),
        ("value numa_node 0 2\n", "numa-node"),
        ("value addressing 0 2\n", None),
        ("value addressing 0 1\nvalue numa_node 0 0\n", None),
        ("value addressing 0 2\nvalue numa_node 0 4294967295\n", None),
    ],
    ids=["NUMA mode", "a driver that names no mode", "CDMM", "on PCIe", "no node"],
)
async def test_memory_that_is_a_numa_node_of_the_host(library_directory: Path, values: str, kind: str | None) -> None:
    [gpu] = (await read_once(library_directory, ONE_GPU + values))["gpus"]
    assert (gpu["health"], gpu["host_memory"], gpu["memory_mib"]) == ("Healthy", kind, 24576)


INFORMATION = """\
Model: \t\t NVIDIA Thor
IRQ:   \t\t 0
GPU UUID: \t {uuid}
Bus Type: \t PCIe
Bus Location: \t {bus}
Device Minor: \t {minor}
"""


@pytest.mark.parametrize(
    ("uuid", "bus", "minor", "found"),
    [
        ("GPU-aaaa", "0000:01:00.0", "5", ("Healthy", 5, "00000000:01:00.0")),
        ("GPU-bbbb", "0000:01:00.0", "5", ("Healthy", -1, "")),
        ("GPU-aaaa", "0000:01:00.0", "-", ("Healthy", -1, "00000000:01:00.0")),
        ("GPU-aaaa", "../..", "5", ("Healthy", 5, "")),
        ("GPU-aaaa", "N/A", "", ("Healthy", -1, "")),
        ("GPU-aaaa", "0000:01:00.0", "4294967295", ("Healthy", -1, "00000000:01:00.0")),
    ],
)
async def test_what_nvml_lacks_is_taken_from_the_kernel_module(
    library_directory: Path, uuid: str, bus: str, minor: str, found: tuple[str, int, str]
) -> None:
    lacks = "call_error nvmlDeviceGetMinorNumber 0 3\ncall_error nvmlDeviceGetPciInfo_v3 0 3\n"
    async with running_probe(library_directory, ONE_GPU + lacks) as probe:
        for name, text in (
            ("0000:00:00.0", "\xff"),
            ("0000:01:00.0", INFORMATION.format(uuid=uuid, bus=bus, minor=minor)),
        ):
            directory = probe.directory / "proc/driver/nvidia/gpus" / name
            directory.mkdir(parents=True)
            (directory / "information").write_text(text, encoding="latin-1")
        [gpu] = (await probe.read())["gpus"]
    assert (gpu["health"], gpu["minor"], gpu["bus_id"]) == found


async def test_a_gpu_that_lacks_a_call_does_not_open_nvml_again(library_directory: Path) -> None:
    """The only GPU is out of service, with the call's name, and polls are as cheap as ever."""
    script = f"count 1\nGPU 0 GPU-aaaa 0 00000000:01:00.0 24576 2 {NO_UTF8}\n"
    async with running_probe(library_directory, script) as probe:
        probe.becomes(script, logs=True)
        for _ in range(3):
            [gpu] = (await probe.read())["gpus"]
            await probe.sample()
            await probe.events()
        assert probe.calls.count("init") == 1
    assert "nvmlDeviceGetName" in gpu["unhealthy_reason"]


CLUSTER = "00112233445566778899aabbccddeeff"


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (f"0 0 {CLUSTER}", ""),
        (f"1 0 {CLUSTER}", "the driver still waits for it"),
        (f"2 0 {CLUSTER}", "the driver still waits for it"),
        (f"3 999 {CLUSTER}", "Unknown Error (nvmlDeviceGetGpuFabricInfo)"),
        (f"3 0 {'0' * 32}", ""),  # its cluster has no UUID
    ],
)
async def test_a_gpu_that_has_not_joined_its_nvlink_fabric(library_directory: Path, own: str, why: str) -> None:
    """CUDA fails on it, though NVML reads it as ever; once it has joined it is usable. Others are not touched."""
    joined = "".join(f"fabric {gpu} 3 0 {CLUSTER} 7\n" for gpu in (0, 2, 3))
    scripts = [TWO_PAIRS + joined + f"fabric 1 {state} 7\n" for state in (own, f"3 0 {CLUSTER}")]
    inventory, later = await reads(library_directory, *scripts)
    assert [gpu["index"] for gpu in inventory["gpus"] if gpu["health"] == "Unhealthy"] == ([1] if why else [])
    assert not why or f"has not joined its NVLink fabric: {why}" in inventory["gpus"][1]["unhealthy_reason"]
    assert inventory["gpus"][1]["fabric"] == ""
    assert {gpu["fabric"] for gpu in later["gpus"]} == {"00112233-4455-6677-8899-aabbccddeeff.7"}
    assert {gpu["health"] for gpu in later["gpus"]} == {"Healthy"}
