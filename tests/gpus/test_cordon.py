"""Naming a GPU by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.gpus.control_server import select_gpus
from gpushare_agent.core.model.names import GpuUuid
from tests.support_core import inventory, mig_instance

UUIDS = ("GPU-11aa-1", "GPU-11ab-2", "GPU-2ccc-3")
GPUS = [replace(gpu, uuid=GpuUuid(uuid)) for gpu, uuid in zip(inventory(3).gpus, UUIDS, strict=True)]


@pytest.mark.parametrize(
    ("text", "indexes"),
    [
        ("0", [0]),
        (" 02 ", [2]),
        ("3", []),
        ("11", []),
        ("GPU-11aa-1", [0]),
        ("gpu-11AA-1", [0]),
        ("2c", [2]),
        ("GPU-11a", [0, 1]),
        ("11a", [0, 1]),
        ("GPU-", [0, 1, 2]),
        ("", []),
        ("²", []),
        ("GPU-9", []),
    ],
)
def test_a_gpu_is_an_index_a_uuid_or_its_beginning(text: str, indexes: list[int]) -> None:
    """Several are left to the caller to distinguish; digits alone are never a UUID."""
    assert [gpu.index for gpu in select_gpus(text, GPUS)] == indexes


def test_a_mig_instance_is_named_as_nvidia_does() -> None:
    """By its GPU's index and its number; one that is gone has no such name any more. An index alone is the agent's."""
    made, place = mig_instance(4, 0, 1), mig_instance(5, 0, 1).mig
    assert place is not None
    gone = replace(mig_instance(5, 0, 1), mig=replace(place, is_gone=True))
    assert [gpu.index for gpu in select_gpus("0:1", [*GPUS, gone, made])] == [4]
    assert [gpu.index for gpu in select_gpus("mig-5", [*GPUS, gone, made])] == [5]
    assert select_gpus("0:2", [made]) == []


def test_a_whole_uuid_wins_over_a_longer_one_that_begins_so() -> None:
    """What is named in full is meant."""
    longer = replace(GPUS[1], uuid=GpuUuid(UUIDS[0] + "-x"))
    assert select_gpus(UUIDS[0], [longer, GPUS[0]]) == [GPUS[0]]
