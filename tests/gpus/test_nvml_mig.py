"""GPUs that MIG divides, as the NVML driver reads them: the real nvidia-ml-py, on a scripted libnvidia-ml.so.1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpus.support_nvml import read_once, reads, running_probe

A100 = """\
count 2
GPU 0 GPU-aaaa 0 00000000:3B:00.0 40536 1 NVIDIA A100-SXM4-40GB
GPU 1 GPU-bbbb 1 00000000:AF:00.0 40536 0 NVIDIA A100-SXM4-40GB
ancestor 0 1 30
nvlink 0 0 0 00000000:AF:00.0
nvlink 1 0 0 00000000:3B:00.0
"""
ONE_G = "mig 0 0 MIG-1111 7 0 4864 1 1 0\n"
TWO_G = "mig 0 1 MIG-2222 3 0 9984 2 2 1\n"
THREE_G = "mig 0 2 MIG-3333 2 0 20096 3 3 2\n"

H100 = """\
count 1
GPU 0 GPU-hhhh 4 00000000:3B:00.0 81559 1 NVIDIA H100 80GB HBM3
mig 0 0 MIG-1111 9 0 9856 1 1 7
mig 0 1 MIG-2222 10 0 9856 1 1 0
mig 0 2 MIG-3333 1 0 40320 3 1 2
mig 0 3 MIG-4444 1 1 40320 3 2 2
"""


def minors_of(gpus: int = 8, gis: int = 15, cis: int = 8) -> str:
    """The host's file, with all that the driver lists; the first two lines are MIG's own."""
    lines, minor = ["config 1", "monitor 2"], 3
    for gpu in range(gpus):
        for gi in range(gis):
            lines.append(f"gpu{gpu}/gi{gi}/access {minor}")
            lines += [f"gpu{gpu}/gi{gi}/ci{ci}/access {minor + 1 + ci}" for ci in range(cis)]
            minor += 1 + cis
    return "\n".join(lines) + "\n"


MINORS = minors_of()


def labels(inventory: Any) -> dict[str, str]:
    """Profile and health by UUID."""
    return {gpu["uuid"]: f"{(gpu['mig'] or {}).get('profile', '')} {gpu['health']}" for gpu in inventory["gpus"]}


async def test_an_a100_is_divided_into_1g_2g_and_3g(library_directory: Path) -> None:
    """Each instance is a GPU with a profile, memory and nodes of its own; the parent is not offered."""
    inventory = await read_once(library_directory, A100 + ONE_G + TWO_G + THREE_G, mig_minors=MINORS)
    assert labels(inventory) == {
        "GPU-bbbb": " Healthy",
        "MIG-1111": "1g.5gb Healthy",
        "MIG-2222": "2g.10gb Healthy",
        "MIG-3333": "3g.20gb Healthy",
    }
    assert inventory["divided"] == ["GPU-aaaa"]
    gpus = {gpu["uuid"]: gpu for gpu in inventory["gpus"]}
    assert [gpus[uuid]["index"] for uuid in ("GPU-bbbb", "MIG-1111", "MIG-2222", "MIG-3333")] == [1, 2, 3, 4]
    assert [gpus[uuid]["memory_mib"] for uuid in ("MIG-1111", "MIG-2222", "MIG-3333")] == [4864, 9984, 20096]
    assert gpus["MIG-2222"]["mig"] == {
        "profile": "2g.10gb", "number": 1, "parent": "GPU-aaaa", "parent_index": 0, "gi": 3, "ci": 0,
        "gi_cap": 3 + 9 * 3, "ci_cap": 3 + 9 * 3 + 1, "is_gone": False, "profile_id": 101, "start": 0,
        "caps_major": 0,
        "attributes": {
            "memory_mib": 9984, "gi_slices": 2, "ci_slices": 2, "multiprocessors": 28, "copy_engines": 2, "decoders": 1,
            "encoders": 1, "jpeg_engines": 2, "ofa_engines": 3,
        },
    }  # fmt: skip
    assert gpus["MIG-2222"]["minor"] == 0
    assert inventory["links"][2] == ["PIX", "PHB", "SELF", "PIX", "PIX"]


async def test_the_nodes_of_instances_have_numbers(library_directory: Path) -> None:
    """So that a container's runtime needs none of them on the host."""
    async with running_probe(library_directory, A100 + ONE_G, mig_minors=MINORS) as probe:
        for content, major in (
            ("Character devices:\n195 nvidia\n511 nvidia-caps\n510 nvidia-caps-imex-channels\n", 511),
            ("Character devices:\n", 0),
        ):
            (probe.directory / "proc").mkdir(exist_ok=True)
            (probe.directory / "proc" / "devices").write_text(content)
            gpus = {gpu["uuid"]: gpu for gpu in (await probe.read())["gpus"]}
            assert gpus["MIG-1111"]["mig"].get("caps_major", 0) == major


