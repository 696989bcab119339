"""What placement answers, and which requests make sense at all."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.names import CORES_PER_GPU, GpuUuid
from gpushare_agent.model.resources import Request, ResourceNames
from gpushare_agent.placement.lack import describe_request

SharePolicy = Literal["binpack", "spread"]
"""A share goes to the fullest GPU that still fits, or to the emptiest."""

_VALID = f"Ask for 1 to {CORES_PER_GPU - 1} cores with memory (a share of one GPU), or a multiple of {CORES_PER_GPU}"
_VALID_SHARING = f"{_VALID} (whole GPUs, memory optional)."
_VALID_WHOLE = f"Ask for a multiple of {CORES_PER_GPU} cores (whole GPUs), or use a node that shares its GPUs."


class Placed(Struct, frozen=True, kw_only=True):
    """The chosen GPUs by index. `policy` is one of share, memory, fragment, link, hint, must-include."""

    gpus: tuple[GpuUuid, ...]
    policy: str
    explanation: str


def validate_request(request: Request, names: ResourceNames, *, share_mode: bool) -> Refused | None:
    """Says what is wrong with a request whatever the node has, None where nothing is."""
    cores, blocks = request.cores, request.blocks
    reason, cure = RefusalReason.INVALID_REQUEST, _VALID_SHARING if share_mode else _VALID_WHOLE
    if request.units and (cores or blocks):
        others = " and ".join(name for name, count in ((names.vcore, cores), (names.vmemory, blocks)) if count)
        problem = (
            f"and {others} cannot be asked for by one container: the first is memory alone, the others are a share of"
        )
        problem, cure = f"{problem} compute and memory", "Ask for one or the other."
    elif cores < 0 or blocks < 0:
        problem = "is not possible: amounts cannot be negative"
    elif not cores and not request.units:
        problem = "asks for memory without cores" if blocks else "asks for nothing of a GPU"
    elif cores > CORES_PER_GPU and cores % CORES_PER_GPU:
        lower = cores // CORES_PER_GPU * CORES_PER_GPU
        problem = "is neither a share of one GPU nor whole GPUs; the next valid numbers of cores are"
        problem = f"{problem} {lower} and {lower + CORES_PER_GPU}"
    elif cores < CORES_PER_GPU and not share_mode:
        problem, cure = "is a share of a GPU, and sharing is switched off on this node", _VALID_WHOLE
        reason = RefusalReason.SHARING_DISABLED
    elif 0 < cores < CORES_PER_GPU and not blocks:
        problem = f"is a share of a GPU without memory: add the memory, in blocks of {names.memory_block_mib} MiB"
    else:
        return None
    return Refused(reason=reason, detail=f"{describe_request(request, names)} {problem}. {cure}")
