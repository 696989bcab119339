"""gpu-admission (tkestack/gpu-admission), with the quota that its later version has no more."""

from __future__ import annotations

from tests.promises.promise import Promises, kept

PROMISES: Promises = {
    "Quota": (
        kept(
            "GPU quota limitation, 3",
            "ConfigMap `gpuquota` with the key `gpu_quota`",
            "tests/extender/test_quota.py::test_gpu_admissions_own_example_is_read",
        ),
    ),
}
