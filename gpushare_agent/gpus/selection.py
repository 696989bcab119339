"""Which GPU a person means: an index, a UUID, or the beginning of one. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gpushare_agent.model.gpus import Gpu

PREFIX = "GPU-"


def gpus_meant(text: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    """One GPU where it is clear, none where no GPU is meant, several where more of the UUID is needed.

    Digits alone are an index. A UUID may be without its `GPU-`, in any case of letters, and cut short.
    """
    wanted = text.strip().lower()
    if not wanted:
        return []
    if wanted.isdecimal():
        return [gpu for gpu in gpus if str(gpu.index) == (wanted.lstrip("0") or "0")]
    exact = [gpu for gpu in gpus if gpu.uuid.lower() == wanted]
    begins = [gpu for gpu in gpus if gpu.uuid.lower().startswith((wanted, PREFIX.lower() + wanted))]
    return exact or sorted(begins, key=lambda gpu: gpu.index)
