"""What a container with cards gets, by the names of docs/formats.md."""

from __future__ import annotations

from dataclasses import replace

from gpushare_agent.decisions.container_edits import NodeDevices, container_edits, merged
from gpushare_agent.model.allocations import ContainerEdits, ContainerMount, DeviceNode
from tests.support_core import NAMES, container, inventory

CARDS = tuple(replace(card, minor=card.index + 4) for card in inventory().cards)


def test_a_share_gets_its_card_by_minor_number() -> None:
    """/dev/nvidia<n> is the minor number, which need not be the index."""
    edits = container_edits(container(cores=30, blocks=10), CARDS[:1], NAMES, NodeDevices())
    assert dict(edits.env) == {"NVIDIA_VISIBLE_DEVICES": "GPU-0", "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64"}
    assert [d.host_path for d in edits.devices] == ["/dev/nvidia4", "/dev/nvidiactl", "/dev/nvidia-uvm"]
    assert {d.permissions for d in edits.devices} == {"rwm"}
    assert dict(edits.annotations) == {
        "tencent.com/vcuda-core": "30",
        "tencent.com/vcuda-memory": str(10 * 256 * 1024 * 1024),
        "tencent.com/vcuda-device": "/dev/nvidia4",
    }


def test_whole_cards_are_listed_in_order_of_index() -> None:
    """In the variable and in the annotation alike."""
    edits = container_edits(container(cores=200), CARDS, NAMES, NodeDevices(extra=("/dev/nvidia-modeset",)))
    assert dict(edits.env)["NVIDIA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"
    assert dict(edits.annotations)["tencent.com/vcuda-device"] == "/dev/nvidia4,/dev/nvidia5"
    assert edits.devices[-1].host_path == "/dev/nvidia-modeset"


def test_a_32_bit_container_gets_both_library_directories() -> None:
    """It says so by the variable compat32."""
    wanted = replace(container(cores=30, blocks=1), env={"compat32": "true"})
    edits = container_edits(wanted, CARDS[:1], NAMES, NodeDevices())
    assert dict(edits.env)["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64:/usr/local/nvidia/lib"


def test_simulated_cards_have_no_device_nodes_on_a_real_node() -> None:
    """A container that names a device node which does not exist cannot start; the annotation still tells the card."""
    edits = container_edits(container(cores=30, blocks=1), CARDS[:1], NAMES, NodeDevices(has_card_nodes=False))
    assert edits.devices == () and dict(edits.annotations)["tencent.com/vcuda-device"] == "/dev/nvidia4"


def test_edits_are_merged_and_the_last_word_on_a_name_counts() -> None:
    """Mounts and device nodes that several parts ask for come once."""
    mount = ContainerMount(host_path="/a", container_path="/b")
    first = ContainerEdits(env=(("A", "1"), ("B", "1")), mounts=(mount,), annotations=(("x", "1"),))
    second = ContainerEdits(
        env=(("A", "2"),), mounts=(mount,), devices=(DeviceNode(host_path="/d", container_path="/d"),)
    )
    both = merged(first, second)
    assert dict(both.env) == {"A": "2", "B": "1"} and both.mounts == (mount,) and len(both.devices) == 1
    assert dict(both.annotations) == {"x": "1"}
