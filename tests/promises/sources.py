"""The programs whose promises are listed; a name is that of its block in a page, `promises_NAME`."""

from __future__ import annotations

from tests.promises import gpu_admission, gpu_manager, nvidia
from tests.promises.promise import Promises

SOURCES: dict[str, Promises] = {
    "gpu_manager": gpu_manager.PROMISES,
    "gpu_admission": gpu_admission.PROMISES,
    "nvidia": nvidia.PROMISES,
}
