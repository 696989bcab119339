"""What placement is asked and answers, and which requests make sense at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.names import CORES_PER_GPU, GpuUuid

SharePolicy = Literal["binpack", "spread"]
"""A share goes to the fullest GPU that still fits, or to the emptiest."""

_VALID = f"Ask for 1 to {CORES_PER_GPU - 1} cores with memory (a share of one GPU), or a multiple of {CORES_PER_GPU}"
_VALID_SHARING = f"{_VALID} (whole GPUs, memory optional)."
_VALID_WHOLE = f"Ask for a multiple of {CORES_PER_GPU} cores (whole GPUs), or use a node that shares its GPUs."


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRequest:
    """What one container asks for.

    `hint` holds GPU indexes from the scheduler extender's annotation, which any tenant can write. `must_gpus` are the
    GPUs that the kubelet's must-include IDs are on.
    """

    cores: int
    blocks: int
    hint: tuple[int, ...] = ()
    must_gpus: tuple[GpuUuid, ...] = ()

    @property
    def whole_gpus(self) -> int:
        """How many whole GPUs are wanted, 0 for a share."""
        return self.cores // CORES_PER_GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The chosen GPUs by index. `policy` is one of share, fragment, link, hint, must-include."""

    gpus: tuple[GpuUuid, ...]
    policy: str
    explanation: str


def validate_request(cores: int, blocks: int, *, share_mode: bool, memory_block_mib: int) -> Refused | None:
    """Says what is wrong with a request whatever the node has, None where nothing is."""
    asked = describe_request(cores, blocks, memory_block_mib)
    valid = _VALID_SHARING if share_mode else _VALID_WHOLE
    if cores < 0 or blocks < 0:
        return _invalid(f"{asked} is not possible: amounts cannot be negative. {valid}")
    if cores == 0:
        what = "asks for memory without cores" if blocks else "asks for nothing of a GPU"
        return _invalid(f"{asked} {what}. {valid}")
    if cores > CORES_PER_GPU and cores % CORES_PER_GPU:
        lower = cores // CORES_PER_GPU * CORES_PER_GPU
        return _invalid(
            f"{asked} is neither a share of one GPU nor whole GPUs; the next valid numbers of cores are {lower} and "
            f"{lower + CORES_PER_GPU}. {valid}"
        )
    if cores < CORES_PER_GPU and not share_mode:
        return Refused(
            reason=RefusalReason.SHARING_DISABLED,
            detail=f"{asked} is a share of a GPU, and sharing is switched off on this node. {_VALID_WHOLE}",
        )
    if cores < CORES_PER_GPU and blocks == 0:
        return _invalid(
            f"{asked} is a share of a GPU without memory: add the memory, in blocks of {memory_block_mib} MiB. {valid}"
        )
    return None


def describe_request(cores: int, blocks: int, memory_block_mib: int) -> str:
    """The request as every refusal begins: `40 cores with 16 memory blocks (4 GiB)`; whole GPUs may go without."""
    return f"{cores} cores with {describe_blocks(blocks, memory_block_mib)}" if blocks else f"{cores} cores"


def describe_blocks(blocks: int, memory_block_mib: int) -> str:
    return f"{blocks} memory blocks ({memory_text(blocks * memory_block_mib)})"


def memory_text(size_mib: int) -> str:
    return f"{size_mib} MiB" if 0 < size_mib < 1024 else f"{size_mib / 1024:.4g} GiB"


def _invalid(detail: str) -> Refused:
    return Refused(reason=RefusalReason.INVALID_REQUEST, detail=detail)