async def test_an_h100_has_media_extensions_and_compute_instances(library_directory: Path) -> None:
    """`+me` is a profile's, `1c.` a part of the computing of a GPU instance; both are NVIDIA's names."""
    inventory = await read_once(library_directory, H100, mig_minors=MINORS)
    assert labels(inventory) == {
        "MIG-1111": "1g.10gb+me Healthy",
        "MIG-2222": "1g.10gb Healthy",
        "MIG-3333": "1c.3g.40gb Healthy",
        "MIG-4444": "2c.3g.40gb Healthy",
    }
    assert {gpu["mig"]["gi_cap"] for gpu in inventory["gpus"][2:]} == {3 + 9 * (4 * 15 + 1)}


PROFILES = {
    "NVIDIA A30": (24576, {1: "1g.6gb", 2: "2g.12gb", 4: "4g.24gb"}, 4),
    "NVIDIA A100-SXM4-40GB": (40536, {1: "1g.5gb", 2: "2g.10gb", 4: "3g.20gb", 8: "7g.40gb"}, 8),
    "NVIDIA A100-SXM4-80GB": (81920, {1: "1g.10gb", 2: "2g.20gb", 4: "4g.40gb", 8: "7g.80gb"}, 8),
    "NVIDIA H100 80GB HBM3": (81559, {1: "1g.10gb", 2: "1g.20gb", 4: "3g.40gb", 8: "7g.80gb"}, 8),
    "NVIDIA H100 NVL": (95830, {1: "1g.12gb", 2: "2g.24gb", 4: "3g.47gb", 8: "7g.94gb"}, 8),
    "NVIDIA H100 96GB": (97871, {1: "1g.12gb", 2: "2g.24gb", 4: "4g.48gb", 8: "7g.96gb"}, 8),
    "NVIDIA H20": (97871, {1: "1g.12gb", 2: "1g.24gb", 4: "3g.48gb", 8: "7g.96gb"}, 8),
    "NVIDIA H200": (143771, {1: "1g.18gb", 2: "2g.35gb", 4: "3g.71gb", 8: "7g.141gb"}, 8),
    "NVIDIA GH200 144G HBM3e": (147196, {1: "1g.18gb", 2: "2g.36gb", 4: "3g.72gb", 8: "7g.144gb"}, 8),
    "NVIDIA B200": (183359, {1: "1g.23gb", 2: "2g.45gb", 4: "4g.90gb", 8: "7g.180gb"}, 8),
    "NVIDIA GB200": (189471, {1: "1g.23gb", 2: "1g.47gb", 4: "3g.93gb", 8: "7g.186gb"}, 8),
    "NVIDIA B300 SXM6 AC": (275040, {1: "1g.34gb", 2: "2g.67gb", 4: "3g.135gb", 8: "7g.269gb"}, 8),
    "NVIDIA GB300": (284208, {1: "1g.35gb", 2: "1g.70gb", 4: "3g.139gb", 8: "7g.278gb"}, 8),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (97887, {1: "1g.24gb", 2: "2g.48gb", 4: "4g.96gb"}, 4),
}
"""Of each model with MIG: its MiB, NVIDIA's names of its profiles by their memory slices, and how many slices it has.
Source: NVIDIA's MIG user guide, and the configurations of mig-parted."""


@pytest.mark.parametrize(
    ("number", "suffix"),
    [(7, "+me"), (8, "+me"), (10, "+gfx"), (12, "+gfx"), (13, "-me"), (14, "-me"), (15, "+me.all"), (16, "+me.all")],
)
async def test_media_and_graphics_are_in_the_name(library_directory: Path, number: int, suffix: str) -> None:
    """By the number of the GPU instance profile, as NVML has them; RTX PRO 6000 has all."""
    script = "count 1\nGPU 0 GPU-aaaa 0 00000000:3B:00.0 97887 1 NVIDIA RTX PRO 6000 Blackwell\n"
    [gpu] = (await read_once(library_directory, script + f"mig 0 0 MIG-1 1 0 24192 1 1 {number}\n", mig_minors=MINORS))[
        "gpus"
    ]
    assert gpu["mig"]["profile"] == f"1g.24gb{suffix}"


