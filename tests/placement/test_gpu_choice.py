"""Which GPUs HAMi's and vgpu-manager's annotations accept, and what is said where they leave none."""

from __future__ import annotations

from fractions import Fraction

import pytest

from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.names import MAX_ANNOTATION_CHARS, GpuUuid
from gpushare_agent.core.model.resources import Request
from gpushare_agent.core.placement import GpuAccount, Placed, place
from gpushare_agent.core.placement.gpu_account import Cause, capacity_of
from gpushare_agent.core.placement.gpu_choice import accepting, choice_of
from tests.support_core import NAMES, inventory

MODELS = ("Tesla P4", "NVIDIA A100-SXM4-40GB", "NVIDIA A10")
TOPOLOGY = inventory(3).topology


def gpus(**annotations: str) -> list[GpuAccount]:
    """By annotations of nvidia.com with `_` for `-`."""
    made = [
        GpuAccount(index=n, uuid=GpuUuid(f"GPU-{n}a"), name=name, memory_mib=16384) for n, name in enumerate(MODELS)
    ]
    choice = choice_of({f"nvidia.com/{name.replace('_', '-')}": value for name, value in annotations.items()})
    return list(accepting(choice, made))


def accepted(**annotations: str) -> list[int]:
    return [gpu.index for gpu in gpus(**annotations) if gpu.is_accepted]


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({}, [0, 1, 2]),
        ({"use_gputype": "A100"}, [1]),
        ({"use_gputype": "a10"}, [1, 2]),
        ({"use_gputype": "NVIDIA-Tesla P4"}, [0]),
        ({"use_gputype": " P4 , sxm4"}, [0, 1]),
        ({"use_gputype": " , "}, [0, 1, 2]),
        ({"use_gputype": ""}, [0, 1, 2]),
        ({"use_gputype": "H100"}, []),
        ({"nouse_gputype": "A100,P4"}, [2]),
        ({"use_gputype": "A10", "nouse_gputype": "A100"}, [2]),
        ({"use_gpuuuid": "GPU-1a, GPU-2a"}, [1, 2]),
        ({"nouse_gpuuuid": "gpu-1a"}, [0, 2]),
        ({"use_gputype": "A10", "use_gpuuuid": "GPU-0a,GPU-1a"}, [1]),
        ({"include_gpu_type": "a100"}, [1]),
        ({"exclude_gpu_type": "a100"}, [0, 2]),
        ({"include_gpu_uuid": "GPU-2"}, [2]),
        ({"exclude_gpu_uuid": "GPU-2"}, [0, 1]),
        ({"use_gputype": "A10," + "x" * MAX_ANNOTATION_CHARS}, []),
    ],
)
def test_a_gpu_is_accepted_as_by_hami_and_vgpu_manager(annotations: dict[str, str], expected: list[int]) -> None:
    """Of a list too long to be read nothing is known, so no GPU is."""
    assert accepted(**annotations) == expected


@pytest.mark.parametrize("request_", [Request(cores=10, blocks=4), Request(cores=100), Request(units=4)])
def test_placement_takes_no_gpu_that_is_left_out(request_: Request) -> None:
    """And says why where none is left, which the end of no pod would change."""
    placed = place(request_, gpus(nouse_gputype="P4,A100"), TOPOLOGY, share_policy="binpack", names=NAMES)
    assert isinstance(placed, Placed) and placed.gpus == ("GPU-2a",)
    refused = place(request_, gpus(use_gputype="H100"), TOPOLOGY, share_policy="binpack", names=NAMES)
    assert isinstance(refused, Refused)
    assert refused.detail.endswith(
        ": the pod's annotations leave out all healthy GPUs of the node. Name GPUs of this node in them, or use another"
        " node."
    )
    lack = capacity_of(gpus(use_gputype="H100")).lack(request_)
    assert lack is not None and lack.cause is Cause.LEFT_OUT and lack.is_lasting


def test_what_the_others_lack_is_said_of_them() -> None:
    refused = place(Request(cores=300), gpus(use_gputype="A10"), TOPOLOGY, share_policy="binpack", names=NAMES)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.NOT_ENOUGH_CORES
    assert (
        "the node has 2 healthy GPUs, 3 whole wanted, of those that the pod's annotations accept (1 left out)"
        in refused.detail
    )


def test_a_replica_of_a_gpu_that_is_left_out_is_refused() -> None:
    """Units under NVIDIA's names too."""
    left_out, *_ = gpus(use_gputype="A100")
    lack = left_out.lack(Request(part=Fraction(1, 4)))
    assert lack is not None and lack.of_gpu() == "left out by the pod's annotations"
