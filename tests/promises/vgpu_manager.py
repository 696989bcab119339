"""vgpu-manager 3d7f66d (coldzerofear/vgpu-manager): its device plugin, webhook and scheduler."""

from __future__ import annotations

from tests.promises.promise import Promises, different, kept, not_kept

_POD = "tests/extender/test_vgpu_names.py"
_REFUSED = f"{_POD}::test_what_cannot_be_said_here_is_refused_with_what_to_write"

PROMISES: Promises = {
    "Pods": (
        kept(
            "README.md",
            "`nvidia.com/vgpu-number: 1`, `vgpu-cores: 10`, `vgpu-memory: 1024`",
            f"{_POD}::test_a_request_becomes_cores_and_blocks",
            "`vcuda-core: 10`, `vcuda-memory: 4`: MiB become whole blocks",
        ),
        different(
            "pkg/device/allocator/allocator.go",
            "`vgpu-memory` without `vgpu-cores`: compute is not limited",
            "1 core, and 100 as ceiling: not limited while nobody else uses the GPU",
            f"{_POD}::test_compute_of_which_nothing_is_said_is_limited_only_where_others_use_it",
        ),
        not_kept(
            "README.md",
            "`vgpu-number: 2` with cores or memory, parts of two GPUs",
            "denied: a share is of one GPU. A [ResourceClaim](share-a-gpu-by-a-claim.md) may have two",
            _REFUSED,
        ),
        not_kept(
            "pkg/util/consts.go",
            "the annotations `nvidia.com/include-gpu-type`, `exclude-gpu-type`, `include-gpu-uuid`, `exclude-gpu-uuid`",
            "denied: name the nodes by the label `gpushare-agent/gpu.product`",
            _REFUSED,
        ),
        not_kept(
            "pkg/util/consts.go",
            "`nvidia.com/vgpu-compute-policy`, `device-topology-mode`, `memory-scheduler-policy`",
            "ignored with a warning: `tencent.com/vcuda-core-limit`, links and memory that is there are followed always",
            f"{_POD}::test_what_has_no_effect_is_warned_of",
        ),
        not_kept(
            "how_to_use_gpu_virtual_memory.md", "virtual memory beyond the limit", "an allocation beyond it fails"
        ),
    ),
    "Nodes": (
        different(
            "README.md",
            "the label `vgpu-manager=device-plugin`",
            "`nvidia-device-enable=enable`",
            "tests/manifests/test_manifests.py::test_the_agent_runs_on_the_nodes_with_gpu_managers_label",
        ),
    ),
}
