"""The labels of GPU Feature Discovery: its values, and what is left alone where it runs itself.

Golden values: worked out from internal/lm of k8s-device-plugin v0.20.0. GFD_EXPECTED_OUTPUTS may name the folder of its own
suite's files (tests/expected-output*.txt), to be matched as that suite does.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpushare_agent.agent.cluster.feature_labels import feature_labels, sanitised
from gpushare_agent.agent.cluster.node_facts import (
    FEATURES_ANNOTATION,
    LABELS_ANNOTATION,
    NodeFacts,
    is_label,
    node_facts,
)
from gpushare_agent.agent.runtime.machine import machine_name, pci_class, pci_configuration
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.isolation import Sharing
from gpushare_agent.core.model.mig import MigAttributes, MigPlace
from gpushare_agent.core.model.resources import ReplicaLayout, ServedUnits
from tests.cluster import support_node_facts
from tests.cluster.support_node_facts import after, patch_of
from tests.gpus.support_gpus import uuid_of


def gpu(index: int, name: str = "NVIDIA A100-SXM4-40GB", memory_mib: int = 40960, **fields: Any) -> Gpu:
    return support_node_facts.gpu(index, name, memory_mib, **{"compute_capability": (8, 0), **fields})


inventory = partial(support_node_facts.inventory, version="570.86.15", cuda="12.8")


def labels(
    *gpus: Gpu,
    written_at: int = 1700000000,
    mig_strategy: str = "none",
    count: int = 1,
    strategy: str = "time-slicing",
    is_renamed: bool = False,
    divided: tuple[Gpu, ...] = (),
    pci_configurations: tuple[bytes, ...] = (),
) -> dict[str, str]:
    terms = ReplicaLayout(count, Sharing(strategy))
    return feature_labels(
        replace(inventory(*gpus), mig_partitioned=divided),
        served=lambda _: ServedUnits("nvidia.com/gpu.shared" if is_renamed else "nvidia.com/gpu", terms),
        mig_strategy=mig_strategy,
        machine="DGX Station (A100)\n",
        pci_classes=[0x030200] * len(gpus),
        pci_configurations=pci_configurations,
        written_at=written_at,
    )


WHOLE = {
    "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB",
    "nvidia.com/gpu.count": "2",
    "nvidia.com/gpu.replicas": "1",
    "nvidia.com/gpu.sharing-strategy": "none",
    "nvidia.com/gpu.memory": "40960",
    "nvidia.com/gpu.family": "ampere",
    "nvidia.com/gpu.compute.major": "8",
    "nvidia.com/gpu.compute.minor": "0",
    "nvidia.com/gpu.machine": "DGX-Station-A100",
    "nvidia.com/gpu.mode": "compute",
    "nvidia.com/mps.capable": "false",
    "nvidia.com/mig.capable": "false",
    "nvidia.com/cuda.driver.major": "570",
    "nvidia.com/cuda.driver.minor": "86",
    "nvidia.com/cuda.driver.rev": "15",
    "nvidia.com/cuda.driver-version.major": "570",
    "nvidia.com/cuda.driver-version.minor": "86",
    "nvidia.com/cuda.driver-version.revision": "15",
    "nvidia.com/cuda.driver-version.full": "570.86.15",
    "nvidia.com/cuda.runtime.major": "12",
    "nvidia.com/cuda.runtime.minor": "8",
    "nvidia.com/cuda.runtime-version.major": "12",
    "nvidia.com/cuda.runtime-version.minor": "8",
    "nvidia.com/cuda.runtime-version.full": "12.8",
    "nvidia.com/gfd.timestamp": "1700000000",
    "nvidia.com/vgpu.present": "false",
}


def test_whole_gpus() -> None:
    """Each label, each value."""
    assert labels(gpu(0), gpu(1)) == WHOLE


@pytest.mark.parametrize(
    ("shared", "changed"),
    [
        ({"strategy": "time-slicing"}, {"product": "NVIDIA-A100-SXM4-40GB-SHARED", "sharing-strategy": "time-slicing"}),
        ({"is_renamed": True}, {"product": "NVIDIA-A100-SXM4-40GB", "sharing-strategy": "time-slicing"}),
        ({"strategy": "mps"}, {"product": "NVIDIA-A100-SXM4-40GB-SHARED", "sharing-strategy": "mps"}),
    ],
)
def test_replicas(shared: dict[str, Any], changed: dict[str, str]) -> None:
    """-SHARED, unless the resource is renamed; MPS makes the node capable of it. Memory is the whole GPU's."""
    wanted = (
        WHOLE | {f"nvidia.com/gpu.{name}": value for name, value in changed.items()} | {"nvidia.com/gpu.replicas": "4"}
    )
    wanted["nvidia.com/mps.capable"] = str(shared.get("strategy") == "mps").lower()
    assert labels(gpu(0), gpu(1), count=4, **shared) == wanted