async def test_instances_of_a_gpu_without_memory_have_no_name(library_directory: Path) -> None:
    """Their names are parts of its memory: they are out of service, with the call, and the other GPU is not."""
    script = A100 + ONE_G + "call_error nvmlDeviceGetMemoryInfo 0 3\n"
    inventory = await read_once(library_directory, script, mig_minors=MINORS)
    assert labels(inventory) == {"GPU-bbbb": " Healthy", "MIG-1111": " Unhealthy"}
    assert "nvmlDeviceGetMemoryInfo" in inventory["gpus"][1]["unhealthy_reason"]


async def test_an_instance_may_lack_its_memory(library_directory: Path) -> None:
    """It has that of its attributes."""
    script = A100 + ONE_G + "call_error nvmlDeviceGetMemoryInfo 1000 3\n"
    gpus = (await read_once(library_directory, script, mig_minors=MINORS))["gpus"]
    found = [gpu for gpu in gpus if gpu["mig"] is not None]
    assert [(gpu["health"], gpu["memory_mib"]) for gpu in found] == [
        ("Healthy", found[0]["mig"]["attributes"]["memory_mib"])
    ]


async def test_a_repartitioned_gpu_is_followed(library_directory: Path) -> None:
    """What is made appears and what is removed is gone, in the same process; the others keep their index; one that a
    container has stays, Unhealthy, until the container ends. Its index is then given again."""
    async with running_probe(library_directory, A100 + ONE_G + TWO_G, mig_minors=MINORS) as probe:
        before = await probe.read()
        await probe.ask("held MIG-2222")
        probe.becomes(A100 + ONE_G + THREE_G)
        after = await probe.read()
        await probe.ask("held")
        later = await probe.read()
        probe.becomes(A100 + ONE_G + THREE_G + TWO_G.replace("2222", "5555"))
        again = await probe.read()
        probe.becomes(A100.replace(" 40536 1 ", " 40536 0 "))
        undivided = await probe.read()
    assert labels(before).keys() == {"GPU-bbbb", "MIG-1111", "MIG-2222"}
    assert labels(after)["MIG-2222"] == "2g.10gb Unhealthy"
    assert labels(after)["MIG-3333"] == "3g.20gb Healthy"
    [gone] = [gpu for gpu in after["gpus"] if gpu["uuid"] == "MIG-2222"]
    assert gone["unhealthy_reason"].startswith("the MIG instance does not exist any more")
    assert [gpu["uuid"] for gpu in after["gpus"] if gpu["mig"] and gpu["mig"]["is_gone"]] == ["MIG-2222"]
    assert labels(later).keys() == {"GPU-bbbb", "MIG-1111", "MIG-3333"}
    indexes = [{gpu["uuid"]: gpu["index"] for gpu in found["gpus"]} for found in (before, after, later, again)]
    assert {found["MIG-1111"] for found in indexes} == {2}
    assert (indexes[0]["MIG-2222"], indexes[1]["MIG-3333"], indexes[3]["MIG-5555"]) == (3, 4, 3)
    assert labels(undivided) == {"GPU-aaaa": " Healthy", "GPU-bbbb": " Healthy"}
    assert undivided["divided"] == []


async def test_a_gpu_without_instances_reports_what_to_do(library_directory: Path) -> None:
    """It is shown, Unhealthy, with the command that makes some; once there are, they are offered in its place."""
    inventory, made = await reads(library_directory, A100, A100 + ONE_G, mig_minors=MINORS)
    [empty] = [gpu for gpu in inventory["gpus"] if gpu["uuid"] == "GPU-aaaa"]
    assert {gpu["uuid"]: gpu["mig_mode"] for gpu in inventory["gpus"]} == {"GPU-aaaa": True, "GPU-bbbb": False}
    assert {gpu["uuid"]: gpu["is_withheld"] for gpu in inventory["gpus"]} == {"GPU-aaaa": True, "GPU-bbbb": False}
    assert empty["health"] == "Unhealthy"
    assert "nvidia-smi mig -i 00000000:3B:00.0 -cgi" in empty["unhealthy_reason"]
    assert labels(made).keys() == {"GPU-bbbb", "MIG-1111"}


