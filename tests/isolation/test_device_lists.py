"""The five ways in, alone and together, and what is said of those that do not go together."""

from __future__ import annotations

import itertools
import re

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.container_edits import EditPolicy, edits_for
from gpushare_agent.agent.delivery.device_lists import (
    STRATEGIES,
    DeviceListRequest,
    NodeDevices,
    device_edits,
    strategy_warnings,
)
from gpushare_agent.core.model.allocations import ContainerEdits
from gpushare_agent.core.model.isolation import DeviceListStrategy
from gpushare_agent.core.model.pods import ContainerSpec
from tests.support_core import NAMES, container, inventory, isolation_config, mig_instance, pod

ENVVAR, MOUNTS, NODES, ANNOTATIONS, CRI = DeviceListStrategy
REQUEST = DeviceListRequest(gpus=inventory().gpus, node=NodeDevices(), cdi_kind="nvidia.com/gpu", unique="p_1")
LABEL_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
VISIBLE = "NVIDIA_VISIBLE_DEVICES"


def edits(*strategies: DeviceListStrategy) -> ContainerEdits:
    return device_edits(REQUEST, strategies)


def test_device_nodes_come_with_void_and_each_node_once() -> None:
    """An extra node that is a control node already is not given twice."""
    request = replace(REQUEST, node=NodeDevices(extra=("/dev/nvidia-uvm", "/dev/infiniband/rdma_cm")))
    found = device_edits(request, [NODES])
    assert dict(found.env) == {VISIBLE: "void"}
    assert [node.host_path for node in found.devices] == [
        *("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/infiniband/rdma_cm"),
    ]


def test_a_mig_instance_has_its_gpus_node_and_two_of_its_own() -> None:
    """Its UUID names it everywhere; without the nodes of both instances CUDA does not see it."""
    request = replace(REQUEST, gpus=(mig_instance(2, 0, 1),))
    assert device_edits(request, [ENVVAR]).env == ((VISIBLE, "MIG-2"),)
    assert device_edits(request, [CRI]).cdi_devices == ("nvidia.com/gpu=MIG-2",)
    paths = [node.host_path for node in device_edits(request, [NODES]).devices]
    assert paths[:3] == ["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap21", "/dev/nvidia-caps/nvidia-cap22"]


def test_the_order_in_which_strategies_are_given_does_not_matter() -> None:
    """Every combination of the five is the same in any order, sets the variable once, and has what each brings."""
    for count in range(len(STRATEGIES) + 1):
        for chosen in itertools.combinations(DeviceListStrategy, count):
            found = edits(*chosen)
            assert edits(*reversed(chosen)) == found
            assert [name for name, _ in found.env] == [VISIBLE]
            assert bool(found.mounts) == (MOUNTS in chosen)
            assert bool(found.devices) == (NODES in chosen)
            assert bool(found.annotations) == (ANNOTATIONS in chosen)
            assert bool(found.cdi_devices) == (CRI in chosen)


@pytest.mark.parametrize("uid", ["0f9f5f0e-8b3c-4e6f-9a51-52d7a8c1b2d3", "3f2a" * 8])
def test_the_annotations_key_is_one_that_cdi_takes(uid: str) -> None:
    """At most 63 characters, letters and digits at both ends; a static pod's UID has no dashes. Containers differ in it."""
    policy = EditPolicy(names=NAMES, config=isolation_config(), isolation="none", strategies=(ANNOTATIONS,))

    def key_of(inner: ContainerSpec) -> str:
        found = edits_for(pod("p", inner, uid=uid), inner, inventory().gpus, policy)
        assert isinstance(found, ContainerEdits)
        [key] = [name for name, _ in found.annotations if name.startswith("cdi.k8s.io/")]
        return key

    keys = {key_of(container(name, cores=10, blocks=1)) for name in ("a" * 63, "b")}
    assert len(keys) == 2
    assert all(LABEL_NAME.fullmatch(key.removeprefix("cdi.k8s.io/")) for key in keys)


@pytest.mark.parametrize(
    ("strategies", "words"),
    [
        ([ENVVAR], []),
        ([ENVVAR, NODES], []),
        ([MOUNTS, NODES], []),
        ([ANNOTATIONS, CRI], []),
        ([CRI, NODES], []),
        ([ENVVAR, MOUNTS], ["volume-mounts wins"]),
        ([ENVVAR, CRI], ["envvar and cdi-cri ask two programs"]),
        ([MOUNTS, ANNOTATIONS], ["volume-mounts and cdi-annotations ask two programs"]),
        (list(DeviceListStrategy), ["volume-mounts wins", "ask two programs"]),
    ],
)
def test_strategies_that_contradict_each_other_are_reported(
    strategies: list[DeviceListStrategy], words: list[str]
) -> None:
    """Each contradiction once, with what to drop; what goes together is not reported."""
    found = strategy_warnings(strategies)
    assert len(found) == len(words)
    assert all(name in text for name, text in zip(words, found, strict=True))


def test_device_nodes_alone_are_reported_where_they_are_not_enough() -> None:
    """Without libraries from anywhere, or without nodes at all; with another strategy, that one brings them."""
    assert "no libraries" in strategy_warnings([NODES], mounts_driver=False)[0]
    assert "no device nodes" in strategy_warnings([NODES], has_gpu_nodes=False)[0]
    assert strategy_warnings([NODES]) == []
    assert strategy_warnings([NODES, CRI], mounts_driver=False, has_gpu_nodes=False) == []