CLIQUE = "nvidia.com/gpu.clique"
FABRIC = "00112233-4455-6677-8899-aabbccddeeff.7"


@pytest.mark.parametrize(
    ("fabrics", "expected"),
    [((FABRIC, FABRIC), FABRIC), ((FABRIC, ""), FABRIC), (("", ""), None), ((FABRIC, FABRIC[:-1] + "8"), None)],
    ids=["all", "some", "none", "two cliques"],
)
def test_the_clique_of_an_nvlink_fabric(fabrics: tuple[str, ...], expected: str | None) -> None:
    """Of the GPUs that are on one, where they agree."""
    found = labels(*(gpu(index, fabric=fabric) for index, fabric in enumerate(fabrics)))
    assert found.get(CLIQUE) == expected and (expected is None or is_label(CLIQUE, expected))


def configuration(*capabilities: bytes, size: int = 256, is_circle: bool = False) -> bytes:
    """A PCI configuration space whose list has these: ID, length in the third byte, data; the second names the next."""
    space, at = bytearray(256), 0x60
    if capabilities:
        space[0x06], space[0x34] = 0x10, at
    for number, capability in enumerate(capabilities):
        after = at + len(capability) + 1
        space[at : at + len(capability)] = capability
        space[at + 1] = after if number + 1 < len(capabilities) else 0x60 if is_circle else 0
        at = after
    return bytes(space[:size])


POWER = b"\x01\x00\x03\x00"
VGPU = b"\x09\x00\x1f" + b"VF" + b"\x05\x04xx" + b"\x00\x16" + b"570.124.06" + b"r570_00\x00\x00\x00"
OTHER_VENDOR = b"\x09\x00\x08NVxyz"
HOST = {
    "nvidia.com/vgpu.present": "true",
    "nvidia.com/vgpu.host-driver-version": "570.124.06",
    "nvidia.com/vgpu.host-driver-branch": "r570_00",
}


@pytest.mark.parametrize(
    ("configurations", "expected"),
    [
        ((configuration(), configuration(POWER, OTHER_VENDOR)), {"nvidia.com/vgpu.present": "false"}),
        ((configuration(POWER), configuration(POWER, VGPU)), HOST),
        ((configuration(POWER, is_circle=True),), {"nvidia.com/vgpu.present": "false"}),
        ((configuration(b"\x09\x00\x09VF\x05\x04xx"),), {"nvidia.com/vgpu.present": "true"}),
        ((configuration(VGPU), configuration(VGPU, size=64)), {}),
        ((b"\xff" * 256,), {"nvidia.com/vgpu.present": "false"}),
    ],
    ids=["none", "one", "circle", "no driver record", "cut off", "gone"],
)
def test_vgpus_are_known_by_their_pci_configuration(
    configurations: tuple[bytes, ...], expected: dict[str, str]
) -> None:
    """A vendor-specific capability signed VF, with the hypervisor's driver; nothing is said where the kernel cuts it off."""
    found = labels(gpu(0), pci_configurations=configurations)
    assert {name: value for name, value in found.items() if "vgpu" in name} == expected


@given(space=st.binary(min_size=256, max_size=256))
def test_any_pci_configuration_makes_labels(space: bytes) -> None:
    """A hypervisor writes it."""
    signed = bytes(space[:0x34]) + b"\x40" + bytes(space[0x35:0x40]) + b"\x09" + space[0x41:0x43] + b"VF" + space[0x45:]
    for one in (space, signed):
        assert all(is_label(name, value) for name, value in labels(gpu(0), pci_configurations=(one,)).items())


