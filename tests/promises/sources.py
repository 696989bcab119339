"""The programs whose promises are listed; a name is that of its block in a page, `promises_NAME`."""

from __future__ import annotations

from tests.promises import gpu_admission, gpu_manager, gpushare, hami, nvidia, nvidia_dra, vgpu_manager
from tests.promises.promise import Promises

SOURCES: dict[str, Promises] = {
    "gpu_manager": gpu_manager.PROMISES,
    "gpu_admission": gpu_admission.PROMISES,
    "gpushare": gpushare.PROMISES,
    "nvidia": nvidia.PROMISES,
    "nvidia_dra": nvidia_dra.PROMISES,
    "hami": hami.PROMISES,
    "vgpu_manager": vgpu_manager.PROMISES,
}
