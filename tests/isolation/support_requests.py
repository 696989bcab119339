"""What isolations are asked for: the edits of one container, with its shares of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from gpushare_agent.agent.isolation import GpuShare, IsolationRequest
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.settings.sections import LibgpushareSettings, MpsSettings
from tests.support_core import container, inventory, isolation_config

UID = PodUid("11111111-2222-3333-4444-555555555555")
GPUS = inventory(3, memory_mib=24 * 1024).gpus
MPS = MpsSettings(pipe_directory=Path("/root/nvidia-mps"), shm_directory=Path("/dev/shm"))
CONFIG = isolation_config(libgpushare=LibgpushareSettings(directory=Path("/own")), mps=MPS)


def request(
    cores: int = 30, memory_mib: int = 6144, *, gpus: Sequence[Gpu] = GPUS[:1], is_whole: bool = False, **changes: Any
) -> IsolationRequest:
    """So much of each GPU, a quarter of its memory; `changes` are of the request."""
    shares = tuple(GpuShare(gpu=gpu, cores=cores, memory_mib=memory_mib, is_whole=is_whole) for gpu in gpus)
    made = IsolationRequest(pod_uid=UID, container=container("cuda"), shares=shares, config=CONFIG)
    return replace(made, **changes)