@pytest.mark.parametrize(
    ("capability", "family"),
    [((3, 5), "kepler"), ((5, 2), "maxwell"), ((6, 1), "pascal"), ((7, 0), "volta"), ((7, 5), "turing"), ((8, 6), "ampere"),
     ((8, 9), "ada-lovelace"), ((9, 0), "hopper"), ((10, 0), "blackwell"), ((12, 0), "blackwell"), ((4, 0), "undefined")],
)  # fmt: skip
def test_families(capability: tuple[int, int], family: str) -> None:
    """By compute capability."""
    assert labels(gpu(0, compute_capability=capability))["nvidia.com/gpu.family"] == family


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("NVIDIA TITAN X (Pascal)", "NVIDIA-TITAN-X-Pascal"), ("Tesla  P40 ", "Tesla-P40"), ("a_b.c-d", "a_b.c-d"),
        ("NVIDIA A100 80GB PCIe/x", "NVIDIA-A100-80GB-PCIex"), ("é!", ""), ("x" * 80, "x" * 63),
    ],
)  # fmt: skip
def test_texts_as_values(text: str, value: str) -> None:
    """Unlike the agent's own labels: what a label cannot hold is left out, spaces are dashes."""
    assert sanitised(text) == value and is_label("a/b", sanitised(text))


def test_what_is_not_known_is_left_out() -> None:
    """An older driver, no compute capability, GPUs of two models; MIG's strategy."""
    mixed = labels(
        gpu(0), gpu(1, name="Tesla T4", compute_capability=None), gpu(2, name="Tesla T4"), mig_strategy="single"
    )
    assert (mixed["nvidia.com/gpu.product"], mixed["nvidia.com/gpu.count"]) == ("Tesla-T4", "2")
    assert "nvidia.com/gpu.family" not in mixed and mixed["nvidia.com/mig.strategy"] == "single"
    assert labels(gpu(0, name="", memory_mib=0)) == {}
    old = replace(inventory(gpu(0)), driver_version="535.54", cuda_version="")
    found = feature_labels(
        old,
        served=lambda _: None,
        mig_strategy="none",
        machine="",
        pci_classes=[0x030000, 0x030200],
        pci_configurations=[],
        written_at=1,
    )
    assert found["nvidia.com/cuda.driver-version.revision"] == "" and "nvidia.com/cuda.runtime.major" not in found
    assert (found["nvidia.com/gpu.machine"], found["nvidia.com/gpu.mode"]) == ("unknown", "unknown")


def instance(parent: Gpu, number: int, profile: str = "1g.5gb", **fields: Any) -> Gpu:
    """Of a GPU with MIG mode on; counts as the A100's 1g.5gb has them."""
    place = MigPlace(
        profile=profile, number=number, parent=parent.uuid, parent_index=parent.index, gi=7 + number, ci=0,
        attributes=MigAttributes(memory_mib=4864, gi_slices=1, ci_slices=1, multiprocessors=14, copy_engines=1), **fields,
    )  # fmt: skip
    return replace(
        parent, index=10 + 10 * parent.index + number, uuid=uuid_of(10 + 10 * parent.index + number),
        name=f"{parent.name} MIG {profile}", memory_mib=4800, mig=place,
    )  # fmt: skip


FIRST, SECOND = gpu(0, mig_mode=True), gpu(1, mig_mode=True)
ONE_G = {
    "product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", "count": "3", "replicas": "1", "sharing-strategy": "none",
    "memory": "4864", "multiprocessors": "14", "slices.gi": "1", "slices.ci": "1", "engines.copy": "1",
    "engines.decoder": "0", "engines.encoder": "0", "engines.jpeg": "0", "engines.ofa": "0",
}  # fmt: skip
CAPABLE = {"nvidia.com/mig.capable": "true"}


def of_gpu(values: dict[str, str], resource: str = "nvidia.com/gpu") -> dict[str, str]:
    return {f"{resource}.{name}": value for name, value in values.items()}


