"""Requests of the control socket: which GPU the operator names, and how a GPU is shown in the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpushare_agent.gpus.decisions.values import GpuHealth
from gpushare_agent.model.gpus import Gpu

PREFIX = "GPU-"


def select_gpus(text: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    """One GPU where `text` is unambiguous, none where it matches no GPU, several where it is too short a prefix.

    Digits alone are an index, `0:1` is NVIDIA's name of a MIG instance. A UUID may lack its `GPU-`,
    may be in any case, and may be cut short.
    """
    wanted = text.strip().lower()
    if not wanted:
        return []
    if wanted.isdecimal():
        return [gpu for gpu in gpus if str(gpu.index) == (wanted.lstrip("0") or "0")]
    if ":" in wanted:
        return [gpu for gpu in gpus if gpu.mig is not None and not gpu.mig.is_gone and gpu.label == wanted]
    exact = [gpu for gpu in gpus if gpu.uuid.lower() == wanted]
    begins = [gpu for gpu in gpus if gpu.uuid.lower().startswith((wanted, PREFIX.lower() + wanted))]
    return exact or sorted(begins, key=lambda gpu: gpu.index)


def gpu_document(gpu: Gpu, health: GpuHealth, *, unhealthy_reason: str, probes: int) -> dict[str, Any]:
    """`unhealthy_reason` without the cordon; `probes` is how many polls must pass before the GPU is offered again."""
    return {
        "index": gpu.index,
        "label": gpu.label,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "is_healthy": gpu.is_healthy,
        "reason": unhealthy_reason,
        "state": health.state.value,
        "cause": health.cause,
        "passes": health.passes,
        "probes": probes,
        "relapses": health.relapses,
        "cordoned": health.cordon,
    }
