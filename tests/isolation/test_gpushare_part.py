"""Isolation gpushare as the agent joins it: the shares that it keeps, and a live resize."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.isolation.gpushare.format import CONFIG_NAME, USAGE_NAME, GpuLimits
from gpushare_agent.agent.isolation.gpushare.observed import ObservedContainers
from gpushare_agent.agent.isolation.gpushare.part import GpusharePart
from gpushare_agent.agent.isolation.kept import ProbeResult, ProbeState
from gpushare_agent.core.model.allocations import ContainerKey, ResizedShare, ShareSize
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.names import ISOLATION_ANNOTATION, MIB, PodUid
from gpushare_agent.core.model.resources import ResourceKind
from gpushare_agent.core.settings.settings import load_settings
from tests.isolation.support_host import add_share, host_of
from tests.isolation.support_library import fake_library
from tests.isolation.support_requests import UID
from tests.support_core import inventory
from tests.support_node import node_of

ELSEWHERE, WHOLE = (PodUid(f"{one}1111111-2222-3333-4444-555555555555") for one in (2, 3))
KEY = ContainerKey(UID, "main")


@pytest.fixture
def node(short_dir: Path) -> Any:
    flags = [
        *("--driver=simulated", "--isolation=gpushare", "--isolations-allowed=none"),
        *(f"--libgpushare.library={fake_library(short_dir / 'a.so')}", f"--libgpushare.directory={short_dir / 'own'}"),
        f"--virtual-manager-path={short_dir / 'vm'}",
    ]
    return node_of(inventory(2), settings=load_settings(flags, {}).settings)


@pytest.fixture
def part(node: Any) -> GpusharePart:
    return GpusharePart(host_of(node))


def kept(part: GpusharePart) -> Mapping[ContainerKey, tuple[GpuLimits, ...]]:
    observed = part.services["gpushare observed"]
    assert isinstance(observed, ObservedContainers)
    return observed.shares()


async def test_shares_under_this_isolation_alone_are_kept_and_made_again_only_after_a_change(
    node: Any, part: GpusharePart
) -> None:
    """By the pod's annotation of now. A pod that is not known yet has none to go by; a whole GPU has no limits. Another
    change of a pod leaves the mapping the same, by which its readers know that nothing is to be done."""
    add_share(node, UID)
    add_share(node, ELSEWHERE, 20, 0, **{ISOLATION_ANNOTATION: "none"})
    add_share(node, WHOLE, 100, 0)
    found = kept(part)
    assert found == {KEY: (GpuLimits(uuid="GPU-0", memory_bytes=2048 * MIB, cores=3000),)}
    known = node.pods.pods()
    node.pods.replace_all([one for one in known if one.uid != UID])
    assert kept(part) is found and not part._seen._is_awaited.is_set()
    node.pods.replace_all([replace(one, annotations={**one.annotations, "other": "x"}) for one in known])
    part.changed(UID)
    assert kept(part) is found
    part._seen._is_awaited.clear()
    node.pods.replace_all([one for one in known if one.uid != UID])
    part.changed(UID)
    assert kept(part) == {} and part._seen._is_awaited.is_set()
    node.pods.replace_all(known)
    node.inventory.current = inventory(2)
    assert kept(part) == found
    # A pod that ends while the GPUs become others.
    node.cache.release(KEY)
    part.changed(UID)
    node.inventory.current = inventory(2)
    assert kept(part) == {} and not part._keys


class Probed:
    """What the probe has found."""

    result: ProbeResult | None = None

    def context_bytes(self, gpu: Gpu) -> int:
        return 520 * MIB if self.result is not None else 0


async def test_what_the_probe_found_of_a_context_is_written_to_running_shares(node: Any, part: GpusharePart) -> None:
    probed = part._probe = Probed()  # type: ignore[assignment]
    add_share(node, UID)
    assert kept(part)[KEY][0].context_bytes == 0
    probed.result = ProbeResult(state=ProbeState.PASSED, text="held", driver_version="580", at=1.0)
    assert kept(part)[KEY][0].context_bytes == 520 * MIB
    assert kept(part) is kept(part)


async def test_a_share_that_shrinks_below_what_is_held_says_by_how_much(node: Any, part: GpusharePart) -> None:
    """The new limits are written all the same."""
    share = add_share(node, UID)
    assert await part.prepare([KEY]) is None
    directory = node.settings.virtual_manager.path / UID / "main"
    with (directory / USAGE_NAME).open("r+b") as file:
        file.seek(512 + 8)
        file.write(struct.pack("q", 1500 * MIB))
    assert await part.enforce(share) == ""
    size = ShareSize(cores=30, memory=8)
    node.cache.charge(
        ResizedShare(
            key=KEY, gpu=share.gpus[0], kind=ResourceKind.VCORE, allocated=size, target=ShareSize(cores=20, memory=4),
            charged=size,
        )
    )  # fmt: skip
    node.cache.resize(KEY)
    assert await part.enforce(node.cache.get(KEY)) == "its processes still have 476 MiB more"
    config = (directory / CONFIG_NAME).read_bytes()
    assert struct.unpack_from("=QI", config, 512 + 56) == (1024 * MIB, 2000)


async def test_a_gpu_that_is_not_known_is_the_reason_and_nothing_is_written(node: Any, part: GpusharePart) -> None:
    share = add_share(node, UID)
    node.inventory.current = inventory(0)
    assert "a GPU's memory is not known" in await part.enforce(share)
    assert not node.settings.virtual_manager.path.exists()