def test_single_gives_the_instances_as_gpus() -> None:
    """All GPUs divided into one profile: product, count and memory are the instances', family and version the GPUs'."""
    instances = (instance(FIRST, 0), instance(FIRST, 1), instance(SECOND, 0))
    found = labels(*instances, divided=(FIRST, SECOND), mig_strategy="single")
    assert found == WHOLE | CAPABLE | {"nvidia.com/mig.strategy": "single"} | of_gpu(ONE_G)
    shared = labels(*instances, divided=(FIRST, SECOND), mig_strategy="single", count=4)
    assert shared["nvidia.com/gpu.product"] == "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb-SHARED"
    assert (shared["nvidia.com/gpu.replicas"], shared["nvidia.com/gpu.sharing-strategy"]) == ("4", "time-slicing")


@pytest.mark.parametrize(
    ("offered", "divided"),
    [
        ((FIRST,), ()),
        ((instance(FIRST, 0), instance(FIRST, 1, "2g.10gb")), (FIRST,)),
        ((instance(FIRST, 0), gpu(1, mig_mode=False)), (FIRST,)),
        ((instance(FIRST, 0), SECOND), (FIRST,)),
    ],
    ids=["no instances", "two profiles", "a GPU without MIG", "a GPU without instances"],
)
def test_single_is_invalid(offered: tuple[Gpu, ...], divided: tuple[Gpu, ...]) -> None:
    """The product says so, and nothing is counted; what is known of the GPUs otherwise stays."""
    found = labels(*offered, divided=divided, mig_strategy="single")
    invalid = {
        "product": "NVIDIA-A100-SXM4-40GB-MIG-INVALID",
        "count": "0",
        "replicas": "0",
        "sharing-strategy": "",
        "memory": "0",
    }
    assert found == WHOLE | CAPABLE | {"nvidia.com/mig.strategy": "single"} | of_gpu(invalid)
    assert all(is_label(name, value) for name, value in found.items())


def test_single_without_mig_is_as_none() -> None:
    """But for the strategy."""
    assert labels(gpu(0), gpu(1), mig_strategy="single") == WHOLE | {"nvidia.com/mig.strategy": "single"}


def test_mixed_has_labels_of_each_profile() -> None:
    """Next to those of the GPUs, which have no replicas while all are divided. An instance that is gone is not counted."""
    instances = (
        instance(FIRST, 0), instance(FIRST, 1), instance(FIRST, 2), instance(FIRST, 3, "1g.5gb+me"),
        instance(FIRST, 4, is_gone=True),
    )  # fmt: skip
    found = labels(*instances, divided=(FIRST,), mig_strategy="mixed")
    with_media = ONE_G | {"product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb.me", "count": "1"}
    assert found == (
        WHOLE | CAPABLE | {"nvidia.com/mig.strategy": "mixed"} | of_gpu({"count": "1", "replicas": "0"})
        | of_gpu(ONE_G, "nvidia.com/mig-1g.5gb") | of_gpu(with_media, "nvidia.com/mig-1g.5gb.me")
    )  # fmt: skip


def test_whole_gpus_beside_divided_ones() -> None:
    """Their replicas are shown, the count is of all of the model."""
    found = labels(gpu(1), instance(FIRST, 0), divided=(FIRST,), mig_strategy="mixed", count=2)
    assert found["nvidia.com/gpu.product"] == "NVIDIA-A100-SXM4-40GB-SHARED"
    assert (found["nvidia.com/gpu.count"], found["nvidia.com/gpu.replicas"]) == ("2", "2")


def test_strategy_none_shows_a_divided_gpu_without_replicas() -> None:
    """It is of no use, and no MIG label is written."""
    assert labels(FIRST, count=4) == WHOLE | CAPABLE | of_gpu({"count": "1", "replicas": "0"})


_DIVIDED = (instance(FIRST, 0, "3g.20gb"), instance(FIRST, 1, "3g.20gb"))
EXPECTED = {
    "expected-output.txt": labels(gpu(0)),
    "expected-output-mig-none.txt": labels(FIRST),
    "expected-output-mig-single.txt": labels(*_DIVIDED, divided=(FIRST,), mig_strategy="single"),
    "expected-output-mig-mixed.txt": labels(*_DIVIDED, divided=(FIRST,), mig_strategy="mixed"),
    "expected-output-vgpu.txt": labels(gpu(0), pci_configurations=(configuration(VGPU),)),
}
"""By file of NVIDIA's suite, what is written of such a node."""


