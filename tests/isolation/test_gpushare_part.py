"""Isolation gpushare as the agent joins it: the shares that it keeps, and a live resize."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.isolation.gpushare.format import CONFIG_NAME, USAGE_NAME, GpuLimits
from gpushare_agent.agent.isolation.gpushare.observed import ObservedContainers
from gpushare_agent.agent.isolation.gpushare.part import GpusharePart
from gpushare_agent.agent.isolation.kept import ProbeResult, ProbeState
from gpushare_agent.agent.isolation.part import IsolationHost
from gpushare_agent.core.model.allocations import Allocation, ContainerKey, ShareSize
from gpushare_agent.core.model.gpus import Gpu, GpuInventory
from gpushare_agent.core.model.names import ISOLATION_ANNOTATION, MIB, PodUid
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.settings.settings import Settings, load_settings
from tests.isolation.support_library import fake_library
from tests.isolation.support_requests import UID
from tests.support_core import NAMES, allocation, container, ids, inventory, pod

ELSEWHERE, WHOLE = (PodUid(f"{one}1111111-2222-3333-4444-555555555555") for one in (2, 3))
KEY = ContainerKey(UID, "main")


class Node:
    """What the part reads of a node; its allocations are the test's. The claims' pods are the node itself."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.names = settings, NAMES
        self.cache: dict[ContainerKey, Allocation] = {}
        self.pods: dict[PodUid, Pod] = {}
        self.found: GpuInventory = inventory(2)
        self.claim_pods = self

    def add(self, one: Pod, cores: int, blocks: int) -> Allocation:
        made = allocation(one, "main", ids(0, range(cores)), ids(0, range(blocks)))
        self.pods[one.uid], self.cache[made.key] = one, made
        return made

    def gpus(self) -> GpuInventory:
        return self.found

    def shares(self) -> Mapping[ContainerKey, Allocation]:
        return self.cache

    def shares_of(self, uid: PodUid) -> Mapping[ContainerKey, Allocation]:
        return {key: one for key, one in self.cache.items() if key.pod_uid == uid}

    def parts(self, key: ContainerKey) -> Sequence[Allocation]:
        return (self.cache[key],) if key in self.cache else ()


class Host:
    chosen, uses, share_of = IsolationHost.chosen, IsolationHost.uses, IsolationHost.share_of
    driver = None

    def __init__(self, directory: Path) -> None:
        library = fake_library(directory / "libgpushare.so")
        flags = [
            *("--driver=simulated", "--isolation=gpushare", "--isolations-allowed=none"),
            *(f"--libgpushare.library={library}", f"--libgpushare.directory={directory / 'own'}"),
            f"--virtual-manager-path={directory / 'vm'}",
        ]
        self.node = Node(load_settings(flags, {}).settings)


@pytest.fixture
def host(short_dir: Path) -> Host:
    return Host(short_dir)


def part_of(host: Host) -> GpusharePart:
    return GpusharePart(host)  # type: ignore[arg-type]


def kept(part: GpusharePart) -> Mapping[ContainerKey, tuple[GpuLimits, ...]]:
    observed = part.services["gpushare observed"]
    assert isinstance(observed, ObservedContainers)
    return observed.shares()


async def test_shares_under_this_isolation_alone_are_kept_and_made_again_only_after_a_change(host: Host) -> None:
    """By the pod's annotation of now. A pod that is not known yet has none to go by; a whole GPU has no limits."""
    node, part = host.node, part_of(host)
    node.add(pod("share", container(cores=30, blocks=8), uid=UID), 30, 8)
    node.add(pod("free", container(cores=20), uid=ELSEWHERE, annotations={ISOLATION_ANNOTATION: "none"}), 20, 0)
    node.add(pod("whole", container(cores=100), uid=WHOLE), 100, 0)
    found = kept(part)
    assert found == {KEY: (GpuLimits(uuid="GPU-0", memory_bytes=2048 * MIB, cores=3000),)}
    del node.pods[UID]
    assert kept(part) is found
    part.changed(UID)
    assert kept(part) == {}
    node.pods[UID] = pod("share", container(cores=30, blocks=8), uid=UID)
    node.found = inventory(2)
    assert kept(part) == found
    # A pod that ends while the GPUs become others.
    del node.cache[KEY]
    part.changed(UID)
    node.found = inventory(2)
    assert kept(part) == {} and not part._keys


class Probed:
    """What the probe has found."""

    result: ProbeResult | None = None

    def context_bytes(self, gpu: Gpu) -> int:
        return 520 * MIB if self.result is not None else 0


async def test_what_the_probe_found_of_a_context_is_written_to_running_shares(host: Host) -> None:
    node, part, probed = host.node, part_of(host), Probed()
    part._probe = probed  # type: ignore[assignment]
    node.add(pod("share", container(cores=30, blocks=8), uid=UID), 30, 8)
    assert kept(part)[KEY][0].context_bytes == 0
    probed.result = ProbeResult(state=ProbeState.PASSED, text="held", driver_version="580", at=1.0)
    assert kept(part)[KEY][0].context_bytes == 520 * MIB
    assert kept(part) is kept(part)


async def test_a_share_that_shrinks_below_what_is_held_says_by_how_much(host: Host) -> None:
    """The new limits are written all the same."""
    node, part = host.node, part_of(host)
    share = node.add(pod("share", container(cores=30, blocks=8), uid=UID), 30, 8)
    assert await part.prepare([KEY]) is None
    directory = node.settings.virtual_manager.path / UID / "main"
    with (directory / USAGE_NAME).open("r+b") as file:
        file.seek(512 + 8)
        file.write(struct.pack("q", 1500 * MIB))
    assert await part.enforce(share) == ""
    node.cache[KEY] = replace(share, resized_to=ShareSize(cores=20, memory=4))
    assert await part.enforce(node.cache[KEY]) == "its processes still have 476 MiB more"
    config = (directory / CONFIG_NAME).read_bytes()
    assert struct.unpack_from("=QI", config, 512 + 56) == (1024 * MIB, 2000)


async def test_a_gpu_that_is_not_known_is_the_reason_and_nothing_is_written(host: Host) -> None:
    share = host.node.add(pod("share", container(cores=30, blocks=8), uid=UID), 30, 8)
    host.node.found = inventory(0)
    assert "a GPU's memory is not known" in await part_of(host).enforce(share)
    assert not host.node.settings.virtual_manager.path.exists()