async def test_instances_share_the_health_of_their_gpu(library_directory: Path) -> None:
    """A GPU that fails takes its instances along, and they come back with it; one that fails alone leaves the others."""
    faults = ("", "error 0 15\n", "value remapped 0 0 1\n", "error 1001 999\n", "")
    scripts = [A100 + ONE_G + TWO_G + fault for fault in faults]
    _, lost, worn, alone, back = await reads(library_directory, *scripts, mig_minors=MINORS)
    for found in (lost, worn):
        assert labels(found) == {
            "GPU-bbbb": " Healthy",
            "MIG-1111": "1g.5gb Unhealthy",
            "MIG-2222": "2g.10gb Unhealthy",
        }
        assert all(gpu["unhealthy_reason"].startswith("its GPU 0: ") for gpu in found["gpus"] if gpu["mig"])
    assert labels(alone)["MIG-1111"] == "1g.5gb Healthy"
    assert labels(alone)["MIG-2222"] == "2g.10gb Unhealthy"
    assert {health.split()[-1] for health in labels(back).values()} == {"Healthy"}


async def test_an_instance_without_its_device_nodes_is_not_offered(library_directory: Path) -> None:
    """Where the host's file does not name them, a container could not open the instance."""
    inventory = await read_once(library_directory, A100 + ONE_G, mig_minors="config 1\ngpu0/gi7/access 66\n")
    [instance] = [gpu for gpu in inventory["gpus"] if gpu["mig"]]
    assert (instance["mig"]["gi_cap"], instance["mig"]["ci_cap"]) == (66, None)
    assert "names no device nodes" in instance["unhealthy_reason"]


async def test_strategy_none_leaves_a_divided_gpu_out_of_service(library_directory: Path) -> None:
    """As before there were instances, and the reason names the setting."""
    inventory = await read_once(library_directory, A100 + ONE_G)
    assert labels(inventory) == {"GPU-aaaa": " Unhealthy", "GPU-bbbb": " Healthy"}
    divided = inventory["gpus"][0]
    assert divided["unhealthy_reason"].startswith("MIG mode is enabled") and divided["memory_mib"] == 40536
    assert "nvidia.mig_strategy" in divided["unhealthy_reason"]


async def test_a_gpu_that_knows_no_mig(library_directory: Path) -> None:
    """It is offered, and its mode is not known to be off."""
    inventory = await read_once(library_directory, A100.replace(" 40536 0 ", " 40536 2 ") + ONE_G, mig_minors=MINORS)
    assert {gpu["uuid"]: gpu["mig_mode"] for gpu in inventory["gpus"]}["GPU-bbbb"] is None


async def test_use_is_sampled_per_instance(library_directory: Path) -> None:
    """Memory and processes are the instance's own; NVML has no utilisation of it, and its GPU is not sampled as well."""
    use = "value memory_used 1001 3145728 3145728\nprocess compute 1001 4711 2097152\nprocess compute 1000 42 1048576\n"
    async with running_probe(library_directory, A100 + ONE_G + TWO_G + use, mig_minors=MINORS) as probe:
        await probe.read()
        sample = await probe.sample()
        probe.becomes(A100 + ONE_G)
        repartitioned = await probe.sample()
    gpus = {gpu["uuid"]: gpu for gpu in sample["gpus"]}
    assert gpus.keys() == {"GPU-bbbb", "MIG-1111", "MIG-2222"}
    assert gpus["MIG-2222"]["memory_used_bytes"] == 3145728
    assert gpus["MIG-2222"]["memory_total_bytes"] == 9984 << 20
    assert gpus["MIG-2222"]["sm_ratio"] is None
    assert [process["pid"] for process in gpus["MIG-2222"]["processes"]] == [4711]
    assert [process["pid"] for process in gpus["MIG-1111"]["processes"]] == [42]
    assert {gpu["uuid"] for gpu in repartitioned["gpus"]} == {"GPU-bbbb", "MIG-1111"}


async def test_an_xid_names_its_instance(library_directory: Path) -> None:
    """With the IDs of an instance, or of the whole GPU."""
    async with running_probe(library_directory, A100 + ONE_G + TWO_G, mig_minors=MINORS) as probe:
        await probe.read()
        await probe.events()
        probe.becomes(A100 + ONE_G + TWO_G + "event 1 0 8 94 3 0\nevent 2 0 8 79\n")
        events = await probe.events()
    assert [(event["uuid"], event["xid"], event.get("gi"), event.get("ci")) for event in events] == [
        ("GPU-aaaa", 94, 3, 0),
        ("GPU-aaaa", 79, None, None),
    ]


async def test_a_mode_that_cannot_be_read_leaves_the_instances(library_directory: Path) -> None:
    """The GPU must not be given as a whole next to them."""
    fails = "call_error nvmlDeviceGetMigMode 0 999\n"
    before, after = await reads(library_directory, A100 + ONE_G, A100 + ONE_G + fails, mig_minors=MINORS)
    assert after == before