@pytest.mark.suites
@pytest.mark.parametrize("name", EXPECTED)
def test_nvidias_expected_outputs(name: str) -> None:
    """Each label matches a line, and each line is matched."""
    if (folder := os.environ.get("GFD_EXPECTED_OUTPUTS")) is None:
        pytest.skip("GFD_EXPECTED_OUTPUTS does not name the folder tests of NVIDIA's k8s-device-plugin")
    patterns = [re.compile(line) for line in (Path(folder) / name).read_text().split()]
    # As NVIDIA's suite divides them: a file is of vGPUs, or of everything else.
    lines = [f"{key}={value}" for key, value in EXPECTED[name].items() if ("vgpu" in key) == ("vgpu" in name)]
    assert [line for line in lines if not any(pattern.search(line) for pattern in patterns)] == []
    assert [one.pattern for one in patterns if not any(one.search(line) for line in lines)] == []


def node_with(**node_labels: str) -> dict[str, Any]:
    return {"metadata": {"labels": {"kubernetes.io/os": "linux", **node_labels}, "annotations": {}}}


def facts(features: dict[str, str]) -> NodeFacts:
    found = inventory(gpu(0), gpu(1))
    return node_facts(found, "{}", label_prefix="gpushare-agent", node_labels={}, features=features)


def of_nvidia(node: dict[str, Any]) -> dict[str, str]:
    return {name: value for name, value in node["metadata"]["labels"].items() if name.startswith("nvidia.com/")}


def test_ours_are_written_once_and_removed_when_switched_off() -> None:
    """The timestamp is that of the last change."""
    node = after(node_with(), facts(WHOLE))
    assert of_nvidia(node) == WHOLE and node["metadata"]["annotations"][FEATURES_ANNOTATION] == "1700000000"
    assert not patch_of(node, facts(labels(gpu(0), gpu(1), written_at=1700000300))).body
    node = after(node, facts(labels(gpu(0), gpu(1), written_at=1700000600, count=4)))
    assert of_nvidia(node)["nvidia.com/gfd.timestamp"] == "1700000600"
    node = after(node, facts({}))
    annotations = node["metadata"]["annotations"]
    assert of_nvidia(node) == {} and FEATURES_ANNOTATION not in annotations
    assert "nvidia.com" not in annotations[LABELS_ANNOTATION]


def test_labels_of_gpu_feature_discovery_are_left_alone() -> None:
    """Where it ran before, with and without a timestamp; what differs is named. Neither on nor off changes them."""
    for theirs in ({"nvidia.com/gpu.product": "Other", "nvidia.com/gfd.timestamp": "5"}, {"nvidia.com/gpu.count": "8"}):
        node = node_with(**theirs)
        assert set(patch_of(node, facts(WHOLE)).foreign) == theirs.keys()
        node = after(node, facts(WHOLE))
        assert of_nvidia(node) == theirs
        assert of_nvidia(after(node, facts({}))) == theirs


def test_one_that_starts_later_takes_them_over() -> None:
    """Its timestamp is another: from then on the labels are its own."""
    node = after(node_with(), facts(WHOLE))
    node["metadata"]["labels"] |= {"nvidia.com/gpu.product": "Other", "nvidia.com/gfd.timestamp": "1800000000"}
    theirs = of_nvidia(node)
    node = after(node, facts(WHOLE))
    assert of_nvidia(node) == theirs
    node = after(node, facts({}))
    assert of_nvidia(node) == theirs and "nvidia.com" not in node["metadata"]["annotations"][LABELS_ANNOTATION]


def test_what_sysfs_has(tmp_path: Path) -> None:
    """And nothing where it has nothing."""
    (tmp_path / "product_name").write_text("Standard PC\n")
    device = tmp_path / "0000:3b:00.0"
    device.mkdir()
    (device / "class").write_text("0x030200\n")
    assert machine_name(tmp_path / "product_name") == "Standard PC" and machine_name(tmp_path / "none") == ""
    (device / "config").write_bytes(configuration(VGPU) + bytes(1000))
    assert pci_configuration("00000000:3B:00.0", tmp_path) == configuration(VGPU)
    assert pci_configuration("00000000:AF:00.0", tmp_path) is None
    assert pci_class("00000000:3B:00.0", tmp_path) == 0x030200 and pci_class("00000000:AF:00.0", tmp_path) is None
