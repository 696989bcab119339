"""The NVML driver on NVIDIA's own mock of NVML, and what it reads beside captures of real machines.

MOKKA names the folder pkg/gpu/mocknvml of k8s-test-infra (tried: v0.3.0), built there by `make NO_PADDING=1`. SMI_CAPTURES
names a folder of `nvidia-smi -q -x` answers, qx-MODEL.xml, such as that repository's of seven machines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import pytest
import yaml

from tests.agent.support_agent import open_child, poll_until
from tests.gpus.support_nvml import Probe, read_once, running_probe
from tests.sandbox.support_sandbox import CORE, open_test_node

pytestmark = pytest.mark.suites

MODELS = ("a100", "b200", "gb200", "gb300", "h100", "l40s", "t4")
ROW_LINKS = {"a100": "NVLINK12", "gb200": "NVLINK18", "gb300": "NVLINK18", "h100": "NVLINK18"}
"""Of a GPU to each other one, where NVSwitch connects them."""
OTHERWISE = {
    ("b200", "memory_mib"): (196608, 183359),
    ("gb200", "memory_mib"): (196608, 189471),
    ("gb300", "name"): ("NVIDIA GB300 NVL", "NVIDIA GB300"),
    ("gb300", "memory_mib"): (294912, 284208),
    ("h100", "memory_mib"): (81920, 81559),
    ("l40s", "memory_mib"): (49152, 46068),
    ("t4", "name"): ("NVIDIA T4", "Tesla T4"),
    ("t4", "memory_mib"): (16384, 15360),
    # NVML: not supported, by the machine.
    ("l40s", "mig_mode"): (False, None),
    ("t4", "mig_mode"): (False, None),
}
"""Where the mock differs from the machine of its name: what it has, and what the machine has."""
_FAMILIES = {(7, 5): "Turing", (8, 0): "Ampere", (8, 9): "Ada Lovelace", (9, 0): "Hopper", (10, 0): "Blackwell"}


@pytest.fixture
def mokka() -> Path:
    if (folder := os.environ.get("MOKKA")) is None:
        pytest.skip("MOKKA does not name NVIDIA's mock of NVML")
    return Path(folder)


class Machine:
    """A model's profile, and what was changed of its GPUs since."""

    def __init__(self, mokka: Path, overrides: Path) -> None:
        self._mokka, self._overrides = mokka, overrides

    def is_a(self, model: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """The profile that programs started from now on see."""
        path = self._mokka / "configs" / f"mock-nvml-config-{model}.yaml"
        monkeypatch.setenv("MOCK_NVML_CONFIG", str(path))
        monkeypatch.setenv("MOCK_NVML_OVERRIDES", str(self._overrides))
        monkeypatch.setenv("MOCK_NVML_OVERRIDES_TTL", "1ms")
        return dict(yaml.safe_load(path.read_text()))

    def becomes(self, **gpus: dict[str, Any]) -> None:
        """`gpu_1={…}` changes the GPU 1, and the others are as in the profile."""
        fresh = self._overrides.with_suffix(".new")
        fresh.write_text(
            json.dumps({"devices": {name.removeprefix("gpu_"): changed for name, changed in gpus.items()}})
        )
        fresh.replace(self._overrides)


@pytest.fixture
def machine(mokka: Path, tmp_path: Path) -> Iterator[Machine]:
    yield Machine(mokka, tmp_path / "overrides.yaml")


async def health(probe: Probe) -> list[tuple[str, str]]:
    return [(gpu["health"], gpu["unhealthy_reason"]) for gpu in (await probe.read())["gpus"]]


@pytest.mark.parametrize("model", MODELS)
async def test_a_profile_is_read(model: str, machine: Machine, mokka: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inventory, versions, topology and use; MIG instances are asked for, and there are none."""
    profile = machine.is_a(model, monkeypatch)
    common = profile["device_defaults"]
    async with running_probe(mokka, "", mig_minors="") as probe:
        inventory, sample = await probe.read(), await probe.sample()
        assert await probe.events() == []
    gpus = inventory["gpus"]
    assert [gpu["uuid"] for gpu in gpus] == [device["uuid"] for device in profile["devices"]]
    assert [gpu["bus_id"] for gpu in gpus] == [
        f"0000{device['pci']['bus_id'].upper()}" for device in profile["devices"]
    ]
    assert [gpu["index"] for gpu in gpus] == [gpu["minor"] for gpu in gpus] == list(range(len(gpus)))
    assert {gpu["name"] for gpu in gpus} == {common["name"]}
    assert {gpu["memory_mib"] for gpu in gpus} == {common["memory"]["total_bytes"] >> 20}
    assert {tuple(gpu["compute_capability"]) for gpu in gpus} == {tuple(common["compute_capability"].values())}
    assert {(gpu["health"], gpu["mig_mode"], gpu["is_exclusive_process"]) for gpu in gpus} == {
        ("Healthy", False, False)
    }
    fabric = common.get("fabric")
    assert {gpu["fabric"] for gpu in gpus} == {f"{fabric['cluster_uuid']}.{fabric['clique_id']}" if fabric else ""}
    assert (inventory["unreadable"], inventory["divided"]) == ([], [])
    assert inventory["driver_version"] == profile["system"]["driver_version"]
    assert inventory["cuda_version"] == profile["system"]["cuda_version"]
    if model in ROW_LINKS:
        assert {link for row in inventory["links"] for link in row} == {"SELF", ROW_LINKS[model]}
    else:
        _assert_pcie(inventory, profile)
    assert [used["uuid"] for used in sample["gpus"]] == [gpu["uuid"] for gpu in gpus]
    first = sample["gpus"][0]
    assert first["temperature_celsius"] == common["thermal"]["temperature_gpu_c"]
    assert first["power_watts"] == common["power"]["current_draw_mw"] / 1000
    assert first["ecc_uncorrected_total"] == 0


def _assert_pcie(inventory: dict[str, Any], profile: dict[str, Any]) -> None:
    """GPUs of one root complex are nearer to each other than to those of another."""
    roots = {
        f"0000{bus_id.upper()}": root["id"]
        for root in profile["pcie_topology"]["root_complexes"]
        for bus_id in root["devices"]
    }
    gpus = inventory["gpus"]
    for row, one in zip(inventory["links"], gpus, strict=True):
        for link, other in zip(row, gpus, strict=True):
            if one is not other:
                assert (link == "SYS") == (roots[one["bus_id"]] != roots[other["bus_id"]]), (
                    one["index"],
                    other["index"],
                )


@pytest.mark.parametrize("mode", ["lost", "fallen_off_bus"])
async def test_a_gpu_that_is_lost_leaves_the_others(
    mode: str, machine: Machine, mokka: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is Unhealthy with NVML's words in its place, has no sample, and comes back."""
    machine.is_a("h100", monkeypatch)
    async with running_probe(mokka, "") as probe:
        before = await probe.read()
        machine.becomes(gpu_2={"failure": {"mode": mode}})
        found = await probe.read()
        [lost] = [gpu for gpu in found["gpus"] if gpu["health"] != "Healthy"]
        assert (lost["index"], lost["uuid"]) == (2, before["gpus"][2]["uuid"])
        assert "GPU is lost" in lost["unhealthy_reason"]
        assert len((await probe.sample())["gpus"]) == 7
        machine.becomes()
        assert await probe.read() == before


async def test_an_uncorrectable_ecc_error_has_failed_to_remap_a_row(
    machine: Machine, mokka: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mock says so by nvmlDeviceGetRemappedRows in this mode: the GPU answers, and must not be used."""
    machine.is_a("a100", monkeypatch)
    async with running_probe(mokka, "") as probe:
        await probe.read()
        machine.becomes(gpu_0={"failure": {"mode": "ecc_uncorrectable"}})
        first, *others = await health(probe)
    assert first[0] == "Unhealthy" and first[1].startswith("row remapping failed")
    assert others == [("Healthy", "")] * 7


async def test_an_xid_is_of_its_gpu(machine: Machine, mokka: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once. The mock has instance 0 of a GPU without instances, where the driver has none."""
    machine.is_a("a100", monkeypatch)
    async with running_probe(mokka, "") as probe:
        before = await probe.read()
        assert await probe.events() == []
        machine.becomes(gpu_3={"failure": {"mode": "ecc_uncorrectable", "xid": {"code": 94}}})
        await probe.read()
        uuid = before["gpus"][3]["uuid"]
        await probe.ask("begin_wait")
        assert await probe.ask("end_wait") == [{"kind": "xid", "uuid": uuid, "xid": 94, "gi": 0, "ci": 0}]
        assert await probe.events() == []


async def test_the_agent_on_it(machine: Machine, mokka: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with an Xid leaves the resource, one that is lost too, and the lost one comes back after its probes."""
    machine.is_a("h100", monkeypatch)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(mokka))
    flags = ("--driver=nvml", "--isolation=none", "--health.recovery-probes=1", "--health.recovery-period-s=0.05")
    async with open_test_node() as node, open_child(node, *flags):

        def healthy() -> int:
            with suppress(KeyError):
                return node.kubelet.devices.capacity()[CORE][1]
            return 0

        await node.wait_until(lambda: healthy() == 800, "eight GPUs")
        xid = {"failure": {"mode": "ecc_uncorrectable", "xid": {"code": 79}}}
        machine.becomes(gpu_3=xid)
        await node.wait_until(lambda: healthy() == 700, "one with an Xid")
        await poll_until(lambda: bool(node.api.events()), "an Event")
        machine.becomes(gpu_3=xid, gpu_5={"failure": {"mode": "lost"}})
        await node.wait_until(lambda: healthy() == 600, "one lost, too")
        machine.becomes(gpu_3=xid)
        await node.wait_until(lambda: healthy() == 700, "the lost one again")


@pytest.mark.parametrize("model", MODELS)
async def test_what_is_read_beside_the_real_machine(
    model: str, machine: Machine, mokka: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fact is the machine's, but for what the mock has otherwise. All its GPUs are sound, as those that are read."""
    if (folder := os.environ.get("SMI_CAPTURES")) is None:
        pytest.skip("SMI_CAPTURES does not name a folder of nvidia-smi's answers")
    machine.is_a(model, monkeypatch)
    read = (await read_once(mokka, ""))["gpus"][0]
    gpus = Xml.parse(Path(folder) / f"qx-{model}.xml").findall("gpu")
    assert gpus
    for gpu in gpus:
        differs = {name: (read[name], fact) for name, fact in _facts(gpu).items() if read[name] != fact}
        assert differs == {name: values for (of, name), values in OTHERWISE.items() if of == model}
        assert _FAMILIES[tuple(read["compute_capability"])] == gpu.findtext("product_architecture")


def _facts(gpu: Xml.Element) -> dict[str, Any]:
    mig = gpu.findtext("mig_mode/current_mig")
    memory = gpu.findtext("fb_memory_usage/total") or ""
    needs_nothing = gpu.findtext("gpu_recovery_action") == "None"
    is_sound = needs_nothing and gpu.findtext("remapped_rows/remapped_row_failure") in (None, "No")
    return {
        "name": gpu.findtext("product_name"),
        "memory_mib": int(memory.removesuffix(" MiB")),
        "mig_mode": None if mig == "N/A" else mig == "Enabled",
        "is_exclusive_process": gpu.findtext("compute_mode") == "Exclusive_Process",
        "health": "Healthy" if is_sound else "Unhealthy",
    }
